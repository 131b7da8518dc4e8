//! An axis: from values to places, and the round values that are written beside it.

use crate::cli::chart;

/// How far apart equal differences are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Spacing {
    /// Everywhere as far.
    Linear,
    /// Equal ratios are as far apart; values that are not above 0 have no place.
    Logarithmic,
}

/// An axis from one value to a larger one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Scale {
    pub spacing: Spacing,
    pub low: f64,
    pub high: f64,
}

/// Fewer round values than this tell nothing.
const FEWEST_TICKS: usize = 3;
/// About as many values are written beside an axis.
const TICKS: f64 = 6.0;

impl Scale {
    /// One with these values inside; 0 to 1 where there are none.
    pub fn around(spacing: Spacing, values: impl Iterator<Item = f64>) -> Self {
        let has_place = |value: &f64| spacing == Spacing::Linear || *value > 0.0;
        let found = values.filter(has_place).fold(None, |range: Option<(f64, f64)>, value| {
            let (low, high) = range.unwrap_or((value, value));
            Some((low.min(value), high.max(value)))
        });
        let (low, high) = match (found, spacing) {
            (None, Spacing::Linear) => (0.0, 1.0),
            (None, Spacing::Logarithmic) => (1.0, 10.0),
            (Some((low, high)), Spacing::Logarithmic) => {
                let margin = (0.04 * (high.ln() - low.ln())).exp().max(1.01);
                ((low / margin).max(f64::MIN_POSITIVE), (high * margin).min(f64::MAX))
            }
            (Some((low, high)), Spacing::Linear) => {
                // A single value lies in the middle between 0 and its double, so that the axis says how large it is.
                let least = if low == high { low.abs() } else { low.abs().max(high.abs()) * 1e-3 };
                let margin = ((high - low) * 0.04).max(if least > 0.0 { least } else { 1.0 });
                // An axis of values that are never negative has no negative part.
                let floor = if low >= 0.0 { 0.0 } else { f64::MIN };
                ((low - margin).max(floor), (high + margin).min(f64::MAX))
            }
        };
        Self { spacing, low, high }
    }

    /// Where a value is, from 0 for the lowest to 1.
    pub fn place(&self, value: f64) -> Option<f64> {
        let place = match self.spacing {
            Spacing::Linear => (value - self.low) / (self.high - self.low),
            Spacing::Logarithmic => (value.ln() - self.low.ln()) / (self.high.ln() - self.low.ln()),
        };
        place.is_finite().then_some(place)
    }

    /// Round values inside, ascending.
    pub fn ticks(&self) -> Vec<f64> {
        let linear = || linear_ticks(self.low, self.high);
        match self.spacing {
            Spacing::Linear => linear(),
            Spacing::Logarithmic => {
                let mut ticks = chart::ticks([self.low, self.high]);
                if ticks.len() < FEWEST_TICKS {
                    return linear();
                }
                // Over many decades only every n-th tick is kept.
                let apart = ticks.len().div_ceil(2 * TICKS as usize);
                ticks = ticks.into_iter().step_by(apart).collect();
                ticks
            }
        }
    }
}

/// Multiples of 1, 2 or 5 times a power of ten.
fn linear_ticks(low: f64, high: f64) -> Vec<f64> {
    let rough = (high - low) / TICKS;
    let power = 10_f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|factor| factor * power);
    let step = step.into_iter().find(|step| *step >= rough).unwrap_or(10.0 * power);
    let (first, last) = ((low / step).ceil(), (high / step).floor());
    let count = last - first;
    if !(count.is_finite() && (0.0..=4.0 * TICKS).contains(&count)) {
        return vec![low, high];
    }
    (0..=count as usize).map(|index| (first + index as f64) * step).collect()
}

/// A number of at most four digits, such as `0.0003`, `3e-5`, `1.25M`.
pub(super) fn short(value: f64) -> String {
    const PREFIXES: [(f64, &str); 4] = [(1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")];
    let size = value.abs();
    if size == 0.0 {
        return "0".to_owned();
    }
    if !(1e-4..1e15).contains(&size) {
        return exponent(value);
    }
    let prefix = PREFIXES
        .into_iter()
        .find(|prefix| size >= 10.0 * prefix.0 || size >= 1e6 && size >= prefix.0);
    let (scaled, prefix) = prefix.map_or((value, ""), |(of, prefix)| (value / of, prefix));
    let decimals = (3.0 - scaled.abs().log10().floor()).clamp(0.0, 8.0) as usize;
    format!("{}{prefix}", trimmed(format!("{scaled:.decimals$}")))
}

fn exponent(value: f64) -> String {
    let text = format!("{value:.3e}");
    match text.split_once('e') {
        Some((digits, power)) => format!("{}e{power}", trimmed(digits.to_owned())),
        None => text,
    }
}

/// Without zeros behind the point that say nothing.
fn trimmed(text: String) -> String {
    match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_inside() {
        let linear = Scale { spacing: Spacing::Linear, low: 2.9, high: 5.6 };
        assert_eq!(linear.ticks(), [3.0, 3.5, 4.0, 4.5, 5.0, 5.5]);
        let logarithmic = Scale { spacing: Spacing::Logarithmic, ..linear };
        assert_eq!(logarithmic.ticks(), linear.ticks(), "half a decade has too few of its own");
        let wide = Scale { spacing: Spacing::Logarithmic, low: 0.15, high: 30.0 };
        assert_eq!(wide.ticks(), [0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0]);
        let tiny = Scale { spacing: Spacing::Linear, low: 1.0, high: 1.0 + f64::EPSILON };
        assert!(tiny.ticks().len() < 30);
    }

    #[test]
    fn an_axis_holds_its_values_and_hides_none_that_it_can_show() {
        for spacing in [Spacing::Linear, Spacing::Logarithmic] {
            for values in
                [&[3.0, 3.0][..], &[0.0, 2.0, 0.5], &[-1.0, 4.0], &[], &[0.0], &[1e300, 1e-300]]
            {
                let scale = Scale::around(spacing, values.iter().copied());
                assert!(scale.low < scale.high, "{spacing:?} {values:?} {scale:?}");
                for &value in values {
                    let place = scale.place(value);
                    let shows = spacing == Spacing::Linear || value > 0.0;
                    let inside = place.is_some_and(|place| (0.0..=1.0).contains(&place));
                    assert_eq!(inside, shows, "{value} of {values:?} at {place:?}");
                }
            }
        }
    }

    #[test]
    fn a_value_that_stays_the_same_has_an_axis_from_zero() {
        for (value, edges) in [(1.0, (0.0, 2.0)), (1e-3, (0.0, 2e-3)), (-4.0, (-8.0, 0.0))] {
            let scale = Scale::around(Spacing::Linear, [value, value].into_iter());
            assert_eq!((scale.low, scale.high), edges);
            assert_eq!(scale.place(value), Some(0.5));
        }
        let one = Scale::around(Spacing::Linear, [1.0].into_iter());
        assert!(one.ticks().contains(&0.0) && one.ticks().contains(&1.0), "{:?}", one.ticks());
    }

    #[test]
    fn numbers_are_short() {
        for (value, text) in [
            (0.0, "0"),
            (0.0003, "0.0003"),
            (0.00003, "3e-5"),
            (5.34469, "5.345"),
            (-17.0, "-17"),
            (2500.0, "2500"),
            (25_000.0, "25k"),
            (1_250_000.0, "1.25M"),
            (1e15, "1e15"),
        ] {
            assert_eq!(short(value), text);
        }
    }
}
