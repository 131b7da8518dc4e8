//! How long to wait before an operation is tried again.

use std::time::Duration;

use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::StoreSettings;

/// Times between the attempts of one operation.
pub(super) struct BackOff<'a> {
    settings: &'a StoreSettings,
    /// The object of the operation, so that operations pause for different times.
    object: &'a str,
    failures: u32,
}

impl<'a> BackOff<'a> {
    pub(super) fn new(settings: &'a StoreSettings, object: &'a str) -> BackOff<'a> {
        BackOff { settings, object, failures: 0 }
    }

    /// The time before the next attempt; the operation made no progress since the last one.
    pub(super) fn next(&mut self) -> Duration {
        let doubled = self.settings.back_off.saturating_mul(1 << self.failures.min(30));
        let longest = doubled.min(self.settings.back_off_limit);
        let seed = self.settings.seed ^ (u64::from(self.failures) << 32);
        // 32 bits of a hash are uniform enough to spread requests.
        let random = xxh3_64_with_seed(self.object.as_bytes(), seed) >> 32;
        self.failures += 1;
        longest.mul_f64(0.5 + random as f64 / 2_f64.powi(33))
    }

    /// The operation made progress: the next failure is a first one.
    pub(super) fn progressed(&mut self) {
        self.failures = 0;
    }

    /// Attempts that failed since there was progress.
    pub(super) fn failures(&self) -> u32 {
        self.failures
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_double_up_to_the_limit_and_half_of_them_is_random() {
        let settings = |seed| StoreSettings {
            back_off: Duration::from_millis(100),
            back_off_limit: Duration::from_millis(1000),
            seed,
            ..StoreSettings::default()
        };
        let times = |seed, object: &str| {
            let settings = settings(seed);
            let mut back_off = BackOff::new(&settings, object);
            let times: Vec<_> = (0..40).map(|_| back_off.next()).collect();
            assert_eq!(back_off.failures(), 40);
            back_off.progressed();
            assert_eq!(back_off.next(), times[0]);
            times
        };
        let one = times(1, "a");
        for (at, time) in one.iter().enumerate() {
            let longest = Duration::from_millis((100 << at.min(10)).min(1000));
            assert!(*time >= longest / 2 && *time <= longest, "{at}: {time:?}");
        }
        assert_eq!(one, times(1, "a"));
        assert_ne!(one, times(2, "a"));
        assert_ne!(one, times(1, "b"));
    }
}
