//! The cost of the training graph itself: for a step, over 3,000 steps of a model whose arithmetic takes a few
//! microseconds; and for a chunk of state, of which a large model has tens of thousands.
//!
//! ```text
//! cargo bench -p tidemill --bench graph_overhead
//! ```

#[path = "../tests/graph/bigram.rs"]
mod bigram;
#[path = "graph_overhead/idle.rs"]
mod idle;

use std::collections::VecDeque;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use tidemill::batch::{BatchSettings, MicrobatchMemory};
use tidemill::cluster::{ClusterSettings, Failure, execute};
use tidemill::collective::{BUCKET_ELEMENTS, LaneSchedule};
use tidemill::communicators::Communicators;
use tidemill::kernels::Cpu;
use tidemill::kernels::KernelError;
use tidemill::model::optimizer::OptimizerSettings;
use tidemill::model::schedule::{ScheduleName, ScheduleSettings};
use tidemill::model::{Layout, Tokens, Trainable};
use tidemill::operators::{
    InitialState, SampleSource, ScheduledRule, Training, TrainingPlan, Wake,
};
use tidemill::parallel::Sharding;

use bigram::Bigram;
use idle::Idle;

/// Chunks of state, and elements of a chunk.
const CHUNKS: usize = 20_000;
const CHUNK: usize = idle::CHUNK_ELEMENTS;

fn random(seed: u64) -> u64 {
    seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29).wrapping_mul(0xbf58_476d_1ce4_e5b9)
}

struct Ready(VecDeque<u64>);

impl SampleSource for Ready {
    type Sample = Tokens;

    fn request(&mut self, positions: Range<u64>) {
        self.0.extend(positions);
    }

    fn poll(&mut self) -> Result<Option<(u64, Tokens)>, Failure> {
        let sample = |position| (position, vec![position as u32 % 64, 5, 9]);
        Ok(self.0.pop_front().map(sample))
    }

    fn set_wake(&mut self, _wake: Wake) {}
}

fn rule() -> ScheduledRule<Cpu> {
    let schedule = ScheduleSettings { name: ScheduleName::Constant, ..Default::default() };
    ScheduledRule::new(&OptimizerSettings::default(), schedule, 1)
}

/// Microseconds a step, over `steps` steps.
fn measure<M: Trainable<Cpu, Sample = Tokens>>(
    workers: usize,
    steps: u64,
    model: fn() -> M,
    arrange: fn(TrainingPlan, &Layout) -> TrainingPlan,
) -> Result<f64, Box<dyn std::error::Error>> {
    let start = Instant::now();
    let cpu = Cpu::new(NonZeroUsize::MIN)?;
    let no_library = || Err(KernelError::shape("bench", "library", "none", "one"));
    let lanes = LaneSchedule::at_once(4, workers)?;
    let (cpus, sharding) = (vec![&cpu; workers], Sharding::Optimizer);
    let cluster = ClusterSettings::workers(workers);
    let communicators = Communicators::new(&cpus, &cluster, lanes, sharding, no_library)?;
    execute(cluster, move |context| {
        let model = Arc::new(model());
        let memory = MicrobatchMemory { sample_bytes: 1, workspace_bytes: 1 };
        let settings =
            BatchSettings { samples_per_step: Some(4), lanes: Some(4), ..BatchSettings::default() };
        let plan = TrainingPlan::new(settings.plan(memory)?, model.layout(), 2, steps);
        let plan = arrange(plan, model.layout());
        let parameters = Arc::new(model.initialize(1));
        let training = Training {
            plan: Arc::new(plan),
            backend: Arc::new(cpu.clone()),
            model,
            state: InitialState { parameters, states: None },
            rule: rule(),
            connection: communicators.take(context, &cpu)?,
            stop: Arc::new(AtomicBool::new(false)),
            checkpoints: None,
            abort: context.abort().clone(),
        };
        context.dataflow::<u64, _, _>(|scope| {
            training.build(scope, Ready(VecDeque::new()), None);
        });
        Ok(context.run_until_done()?)
    })?;
    Ok(start.elapsed().as_secs_f64() * 1e6 / steps as f64)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    for workers in [1, 2, 4] {
        let step = measure(workers, 3_000, Bigram::new, |plan, _layout| plan)?;
        println!("{workers} workers: {step:.0} microseconds a step");
    }
    let step = measure(
        1,
        200,
        || Idle::new(CHUNKS),
        |plan, layout| plan.with_cuts(layout, CHUNK, BUCKET_ELEMENTS),
    )?;
    let chunk = 1e3 * step / CHUNKS as f64;
    println!("{CHUNKS} chunks: {step:.0} microseconds a step, {chunk:.0} ns a chunk");
    Ok(())
}
