//! The meaning of `[model]` tables, and the tables that are refused.

use super::*;

/// The table that `json` holds; JSON and TOML are the same to serde here.
fn settings(json: &str) -> serde_json::Result<ModelSettings> {
    serde_json::from_str(json)
}

fn resolved(json: &str, data_vocab_size: Option<u32>) -> ModelConfig {
    match settings(json).expect(json).resolve(data_vocab_size).expect(json) {
        ResolvedModel::New(config) => config,
        ResolvedModel::From(folder) => panic!("{folder:?}"),
    }
}

fn mamba(json: &str, data_vocab_size: Option<u32>) -> MambaConfig {
    match resolved(json, data_vocab_size) {
        ModelConfig::Mamba(config) => config,
        other => panic!("{other:?}"),
    }
}

fn refusal(json: &str, data_vocab_size: Option<u32>) -> String {
    let settings = settings(json).expect(json);
    settings.resolve(data_vocab_size).expect_err(json).to_string()
}

#[test]
fn sizes_override_the_presets() {
    let config = mamba(r#"{"preset": "mamba-10m"}"#, None);
    assert_eq!(config, MambaConfig::new(4096, 256, 8));
    let config = mamba(r#"{"preset": "mamba-10m", "d_model": 100, "d_conv": 3}"#, Some(259));
    assert_eq!((config.vocab_size, config.d_model, config.dt_rank), (259, 100, 7));
    assert_eq!((config.n_layers, config.d_conv), (8, 3));
    let config = mamba(r#"{"preset": "mamba-10m", "vocab_size": 300}"#, Some(259));
    assert_eq!(config.vocab_size, 300);
    let ModelConfig::Mpt(config) =
        resolved(r#"{"preset": "mpt-10m", "alibi": false, "qk_ln": true}"#, Some(259))
    else {
        panic!("another family")
    };
    assert_eq!((config.positions, config.qk_ln), (MptPositions::Learned, true));
    assert_eq!((config.vocab_size, config.no_bias, config.n_heads), (259, true, 4));
}

#[test]
fn heads_of_a_preset_fit_another_width() {
    for (preset, d_model, n_heads) in [
        ("mpt-10m", 128, 4),
        ("mpt-10m", 1024, 4),
        ("mpt-10m", 250, 5),
        ("mpt-10m", 2048, 32),
        ("mpt-10m", 2, 1),
        ("mpt-10m", 1031, 1031),
        ("gpt-neo-125m", 1000, 20),
        ("llama-10m", 128, 4),
        ("llama-1b", 1000, 20),
    ] {
        let json = format!(r#"{{"preset": "{preset}", "d_model": {d_model}}}"#);
        let config = resolved(&json, None);
        let found = match config {
            ModelConfig::Mpt(config) => config.n_heads,
            ModelConfig::GptNeo(config) => config.n_heads,
            ModelConfig::Llama(config) => config.n_heads,
            other => panic!("{other:?}"),
        };
        assert_eq!(found, n_heads, "{json}");
    }
}

#[test]
fn a_family_with_every_size_needs_no_preset() {
    let sizes = r#"{"kind": "mamba", "d_model": 32, "n_layers": 2, "d_state": 5, "d_conv": 3,
                    "expand": 3}"#;
    let config = mamba(sizes, Some(259));
    assert_eq!((config.vocab_size, config.dt_rank, config.d_inner()), (259, 2, 96));
    assert_eq!(
        refusal(sizes, None),
        "model.vocab_size: expected a size, as there is no preset, found none"
    );
    assert_eq!(
        refusal(r#"{"kind": "mamba", "d_model": 32, "n_layers": 2, "d_state": 5}"#, Some(5)),
        "model.d_conv: expected a size, as there is no preset (missing too: expand), found none"
    );
    assert_eq!(
        refusal(r#"{"kind": "gpt_neo", "d_model": 32, "n_layers": 2}"#, Some(5)),
        "model.n_heads: expected a size, as there is no preset (missing too: expansion, max_seq_len, window_size), \
         found none"
    );
}

const LLAMA_AND_ATTENTION: &str = r#"{"kind": "hybrid", "vocab_size": 9, "d_model": 32, "n_layers": 2, "n_heads": 4,
    "n_kv_heads": 2, "mlp_width": 70, "expansion": 3, "layer_pattern": "la"}"#;

const MAMBA_AND_MAMBA2: &str = r#"{"kind": "hybrid", "vocab_size": 9, "d_model": 96, "n_layers": 2, "d_state": 5,
    "d_conv": 3, "expand": 1, "layer_pattern": "ms"}"#;

/// A hybrid is asked for the sizes of its blocks alone, and has no other.
#[test]
fn the_pattern_of_a_hybrid_decides_its_sizes() {
    let ModelConfig::Hybrid(config) = resolved(MAMBA_AND_MAMBA2, None) else {
        panic!("another family")
    };
    // The most channels up to 64 that divide 96.
    assert_eq!(
        (config.mamba2.head_width, config.mamba2.n_groups, config.mamba.dt_rank),
        (48, 1, 6)
    );
    for (json, expected) in [
        (r#"{"kind": "hybrid"}"#, "d_model n_layers layer_pattern"),
        (
            r#"{"kind": "hybrid", "layer_pattern": "ma"}"#,
            "d_model n_layers d_state d_conv expand n_heads expansion",
        ),
        (
            r#"{"kind": "hybrid", "layer_pattern": "la"}"#,
            "d_model n_layers n_heads expansion n_kv_heads mlp_width",
        ),
        (r#"{"kind": "hybrid", "layer_pattern": "sm"}"#, "d_model n_layers d_state d_conv expand"),
    ] {
        let (first, others) = expected.split_once(' ').expect("several keys");
        let others = others.replace(' ', ", ");
        let expected = format!("as there is no preset (missing too: {others}), found none");
        assert_eq!(refusal(json, Some(9)), format!("model.{first}: expected a size, {expected}"));
    }
    for (table, key, value, letters) in [
        (LLAMA_AND_ATTENTION, "d_state", 5, "m or s"),
        (LLAMA_AND_ATTENTION, "dt_rank", 5, "m"),
        (LLAMA_AND_ATTENTION, "mamba2_head_width", 8, "s"),
        (MAMBA_AND_MAMBA2, "n_heads", 4, "a or l"),
        (MAMBA_AND_MAMBA2, "expansion", 4, "a"),
        (MAMBA_AND_MAMBA2, "head_width", 8, "l"),
    ] {
        let json = table.replace('}', &format!(r#", "{key}": {value}}}"#));
        let expected = format!("no such size, as layer_pattern has no {letters}, found {value}");
        assert_eq!(refusal(&json, None), format!("model.{key}: expected {expected}"));
    }
    let with_positions = LLAMA_AND_ATTENTION.replace('}', r#", "max_seq_len": 8}"#);
    let expected = "model.max_seq_len: expected no such size for a hybrid model, found 8";
    assert_eq!(refusal(&with_positions, None), expected);
}

#[test]
fn what_a_run_writes_down_means_the_same() {
    for json in [
        r#"{"kind": "mamba", "d_model": 32, "n_layers": 2, "d_state": 5, "d_conv": 3,
            "expand": 3, "vocab_size": 259}"#,
        r#"{"preset": "mamba2-10m", "d_model": 96, "d_state": 16, "n_groups": 3}"#,
        r#"{"kind": "mamba2", "vocab_size": 9, "d_model": 30, "n_layers": 2, "d_state": 5,
            "d_conv": 3, "expand": 2, "head_width": 12}"#,
        r#"{"preset": "mpt-125m", "clip_qkv": 6, "logit_scale": "inv_sqrt_d_model"}"#,
        r#"{"kind": "mpt", "vocab_size": 9, "d_model": 32, "n_layers": 2, "n_heads": 4,
            "expansion": 3, "max_seq_len": 64, "alibi": true, "softmax_scale": 0.5}"#,
        r#"{"preset": "gpt-neo-125m", "expansion": 3, "d_model": 36, "window_size": 8}"#,
        r#"{"preset": "llama-10m", "d_model": 128, "n_kv_heads": 1, "window_size": 9}"#,
        r#"{"kind": "llama", "vocab_size": 9, "d_model": 32, "n_layers": 2, "n_heads": 4,
            "n_kv_heads": 2, "mlp_width": 70, "rope_theta": 10000, "qkv_bias": true}"#,
        r#"{"preset": "qwen3-10m", "d_model": 128, "head_width": 32, "window_size": 9}"#,
        r#"{"preset": "qwen3-0.6b", "qk_norm": false}"#,
        r#"{"kind": "hybrid", "vocab_size": 9, "d_model": 32, "n_layers": 3, "n_heads": 4,
            "expansion": 3, "d_state": 5, "d_conv": 3, "expand": 2, "layer_pattern": "mma"}"#,
        r#"{"kind": "hybrid", "vocab_size": 9, "d_model": 32, "n_layers": 4, "n_heads": 4,
            "expansion": 3, "d_state": 5, "d_conv": 3, "expand": 2, "layer_pattern": "mals", "mamba2_head_width": 16,
            "n_groups": 2, "n_kv_heads": 2, "mlp_width": 70, "head_width": 6, "rope_theta": 100, "window_size": 9,
            "qk_norm": true}"#,
        LLAMA_AND_ATTENTION,
        MAMBA_AND_MAMBA2,
    ] {
        let config = resolved(json, None);
        let written = ModelSettings::from(&config);
        let json = serde_json::to_string(&written).expect("serializes");
        assert_eq!(resolved(&json, None), config, "{json}");
    }
}

#[test]
fn a_checkpoint_says_everything_but_what_is_no_number() {
    let read = settings(r#"{"from": "runs/a", "recompute": "block"}"#).expect("a folder");
    let resolved = read.resolve(Some(259)).expect("a folder");
    assert_eq!(resolved, ResolvedModel::From("runs/a".into()));
    let error = refusal(r#"{"from": "runs/a", "d_state": 5}"#, None);
    assert!(error.starts_with("model.d_state: expected no size beside from"), "{error}");
}

#[test]
fn mistakes_are_named() {
    let one = "model: expected exactly one of preset, from and kind, found ";
    assert_eq!(refusal("{}", None), format!("{one}none"));
    let both = r#"{"preset": "mamba-10m", "from": "runs/a"}"#;
    assert_eq!(refusal(both, None), format!("{one}several"));
    for (preset, json, expected) in [
        (
            "mamba-10m",
            r#""n_heads": 4"#,
            "model.n_heads: expected no such size for a mamba model, found 4",
        ),
        (
            "mamba2-10m",
            r#""head_width": 48"#,
            "model.head_width: expected a divisor of expand times d_model, which is 512, found 48",
        ),
        (
            "mamba2-10m",
            r#""n_groups": 3"#,
            "model.n_groups: expected a divisor of the 8 heads, found 3",
        ),
        (
            "mamba2-10m",
            r#""dt_rank": 3"#,
            "model.dt_rank: expected no such size for a mamba2 model, found 3",
        ),
        ("mamba-10m", r#""d_state": 0"#, "model.d_state: expected 1 to 256, found 0"),
        (
            "mamba-10m",
            r#""vocab_size": 100"#,
            "model.vocab_size: expected at least 259, the data set's vocabulary, found 100",
        ),
        (
            "mpt-10m",
            r#""window_size": 4"#,
            "model.window_size: expected no such size for a mpt model, found 4",
        ),
        (
            "gpt-neo-125m",
            r#""alibi": true"#,
            "model.alibi: expected no such size for a gpt_neo model, found true",
        ),
        ("gpt-neo-125m", r#""expansion": 0"#, "model.expansion: expected 1 to 64, found 0"),
        (
            "llama-10m",
            r#""n_kv_heads": 3"#,
            "model.n_kv_heads: expected a divisor of n_heads, which is 4, found 3",
        ),
        (
            "llama-10m",
            r#""expansion": 3"#,
            "model.expansion: expected no such size for a llama model, found 3",
        ),
        (
            "mpt-10m",
            r#""n_heads": 3"#,
            "model.n_heads: expected a divisor of d_model, which is 256, found 3",
        ),
    ] {
        let json = format!("{{\"preset\": \"{preset}\", {json}}}");
        assert_eq!(refusal(&json, Some(259)), expected);
    }
    for (json, expected) in [
        (r#"{"preset": "mamba-10m", "d_modle": 4}"#, "unknown field `d_modle`"),
        (r#"{"kind": "rwkv"}"#, "unknown variant `rwkv`"),
        (r#"{"preset": "mamba-10m", "d_model": -4}"#, "invalid value: integer `-4`"),
        (r#"{"kind": "hybrid", "layer_pattern": "mb"}"#, "expected letters m (Mamba)"),
    ] {
        let error = settings(json).expect_err(json).to_string();
        assert!(error.contains(expected), "{error}");
    }
}
