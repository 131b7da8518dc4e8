//! Model files: a written file reads back to the bit, and a damaged one is refused by name.

#[path = "bodies/fixtures.rs"]
mod fixtures;

use std::collections::BTreeMap;
use std::path::Path;

use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};
use tidemill_kernels::Cpu;
use tidemill_model::hugging_face::{
    CONFIG_FILE, FILE_BYTES, INDEX_FILE, SINGLE_FILE, SafetensorsLayout, TensorFiles, load, save,
    save_in_files,
};

use tidemill_model::{
    GptNeoConfig, LanguageModel, Layout, LlamaConfig, Mamba2Config, MambaConfig, ModelConfig,
    MptConfig, SpecialTokens, Tensor,
};

const EMBEDDING: &str = "backbone.embeddings.weight";
const NORM: &str = "backbone.norm_f.weight";

/// Tensors of a file to be: name, type, shape, bytes.
type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

fn model(tied: bool) -> (LanguageModel<Cpu>, Vec<f32>) {
    let config = MambaConfig { tie_embeddings: tied, ..MambaConfig::new(11, 6, 1) };
    let model = LanguageModel::<Cpu>::new(&config).expect("sizes");
    let arena = model.initialize(3);
    (model, arena)
}

fn tensors(layout: &Layout, arena: &[f32]) -> Tensors {
    let entry = |tensor: &Tensor| {
        let values = arena[tensor.range()].iter();
        let bytes = values.flat_map(|value| value.to_le_bytes()).collect();
        (tensor.name.clone(), (Dtype::F32, tensor.shape.clone(), bytes))
    };
    layout.tensors().iter().map(entry).collect()
}

fn write(path: &Path, tensors: &Tensors) {
    let views = tensors.iter().map(|(name, (dtype, shape, bytes))| {
        (name.as_str(), TensorView::new(*dtype, shape.clone(), bytes).expect("agrees"))
    });
    std::fs::write(path, safetensors::serialize(views, None).expect("serializes")).expect("writes");
}

/// A folder with the config of `model(tied)` and a file of `tensors`.
fn folder(tied: bool, change: impl FnOnce(&mut Tensors)) -> tempfile::TempDir {
    let (model, arena) = model(tied);
    let folder = tempfile::tempdir().expect("a folder");
    save(folder.path(), model.config_json(), model.layout(), &arena).expect("writes");
    let mut tensors = tensors(model.layout(), &arena);
    change(&mut tensors);
    write(&folder.path().join(SINGLE_FILE), &tensors);
    folder
}

/// The error of loading `folder`, its path cut off.
fn refused(folder: &Path) -> String {
    let error = load::<Cpu>(folder).map(|_| ()).expect_err("refused").to_string();
    error.replace(&format!("{}/", folder.display()), "").replace(&folder.display().to_string(), ".")
}

fn bits(numbers: &[f32]) -> Vec<u32> {
    numbers.iter().map(|number| number.to_bits()).collect()
}

/// The lengths of a file are added with overflow checks: an overflow is damage, not another number.
#[test]
fn a_header_that_states_as_many_bytes_as_there_are_numbers_is_damaged() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("model.safetensors");
    let bits = u64::MAX / 4 * 4;
    let refused = |header: String| {
        let length = (header.len() as u64).to_le_bytes();
        std::fs::write(&path, [&length[..], header.as_bytes()].concat()).expect("writes");
        TensorFiles::open(&path).err().expect("refused").to_string()
    };
    let tensor = |end: u64, elements: u64| {
        json!({"a": {"dtype": "F32", "shape": [elements], "data_offsets": [0, end]}}).to_string()
    };
    for header in
        [tensor(bits, bits / 4), tensor(u64::MAX, u64::MAX), tensor(bits - 8, bits / 4 - 2)]
    {
        let error = refused(header);
        assert!(error.contains("damaged"), "{error}");
    }
    // As many elements as a tensor may state: eight of them end just below 2^64, and do not begin at 0.
    let bytes = 4 * ((1_u64 << 59) - 1);
    let tensor = |n: u64| {
        let place = [n * bytes, (n + 1) * bytes];
        let stated = json!({"dtype": "F32", "shape": [bytes / 4], "data_offsets": place});
        (format!("tensor-{n}"), stated)
    };
    let error = refused(serde_json::Value::Object((0..8).map(tensor).collect()).to_string());
    assert!(error.contains("expected 2^64 or more bytes"), "{error}");
}

#[test]
fn a_model_reads_back_to_the_bit() {
    for tied in [true, false] {
        let (model, mut arena) = model(tied);
        // Values that a conversion through text or another type would lose.
        let norm = model.layout().tensors().iter().find(|t| t.name == NORM).expect("there").offset;
        arena[norm..norm + 3].copy_from_slice(&[-0.0, 1e-45, f32::MAX]);
        let folder = tempfile::tempdir().expect("a folder");
        save(folder.path(), model.config_json(), model.layout(), &arena).expect("writes");
        let (read, found) = load::<Cpu>(folder.path()).expect("reads");
        assert_eq!(read.config_json(), model.config_json());
        assert_eq!(bits(&found), bits(&arena));
        assert_eq!(model.layout().parameter_elements(), found.len());
        assert!(save(folder.path(), &json!({}), model.layout(), &arena[1..]).is_err());
        // In files of one segment each, and in one again: the files from before are not read.
        for (scale, file_bytes) in [(2.0, 1), (3.0, FILE_BYTES), (4.0, 300)] {
            let other: Vec<f32> = arena.iter().map(|value| value * scale).collect();
            let (config, layout) = (model.config_json(), model.layout());
            save_in_files(folder.path(), config, layout, &other, file_bytes).expect("writes");
            assert_eq!(bits(&load::<Cpu>(folder.path()).expect("reads").1), bits(&other));
            assert_eq!(folder.path().join(SINGLE_FILE).exists(), file_bytes == FILE_BYTES);
            assert_eq!(folder.path().join(INDEX_FILE).exists(), file_bytes != FILE_BYTES);
        }
    }
}

#[test]
fn ranges_of_an_arena_read_back_with_their_padding() {
    let (model, arena) = model(true);
    let plan = SafetensorsLayout::of_arenas(model.layout(), &["exp_avg.", "exp_avg_sq."]);
    let mut bytes = vec![0; plan.file_bytes() as usize];
    bytes[..plan.header_bytes().len()].copy_from_slice(plan.header_bytes());
    for (prefix, sign) in [("exp_avg.", 1.0), ("exp_avg_sq.", -1.0)] {
        for piece in plan.placement(model.layout(), prefix).pieces(0..arena.len()) {
            for (index, value) in arena[piece.arena].iter().enumerate() {
                let start = piece.file_offset as usize + 4 * index;
                bytes[start..start + 4].copy_from_slice(&(sign * value).to_le_bytes());
            }
        }
    }
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("optimizer.safetensors");
    std::fs::write(&path, &bytes).expect("writes");
    let files = TensorFiles::open(&path).expect("opens");
    files.check(model.layout(), "exp_avg.").expect("complete");
    assert!(files.check(model.layout(), "").is_err());
    for (start, end) in [(0, arena.len()), (0, 1), (5, 100), (70, 71), (63, arena.len() - 3)] {
        let mut found = vec![f32::NAN; end - start];
        files.read_arena(model.layout(), "exp_avg.", start, &mut found).expect("reads");
        assert_eq!(bits(&found), bits(&arena[start..end]), "{start}..{end}");
        files.read_arena(model.layout(), "exp_avg_sq.", start, &mut found).expect("reads");
        assert!(found.iter().zip(&arena[start..end]).all(|(found, value)| *found == -value));
    }
}

#[test]
fn other_spellings_and_types_are_read() {
    let (_, arena) = model(true);
    // The original name of the embedding, and a copy of it as the head.
    let renamed = folder(true, |tensors| {
        let embedding = tensors.remove(EMBEDDING).expect("there");
        tensors.insert("lm_head.weight".to_owned(), embedding.clone());
        tensors.insert("backbone.embedding.weight".to_owned(), embedding);
    });
    assert_eq!(bits(&load::<Cpu>(renamed.path()).expect("reads").1), bits(&arena));
    let original = json!({
        "d_model": 6, "n_layer": 1, "vocab_size": 11, "pad_vocab_size_multiple": 1, "ssm_cfg": {}
    });
    std::fs::write(renamed.path().join(CONFIG_FILE), original.to_string()).expect("writes");
    assert_eq!(bits(&load::<Cpu>(renamed.path()).expect("reads").1), bits(&arena));
    // The upper halves of fp32 are bf16.
    let halves = folder(true, |tensors| {
        for (dtype, _, bytes) in tensors.values_mut() {
            *dtype = Dtype::BF16;
            *bytes = bytes.chunks_exact(4).flat_map(|value| [value[2], value[3]]).collect();
        }
    });
    let found = load::<Cpu>(halves.path()).expect("reads").1;
    let cut: Vec<u32> = bits(&arena).iter().map(|bits| bits & 0xffff_0000).collect();
    assert_eq!(bits(&found), cut);
}

#[test]
fn tensors_that_do_not_fit_are_named() {
    let missing = folder(true, |tensors| {
        tensors.remove(NORM);
    });
    assert_eq!(refused(missing.path()), format!("{SINGLE_FILE}: tensor {NORM} is missing"));
    let reshaped = folder(true, |tensors| tensors.get_mut(NORM).expect("there").1 = vec![2, 3]);
    assert_eq!(
        refused(reshaped.path()),
        format!("{SINGLE_FILE}: tensor {NORM}: expected shape [6], found [2, 3]")
    );
    let integers = folder(true, |tensors| tensors.get_mut(NORM).expect("there").0 = Dtype::I32);
    assert_eq!(
        refused(integers.path()),
        format!("{SINGLE_FILE}: tensor {NORM}: expected F32, F16 or BF16, found I32")
    );
    let unknown = folder(true, |tensors| {
        tensors.insert("backbone.extra".to_owned(), (Dtype::F32, vec![1], vec![0; 4]));
    });
    assert_eq!(refused(unknown.path()), ".: tensor backbone.extra is none that this model has");
    let untied = folder(true, |tensors| {
        let mut head = tensors[EMBEDDING].clone();
        head.2[5] ^= 1;
        tensors.insert("lm_head.weight".to_owned(), head);
    });
    assert_eq!(
        refused(untied.path()),
        format!(".: tensor lm_head.weight differs from {EMBEDDING}, which the config ties it to")
    );
    let headless = folder(false, |tensors| {
        tensors.remove("lm_head.weight");
    });
    assert_eq!(
        refused(headless.path()),
        format!("{SINGLE_FILE}: tensor lm_head.weight is missing")
    );
}

#[test]
fn shards_are_read_and_damaged_indexes_refused() {
    let (model, arena) = model(true);
    let tensors = tensors(model.layout(), &arena);
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    save(folder.path(), model.config_json(), model.layout(), &arena).expect("writes");
    std::fs::remove_file(at(SINGLE_FILE)).expect("removes");
    assert_eq!(
        refused(folder.path()),
        format!(".: expected a folder with {SINGLE_FILE} or {INDEX_FILE}")
    );
    std::fs::write(at("pytorch_model.bin"), b"").expect("writes");
    assert!(refused(folder.path()).contains("has pytorch_model.bin; convert it"));

    let shard = |index: usize| format!("model-0000{}-of-00002.safetensors", index % 2 + 1);
    let mut map = BTreeMap::new();
    let mut shards: [Tensors; 2] = Default::default();
    for (index, (name, tensor)) in tensors.iter().enumerate() {
        map.insert(name.clone(), Value::String(shard(index)));
        shards[index % 2].insert(name.clone(), tensor.clone());
    }
    for (index, tensors) in shards.iter().enumerate() {
        write(&at(&shard(index)), tensors);
    }
    let index = |map: &BTreeMap<String, Value>| {
        let index = json!({ "metadata": { "total_size": 1 }, "weight_map": map });
        std::fs::write(at(INDEX_FILE), index.to_string()).expect("writes");
    };
    index(&map);
    assert_eq!(bits(&load::<Cpu>(folder.path()).expect("reads").1), bits(&arena));

    let with = |file: Value| {
        let mut changed = map.clone();
        changed.insert(NORM.to_owned(), file);
        index(&changed);
        refused(folder.path())
    };
    let beside =
        format!("{INDEX_FILE}: weight_map: expected the name of a file beside it for {NORM}");
    assert_eq!(with(json!("../elsewhere.safetensors")), beside);
    assert_eq!(with(json!(1)), beside);
    assert_eq!(with(json!("nowhere.safetensors")), "reading nowhere.safetensors failed");
    let other = if map[NORM] == json!(shard(0)) { shard(1) } else { shard(0) };
    assert_eq!(
        with(json!(other)),
        format!("{other}: tensor {NORM} is missing, which {INDEX_FILE} places here")
    );
    std::fs::write(at(INDEX_FILE), b"{\"weight_map\": [").expect("writes");
    assert!(refused(folder.path()).starts_with(&format!("{INDEX_FILE}: is not JSON: ")));
    std::fs::write(at(INDEX_FILE), b"{}").expect("writes");
    assert!(refused(folder.path()).contains("weight_map: expected an object"));
}

#[test]
fn cut_and_flipped_files_are_refused_and_nothing_panics() {
    let (model, arena) = model(true);
    let folder = tempfile::tempdir().expect("a folder");
    save(folder.path(), model.config_json(), model.layout(), &arena).expect("writes");
    let path = folder.path().join(SINGLE_FILE);
    let whole = std::fs::read(&path).expect("written just now");
    for length in [0, 7, 8, 9, 100, whole.len() / 2, whole.len() - 1] {
        std::fs::write(&path, &whole[..length]).expect("writes");
        let error = refused(folder.path());
        assert!(error.starts_with(&format!("{SINGLE_FILE}: ")), "{length} bytes: {error}");
        assert!(error.contains("is cut short"), "{length} bytes: {error}");
    }
    let mut longer = whole.clone();
    longer.push(0);
    std::fs::write(&path, &longer).expect("writes");
    assert!(refused(folder.path()).contains("is cut short or damaged: expected"));

    let header_bytes = SafetensorsLayout::of_arenas(model.layout(), &[""]).header_bytes().len();
    let mut refusals = 0;
    for byte in 0..header_bytes {
        let mut flipped = whole.clone();
        flipped[byte] ^= 1 << (byte % 8);
        std::fs::write(&path, &flipped).expect("writes");
        if let Err(error) = load::<Cpu>(folder.path()) {
            let error = error.to_string();
            assert!(error.contains(&folder.path().display().to_string()), "{error}");
            refusals += 1;
        }
    }
    // The other bytes are the metadata, which is not read, and white space that became another
    // white space.
    assert!(refusals > header_bytes * 9 / 10, "{refusals} of {header_bytes} flips");
}

/// Models of odd sizes whose weights are made of integers, so that their files are the same everywhere.
fn written_by_tidemill() -> [(&'static str, LanguageModel<Cpu>, Vec<f32>); 8] {
    let special_tokens = SpecialTokens { bos: Some(100), eos: Some(101), pad: None };
    let mamba = MambaConfig {
        d_state: 7,
        d_conv: 5,
        expand: 3,
        dt_rank: 3,
        special_tokens,
        ..MambaConfig::new(103, 19, 2)
    };
    let mpt = MptConfig {
        clip_qkv: Some(1.25),
        max_seq_len: 128,
        special_tokens,
        ..MptConfig::new(103, 18, 2, 3).with_alibi_and_no_bias()
    };
    let gpt_neo = GptNeoConfig {
        mlp_width: 31,
        window_size: 9,
        max_seq_len: 128,
        special_tokens,
        ..GptNeoConfig::new(103, 14, 3, 2)
    };
    let llama = LlamaConfig {
        n_kv_heads: 2,
        mlp_width: 21,
        rope_theta: 50.0,
        special_tokens,
        ..LlamaConfig::new(103, 16, 1, 4)
    };
    let mistral = LlamaConfig {
        n_kv_heads: 1,
        mlp_width: 23,
        window_size: Some(9),
        rope_theta: 200.0,
        special_tokens,
        ..LlamaConfig::new(103, 12, 2, 3)
    };
    let qwen2 = LlamaConfig {
        n_kv_heads: 2,
        mlp_width: 27,
        window_size: Some(11),
        rope_theta: 100.0,
        qkv_bias: true,
        norm_eps: 1e-3,
        tie_embeddings: false,
        special_tokens,
        ..LlamaConfig::new(102, 16, 2, 4)
    };
    let mamba2 = Mamba2Config {
        d_state: 6,
        d_conv: 3,
        head_width: 4,
        n_groups: 2,
        special_tokens,
        ..Mamba2Config::new(103, 16, 2)
    };
    let qwen3 = LlamaConfig {
        n_kv_heads: 2,
        head_width: Some(8),
        mlp_width: 29,
        qk_norm: true,
        special_tokens,
        ..LlamaConfig::new(101, 12, 2, 4)
    };
    let configs: [(_, ModelConfig); 8] = [
        ("written_by_tidemill", mamba.into()),
        ("mpt_written_by_tidemill", mpt.into()),
        ("gpt_neo_written_by_tidemill", gpt_neo.into()),
        ("llama_written_by_tidemill", llama.into()),
        ("mistral_written_by_tidemill", mistral.into()),
        ("qwen2_written_by_tidemill", qwen2.into()),
        ("qwen3_written_by_tidemill", qwen3.into()),
        ("mamba2_written_by_tidemill", mamba2.into()),
    ];
    configs.map(|(name, config)| {
        let model = LanguageModel::<Cpu>::new(&config).expect("sizes");
        let arena = integer_weights(model.layout());
        (name, model, arena)
    })
}

fn integer_weights(layout: &Layout) -> Vec<f32> {
    let mut arena = vec![0.0; layout.parameter_elements()];
    let mut state = 20_250_101_u32;
    for tensor in layout.tensors() {
        let (middle, width) = match tensor.name.rsplit_once("mixer.").map(|(_, name)| name) {
            None if tensor.name.ends_with(".bias") => (0.0, 0.25),
            None if tensor.shape.len() == 1 => (1.0, 0.25),
            Some("D") => (1.0, 0.5),
            Some("A_log") => (0.75, 1.0),
            Some("dt_proj.bias" | "dt_bias") => (-2.0, 2.0),
            Some("norm.weight") => (1.0, 0.25),
            Some("conv1d.bias") => (0.0, 0.25),
            _ => (0.0, 0.75),
        };
        for value in &mut arena[tensor.range()] {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            // 16 bits: every step below is exact in fp32.
            *value = ((state >> 16) as f32 / 65_536.0 - 0.5) * width + middle;
        }
    }
    arena
}

/// `check_opens.py` opened exactly these bytes and wrote `expected.json` beside them, which the bodies compare with. To change them, run this test
/// with `TIDEMILL_WRITE_FIXTURES=1`, then the script.
#[test]
fn transformers_opens_what_we_write() {
    let writes = std::env::var_os("TIDEMILL_WRITE_FIXTURES").is_some();
    for (name, model, arena) in written_by_tidemill() {
        let folder = fixtures::folder(name);
        if writes {
            std::fs::create_dir_all(&folder).expect("a folder");
            save(&folder, model.config_json(), model.layout(), &arena).expect("writes");
            continue;
        }
        let written = tempfile::tempdir().expect("a folder");
        save(written.path(), model.config_json(), model.layout(), &arena).expect("writes");
        for file in [CONFIG_FILE, SINGLE_FILE] {
            let ours = std::fs::read(written.path().join(file)).expect("written just now");
            let opened = std::fs::read(folder.join(file)).expect("a fixture");
            assert!(ours == opened, "{name}: {file} is not the one that transformers opened");
        }
    }
    assert!(!writes, "wrote the folders; now run check_opens.py on each");
}

/// Old files of GPT-Neo hold masks in types of their own, and copies of the tied table as the head.
#[test]
fn masks_and_copies_in_files_of_gpt_neo_are_passed_over() {
    let model = LanguageModel::<Cpu>::new(&GptNeoConfig::new(11, 6, 2, 2)).expect("sizes");
    let arena = model.initialize(3);
    let folder = tempfile::tempdir().expect("a folder");
    save(folder.path(), model.config_json(), model.layout(), &arena).expect("writes");
    let mut tensors = tensors(model.layout(), &arena);
    for layer in 0..2 {
        let name = |mask: &str| format!("transformer.h.{layer}.attn.attention.{mask}");
        tensors.insert(name("bias"), (Dtype::BOOL, vec![1, 1, 2, 2], vec![1, 0, 1, 1]));
        tensors.insert(name("masked_bias"), (Dtype::F32, vec![1], vec![0; 4]));
    }
    let table = tensors["transformer.wte.weight"].clone();
    tensors.insert("lm_head.weight".to_owned(), table);
    write(&folder.path().join(SINGLE_FILE), &tensors);
    assert_eq!(bits(&load::<Cpu>(folder.path()).expect("reads").1), bits(&arena));
    tensors.get_mut("lm_head.weight").expect("just now").2[5] ^= 1;
    write(&folder.path().join(SINGLE_FILE), &tensors);
    let error = refused(folder.path());
    assert!(error.contains("lm_head.weight differs from transformer.wte.weight"), "{error}");
}
