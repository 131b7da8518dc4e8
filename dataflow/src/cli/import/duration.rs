//! Composer's times: `100ba`, `1ep`, `2e9tok`, `0.1dur`, and their conversion to steps.

use super::document::Value;
use super::translation::Translation;

/// The unit of a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unit {
    /// Passes over the data.
    Epochs,
    /// Optimizer updates.
    Batches,
    /// Samples.
    Samples,
    /// Tokens.
    Tokens,
    /// Parts of the whole run.
    Run,
    /// A unit that cannot be counted here.
    Other,
}

/// A time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Time {
    /// The number of units.
    pub(super) value: f64,
    /// The unit.
    pub(super) unit: Unit,
}

/// Suffixes, as Composer has them.
const SUFFIXES: [(&str, Unit); 7] = [
    ("iter", Unit::Other),
    ("ep", Unit::Epochs),
    ("ba", Unit::Batches),
    ("sp", Unit::Samples),
    ("tok", Unit::Tokens),
    ("dur", Unit::Run),
    ("sec", Unit::Other),
];

impl Time {
    /// The time at `path`; a number without a unit counts epochs.
    ///
    /// # Errors
    /// A text that is none.
    pub(super) fn read(translation: &Translation, path: &str) -> Result<Option<Self>, String> {
        let time = match translation.value(path) {
            None => return Ok(None),
            Some(Value::Whole(epochs)) => Some(Self { value: *epochs as f64, unit: Unit::Epochs }),
            Some(Value::Text(text)) => Self::parse(text),
            Some(_) => None,
        };
        let expected = "a time such as 100ba, 1ep, 2000sp, 2e9tok or 0.1dur";
        time.map(Some).ok_or_else(|| translation.wrong(path, expected))
    }

    fn parse(text: &str) -> Option<Self> {
        let lower = text.trim().to_ascii_lowercase();
        let (number, unit) = SUFFIXES
            .into_iter()
            .find_map(|(suffix, unit)| Some((lower.strip_suffix(suffix)?, unit)))?;
        let value: f64 = number.trim().replace('_', "").parse().ok()?;
        (value.is_finite() && value >= 0.0).then_some(Self { value, unit })
    }

    /// Whether nothing is counted.
    pub(super) fn is_zero(self) -> bool {
        self.value == 0.0
    }
}

/// The numbers by which times are converted to steps.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Scale {
    /// Samples of a step.
    pub(super) samples_per_step: Option<u64>,
    /// Predicted tokens of a sample.
    pub(super) seq_len: Option<u64>,
    /// The whole run.
    pub(super) run: Option<Time>,
}

impl Scale {
    /// Whole steps, where they can be told: not where an epoch counts, whose samples the data set alone knows. Parts of a run are rounded
    /// down, as Composer does, samples and tokens up.
    pub(super) fn steps(self, time: Time) -> Option<u64> {
        let per_step = self.samples_per_step.filter(|&samples| samples > 0)? as f64;
        let steps = match time.unit {
            Unit::Batches => time.value,
            Unit::Samples => (time.value / per_step).ceil(),
            Unit::Tokens => (time.value / (per_step * self.seq_len? as f64)).ceil(),
            Unit::Run => {
                let run = self.run.filter(|run| run.unit != Unit::Run)?;
                (self.steps(run)? as f64 * time.value).floor()
            }
            Unit::Epochs | Unit::Other => return None,
        };
        (steps.is_finite() && steps < 9e15).then_some(steps as u64)
    }

    /// The part of the run that a time is, where both count the same.
    pub(super) fn fraction(self, time: Time) -> Option<f64> {
        let run = self.run.filter(|run| !run.is_zero())?;
        match time.unit {
            Unit::Run => Some(time.value),
            unit if unit == run.unit && unit != Unit::Other => Some(time.value / run.value),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn suffixes_are_composers() {
        let time = |text| Time::parse(text).map(|time| (time.value, time.unit));
        assert_eq!(time("100ba"), Some((100.0, Unit::Batches)));
        assert_eq!(time("1EP"), Some((1.0, Unit::Epochs)));
        assert_eq!(time("2_000_000tok"), Some((2e6, Unit::Tokens)));
        assert_eq!(time("26e9tok"), Some((26e9, Unit::Tokens)));
        assert_eq!(time("0.1dur"), Some((0.1, Unit::Run)));
        assert_eq!(time("64sp"), Some((64.0, Unit::Samples)));
        for wrong in ["100", "ba", "1 week", "-1ba", "nanba", "1e999tok"] {
            assert_eq!(time(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn times_are_counted_in_steps_where_they_can_be() {
        let run = Time { value: 1000.0, unit: Unit::Batches };
        let scale = Scale { samples_per_step: Some(8), seq_len: Some(16), run: Some(run) };
        let steps = |value, unit| scale.steps(Time { value, unit });
        assert_eq!(steps(7.0, Unit::Batches), Some(7));
        assert_eq!(steps(17.0, Unit::Samples), Some(3));
        assert_eq!(steps(129.0, Unit::Tokens), Some(2));
        assert_eq!(steps(0.1, Unit::Run), Some(100));
        assert_eq!(steps(1.0, Unit::Epochs), None);
        assert_eq!(scale.fraction(Time { value: 100.0, unit: Unit::Batches }), Some(0.1));
        assert_eq!(scale.fraction(Time { value: 100.0, unit: Unit::Tokens }), None);
    }
}
