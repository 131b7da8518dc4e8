//! The watch over a run: it ends one in which something stands still for longer than the step deadline, and names it.
//!
//! One thread in each process. It looks at the [stations](super::progress) of its own threads and at the reports of the peers'
//! heartbeats say of theirs, and accuses, in this order:
//!
//! 1. a thread of this process that works, or does not come back, and has not moved for the deadline;
//! 2. a worker of this process that waits for something of its own, such as samples;
//! 3. a peer that works and has not moved. It accuses itself first, unless it is one that only breathes;
//! 4. where all of them wait, the one that has come least far: the message that it waits for was lost.
//!
//! A thread that waits for others is never accused while one of the others moves. A process that was stopped as a whole
//! (Ctrl-Z, a sleeping laptop) accuses nothing when it wakes: the watch notices that it overslept, and begins anew.

use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::abort::Abort;
use super::error::{Actor, ClusterError, Peer};
use super::progress::{Board, Nature, Phase, Rhythm, Standing, Station, step_of_worker};

/// The stations are looked at at least this often.
const LONGEST_TICK: Duration = Duration::from_millis(500);

/// A peer's last report about itself.
#[derive(Clone, Debug)]
pub(super) struct PeerStanding {
    pub(super) peer: Peer,
    pub(super) standing: Standing,
    pub(super) heard: Instant,
    /// Whether the report was a goodbye.
    pub(super) has_left: bool,
    /// How long its next word may take to arrive.
    pub(super) delay: Duration,
}

/// Whether a process waits for others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Waits {
    Yes,
    No,
}

impl PeerStanding {
    fn waits(&self) -> Waits {
        // After its goodbye a process has nothing left to do, as far as it knows.
        match (self.has_left, self.standing.phase.nature()) {
            (false, Nature::Works) => Waits::No,
            _ => Waits::Yes,
        }
    }
}

/// The last progress of one thread.
struct Seen {
    station: Weak<Station>,
    counted: (u64, u64),
    since: Instant,
}

/// The last progress of a peer.
struct SeenPeer {
    last: PeerStanding,
    since: Instant,
}

/// The stations of threads and the reports of peers at the last look.
struct Watch {
    deadline: Duration,
    looked: Instant,
    stations: Vec<Seen>,
    moved: u64,
    moved_since: Instant,
    peers: Vec<SeenPeer>,
}

/// The peers of this process; none where it is alone.
pub(super) type PeerStandings = Box<dyn Fn() -> Vec<PeerStanding> + Send>;

/// The thread that watches. Dropping it ends the watch.
pub(super) struct Watchdog {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Watchdog {
    /// Watches the run of `abort` until this is dropped.
    pub(super) fn start(
        deadline: Duration,
        abort: &Abort,
        peers: PeerStandings,
    ) -> Result<Self, ClusterError> {
        let (stop, stopped) = mpsc::channel();
        let abort = abort.clone();
        let name = "cluster:watch";
        let thread = std::thread::Builder::new()
            .name(name.to_string())
            .spawn(move || {
                let tick = (deadline / 10).min(LONGEST_TICK);
                let mut watch = Watch::new(deadline, Instant::now());
                while stopped.recv_timeout(tick) == Err(RecvTimeoutError::Timeout) {
                    // The question turns an unexplained suspicion into an error.
                    if abort.is_aborted() {
                        return;
                    }
                    if let Some(error) = watch.look(Instant::now(), abort.board(), &peers()) {
                        abort.abort(error);
                    }
                }
            })
            .map_err(ClusterError::spawn(name))?;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.stop.take();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Watch {
    fn new(deadline: Duration, now: Instant) -> Self {
        Self {
            deadline,
            looked: now,
            stations: Vec::new(),
            moved: 0,
            moved_since: now,
            peers: Vec::new(),
        }
    }

    /// The first thing that has stood still for too long.
    fn look(
        &mut self,
        now: Instant,
        board: &Board,
        peers: &[PeerStanding],
    ) -> Option<ClusterError> {
        let stations = board.stations();
        if now - self.looked > (self.deadline / 5).max(LONGEST_TICK) {
            self.stations.clear();
            self.peers.clear();
            self.moved_since = now;
        }
        self.looked = now;
        self.note_stations(now, &stations);
        self.note_peers(now, peers);
        let moved = board.moved();
        let in_store =
            |station: &Arc<Station>| station.place().0.nature() == Nature::BoundedElsewhere;
        if moved != self.moved || stations.iter().any(in_store) {
            (self.moved, self.moved_since) = (moved, now);
        }
        let is_at_work = |station: &Arc<Station>| station.is_at_work(station.place().0);
        let waits = !stations.iter().any(is_at_work);
        self.stuck_thread(now, board, &stations)
            .or_else(|| waits.then(|| self.waiting_worker(now, board, &stations))?)
            .or_else(|| self.stuck_peer(now, board))
            .or_else(|| waits.then(|| self.last_of_all(now, &stations, board))?)
    }

    fn note_stations(&mut self, now: Instant, stations: &[Arc<Station>]) {
        self.stations.retain(|seen| seen.station.strong_count() > 0);
        for station in stations {
            let counted = (station.moved(), station.turns());
            let is_free = match station.place().0.nature() {
                Nature::BoundedElsewhere => true,
                Nature::Idle | Nature::Waits => station.rhythm == Rhythm::Jobs,
                Nature::Works => false,
            };
            let known = |seen: &&mut Seen| seen.station.as_ptr() == Arc::as_ptr(station);
            match self.stations.iter_mut().find(known) {
                Some(seen) if seen.counted == counted && !is_free => {}
                Some(seen) => (seen.counted, seen.since) = (counted, now),
                None => {
                    let station = Arc::downgrade(station);
                    self.stations.push(Seen { station, counted, since: now });
                }
            }
        }
    }

    fn note_peers(&mut self, now: Instant, peers: &[PeerStanding]) {
        for last in peers.iter().cloned() {
            let process = last.peer.process;
            let is_free = last.standing.phase.nature() == Nature::BoundedElsewhere;
            match self.peers.iter_mut().find(|seen| seen.last.peer.process == process) {
                Some(seen) => {
                    if is_free || seen.last.standing.moved != last.standing.moved {
                        seen.since = now;
                    }
                    seen.last = last;
                }
                None => self.peers.push(SeenPeer { last, since: now }),
            }
        }
    }

    fn accuse(
        &self,
        actor: Option<Actor>,
        peer: Option<Peer>,
        step: u64,
        phase: Phase,
    ) -> ClusterError {
        ClusterError::StoodStill { actor, peer, step, phase, deadline: self.deadline }
    }

    fn stuck_thread(
        &self,
        now: Instant,
        board: &Board,
        stations: &[Arc<Station>],
    ) -> Option<ClusterError> {
        let still = |station: &Arc<Station>| {
            let seen =
                self.stations.iter().find(|seen| seen.station.as_ptr() == Arc::as_ptr(station))?;
            let (phase, step) = station.place();
            let phase = match station.rhythm {
                Rhythm::Jobs => phase,
                Rhythm::Turns => phase.of_stuck_worker(),
            };
            let stood = now - seen.since;
            (stood >= board.patience(phase, self.deadline))
                .then(|| (stood, phase, step, Arc::clone(station)))
        };
        let longest = stations.iter().filter_map(still).max_by_key(|(stood, ..)| *stood);
        longest.map(|(_, phase, step, station)| {
            let step = match station.worker {
                Some(worker) => step.max(step_of_worker(stations, worker)),
                None => step,
            };
            self.accuse(Some(station.actor.clone()), None, step, phase)
        })
    }

    fn waiting_worker(
        &self,
        now: Instant,
        board: &Board,
        stations: &[Arc<Station>],
    ) -> Option<ClusterError> {
        let stood = now - self.moved_since;
        stations.iter().filter(|station| station.rhythm == Rhythm::Turns).find_map(|station| {
            let (phase, step) = station.place();
            let is_stuck =
                phase.nature() == Nature::Works && stood >= board.patience(phase, self.deadline);
            is_stuck.then(|| self.accuse(Some(station.actor.clone()), None, step, phase))
        })
    }

    fn stuck_peer(&self, now: Instant, board: &Board) -> Option<ClusterError> {
        self.peers.iter().find_map(|SeenPeer { last, since }| {
            let phase = last.standing.phase;
            let patience = board.patience(phase, self.deadline) + last.delay;
            let is_stuck = last.waits() == Waits::No && now - *since >= patience;
            // Its last report may be long out of date.
            let is_silent = !last.has_left
                && now - last.heard >= self.deadline + last.delay
                && now - self.moved_since >= self.deadline;
            (is_stuck || is_silent).then(|| self.accuse_process(last.standing, Some(&last.peer)))
        })
    }

    fn last_of_all(
        &self,
        now: Instant,
        stations: &[Arc<Station>],
        board: &Board,
    ) -> Option<ClusterError> {
        let is_still = |since: Instant| now - since >= self.deadline;
        let all = is_still(self.moved_since)
            && self
                .peers
                .iter()
                .all(|SeenPeer { last, since }| is_still(*since) && last.waits() == Waits::Yes);
        // Without a station nothing has begun, or all is done and the peers have said so.
        if !all || (stations.is_empty() && self.peers.is_empty()) {
            return None;
        }
        let own = (board.standing(), None, true);
        let others = self.peers.iter().map(|SeenPeer { last, .. }| {
            let breathes = now - last.heard < 2 * last.delay;
            (last.standing, Some(&last.peer), breathes)
        });
        let (standing, peer, _) = std::iter::once(own)
            .chain(others)
            .min_by_key(|(standing, _, breathes)| (*breathes, standing.step, standing.moved))?;
        Some(self.accuse_process(standing, peer))
    }

    fn accuse_process(&self, standing: Standing, peer: Option<&Peer>) -> ClusterError {
        let Standing { worker, phase, step, .. } = standing;
        let actor = worker.map(|worker| Actor::Worker(worker as usize));
        self.accuse(actor, peer.cloned(), step, phase)
    }
}

#[cfg(test)]
mod tests;
