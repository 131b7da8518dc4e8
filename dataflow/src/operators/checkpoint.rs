//! The state of a step, gathered on worker 0 and handed to a writer.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tidemill_collective::{Chunk, Credit, CreditLedger, Part, StatePart, by_destination};
use timely::container::CapacityContainerBuilder;
use timely::dataflow::channels::pact::Pipeline;
use timely::dataflow::operators::Capability;
use timely::dataflow::operators::generic::OutputBuilder;
use timely::dataflow::operators::generic::builder_rc::OperatorBuilder;
use timely::dataflow::{Stream, StreamVec};
use timely::progress::operate::FrontierInterest;

use super::companion::{Companion, Jobs, OperatorGone, Replies};
use super::error::GraphError;
use super::optimize::StepReport;
use super::plan::{CheckpointCuts, TrainingPlan};
use crate::cluster::progress::Phase;
use crate::cluster::{Abort, Actor, Failure};

/// Where checkpoints go. It is called on a thread of its own, one checkpoint after the other.
pub trait StateSink: Send + 'static {
    /// Begins the checkpoint after `report.step` updates.
    ///
    /// # Errors
    /// Whatever keeps it from being written; the run ends.
    fn begin(&mut self, report: &StepReport) -> Result<(), Failure>;

    /// Takes elements of the arena from `arena_start`. Every element of every part comes exactly
    /// once, in no particular order.
    ///
    /// # Errors
    /// Whatever keeps it from being written; the run ends.
    fn write(&mut self, part: StatePart, arena_start: usize, values: &[f32])
    -> Result<(), Failure>;

    /// Everything was written: makes the checkpoint complete.
    ///
    /// # Errors
    /// Whatever keeps it from being complete; the run ends.
    fn commit(&mut self) -> Result<(), Failure>;
}

/// A checkpoint is complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckpointDone {
    /// Updates done in it.
    pub step: u64,
}

/// What [`Checkpoint`] gives.
pub struct CheckpointStreams<'scope> {
    /// On worker 0: every checkpoint that is complete.
    pub done: StreamVec<'scope, u64, CheckpointDone>,
    /// Credit for the state that was written: for `optimize`, through a feedback.
    pub state_credits: StreamVec<'scope, u64, Credit>,
}

/// Writes checkpoints.
pub trait Checkpoint<'scope> {
    /// Hands the state of every cut to `sink`, on worker 0.
    ///
    /// # Contract
    /// - Input: state chunks addressed to worker 0 (exchanged here) and the reports of this worker. `sink` is `Some`
    ///   on worker 0; elsewhere it is not used.
    /// - Output: [`CheckpointDone`] at the timestamp of the step, after `commit`; the dataflow is not complete before.
    /// - Memory: chunks wait here for the writer thread, and credit comes back when it has written them: at most
    ///   `plan.window_bytes` a worker.
    /// - Failure: an error of `sink` aborts the run.
    fn checkpoint(
        self,
        reports: StreamVec<'scope, u64, StepReport>,
        sink: Option<Box<dyn StateSink>>,
        plan: &Arc<TrainingPlan>,
        abort: &Abort,
    ) -> CheckpointStreams<'scope>;
}

enum WriterJob {
    Begin(StepReport),
    Write { part: StatePart, arena_start: usize, chunk: Chunk },
    Commit,
}

enum WriterReply {
    Written(Vec<Credit>),
    Committed,
}

/// The writer thread.
fn run(
    mut sink: Box<dyn StateSink>,
    jobs: &Jobs<WriterJob>,
    replies: &Replies<WriterReply>,
) -> Result<(), Failure> {
    while let Some(job) = jobs.next() {
        let sent = match job {
            WriterJob::Begin(report) => {
                sink.begin(&report)?;
                Ok(())
            }
            WriterJob::Write { part, arena_start, chunk } => {
                sink.write(part, arena_start, &chunk.values()?)?;
                let mut ledger = CreditLedger::default();
                ledger.consumed(chunk.header()?.source, chunk.payload_bytes());
                replies.send(WriterReply::Written(ledger.settle().collect()))
            }
            WriterJob::Commit => {
                sink.commit()?;
                replies.send(WriterReply::Committed)
            }
        };
        if let Err(OperatorGone) = sent {
            break;
        }
    }
    Ok(())
}

/// One cut on worker 0.
#[derive(Default)]
struct Cut {
    report: Option<StepReport>,
    done: Option<Capability<u64>>,
    credits: Option<Capability<u64>>,
    /// What arrived and was not handed to the writer.
    waiting: Vec<Chunk>,
    /// By part: which chunks of it were handed over.
    arrived: [Vec<bool>; StatePart::ALL.len()],
    handed: usize,
    written: usize,
}

impl Cut {
    /// Takes note of a chunk of the cut after step `step`; answers which part it is and where it stands in the arena.
    fn admit(
        &mut self,
        plan: &TrainingPlan,
        step: u64,
        chunk: &Chunk,
    ) -> Result<(StatePart, usize), Failure> {
        let header = *chunk.header_for(0)?;
        let (chunks, index, step) = (plan.chunks.chunks(), header.chunk as usize, step + 1);
        let (part, planned) = match (header.part, chunks.get(index)) {
            (Part::State(part), Some(planned))
                if header.step == step && chunk.payload_bytes() == 4 * planned.range.len() =>
            {
                (part, planned)
            }
            _ => {
                let expected = "a part of the optimizer's state";
                return Err(GraphError::Chunk { step, expected, found: header }.into());
            }
        };
        let arrived = &mut self.arrived[part as usize];
        arrived.resize(chunks.len(), false);
        if std::mem::replace(&mut arrived[index], true) {
            let what = format!("{part:?} of chunk {index}");
            return Err(GraphError::Twice { step, what }.into());
        }
        self.handed += 1;
        Ok((part, planned.range.start))
    }
}

struct State {
    plan: Arc<TrainingPlan>,
    writer: Companion<WriterJob, WriterReply>,
    /// By step; the first is the one that is written.
    cuts: BTreeMap<u64, Cut>,
}

impl State {
    /// Chunks of a whole checkpoint.
    fn expected(&self) -> usize {
        StatePart::ALL.len() * self.plan.chunks.chunks().len()
    }

    /// Hands what has arrived of the oldest cut to the writer.
    fn hand_over(&mut self) -> Result<(), Failure> {
        let expected = self.expected();
        let Some(mut entry) = self.cuts.first_entry() else { return Ok(()) };
        let step = *entry.key();
        let cut = entry.get_mut();
        let Some(report) = cut.report else { return Ok(()) };
        for chunk in std::mem::take(&mut cut.waiting) {
            let is_first = cut.handed == 0;
            let (part, arena_start) = cut.admit(&self.plan, step, &chunk)?;
            if is_first {
                self.writer.send(WriterJob::Begin(report));
            }
            self.writer.send(WriterJob::Write { part, arena_start, chunk });
            if cut.handed == expected {
                self.writer.send(WriterJob::Commit);
            }
        }
        Ok(())
    }
}

impl<'scope> Checkpoint<'scope> for Stream<'scope, u64, Chunk> {
    fn checkpoint(
        self,
        reports: StreamVec<'scope, u64, StepReport>,
        sink: Option<Box<dyn StateSink>>,
        plan: &Arc<TrainingPlan>,
        abort: &Abort,
    ) -> CheckpointStreams<'scope> {
        let scope = self.scope();
        let mut builder = OperatorBuilder::new("Checkpoint".to_owned(), scope);
        let (done_output, done) = builder.new_output::<Vec<CheckpointDone>>();
        let (credits_output, state_credits) = builder.new_output::<Vec<Credit>>();
        let mut done_output =
            OutputBuilder::<_, CapacityContainerBuilder<Vec<_>>>::from(done_output);
        let mut credits_output =
            OutputBuilder::<_, CapacityContainerBuilder<Vec<_>>>::from(credits_output);
        let mut chunks = builder.new_input(self, by_destination());
        let mut reports = builder.new_input(reports, Pipeline);
        builder.set_notify_for(0, FrontierInterest::Never);
        builder.set_notify_for(1, FrontierInterest::Never);
        let who = Actor::Worker(scope.index());
        let abort = abort.clone();
        let wake = scope.worker().sync_activator_for(builder.operator_info().address.to_vec());
        let mut state = None;
        if let (0, Some(sink)) = (scope.index(), sink) {
            let body = |jobs: &_, replies: &_| run(sink, jobs, replies);
            let (name, phase) = ("checkpoint".to_owned(), Phase::WritingCheckpoint);
            match Companion::start(&abort, name, phase, wake, body) {
                Ok(writer) => {
                    let plan = Arc::clone(plan);
                    state = Some(State { plan, writer, cuts: BTreeMap::new() });
                }
                Err(error) => abort.fail(who.clone(), error),
            }
        } else if scope.index() == 0 && plan.checkpoints != CheckpointCuts::Never {
            abort.fail(who.clone(), GraphError::NoSink);
        }
        builder.build(move |capabilities| {
            drop(capabilities);
            move |_frontiers| {
                let mut turn = |state: &mut State| -> Result<(), Failure> {
                    reports.for_each(|time, reports| {
                        for report in reports.drain(..) {
                            if state.plan.is_cut(report.step, report.last) {
                                let cut = state.cuts.entry(*time.time()).or_default();
                                cut.report = Some(report);
                                cut.done.get_or_insert_with(|| time.retain(0));
                                cut.credits.get_or_insert_with(|| time.retain(1));
                            }
                        }
                    });
                    chunks.for_each(|time, chunk| {
                        let cut = state.cuts.entry(*time.time()).or_default();
                        cut.done.get_or_insert_with(|| time.retain(0));
                        cut.credits.get_or_insert_with(|| time.retain(1));
                        cut.waiting.push(std::mem::take(chunk));
                    });
                    let mut done_output = done_output.activate();
                    let mut credits_output = credits_output.activate();
                    while let Some(reply) = state.writer.poll() {
                        let expected = state.expected();
                        let Some(mut entry) = state.cuts.first_entry() else { break };
                        let cut = entry.get_mut();
                        match (reply, &cut.credits, &cut.done, cut.report) {
                            (WriterReply::Written(credits), Some(held), _, _) => {
                                let mut session = credits_output.session(held);
                                session.give_iterator(credits.into_iter());
                                drop(session);
                                cut.written += 1;
                            }
                            (WriterReply::Committed, _, Some(held), Some(report))
                                if cut.written == expected =>
                            {
                                let step = report.step;
                                done_output.session(held).give(CheckpointDone { step });
                                entry.remove();
                            }
                            _ => return Err(GraphError::Unasked { thread: "the writer" }.into()),
                        }
                    }
                    state.hand_over()
                };
                if let Some(Err(failure)) = state.as_mut().map(&mut turn) {
                    abort.fail(who.clone(), failure);
                    state = None;
                } else if state.is_none() {
                    reports.for_each(|_time, _reports| ());
                    chunks.for_each(|_time, _chunk| ());
                }
            }
        });
        CheckpointStreams { done, state_credits }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::{BatchSettings, MicrobatchMemory};
    use crate::cluster::ExitClass;
    use tidemill_collective::{ChunkHeader, Node};
    use tidemill_model::{Decay, Layout};

    /// One chunk that comes twice and one that is missing are as many as a whole checkpoint has.
    #[test]
    fn a_chunk_that_comes_twice_is_refused() {
        let mut layout = Layout::new();
        for name in ["first", "second"] {
            let segment = layout.segment(name);
            layout.tensor(format!("{name}.weight"), &[16], Decay::Exempt, 1);
            layout.block(name, &[segment]);
        }
        let settings = BatchSettings { samples_per_step: Some(2), ..Default::default() };
        let memory = MicrobatchMemory { sample_bytes: 1, workspace_bytes: 1 };
        let plan = TrainingPlan::new(settings.plan(memory).unwrap(), &layout, 4, 9);
        let state = |part, chunk, step| {
            let node = Node { lo: 0, hi: 2 };
            let part = Part::State(part);
            let header = ChunkHeader { destination: 0, source: 1, part, chunk, node, step };
            Chunk::new(header, vec![1.0; 16])
        };
        let mut cut = Cut::default();
        assert!(cut.admit(&plan, 4, &state(StatePart::ExpAvg, 0, 4)).is_err(), "of another step");
        assert!(cut.admit(&plan, 4, &state(StatePart::ExpAvg, 2, 5)).is_err(), "no such chunk");
        for part in StatePart::ALL {
            for chunk in [1, 0] {
                cut.admit(&plan, 4, &state(part, chunk, 5)).unwrap();
                let failure = cut.admit(&plan, 4, &state(part, chunk, 5)).unwrap_err();
                assert_eq!(failure.exit_class(), ExitClass::Restart);
                let said = failure.cause().to_string();
                assert_eq!(said, format!("step 5: {part:?} of chunk {chunk} came twice"));
            }
        }
        assert_eq!(cut.handed, 6);
    }
}
