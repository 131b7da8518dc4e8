//! Running timely workers so that any failure ends all of them, with its message.
//!
//! Timely by itself is fail-stop at best: a panic in one thread of a process can leave the others
//! waiting for ever. Here every worker runs inside a catch; the first error goes to the [`Abort`]
//! handle, which wakes all workers; each leaves its loop (the stepping functions of
//! [`WorkerContext`] return [`Aborted`]) and drops its dataflows, so that timely's threads end
//! too. [`Cluster::execute`] then returns the first error. Nothing here ends the process.
//!
//! A thread that is stuck (in a file system that does not answer, say) cannot be ended from outside. It is waited for
//! for a while; then `execute` returns without it, with an error that names it.

use std::any::Any;
use std::ops::{Deref, DerefMut};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use timely::WorkerConfig;
use timely::communication::allocator::ProcessBuilder;
use timely::communication::allocator::thread::ThreadBuilder;
use timely::communication::allocator::zero_copy::initialize::{
    CommsGuard, initialize_networking_from_sockets,
};
use timely::communication::{AllocatorBuilder, Hooks};
use timely::execute::execute_from;
use timely::worker::Worker;

use super::ClusterSettings;
use super::abort::Abort;
use super::control::Control;
use super::data_socket::{DataSocket, Latch};
use super::embedded::Workers;
use super::error::{ClusterError, Peer};
use super::failure::{Aborted, Failure};
use super::progress::Presence;
use super::received::{Received, counted_memory};
use super::rendezvous::{DataLink, meet};
use super::timely_messages::Messages;
use super::watch::{PeerStandings, Watchdog};

/// A worker that has nothing to do looks at the abort flag at least this often.
const LONGEST_PARK: Duration = Duration::from_millis(100);

/// The argument of a worker's closure: its timely [`Worker`] (by `Deref`), and stepping that ends
/// when the run is aborted.
///
/// Its `step`, `step_or_park` and `step_while` hide those of the timely worker. Step through them
/// only: a closure that loops over the timely worker's own does not notice that a peer has failed.
pub struct WorkerContext<'a> {
    pub(super) worker: &'a mut Worker,
    pub(super) of: Workers,
    pub(super) presence: Presence,
}

impl WorkerContext<'_> {
    /// The index of this process.
    pub fn process(&self) -> usize {
        self.of.process
    }

    /// How many processes there are.
    pub fn processes(&self) -> usize {
        self.of.processes
    }

    /// The handle with which anything may end the run.
    pub fn abort(&self) -> &Abort {
        &self.of.abort
    }

    /// The `T` that the workers of this process share while they run, made for the first of them that asks.
    pub fn of_process<T: Any + Default + Send + Sync>(&self) -> Arc<T> {
        let mut values = self.of.of_process.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(value) = values.iter().find_map(|value| Arc::clone(value).downcast().ok()) {
            return value;
        }
        let value = Arc::<T>::default();
        values.push(Arc::clone(&value) as _);
        value
    }

    /// Schedules the active operators once, without waiting. Whether any dataflow is left.
    ///
    /// # Errors
    /// [`Aborted`] once the run is aborted.
    pub fn step(&mut self) -> Result<bool, Aborted> {
        self.step_within(Duration::ZERO)
    }

    /// Schedules the active operators once; if there are none, waits for work, a tenth of a second
    /// at most. Whether any dataflow is left.
    ///
    /// # Errors
    /// [`Aborted`] once the run is aborted.
    pub fn step_or_park(&mut self) -> Result<bool, Aborted> {
        self.step_within(LONGEST_PARK)
    }

    /// Steps, waiting where there is nothing to do, while `condition` holds.
    ///
    /// # Errors
    /// [`Aborted`] once the run is aborted.
    pub fn step_while(&mut self, mut condition: impl FnMut() -> bool) -> Result<(), Aborted> {
        self.of.abort.check()?;
        while condition() {
            self.step_or_park()?;
        }
        Ok(())
    }

    /// Steps until every dataflow of this worker is complete.
    ///
    /// # Errors
    /// [`Aborted`] once the run is aborted.
    pub fn run_until_done(&mut self) -> Result<(), Aborted> {
        self.of.abort.check()?;
        while self.worker.has_dataflows() {
            self.step_or_park()?;
        }
        Ok(())
    }

    /// Runs `work` on a thread of its own, watched under `name`, while this worker steps: so `work` may wait for
    /// messages that other workers send through timely. It has to end once the run is aborted.
    ///
    /// # Errors
    /// [`Aborted`] once the run is aborted, or the error of `work`.
    #[cfg(feature = "prepare")]
    pub(crate) fn step_beside<R: Send>(
        &mut self,
        name: &str,
        work: impl FnOnce() -> Result<R, Failure> + Send,
    ) -> Result<R, Failure> {
        let actor = super::error::Actor::Thread(format!("{name}-{}", self.worker.index()));
        let presence = self.of.abort.board().join(actor, super::progress::Rhythm::Jobs);
        let worker = std::thread::current();
        std::thread::scope(|scope| {
            let thread = scope.spawn(move || {
                presence.begin();
                let answer = work();
                worker.unpark();
                answer
            });
            let stepped = self.step_while(|| !thread.is_finished());
            let answer = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            stepped?;
            answer
        })
    }

    fn step_within(&mut self, park: Duration) -> Result<bool, Aborted> {
        self.of.abort.check()?;
        let more = self.worker.step_or_park(Some(park));
        self.presence.turn();
        self.of.abort.check()?;
        Ok(more)
    }
}

impl Deref for WorkerContext<'_> {
    type Target = Worker;

    fn deref(&self) -> &Worker {
        self.worker
    }
}

impl DerefMut for WorkerContext<'_> {
    fn deref_mut(&mut self) -> &mut Worker {
        self.worker
    }
}

/// A process that has found its peers and is ready to run workers.
pub struct Cluster {
    workers: usize,
    process: usize,
    addresses: Vec<String>,
    abort: Abort,
    step_deadline: Option<Duration>,
    ending_deadline: Duration,
    /// Absent when there are no other processes.
    network: Option<Network>,
}

struct Network {
    control: Control,
    data: Vec<DataSocket>,
    workers_ended: Arc<Latch>,
}

impl Cluster {
    /// Meets the other processes; returns at once if there are none.
    ///
    /// # Errors
    /// If the settings are wrong, not all processes have met within the connect deadline, they
    /// disagree on their identity, or one of them fails meanwhile.
    pub fn connect(settings: ClusterSettings) -> Result<Self, ClusterError> {
        Self::connect_with(settings, Abort::new())
    }

    /// As [`Cluster::connect`], for a run that may be ended through `abort` from the beginning.
    ///
    /// # Errors
    /// As [`Cluster::connect`]; or the error of `abort`.
    pub fn connect_with(mut settings: ClusterSettings, abort: Abort) -> Result<Self, ClusterError> {
        settings.check()?;
        settings.check_admission()?;
        let (workers, process) = (settings.workers, settings.process);
        let (step_deadline, ending_deadline) = (settings.step_deadline, settings.ending_deadline);
        let addresses = settings.addresses.clone();
        if let Some(siblings) = &settings.siblings {
            siblings.end_with_the_first(&abort, &addresses);
        }
        let network = if addresses.len() > 1 {
            let deadline = settings.peer_deadline;
            let control =
                Control::start(process, addresses.clone(), deadline, step_deadline, &abort)?;
            match meet(&mut settings, &abort, &control)
                .map(|links| wrap_sockets(links, &settings, &abort, &control))
            {
                Ok((data, workers_ended)) => Some(Network { control, data, workers_ended }),
                Err(error) => {
                    abort.abort(error.clone());
                    control.finish();
                    return Err(abort.first_error().unwrap_or(error));
                }
            }
        } else {
            None
        };
        Ok(Self { workers, process, addresses, abort, step_deadline, ending_deadline, network })
    }

    /// The handle with which anything may end the run.
    pub fn abort(&self) -> &Abort {
        &self.abort
    }

    /// Runs `work` on every worker of this process, then steps each worker until its dataflows are
    /// complete. Returns the workers' results in the order of their indices, once every process of
    /// the cluster is done and the workers and guarded threads of this one have ended.
    ///
    /// # Errors
    /// The first error of the run, wherever it happened: an error or a panic of `work`, of an
    /// operator or of a guarded thread, a peer that failed, is silent, or is gone, or something that
    /// stands still. [`ClusterError::LeftBehind`], with that error as its source, where threads have not
    /// ended within `ending_deadline` of the settings.
    pub fn execute<R, F>(self, work: F) -> Result<Vec<R>, ClusterError>
    where
        R: Send + 'static,
        F: Fn(&mut WorkerContext<'_>) -> Result<R, Failure> + Send + Sync + 'static,
    {
        let Self { workers, process, addresses, abort, step_deadline, ending_deadline, network } =
            self;
        let peers: PeerStandings = match &network {
            Some(network) => network.control.peer_standings(),
            None => Box::new(Vec::new),
        };
        let watch = step_deadline.map(|deadline| Watchdog::start(deadline, &abort, peers));
        let watch = watch.transpose().map_err(|error| abort.abort(error));
        let mut patience = Patience { abort: abort.clone(), bound: ending_deadline, until: None };
        let mut ending = None;
        let builders = match network {
            None => local_builders(workers),
            Some(Network { control, data, workers_ended }) => {
                let (builders, guard) = match network_builders(data, process, workers) {
                    Ok(built) => built,
                    Err(error) => {
                        abort.abort(error.clone());
                        control.finish();
                        return Err(abort.first_error().unwrap_or(error));
                    }
                };
                ending = Some(Ending { control, guard, workers_ended });
                builders
            }
        };
        let all = Workers::new(abort.clone(), process, addresses.len().max(1));
        let started =
            execute_from(builders, Box::new(()), WorkerConfig::default(), move |worker| {
                all.run(worker, &work)
            });
        let results = match started {
            Ok(guards) => {
                let joined = patience.wait("cluster:join", move || guards.join());
                joined.unwrap_or_default()
            }
            Err(message) => {
                abort.abort(ClusterError::Workers { message });
                Vec::new()
            }
        };
        if let Some(ending) = ending {
            ending.complete(&abort, &mut patience);
        }
        let left = abort.board().wait_for_all(patience.end());
        drop(watch);
        let mut completed = Vec::with_capacity(workers);
        for result in results {
            match result {
                Ok(Some(result)) => completed.push(result),
                Ok(None) => {}
                // Dropping the worker itself panicked: not a place where our code runs.
                Err(message) => abort.abort(ClusterError::Workers { message }),
            }
        }
        let error = abort.first_error();
        if left.is_empty() {
            return error.map_or(Ok(completed), Err);
        }
        let cause = error.map(Arc::new);
        Err(ClusterError::LeftBehind { left, deadline: ending_deadline, cause })
    }
}

/// How long to wait for work that ends with the run: without end while the run goes on, and for a bounded time after.
struct Patience {
    abort: Abort,
    bound: Duration,
    until: Option<Instant>,
}

impl Patience {
    /// Waits for `work`, which itself waits for something that ends with the run; `None` if that takes too long.
    fn wait<T: Send + 'static>(
        &mut self,
        name: &str,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Option<T> {
        let (sender, done) = mpsc::sync_channel(1);
        let thread = std::thread::Builder::new().name(name.to_string()).spawn(move || {
            // The receiver is gone where the work took too long.
            let _ = sender.send(work());
        });
        if let Err(error) = thread {
            self.abort.abort(ClusterError::spawn(name)(error));
            return None;
        }
        loop {
            if self.abort.is_aborted() {
                self.end();
            }
            let left = self.until.map(|until| until.saturating_duration_since(Instant::now()));
            match done.recv_timeout(left.unwrap_or(LONGEST_PARK).min(LONGEST_PARK)) {
                Ok(answer) => return Some(answer),
                Err(RecvTimeoutError::Timeout) if left.is_none_or(|left| !left.is_zero()) => {}
                Err(_) => return None,
            }
        }
    }

    /// When the waiting ends; it begins to count now if it has not before.
    fn end(&mut self) -> Instant {
        *self.until.get_or_insert_with(|| Instant::now() + self.bound)
    }
}

/// Meets the other processes and runs `work` on every worker of this one:
/// [`Cluster::connect`], then [`Cluster::execute`].
///
/// # Errors
/// The errors of [`Cluster::connect`] and [`Cluster::execute`].
pub fn execute<R, F>(settings: ClusterSettings, work: F) -> Result<Vec<R>, ClusterError>
where
    R: Send + 'static,
    F: Fn(&mut WorkerContext<'_>) -> Result<R, Failure> + Send + Sync + 'static,
{
    Cluster::connect(settings)?.execute(work)
}

/// The work that remains once the workers of this process have ended.
struct Ending {
    control: Control,
    guard: CommsGuard,
    workers_ended: Arc<Latch>,
}

impl Ending {
    fn complete(self, abort: &Abort, patience: &mut Patience) {
        self.workers_ended.open();
        if !abort.is_aborted() {
            self.control.say_goodbye();
        }
        // Joins timely's threads: they end with those of the peers, or when an abort cuts the
        // sockets. Should one of them have panicked, dropping the guard panics.
        let guard = AssertUnwindSafe(self.guard);
        let joined =
            patience.wait("cluster:join", move || catch_unwind(move || drop(guard)).is_ok());
        if joined == Some(false) {
            let message = "a communication thread panicked".to_string();
            abort.abort(ClusterError::Workers { message });
        }
        self.control.finish();
    }
}

fn wrap_sockets(
    links: Vec<Option<DataLink>>,
    settings: &ClusterSettings,
    abort: &Abort,
    control: &Control,
) -> (Vec<DataSocket>, Arc<Latch>) {
    let workers_ended = Arc::<Latch>::default();
    control.cut_on_abort(links.iter().flatten().map(|link| Arc::clone(&link.stream)).collect());
    let mut data = Vec::new();
    for (process, link) in links.into_iter().enumerate() {
        let Some(link) = link else { continue };
        let peer = Peer { process, address: settings.addresses[process].clone() };
        let messages = Messages::new(settings.process, process, settings.workers);
        let received = Received::new(settings.received_limit_bytes);
        let ended = Arc::clone(&workers_ended);
        data.push(DataSocket::new(link, peer, abort.clone(), ended, messages, received));
    }
    (data, workers_ended)
}

fn local_builders(workers: usize) -> Vec<AllocatorBuilder> {
    if workers == 1 {
        return vec![AllocatorBuilder::Thread(ThreadBuilder)];
    }
    let builders = ProcessBuilder::new_typed_vector(workers, Hooks::default().refill, None);
    builders.into_iter().map(AllocatorBuilder::Process).collect()
}

fn network_builders(
    data: Vec<DataSocket>,
    process: usize,
    workers: usize,
) -> Result<(Vec<AllocatorBuilder>, CommsGuard), ClusterError> {
    let hooks = Hooks { refill: counted_memory(), ..Hooks::default() };
    let local = ProcessBuilder::new_typed_vector(workers, hooks.refill.clone(), None);
    let mut sockets: Vec<Option<DataSocket>> = data.into_iter().map(Some).collect();
    sockets.insert(process, None);
    let (builders, guard) =
        initialize_networking_from_sockets(local, sockets, process, workers, hooks)
            .map_err(ClusterError::socket("set up the data connections"))?;
    Ok((builders.into_iter().map(AllocatorBuilder::Tcp).collect(), guard))
}
