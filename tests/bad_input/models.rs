//! Folders that hold no model, or not the one that their config names.

use serde_json::{Map, Value, json};

use super::{train_family, training};
use crate::support::Workbench;
use crate::support::outcome::files;

#[test]
fn model_folders() {
    let bench = Workbench::new();
    training(&bench, &[]).expect(0);
    let generate = |model: &str, parts: &[&str]| {
        bench.tidemill(&["generate", "--model", model, "--prompt", "a"]).refused(1, parts);
        let from = format!("model={{from = \"{model}\"}}");
        let train = ["train", "run.toml", "-w", "1", "--set", &from, "--set", "run.dir=other"];
        bench.tidemill(&train).failed(1, &[model]);
        assert!(!bench.path("other/checkpoints").exists());
    };
    generate("nowhere", &["nowhere", "expected a checkpoint"]);
    generate("data-text", &["data-text", "expected a checkpoint"]);
    generate("run.toml", &["run.toml"]);
    // A Hugging Face folder has no checksums, so its files are checked by their contents alone.
    let model = bench.path("model");
    let good = files(&bench.path("run/checkpoints/step-00000005"));
    let write = |name: &str, bytes: &[u8]| {
        std::fs::create_dir_all(&model).unwrap();
        for (name, bytes) in &good {
            if !["trainer.json", "optimizer.safetensors"].contains(&name.as_str()) {
                std::fs::write(model.join(name), bytes).unwrap();
            }
        }
        std::fs::write(model.join(name), bytes).unwrap();
    };
    let weights = &good["model.safetensors"];
    write("config.json", b"{");
    generate("model", &["model/config.json"]);
    for (config, found) in [
        ("{\"model_type\": \"gpt2\"}", "found \"gpt2\""),
        ("{\"model_type\": 3}", "found 3"),
        ("{}", "found nothing"),
    ] {
        let expected = "model_type: expected \"mamba\", \"mamba2\", \"mpt\", \"gpt_neo\", \"llama\", \"mistral\", \"qwen2\", \"qwen3\" or \"tidemill_hybrid\"";
        write("config.json", config.as_bytes());
        generate("model", &["model/config.json", expected, found]);
    }
    write("config.json", b"[]");
    generate("model", &["model/config.json", "expected a JSON object, found a list"]);
    let config = String::from_utf8_lossy(&good["config.json"])
        .replace("\"hidden_size\": 20", "\"hidden_size\": 24");
    write("config.json", config.as_bytes());
    generate("model", &["model"]);
    for bad in [&weights[..weights.len() - 3], &weights[..100], &[], &[0xff; 64]] {
        write("model.safetensors", bad);
        generate("model", &["model/model.safetensors"]);
    }
    write("model.safetensors", weights);
    std::fs::remove_file(model.join("model.safetensors")).unwrap();
    generate("model", &["model: ", "model.safetensors"]);
    write("tokenizer.json", b"{}");
    bench
        .tidemill(&["generate", "--model", "model", "--prompt", "a"])
        .refused(1, &["model/tokenizer.json"]);
    write("model.safetensors", weights);
    let cases: [(&[&str], &str); 2] =
        [(&["--tokens", "259"], "259"), (&["--prompt", ""], "prompt")];
    for (arguments, part) in cases {
        bench.tidemill(&[&["generate", "--model", "run"], arguments].concat()).refused(1, &[part]);
    }
}

/// Impossible values in the config of each family, and the errors for them.
const CONFIGS: &[(&str, &str, &str, &str)] = &[
    ("foundry", "/n_heads", "3", "n_heads: expected a divisor of d_model, which is 16, found 3"),
    ("foundry", "/norm_type", "\"rmsnorm\"", "norm_type: expected \"layernorm\" or"),
    ("foundry", "/logit_scale", "\"half\"", "logit_scale: expected a number above 0 or \"inv_sqrt"),
    ("foundry", "/final_logit_softcapping", "30", "final_logit_softcapping: expected nothing"),
    ("foundry", "/block_overrides", "{}", "block_overrides: expected nothing or null"),
    ("foundry", "/ffn_config", "{\"ffn_type\": \"mptglu\"}", "ffn_type: expected \"mptmlp\""),
    (
        "foundry",
        "/ffn_config",
        "{\"ffn_act_fn\": {\"name\": \"relu\"}}",
        "ffn_act_fn.name: expected \"gelu\", found \"relu\"",
    ),
    ("foundry", "/attn_config", "3", "attn_config: expected a JSON object, found 3"),
    ("foundry", "/attn_config/attn_type", "\"grouped_query_attention\"", "attn_type: expected"),
    ("foundry", "/attn_config/rope", "true", "rope: expected false, found true"),
    ("foundry", "/attn_config/qk_gn", "true", "qk_gn: expected false, found true"),
    ("foundry", "/attn_config/qk_ln", "\"yes\"", "qk_ln: expected true or false, found \"yes\""),
    (
        "foundry",
        "/attn_config/clip_qkv",
        "0",
        "clip_qkv: expected a finite number above 0, found 0",
    ),
    ("foundry", "/attn_config/sliding_window_size", "5", "sliding_window_size: expected -1"),
    ("foundry", "/attn_config/attn_logit_softcapping", "50", "attn_logit_softcapping: expected"),
    ("mpt", "/attn_config/alibi_bias_max", "0", "alibi_bias_max: expected a finite number above 0"),
    ("mpt", "/attn_config/prefix_lm", "true", "prefix_lm: expected false, found true"),
    ("mpt", "/attn_config/rope", "true", "rope: expected false, found true"),
    ("mpt", "/attn_config/attn_uses_sequence_id", "true", "attn_uses_sequence_id: expected false"),
    ("mpt", "/attn_config/attn_pdrop", "0.1", "attn_pdrop: expected 0 (no dropout), found 0.1"),
    (
        "mpt",
        "/embedding_fraction",
        "0.5",
        "embedding_fraction: expected 1 (the whole of a gradient)",
    ),
    ("gpt-neo", "/num_heads", "5", "num_heads: expected a divisor of hidden_size, which is 12"),
    ("gpt-neo", "/activation_function", "\"relu\"", "activation_function: expected \"gelu_new\""),
    (
        "gpt-neo",
        "/attention_types",
        "[[[\"global\"], 2]]",
        "attention_types: expected as many layers as num_layers, which is 3, found 2",
    ),
    ("gpt-neo", "/attention_types", "[[[\"near\"], 3]]", "attention_types: expected lists of"),
    ("gpt-neo", "/attention_layers", "[\"local\"]", "attention_layers: expected the layers of"),
    ("gpt-neo", "/max_position_embeddings", "0", "max_position_embeddings: expected a whole"),
    (
        "llama",
        "/num_key_value_heads",
        "4",
        "num_key_value_heads: expected a divisor of num_attention",
    ),
    ("llama", "/head_dim", "3", "head_dim: expected heads of an even number of columns"),
    ("llama", "/hidden_act", "\"gelu\"", "hidden_act: expected \"silu\", found \"gelu\""),
    ("llama", "/rope_theta", "0", "rope_theta: expected a finite number above 0, found 0"),
    (
        "hybrid",
        "/layer_pattern",
        "\"\"",
        "layer_pattern: expected letters m, s, a and l, found \"\"",
    ),
    ("hybrid", "/layer_pattern", "\"mxa\"", "layer_pattern: expected letters m, s, a and l, found"),
    (
        "hybrid",
        "/layer_pattern",
        "\"mmmma\"",
        "layer_pattern: expected two kinds or more among 4 blocks, found only m",
    ),
    (
        "hybrid",
        "/num_attention_heads",
        "5",
        "num_attention_heads: expected a divisor of hidden_size",
    ),
    ("hybrid", "/num_attention_heads", "null", "num_attention_heads: expected a whole number"),
    (
        "hybrid",
        "/layer_pattern",
        "\"mal\"",
        "num_key_value_heads: expected a whole number from 1 to 262144, found nothing",
    ),
    (
        "hybrid-of-all",
        "/num_key_value_heads",
        "2",
        "num_key_value_heads: expected a divisor of num_attention_heads, which is 3",
    ),
    ("hybrid-of-all", "/head_dim", "3", "head_dim: expected heads of an even number of columns"),
    ("hybrid-of-all", "/mamba2_head_dim", "null", "mamba2_head_dim: expected a whole number"),
    ("hybrid-of-all", "/n_groups", "3", "n_groups: expected a divisor of the 4 heads, found 3"),
    ("mamba2", "/num_heads", "5", "num_heads: expected expand * hidden_size / head_dim"),
    ("mamba2", "/time_step_limit", "[2]", "time_step_limit: expected a list of two numbers"),
    ("mamba", "/hidden_act", "\"relu\"", "hidden_act: expected \"silu\", found \"relu\""),
    ("mamba", "/intermediate_size", "7", "intermediate_size: expected expand * hidden_size = 60"),
];

/// `value` with `json` at `pointer`, whose parent exists.
fn set(value: &mut Value, pointer: &str, json: &str) {
    let (parent, key) = pointer.rsplit_once('/').expect("a pointer");
    let parent = value.pointer_mut(parent).and_then(Value::as_object_mut).expect("an object");
    parent.insert(key.to_owned(), serde_json::from_str(json).expect("JSON"));
}

/// A `.safetensors` file with another header.
pub(super) fn with_header(file: &[u8], change: impl FnOnce(&mut Map<String, Value>)) -> Vec<u8> {
    let (length, rest) = file.split_at(8);
    let length = u64::from_le_bytes(length.try_into().expect("8 bytes")) as usize;
    let (header, data) = rest.split_at(length);
    let mut header: Map<String, Value> = serde_json::from_slice(header).expect("a header");
    change(&mut header);
    let header = Value::Object(header).to_string();
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat()
}

#[test]
fn model_folders_of_every_family() {
    let bench = Workbench::new();
    let tensors = [
        ("mpt", "transformer.blocks.1.attn.Wqkv.weight", "[54, 18]", "transformer"),
        ("foundry", "transformer.blocks.1.attn.q_ln.weight", "[16]", "transformer"),
        ("gpt-neo", "transformer.h.2.mlp.c_fc.bias", "[48]", "transformer"),
        ("llama", "model.layers.1.self_attn.k_proj.bias", "[8]", "model"),
        ("qwen3", "model.layers.1.self_attn.k_norm.weight", "[6]", "model"),
        ("hybrid", "backbone.layers.1.norm_1.weight", "[12]", "backbone"),
        ("hybrid-of-all", "backbone.layers.2.self_attn.k_proj.weight", "[6, 12]", "backbone"),
        ("mamba", "backbone.layers.1.norm.weight", "[20]", "backbone"),
    ];
    for (family, tensor, shape, root) in tensors {
        let run = train_family(&bench, family);
        let folder = bench.path(&run).join("checkpoints/step-00000001");
        let good = files(&folder);
        std::fs::create_dir_all(bench.path("model")).unwrap();
        let (config, weights) = (&good["config.json"], &good["model.safetensors"]);
        let refused = |config: &[u8], weights: &[u8], parts: &[&str]| {
            bench.write("model/config.json", config);
            bench.write("model/model.safetensors", weights);
            let generate = ["generate", "--model", "model", "--tokens", "1"];
            bench.tidemill(&generate).refused(1, parts);
        };
        for (_, pointer, json, expected) in CONFIGS.iter().filter(|(of, ..)| *of == family) {
            let mut changed: Value = serde_json::from_slice(config).unwrap();
            set(&mut changed, pointer, json);
            let expected = format!("tidemill: model/config.json: {expected}");
            refused(changed.to_string().as_bytes(), weights, &[&expected]);
        }
        let missing = with_header(weights, |header| {
            let stored = header.remove(tensor).expect(tensor);
            header.insert(format!("{root}.another"), stored);
        });
        let at = format!("tidemill: model/model.safetensors: tensor {tensor}");
        refused(config, &missing, &[&format!("{at} is missing")]);
        let misshapen = with_header(weights, |header| {
            let shape = header[tensor]["shape"].as_array_mut().expect("a shape");
            shape.insert(0, 1.into());
        });
        refused(config, &misshapen, &[&format!("{at}: expected shape {shape}, found [1, ")]);
        let extra = with_header(weights, |header| {
            let ends = header.values().filter_map(|tensor| tensor["data_offsets"][1].as_u64());
            let end = ends.max().expect("tensors");
            let empty = json!({"dtype": "F32", "shape": [0], "data_offsets": [end, end]});
            header.insert(format!("{root}.extra.weight"), empty);
        });
        let expected = format!("model: tensor {root}.extra.weight is none that this model has");
        refused(config, &extra, &[&expected]);
        // The unchanged folder is a model.
        bench.write("model/model.safetensors", weights);
        let generate = ["generate", "--model", "model", "--tokens", "1", "--max-new-tokens", "1"];
        bench.tidemill(&generate).expect(0);
    }
}
