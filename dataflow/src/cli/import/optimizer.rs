//! The keys of `[optimizer]` and `[schedule]`, from either framework's settings.

use super::document::Value;
use super::translation::Translation;

/// Norms that no gradient has.
const NO_CLIPPING: f64 = 1e9;
/// The remark on which tensors weight decay applies to.
const DECAYED: &str = "Weight decay is of every tensor of two or more dimensions, not of biases and norms, which others decay too unless told otherwise";

/// Where a framework has the settings of an optimizer.
pub(super) struct Settings<'a> {
    /// The learning rate.
    pub(super) rate: &'a [&'a str],
    /// Decays of moments.
    pub(super) betas: &'a str,
    /// The number that is added to the root of the second moment.
    pub(super) eps: &'a str,
    /// The weight decay.
    pub(super) decay: &'a str,
}

/// How the decay of a framework relates to that of `optimizer.weight_decay`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Decay {
    /// It is the same.
    Alike,
    /// It is not multiplied by the learning rate, and here it is.
    OverRate,
}

/// Values that hold where the framework's file has none.
pub(super) struct Defaults {
    /// The learning rate.
    pub(super) rate: f64,
    /// Decays of moments.
    pub(super) betas: [f64; 2],
    /// The number that is added to the root of the second moment; none where the optimizer has none.
    pub(super) eps: Option<f64>,
    /// The weight decay.
    pub(super) decay: f64,
}

/// Writes the keys of `[optimizer]`, except its name and its norm.
///
/// # Errors
/// A value that is no number.
pub(super) fn write(
    translation: &mut Translation,
    settings: &Settings<'_>,
    defaults: &Defaults,
    decay: Decay,
) -> Result<(), String> {
    const DEFAULT: &str = "the default there";
    let mut rate = None;
    for path in settings.rate {
        if rate.is_none() && !is_auto(translation, path) {
            rate = translation.number(path)?;
        }
    }
    let remark = if rate.is_some() { "" } else { DEFAULT };
    let rate = rate.unwrap_or(defaults.rate);
    write_or_fill_in(translation, "optimizer.learning_rate", rate, settings.rate, remark);
    let betas = match translation.value(settings.betas) {
        None => None,
        Some(_) if is_auto(translation, settings.betas) => None,
        Some(value) => match &value.numbers()[..] {
            [Some(first), Some(second)] => Some([*first, *second]),
            _ => return Err(translation.wrong(settings.betas, "two numbers")),
        },
    };
    let remark = if betas.is_some() { "" } else { DEFAULT };
    let betas: toml::Value = betas.unwrap_or(defaults.betas).to_vec().into();
    write_or_fill_in(translation, "optimizer.betas", betas, &[settings.betas], remark);
    if let Some(default) = defaults.eps {
        let eps = number_or_auto(translation, settings.eps)?;
        let remark = if eps.is_some() { "" } else { DEFAULT };
        let eps = eps.unwrap_or(default);
        write_or_fill_in(translation, "optimizer.eps", eps, &[settings.eps], remark);
    } else {
        translation.leave(&[settings.eps], "The optimizer has none");
    }
    let written = number_or_auto(translation, settings.decay)?;
    let mut remark = if written.is_some() { "" } else { DEFAULT }.to_owned();
    let mut value = written.unwrap_or(defaults.decay);
    if decay == Decay::OverRate && value != 0.0 && rate > 0.0 {
        remark = format!("{value:e} over the rate, by which it is multiplied here");
        value /= rate;
    }
    write_or_fill_in(translation, "optimizer.weight_decay", value, &[settings.decay], &remark);
    if value != 0.0 {
        translation.say("optimizer", DECAYED);
    }
    Ok(())
}

/// Writes a key, as one to be filled in where its leaf leaves it to another program.
pub(super) fn write_or_fill_in(
    translation: &mut Translation,
    key: &str,
    value: impl Into<toml::Value>,
    paths: &[&str],
    remark: &str,
) {
    if paths.iter().any(|path| is_auto(translation, path)) {
        translation.fill_in(key, value, paths, "what the program gives that reads \"auto\"");
    } else {
        translation.write(key, value, paths, remark);
    }
}

/// Writes the norm that gradients are clipped to, or that there is none.
pub(super) fn write_clipping(translation: &mut Translation, norm: Option<f64>, paths: &[&str]) {
    match norm.filter(|norm| *norm > 0.0) {
        Some(norm) => write_or_fill_in(translation, "optimizer.clip_norm", norm, paths, ""),
        None => {
            let remark = "so large that nothing is clipped";
            write_or_fill_in(translation, "optimizer.clip_norm", NO_CLIPPING, paths, remark);
        }
    }
}

/// Whether a leaf leaves its value to the program that reads the file.
pub(super) fn is_auto(translation: &Translation, path: &str) -> bool {
    matches!(translation.value(path), Some(Value::Text(text)) if text == "auto")
}

/// A number; none where it is left to another program.
pub(super) fn number_or_auto(translation: &Translation, path: &str) -> Result<Option<f64>, String> {
    if is_auto(translation, path) { Ok(None) } else { translation.number(path) }
}
