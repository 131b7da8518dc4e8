//! Some of the workers of a dataflow train, and the others do not.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use tidemill::cluster::{
    Abort, ClusterError, ClusterSettings, ExitClass, Failure, WorkerContext, execute,
};
use tidemill::kernels::Cpu;
use tidemill::model::{Tokens, Trainable};
use tidemill::operators::{
    CheckpointCuts, Grain, InitialState, SampleSource, Trainers, Training, TrainingPlan,
};
use tidemill::parallel::Sharding;
use timely::container::CapacityContainerBuilder;
use timely::dataflow::operators::generic::source;
use timely::dataflow::{Scope, StreamVec};

use super::bigram::Bigram;
use super::harness::{Grains, Rule, Run};
use super::{REFERENCE, bigram, same};

/// The weights of K of N workers are those of K workers alone, which are those of one. The others start nothing of a device: they have
/// none; and what they do is to make grains, where these do not come from a source.
#[test]
fn some_of_the_workers_of_a_dataflow_train_to_the_same_bits() {
    let two = Run { workers: 2, ..Run::default() }.run().unwrap();
    assert_eq!(two, *REFERENCE);
    for (workers, trainers) in [(5, vec![1, 3]), (5, vec![4, 0]), (4, vec![3]), (3, vec![2, 0, 1])]
    {
        let trainers = Trainers::these(trainers).unwrap();
        for grains in [Grains::Cut, Grains::Own] {
            let run = Run { workers, grains, trainers: trainers.clone(), ..Run::default() };
            let (checkpoint_every, staging_bytes) = (1, Some(0));
            assert_eq!(run.run().unwrap(), two, "{run:?}");
            let often = Run { checkpoint_every, staging_bytes, window_bytes: 80, ..run };
            assert_eq!(often.run().unwrap().checkpoints[&6], two.checkpoints[&6], "{often:?}");
        }
    }
    for sharding in [Sharding::Gradients, Sharding::Parameters] {
        let trainers = Trainers::these([1, 2, 4]).unwrap();
        same(&Run { workers: 5, trainers, sharding, microbatch: 100, ..Run::default() });
    }
    // They may be workers of one of several processes, and one alone any.
    for trainers in [vec![2, 3], vec![3]] {
        let trainers = Trainers::these(trainers).unwrap();
        same(&Run { workers: 4, processes: 2, trainers, ..Run::default() });
    }
}

#[test]
fn workers_that_cannot_be_those_that_train_are_refused() {
    let refused = |workers, processes, trainers: &[usize]| {
        let trainers = Trainers::these(trainers.iter().copied()).unwrap();
        let (error, _) = Run { workers, processes, trainers, ..Run::default() }.run_to_failure();
        assert_eq!(error.exit_class(), ExitClass::FixInput);
        error.with_causes()
    };
    let text = refused(5, 1, &[1, 5]);
    assert!(text.contains("below 5, found 5"), "{text}");
    let text = refused(4, 2, &[0, 2]);
    assert!(text.contains("threads of one process"), "{text}");
    assert!(Trainers::these([]).is_err(), "none");
}

type Source = Box<dyn SampleSource<Sample = Tokens>>;

/// Two workers, of which those that `trainers` says are to train, each with a dataflow of `build`.
fn run_each(
    trainers: &[usize],
    steps: u64,
    build: fn(Scope<'_, u64>, &Arc<Bigram>, &Arc<TrainingPlan>, &WorkerParts),
) -> Result<Vec<usize>, ClusterError> {
    let mut plan = Run { steps, ..Run::default() }.plan(&bigram());
    plan.trainers = Trainers::these(trainers.iter().copied()).unwrap();
    plan.checkpoints = CheckpointCuts::Never;
    let plan = Arc::new(plan);
    // A wait that would never end fails at this deadline.
    let step_deadline = Some(Duration::from_secs(5));
    let settings = ClusterSettings { step_deadline, ..ClusterSettings::workers(2) };
    execute(settings, move |context: &mut WorkerContext<'_>| {
        let model = Arc::new(Bigram::new());
        let parts = WorkerParts { backend: bigram().backend, abort: context.abort().clone() };
        context.dataflow::<u64, _, _>(|scope| build(scope, &model, &plan, &parts));
        let holders = Arc::strong_count(&model);
        context.run_until_done()?;
        Ok::<_, Failure>(holders)
    })
}

/// The parts that a worker brings to a graph.
struct WorkerParts {
    backend: Arc<Cpu>,
    abort: Abort,
}

impl WorkerParts {
    fn training(&self, model: &Arc<Bigram>, plan: &Arc<TrainingPlan>) -> Training<Cpu, Bigram> {
        let parameters = Arc::new(Trainable::<Cpu>::initialize(&**model, 3));
        Training {
            plan: Arc::clone(plan),
            backend: Arc::clone(&self.backend),
            model: Arc::clone(model),
            state: InitialState { parameters, states: None },
            rule: Rule::AdamW.scheduled(),
            connection: None,
            stop: Arc::new(AtomicBool::new(false)),
            checkpoints: None,
            abort: self.abort.clone(),
        }
    }
}

/// The device thread has the model for as long as the dataflow is there.
#[test]
fn a_worker_that_does_not_train_lets_all_parts_go() {
    let holders = run_each(&[1], 0, |scope, model, plan, parts| {
        parts.training(model, plan).build(scope, None::<Source>, None);
    });
    let holders = holders.unwrap();
    assert_eq!(holders[0], 1, "nothing was started");
    assert!(holders[1] > 1, "the device thread was");
}

#[test]
fn a_grain_that_comes_to_a_worker_that_does_not_train_is_refused() {
    let refused = run_each(&[1], 2, |scope, model, plan, parts| {
        let grains = input(scope);
        match scope.index() {
            0 => drop(Training::<Cpu, Bigram>::build_over_elsewhere(
                grains,
                plan,
                &parts.abort,
                None,
            )),
            _ => drop(parts.training(model, plan).build_over(grains, None)),
        }
    });
    let error = refused.unwrap_err();
    assert_eq!(error.exit_class(), ExitClass::FixInput);
    let text = error.with_causes();
    assert!(text.contains("worker 0"), "{text}");
    let said =
        "grain 1 of lane 3: expected it on a worker that trains, which are [1], found it here";
    assert!(text.contains(said), "{text}");
}

/// A grain on worker 0; on worker 1 none, and others may still come.
fn input(scope: Scope<'_, u64>) -> StreamVec<'_, u64, Grain> {
    source::<_, CapacityContainerBuilder<Vec<_>>, _, _>(scope, "Grains", |capability, _| {
        let mut held = Some(capability);
        let is_here = scope.index() == 0;
        move |output| {
            if is_here && let Some(held) = held.take() {
                let samples = vec![vec![1; 6]; 2];
                output.session(&held).give(Grain { step: 0, lane: 3, grain: 1, samples });
            }
        }
    })
}

#[test]
fn a_worker_that_trains_and_was_given_nothing_is_named() {
    let refused = run_each(&[0], 2, |scope, _, plan, parts| {
        Training::<Cpu, Bigram>::build_elsewhere(scope, plan, &parts.abort, None);
    });
    let text = refused.unwrap_err().with_causes();
    assert!(text.contains("worker 0"), "{text}");
    assert!(
        text.contains("expected an optimizer on every worker that trains, found none"),
        "{text}"
    );
    let refused = run_each(&[0], 2, |scope, model, plan, parts| {
        parts.training(model, plan).build(scope, None::<Source>, None);
    });
    let text = refused.unwrap_err().with_causes();
    assert!(text.contains("expected a source of samples on every worker"), "{text}");
}
