//! All contents of a run folder that may not depend on how the run was executed.

use std::collections::BTreeMap;
use std::path::Path;

use tidemill::checkpoint;
use tidemill::metrics::{self, StepMetrics};
use tidemill::operators::EvaluationReport;
use tidemill::run_folder::LOCK_FILE;

/// The results of a run, without times; everything is compared to the bit.
#[derive(Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Each file of each checkpoint.
    pub checkpoints: BTreeMap<u64, BTreeMap<String, Vec<u8>>>,
    /// Step, loss, norm, learning rate and tokens so far.
    pub steps: Vec<[u64; 5]>,
    /// Step, loss and tokens of each evaluation.
    pub evaluations: Vec<[u64; 3]>,
}

impl Outcome {
    pub fn read(run_folder: &Path) -> Self {
        let entries = checkpoint::list(run_folder).unwrap();
        let checkpoints = entries.iter().map(|entry| (entry.step, files(&entry.path))).collect();
        let lines = metrics::read::<StepMetrics>(run_folder).unwrap();
        let step = |line: &StepMetrics| {
            let numbers = [line.loss, line.grad_norm, line.learning_rate].map(f64::to_bits);
            [line.step, numbers[0], numbers[1], numbers[2], line.tokens]
        };
        let evaluations = metrics::read::<EvaluationReport>(run_folder).unwrap();
        let evaluation = |line: &EvaluationReport| [line.step, line.loss.to_bits(), line.tokens];
        Self {
            checkpoints,
            steps: lines.iter().map(step).collect(),
            evaluations: evaluations.iter().map(evaluation).collect(),
        }
    }

    /// The steps of the complete checkpoints.
    pub fn checkpoint_steps(&self) -> Vec<u64> {
        self.checkpoints.keys().copied().collect()
    }

    /// The loss of line `index`.
    pub fn loss(&self, index: usize) -> f64 {
        f64::from_bits(self.steps[index][1])
    }

    /// The files of the latest checkpoint.
    pub fn latest(&self) -> &BTreeMap<String, Vec<u8>> {
        self.checkpoints.values().next_back().expect("a checkpoint")
    }
}

/// Every file below `folder`, by its path in it; except the record of the last holder of a run
/// folder.
pub fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut found = BTreeMap::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(inner) = folders.pop() {
        for entry in std::fs::read_dir(&inner).into_iter().flatten() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if !path.ends_with(LOCK_FILE) {
                let name = path.strip_prefix(folder).unwrap().to_string_lossy().into_owned();
                found.insert(name, std::fs::read(&path).unwrap());
            }
        }
    }
    found
}

/// Fails with the first difference, in a readable line.
pub fn assert_same(found: &Outcome, expected: &Outcome, what: &str) {
    for (found, expected) in found.steps.iter().zip(&expected.steps) {
        let shown = |line: &[u64; 5]| (line[0], f64::from_bits(line[1]), f64::from_bits(line[2]));
        assert_eq!(found, expected, "{what}: {:?} is not {:?}", shown(found), shown(expected));
    }
    assert_eq!(found.steps.len(), expected.steps.len(), "{what}: lines of metrics");
    assert_eq!(found.checkpoint_steps(), expected.checkpoint_steps(), "{what}: checkpoints");
    for (step, expected) in &expected.checkpoints {
        let found = &found.checkpoints[step];
        assert!(found.keys().eq(expected.keys()), "{what}: step {step}: {:?}", found.keys());
        for (name, bytes) in expected {
            assert!(&found[name] == bytes, "{what}: step {step}: {name} has other bytes");
        }
    }
    assert_eq!(found.evaluations, expected.evaluations, "{what}: evaluations");
}
