//! Training on documents that are added and withdrawn while it runs.
//!
//! ```text
//! cargo run --release -p tidemill-live-example --example documents_that_come_and_go
//! ```
//!
//! The program has a feed of documents: some are added, some are withdrawn, and some are copies of
//! others. Operators of `streaming_data::live` report at every step which documents are kept, as
//! differences. The samples of a step are drawn from those, so a withdrawn document is no longer
//! trained on, and a copy of it takes its place. The losses are the same to the bit for any number
//! of workers.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::num::NonZeroUsize;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::{Result, ensure};
use differential_dataflow::input::Input;
use tidemill::batch::{BatchPlan, BatchSettings, MicrobatchMemory};
use tidemill::cluster::{ClusterSettings, Failure, WorkerContext, execute};
use tidemill::communicators::Communicators;
use tidemill::kernels::Cpu;
use tidemill::model::optimizer::OptimizerSettings;
use tidemill::model::schedule::ScheduleSettings;
use tidemill::model::{LanguageModel, MambaConfig, Trainable};
use tidemill::operators::{Grain, InitialState, ScheduledRule, Training, TrainingPlan};
use tidemill::streaming_data::live::{Judge, Summary, Verdict, verdicts};
use tidemill::streaming_data::prepare::{Dedup, FilterSettings};
use timely::container::CapacityContainerBuilder;
use timely::dataflow::operators::vec::Broadcast;
use timely::dataflow::operators::{Inspect, Probe};
use timely::dataflow::{InputHandle, ProbeHandle};

/// Predicted tokens of a sample, which are bytes.
const POSITIONS: usize = 47;
const STEPS: u64 = 40;
/// The document that is withdrawn, the step of the withdrawal, and the document's copy.
const WITHDRAWN: (u64, u64, u64) = (3, 20, 7);

fn main() -> Result<()> {
    let (one, two) = (trained(1)?, trained(2)?);
    ensure!(one.losses == two.losses, "the losses must not depend on the number of workers");
    println!(
        "loss {:.3} -> {:.3}: the same bits with 1 and with 2 workers",
        one.losses[0], one.losses[39]
    );
    let (withdrawn, at, copy) = WITHDRAWN;
    for (step, drawn) in one.drawn.iter().enumerate() {
        let is_withdrawn = step as u64 >= at;
        ensure!(
            !(is_withdrawn && drawn.contains(&withdrawn)),
            "step {step} has a withdrawn document"
        );
        ensure!(is_withdrawn || !drawn.contains(&copy), "step {step} has a copy");
    }
    ensure!(one.drawn.iter().any(|drawn| drawn.contains(&withdrawn)));
    ensure!(one.drawn.iter().any(|drawn| drawn.contains(&copy)));
    println!(
        "document {withdrawn} was drawn until step {at}, and document {copy}, a copy of it, from then on"
    );
    Ok(())
}

/// The results of worker 0.
#[derive(Default)]
struct Trained {
    losses: Vec<f64>,
    /// The documents from which the worker's samples of each step come.
    drawn: Vec<BTreeSet<u64>>,
}

/// Every second step adds a document, and one is withdrawn.
fn feed(step: u64) -> Vec<(u64, isize)> {
    let mut changes = Vec::new();
    match step {
        0 => changes.extend((0..5).map(|key| (key, 1))),
        _ if step.is_multiple_of(2) => changes.push((4 + step / 2, 1)),
        _ => {}
    }
    if step == WITHDRAWN.1 {
        changes.push((WITHDRAWN.0, -1));
    }
    changes
}

/// The text of a document. Texts that differ only in digits count as copies, so it has words for
/// numbers.
fn text(key: u64) -> String {
    let key = if key == WITHDRAWN.2 { WITHDRAWN.0 } else { key };
    let (mill, tide) = (name(key), name(key + 100));
    format!("the mill of {mill} turns with the tide of {tide} and grinds. ").repeat(3)
}

/// A word for a number.
fn name(number: u64) -> String {
    let digits = [1, 26, 676].map(|place| number.wrapping_mul(7919) / place % 26);
    digits.into_iter().map(|digit| char::from(b'a' + digit as u8)).collect()
}

/// The program on `workers` workers.
fn trained(workers: usize) -> Result<Trained> {
    let cluster = ClusterSettings::workers(workers);
    let cpu = Arc::new(Cpu::new(NonZeroUsize::MIN)?);
    let batch = BatchSettings { samples_per_step: Some(8), lanes: Some(4), ..Default::default() };
    let batch = batch.plan(MicrobatchMemory { sample_bytes: 0, workspace_bytes: 0 })?;
    let communicators = Communicators::of_cluster(&vec![&*cpu; workers], &cluster, &batch)?;
    let program =
        move |context: &mut WorkerContext<'_>| work(context, &cpu, &batch, &communicators);
    Ok(execute(cluster, program)?.into_iter().next().unwrap_or_default())
}

/// The program of each worker.
fn work(
    context: &mut WorkerContext<'_>,
    cpu: &Arc<Cpu>,
    batch: &BatchPlan,
    communicators: &Communicators<Cpu>,
) -> Result<Trained, Failure> {
    let (index, peers) = (context.index() as u64, context.peers() as u64);

    // Documents in, verdicts out: every worker receives every change of the kept documents.
    let (changes, told) = (Rc::new(RefCell::new(Vec::new())), ProbeHandle::new());
    let heard = Rc::clone(&changes);
    let mut documents = context.dataflow::<u64, _, _>(|scope| {
        let (documents, summaries) = scope.new_collection::<(u64, Summary), isize>();
        let kept = verdicts(summaries).filter(|(_, verdict)| *verdict == Verdict::Kept);
        let kept = kept.map(|(key, _)| key).consolidate();
        let heard_of = move |change: &(u64, u64, isize)| heard.borrow_mut().push(*change);
        kept.inner.broadcast().inspect(heard_of).probe_with(&told);
        documents
    });

    // Samples in, losses out.
    let training = training(context, cpu, batch, communicators)?;
    let mut grains = InputHandle::<u64, CapacityContainerBuilder<Vec<Grain>>>::new();
    let (losses, learned) = (Rc::new(RefCell::new(Vec::new())), ProbeHandle::new());
    let reported = Rc::clone(&losses);
    context.dataflow::<u64, _, _>(|scope| {
        let reports = training.build_over(grains.to_stream(scope), None).reports;
        reports.inspect(move |report| reported.borrow_mut().push(report.loss)).probe_with(&learned);
    });

    let mut judge = Judge::new(FilterSettings::default(), Dedup::ExactWords);
    let (mut kept, mut drawn) = (BTreeSet::new(), Vec::new());
    let lanes = batch.worker_lanes(context.index(), context.peers())?;
    for step in 0..STEPS {
        for (key, difference) in feed(step).into_iter().filter(|(key, _)| key % peers == index) {
            documents.update((key, judge.summary(&text(key))), difference);
        }
        documents.advance_to(step + 1);
        documents.flush();
        context.step_while(|| told.less_than(&(step + 1)))?;
        let mut now = changes.take();
        // Removals come before additions in their place.
        now.sort_unstable_by_key(|&(key, time, difference)| (time, difference, key));
        for (key, _, difference) in now {
            if difference > 0 {
                kept.insert(key)
            } else {
                kept.remove(&key)
            };
        }

        drawn.push(BTreeSet::new());
        for &lane in &lanes {
            for grain in 0..batch.lane_grains(lane) {
                let positions = batch.positions(step, &batch.grain_range(lane, grain));
                let samples = positions.map(|position| {
                    let key = draw(&kept, position);
                    drawn.last_mut().map(|drawn: &mut BTreeSet<u64>| drawn.insert(key));
                    tokens(&text(key), position)
                });
                grains.send(Grain { step, lane, grain, samples: samples.collect() });
            }
        }
        grains.advance_to(step + 1);
        context.step_while(|| learned.less_than(&step.saturating_sub(1)))?;
    }
    documents.close();
    grains.close();
    context.run_until_done()?;
    Ok(Trained { losses: losses.take(), drawn })
}

/// The document of a position: a function of the position and of what is kept.
fn draw(kept: &BTreeSet<u64>, position: u64) -> u64 {
    let random = position.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 33;
    let at = random as usize % kept.len().max(1);
    kept.iter().nth(at).copied().unwrap_or_default()
}

/// A part of a text, as bytes.
fn tokens(text: &str, position: u64) -> Vec<u32> {
    let start = position as usize * 5 % (text.len() - POSITIONS);
    text.bytes().skip(start).take(POSITIONS + 1).map(u32::from).collect()
}

/// A small model of bytes, to be trained.
fn training(
    context: &mut WorkerContext<'_>,
    cpu: &Arc<Cpu>,
    batch: &BatchPlan,
    communicators: &Communicators<Cpu>,
) -> Result<Training<Cpu, LanguageModel<Cpu>>, Failure> {
    let model = Arc::new(LanguageModel::new(&MambaConfig::new(256, 32, 2))?);
    let layout = Trainable::<Cpu>::layout(model.as_ref());
    let plan = Arc::new(TrainingPlan::new(batch.clone(), layout, POSITIONS, STEPS));
    let optimizer = OptimizerSettings { learning_rate: 1e-2, ..Default::default() };
    let parameters = Arc::new(Trainable::<Cpu>::initialize(model.as_ref(), 17));
    Ok(Training {
        plan,
        backend: Arc::clone(cpu),
        state: InitialState { parameters, states: None },
        model,
        rule: ScheduledRule::new(&optimizer, ScheduleSettings::default(), STEPS),
        connection: communicators.take(context, cpu)?,
        stop: Arc::new(AtomicBool::new(false)),
        checkpoints: None,
        abort: context.abort().clone(),
    })
}
