//! The schedule of the learning rate: a warm-up, then a constant, a cosine or a line.
//!
//! The rate is a pure function of the step and of the horizon, in f64 and with the cosine of
//! `libm`, so that it is the same on every host and after every resume. The horizon is saved with
//! the run: making a run longer does not change a curve that has begun.

use std::num::NonZeroU64;

use serde::{Deserialize, Serialize};

use crate::error::{ModelError, Result};

/// The curve after the warm-up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ScheduleName {
    /// 1
    Constant,
    /// `final + (1 - final) (1 + cos(pi x)) / 2`
    #[default]
    Cosine,
    /// `1 + (final - 1) x`
    Linear,
}

/// The `[schedule]` table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ScheduleSettings {
    /// The curve after the warm-up.
    pub name: ScheduleName,
    /// Warm-up in steps; 0 for none. Where neither this nor one of the next two is given, 20, or
    /// the whole horizon where that is shorter.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub warmup_steps: Option<u64>,
    /// Warm-up in predicted tokens, rounded up to whole steps.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub warmup_tokens: Option<u64>,
    /// Warm-up as a fraction of the horizon, rounded up to whole steps.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub warmup_fraction: Option<f64>,
    /// Predicted tokens of a step, the unit of a warm-up in tokens; known once a run's batch and
    /// data are.
    #[serde(skip)]
    pub tokens_per_step: Option<NonZeroU64>,
    /// The factor at the horizon; a constant schedule does not use it.
    pub final_fraction: f64,
    /// The horizon, in steps; where it is absent, the steps of the run when it began.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub steps: Option<u64>,
}

/// The default warm-up, where the horizon is at least as long.
const DEFAULT_WARMUP_STEPS: u64 = 20;

impl Default for ScheduleSettings {
    fn default() -> Self {
        Self {
            name: ScheduleName::default(),
            warmup_steps: None,
            warmup_tokens: None,
            warmup_fraction: None,
            tokens_per_step: None,
            final_fraction: 0.1,
            steps: None,
        }
    }
}

impl ScheduleSettings {
    /// The rules that hold for every horizon.
    ///
    /// # Errors
    /// A value that gives no curve, named by its key.
    pub fn check_values(&self) -> Result<()> {
        if self.steps == Some(0) {
            return Err(ModelError::config("schedule.steps", "at least 1", 0));
        }
        for (key, fraction) in [
            ("schedule.final_fraction", self.final_fraction),
            ("schedule.warmup_fraction", self.warmup_fraction.unwrap_or_default()),
        ] {
            if !(0.0..=1.0).contains(&fraction) {
                return Err(ModelError::config(key, "a number from 0 to 1", fraction));
            }
        }
        let written = self.written_warmup();
        if let [(first, _), (second, found), ..] = &written[..] {
            return Err(ModelError::config(*second, format!("nothing beside {first}"), found));
        }
        Ok(())
    }

    /// Checks every value against a horizon of `horizon` steps.
    ///
    /// # Errors
    /// A value that gives no curve, named by its key.
    pub fn check(&self, horizon: u64) -> Result<()> {
        self.check_values()?;
        let warmup_steps = self.resolved_warmup_steps(horizon);
        if warmup_steps > horizon {
            let expected = format!("at most the {horizon} steps of the schedule");
            let (key, found) = match self.warmup_tokens {
                Some(tokens) => {
                    ("schedule.warmup_tokens", format!("{tokens} tokens, {warmup_steps} steps"))
                }
                None => ("schedule.warmup_steps", warmup_steps.to_string()),
            };
            return Err(ModelError::config(key, expected, found));
        }
        Ok(())
    }

    /// The key that sets the warm-up, and its value.
    fn written_warmup(&self) -> Vec<(&'static str, String)> {
        [
            ("schedule.warmup_steps", self.warmup_steps.map(|steps| steps.to_string())),
            ("schedule.warmup_tokens", self.warmup_tokens.map(|tokens| tokens.to_string())),
            ("schedule.warmup_fraction", self.warmup_fraction.map(|part| part.to_string())),
        ]
        .into_iter()
        .filter_map(|(key, found)| Some((key, found?)))
        .collect()
    }

    /// The same schedule for a horizon of `horizon` steps, with its warm-up in steps.
    #[must_use]
    pub fn in_steps(&self, horizon: u64) -> Self {
        Self {
            warmup_steps: Some(self.resolved_warmup_steps(horizon)),
            warmup_tokens: None,
            warmup_fraction: None,
            ..self.clone()
        }
    }

    /// Warm-up in steps under a horizon of `horizon` steps: the given one, or the default.
    pub fn resolved_warmup_steps(&self, horizon: u64) -> u64 {
        let of_tokens =
            |tokens: u64| tokens.div_ceil(self.tokens_per_step.map_or(1, NonZeroU64::get));
        let of_fraction = |fraction: f64| (fraction * horizon as f64).ceil() as u64;
        self.warmup_steps
            .or(self.warmup_tokens.map(of_tokens))
            .or(self.warmup_fraction.map(of_fraction))
            .unwrap_or(DEFAULT_WARMUP_STEPS.min(horizon))
    }

    /// The learning rate of update `step` (counted from 1): `base` times
    ///
    /// ```text
    /// step / warmup_steps                              up to warmup_steps
    /// the curve at x = (step - warmup_steps) / (horizon - warmup_steps), at most 1, after it
    /// ```
    pub fn learning_rate(&self, base: f64, step: u64, horizon: u64) -> f64 {
        base * self.factor(step, horizon)
    }

    fn factor(&self, step: u64, horizon: u64) -> f64 {
        let warmup_steps = self.resolved_warmup_steps(horizon);
        if step <= warmup_steps {
            return step as f64 / warmup_steps as f64;
        }
        // A horizon that is all warm-up leaves no curve, so that this would divide by zero: the
        // curve is at its end.
        let length = horizon.saturating_sub(warmup_steps).max(1);
        let x = ((step - warmup_steps) as f64 / length as f64).min(1.0);
        let last = self.final_fraction;
        match self.name {
            ScheduleName::Constant => 1.0,
            ScheduleName::Cosine => {
                last + (1.0 - last) * (1.0 + libm::cos(std::f64::consts::PI * x)) / 2.0
            }
            ScheduleName::Linear => 1.0 + (last - 1.0) * x,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schedule(name: ScheduleName) -> ScheduleSettings {
        let default = ScheduleSettings::default();
        ScheduleSettings { name, warmup_steps: Some(4), final_fraction: 0.2, ..default }
    }

    #[test]
    fn warm_up_counts_from_one_and_curves_end_at_the_horizon() {
        use ScheduleName::{Constant, Cosine, Linear};
        for name in [Constant, Cosine, Linear] {
            let rate = |step| schedule(name).learning_rate(2.0, step, 14);
            assert_eq!(rate(1), 0.5);
            assert_eq!(rate(4), 2.0);
            let (middle, end) = if name == Constant { (2.0, 2.0) } else { (1.2, 0.4) };
            assert!((rate(9) - middle).abs() < 1e-12, "{name:?} at the middle: {}", rate(9));
            assert!((rate(14) - end).abs() < 1e-12, "{name:?} at the horizon: {}", rate(14));
            assert_eq!(rate(14), rate(99), "{name:?} past the horizon");
        }
        // A quarter of the way, where a cosine and a line differ: 0.2 + 0.8 (1 + cos(pi / 4)) / 2.
        let quarter = schedule(Cosine).learning_rate(1.0, 6, 12);
        assert!((quarter - 0.882_842_712_474_619).abs() < 1e-12, "{quarter}");
    }

    #[test]
    fn no_warm_up_and_nothing_but_warm_up() {
        let none = ScheduleSettings { warmup_steps: Some(0), ..schedule(ScheduleName::Linear) };
        assert!((none.learning_rate(1.0, 1, 2) - 0.6).abs() < 1e-12);
        let only = schedule(ScheduleName::Cosine);
        only.check(4).expect("all of the horizon may be warm-up");
        assert_eq!(only.learning_rate(1.0, 4, 4), 1.0);
        assert!((only.learning_rate(1.0, 5, 4) - 0.2).abs() < 1e-12);
    }

    #[test]
    fn a_warm_up_that_nobody_asked_for_is_never_longer_than_the_run() {
        let settings = ScheduleSettings::default();
        for (horizon, warmup_steps) in [(1, 1), (10, 10), (20, 20), (21, 20), (1 << 40, 20)] {
            settings.check(horizon).expect("a default is not refused");
            assert_eq!(settings.resolved_warmup_steps(horizon), warmup_steps);
            assert_eq!(settings.learning_rate(1.0, warmup_steps, horizon), 1.0);
        }
    }

    #[test]
    fn a_warm_up_in_tokens_or_as_a_fraction_is_whole_steps() {
        let tokens = ScheduleSettings {
            warmup_tokens: Some(1001),
            tokens_per_step: NonZeroU64::new(100),
            ..ScheduleSettings::default()
        };
        assert_eq!(tokens.resolved_warmup_steps(50), 11);
        let steps = tokens.in_steps(50);
        assert_eq!((steps.warmup_steps, steps.warmup_tokens), (Some(11), None));
        let message = tokens.check(10).expect_err("refused").to_string();
        assert_eq!(
            message,
            "schedule.warmup_tokens: expected at most the 10 steps of the schedule, found 1001 tokens, 11 steps"
        );
        let fraction =
            ScheduleSettings { warmup_fraction: Some(0.03), ..ScheduleSettings::default() };
        for (horizon, warmup_steps) in [(1, 1), (100, 3), (101, 4), (1_000_000, 30_000)] {
            assert_eq!(fraction.resolved_warmup_steps(horizon), warmup_steps);
            fraction.check(horizon).expect("no fraction is longer than the run");
        }
        let both = ScheduleSettings { warmup_steps: Some(1), ..fraction.clone() };
        let message = both.check_values().expect_err("refused").to_string();
        assert_eq!(
            message,
            "schedule.warmup_fraction: expected nothing beside schedule.warmup_steps, found 0.03"
        );
        let large = ScheduleSettings { warmup_fraction: Some(1.5), ..fraction };
        let message = large.check_values().expect_err("refused").to_string();
        assert!(message.starts_with("schedule.warmup_fraction: expected a number"), "{message}");
    }

    #[test]
    fn wrong_values_are_named() {
        let settings = schedule(ScheduleName::Cosine);
        let message = settings.check(3).expect_err("refused").to_string();
        assert_eq!(
            message,
            "schedule.warmup_steps: expected at most the 3 steps of the schedule, found 4"
        );
        assert!(ScheduleSettings { steps: Some(0), ..settings.clone() }.check_values().is_err());
        let wide = ScheduleSettings { final_fraction: f64::NAN, ..settings };
        assert!(wide.check(9).is_err());
        assert!(serde_json::from_str::<ScheduleSettings>(r#"{"warmup": 1}"#).is_err());
    }
}
