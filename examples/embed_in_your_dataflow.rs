//! Training as one part of a timely program of yours.
//!
//! ```text
//! cargo run --release --example embed_in_your_dataflow
//! ```
//!
//! The program makes its own samples (sums to learn by heart), feeds them to training as a stream of grains, and taps
//! the stream of losses with ordinary timely operators: a moving average, printed by one worker.

use std::cell::RefCell;
use std::num::NonZeroUsize;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::{Result, ensure};
use tidemill::batch::{BatchPlan, BatchSettings, MicrobatchMemory};
use tidemill::cluster::{ClusterSettings, Failure, WorkerContext, execute};
use tidemill::communicators::Communicators;
use tidemill::kernels::Cpu;
use tidemill::model::optimizer::OptimizerSettings;
use tidemill::model::schedule::ScheduleSettings;
use tidemill::model::{LanguageModel, MambaConfig, Tokens, Trainable};
use tidemill::operators::{Grain, InitialState, ScheduledRule, Training, TrainingPlan};
use timely::container::CapacityContainerBuilder;
use timely::dataflow::operators::vec::{Filter, Map};
use timely::dataflow::operators::{Inspect, Probe};
use timely::dataflow::{InputHandle, ProbeHandle};

/// Digits, `+`, `=` and the end of a line.
const VOCABULARY: &str = "0123456789+=.";
/// Predicted tokens of a sample.
const POSITIONS: usize = 63;
/// Lanes of a step: as many workers are possible.
const LANES: usize = 8;
const STEPS: u64 = 60;

fn main() -> Result<()> {
    let (one, two) = (losses(1)?, losses(2)?);
    ensure!(one == two, "the losses must not depend on the number of workers");
    println!("loss {:.3} -> {:.3}: the same bits with 1 and with 2 workers", one[0], one[59]);
    Ok(())
}

/// The losses of the whole program on `workers` workers.
fn losses(workers: usize) -> Result<Vec<f64>> {
    println!("{workers} workers:");
    let cluster = ClusterSettings::workers(workers);
    let cpu = Arc::new(Cpu::new(NonZeroUsize::MIN)?);
    // How a step is cut. `lanes` bounds the number of workers.
    let batch =
        BatchSettings { samples_per_step: Some(16), lanes: Some(LANES), ..Default::default() };
    let batch = batch.plan(MicrobatchMemory { sample_bytes: 0, workspace_bytes: 0 })?;
    // How workers sum their gradients.
    let communicators = Communicators::of_cluster(&vec![&*cpu; workers], &cluster, &batch)?;
    let program =
        move |context: &mut WorkerContext<'_>| your_program(context, &cpu, &batch, &communicators);
    let per_worker = execute(cluster, program)?;
    Ok(per_worker.into_iter().next().unwrap_or_default())
}

/// The program of each worker.
fn your_program(
    context: &mut WorkerContext<'_>,
    cpu: &Arc<Cpu>,
    batch: &BatchPlan,
    communicators: &Communicators<Cpu>,
) -> Result<Vec<f64>, Failure> {
    let model = Arc::new(LanguageModel::new(&MambaConfig::new(VOCABULARY.len(), 32, 2))?);
    let layout = Trainable::<Cpu>::layout(model.as_ref());
    let plan = Arc::new(TrainingPlan::new(batch.clone(), layout, POSITIONS, STEPS));
    let optimizer = OptimizerSettings { learning_rate: 1e-2, ..Default::default() };
    let training = Training {
        plan: Arc::clone(&plan),
        backend: Arc::clone(cpu),
        state: InitialState {
            parameters: Arc::new(Trainable::<Cpu>::initialize(model.as_ref(), 17)),
            states: None,
        },
        model,
        rule: ScheduledRule::new(&optimizer, ScheduleSettings::default(), STEPS),
        connection: communicators.take(context, cpu)?,
        stop: Arc::new(AtomicBool::new(false)),
        checkpoints: None,
        abort: context.abort().clone(),
    };

    // The dataflow: your input, training, and what you make of its losses.
    let mut input = InputHandle::<u64, CapacityContainerBuilder<Vec<Grain>>>::new();
    let probe = ProbeHandle::new();
    let losses = Rc::new(RefCell::new(Vec::new()));
    let kept = Rc::clone(&losses);
    let (index, peers) = (context.index() as u64, context.peers() as u64);
    context.dataflow::<u64, _, _>(|scope| {
        let reports = training.build_over(input.to_stream(scope), None).reports;
        reports
            .clone()
            .inspect(move |report| kept.borrow_mut().push(report.loss))
            .probe_with(&probe);
        let mut average = None;
        reports
            .map(|report| (report.step, report.loss))
            .map(move |(step, loss)| {
                let before = average.unwrap_or(loss);
                average = Some(0.9 * before + 0.1 * loss);
                (step, 0.9 * before + 0.1 * loss)
            })
            // Every worker has the same reports: they take turns to show them.
            .filter(move |&(step, _)| step % peers == index)
            .inspect_batch(|_, batch| {
                for (step, average) in batch.iter().filter(|(step, _)| step % 20 == 0) {
                    println!("  step {step}: average loss {average:.3}");
                }
            });
    });

    // Your samples, a step at a time, two steps ahead of training.
    let lanes = batch.worker_lanes(context.index(), context.peers())?;
    for step in 0..STEPS {
        for &lane in &lanes {
            for grain in 0..batch.lane_grains(lane) {
                input.send(your_grain(batch, step, lane, grain));
            }
        }
        input.advance_to(step + 1);
        context.step_while(|| probe.less_than(&step.saturating_sub(1)))?;
    }
    input.close();
    context.run_until_done()?;
    Ok(losses.take())
}

/// The samples of one grain: a function of their positions, whichever worker asks.
fn your_grain(batch: &BatchPlan, step: u64, lane: usize, grain: usize) -> Grain {
    let positions = batch.positions(step, &batch.grain_range(lane, grain));
    Grain { step, lane, grain, samples: positions.map(sums).collect() }
}

/// Lines such as `17+25=42.`, as tokens.
fn sums(position: u64) -> Tokens {
    let mut random = position.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut text = String::new();
    while text.len() <= POSITIONS {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let (a, b) = (random % 10, (random >> 20) % 10);
        text.push_str(&format!("{a}+{b}={}.", a + b));
    }
    let token = |character| VOCABULARY.find(character).map_or(0, |token| token as u32);
    text.chars().take(POSITIONS + 1).map(token).collect()
}
