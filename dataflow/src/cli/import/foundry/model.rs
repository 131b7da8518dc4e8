//! `model` of LLM Foundry: `mpt_causal_lm` as the MPT family, `hf_causal_lm` as a folder to start from.

use super::super::document::Value;
use super::super::translation::Translation;
use crate::job::config::PLACEHOLDER;

/// A part of the name of a Hugging Face model, in lower case, and the family that reads the model. The first that occurs in a name counts.
const FAMILIES: [(&str, &str); 7] = [
    ("gpt-neo-", "GPT-Neo"),
    ("llama", "Llama"),
    ("mistral", "Mistral"),
    ("qwen2", "Qwen2"),
    ("qwen3", "Qwen3"),
    ("mpt", "MPT"),
    ("mamba", "Mamba"),
];

pub(super) fn translate(translation: &mut Translation) -> Result<(), String> {
    match translation.text("model.name")?.as_deref() {
        Some("mpt_causal_lm") => mpt(translation)?,
        Some("hf_causal_lm") => hugging_face(translation)?,
        _ => {
            translation.leave(&["model"], "No such model; this file names another in its place");
            translation.fill_in("model.preset", "mpt-125m", &[], "what is trained");
        }
    }
    Ok(())
}

/// Sizes of `MPTConfig`: their key there and here, and what holds where a file says nothing.
const SIZES: [(&str, &str, u64); 6] = [
    ("model.d_model", "model.d_model", 2048),
    ("model.n_layers", "model.n_layers", 24),
    ("model.n_heads", "model.n_heads", 16),
    ("model.expansion_ratio", "model.expansion", 4),
    ("model.max_seq_len", "model.max_seq_len", 2048),
    ("model.vocab_size", "model.vocab_size", 50_368),
];

const OWN_DEFAULT: &str = "LLM Foundry's default";

fn mpt(translation: &mut Translation) -> Result<(), String> {
    translation.write("model.kind", "mpt", &["model.name"], "");
    for (path, key, default) in SIZES {
        match translation.number(path)? {
            None => translation.write(key, default as i64, &[path], OWN_DEFAULT),
            Some(size) if size.fract() == 0.0 && (1.0..1e9).contains(&size) => {
                translation.write(key, size as i64, &[path], "");
            }
            Some(_) => translation.fill_in(key, default as i64, &[path], "a whole number"),
        }
    }
    for (path, key) in [
        ("model.attn_config.alibi", "model.alibi"),
        ("model.attn_config.qk_ln", "model.qk_ln"),
        ("model.no_bias", "model.no_bias"),
    ] {
        let written = translation.flag(path)?;
        let remark = if written.is_none() { OWN_DEFAULT } else { "" };
        translation.write(key, written.unwrap_or(false), &[path], remark);
    }
    for (path, key) in [
        ("model.attn_config.clip_qkv", "model.clip_qkv"),
        ("model.attn_config.softmax_scale", "model.softmax_scale"),
    ] {
        if let Some(number) = translation.number(path)? {
            translation.write(key, number, &[path], "");
        }
    }
    let scale = "model.logit_scale";
    match translation.value(scale).cloned() {
        None => {}
        Some(Value::Text(name)) if name == "inv_sqrt_d_model" => {
            translation.write(scale, name, &[scale], "");
        }
        Some(_) => {
            let number = translation.number(scale)?.unwrap_or(1.0);
            translation.write(scale, number, &[scale], "");
        }
    }
    recompute(translation)?;
    mpt_alike(translation)?;
    translation.leave(&["model"], "The MPT here has no such thing");
    Ok(())
}

/// Settles what needs no key, since the MPT here has no other.
fn mpt_alike(translation: &mut Translation) -> Result<(), String> {
    const ALIKE: &str = "Without a key: there is no other MPT here";
    for path in ["model.attn_config.attn_pdrop", "model.resid_pdrop", "model.emb_pdrop"] {
        match translation.number(path)? {
            Some(0.0) => translation.remark("model", &[path], ALIKE),
            _ => translation.leave(&[path], "There is no dropout"),
        }
    }
    for (path, alike) in [
        ("model.attn_config.attn_type", &["multihead_attention"][..]),
        ("model.ffn_config.ffn_type", &["mptmlp"]),
        ("model.norm_type", &["low_precision_layernorm", "layernorm"]),
        ("model.init_config.name", &["kaiming_normal_"]),
        ("model.init_config.init_nonlinearity", &["relu"]),
        ("model.init_config.fan_mode", &["fan_in"]),
        ("model.init_config.mode", &["fan_in"]),
        ("model.attn_config.alibi_bias_max", &["8"]),
        ("model.attn_config.rope", &["false"]),
        ("model.attn_config.qk_gn", &["false"]),
        ("model.attn_config.prefix_lm", &["false"]),
        ("model.tie_word_embeddings", &["true"]),
        ("model.embedding_fraction", &["1"]),
        ("model.init_config.init_div_is_residual", &["true"]),
        ("model.init_config.emb_init_std", &[]),
        ("model.attn_config.sliding_window_size", &["-1"]),
    ] {
        let text = translation.text(path)?;
        if text.is_some_and(|text| alike.contains(&text.as_str())) {
            translation.remark("model", &[path], ALIKE);
        }
    }
    let positions = "model.learned_pos_emb";
    let alibi = translation.flag("model.attn_config.alibi")?.unwrap_or(false);
    // LLM Foundry ignores `learned_pos_emb` where ALiBi is on.
    if alibi || translation.flag(positions)? == Some(true) {
        let reason = "Without a key: positions are learned where model.alibi is false";
        translation.remark("model", &[positions], reason);
    }
    translation.leave(&[positions], "Without ALiBi positions are learned");
    let speed = [
        "model.init_device",
        "model.attn_config.attn_impl",
        "model.loss_fn",
        "model.verbose",
        "model.use_cache",
        "model.fc_type",
        "model.ffn_config.fc_type",
        "model.attn_config.fused_qkv",
        "model.init_config.verbose",
    ];
    translation.remark(
        "model",
        &speed,
        "Without a key: of PyTorch, of speed, never of the numbers",
    );
    translation.remark(
        "model",
        &["model.attn_config.attn_uses_sequence_id"],
        "Without a key here: data.document_boundaries = \"reset\" keeps documents apart",
    );
    Ok(())
}

/// Writes the setting of recomputation in blocks.
fn recompute(translation: &mut Translation) -> Result<(), String> {
    let path = "fsdp_config.activation_checkpointing";
    if translation.flag(path)? == Some(true) {
        translation.write("model.recompute", "block", &[path], "");
    }
    Ok(())
}

fn hugging_face(translation: &mut Translation) -> Result<(), String> {
    let path = "model.pretrained_model_name_or_path";
    let name = translation.text(path)?.unwrap_or_else(|| PLACEHOLDER.to_owned());
    let lower = name.to_ascii_lowercase();
    let family = FAMILIES.iter().find(|(word, _)| lower.contains(word)).map(|(_, family)| family);
    let what = match family {
        Some(family) => {
            format!(
                "the folder of this {family} model as Hugging Face has it, since none is fetched"
            )
        }
        None => "the folder of a model that can be read".to_owned(),
    };
    if family.is_none() {
        translation.leave(
            &[path],
            "Not known to be a Mamba, MPT, GPT-Neo, Llama, Mistral, Qwen2 or Qwen3, which alone are read",
        );
    }
    translation.fill_in("model.from", name, &["model.name", path], &what);
    recompute(translation)?;
    let pretrained = "model.pretrained";
    if translation.flag(pretrained)? == Some(false) {
        translation.leave(
            &[pretrained],
            "model.from begins with the weights of its folder; new weights have a preset or a kind in its place",
        );
    } else {
        translation.remark("model", &[pretrained], "Without a key: model.from has the weights");
    }
    let torch = [
        "model.init_device",
        "model.use_auth_token",
        "model.trust_remote_code",
        "model.use_flash_attention_2",
        "model.use_train_metrics",
        "model.load_in_8bit",
        "model.attn_implementation",
        "model.use_logits",
    ];
    translation.remark("model", &torch, "Without a key: of PyTorch and of the hub");
    translation.leave(&["model.peft_config"], "There is no LoRA: all parameters are trained");
    translation.leave(
        &["model.config_overrides"],
        "model.from takes no sizes beside its folder's; change its config.json",
    );
    translation.leave(&["model"], "model.from has its model from its folder alone");
    Ok(())
}
