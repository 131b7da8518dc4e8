//! A training graph in which something stands still ends at the step deadline, and says what it was.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tidemill::cluster::{ClusterError, ExitClass};
use tidemill::parallel::Sharding;

use super::bigram::{Bigram, STUCK_TOKEN};
use super::harness::{Run, Stuck, Subject};
use super::lane_owner::worker_of;

const DEADLINE: Duration = Duration::from_millis(500);
/// Far less than a test may wait, far more than an end takes.
const SOON: Duration = Duration::from_secs(20);

/// The words of a run that gets stuck, which has to end.
fn words(run: &Run) -> String {
    let (mut model, gate) = (Bigram::new(), run.gate.clone());
    model.stuck = Some(Arc::new(move || gate.wait()));
    let subject = Subject { model: Arc::new(model), ..super::bigram() };
    let start = Instant::now();
    let (error, _) = run.run_to_failure_on(&subject);
    assert!(start.elapsed() < SOON, "{:?}", start.elapsed());
    assert_eq!(error.exit_class(), ExitClass::Restart);
    match error {
        ClusterError::LeftBehind { cause, .. } => cause.unwrap().to_string(),
        other => other.to_string(),
    }
}

/// Where lanes leave one by one, others have more behind that of this sample.
#[test]
fn a_device_that_never_returns_is_named_and_not_those_that_wait_for_it() {
    const SAMPLE: u64 = 13;
    use Sharding::{Gradients, Optimizer, Parameters};
    let cases = [(1, 1, Optimizer), (3, 1, Optimizer), (3, 1, Gradients), (3, 1, Parameters)];
    for (workers, processes, sharding) in cases.into_iter().chain([(2, 2, Gradients)]) {
        let poison = Some((27 * 2 + SAMPLE, STUCK_TOKEN));
        let step_deadline = Some(DEADLINE);
        let run = Run { workers, processes, sharding, poison, step_deadline, ..Run::default() };
        let text = words(&run);
        let stuck = format!("thread device-{} has", worker_of(&run, SAMPLE as usize));
        assert!(text.contains(&stuck), "{sharding:?}: {text}");
        assert!(text.ends_with("in step 3: forward and backward"), "{text}");
    }
}

#[test]
fn what_is_stuck_is_named_with_its_step() {
    let cases = [
        (Stuck::Sink, "thread checkpoint has stood still", "writing a checkpoint"),
        (Stuck::Source, "has stood still", "in step 3: reading samples"),
        (Stuck::Operator, "worker 0 has stood still", "inside an operator"),
    ];
    for (stuck, actor, what) in cases {
        for workers in [1, 2] {
            let text = words(&Run {
                workers,
                checkpoint_every: 2,
                window_bytes: 80,
                step_deadline: Some(DEADLINE),
                stuck: Some(stuck),
                ..Run::default()
            });
            assert!(text.contains(actor) && text.ends_with(what), "{stuck:?}: {text}");
        }
    }
}

/// A process with a stuck device tells its peers, which say the same.
#[test]
fn processes_end_with_the_one_that_stands_still() {
    let (stuck, step_deadline) = (Some(Stuck::Operator), Some(DEADLINE));
    let text = words(&Run { workers: 2, processes: 2, stuck, step_deadline, ..Run::default() });
    assert!(text.contains("worker 0 has stood still"), "{text}");
}
