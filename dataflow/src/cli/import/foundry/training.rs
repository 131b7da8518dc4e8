//! `optimizer`, `scheduler` and `algorithms` of LLM Foundry.

use super::super::duration::{Scale, Time, Unit};
use super::super::optimizer::{Decay, Defaults, Settings, write, write_clipping};
use super::super::translation::Translation;

const SETTINGS: Settings<'_> = Settings {
    rate: &["optimizer.lr"],
    betas: "optimizer.betas",
    eps: "optimizer.eps",
    decay: "optimizer.weight_decay",
};

pub(super) fn optimizer(translation: &mut Translation) -> Result<(), String> {
    let path = &["optimizer.name"][..];
    let adamw = Defaults { rate: 1e-3, betas: [0.9, 0.999], eps: Some(1e-8), decay: 1e-2 };
    let composer = Defaults { betas: [0.9, 0.95], decay: 1e-5, ..adamw };
    let lion = Defaults { rate: 1e-4, betas: [0.9, 0.99], eps: None, decay: 0.0 };
    match translation.text("optimizer.name")?.as_deref() {
        Some("decoupled_adamw") => {
            translation.write("optimizer.name", "decoupled_adamw", path, "");
            write(translation, &SETTINGS, &composer, Decay::Alike)?;
        }
        Some("adamw") => {
            translation.write("optimizer.name", "adamw", path, "");
            write(translation, &SETTINGS, &adamw, Decay::Alike)?;
        }
        Some("decoupled_lionw") => {
            translation.write("optimizer.name", "lion", path, "");
            write(translation, &SETTINGS, &lion, Decay::OverRate)?;
        }
        _ => {
            let reason = "No such optimizer; this file has decoupled_adamw, with the learning rate that it is given";
            translation.leave(path, reason);
            translation.write("optimizer.name", "decoupled_adamw", &[], "see the top");
            write(translation, &SETTINGS, &composer, Decay::Alike)?;
        }
    }
    translation.leave(&["optimizer"], "The optimizer has no such setting");
    let table = "algorithms.gradient_clipping";
    let kind = "algorithms.gradient_clipping.clipping_type";
    let threshold = "algorithms.gradient_clipping.clipping_threshold";
    let clips = translation.has(table);
    match translation.text(kind)?.as_deref() {
        Some("norm") => {
            let norm = translation.number(threshold)?;
            write_clipping(translation, norm, &[kind, threshold]);
        }
        _ if clips => {
            translation
                .leave(&[table], "Gradients are clipped by their norm alone, here not at all");
            write_clipping(translation, None, &[]);
        }
        _ => write_clipping(translation, None, &[]),
    }
    Ok(())
}

pub(super) fn schedule(translation: &mut Translation, scale: Scale) -> Result<(), String> {
    let path = &["scheduler.name"][..];
    let name = translation.text("scheduler.name")?;
    let curve = match name.as_deref() {
        Some("cosine_with_warmup") => "cosine",
        Some("linear_decay_with_warmup") => "linear",
        Some("constant_with_warmup") => "constant",
        _ => {
            translation
                .leave(path, "No such schedule; this file has a constant rate after the warm-up");
            "constant"
        }
    };
    translation.write("schedule.name", curve, path, "");
    translation.say(
        "schedule",
        "Steps are counted from 1, so that the first has a rate above 0; in Composer it has none, as it counts from 0",
    );
    warmup(translation, scale)?;
    let last = "scheduler.alpha_f";
    if curve != "constant" {
        let written = translation.number(last)?;
        let remark = if written.is_none() { "Composer's default" } else { "" };
        match written.unwrap_or(0.0) {
            fraction if (0.0..=1.0).contains(&fraction) => {
                translation.write("schedule.final_fraction", fraction, &[last], remark);
            }
            _ => {
                translation
                    .leave(&[last], "A schedule ends between 0 and its whole rate; this one at 0");
                translation.write("schedule.final_fraction", 0.0, &[], "see the top");
            }
        }
        horizon(translation, scale)?;
    }
    let first = "scheduler.alpha_i";
    if translation.number(first)? == Some(1.0) {
        translation.remark(
            "schedule",
            &[first],
            "Without a key: the curve begins at the whole rate",
        );
    }
    let ratio = "scheduler.scale_warmup";
    if translation.flag(ratio)? == Some(false) {
        translation.remark("schedule", &[ratio], "Without a key: schedules are never stretched");
    }
    translation.leave(&["scheduler"], "The schedule has no such setting");
    Ok(())
}

fn warmup(translation: &mut Translation, scale: Scale) -> Result<(), String> {
    let path = "scheduler.t_warmup";
    let Some(time) = Time::read(translation, path)? else {
        translation.write("schedule.warmup_steps", 0, &[path], "none is written");
        return Ok(());
    };
    let (paths, fraction) = (&[path][..], scale.fraction(time));
    match time.unit {
        _ if time.is_zero() => translation.write("schedule.warmup_steps", 0, paths, ""),
        Unit::Tokens => {
            translation.write("schedule.warmup_tokens", time.value as i64, paths, "predicted ones");
        }
        // The horizon may be another than the run.
        Unit::Run if is_whole_run(translation, scale)? && time.value <= 1.0 => {
            translation.write("schedule.warmup_fraction", time.value, paths, "");
        }
        Unit::Epochs
            if is_whole_run(translation, scale)? && fraction.is_some_and(|it| it <= 1.0) =>
        {
            let remark = "of as many epochs as the run has";
            let fraction = fraction.unwrap_or_default();
            translation.write("schedule.warmup_fraction", fraction, paths, remark);
        }
        _ => match scale.steps(time) {
            Some(steps) => translation.write("schedule.warmup_steps", steps as i64, paths, ""),
            None => translation.fill_in("schedule.warmup_steps", 0, paths, "steps of warm-up"),
        },
    }
    Ok(())
}

/// Whether the schedule ends where the run does.
fn is_whole_run(translation: &Translation, scale: Scale) -> Result<bool, String> {
    let end = Time::read(translation, "scheduler.t_max")?;
    Ok(end.is_none_or(|end| scale.fraction(end) == Some(1.0)))
}

fn horizon(translation: &mut Translation, scale: Scale) -> Result<(), String> {
    let path = "scheduler.t_max";
    let Some(time) = Time::read(translation, path)? else { return Ok(()) };
    if is_whole_run(translation, scale)? {
        let reason = "Without a key: a schedule ends where the run does that begins with it";
        translation.remark("schedule", &[path], reason);
    } else if let Some(steps) = scale.steps(time).filter(|&steps| steps > 0) {
        translation.write("schedule.steps", steps as i64, &[path], "");
    } else {
        translation.leave(&[path], "Its steps cannot be told from this file alone; schedule.steps has them, and here the schedule ends with the run");
    }
    Ok(())
}
