//! Presets: models with a name.
//!
//! Sizes of Mamba and Mamba-2 are those of state-spaces' published checkpoints (Gu and Dao, 2023, table 12), whose
//! blocks count twice a transformer's; those of MPT are LLM Foundry's, with its defaults; those of GPT-Neo are EleutherAI's;
//! `llama-1b` is Llama 3.2's, with its positions before they are stretched; `qwen3-0.6b` is Qwen3's. `mamba-10m`, `mamba2-10m`, `mpt-10m`,
//! `llama-10m` and `qwen3-10m` are this project's own, for benchmarks.

use crate::error::{ModelError, Result};
use crate::gpt_neo::GptNeoConfig;
use crate::llama::LlamaConfig;
use crate::mamba::MambaConfig;
use crate::mamba2::Mamba2Config;
use crate::model_config::ModelConfig;
use crate::mpt::MptConfig;

/// The vocabulary of GPT-NeoX's tokenizer, padded to a multiple of 8 as in the published checkpoints.
const GPT_NEOX_VOCABULARY: usize = 50_280;
/// The same, padded to a multiple of 16 as in the published checkpoints of Mamba-2.
const MAMBA_2_VOCABULARY: usize = 50_288;
/// The same, padded as LLM Foundry does.
const MPT_VOCABULARY: usize = 50_368;
/// The vocabulary of Llama 3's tokenizer.
const LLAMA_3_VOCABULARY: usize = 128_256;
/// The vocabulary of Qwen3's tokenizer, padded as in the published checkpoints.
const QWEN_3_VOCABULARY: usize = 151_936;
/// The vocabulary of GPT-2's tokenizer.
const GPT_2_VOCABULARY: usize = 50_257;

struct Preset {
    name: &'static str,
    sizes: Sizes,
}

/// The sizes in which the presets of a family differ.
enum Sizes {
    /// v, d and blocks.
    Mamba(usize, usize, usize),
    /// v, d and blocks.
    Mamba2(usize, usize, usize),
    /// d, blocks and heads.
    Mpt(usize, usize, usize),
    /// d, blocks and heads.
    GptNeo(usize, usize, usize),
    /// This project's own preset.
    Mpt10m,
    /// v, d, blocks, heads of queries, heads of keys and values, f.
    Llama(usize, [usize; 5]),
    /// The same of Qwen3, whose heads are 128 wide.
    Qwen3(usize, [usize; 5]),
}

const PRESETS: [Preset; 24] = [
    Preset { name: "mamba-10m", sizes: Sizes::Mamba(4096, 256, 8) },
    Preset { name: "mamba-130m", sizes: Sizes::Mamba(GPT_NEOX_VOCABULARY, 768, 24) },
    Preset { name: "mamba-370m", sizes: Sizes::Mamba(GPT_NEOX_VOCABULARY, 1024, 48) },
    Preset { name: "mamba-790m", sizes: Sizes::Mamba(GPT_NEOX_VOCABULARY, 1536, 48) },
    Preset { name: "mamba-1.4b", sizes: Sizes::Mamba(GPT_NEOX_VOCABULARY, 2048, 48) },
    Preset { name: "mamba-2.8b", sizes: Sizes::Mamba(GPT_NEOX_VOCABULARY, 2560, 64) },
    Preset { name: "mambaoutai-1.6b", sizes: Sizes::Mamba(65_024, 2688, 32) },
    Preset { name: "mamba2-10m", sizes: Sizes::Mamba2(4096, 256, 8) },
    Preset { name: "mamba2-130m", sizes: Sizes::Mamba2(MAMBA_2_VOCABULARY, 768, 24) },
    Preset { name: "mamba2-1.3b", sizes: Sizes::Mamba2(MAMBA_2_VOCABULARY, 2048, 48) },
    Preset { name: "mpt-10m", sizes: Sizes::Mpt10m },
    Preset { name: "mpt-125m", sizes: Sizes::Mpt(768, 12, 12) },
    Preset { name: "mpt-350m", sizes: Sizes::Mpt(1024, 24, 16) },
    Preset { name: "mpt-760m", sizes: Sizes::Mpt(1536, 24, 12) },
    Preset { name: "mpt-1b", sizes: Sizes::Mpt(2048, 24, 16) },
    Preset { name: "mpt-3b", sizes: Sizes::Mpt(2560, 32, 20) },
    Preset { name: "mpt-7b", sizes: Sizes::Mpt(4096, 32, 32) },
    Preset { name: "gpt-neo-125m", sizes: Sizes::GptNeo(768, 12, 12) },
    Preset { name: "gpt-neo-1.3b", sizes: Sizes::GptNeo(2048, 24, 16) },
    Preset { name: "gpt-neo-2.7b", sizes: Sizes::GptNeo(2560, 32, 20) },
    Preset { name: "llama-10m", sizes: Sizes::Llama(4096, [256, 8, 4, 2, 768]) },
    Preset { name: "llama-1b", sizes: Sizes::Llama(LLAMA_3_VOCABULARY, [2048, 16, 32, 8, 8192]) },
    Preset { name: "qwen3-10m", sizes: Sizes::Qwen3(4096, [256, 8, 4, 2, 768]) },
    Preset { name: "qwen3-0.6b", sizes: Sizes::Qwen3(QWEN_3_VOCABULARY, [1024, 28, 16, 8, 3072]) },
];

/// The names that [`preset`] knows.
pub fn preset_names() -> impl Iterator<Item = &'static str> {
    PRESETS.iter().map(|preset| preset.name)
}

/// The sizes of the preset `name`.
///
/// # Errors
/// A name that is unknown.
pub fn preset(name: &str) -> Result<ModelConfig> {
    let Some(preset) = PRESETS.iter().find(|preset| preset.name == name) else {
        let names = preset_names().collect::<Vec<_>>().join(", ");
        let (expected, found) = (format!("one of {names}"), format!("\"{name}\""));
        return Err(ModelError::config("model.preset", expected, found));
    };
    Ok(match preset.sizes {
        Sizes::Mamba(vocab_size, d_model, n_layers) => {
            MambaConfig::new(vocab_size, d_model, n_layers).into()
        }
        Sizes::Mamba2(vocab_size, d_model, n_layers) => {
            Mamba2Config::new(vocab_size, d_model, n_layers).into()
        }
        Sizes::Mpt(d_model, n_layers, n_heads) => {
            MptConfig::new(MPT_VOCABULARY, d_model, n_layers, n_heads).into()
        }
        Sizes::GptNeo(d_model, n_layers, n_heads) => {
            GptNeoConfig::new(GPT_2_VOCABULARY, d_model, n_layers, n_heads).into()
        }
        Sizes::Llama(vocab_size, [d_model, n_layers, n_heads, n_kv_heads, mlp_width]) => {
            let sizes = LlamaConfig::new(vocab_size, d_model, n_layers, n_heads);
            LlamaConfig { n_kv_heads, mlp_width, ..sizes }.into()
        }
        Sizes::Qwen3(vocab_size, [d_model, n_layers, n_heads, n_kv_heads, mlp_width]) => {
            LlamaConfig {
                n_kv_heads,
                head_width: Some(128),
                mlp_width,
                max_seq_len: 40_960,
                rope_theta: 1_000_000.0,
                qk_norm: true,
                norm_eps: 1e-6,
                ..LlamaConfig::new(vocab_size, d_model, n_layers, n_heads)
            }
            .into()
        }
        Sizes::Mpt10m => MptConfig::new(4096, 256, 8, 4).with_alibi_and_no_bias().into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blueprint::Blueprint;

    /// Counted by hand, for Mamba with e = 2 d, r = ceil(d / 16), n = 16, k = 4 and a tied head: `v
    /// d + d + blocks (d + 2 e d + 4 e + e + (r + 32) e + e r + e + 16 e + e + d e)`. The counts of
    /// the published checkpoints agree with their files: 129,135,360 and so on. For Mamba-2 with h
    /// = e / 64 and c = e + 256: `v d + d + blocks
    /// (d + (e + c + h) d + 5 c + 3 h + e + d e)`. For MPT with biases: `v d + 2048 d + 2 d + blocks (12 d^2 +
    /// 13 d)`, as Foundry's table of 125,311,488 and so on. For GPT-Neo, without three biases a block: `v d + 2048 d + 2 d +
    /// blocks (12 d^2 + 10 d)`, as transformers counts the published ones. For Llama with heads of p = d / h: `v d + d + blocks (2 d^2 + 2 d g p +
    /// 3 d f + 2 d)`, which is Llama 3.2 1B's 1,235,814,400. For Qwen3, with p = 128 and norms of heads: `v d + d + blocks (2 d h p + 2 d g p + 3 d f +
    /// 2 d + 2 p)`, which is Qwen3 0.6B's 596,049,920.
    #[test]
    fn parameters_are_those_of_the_literature() {
        let expected = [
            ("mamba-10m", 4_552_960),
            ("mamba-130m", 129_135_360),
            ("mamba-370m", 371_516_416),
            ("mamba-790m", 793_204_224),
            ("mamba-1.4b", 1_372_178_432),
            ("mamba-2.8b", 2_768_345_600),
            ("mambaoutai-1.6b", 1_629_403_776),
            ("mamba2-10m", 4_772_288),
            ("mamba2-130m", 128_989_632),
            ("mamba2-1.3b", 1_343_757_312),
            ("mpt-10m", 7_344_384),
            ("mpt-125m", 125_311_488),
            ("mpt-350m", 355_985_408),
            ("mpt-760m", 760_470_528),
            ("mpt-1b", 1_315_950_592),
            ("mpt-3b", 2_651_837_440),
            ("mpt-7b", 6_658_859_008),
            ("gpt-neo-125m", 125_198_592),
            ("gpt-neo-1.3b", 1_315_575_808),
            ("gpt-neo-2.7b", 2_651_307_520),
            ("llama-10m", 7_344_384),
            ("llama-1b", 1_235_814_400),
            ("qwen3-10m", 8_919_296),
            ("qwen3-0.6b", 596_049_920),
        ];
        assert!(preset_names().eq(expected.iter().map(|(name, _)| *name)));
        for (name, parameters) in expected {
            let model = Blueprint::new(&preset(name).expect(name)).expect(name);
            assert_eq!(model.layout().parameters(), parameters, "{name}");
        }
    }

    #[test]
    fn an_unknown_name_is_told_the_others() {
        let error = preset("mamba").expect_err("no preset").to_string();
        assert!(error.starts_with("model.preset: expected one of mamba-10m, "), "{error}");
        assert!(error.ends_with("qwen3-0.6b, found \"mamba\""), "{error}");
    }
}
