//! Models that have a name.
//!
//! Sizes of the Mamba family are those of state-spaces' published checkpoints (Gu and Dao, 2023, table 12), whose
//! layers count twice a transformer's; `mamba-10m` is this project's own, for benchmarks.

use crate::error::{ModelError, Result};
use crate::mamba::MambaConfig;

/// The vocabulary of GPT-NeoX's tokenizer, padded to a multiple of 8 as in the published checkpoints.
const GPT_NEOX_VOCABULARY: usize = 50_280;

struct Preset {
    name: &'static str,
    vocab_size: usize,
    d_model: usize,
    n_layers: usize,
}

const MAMBA: [Preset; 7] = [
    Preset { name: "mamba-10m", vocab_size: 4096, d_model: 256, n_layers: 8 },
    Preset { name: "mamba-130m", vocab_size: GPT_NEOX_VOCABULARY, d_model: 768, n_layers: 24 },
    Preset { name: "mamba-370m", vocab_size: GPT_NEOX_VOCABULARY, d_model: 1024, n_layers: 48 },
    Preset { name: "mamba-790m", vocab_size: GPT_NEOX_VOCABULARY, d_model: 1536, n_layers: 48 },
    Preset { name: "mamba-1.4b", vocab_size: GPT_NEOX_VOCABULARY, d_model: 2048, n_layers: 48 },
    Preset { name: "mamba-2.8b", vocab_size: GPT_NEOX_VOCABULARY, d_model: 2560, n_layers: 64 },
    Preset { name: "mambaoutai-1.6b", vocab_size: 65_024, d_model: 2688, n_layers: 32 },
];

/// Names that are taken by families whose blocks this version does not have.
const LATER: [&str; 10] = [
    "mpt-10m",
    "mpt-125m",
    "mpt-350m",
    "mpt-760m",
    "mpt-1b",
    "mpt-3b",
    "mpt-7b",
    "gpt-neo-125m",
    "gpt-neo-1.3b",
    "gpt-neo-2.7b",
];

/// The names that [`preset`] knows.
pub fn preset_names() -> impl Iterator<Item = &'static str> {
    MAMBA.iter().map(|preset| preset.name)
}

/// The sizes behind a name.
///
/// # Errors
/// A name that is unknown, or of a family that is not available yet.
pub fn preset(name: &str) -> Result<MambaConfig> {
    if let Some(preset) = MAMBA.iter().find(|preset| preset.name == name) {
        return Ok(MambaConfig::new(preset.vocab_size, preset.d_model, preset.n_layers));
    }
    let available = preset_names().collect::<Vec<_>>().join(", ");
    if LATER.contains(&name) {
        return Err(ModelError::PresetNotAvailable { name: name.to_owned(), available });
    }
    Err(ModelError::config("model.preset", format!("one of {available}"), format!("\"{name}\"")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mamba::Mamba;

    /// By hand, with e = 2 d, r = ceil(d / 16), n = 16, k = 4 and a tied head:
    /// `v d + d + layers (d + 2 e d + 4 e + e + (r + 32) e + e r + e + 16 e + e + d e)`. Those of the published
    /// checkpoints agree with their files: 129,135,360 and so on.
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
        ];
        assert!(preset_names().eq(expected.iter().map(|(name, _)| *name)));
        for (name, parameters) in expected {
            let model = Mamba::new(&preset(name).expect(name)).expect(name);
            assert_eq!(model.layout().parameters(), parameters, "{name}");
        }
    }

    #[test]
    fn names_of_other_families_say_what_is_available() {
        let error = preset("mpt-10m").expect_err("a later family").to_string();
        assert!(error.starts_with(
            "preset mpt-10m is not available yet in this version; available: mamba-10m, "
        ));
        let error = preset("mamba").expect_err("no preset").to_string();
        assert!(error.starts_with("model.preset: expected one of mamba-10m, "), "{error}");
        assert!(error.ends_with("found \"mamba\""), "{error}");
    }
}
