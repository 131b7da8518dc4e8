//! The sizes of a GPT-Neo model, checked, and its `config.json`.

use std::path::Path;

use serde_json::{Value, json};

use crate::error::{ModelError, Result};
use crate::family::{
    HeadKeys, SpecialTokens, check_norm_eps, check_sizes, head_width, head_width_of, period,
};
use crate::hugging_face::keys::Keys;

/// A GPT-Neo language model.
#[derive(Clone, Debug, PartialEq)]
pub struct GptNeoConfig {
    /// v, the tokens of the vocabulary.
    pub vocab_size: usize,
    /// d, the width of the residual stream.
    pub d_model: usize,
    /// h
    pub n_heads: usize,
    /// The number of blocks.
    pub n_layers: usize,
    /// f, the width of the MLP.
    pub mlp_width: usize,
    /// The positions of the learned table: no sample may be longer.
    pub max_seq_len: usize,
    /// How many positions a query of a local block attends to, its own among them.
    pub window_size: usize,
    /// The attention of the blocks, in turn: repeated from the first block to the last.
    pub reaches: Vec<Reach>,
    /// Added to the variance before the root of every norm.
    pub norm_eps: f64,
    /// Whether the head reads the embedding table or a table of its own, `lm_head`.
    pub tie_embeddings: bool,
    /// The tokens that files name for generation; no kernel reads them.
    pub special_tokens: SpecialTokens,
}

/// Which positions a block attends to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// All positions up to the query's own.
    Global,
    /// A window.
    Local,
}

impl Reach {
    fn name(self) -> &'static str {
        match self {
            Self::Global => "global",
            Self::Local => "local",
        }
    }
}

impl GptNeoConfig {
    /// A model with the defaults of transformers for everything but these sizes: an MLP 4 times as
    /// wide, 2,048 positions, blocks that alternate between all positions and windows of 256, tied
    /// embeddings.
    pub fn new(vocab_size: usize, d_model: usize, n_layers: usize, n_heads: usize) -> Self {
        Self {
            vocab_size,
            d_model,
            n_heads,
            n_layers,
            mlp_width: 4 * d_model,
            max_seq_len: 2048,
            window_size: 256,
            reaches: vec![Reach::Global, Reach::Local],
            norm_eps: 1e-5,
            tie_embeddings: true,
            special_tokens: SpecialTokens::default(),
        }
    }

    /// The attention of block `index`.
    pub fn reach(&self, index: usize) -> Reach {
        self.reaches.get(index % self.reaches.len().max(1)).copied().unwrap_or(Reach::Global)
    }

    /// Refuses sizes that no model can have.
    ///
    /// # Errors
    /// [`ModelError::Config`] naming the first key whose value is out of bounds.
    pub fn check(&self) -> Result<()> {
        check_sizes(&[
            ("vocab_size", self.vocab_size, 1..=1 << 24),
            ("d_model", self.d_model, 1..=1 << 18),
            ("n_layers", self.n_layers, 1..=1 << 12),
            ("intermediate_size", self.mlp_width, 1..=1 << 22),
            ("max_seq_len", self.max_seq_len, 1..=1 << 24),
            ("window_size", self.window_size, 1..=1 << 24),
        ])?;
        if self.reaches.is_empty() {
            return Err(ModelError::config("attention_layers", "at least one", "none"));
        }
        head_width(self.d_model, self.n_heads)?;
        check_norm_eps(self.norm_eps)
    }

    /// The config that the JSON of the file `path` gives.
    ///
    /// # Errors
    /// A value of a wrong type or size, or a feature that this crate cannot run: each named with the file.
    pub fn parse(path: &Path, value: &Value) -> Result<Self> {
        let keys = Keys::of(path, value)?;
        let gelu = keys.text("activation_function", "gelu_new")?;
        if !matches!(gelu.as_str(), "gelu_new" | "gelu_pytorch_tanh") {
            return Err(keys.wrong("activation_function", "\"gelu_new\""));
        }
        let d_model = keys.size("hidden_size", Some(2048), 1..=1 << 18)?;
        let n_layers = keys.size("num_layers", Some(24), 1..=1 << 12)?;
        let types = keys.value("attention_types");
        let reaches = types.map_or_else(|| Some(Self::new(1, 1, 1, 1).reaches), reaches);
        let expected = "lists of \"global\" and \"local\" with how often each repeats";
        let reaches = reaches.ok_or_else(|| keys.wrong("attention_types", expected))?;
        if types.is_some() && reaches.len() != n_layers {
            let expected = format!("as many layers as num_layers, which is {n_layers}");
            let error = ModelError::config("attention_types", expected, reaches.len());
            return Err(keys.refused(error));
        }
        let ids = |key| if keys.has(key) { keys.token(key) } else { Ok(Some(50_256)) };
        let config = Self {
            vocab_size: keys.size("vocab_size", Some(50_257), 1..=1 << 24)?,
            d_model,
            n_heads: keys.size("num_heads", Some(16), 1..=1 << 18)?,
            n_layers,
            mlp_width: keys.size("intermediate_size", Some(4 * d_model), 1..=1 << 22)?,
            max_seq_len: keys.size("max_position_embeddings", Some(2048), 1..=1 << 24)?,
            window_size: keys.size("window_size", Some(256), 1..=1 << 24)?,
            reaches: period(&reaches).to_vec(),
            norm_eps: keys.positive("layer_norm_epsilon", 1e-5)?,
            tie_embeddings: keys.flag("tie_word_embeddings", true)?,
            special_tokens: SpecialTokens {
                bos: ids("bos_token_id")?,
                eos: ids("eos_token_id")?,
                pad: keys.token("pad_token_id")?,
            },
        };
        let names = HeadKeys { heads: "num_heads", width: "hidden_size" };
        head_width_of(names, d_model, config.n_heads)
            .and_then(|_| config.check())
            .map_err(|error| keys.refused(error))?;
        // Where a file has both keys, transformers uses this one.
        if keys.value("attention_layers").is_some_and(|layers| *layers != config.layer_names()) {
            return Err(keys.wrong("attention_layers", "the layers of attention_types"));
        }
        Ok(config)
    }

    /// The attention of each block, as files write it.
    fn layer_names(&self) -> Value {
        (0..self.n_layers).map(|index| self.reach(index).name()).collect()
    }

    /// The `config.json` of this model, with every key that transformers reads.
    pub fn to_json(&self) -> Value {
        let layers = self.layer_names();
        json!({
            "activation_function": "gelu_new",
            "architectures": ["GPTNeoForCausalLM"],
            "attention_dropout": 0.0,
            "attention_layers": layers,
            "attention_types": [[layers, 1]],
            "bos_token_id": self.special_tokens.bos,
            "classifier_dropout": 0.1,
            "embed_dropout": 0.0,
            "eos_token_id": self.special_tokens.eos,
            "hidden_size": self.d_model,
            "initializer_range": 0.02,
            "intermediate_size": self.mlp_width,
            "layer_norm_epsilon": self.norm_eps,
            "max_position_embeddings": self.max_seq_len,
            "model_type": "gpt_neo",
            "num_heads": self.n_heads,
            "num_layers": self.n_layers,
            "pad_token_id": self.special_tokens.pad,
            "resid_dropout": 0.0,
            "tie_word_embeddings": self.tie_embeddings,
            "torch_dtype": "float32",
            "use_cache": true,
            "vocab_size": self.vocab_size,
            "window_size": self.window_size,
        })
    }
}

/// `[[["global", "local"], 12]]`: lists, and how often each is repeated.
fn reaches(types: &Value) -> Option<Vec<Reach>> {
    const MOST: u64 = 1 << 12;
    let mut reaches = Vec::new();
    for entry in types.as_array()? {
        let [list, times] = entry.as_array()?.as_slice() else { return None };
        let list = list.as_array()?.iter().map(|name| match name.as_str()? {
            "global" => Some(Reach::Global),
            "local" => Some(Reach::Local),
            _ => None,
        });
        let list: Vec<_> = list.collect::<Option<_>>()?;
        let times = times.as_u64().filter(|&times| times <= MOST)?;
        if list.len() as u64 * times > MOST {
            return None;
        }
        (0..times).for_each(|_| reaches.extend_from_slice(&list));
    }
    Some(reaches)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(value: &Value) -> Result<GptNeoConfig> {
        GptNeoConfig::parse(Path::new("m/config.json"), value)
    }

    #[test]
    fn what_is_written_reads_back() {
        let plain = GptNeoConfig::new(259, 12, 5, 3);
        let other = GptNeoConfig {
            mlp_width: 31,
            window_size: 7,
            max_seq_len: 40,
            reaches: vec![Reach::Local, Reach::Local, Reach::Global],
            tie_embeddings: false,
            special_tokens: SpecialTokens { bos: None, eos: Some(4), pad: None },
            ..plain.clone()
        };
        for config in [plain, other] {
            assert_eq!(parse(&config.to_json()).expect("parses"), config);
        }
    }

    #[test]
    fn a_silent_file_means_what_transformers_means() {
        let config = parse(&json!({"model_type": "gpt_neo"})).expect("parses");
        let special_tokens = SpecialTokens { bos: Some(50_256), eos: Some(50_256), pad: None };
        let expected = GptNeoConfig::new(50_257, 2048, 24, 16);
        assert_eq!(config, GptNeoConfig { special_tokens, ..expected });
        let types = json!({"num_layers": 4, "attention_types": [[["global", "local"], 2]]});
        assert_eq!(parse(&types).expect("parses").reaches, [Reach::Global, Reach::Local]);
    }

    #[test]
    fn what_cannot_run_is_named() {
        for (config, expected) in [
            (json!({"activation_function": "relu"}), "activation_function: expected \"gelu_new\""),
            (
                json!({"attention_types": [[["global"], 2]]}),
                "attention_types: expected as many layers as num_layers, which is 24, found 2",
            ),
            (
                json!({"num_layers": 2, "attention_layers": ["local", "global"]}),
                "attention_layers: expected the layers of attention_types, found a list",
            ),
            (json!({"attention_types": [[["near"], 24]]}), "attention_types: expected lists"),
            (json!({"attention_types": 3}), "attention_types: expected lists"),
            (json!({"window_size": 0}), "window_size: expected a whole number"),
            (
                json!({"num_heads": 7}),
                "num_heads: expected a divisor of hidden_size, which is 2048, found 7",
            ),
        ] {
            let error = parse(&config).expect_err("refused").to_string();
            assert!(error.starts_with(&format!("m/config.json: {expected}")), "{error}");
        }
    }
}
