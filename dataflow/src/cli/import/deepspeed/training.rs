//! `optimizer`, `scheduler` and `gradient_clipping` of DeepSpeed.

use super::super::optimizer::{
    Decay, Defaults, Settings, is_auto, number_or_auto, write, write_clipping, write_or_fill_in,
};
use super::super::translation::Translation;
use super::count;

const TOTAL: &str = "scheduler.params.total_num_steps";
const WARMUP: &str = "scheduler.params.warmup_num_steps";

/// How long the run is, which the end of a schedule tells.
pub(super) fn length(translation: &mut Translation) -> Result<(), String> {
    match count(translation, TOTAL)? {
        Some(steps) => translation.write("run.steps", steps as i64, &[TOTAL], "the schedule's"),
        None => translation.fill_in("run.steps", 1000, &[TOTAL], "how long the run is"),
    }
    Ok(())
}

pub(super) fn optimizer(translation: &mut Translation) -> Result<(), String> {
    let kind = "optimizer.type";
    let scheduler = translation.text("scheduler.type")?;
    // Their rate is the schedule's own; others multiply the optimizer's.
    let rate: &[&str] = match scheduler.as_deref() {
        Some("WarmupLR" | "WarmupDecayLR") => {
            &["scheduler.params.warmup_max_lr", "optimizer.params.lr"]
        }
        _ => &["optimizer.params.lr"],
    };
    let settings = Settings {
        rate,
        betas: "optimizer.params.betas",
        eps: "optimizer.params.eps",
        decay: "optimizer.params.weight_decay",
    };
    let adamw = Defaults { rate: 1e-3, betas: [0.9, 0.999], eps: Some(1e-8), decay: 0.0 };
    let lion = Defaults { rate: 1e-4, betas: [0.9, 0.99], eps: None, decay: 0.0 };
    let name = translation.text(kind)?.map(|name| name.to_ascii_lowercase());
    let decoupled = "optimizer.params.adam_w_mode";
    match name.as_deref() {
        Some("adam" | "adamw") => {
            let coupled = translation.flag(decoupled)? == Some(false);
            translation.write("optimizer.name", "adamw", &[kind], "");
            if coupled {
                let reason =
                    "Weight decay is never part of the gradient; AdamW's is taken from the weights";
                translation.leave(&[decoupled], reason);
            }
            translation.remark("optimizer", &[decoupled], "Without a key: the name says it");
            write(translation, &settings, &adamw, Decay::Alike)?;
        }
        Some("lion") => {
            translation.write("optimizer.name", "lion", &[kind], "");
            write(translation, &settings, &lion, Decay::Alike)?;
        }
        Some(_) => {
            translation
                .leave(&[kind], "No such optimizer; this file has adamw, with what it is given");
            translation.write("optimizer.name", "adamw", &[], "see the top");
            write(translation, &settings, &adamw, Decay::Alike)?;
        }
        None => {
            translation.fill_in(
                "optimizer.name",
                "adamw",
                &[],
                "the one that DeepSpeed's caller makes",
            );
            write(translation, &settings, &adamw, Decay::Alike)?;
        }
    }
    let speed =
        ["optimizer.params.torch_adam", "optimizer.params.fused", "optimizer.legacy_fusion"];
    translation.remark("optimizer", &speed, "Without a key: of speed, never of the numbers");
    let corrected = "optimizer.params.bias_correction";
    if translation.flag(corrected)? == Some(true) {
        translation.remark(
            "optimizer",
            &[corrected],
            "Without a key: moments are always corrected",
        );
    }
    translation.leave(&["optimizer"], "The optimizer has no such setting");
    let norm = number_or_auto(translation, "gradient_clipping")?;
    write_clipping(translation, norm, &["gradient_clipping"]);
    Ok(())
}

pub(super) fn schedule(translation: &mut Translation) -> Result<(), String> {
    let kind = "scheduler.type";
    let last = "scheduler.params.cos_min_ratio";
    let name = translation.text(kind)?;
    let (curve, end) = match name.as_deref() {
        Some("WarmupLR") => ("constant", None),
        Some("WarmupDecayLR") => ("linear", Some(0.0)),
        Some("WarmupCosineLR") => {
            ("cosine", Some(number_or_auto(translation, last)?.unwrap_or(1e-4)))
        }
        Some(_) => {
            translation.leave(&[kind], "No such schedule; this file has a constant rate");
            ("constant", None)
        }
        None => {
            translation.fill_in(
                "schedule.name",
                "constant",
                &[],
                "the one that DeepSpeed's caller makes",
            );
            translation.write("schedule.warmup_steps", 0, &[], "no scheduler is written");
            return Ok(());
        }
    };
    translation.write("schedule.name", curve, &[kind], "");
    match count_from_zero(translation, WARMUP)? {
        Some(steps) => translation.write("schedule.warmup_steps", steps as i64, &[WARMUP], ""),
        None if name.as_deref().is_some_and(|name| name.starts_with("Warmup")) => {
            write_or_fill_in(
                translation,
                "schedule.warmup_steps",
                1000,
                &[WARMUP],
                "DeepSpeed's default",
            );
        }
        None => translation.write("schedule.warmup_steps", 0, &[], ""),
    }
    if let Some(end) = end {
        if !(0.0..=1.0).contains(&end) {
            return Err(translation.wrong(last, "a number from 0 to 1"));
        }
        write_or_fill_in(translation, "schedule.final_fraction", end, &[last], "");
    }
    warmup_curve(translation, curve)?;
    translation.leave(&["scheduler"], "The schedule has no such setting");
    Ok(())
}

/// The first rate of the warm-up, and its curve.
fn warmup_curve(translation: &mut Translation, curve: &str) -> Result<(), String> {
    for path in ["scheduler.params.warmup_min_lr", "scheduler.params.warmup_min_ratio"] {
        match number_or_auto(translation, path)? {
            Some(0.0) => {
                translation.remark("schedule", &[path], "Without a key: a warm-up begins at 0")
            }
            _ => translation.leave(&[path], "A warm-up begins at 0"),
        }
    }
    let path = "scheduler.params.warmup_type";
    if translation.text(path)?.as_deref() == Some("linear") {
        translation.remark("schedule", &[path], "Without a key: a warm-up is a line");
    } else if translation.value(path).is_some() {
        translation.leave(&[path], "A warm-up is a line, not a logarithm");
    } else if translation.has("scheduler.params") {
        translation.warn(
            "A warm-up is a line; DeepSpeed's own, where no warmup_type is written, is a logarithm",
        );
    }
    if curve == "cosine" {
        let reason =
            "DeepSpeed's cosine multiplies the rate of its optimizer, as the one here does";
        translation.say("schedule", reason);
    }
    Ok(())
}

fn count_from_zero(translation: &Translation, path: &str) -> Result<Option<u64>, String> {
    if is_auto(translation, path) { Ok(None) } else { translation.whole(path) }
}
