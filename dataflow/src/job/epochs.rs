//! At which steps the epochs of a data set end.

/// Samples of an epoch, and of a step.
#[derive(Clone, Copy)]
pub(super) struct Epoch {
    pub samples: u64,
    pub samples_per_step: u64,
}

impl Epoch {
    /// The first step's beginning behind so many epochs.
    fn end(self, epochs: u64) -> u64 {
        let samples = epochs.saturating_mul(self.samples);
        samples.div_ceil(self.samples_per_step).saturating_mul(self.samples_per_step)
    }
}

/// The first end of an epoch that is not before `position`, a step's beginning, and not at 0.
pub(super) fn first_end(epoch: Epoch, position: u64) -> u64 {
    match position {
        0 => next_end(epoch, 0),
        _ => next_end(epoch, position - 1),
    }
}

/// The first end of an epoch behind `position`.
pub(super) fn next_end(epoch: Epoch, position: u64) -> u64 {
    let mut epochs = position.saturating_sub(epoch.samples_per_step) / epoch.samples.max(1);
    while epoch.end(epochs) <= position {
        epochs += 1;
    }
    epoch.end(epochs)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The definition of ends: steps begin at multiples of their samples, and the end of an epoch is the first such position at or
    /// behind all its samples.
    fn ends(epoch: Epoch, until: u64) -> Vec<u64> {
        let steps = (1..).map(|step| step * epoch.samples_per_step);
        let is_end = |&at: &u64| {
            (at - epoch.samples_per_step) / epoch.samples < at / epoch.samples
                || at.is_multiple_of(epoch.samples)
        };
        steps.take_while(|&at| at <= until).filter(is_end).collect()
    }

    #[test]
    fn ends_of_epochs_are_the_first_steps_behind_them() {
        for samples in 1..40 {
            for samples_per_step in [1, 2, 3, 4, 7, 8, 16] {
                let epoch = Epoch { samples, samples_per_step };
                let ends = ends(epoch, 400);
                for position in 0..200 {
                    let behind = ends.iter().copied().find(|&end| end > position).unwrap();
                    assert_eq!(next_end(epoch, position), behind, "{samples} {position}");
                    let from = ends.iter().copied().find(|&end| end >= position.max(1)).unwrap();
                    assert_eq!(first_end(epoch, position), from, "{samples} {position}");
                }
            }
        }
    }
}
