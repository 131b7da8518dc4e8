//! Small models of odd sizes, of every family, for the bodies that all families go through.

use tidemill_kernels::Backend;
use tidemill_model::hybrid::{LlamaSizes, Mamba2Sizes};
use tidemill_model::mpt::{LogitScale, MptPositions};
use tidemill_model::{
    GptNeoConfig, HybridConfig, LanguageModel, LlamaConfig, Mamba2Config, MambaConfig, Microbatch,
    MicrobatchShape, ModelConfig, MptConfig, Recompute, Trainable,
};

use super::arm::Arm;
use super::lane::{
    Walk, bits, loss_bits, moved_parameters, odd_config, run_lane_of_documents, tokens,
};

/// Heads that are no power of two, blocks with and without windows, every switch of MPT both ways, a Mamba-2 of two groups
/// whose step sizes are clamped, and a hybrid of every kind of block.
pub fn models_beside_mamba() -> Vec<(&'static str, ModelConfig)> {
    let mamba2 = Mamba2Config {
        d_state: 5,
        d_conv: 3,
        head_width: 3,
        n_groups: 2,
        delta_limits: [0.02, 0.8],
        ..Mamba2Config::new(13, 6, 2)
    };
    let alibi = MptConfig { expansion: 3, ..MptConfig::new(13, 9, 2, 3).with_alibi_and_no_bias() };
    let foundry = MptConfig {
        max_seq_len: 160,
        qk_ln: true,
        clip_qkv: Some(1.5),
        softmax_scale: Some(0.6),
        logit_scale: Some(LogitScale::InverseRootOfWidth),
        positions: MptPositions::Learned,
        tie_embeddings: false,
        ..MptConfig::new(13, 10, 1, 2)
    };
    let gpt_neo =
        GptNeoConfig { window_size: 5, max_seq_len: 160, ..GptNeoConfig::new(13, 6, 3, 2) };
    let llama = LlamaConfig {
        n_kv_heads: 1,
        head_width: Some(4),
        mlp_width: 7,
        rope_theta: 30.0,
        ..LlamaConfig::new(13, 6, 2, 3)
    };
    let qwen2 = LlamaConfig {
        n_kv_heads: 2,
        mlp_width: 9,
        window_size: Some(6),
        qkv_bias: true,
        ..LlamaConfig::new(13, 8, 1, 4)
    };
    let qwen3 = LlamaConfig {
        n_kv_heads: 2,
        head_width: Some(6),
        mlp_width: 9,
        rope_theta: 30.0,
        qk_norm: true,
        ..LlamaConfig::new(13, 10, 2, 4)
    };
    let mamba = |blocks| MambaConfig { d_state: 3, d_conv: 3, ..MambaConfig::new(13, 6, blocks) };
    let hybrid = |letters: &str, blocks| {
        HybridConfig::new(mamba(blocks), letters.parse().expect("a pattern"), 3)
    };
    let of_mamba_and_attention = HybridConfig { expansion: 2, ..hybrid("mam", 3) };
    let of_all = hybrid("lams", 4);
    let of_all = HybridConfig {
        expansion: 2,
        llama: LlamaSizes {
            n_kv_heads: 1,
            head_width: Some(4),
            mlp_width: 7,
            rope_theta: 30.0,
            ..of_all.llama
        },
        mamba2: Mamba2Sizes { head_width: 3, n_groups: 2 },
        ..of_all
    };
    vec![
        ("mpt", alibi.into()),
        ("mpt of foundry", foundry.into()),
        ("gpt-neo", gpt_neo.into()),
        ("llama", llama.into()),
        ("qwen2 with a window", qwen2.into()),
        ("qwen3", qwen3.into()),
        ("hybrid", of_mamba_and_attention.into()),
        ("hybrid of all kinds", of_all.into()),
        ("mamba2", mamba2.into()),
    ]
}

/// The models of [`models_beside_mamba`], and a Mamba.
pub fn models() -> impl Iterator<Item = (&'static str, ModelConfig)> {
    [("mamba", odd_config().into())].into_iter().chain(models_beside_mamba())
}

/// The models of [`models`], each with a head that reads the embedding table and with one that has its own.
pub fn tied_and_untied<B: Backend>() -> Vec<(String, LanguageModel<B>)> {
    let mut both = Vec::new();
    for (name, mut config) in models() {
        for tied in [true, false] {
            *match &mut config {
                ModelConfig::Mamba(config) => &mut config.tie_embeddings,
                ModelConfig::Mamba2(config) => &mut config.tie_embeddings,
                ModelConfig::Mpt(config) => &mut config.tie_embeddings,
                ModelConfig::GptNeo(config) => &mut config.tie_embeddings,
                ModelConfig::Llama(config) => &mut config.tie_embeddings,
                ModelConfig::Hybrid(config) => &mut config.mamba.tie_embeddings,
                _ => panic!("{name} is of a family that is new to these tests"),
            } = tied;
            let head = if tied { "tied" } else { "untied" };
            both.push((format!("{name}, {head}"), LanguageModel::new(&config).expect(name)));
        }
    }
    both
}

/// Recomputing blocks give the same bits, for samples of one text and of several.
pub fn recompute_changes_no_bit<B: Backend>(arm: &Arm<B>) {
    let positions = arm.sizes.choose(37, 11);
    let walk = Walk { samples: 3, positions, samples_per_grain: 2, grains_per_microbatch: 2 };
    for (name, mut config) in models() {
        // At least two blocks of each kind, as a single one keeps its values.
        match &mut config {
            ModelConfig::Mpt(config) => config.n_layers = 2,
            ModelConfig::Llama(config) => config.n_layers = 2,
            ModelConfig::Hybrid(config) => config.mamba.n_layers *= 2,
            _ => {}
        }
        let model = LanguageModel::new(&config).expect(name);
        let arena = moved_parameters(&model, 0.3);
        let tokens = tokens(9, walk.samples, positions, model.vocab_size());
        let run = |model: &LanguageModel<B>, document_end| {
            let (losses, gradients) =
                run_lane_of_documents(arm, model, &arena, &tokens, walk, document_end);
            (loss_bits(&losses), bits(&gradients))
        };
        let ends = [None, Some(0)];
        let kept = ends.map(|end| run(&model, end));
        assert!(kept[0] != kept[1], "{}: {name}: one document", arm.name);
        let model = model.with_recompute(Recompute::Block);
        for (end, kept) in ends.into_iter().zip(kept) {
            assert!(run(&model, end) == kept, "{}: {name}, {end:?}: other bits", arm.name);
        }
    }
}

/// A sample longer than the table of positions is refused before anything runs.
pub fn positions_end<B: Backend>(arm: &Arm<B>) {
    let config = GptNeoConfig { max_seq_len: 7, ..GptNeoConfig::new(13, 6, 1, 2) };
    let model = LanguageModel::new(&config).expect("sizes");
    arm.with_parameters(&model, &model.initialize(1), |device, parameters| {
        let shape =
            |samples, positions| MicrobatchShape { samples, positions, samples_per_grain: 1 };
        let expected = "max_seq_len: expected at least 8, the positions of a sample, found 7";
        let error = Trainable::plan(&model, device, shape(1, 8)).map(|_| ()).expect_err("too long");
        assert_eq!(error.to_string(), expected);
        let mut workspace = Trainable::plan(&model, device, shape(2, 7)).expect("fits");
        let microbatch = Microbatch {
            samples: &[vec![1; 9]],
            positions: 8,
            samples_per_grain: 1,
            document_end: None,
        };
        let mut source = parameters.source(model.layout());
        let error = model
            .row_losses(device, &mut workspace, &mut source, microbatch)
            .expect_err("too long");
        assert_eq!(error.to_string(), expected);
    });
}
