//! The state of a step, gathered on the workers that write it and handed to a writer on each. Here workers are counted as those that
//! [train](TrainingPlan::trainers) are: worker 0 is the first of them.
//!
//! Worker 0 writes all of it, or shares the work with other workers: it begins a checkpoint, tells them, and completes it once
//! each of them has reported that its part is done.

mod cut;
mod newest;
mod sink;
mod writers;

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tidemill_collective::{Chunk, CollectiveError, Credit};
use timely::container::CapacityContainerBuilder;
use timely::dataflow::channels::pact::Pipeline;
use timely::dataflow::operators::generic::OutputBuilder;
use timely::dataflow::operators::generic::builder_rc::OperatorBuilder;
use timely::dataflow::operators::{ConnectLoop, Feedback};
use timely::dataflow::{Stream, StreamVec};
use timely::progress::Antichain;
use timely::progress::operate::FrontierInterest;

pub use self::newest::NewestParameters;
pub use self::sink::{StateSink, WrittenFiles};
pub use self::writers::StateWriters;

use self::cut::{Cut, Held, Stage};
use self::sink::{WriterJob, WriterReply};

use super::addressed::Addressed;
use super::error::GraphError;
use super::job_thread::JobThread;
use super::keep_first;
use super::optimize::StepReport;
use super::owned::OptimizerThread;
use super::plan::{CheckpointCuts, TrainingPlan};
use super::trainers::Place;
use crate::cluster::progress::Phase;
use crate::cluster::{Actor, Failure};
use crate::state_arenas::StateArenas;

/// A checkpoint is complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckpointDone {
    /// Updates done in it.
    pub step: u64,
}

/// The output streams of [`Checkpoint`].
pub struct CheckpointStreams<'scope> {
    /// On the first worker that trains: every checkpoint that is complete.
    pub done: StreamVec<'scope, u64, CheckpointDone>,
    /// Credit for the state that was written: for `optimize`, through a feedback.
    pub state_credits: StreamVec<'scope, u64, Credit>,
}

/// Writes checkpoints.
pub trait Checkpoint<'scope> {
    /// Hands the state of every cut to `sink`.
    ///
    /// # Contract
    /// - Input: state chunks, which are exchanged here to the workers that [`StateSink::writers`] says, whichever they are
    ///   addressed to, and the reports of this worker. `sink` is `Some` on the first worker that [trains](TrainingPlan::trainers), worker 0
    ///   here, and on every one where any other writes.
    /// - Output: [`CheckpointDone`] at the timestamp of the step, after `commit`; the dataflow is not complete before.
    /// - Memory: chunks wait here for the writer thread, and credit comes back when it has written them: of each worker at most
    ///   `plan.window_bytes`.
    /// - Failure: an error of `sink` aborts the run.
    ///
    /// # Example
    /// ```
    /// # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/chain.rs"));
    /// # fn main() -> Result<(), Failure> {
    /// # static SLOPES: Mutex<Vec<f32>> = Mutex::new(Vec::new());
    /// # run(|scope, parts| {
    /// # let (updates, evaluation_losses, mut rest) = updated(scope, parts);
    /// # let OptimizeStreams { updated, reports } = updates;
    /// # let credits = rest.state_credits.take().expect("once");
    /// # let present = updated.clone().gather(&rest.thread);
    /// # let (thread, plan) = (&rest.thread, &rest.plan);
    /// # let SnapshotStreams { state, taken } =
    /// #     updated.snapshot(reports.clone(), credits, thread, plan);
    /// // `Kept` is a `StateSink`: it keeps a parameter of every checkpoint.
    /// let kept = Kept::default();
    /// let slopes = Arc::clone(&kept.slopes);
    /// let sink = (scope.index() == 0).then(|| Box::new(kept) as Box<dyn StateSink>);
    /// let CheckpointStreams { done, state_credits } =
    ///     state.checkpoint(reports.clone(), sink, thread, plan);
    /// done.inspect(move |done| {
    ///     println!("the checkpoint after {} updates is complete", done.step);
    ///     *SLOPES.lock().expect("no panic") = slopes.lock().expect("no panic").clone();
    /// });
    /// # rest.loops.close(LoopEnds { present, reports, taken, state_credits, evaluation_losses });
    /// # })?;
    /// // After two of four steps. The points are those of a slope of 3.
    /// let slopes = SLOPES.lock().expect("no panic");
    /// assert!(slopes.len() == 2 && slopes[0] < slopes[1]);
    /// # Ok(())
    /// # }
    /// ```
    fn checkpoint(
        self,
        reports: StreamVec<'scope, u64, StepReport>,
        sink: Option<Box<dyn StateSink>>,
        thread: &OptimizerThread,
        plan: &Arc<TrainingPlan>,
    ) -> CheckpointStreams<'scope>;
}

/// A message between writers.
#[derive(Clone, Debug, Serialize, Deserialize)]
enum WriterMessage {
    /// Worker 0 has begun: others may.
    Begun,
    /// Another writer has finished.
    Finished(WrittenFiles),
}

/// A message about a cut.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct CutMessage {
    /// The timestamp of the cut.
    time: u64,
    message: WriterMessage,
}

struct State {
    plan: Arc<TrainingPlan>,
    worker: usize,
    place: Place,
    /// The places of the optimizer's states.
    arenas: Arc<StateArenas>,
    writers: StateWriters,
    /// On worker 0: the other writers.
    others: Vec<usize>,
    /// Chunks that this worker writes of a checkpoint.
    expected: usize,
    writer: JobThread<WriterJob, WriterReply>,
    /// Keyed by timestamp; the first is being written.
    cuts: BTreeMap<u64, Cut>,
}

impl State {
    fn new(
        writer: JobThread<WriterJob, WriterReply>,
        plan: &Arc<TrainingPlan>,
        (worker, place): (usize, Place),
        arenas: Arc<StateArenas>,
        writers: StateWriters,
    ) -> Self {
        let others = if worker == 0 { writers.others().into_iter().collect() } else { Vec::new() };
        let expected = writers.expected(worker, arenas.states(), plan.chunks.chunks().len());
        let (plan, cuts) = (Arc::clone(plan), BTreeMap::new());
        Self { plan, worker, place, arenas, writers, others, expected, writer, cuts }
    }

    /// Takes another writer's message.
    fn hear(&mut self, CutMessage { time, message }: CutMessage) -> Result<(), Failure> {
        let cut = self.cuts.entry(time).or_default();
        match (message, cut.stage) {
            (WriterMessage::Begun, Stage::Waiting) if self.worker > 0 => cut.stage = Stage::Allowed,
            (WriterMessage::Finished(written), _) if cut.finished.len() < self.others.len() => {
                cut.finished.push(written);
            }
            (message, _) => {
                let what = format!("{message:?} of a checkpoint");
                return Err(GraphError::Unplanned { step: time + 1, what }.into());
            }
        }
        Ok(())
    }

    /// Takes the writer's answers: sends messages for others to them, and `emit`s messages for the rest of the graph.
    fn answered(
        &mut self,
        reply: WriterReply,
        emit: &mut impl FnMut(&Held, Emitted),
    ) -> Result<(), Failure> {
        const UNASKED: GraphError = GraphError::Unasked { thread: "the writer" };
        let mut entry = self.cuts.first_entry().ok_or(UNASKED)?;
        let time = *entry.key();
        let is_written = entry.get().written == self.expected;
        let cut = entry.get_mut();
        let held = cut.held.as_ref().ok_or(UNASKED)?;
        let place = &self.place;
        let tell = |to, message| {
            Emitted::Message(Addressed::new(place.worker(to), CutMessage { time, message }))
        };
        match reply {
            WriterReply::Begun => {
                self.others.iter().for_each(|&other| emit(held, tell(other, WriterMessage::Begun)));
            }
            WriterReply::Written(credits) => {
                emit(held, Emitted::Credits(credits));
                cut.written += 1;
            }
            WriterReply::Finished(written) if is_written => {
                emit(held, tell(0, WriterMessage::Finished(written)));
                entry.remove();
            }
            WriterReply::Committed if is_written => {
                emit(held, Emitted::Done(CheckpointDone { step: time + 1 }));
                entry.remove();
            }
            WriterReply::Finished(_) | WriterReply::Committed => return Err(UNASKED.into()),
        }
        Ok(())
    }

    /// Hands the arrived chunks of the oldest cut to the writer.
    fn hand_over(&mut self) -> Result<(), Failure> {
        let Some(mut entry) = self.cuts.first_entry() else { return Ok(()) };
        let step = *entry.key();
        let cut = entry.get_mut();
        let Some(report) = cut.report else { return Ok(()) };
        match cut.stage {
            Stage::Waiting if self.worker > 0 => return Ok(()),
            Stage::Waiting | Stage::Allowed => {
                self.writer.send(WriterJob::Begin(report));
                cut.stage = Stage::Open;
            }
            Stage::Open | Stage::Ending => {}
        }
        for chunk in std::mem::take(&mut cut.waiting) {
            let here = (self.worker, &self.writers);
            let (part, arena_start) = cut.admit(&self.plan, here, &self.arenas, step, &chunk)?;
            self.writer.send(WriterJob::Write { part, arena_start, chunk });
        }
        let is_whole = cut.handed == self.expected && cut.finished.len() == self.others.len();
        if is_whole && cut.stage == Stage::Open {
            cut.stage = Stage::Ending;
            if self.worker > 0 {
                self.writer.send(WriterJob::Finish);
                return Ok(());
            }
            for written in std::mem::take(&mut cut.finished) {
                self.writer.send(WriterJob::Take(written));
            }
            self.writer.send(WriterJob::Commit);
        }
        Ok(())
    }
}

/// An output of the operator.
enum Emitted {
    Done(CheckpointDone),
    Credits(Vec<Credit>),
    Message(Addressed<CutMessage>),
}

impl<'scope> Checkpoint<'scope> for Stream<'scope, u64, Chunk> {
    fn checkpoint(
        self,
        reports: StreamVec<'scope, u64, StepReport>,
        sink: Option<Box<dyn StateSink>>,
        thread: &OptimizerThread,
        plan: &Arc<TrainingPlan>,
    ) -> CheckpointStreams<'scope> {
        let scope = self.scope();
        let (message_loop, all_messages) = scope.feedback::<Vec<Addressed<CutMessage>>>(1);
        let mut builder = OperatorBuilder::new("Checkpoint".to_owned(), scope);
        let (done_output, done) = builder.new_output::<Vec<CheckpointDone>>();
        let (credits_output, state_credits) = builder.new_output::<Vec<Credit>>();
        let (messages_output, messages) = builder.new_output::<Vec<Addressed<CutMessage>>>();
        let mut done_output =
            OutputBuilder::<_, CapacityContainerBuilder<Vec<_>>>::from(done_output);
        let mut credits_output =
            OutputBuilder::<_, CapacityContainerBuilder<Vec<_>>>::from(credits_output);
        let mut messages_output =
            OutputBuilder::<_, CapacityContainerBuilder<Vec<_>>>::from(messages_output);
        let writers = sink.as_ref().map(|sink| sink.writers()).unwrap_or_default();
        let place = thread.place().clone();
        let rank = place.rank();
        let no_path: [(usize, Antichain<u64>); 0] = [];
        let mut chunks = builder.new_input(self, writers.pact(place.clone()));
        let route = writers.clone();
        let mut reports = builder.new_input(reports, Pipeline);
        let by_destination = Addressed::by_destination();
        let mut all_messages = builder.new_input_connection(all_messages, by_destination, no_path);
        for input in 0..3 {
            builder.set_notify_for(input, FrontierInterest::Never);
        }
        let actor = Actor::Worker(scope.index());
        let (abort, arenas) = (thread.abort().clone(), Arc::clone(thread.arenas()));
        let wake = scope.worker().sync_activator_for(builder.operator_info().address.to_vec());
        let mut state = None;
        match (sink, rank) {
            (Some(sink), Some(worker)) if worker == 0 || writers.others().contains(&worker) => {
                let body = |jobs: &_, replies: &_| sink::run(sink, jobs, replies);
                let (name, phase) = ("checkpoint".to_owned(), Phase::WritingCheckpoint);
                match JobThread::start(&abort, name, phase, wake, body) {
                    Ok(writer) => {
                        state = Some(State::new(writer, plan, (worker, place), arenas, writers));
                    }
                    Err(error) => abort.fail(actor.clone(), error),
                }
            }
            (None, Some(0)) if plan.checkpoints != CheckpointCuts::Never => {
                abort.fail(actor.clone(), GraphError::NoSink);
            }
            _ => {}
        }
        let is_writer = state.is_some();
        let worker = rank.unwrap_or(scope.index());
        builder.build(move |capabilities| {
            drop(capabilities);
            move |_frontiers| {
                let mut turn = |state: &mut State| -> Result<(), Failure> {
                    reports.for_each(|time, reports| {
                        for report in reports.drain(..) {
                            if state.plan.is_cut(report.step, report.last) {
                                let cut = state.cuts.entry(*time.time()).or_default();
                                cut.report = Some(report);
                                cut.hold(&time);
                            }
                        }
                    });
                    chunks.for_each(|time, chunk| {
                        let cut = state.cuts.entry(*time.time()).or_default();
                        cut.hold(&time);
                        cut.waiting.push(std::mem::take(chunk));
                    });
                    let mut heard = Ok(());
                    all_messages.for_each(|_time, messages| {
                        let messages = messages.drain(..).map(Addressed::into_record);
                        messages.for_each(|message| keep_first(&mut heard, state.hear(message)));
                    });
                    heard?;
                    let mut done_output = done_output.activate();
                    let mut credits_output = credits_output.activate();
                    let mut messages_output = messages_output.activate();
                    let mut emit = |held: &Held, emitted| match emitted {
                        Emitted::Done(done) => done_output.session(&held.done).give(done),
                        Emitted::Credits(credits) => {
                            let mut session = credits_output.session(&held.credits);
                            session.give_iterator(credits.into_iter());
                        }
                        Emitted::Message(it) => messages_output.session(&held.messages).give(it),
                    };
                    while let Some(reply) = state.writer.poll() {
                        state.answered(reply, &mut emit)?;
                    }
                    state.hand_over()
                };
                if let Some(Err(failure)) = state.as_mut().map(&mut turn) {
                    abort.fail(actor.clone(), failure);
                    state = None;
                } else if state.is_none() {
                    reports.for_each(|_time, _reports| ());
                    chunks.for_each(|_time, chunk| {
                        // A chunk that comes where nothing is written would be missing elsewhere, and waited for.
                        if !is_writer {
                            let destination = chunk.header().map_or(0, |it| route.of(it));
                            abort.fail(
                                actor.clone(),
                                CollectiveError::Misrouted { destination, worker },
                            );
                        }
                    });
                    all_messages.for_each(|_time, _messages| ());
                }
            }
        });
        messages.connect_loop(message_loop);
        CheckpointStreams { done, state_credits }
    }
}
