//! The `[model]` table of a run: a preset, a checkpoint, or every size.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::error::{ModelError, Result};
use crate::mamba::MambaConfig;
use crate::preset::preset;

/// What a user writes about the model; [`resolve`](Self::resolve) says what it means.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelSettings {
    /// The name of a model; the sizes below override its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub preset: Option<String>,
    /// A checkpoint folder that says everything.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<PathBuf>,
    /// A family, whose sizes are all given below.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kind: Option<ModelKind>,
    /// v, tokens of the vocabulary; the data set's where not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vocab_size: Option<usize>,
    /// d, the width of the residual stream.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub d_model: Option<usize>,
    /// The number of blocks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub n_layers: Option<usize>,
    /// Mamba: n, the states of a channel.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub d_state: Option<usize>,
    /// Mamba: k, the taps of the convolution.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub d_conv: Option<usize>,
    /// Mamba: the inner width as a multiple of `d_model`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expand: Option<usize>,
    /// Mamba: r, the rank of the step sizes; `ceil(d_model / 16)` where not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dt_rank: Option<usize>,
    /// Transformers: h, heads.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub n_heads: Option<usize>,
    /// Transformers: the MLP's width as a multiple of `d_model`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expansion: Option<usize>,
    /// Transformers: positions that the model can tell apart.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_seq_len: Option<usize>,
}

/// A family of models.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ModelKind {
    /// Mamba (Gu and Dao, 2023).
    Mamba,
}

/// What a `[model]` table means.
#[derive(Clone, Debug, PartialEq)]
pub enum ResolvedModel {
    /// The model of a checkpoint, which whoever reads checkpoints opens.
    From(PathBuf),
    /// A new Mamba model.
    Mamba(MambaConfig),
}

impl ModelSettings {
    /// Sizes from preset or family, what is given in the table over them, and the vocabulary of the data where
    /// the table has none. `data_vocab_size` is the data set's, where it knows one.
    ///
    /// # Errors
    /// [`ModelError::Config`] naming the key: none or several of `preset`, `from` and `kind`; a size missing, out of
    /// bounds, or of another family; a vocabulary smaller than the data's.
    pub fn resolve(&self, data_vocab_size: Option<u32>) -> Result<ResolvedModel> {
        let choices = [self.preset.is_some(), self.from.is_some(), self.kind.is_some()];
        let chosen = choices.iter().filter(|&&chosen| chosen).count();
        if chosen != 1 {
            let found = if chosen == 0 { "none" } else { "several" };
            let expected = "exactly one of preset, from and kind";
            return Err(ModelError::config("model", expected, found));
        }
        if let Some(folder) = &self.from {
            let sizes = self.mamba_sizes().into_iter().chain(self.transformer_sizes());
            refuse(sizes, "no size beside from, whose checkpoint has them all")?;
            return Ok(ResolvedModel::From(folder.clone()));
        }
        refuse(self.transformer_sizes(), "no such size for a mamba model")?;
        let data_vocab_size = data_vocab_size.map(|size| size as usize);
        let mut config = match &self.preset {
            Some(name) => preset(name)?,
            None => self.every_size(data_vocab_size)?,
        };
        config.d_model = self.d_model.unwrap_or(config.d_model);
        config.n_layers = self.n_layers.unwrap_or(config.n_layers);
        config.d_state = self.d_state.unwrap_or(config.d_state);
        config.d_conv = self.d_conv.unwrap_or(config.d_conv);
        config.expand = self.expand.unwrap_or(config.expand);
        config.dt_rank =
            self.dt_rank.unwrap_or_else(|| MambaConfig::default_dt_rank(config.d_model));
        config.vocab_size = self.vocab_size.or(data_vocab_size).unwrap_or(config.vocab_size);
        if let Some(size) = data_vocab_size.filter(|&size| size > config.vocab_size) {
            let expected = format!("at least {size}, the data set's vocabulary");
            return Err(ModelError::config("model.vocab_size", expected, config.vocab_size));
        }
        config.check().map_err(in_table)?;
        Ok(ResolvedModel::Mamba(config))
    }

    /// The sizes of a model that has no preset: all but `dt_rank`, and the vocabulary where the data has one, must
    /// be given.
    fn every_size(&self, data_vocab_size: Option<usize>) -> Result<MambaConfig> {
        let vocab_size = ("vocab_size", self.vocab_size.or(data_vocab_size));
        for (key, size) in self.mamba_sizes().into_iter().skip(1).chain([vocab_size]) {
            if size.is_none() && key != "dt_rank" {
                let key = format!("model.{key}");
                return Err(ModelError::config(key, "a size, as there is no preset", "none"));
            }
        }
        let size = |size: Option<usize>| size.unwrap_or_default();
        Ok(MambaConfig::new(size(vocab_size.1), size(self.d_model), size(self.n_layers)))
    }

    fn mamba_sizes(&self) -> [(&'static str, Option<usize>); 7] {
        [
            ("vocab_size", self.vocab_size),
            ("d_model", self.d_model),
            ("n_layers", self.n_layers),
            ("d_state", self.d_state),
            ("d_conv", self.d_conv),
            ("expand", self.expand),
            ("dt_rank", self.dt_rank),
        ]
    }

    fn transformer_sizes(&self) -> [(&'static str, Option<usize>); 3] {
        [
            ("n_heads", self.n_heads),
            ("expansion", self.expansion),
            ("max_seq_len", self.max_seq_len),
        ]
    }
}

impl From<&MambaConfig> for ModelSettings {
    /// The table with every size, as a run writes it down.
    fn from(config: &MambaConfig) -> Self {
        Self {
            kind: Some(ModelKind::Mamba),
            vocab_size: Some(config.vocab_size),
            d_model: Some(config.d_model),
            n_layers: Some(config.n_layers),
            d_state: Some(config.d_state),
            d_conv: Some(config.d_conv),
            expand: Some(config.expand),
            dt_rank: Some(config.dt_rank),
            ..Self::default()
        }
    }
}

/// Refuses the first size that is given.
fn refuse(
    sizes: impl IntoIterator<Item = (&'static str, Option<usize>)>,
    expected: &str,
) -> Result<()> {
    match sizes.into_iter().find_map(|(key, size)| size.map(|size| (key, size))) {
        Some((key, size)) => Err(ModelError::config(format!("model.{key}"), expected, size)),
        None => Ok(()),
    }
}

/// Names a key as the user writes it.
fn in_table(error: ModelError) -> ModelError {
    match error {
        ModelError::Config { key, expected, found } => {
            ModelError::Config { key: format!("model.{key}"), expected, found }
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The table that `json` spells; JSON and TOML are the same to serde here.
    fn settings(json: &str) -> serde_json::Result<ModelSettings> {
        serde_json::from_str(json)
    }

    fn mamba(json: &str, data_vocab_size: Option<u32>) -> MambaConfig {
        match settings(json).expect(json).resolve(data_vocab_size).expect(json) {
            ResolvedModel::Mamba(config) => config,
            ResolvedModel::From(folder) => panic!("{folder:?}"),
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
    }

    #[test]
    fn a_family_with_every_size_needs_no_preset() {
        let sizes = r#"{"kind": "mamba", "d_model": 32, "n_layers": 2, "d_state": 5, "d_conv": 3,
                        "expand": 3}"#;
        let config = mamba(sizes, Some(259));
        assert_eq!((config.vocab_size, config.dt_rank, config.d_inner()), (259, 2, 96));
        let written = ModelSettings::from(&config);
        assert_eq!(written.resolve(None).expect("sizes"), ResolvedModel::Mamba(config));
        assert_eq!(
            refusal(sizes, None),
            "model.vocab_size: expected a size, as there is no preset, found none"
        );
        assert_eq!(
            refusal(r#"{"kind": "mamba", "d_model": 32, "n_layers": 2, "d_state": 5}"#, Some(5)),
            "model.d_conv: expected a size, as there is no preset, found none"
        );
    }

    #[test]
    fn a_checkpoint_says_everything() {
        let settings = settings(r#"{"from": "runs/a"}"#).expect("a folder");
        let resolved = settings.resolve(Some(259)).expect("a folder");
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
        for (json, expected) in [
            (r#""n_heads": 4"#, "model.n_heads: expected no such size for a mamba model, found 4"),
            (r#""d_state": 0"#, "model.d_state: expected 1 to 256, found 0"),
            (
                r#""vocab_size": 100"#,
                "model.vocab_size: expected at least 259, the data set's vocabulary, found 100",
            ),
        ] {
            let json = format!("{{\"preset\": \"mamba-10m\", {json}}}");
            assert_eq!(refusal(&json, Some(259)), expected);
        }
        for (json, expected) in [
            (r#"{"preset": "mamba-10m", "d_modle": 4}"#, "unknown field `d_modle`"),
            (r#"{"kind": "rwkv"}"#, "unknown variant `rwkv`"),
            (r#"{"preset": "mamba-10m", "d_model": -4}"#, "invalid value: integer `-4`"),
        ] {
            let error = settings(json).expect_err(json).to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
