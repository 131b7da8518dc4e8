//! The optimizer thread: the state of a worker's part, and the work on it.
//!
//! It has a device stream of its own, beside the one that computes: sums of gradients are formed there while the rest of the
//! backward pass still runs. Its jobs are about whole buckets; it computes element by element, or chunk
//! by chunk, so that how chunks are put together, and which worker owns them, changes no bit.

use std::sync::Arc;

use tidemill_collective::communicator::{Key, Values, ValuesMut};
use tidemill_collective::{StatePart, Tree};
use tidemill_kernels::backend::KernelGroup;
use tidemill_kernels::{Backend, Slice, SliceMut};
use tidemill_model::optimizer::{UpdateUnit, UpdateViews, check_states, update_terms};
use tidemill_model::{Device, JoinRoom, MasterPlace, Parameters};

use super::communication::CommunicationLedger;
use super::parts::{Gathered, OwnedBucket, UpdateRun, owned_buckets, told, told_mut, update_runs};
use super::staging::Staged;
use super::states::OwnedStates;
use super::sums::{OwnedSums, RoundPart};
use super::{Optimizer, SnapshotReply, Staging, StateJob, UpdateReply};
use crate::cluster::Failure;
use crate::cluster::progress::{self, Phase};
use crate::operators::error::GraphError;
use crate::operators::job_thread::{Jobs, Replies, Stopped};
use crate::operators::lending::{Lender, TakenBack};
use crate::operators::optimize::ScheduledRule;
use crate::operators::plan::TrainingPlan;
use crate::operators::queue_trace::QueueTrace;
use crate::operators::ticket::{Ready, Ticket};
use crate::state_arenas::StateArenas;

const NO_SUMS: GraphError =
    GraphError::Order { what: "the mean of gradients", missing: "their sums" };
const NO_STATE: GraphError =
    GraphError::Order { what: "a snapshot", missing: "such a state of the update rule" };
const LENT: GraphError = GraphError::Order { what: "an update", missing: "the end of the step" };

/// The gradients of all uses over all lanes.
enum Sums<B: Backend> {
    /// All sums, of a worker that trains alone, while it has them.
    Alone(Option<B::Buffer<f32>>),
    /// A worker's part of the sums, of several workers.
    Owned(OwnedSums<B>),
}

/// The state of a worker's part.
pub(super) struct OwnedState<B: Backend> {
    backend: Arc<B>,
    stream: B::DeviceStream,
    /// A stream for copies to the host, which waits for no sums there.
    snapshots: B::DeviceStream,
    rule: ScheduledRule<B>,
    plan: Arc<TrainingPlan>,
    tree: Tree,
    /// Rounds of a step's lanes.
    rounds: u32,
    lender: Lender<B>,
    answers: Answers,
    communication: CommunicationLedger<B>,
    /// The runs that the rule updates in one call each, in the order of the arena.
    runs: Vec<UpdateRun>,
    buckets: Vec<OwnedBucket>,
    /// All parameters, or where the workers of a process hold them together this one's; lent for a step, and changed only when they were
    /// given back.
    parameters: Arc<Parameters<B>>,
    is_lent: bool,
    sums: Sums<B>,
    /// The sums of squares of the chunks whose means were formed in this step, and which these are.
    squares: B::Buffer<f64>,
    squared: Vec<usize>,
    /// Buckets of the step whose means were formed.
    means: usize,
    /// Elements that are owned, and the states of them that the update rule names.
    owned: usize,
    states: OwnedStates<B>,
    room: JoinRoom<B>,
    /// Buckets of the step that were gathered.
    gathered: usize,
    /// Where cuts are copied to, from the first step on.
    staged: Staged<B>,
    /// An event after the copy of a cut.
    copied: Option<B::Event>,
    trace: QueueTrace<B>,
}

impl<B: Backend> OwnedState<B> {
    /// Puts the state on the device and runs jobs until the operators are gone.
    pub(super) fn serve(
        (parts, arenas): (Optimizer<'_, B>, &Arc<StateArenas>),
        plan: Arc<TrainingPlan>,
        staging: Staging,
        place: (usize, usize),
        jobs: &Jobs<StateJob>,
    ) -> Result<(), Failure> {
        let mut state = Self::new(parts, arenas, plan, place)?;
        let begun = state.lend();
        // It takes long for much of it: while the first step computes.
        let states = state.states.elements();
        state.staged = Staged::prepare(&*state.backend, staging, state.owned, &states);
        let ended = begun.and_then(|()| state.run(jobs));
        let ended = ended.and_then(|()| Ok(state.trace.finish(&*state.backend)?));
        if let (Err(Stopped::Failed(_)), Some(communicator)) = (&ended, &state.lender.communicator)
        {
            // Work on the device that waits for others would not end before they are aborted.
            communicator.abort_handle()();
        }
        // Memory that other workers have posted is read until then, and given back afterwards. A device that fails has said so.
        let _ = state.backend.record(&mut state.stream).and_then(|end| state.backend.wait(&end));
        ended.or_else(Stopped::into_result)
    }

    fn new(
        parts: Optimizer<'_, B>,
        arenas: &Arc<StateArenas>,
        plan: Arc<TrainingPlan>,
        (worker, workers): (usize, usize),
    ) -> Result<Self, Failure> {
        progress::enter(Phase::PreparingDevice, 0);
        let Optimizer { backend, layout, state, lender, rule } = parts;
        let unit = rule.rule.unit();
        check_states(rule.rule.states(), unit)?;
        let runs = update_runs(layout, &update_terms(&rule.groups, layout)?, unit);
        let lanes = plan.batch.lane_schedule(workers)?;
        let mut kernels = vec![KernelGroup::Optimizer, KernelGroup::GradientSums];
        kernels.extend(lender.communicator.as_ref().map(|_| KernelGroup::TreeSum));
        backend.prepare(&kernels)?;
        let mut stream = backend.device_stream()?;
        let snapshots = backend.device_stream()?;
        let mut device = Device { backend: &*backend, stream: &mut stream };
        let holders = lender.holders();
        let held = plan.held::<B>(layout, holders, (worker, workers));
        let (buckets, owned) = owned_buckets(&plan, (worker, workers), holders, &held);
        let is_cut = |run: &UpdateRun| buckets.iter().any(|it| run.is_cut_by(&it.part.range));
        // A plan of elements may cut none among these workers, and would among others.
        if unit == UpdateUnit::Tensor && (plan.unit != unit || runs.iter().any(is_cut)) {
            return Err(GraphError::TensorsAreCut.into());
        }
        let masters: Vec<_> = buckets.iter().map(|bucket| bucket.part.place()).collect();
        let parameters =
            Parameters::with_masters(&mut device, layout, held, &state.parameters, &masters)?;
        progress::moved();
        let sums = match lender.communicator {
            Some(_) => Sums::Owned(OwnedSums::new(buckets.len())),
            None => Sums::Alone(None),
        };
        let device = (&*backend, &mut stream);
        let states = OwnedStates::new(device, arenas, &buckets, state.states.as_deref())?;
        let chunks = buckets.iter().map(|bucket| bucket.part.chunks.len()).sum();
        let squares = backend.allocate(&mut stream, chunks)?;
        let trace = QueueTrace::new(&*backend, &mut stream, "device queue")?;
        Ok(Self {
            backend,
            stream,
            snapshots,
            rule,
            tree: lanes.tree(),
            rounds: lanes.rounds() as u32,
            plan,
            lender,
            answers: Answers::default(),
            communication: CommunicationLedger::new(),
            runs,
            buckets,
            parameters: Arc::new(parameters),
            is_lent: false,
            sums,
            squares,
            squared: Vec::new(),
            means: 0,
            owned,
            states,
            room: JoinRoom::default(),
            gathered: 0,
            staged: Staged::Nothing,
            copied: None,
            trace,
        })
    }

    fn run(&mut self, jobs: &Jobs<StateJob>) -> Result<(), Stopped> {
        let mut waiting = None;
        while let Some(job) = waiting.take().or_else(|| jobs.next()) {
            progress::moved();
            match job {
                StateJob::AnswerSums(replies) => self.answers.sums = Some(replies),
                StateJob::AnswerUpdates(replies) => self.answers.updates = Some(replies),
                StateJob::AnswerGathers(replies) => self.answers.gathers = Some(replies),
                StateJob::AnswerSnapshots(replies) => self.answers.snapshots = Some(replies),
                StateJob::AnswerMeasures(replies) => self.communication.answer_to(replies),
                StateJob::Sum(ready) => {
                    let mut together = vec![ready];
                    waiting = jobs.waiting();
                    while let Some(&StateJob::Sum(ready)) = waiting.as_ref()
                        && self.can_join(ready)?
                    {
                        together.push(ready);
                        waiting = jobs.waiting();
                    }
                    self.sum(&together)?;
                    let is_last = |ready: &&Ready| ready.round + 1 == self.rounds;
                    for Ready { ticket, .. } in together.iter().filter(is_last) {
                        answer(&self.answers.sums, *ticket)?;
                    }
                }
                StateJob::Mean { bucket, tokens } => {
                    if let Some(squares) = self.mean(bucket, tokens)? {
                        answer(&self.answers.updates, UpdateReply::Squares(squares))?;
                    }
                }
                StateJob::Update { bucket, update, coefficient } => {
                    self.update(bucket, update, coefficient)?;
                    answer(&self.answers.updates, UpdateReply::Updated { bucket })?;
                }
                StateJob::Gather(ticket) => {
                    self.gather(ticket)?;
                    answer(&self.answers.gathers, ticket)?;
                }
                StateJob::Measure(ticket) => {
                    let _waiting = progress::during(Phase::WaitingForDevice);
                    self.communication.measure(&*self.backend, ticket)?;
                }
                StateJob::Stage => {
                    self.stage()?;
                    answer(&self.answers.snapshots, SnapshotReply::Staged)?;
                }
                StateJob::Snapshot { chunk, part } => {
                    let values = self.snapshot(chunk, part)?;
                    let values = SnapshotReply::Values { chunk, part, values };
                    answer(&self.answers.snapshots, values)?;
                }
            }
        }
        Ok(())
    }

    fn lend(&mut self) -> Result<(), Stopped> {
        let sums = match &mut self.sums {
            Sums::Owned(_) => None,
            Sums::Alone(sums) => sums.take(),
        };
        self.lender.lend(&self.backend, &mut self.stream, &self.parameters, sums)?;
        self.is_lent = true;
        Ok(())
    }

    fn take_back(&mut self) -> Result<(), Stopped> {
        if !self.is_lent {
            return Ok(());
        }
        let TakenBack { sums, own } = {
            let _waiting = progress::during(Phase::WaitingForDevice);
            self.lender.take_back(&self.backend, &mut self.stream)?
        };
        self.is_lent = false;
        if let Some((communicator, own)) = self.lender.communicator.as_mut().zip(own) {
            let trace = (&*self.backend, &mut self.trace);
            self.communication.close(trace, &mut **communicator, own)?;
        }
        if let Sums::Alone(held) = &mut self.sums {
            *held = sums;
        }
        Ok(())
    }

    /// Whether ready buckets may be summed together with those before them: then every worker has posted them.
    fn can_join(&mut self, ready: Ready) -> Result<bool, Stopped> {
        match &mut self.lender.communicator {
            // Sums of one round use the same room one after the other.
            Some(communicator) if self.rounds == 1 => {
                communicator.can_join(ready.key()).map_err(Stopped::of)
            }
            _ => Ok(false),
        }
    }

    /// Sums the buckets that are ready.
    fn sum(&mut self, together: &[Ready]) -> Result<(), Stopped> {
        let (Some(communicator), Sums::Owned(sums)) =
            (&mut self.lender.communicator, &mut self.sums)
        else {
            return Ok(());
        };
        let bucket = |ready: &Ready| {
            let OwnedBucket { part, slots, cut, .. } = &self.buckets[ready.ticket.bucket as usize];
            RoundPart { key: ready.key(), cut, elements: slots.len() * part.range.len() }
        };
        let together: Vec<_> = together.iter().map(bucket).collect();
        let _waiting = progress::during(Phase::WaitingForSums);
        let device = (&*self.backend, &mut self.stream);
        sums.sum_each(&mut **communicator, device, &together).map_err(Stopped::of)
    }

    /// The mean gradient of the owned part of `bucket`, in the place of the sums of its first use. With the last of a step answers the
    /// sums of squares of all by chunk: asking the device for numbers takes longer than computing them.
    fn mean(&mut self, bucket: usize, tokens: u64) -> Result<Option<Vec<(usize, f64)>>, Stopped> {
        if self.lender.communicator.is_none() {
            self.take_back()?;
        }
        let OwnedBucket { part, slots, .. } = &self.buckets[bucket];
        let elements = part.range.len();
        if elements > 0 {
            let (sums, starts) = match &mut self.sums {
                Sums::Alone(sums) => (sums.as_mut(), slots.clone()),
                Sums::Owned(sums) => {
                    let starts = (0..slots.len()).map(|index| index * elements).collect();
                    (sums.whole_mut(bucket, self.tree), starts)
                }
            };
            let (Some(sums), Some((&first, others))) = (sums, starts.split_first()) else {
                return Err(NO_SUMS.into());
            };
            let ends = part.chunks.clone().scan(0, |end, chunk| {
                *end += self.plan.chunks.chunks()[chunk].range.len();
                Some(*end)
            });
            let ends: Vec<usize> = ends.collect();
            let out = SliceMut::new(&mut self.squares, self.squared.len(), ends.len())?;
            let (backend, stream) = (&*self.backend, &mut self.stream);
            let begun = self.trace.begin(backend, stream)?;
            let all = SliceMut::all(sums);
            backend.mean_gradient(stream, all, first, others, elements, tokens as f32)?;
            backend.sums_of_squares(stream, out, Slice::new(sums, first, elements)?, &ends)?;
            self.trace.end(backend, stream, "mean gradients", begun)?;
            self.squared.extend(part.chunks.clone());
        }
        self.means += 1;
        if self.means < self.buckets.len() {
            return Ok(None);
        }
        self.means = 0;
        let _waiting = progress::during(Phase::WaitingForDevice);
        let squares = Slice::new(&self.squares, 0, self.squared.len())?;
        let squares = self.backend.to_vec(&mut self.stream, squares)?;
        self.trace.synchronize(&*self.backend, &mut self.stream)?;
        Ok(Some(self.squared.drain(..).zip(squares).collect()))
    }

    /// Updates the owned part of `bucket`, and tells the other workers.
    fn update(&mut self, bucket: usize, update: u64, coefficient: f32) -> Result<(), Stopped> {
        self.take_back()?;
        if let Some(copied) = self.copied.take() {
            self.backend.wait_for(&mut self.stream, &copied)?;
        }
        let begun = self.trace.begin(&*self.backend, &mut self.stream)?;
        let Self { backend, stream, snapshots, rule, lender, runs, sums, states, .. } = self;
        let OwnedBucket { part, slots, gathered, beside, .. } = &self.buckets[bucket];
        let range = &part.range;
        let parameters = Arc::get_mut(&mut self.parameters).ok_or(LENT)?;
        let runs = runs.iter().filter(|run| !run.terms.is_frozen());
        let runs = runs.filter_map(|run| run.within(range));
        if !range.is_empty() {
            let (mean, at) = match sums {
                Sums::Alone(sums) => (sums.as_ref(), slots.first().copied().unwrap_or(0)),
                Sums::Owned(sums) => (sums.whole(bucket, self.tree), 0),
            };
            let mean = mean.ok_or(NO_SUMS)?;
            let mut device = Device { backend: &**backend, stream };
            parameters.update(&mut device, &part.place(), |device, mut masters| {
                for run in runs {
                    let (first, elements) = (run.range.start - range.start, run.range.len());
                    let views = UpdateViews {
                        tensor: run.tensor.as_ref().map(|(_, tensor)| tensor),
                        parameters: masters.reborrow().sub(first, elements)?,
                        states: states.of_run(bucket, range, &run)?,
                        gradient: Slice::new(mean, at + first, elements)?,
                    };
                    let scalars = rule.scalars(update, coefficient, run.terms);
                    rule.rule.update(device, views, scalars)?;
                }
                Ok(())
            })?;
        }
        self.trace.end(&**backend, stream, "updating parameters", begun)?;
        let ready = backend.record(stream)?;
        backend.wait_for(snapshots, &ready)?;
        // Workers that share this worker's copy of the parameters read the update in place, once it is lent.
        let holders = lender.holders();
        let Some(communicator) = &mut lender.communicator else { return Ok(()) };
        let place = holders.place(communicator.rank());
        let key = Key::new(update - 1, bucket as u32);
        if let Some(gathered) = gathered {
            let values = told(parameters, gathered.of_place(place))?;
            let told = communicator.updated(&**backend, stream, key, &gathered.cut, values);
            told.map_err(Stopped::of)?;
        }
        if let Some(beside) = beside {
            let values = Values::Fp32(parameters.vectors(beside.of_place(place))?);
            let key = key.beside();
            let told = communicator.updated(&**backend, stream, key, &beside.cut, values);
            told.map_err(Stopped::of)?;
        }
        Ok(())
    }

    /// Brings the other workers' updated parts of a bucket here; after the last, the device thread may go on.
    fn gather(&mut self, Ticket { step, bucket }: Ticket) -> Result<(), Stopped> {
        let Self { backend, stream, lender, .. } = self;
        let OwnedBucket { gathered, beside, .. } = &self.buckets[bucket as usize];
        if let (Some(communicator), Some(Gathered { range, cut })) =
            (&mut lender.communicator, gathered)
        {
            // The other workers have to update first.
            let _waiting = progress::during(Phase::WaitingForSums);
            let parameters = Arc::get_mut(&mut self.parameters).ok_or(LENT)?;
            let (key, out) = (Key::new(step, bucket), told_mut(parameters, range.clone())?);
            communicator.gather(&**backend, stream, key, cut, out).map_err(Stopped::of)?;
            if let Some(Gathered { range, cut }) = beside {
                let out = ValuesMut::Fp32(parameters.vectors_mut(range.clone())?);
                let gathered = communicator.gather(&**backend, stream, key.beside(), cut, out);
                gathered.map_err(Stopped::of)?;
            }
        }
        self.gathered += 1;
        if self.gathered < self.buckets.len() {
            return Ok(());
        }
        self.gathered = 0;
        self.lend()
    }

    /// Begins to copy all that is owned to the host; the next update waits for it on the device.
    fn stage(&mut self) -> Result<(), Failure> {
        let (backend, stream) = (&*self.backend, &mut self.snapshots);
        let mut device = Device { backend, stream };
        let owned = self.buckets.iter().map(|bucket| &bucket.part);
        let owned = owned.filter(|part| !part.range.is_empty());
        let owned = owned.map(|part| (part.place(), part.start));
        let masters = (&*self.parameters, &mut self.room);
        self.staged.copy(&mut device, masters, owned, self.states.buffers())?;
        self.copied = Some(backend.record(stream)?);
        Ok(())
    }

    fn snapshot(&mut self, chunk: usize, part: StatePart) -> Result<Vec<f32>, Failure> {
        let range = self.plan.chunks.chunks()[chunk].range.clone();
        let mut parts = self.buckets.iter().map(|bucket| &bucket.part).enumerate();
        let part_of = parts.find(|(_, part)| part.chunks.contains(&chunk));
        let (bucket, part_of) = part_of.ok_or(GraphError::ForeignChunk { chunk })?;
        let start = part_of.start + range.start - part_of.range.start;
        let inside = match part {
            StatePart::Parameter => start..start + range.len(),
            StatePart::State(state) => {
                let of = (bucket, &part_of.range);
                self.states.place(usize::from(state), of, &range).ok_or(NO_STATE)?
            }
        };
        if let Some(values) = self.staged.values(&*self.backend, part, inside.clone())? {
            return Ok(values);
        }
        let _waiting = progress::during(Phase::WaitingForDevice);
        // Reading waits for the copy, so that the next update comes after it.
        let mut device = Device { backend: &*self.backend, stream: &mut self.snapshots };
        let from = match part {
            StatePart::Parameter => {
                let mut values = vec![0.0; range.len()];
                let place = MasterPlace { range, start };
                self.parameters.read(&mut device, &place, &mut values, &mut self.room)?;
                return Ok(values);
            }
            StatePart::State(state) => {
                self.states.slice(usize::from(state), &inside).ok_or(NO_STATE)??
            }
        };
        Ok(device.backend.to_vec(device.stream, from)?)
    }
}

/// Where answers go, once the operators have said so.
#[derive(Default)]
struct Answers {
    sums: Option<Replies<Ticket>>,
    updates: Option<Replies<UpdateReply>>,
    gathers: Option<Replies<Ticket>>,
    snapshots: Option<Replies<SnapshotReply>>,
}

fn answer<R>(replies: &Option<Replies<R>>, reply: R) -> Result<(), Stopped> {
    let missing = "where its answer goes";
    let replies = replies.as_ref().ok_or(GraphError::Order { what: "a job", missing })?;
    Ok(replies.send(reply)?)
}
