//! The initial values of every tensor of MPT, GPT-Neo, Mamba-2 and hybrids match the code that the
//! family comes from. No device is needed.
//!
//! All models are 64 wide, have MLPs of 256 and 4 layers: expected numbers are written out, so that no formula is tested
//! against itself.

use tidemill_kernels::Cpu;
use tidemill_model::{
    Family, GptNeoConfig, HybridConfig, LanguageModel, LlamaConfig, Mamba2Config, MambaConfig,
    MptConfig,
};

/// The distribution of a tensor's values.
#[derive(Clone, Copy, Debug)]
enum Begin {
    /// The same everywhere.
    All(f32),
    /// Normal around 0 with this standard deviation.
    Normal(f64),
    /// Uniform around 0, up to this distance.
    Uniform(f64),
    /// `ln(1), ln(2), ...` in every row of this many.
    Logarithms(usize),
    /// Logarithms of uniform numbers in `[1, 16)`.
    Rates,
    /// Numbers whose softplus is log-uniform in `[0.001, 0.1]`.
    StepSizes,
}

use Begin::{All, Logarithms, Normal, Rates, StepSizes, Uniform};

/// The allowed error of an estimate, in standard errors.
const STANDARD_ERRORS: f64 = 5.0;

impl Begin {
    fn check(self, name: &str, values: &[f32]) {
        let each = |holds: &dyn Fn(usize, f64) -> bool| {
            for (index, &value) in values.iter().enumerate() {
                assert!(holds(index, value.into()), "{name}[{index}] is {value}, not of {self:?}");
            }
        };
        match self {
            All(expected) => each(&|_, x| x == f64::from(expected)),
            Normal(standard_deviation) => {
                check_moments(name, values, [0.0, standard_deviation], 3.0);
                // 4.55 in a hundred are beyond two standard deviations; of a uniform distribution, none.
                let beyond = |x: &&f32| f64::from(x.abs()) > 2.0 * standard_deviation;
                let share = values.iter().filter(beyond).count() as f64 / values.len() as f64;
                let error = (0.0455 * 0.9545 / values.len() as f64).sqrt();
                let is_normal = (share - 0.0455).abs() < STANDARD_ERRORS * error;
                assert!(is_normal, "{name}: {share} beyond two standard deviations");
            }
            Uniform(bound) => {
                check_moments(name, values, [0.0, bound / 3.0_f64.sqrt()], 1.8);
                each(&|_, x| x.abs() <= bound);
            }
            Logarithms(columns) => each(&|index, x| {
                let expected = ((index % columns + 1) as f64).ln();
                (x - expected).abs() < 1e-6
            }),
            Rates => {
                each(&|_, x| (0.9999..16.0001).contains(&x.exp()));
                let rates: Vec<_> = values.iter().map(|x| x.exp()).collect();
                check_moments(name, &rates, [8.5, 15.0 / 12.0_f64.sqrt()], 1.8);
            }
            StepSizes => {
                let step = |x: f64| x.exp().ln_1p();
                each(&|_, x| (0.999e-3..0.1001).contains(&step(x)));
                // Uniform in [-3, -1].
                let powers: Vec<_> =
                    values.iter().map(|&x| step(x.into()).log10() as f32).collect();
                check_moments(name, &powers, [-2.0, 3.0_f64.sqrt().recip()], 1.8);
            }
        }
    }
}

/// Mean and standard deviation, within the error of this many draws from a distribution of this
/// kurtosis.
fn check_moments(name: &str, values: &[f32], [mean, standard_deviation]: [f64; 2], kurtosis: f64) {
    let count = values.len() as f64;
    let found_mean = values.iter().map(|&x| f64::from(x)).sum::<f64>() / count;
    let squares = values.iter().map(|&x| (f64::from(x) - found_mean).powi(2));
    let found = (squares.sum::<f64>() / count).sqrt();
    let error = (found_mean - mean) / standard_deviation * count.sqrt();
    assert!(error.abs() < STANDARD_ERRORS, "{name}: a mean of {found_mean}, expected {mean}");
    let error = (found / standard_deviation - 1.0) * (4.0 * count / (kurtosis - 1.0)).sqrt();
    assert!(
        error.abs() < STANDARD_ERRORS,
        "{name}: a standard deviation of {found}, expected {standard_deviation}"
    );
}

/// All tensors of a model, in order.
#[derive(Default)]
struct Expected(Vec<(String, Begin)>);

impl Expected {
    /// Tensors whose names begin with `prefix`.
    fn add(&mut self, prefix: &str, tensors: &[(&str, Begin)]) {
        self.0.extend(tensors.iter().map(|&(name, begin)| (format!("{prefix}{name}"), begin)));
    }

    fn check(&self, config: &impl Family) {
        let model = LanguageModel::<Cpu>::new(config).expect("a small model");
        let tensors = model.layout().tensors();
        let names: Vec<_> = self.0.iter().map(|(name, _)| name).collect();
        assert_eq!(tensors.iter().map(|tensor| &tensor.name).collect::<Vec<_>>(), names);
        let arena = model.initialize(29);
        for ((name, begin), tensor) in self.0.iter().zip(tensors) {
            begin.check(name, &arena[tensor.range()]);
        }
    }
}

/// LLM Foundry's `kaiming_normal_`: a deviation of sqrt(2 / inputs), tables like maps of 64 inputs; maps back to the
/// residual stream are divided by sqrt(2 * 4 layers).
#[test]
fn mpt_begins_as_in_llm_foundry() {
    const OF_64_INPUTS: Begin = Normal(0.176_776_695);
    let config = MptConfig {
        max_seq_len: 96,
        qk_ln: true,
        tie_embeddings: false,
        ..MptConfig::new(259, 64, 4, 4)
    };
    let norm = |name| [(name, "weight", All(1.0)), (name, "bias", All(0.0))];
    let map = |name, weight| [(name, "weight", weight), (name, "bias", All(0.0))];
    let layer = [
        norm("norm_1"),
        map("attn.Wqkv", OF_64_INPUTS),
        norm("attn.q_ln"),
        norm("attn.k_ln"),
        map("attn.out_proj", Normal(1.0 / 16.0)),
        norm("norm_2"),
        map("ffn.up_proj", OF_64_INPUTS),
        map("ffn.down_proj", Normal(1.0 / 32.0)),
    ];
    let mut expected = Expected::default();
    expected.add("transformer.", &[("wte.weight", OF_64_INPUTS), ("wpe.weight", OF_64_INPUTS)]);
    for index in 0..4 {
        for (name, kind, begin) in layer.concat() {
            expected.add(&format!("transformer.blocks.{index}.{name}."), &[(kind, begin)]);
        }
    }
    expected.add("transformer.norm_f.", &[("weight", All(1.0)), ("bias", All(0.0))]);
    expected.add("lm_head.", &[("weight", OF_64_INPUTS)]);
    expected.check(&config);
}

/// A deviation of 0.02 everywhere, and no map divided.
#[test]
fn gpt_neo_begins_as_in_transformers() {
    const MAP: Begin = Normal(0.02);
    let config = GptNeoConfig { max_seq_len: 96, ..GptNeoConfig::new(259, 64, 4, 4) };
    let mut expected = Expected::default();
    expected.add("transformer.", &[("wte.weight", MAP), ("wpe.weight", MAP)]);
    for index in 0..4 {
        let layer = [
            ("ln_1.weight", All(1.0)),
            ("ln_1.bias", All(0.0)),
            ("attn.attention.q_proj.weight", MAP),
            ("attn.attention.k_proj.weight", MAP),
            ("attn.attention.v_proj.weight", MAP),
            ("attn.attention.out_proj.weight", MAP),
            ("attn.attention.out_proj.bias", All(0.0)),
            ("ln_2.weight", All(1.0)),
            ("ln_2.bias", All(0.0)),
            ("mlp.c_fc.weight", MAP),
            ("mlp.c_fc.bias", All(0.0)),
            ("mlp.c_proj.weight", MAP),
            ("mlp.c_proj.bias", All(0.0)),
        ];
        expected.add(&format!("transformer.h.{index}."), &layer);
    }
    expected.add("transformer.ln_f.", &[("weight", All(1.0)), ("bias", All(0.0))]);
    expected.check(&config);
}

/// Normal with a deviation of 0.02, but for norms, and biases where there are some.
#[test]
fn llama_begins_as_in_transformers() {
    const MAP: Begin = Normal(0.02);
    let config = LlamaConfig { n_kv_heads: 2, qkv_bias: true, ..LlamaConfig::new(259, 64, 2, 4) };
    let mut expected = Expected::default();
    expected.add("model.", &[("embed_tokens.weight", MAP)]);
    for index in 0..2 {
        let layer = [
            ("input_layernorm.weight", All(1.0)),
            ("self_attn.q_proj.weight", MAP),
            ("self_attn.q_proj.bias", All(0.0)),
            ("self_attn.k_proj.weight", MAP),
            ("self_attn.k_proj.bias", All(0.0)),
            ("self_attn.v_proj.weight", MAP),
            ("self_attn.v_proj.bias", All(0.0)),
            ("self_attn.o_proj.weight", MAP),
            ("post_attention_layernorm.weight", All(1.0)),
            ("mlp.gate_proj.weight", MAP),
            ("mlp.up_proj.weight", MAP),
            ("mlp.down_proj.weight", MAP),
        ];
        expected.add(&format!("model.layers.{index}."), &layer);
    }
    expected.add("model.", &[("norm.weight", All(1.0))]);
    expected.check(&config);
}

/// As in state-spaces' `mamba2.py`; the last map is divided by the root of 4 layers.
#[test]
fn mamba2_begins_as_in_state_spaces() {
    let config = Mamba2Config { head_width: 2, d_state: 16, ..Mamba2Config::new(259, 64, 4) };
    let layer = [
        ("norm.weight", All(1.0)),
        ("mixer.in_proj.weight", Uniform(0.125)),
        ("mixer.conv1d.weight", Uniform(0.5)),
        ("mixer.conv1d.bias", Uniform(0.5)),
        ("mixer.dt_bias", StepSizes),
        ("mixer.A_log", Rates),
        ("mixer.D", All(1.0)),
        // Its bound is that of 128 inputs.
        ("mixer.out_proj.weight", Uniform(0.088_388_348 / 2.0)),
        ("mixer.norm.weight", All(1.0)),
    ];
    let mut expected = Expected::default();
    expected.add("backbone.", &[("embeddings.weight", Normal(0.02))]);
    for index in 0..4 {
        expected.add(&format!("backbone.layers.{index}."), &layer);
    }
    expected.add("backbone.norm_f.", &[("weight", All(1.0))]);
    expected.check(&config);
}

/// Mamba and Mamba-2 blocks as in state-spaces' code, their last maps divided by the root of 4 layers; attention blocks with
/// 0.02, divided by sqrt(2 * 4 layers) on the way back to the residual stream; Llama blocks with 0.02.
#[test]
fn a_hybrid_begins_as_its_blocks() {
    let of_128_inputs = 0.088_388_348;
    // 128 channels, 16 states, 4 taps, a rank of 4.
    let mamba = [
        ("norm.weight", All(1.0)),
        ("mixer.in_proj.weight", Uniform(0.125)),
        ("mixer.conv1d.weight", Uniform(0.5)),
        ("mixer.conv1d.bias", Uniform(0.5)),
        ("mixer.x_proj.weight", Uniform(of_128_inputs)),
        ("mixer.dt_proj.weight", Uniform(0.5)),
        ("mixer.dt_proj.bias", StepSizes),
        ("mixer.A_log", Logarithms(16)),
        ("mixer.D", All(1.0)),
        ("mixer.out_proj.weight", Uniform(of_128_inputs / 2.0)),
    ];
    let mamba2 = [
        ("norm.weight", All(1.0)),
        ("mixer.in_proj.weight", Uniform(0.125)),
        ("mixer.conv1d.weight", Uniform(0.5)),
        ("mixer.conv1d.bias", Uniform(0.5)),
        ("mixer.dt_bias", StepSizes),
        ("mixer.A_log", Rates),
        ("mixer.D", All(1.0)),
        ("mixer.out_proj.weight", Uniform(of_128_inputs / 2.0)),
        ("mixer.norm.weight", All(1.0)),
    ];
    let divided = Normal(0.007_071_067_8);
    let attention = [
        ("norm_1.weight", All(1.0)),
        ("attn.Wqkv.weight", Normal(0.02)),
        ("attn.out_proj.weight", divided),
        ("norm_2.weight", All(1.0)),
        ("ffn.up_proj.weight", Normal(0.02)),
        ("ffn.down_proj.weight", divided),
    ];
    let llama = [
        ("input_layernorm.weight", All(1.0)),
        ("self_attn.q_proj.weight", Normal(0.02)),
        ("self_attn.k_proj.weight", Normal(0.02)),
        ("self_attn.v_proj.weight", Normal(0.02)),
        ("self_attn.o_proj.weight", Normal(0.02)),
        ("post_attention_layernorm.weight", All(1.0)),
        ("mlp.gate_proj.weight", Normal(0.02)),
        ("mlp.up_proj.weight", Normal(0.02)),
        ("mlp.down_proj.weight", Normal(0.02)),
    ];
    type Block<'a> = &'a [(&'a str, Begin)];
    // Without attention there need not be heads.
    let patterns: [(&str, usize, [Block<'_>; 4]); 4] = [
        ("ma", 4, [&mamba, &attention, &mamba, &attention]),
        ("la", 4, [&llama, &attention, &llama, &attention]),
        ("ms", 0, [&mamba, &mamba2, &mamba, &mamba2]),
        ("lsam", 4, [&llama, &mamba2, &attention, &mamba]),
    ];
    for (letters, heads, blocks) in patterns {
        let pattern = letters.parse().expect("a pattern");
        let mut config = HybridConfig::new(MambaConfig::new(259, 64, 4), pattern, heads);
        // 64 heads, enough to judge their distribution.
        config.mamba2.head_width = 2;
        let mut expected = Expected::default();
        expected.add("backbone.", &[("embeddings.weight", Normal(0.02))]);
        for (index, tensors) in blocks.into_iter().enumerate() {
            expected.add(&format!("backbone.layers.{index}."), tensors);
        }
        expected.add("backbone.norm_f.", &[("weight", All(1.0))]);
        expected.check(&config);
    }
}
