//! The phase of each thread of a run, and whether the thread moves.
//!
//! That a process breathes says nothing of its work: a kernel that never returns, a file system that does not answer, or
//! a reader that has gone leave all heartbeats as they were. So each worker and each guarded thread of a run has a
//! *station*: its phase ([`enter`]), and a count that rises whenever something is done ([`moved`]). Both are one
//! relaxed store by the thread itself; the [watch](super::ClusterSettings::step_deadline) reads them now and then.
//!
//! The stations of a run are also how its end knows which of its threads are left.

use std::cell::RefCell;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::error::Actor;
use super::trace::{QueueTrack, Trace, Track};

/// The phase of a thread of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Phase {
    /// It has nothing to do.
    Idle,
    /// It prepares the run.
    Starting,
    /// It reads the state that the run goes on from, and sends it to the other workers.
    Restoring,
    /// It waits for the state that another worker reads.
    WaitingForState,
    /// It waits for a store, which is given up by deadlines of its own.
    UsingStore,
    /// It allocates memory of a device, and compiles kernels where they are used for the first time.
    PreparingDevice,
    /// It waits for the samples of a step or of an evaluation.
    ReadingSamples,
    /// It computes losses and gradients.
    ForwardBackward,
    /// It waits for sums, norms or parameters of other workers.
    WaitingForSums,
    /// It waits for a device that another thread uses.
    WaitingForDevice,
    /// It waits for the other workers to take its messages, or to be as far as it is.
    WaitingForWorkers,
    /// It updates parameters.
    Updating,
    /// It takes over parameters that were updated elsewhere.
    Gathering,
    /// It computes the loss of an evaluation.
    Evaluating,
    /// It writes a checkpoint.
    WritingCheckpoint,
    /// It writes down and tells events.
    Reporting,
    /// It waits for the end of the run.
    WaitingForEnd,
    /// It does not come back from an operator, or from the closure around the graph.
    InOperator,
}

/// The conclusion from a thread that stands still in a phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Nature {
    /// Nothing.
    Idle,
    /// Nothing about this thread: others have to move first.
    Waits,
    /// Nothing before other deadlines have ended its wait.
    BoundedElsewhere,
    /// The thread is stuck.
    Works,
}

impl Phase {
    /// Each at the place of its number.
    const ALL: [Self; 18] = [
        Self::Idle,
        Self::Starting,
        Self::Restoring,
        Self::WaitingForState,
        Self::UsingStore,
        Self::PreparingDevice,
        Self::ReadingSamples,
        Self::ForwardBackward,
        Self::WaitingForSums,
        Self::WaitingForDevice,
        Self::WaitingForWorkers,
        Self::Updating,
        Self::Gathering,
        Self::Evaluating,
        Self::WritingCheckpoint,
        Self::Reporting,
        Self::WaitingForEnd,
        Self::InOperator,
    ];

    pub(super) fn nature(self) -> Nature {
        match self {
            Self::Idle => Nature::Idle,
            Self::WaitingForState
            | Self::WaitingForSums
            | Self::WaitingForDevice
            | Self::WaitingForWorkers
            | Self::WaitingForEnd => Nature::Waits,
            Self::UsingStore => Nature::BoundedElsewhere,
            _ => Nature::Works,
        }
    }

    /// The phase of a worker that does not come back in this phase. A worker comes back from all phases in which it only waits, and its
    /// device computes on another thread.
    pub(super) fn of_stuck_worker(self) -> Self {
        match self {
            Self::Starting | Self::Restoring | Self::UsingStore | Self::Reporting => self,
            _ => Self::InOperator,
        }
    }

    /// The least that a thread in this phase is given, whatever the deadline of a step.
    fn least_patience(self) -> Duration {
        match self {
            // Some hundred kernels that no cache on disk has yet.
            Self::PreparingDevice => Duration::from_secs(600),
            _ => Duration::ZERO,
        }
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Idle => "waiting for work",
            Self::Starting => "starting",
            Self::Restoring => "restoring the state",
            Self::WaitingForState => "waiting for the state of worker 0",
            Self::UsingStore => "waiting for a store",
            Self::PreparingDevice => "preparing the device",
            Self::ReadingSamples => "reading samples",
            Self::ForwardBackward => "forward and backward",
            Self::WaitingForSums => "waiting for sums of others",
            Self::WaitingForDevice => "waiting for the device",
            Self::WaitingForWorkers => "waiting for other workers",
            Self::Updating => "updating parameters",
            Self::Gathering => "gathering parameters",
            Self::Evaluating => "evaluating",
            Self::WritingCheckpoint => "writing a checkpoint",
            Self::Reporting => "telling what has happened",
            Self::WaitingForEnd => "waiting for the end of the run",
            Self::InOperator => "inside an operator",
        })
    }
}

/// How a thread takes its turns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rhythm {
    /// It comes back at least every tenth of a second, also where it has nothing to do.
    Turns,
    /// It works until it is done, and is [`Phase::Idle`] between.
    Jobs,
}

/// The phase and the progress of one thread of a run.
#[derive(Debug)]
pub(super) struct Station {
    pub(super) actor: Actor,
    /// The worker that it is, or works for.
    pub(super) worker: Option<usize>,
    pub(super) rhythm: Rhythm,
    /// The phase in the highest byte, the step below.
    place: AtomicU64,
    moved: AtomicU64,
    turns: AtomicU64,
    /// Where its phases are written down, if they are.
    track: Option<Track>,
}

const STEP_BITS: u32 = 56;

impl Station {
    fn enter(&self, phase: Phase, step: u64) {
        let step = step.min((1 << STEP_BITS) - 1);
        self.place.store((phase as u64) << STEP_BITS | step, Ordering::Relaxed);
        if let Some(track) = &self.track {
            track.enter(phase, step);
        }
    }

    /// The phase, and the step in hand: counted from 1, 0 where none has begun.
    pub(super) fn place(&self) -> (Phase, u64) {
        let place = self.place.load(Ordering::Relaxed);
        (Phase::ALL[(place >> STEP_BITS) as usize], place & ((1 << STEP_BITS) - 1))
    }

    pub(super) fn moved(&self) -> u64 {
        self.moved.load(Ordering::Relaxed)
    }

    pub(super) fn turns(&self) -> u64 {
        self.turns.load(Ordering::Relaxed)
    }

    /// Whether it is a thread with a job in hand that nothing keeps it from.
    pub(super) fn is_at_work(&self, phase: Phase) -> bool {
        let nature = phase.nature();
        self.rhythm == Rhythm::Jobs && !matches!(nature, Nature::Idle | Nature::Waits)
    }

    /// Only the thread itself calls it, so no addition is lost.
    fn count(counter: &AtomicU64) {
        counter.store(counter.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
    }
}

thread_local! {
    static HERE: RefCell<Option<Arc<Station>>> = const { RefCell::new(None) };
}

/// Does nothing on threads that belong to no run, and while a thread ends.
fn here<R>(with: impl FnOnce(&Arc<Station>) -> R) -> Option<R> {
    HERE.try_with(|here| here.borrow().as_ref().map(with)).ok().flatten()
}

/// This thread goes on to `phase` of `step`, counted from 1; 0 where none has begun.
pub fn enter(phase: Phase, step: u64) {
    here(|station| station.enter(phase, step));
}

/// A track of the trace for a device stream of this thread, where the run writes a trace.
pub(crate) fn queue_track(name: &str) -> Option<QueueTrack> {
    here(|station| station.track.as_ref().map(|track| track.queue(&station.actor, name))).flatten()
}

/// The step that this thread has in hand; 0 where none has begun, or it does not know.
pub(crate) fn step() -> u64 {
    here(|station| station.place().1).unwrap_or(0)
}

/// Something was done on this thread.
pub fn moved() {
    here(|station| Station::count(&station.moved));
}

/// This thread is in `phase` until the answer is dropped; its step stays.
pub fn during(phase: Phase) -> During {
    let before = here(|station| {
        let before = station.place();
        station.enter(phase, before.1);
        before
    });
    During { before }
}

/// Ends a phase that is part of another; see [`during`].
#[derive(Debug)]
#[must_use = "the phase lasts until this is dropped"]
pub struct During {
    before: Option<(Phase, u64)>,
}

impl Drop for During {
    fn drop(&mut self) {
        if let Some((phase, step)) = self.before {
            enter(phase, step);
        }
    }
}

/// The report in each heartbeat to the peers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Standing {
    /// The worker that has come least far, once there is one.
    pub(super) worker: Option<u32>,
    pub(super) phase: Phase,
    pub(super) step: u64,
    /// Rises with whatever moves in the process.
    pub(super) moved: u64,
}

impl Default for Standing {
    /// The standing of a process that has not reported yet.
    fn default() -> Self {
        Self { worker: None, phase: Phase::Starting, step: 0, moved: 0 }
    }
}

/// The stations of one process in one run.
#[derive(Debug, Default)]
pub(super) struct Board {
    /// The trace of threads, if there is one.
    pub(super) trace: OnceLock<Trace>,
    state: Mutex<State>,
    left: Condvar,
}

#[derive(Debug, Default)]
struct State {
    stations: Vec<Arc<Station>>,
    /// The counts of the stations that are gone, and one for each that came or left.
    moved_before: u64,
    /// The furthest worker that has left.
    ended: Option<(u32, u64)>,
    /// The least time that a phase is given in this run.
    patience: Vec<(Phase, Duration)>,
}

impl Board {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A station for `actor`, whose thread may not have begun.
    pub(super) fn join(self: &Arc<Self>, actor: Actor, rhythm: Rhythm) -> Presence {
        let (worker, phase) = match &actor {
            Actor::Worker(index) => (Some(*index), Phase::Starting),
            Actor::Thread(_) => (here(|station| station.worker).flatten(), Phase::Idle),
        };
        let track = self.trace.get().map(|trace| Track::new(trace, &actor, phase));
        let station = Arc::new(Station {
            actor,
            worker,
            rhythm,
            place: AtomicU64::new((phase as u64) << STEP_BITS),
            moved: AtomicU64::new(0),
            turns: AtomicU64::new(0),
            track,
        });
        let mut state = self.lock();
        state.stations.push(Arc::clone(&station));
        state.moved_before = state.moved_before.wrapping_add(1);
        drop(state);
        Presence { board: Arc::clone(self), station }
    }

    /// Gives threads in `phase` this long at least.
    pub(super) fn allow(&self, phase: Phase, patience: Duration) {
        self.lock().patience.push((phase, patience));
    }

    /// How long a thread may stand still in `phase`.
    pub(super) fn patience(&self, phase: Phase, deadline: Duration) -> Duration {
        let least = phase.least_patience().max(deadline);
        let state = self.lock();
        let allowed = state.patience.iter().filter(|(other, _)| *other == phase);
        allowed.map(|(_, patience)| *patience).fold(least, Duration::max)
    }

    pub(super) fn stations(&self) -> Vec<Arc<Station>> {
        self.lock().stations.clone()
    }

    /// Rises with whatever moves in this process.
    pub(super) fn moved(&self) -> u64 {
        let state = self.lock();
        let of_stations = state.stations.iter().map(|station| station.moved());
        of_stations.fold(state.moved_before, u64::wrapping_add)
    }

    /// The report to the peers: a thread that works, else the worker that has come least far.
    pub(super) fn standing(&self) -> Standing {
        let moved = self.moved();
        let state = self.lock();
        let rank = |station: &&Arc<Station>| {
            let (phase, step) = station.place();
            (!station.is_at_work(phase), step)
        };
        let shown = |station: &&Arc<Station>| {
            station.rhythm == Rhythm::Turns || station.is_at_work(station.place().0)
        };
        match state.stations.iter().filter(shown).min_by_key(rank) {
            Some(station) => {
                let (phase, step) = station.place();
                let of_worker = |worker| step_of_worker(&state.stations, worker);
                let step = step.max(station.worker.map_or(0, of_worker));
                let worker = station.worker.map(|worker| worker as u32);
                Standing { worker, phase, step, moved }
            }
            None => match state.ended {
                Some((worker, step)) => {
                    let (worker, phase) = (Some(worker), Phase::WaitingForEnd);
                    Standing { worker, phase, step, moved }
                }
                None => Standing { moved, ..Standing::default() },
            },
        }
    }

    /// Waits until every thread has left, or until `deadline`; answers those that have not.
    pub(super) fn wait_for_all(&self, deadline: Instant) -> Vec<Actor> {
        let mut state = self.lock();
        while !state.stations.is_empty() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            let waited = self.left.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        state.stations.iter().map(|station| station.actor.clone()).collect()
    }
}

/// The step of a worker: threads that work for it may not know it.
pub(super) fn step_of_worker(stations: &[Arc<Station>], worker: usize) -> u64 {
    let of_worker = |station: &&Arc<Station>| station.actor == Actor::Worker(worker);
    stations.iter().find(of_worker).map_or(0, |station| station.place().1)
}

/// A thread of a run, until it is dropped.
#[derive(Debug)]
pub(super) struct Presence {
    board: Arc<Board>,
    station: Arc<Station>,
}

impl Presence {
    /// The thread that calls this is the one.
    pub(super) fn begin(&self) {
        let _ = HERE.try_with(|here| *here.borrow_mut() = Some(Arc::clone(&self.station)));
    }

    /// The thread has come back.
    pub(super) fn turn(&self) {
        Station::count(&self.station.turns);
    }
}

impl Drop for Presence {
    fn drop(&mut self) {
        let _ = HERE.try_with(|here| {
            let mut here = here.borrow_mut();
            if here.as_ref().is_some_and(|station| Arc::ptr_eq(station, &self.station)) {
                *here = None;
            }
        });
        self.station.enter(Phase::Idle, self.station.place().1);
        let mut state = self.board.lock();
        state.stations.retain(|station| !Arc::ptr_eq(station, &self.station));
        state.moved_before = state.moved_before.wrapping_add(self.station.moved()).wrapping_add(1);
        if let Actor::Worker(index) = self.station.actor {
            state.ended = Some((index as u32, self.station.place().1));
        }
        drop(state);
        self.board.left.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_phase_has_the_place_of_its_number() {
        for (number, phase) in Phase::ALL.into_iter().enumerate() {
            assert_eq!(phase as usize, number, "{phase:?}");
        }
    }

    #[test]
    fn a_thread_says_where_it_stands_and_that_it_has_left() {
        let board = Arc::new(Board::default());
        assert_eq!(board.standing().phase, Phase::Starting, "nothing has begun");
        let worker = board.join(Actor::Worker(3), Rhythm::Turns);
        worker.begin();
        enter(Phase::WaitingForSums, 7);
        let helper = board.join(Actor::Thread("device-3".into()), Rhythm::Jobs);
        let at = |phase, moved| Standing { worker: Some(3), phase, step: 7, moved };
        assert_eq!(board.standing(), at(Phase::WaitingForSums, 2), "an idle thread says nothing");
        helper.station.enter(Phase::ForwardBackward, 0);
        moved();
        assert_eq!(board.standing(), at(Phase::ForwardBackward, 3));
        {
            let _telling = during(Phase::Reporting);
            assert_eq!(worker.station.place(), (Phase::Reporting, 7));
        }
        assert_eq!(worker.station.place(), (Phase::WaitingForSums, 7));
        drop(helper);
        assert_eq!(board.wait_for_all(Instant::now()), [Actor::Worker(3)]);
        drop(worker);
        assert!(board.wait_for_all(Instant::now()).is_empty());
        assert_eq!(board.standing(), at(Phase::WaitingForEnd, 5));
        enter(Phase::Starting, 1);
        moved();
        assert_eq!(board.moved(), 5, "a thread without a station says nothing");
    }

    #[test]
    fn some_phases_are_given_longer_than_a_step() {
        let board = Board::default();
        let second = Duration::from_secs(1);
        assert_eq!(board.patience(Phase::ForwardBackward, second), second);
        assert!(board.patience(Phase::PreparingDevice, second) > 60 * second);
        board.allow(Phase::ReadingSamples, 9 * second);
        assert_eq!(board.patience(Phase::ReadingSamples, second), 9 * second);
        assert_eq!(board.patience(Phase::ReadingSamples, 99 * second), 99 * second);
    }
}
