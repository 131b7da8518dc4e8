//! The promise of the training graph for a small Mamba on a device with memory of its own: test bodies, generic over the
//! backend.

use std::num::NonZeroUsize;
use std::sync::{Arc, OnceLock};

use tidemill::kernels::{Backend, Cpu, Element, MemoryPlace};
use tidemill::model::{LanguageModel, MambaConfig};
use tidemill::parallel::Sharding;

use super::harness::{Outcome, Rule, Run, Subject};
use super::lookup::{Lookup, VOCAB};

/// One device, and what a run on it gives.
pub struct Arm<B> {
    pub name: String,
    pub backend: Arc<B>,
    reference: OnceLock<Outcome>,
}

/// Hands every body, with the name of its test, to a macro.
macro_rules! every_body {
    ($tests:ident) => {
        $tests! {
            the_reference_trains_as_on_the_cpu: on_device::trains_as_on_the_cpu;
            another_run_gives_the_same_bits: on_device::another_run_gives_the_same_bits;
            microbatches_are_not_numerics: on_device::microbatches_are_not_numerics;
            workers_without_a_library_give_the_same_bits: on_device::workers_without_a_library;
            any_number_of_workers_gives_the_same_bits: on_device::workers_give_the_same_bits;
            checkpoints_without_room_on_the_host_are_the_same: on_device::checkpoints_in_place;
            lanes_are_numerics: on_device::lanes_are_numerics;
            a_resumed_run_ends_like_one_that_never_stopped: on_device::resumes_anywhere;
            a_rule_of_whole_tensors_gives_the_same_bits: on_device::whole_tensors;
            a_token_that_the_device_finds_wrong_ends_the_run: on_device::wrong_token_ends_the_run;
        }
    };
}
pub(crate) use every_body;

/// The sizes of a run: lanes of two or three samples, so that grains of two do not divide all of them.
fn run() -> Run {
    Run { samples: 11, lanes: 4, steps: 4, checkpoint_every: 2, ..Run::default() }
}

/// Two of the blocks use the same table, and chunks are cut inside tensors.
pub fn mamba<B: Backend>(backend: Arc<B>) -> Subject<B, LanguageModel<B>> {
    let config = MambaConfig { d_state: 3, d_conv: 3, dt_rank: 2, ..MambaConfig::new(29, 6, 1) };
    let model = Arc::new(LanguageModel::new(&config).unwrap());
    Subject { backend, others: Vec::new(), vocab_size: 29, model, chunk_elements: 70 }
}

impl<B: Backend> Arm<B> {
    pub fn new(name: impl Into<String>, backend: B) -> Self {
        Self { name: name.into(), backend: Arc::new(backend), reference: OnceLock::new() }
    }

    fn run(&self, run: &Run) -> Outcome {
        let outcome = run.run_on(&mamba(Arc::clone(&self.backend)));
        outcome.unwrap_or_else(|error| panic!("{}: {}", self.name, error.with_causes()))
    }

    /// One worker, whose state is where the device has its memory.
    fn reference(&self) -> &Outcome {
        self.reference.get_or_init(|| self.run(&run()))
    }

    #[track_caller]
    fn same(&self, run: &Run) {
        assert_eq!(&self.run(run), self.reference(), "{}: {run:?}", self.name);
    }
}

/// Allowed relative differences of losses, and of norms after steps that are so large. Seen are 2e-8 and 6e-8, in bf16 2e-4 and 5e-2.
const APART: [[f64; 2]; 2] = [[1e-5, 1e-5], [2e-3, 1e-1]];

pub fn trains_as_on_the_cpu<B: Backend>(arm: &Arm<B>) {
    assert_eq!(arm.backend.memory(), MemoryPlace::Device);
    let cpu = Arm::new("cpu", Cpu::new(NonZeroUsize::MIN).unwrap());
    let found = arm.reference();
    assert_close(arm, found, cpu.reference());
    assert_eq!(found.checkpoints.keys().copied().collect::<Vec<_>>(), [2, 4]);
    assert_eq!(found.evaluations.keys().copied().collect::<Vec<_>>(), [4]);
}

/// The losses and norms of `found` are about those of `expected`, which the CPU has.
fn assert_close<B: Backend>(arm: &Arm<B>, found: &Outcome, expected: &Outcome) {
    assert_eq!(found.reports.len(), 4);
    let apart = APART[usize::from(B::Activation::NAME != f32::NAME)];
    for (found, expected) in found.reports.iter().zip(&expected.reports) {
        assert_eq!((found.0, found.3, found.4), (expected.0, expected.3, expected.4));
        let pairs = [(found.1, expected.1), (found.2, expected.2)];
        for ((found, expected), apart) in pairs.into_iter().zip(apart) {
            let (found, expected) = (f64::from_bits(found), f64::from_bits(expected));
            let error = (found / expected - 1.0).abs();
            println!("{}: {found:.6}, off by {error:.1e}", arm.name);
            assert!(error < apart, "{}: {found}, on the CPU {expected}", arm.name);
        }
    }
}

pub fn another_run_gives_the_same_bits<B: Backend>(arm: &Arm<B>) {
    arm.same(&run());
}

pub fn microbatches_are_not_numerics<B: Backend>(arm: &Arm<B>) {
    for microbatch in [1, 100] {
        arm.same(&Run { microbatch, window_bytes: 80, read_ahead: 1, ..run() });
    }
}

/// The workers of several processes send through the host's memory.
pub fn workers_without_a_library<B: Backend>(arm: &Arm<B>) {
    for sharding in Sharding::ALL {
        arm.same(&Run { workers: 2, processes: 2, sharding, ..run() });
        arm.same(&Run { workers: 4, processes: 2, window_bytes: 80, sharding, ..run() });
        arm.same(&Run { workers: 4, processes: 2, hosts: 2, window_bytes: 80, sharding, ..run() });
    }
}

/// Each of them on a device stream of its own.
pub fn workers_give_the_same_bits<B: Backend>(arm: &Arm<B>) {
    for sharding in Sharding::ALL {
        arm.same(&Run { workers: 2, microbatch: 1, sharding, ..run() });
        arm.same(&Run { workers: 3, window_bytes: 200, sharding, ..run() });
    }
}

/// The state of a cut is copied from its place while the next step computes, in windows smaller than a chunk or of all of it.
pub fn checkpoints_in_place<B: Backend>(arm: &Arm<B>) {
    use Sharding::{Gradients, Optimizer, Parameters};
    let every_step = Run { steps: 2, checkpoint_every: 1, ..run() };
    let expected = arm.run(&every_step);
    assert_eq!(expected.checkpoints.keys().copied().collect::<Vec<_>>(), [1, 2]);
    for (workers, sharding, window_bytes) in
        [(1, Optimizer, 80), (2, Gradients, 4 << 20), (2, Parameters, 80)]
    {
        let run = Run { workers, sharding, window_bytes, ..every_step.clone() };
        let found = arm.run(&Run { staging_bytes: Some(0), ..run });
        assert_eq!(found, expected, "{}: {workers} workers, {sharding:?}", arm.name);
    }
}

pub fn lanes_are_numerics<B: Backend>(arm: &Arm<B>) {
    let device = arm.run(&Run { lanes: 2, ..run() });
    let workers = arm.run(&Run { lanes: 2, workers: 2, ..run() });
    assert_eq!(device, workers, "{}", arm.name);
    assert_ne!(device.checkpoints[&4], arm.reference().checkpoints[&4], "{}", arm.name);
}

pub fn resumes_anywhere<B: Backend>(arm: &Arm<B>) {
    let reference = arm.reference();
    let resume = Some((2, reference.checkpoints[&2].clone()));
    for (workers, processes) in [(1, 1), (2, 1), (3, 3)] {
        let rest = arm.run(&Run { workers, processes, resume: resume.clone(), ..run() });
        assert_eq!(rest.reports, reference.reports[2..], "{}", arm.name);
        assert_eq!(rest.checkpoints[&4], reference.checkpoints[&4], "{}", arm.name);
        assert_eq!(rest.evaluations, reference.evaluations, "{}", arm.name);
    }
}

/// They are updated on the host, from masters and states that the device has, or on the device.
pub fn whole_tensors<B: Backend>(arm: &Arm<B>) {
    let cpu = Arm::new("cpu", Cpu::new(NonZeroUsize::MIN).unwrap());
    for rule in [Rule::Adafactor, Rule::Muon] {
        let of = |workers, sharding| Run { rule, workers, sharding, ..run() };
        let expected = arm.run(&of(1, Sharding::Optimizer));
        assert_close(arm, &expected, &cpu.run(&of(1, Sharding::Optimizer)));
        for (workers, sharding) in [(2, Sharding::Optimizer), (3, Sharding::Parameters)] {
            let run = of(workers, sharding);
            assert_eq!(arm.run(&run), expected, "{}: {run:?}", arm.name);
            let resume = Some((2, expected.checkpoints[&2].clone()));
            let rest = arm.run(&Run { resume, ..run });
            assert_eq!(rest.checkpoints[&4], expected.checkpoints[&4], "{}", arm.name);
        }
    }
    let cut = Run { rule: Rule::AdafactorOfElements, ..run() };
    let error = cut.run_on(&mamba(Arc::clone(&arm.backend))).unwrap_err().with_causes();
    assert!(error.contains("expected a plan in which each has one owner"), "{error}");
}

/// The second sample of a lane of the third step begins with a token that no table has, and only the device looks.
pub fn wrong_token_ends_the_run<B: Backend>(arm: &Arm<B>) {
    let backend = Arc::clone(&arm.backend);
    let (others, model) = (Vec::new(), Arc::new(Lookup::new()));
    let lookup = Subject { backend, others, model, vocab_size: VOCAB, chunk_elements: 70 };
    run().run_on(&lookup).unwrap_or_else(|error| panic!("{}", error.with_causes()));
    for workers in [1, 2] {
        let poison = Some((11 * 2 + 1, 1_000));
        let run = Run { workers, poison, ..run() };
        let (error, checkpoints) = run.run_to_failure_on(&lookup);
        let expected = format!("row 6 holds token 1000, but the vocabulary has {VOCAB} tokens");
        assert!(error.with_causes().ends_with(&expected), "{}", error.with_causes());
        assert!(checkpoints.keys().all(|&step| step <= 2), "a checkpoint of the step that failed");
    }
}
