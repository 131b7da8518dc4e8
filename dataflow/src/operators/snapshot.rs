//! The state after some updates, copied chunk by chunk while training goes on.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use tidemill_collective::{Chunk, ChunkHeader, Credit, CreditWindow, Part, StatePart, Tree};
use timely::container::CapacityContainerBuilder;
use timely::dataflow::channels::pact::{Exchange, Pipeline};
use timely::dataflow::operators::generic::OutputBuilder;
use timely::dataflow::operators::generic::builder_rc::OperatorBuilder;
use timely::dataflow::operators::{Capability, InputCapability};
use timely::dataflow::{Stream, StreamVec};
use timely::progress::Antichain;
use timely::progress::operate::FrontierInterest;

use super::error::GraphError;
use super::job_thread::JobThread;
use super::keep_first;
use super::optimize::StepReport;
use super::owned::{OptimizerThread, SnapshotReply, Staging, StateJob};
use super::plan::TrainingPlan;
use super::ticket::Ticket;
use crate::cluster::{Actor, Failure};
use crate::state_arenas::StateArenas;

const NO_CUT: GraphError = GraphError::Order { what: "a snapshot", missing: "its cut" };

/// The output streams of [`Snapshot`].
pub struct SnapshotStreams<'scope> {
    /// The state of this worker's part: for `checkpoint`, which brings it to its writers.
    pub state: Stream<'scope, u64, Chunk>,
    /// The buckets whose state was taken: for `optimize`, through a feedback.
    pub taken: StreamVec<'scope, u64, Ticket>,
}

/// Copies state.
pub trait Snapshot<'scope> {
    /// The state of this worker's part after the updates that `plan.is_cut` says.
    ///
    /// # Contract
    /// - Input: the buckets that are updated, this worker's reports, and credit for state, through a feedback.
    /// - Output: at the timestamp of the step, every part of every chunk once, and a ticket for each bucket once it may be updated
    ///   again.
    /// - Memory: where the memory of the host has room, the state is copied there at once, and leaves from there while the next
    ///   steps compute; so a cut delays nothing, unless it comes before the last one is written. Elsewhere each chunk is copied
    ///   when credit allows it, and the next step's update waits. At most `plan.window_bytes` are on their way.
    ///
    /// # Example
    /// ```
    /// # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/chain.rs"));
    /// # fn main() -> Result<(), Failure> {
    /// # static TAKEN: AtomicU64 = AtomicU64::new(0);
    /// # run(|scope, parts| {
    /// # let (updates, evaluation_losses, mut rest) = updated(scope, parts);
    /// # let OptimizeStreams { updated, reports } = updates;
    /// # let credits = rest.state_credits.take().expect("once");
    /// # let present = updated.clone().gather(&rest.thread);
    /// # let (thread, plan) = (&rest.thread, &rest.plan);
    /// // The plan cuts after every second update.
    /// let SnapshotStreams { state, taken } =
    ///     updated.snapshot(reports.clone(), credits, thread, plan);
    /// let taken = taken.inspect(|ticket| {
    ///     println!("bucket {} may be updated again", ticket.bucket);
    ///     TAKEN.fetch_add(1, Ordering::Relaxed);
    /// });
    /// # let sink = (scope.index() == 0).then(|| Box::new(Kept::default()) as Box<dyn StateSink>);
    /// # let CheckpointStreams { state_credits, .. } =
    /// #     state.checkpoint(reports.clone(), sink, thread, plan);
    /// # rest.loops.close(LoopEnds { present, reports, taken, state_credits, evaluation_losses });
    /// # })?;
    /// // One bucket after two of four steps, on both workers.
    /// assert_eq!(TAKEN.load(Ordering::Relaxed), 2 * 2);
    /// # Ok(())
    /// # }
    /// ```
    fn snapshot(
        self,
        reports: StreamVec<'scope, u64, StepReport>,
        credits: StreamVec<'scope, u64, Credit>,
        thread: &OptimizerThread,
        plan: &Arc<TrainingPlan>,
    ) -> SnapshotStreams<'scope>;
}

/// The order of a worker's cuts.
struct SnapshotSchedule {
    plan: Arc<TrainingPlan>,
    staging: Staging,
    /// The places of the optimizer's states.
    arenas: Arc<StateArenas>,
    /// By bucket: the chunks that this worker owns of it.
    owned: Vec<Range<usize>>,
    window: CreditWindow,
    /// For each step that is cut, the number of buckets that are not updated.
    cuts: BTreeMap<u64, usize>,
    /// The cut whose state is updated and not staged, which waits for the snapshots of the last.
    stage_due: Option<u64>,
    /// The step of the cut that is being staged.
    staged: Option<u64>,
    /// Snapshots that were not handed out, and after which of them a bucket is taken.
    snapshots: VecDeque<(usize, StatePart)>,
    taken_after: VecDeque<(usize, Ticket)>,
    handed_out: usize,
    /// Tickets that were not given.
    taken: Vec<Ticket>,
}

impl SnapshotSchedule {
    fn new(
        plan: &Arc<TrainingPlan>,
        staging: Staging,
        arenas: &Arc<StateArenas>,
        owned: &[Range<usize>],
    ) -> Self {
        Self {
            window: CreditWindow::new(plan.window_bytes),
            plan: Arc::clone(plan),
            staging,
            arenas: Arc::clone(arenas),
            owned: owned.to_vec(),
            cuts: BTreeMap::new(),
            stage_due: None,
            staged: None,
            snapshots: VecDeque::new(),
            taken_after: VecDeque::new(),
            handed_out: 0,
            taken: Vec::new(),
        }
    }

    /// Chunk parts of a cut.
    fn parts(&self) -> usize {
        (1 + self.arenas.states()) * self.owned.iter().map(Range::len).sum::<usize>()
    }

    /// Takes a report; answers whether its step is cut.
    fn report(&mut self, report: &StepReport) -> bool {
        let is_cut = self.plan.is_cut(report.step, report.last);
        if is_cut {
            self.cuts.insert(report.step - 1, self.owned.len());
        }
        is_cut
    }

    fn snapshots_of(&mut self, buckets: Range<usize>, step: u64) {
        for bucket in buckets {
            for chunk in self.owned[bucket].clone() {
                self.snapshots.extend(self.arenas.parts().map(|part| (chunk, part)));
            }
            let after = self.handed_out + self.snapshots.len();
            let ticket = Ticket { step, bucket: bucket as u32 };
            match self.staging {
                Staging::InPlace => self.taken_after.push_back((after, ticket)),
                // It was copied.
                Staging::OnHost => self.taken.push(ticket),
            }
        }
    }

    /// This worker's part of a bucket is updated.
    fn updated(&mut self, ticket: Ticket) -> Result<(), Failure> {
        let Ticket { step, bucket } = ticket;
        let bucket = bucket as usize;
        let Some(left) = self.cuts.get_mut(&step) else { return Ok(()) };
        if bucket >= self.owned.len() {
            let (step, what) = (step + 1, format!("the update of bucket {bucket}"));
            return Err(GraphError::Unplanned { step, what }.into());
        }
        *left -= 1;
        let is_last = *left == 0;
        if is_last {
            self.cuts.remove(&step);
        }
        match self.staging {
            Staging::InPlace => self.snapshots_of(bucket..bucket + 1, step),
            Staging::OnHost => self.stage_due = is_last.then_some(step),
        }
        Ok(())
    }

    /// All that this worker owns is on its way to the host.
    fn staged(&mut self) -> Result<(), Failure> {
        let step = self.staged.take().ok_or(NO_CUT)?;
        self.snapshots_of(0..self.owned.len(), step);
        Ok(())
    }

    /// Bytes of a part of a chunk.
    fn part_bytes(&self, chunk: usize, part: StatePart) -> usize {
        let of_chunk = &self.plan.chunks.chunks()[chunk].range;
        size_of::<f32>() * self.arenas.range(part, of_chunk).len()
    }

    /// The next job of the optimizer thread.
    fn next(&mut self) -> Option<StateJob> {
        if let Some(&(chunk, part)) = self.snapshots.front()
            && self.window.take(self.part_bytes(chunk, part))
        {
            self.snapshots.pop_front();
            self.handed_out += 1;
            return Some(StateJob::Snapshot { chunk, part });
        }
        if self.staged.is_some() || !self.snapshots.is_empty() {
            return None;
        }
        self.staged = Some(self.stage_due.take()?);
        Some(StateJob::Stage)
    }

    /// The buckets whose state was taken since: their message comes behind the jobs that were handed out.
    fn taken(&mut self) -> Vec<Ticket> {
        while let Some(&(after, ticket)) = self.taken_after.front()
            && after <= self.handed_out
        {
            self.taken_after.pop_front();
            self.taken.push(ticket);
        }
        std::mem::take(&mut self.taken)
    }
}

/// The capabilities of one cut.
struct Held {
    state: Capability<u64>,
    taken: Capability<u64>,
    /// Chunk parts that have not left, and buckets that were not taken.
    parts: usize,
    buckets: usize,
}

struct State {
    schedule: SnapshotSchedule,
    thread: JobThread<StateJob, SnapshotReply>,
    /// Keyed by step; snapshots are taken of the first step that lacks parts.
    cuts: BTreeMap<u64, Held>,
}

impl State {
    fn report(&mut self, time: &InputCapability<u64>, report: &StepReport) {
        if self.schedule.report(report) {
            let (parts, buckets) = (self.schedule.parts(), self.schedule.owned.len());
            let held = Held { state: time.retain(0), taken: time.retain(1), parts, buckets };
            self.cuts.insert(*time.time(), held);
        }
    }
}

impl<'scope> Snapshot<'scope> for StreamVec<'scope, u64, Ticket> {
    fn snapshot(
        self,
        reports: StreamVec<'scope, u64, StepReport>,
        credits: StreamVec<'scope, u64, Credit>,
        thread: &OptimizerThread,
        plan: &Arc<TrainingPlan>,
    ) -> SnapshotStreams<'scope> {
        let scope = self.scope();
        let worker = scope.index() as u32;
        let mut builder = OperatorBuilder::new("Snapshot".to_owned(), scope);
        let (state_output, state_chunks) = builder.new_output::<Chunk>();
        let (taken_output, taken) = builder.new_output::<Vec<Ticket>>();
        let mut state_output =
            OutputBuilder::<_, CapacityContainerBuilder<Chunk>>::from(state_output);
        let mut taken_output =
            OutputBuilder::<_, CapacityContainerBuilder<Vec<_>>>::from(taken_output);
        let no_path: [(usize, Antichain<u64>); 0] = [];
        let by_worker = Exchange::new(|credit: &Credit| u64::from(credit.to));
        let mut updated = builder.new_input_connection(self, Pipeline, no_path.clone());
        let mut reports = builder.new_input(reports, Pipeline);
        let mut credits = builder.new_input_connection(credits, by_worker, no_path);
        for input in 0..3 {
            builder.set_notify_for(input, FrontierInterest::Never);
        }
        let actor = Actor::Worker(scope.index());
        let abort = thread.abort().clone();
        let wake = scope.worker().sync_activator_for(builder.operator_info().address.to_vec());
        let schedule =
            SnapshotSchedule::new(plan, thread.staging(), thread.arenas(), thread.owned());
        let end = thread.end(wake, StateJob::AnswerSnapshots);
        let mut state = end.map(|thread| State { schedule, thread, cuts: BTreeMap::new() });
        let root = Tree::new(plan.batch.lanes()).map(Tree::root);
        builder.build(move |capabilities| {
            drop(capabilities);
            move |_frontiers| {
                let mut turn = |state: &mut State| -> Result<(), Failure> {
                    let mut result = Ok(());
                    // A step's report is on its way before its updates are.
                    reports.for_each(|time, reports| {
                        reports.drain(..).for_each(|report| state.report(&time, &report));
                    });
                    updated.for_each(|_time, tickets| {
                        let updated = tickets.drain(..).map(|t| state.schedule.updated(t));
                        updated.for_each(|taken| keep_first(&mut result, taken));
                    });
                    credits.for_each(|_time, credits| {
                        credits.drain(..).for_each(|c| state.schedule.window.give_back(c.bytes));
                    });
                    result?;
                    let mut state_output = state_output.activate();
                    let mut taken_output = taken_output.activate();
                    while let Some(reply) = state.thread.poll() {
                        let (chunk, part, values) = match reply {
                            SnapshotReply::Staged => {
                                state.schedule.staged()?;
                                continue;
                            }
                            SnapshotReply::Values { chunk, part, values } => (chunk, part, values),
                        };
                        let mut of_cuts = state.cuts.values_mut();
                        let held = of_cuts.find(|held| held.parts > 0).ok_or(NO_CUT)?;
                        let header = ChunkHeader {
                            destination: 0,
                            source: worker,
                            part: Part::State(part),
                            chunk: chunk as u32,
                            node: root.clone()?,
                            step: *held.state.time() + 1,
                        };
                        let mut session = state_output.session(&held.state);
                        session.give_container(&mut Chunk::new(header, values));
                        held.parts -= 1;
                    }
                    while let Some(job) = state.schedule.next() {
                        state.thread.send(job);
                    }
                    for ticket in state.schedule.taken() {
                        let held = state.cuts.get_mut(&ticket.step).ok_or(NO_CUT)?;
                        taken_output.session(&held.taken).give(ticket);
                        held.buckets -= 1;
                    }
                    state.cuts.retain(|_, held| held.parts + held.buckets > 0);
                    Ok(())
                };
                if let Some(Err(failure)) = state.as_mut().map(&mut turn) {
                    abort.fail(actor.clone(), failure);
                    state = None;
                }
            }
        });
        SnapshotStreams { state: state_chunks, taken }
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU64;

    use tidemill_model::optimizer::StateSpec;
    use tidemill_model::{Decay, Layout};

    use super::*;
    use crate::batch::{BatchSettings, MicrobatchMemory};
    use crate::operators::plan::CheckpointCuts;

    /// Bytes of a chunk.
    const CHUNK: usize = 64;

    /// A worker that owns two chunks of the first bucket and one of the third; every second step is cut. Three parts leave at a
    /// time.
    fn schedule(staging: Staging) -> SnapshotSchedule {
        let mut layout = Layout::new();
        let segment = layout.segment("only");
        layout.tensor("weight", &[6 * CHUNK / 4], Decay::Exempt, 1);
        layout.block("only", &[segment]);
        let settings = BatchSettings { samples_per_step: Some(1), ..Default::default() };
        let memory = MicrobatchMemory { sample_bytes: 1, workspace_bytes: 1 };
        let plan = TrainingPlan::new(settings.plan(memory).unwrap(), &layout, 4, 9);
        let mut plan = plan.with_cuts(&layout, CHUNK / 4, 1);
        plan.checkpoints = CheckpointCuts::Every(NonZeroU64::new(2).unwrap());
        plan.window_bytes = 3 * CHUNK;
        let states = ["exp_avg", "exp_avg_sq"].map(StateSpec::of_elements);
        let arenas = Arc::new(StateArenas::new(&layout, &states));
        SnapshotSchedule::new(&Arc::new(plan), staging, &arenas, &[0..2, 3..3, 4..5])
    }

    fn report(step: u64) -> StepReport {
        let (loss, grad_norm, learning_rate) = (0.0, 0.0, 0.0);
        let (tokens, total_tokens, last) = (1, 1, false);
        StepReport { step, loss, grad_norm, learning_rate, tokens, total_tokens, last }
    }

    fn ticket(step: u64, bucket: u32) -> Ticket {
        Ticket { step, bucket }
    }

    /// The chunks of the snapshots that are due now.
    fn due(schedule: &mut SnapshotSchedule) -> Vec<usize> {
        let chunk = |job| match job {
            StateJob::Snapshot { chunk, .. } => chunk,
            _ => panic!("only snapshots are due"),
        };
        std::iter::from_fn(|| schedule.next().map(chunk)).collect()
    }

    #[test]
    fn state_that_stays_where_it_is_is_taken_when_its_snapshots_were_handed_out() {
        let mut schedule = schedule(Staging::InPlace);
        assert!(!schedule.report(&report(1)));
        schedule.updated(ticket(0, 2)).unwrap();
        assert!(schedule.next().is_none() && schedule.taken().is_empty(), "no cut");
        assert!(schedule.report(&report(2)));
        assert_eq!(schedule.parts(), 9);
        for bucket in [2, 1, 0] {
            schedule.updated(ticket(1, bucket)).unwrap();
        }
        assert!(schedule.taken().is_empty(), "nothing was handed out");
        assert_eq!(due(&mut schedule), [4, 4, 4]);
        assert_eq!(schedule.taken(), [ticket(1, 2), ticket(1, 1)]);
        assert!(schedule.next().is_none(), "no credit");
        schedule.window.give_back(2 * CHUNK as u64);
        assert_eq!(due(&mut schedule), [0, 0]);
        schedule.window.give_back(3 * CHUNK as u64);
        assert_eq!(due(&mut schedule), [0, 1, 1]);
        assert!(schedule.taken().is_empty());
        schedule.window.give_back(3 * CHUNK as u64);
        assert_eq!(due(&mut schedule), [1]);
        assert_eq!(schedule.taken(), [ticket(1, 0)]);
    }

    /// Also where the report of the next comes first, and the last is still written.
    #[test]
    fn state_that_is_copied_is_taken_at_once_and_a_copy_waits_for_the_last() {
        let mut schedule = schedule(Staging::OnHost);
        schedule.report(&report(2));
        for bucket in [2, 1, 0] {
            assert!(schedule.next().is_none(), "not all is updated");
            schedule.updated(ticket(1, bucket)).unwrap();
        }
        assert!(matches!(schedule.next(), Some(StateJob::Stage)));
        assert!(schedule.next().is_none() && schedule.taken().is_empty());
        schedule.staged().unwrap();
        assert!(schedule.staged().is_err(), "nothing is being staged");
        assert_eq!(schedule.taken(), [0, 1, 2].map(|bucket| ticket(1, bucket)));
        assert_eq!(due(&mut schedule), [0, 0, 0]);
        schedule.report(&report(4));
        (0..3).for_each(|bucket| schedule.updated(ticket(3, bucket)).unwrap());
        schedule.report(&report(6));
        assert!(schedule.next().is_none(), "the last is still written");
        schedule.window.give_back(3 * CHUNK as u64);
        assert_eq!(due(&mut schedule), [1, 1, 1]);
        schedule.window.give_back(3 * CHUNK as u64);
        for _ in 0..3 {
            assert!(matches!(schedule.next(), Some(StateJob::Snapshot { chunk: 4, .. })));
        }
        assert!(matches!(schedule.next(), Some(StateJob::Stage)));
        schedule.staged().unwrap();
        assert_eq!(schedule.taken(), [0, 1, 2].map(|bucket| ticket(3, bucket)));
    }

    #[test]
    fn an_update_of_no_bucket_is_refused() {
        let mut schedule = schedule(Staging::InPlace);
        schedule.report(&report(2));
        assert!(schedule.updated(ticket(1, 3)).is_err());
        assert!(schedule.updated(ticket(9, 3)).is_ok(), "of no cut");
    }
}
