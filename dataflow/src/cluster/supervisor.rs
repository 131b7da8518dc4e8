//! Starting the local processes of a cluster, and ending them together.
//!
//! The supervisor runs no workers. It starts the processes, introduces them to each other, keeps a
//! connection to each (their [`Lifeline`](super::Lifeline)), and waits. Children end each other
//! by themselves when one fails; a child that is left a grace period later, or has stopped sending
//! signs of life, is killed. All of them are gone when [`Supervisor::run`] returns, also on error
//! and on panic; if the supervisor itself is killed, their lifelines tell them.

use std::io;
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, ExitStatus};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};

use super::acceptor::Acceptor;
use super::channel::{Between, Channel};
use super::error::ClusterError;
use super::exit_class::ExitClass;
use super::greetings::{Greeting, Greetings};
use super::lifeline::{FromChild, Invitation, ToChild};
use super::secret::Secret;

/// How often the children are looked at when nothing is heard of them.
const TICK: Duration = Duration::from_millis(50);
const GREETING_TIMEOUT: Duration = Duration::from_secs(5);
const WRITE_TIMEOUT: Duration = Duration::from_secs(1);
#[cfg(unix)]
const SIGINT: i32 = 2;
#[cfg(unix)]
const SIGTERM: i32 = 15;

/// The tasks of a supervisor, and its deadlines.
#[derive(Clone, Debug)]
pub struct SupervisorSettings {
    /// How many processes to start.
    pub processes: usize,
    /// How long they may take to join.
    pub join_deadline: Duration,
    /// How long the others may live on when one has failed.
    pub grace: Duration,
    /// How long a process may give no sign of life before it is killed. Longer than the peer
    /// deadline, so that its peers can name the failure.
    pub silence_deadline: Duration,
}

impl SupervisorSettings {
    /// The default patience: a minute to join, ten seconds of grace, 45 seconds of silence.
    pub fn new(processes: usize) -> Self {
        Self {
            processes,
            join_deadline: Duration::from_secs(60),
            grace: Duration::from_secs(10),
            silence_deadline: Duration::from_secs(45),
        }
    }
}

/// Why a supervisor killed a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Killed {
    /// It gave no sign of life.
    Silent,
    /// Another had failed, and it did not end within the grace.
    Outlived,
    /// The end of all was asked for: [`StopHandle::end`].
    Asked,
}

/// How one process ended.
#[derive(Clone, Copy, Debug)]
pub struct ChildOutcome {
    /// Its status.
    pub status: ExitStatus,
    /// Why the supervisor killed it, where it did.
    pub killed: Option<Killed>,
}

/// How all processes ended, by index.
#[derive(Clone, Debug)]
pub struct SupervisorOutcome {
    /// One for each process.
    pub children: Vec<ChildOutcome>,
    /// Whether they were asked to stop before all had joined.
    pub stopped_early: bool,
}

impl SupervisorOutcome {
    /// The exit code for all: 0 if all have succeeded; 1 if any returned 1; else 2 if any returned
    /// 2 (a wrong flag); else 75, also for other codes and for signals. The signals that ask to stop
    /// are a success where that was asked for before all had joined.
    pub fn exit_code(&self) -> u8 {
        let returned = |code| self.children.iter().any(|child| child.status.code() == Some(code));
        if returned(1) {
            ExitClass::FixInput.exit_code()
        } else if returned(2) {
            2
        } else if self.children.iter().all(|child| {
            child.status.success() || (self.stopped_early && was_asked_to_stop(child.status))
        }) {
            0
        } else {
            ExitClass::Restart.exit_code()
        }
    }
}

/// Whether a process was ended by Ctrl-C or SIGTERM, before it had a handler for them.
#[cfg(unix)]
fn was_asked_to_stop(status: ExitStatus) -> bool {
    use std::os::unix::process::ExitStatusExt;
    matches!(status.signal(), Some(SIGINT | SIGTERM))
}

#[cfg(not(unix))]
fn was_asked_to_stop(_status: ExitStatus) -> bool {
    false
}

/// Asks the processes of a supervisor to stop; from any thread.
#[derive(Clone, Debug)]
pub struct StopHandle {
    events: Sender<Event>,
}

impl StopHandle {
    /// Tells every process to stop at the next opportunity.
    pub fn stop(&self) {
        // The channel is closed once the supervisor has returned.
        let _ = self.events.send(Event::Stop);
    }

    /// Ends every process at once, also one that stands still or is stopped.
    pub fn end(&self) {
        let _ = self.events.send(Event::End);
    }
}

enum Event {
    Joined { process: usize, lifeline: Arc<Channel>, port: u16 },
    Heard { process: usize },
    Stop,
    End,
}

/// Starts the processes of a local cluster and watches over them.
pub struct Supervisor {
    settings: SupervisorSettings,
    listener: TcpListener,
    address: SocketAddr,
    events: Sender<Event>,
    received: Receiver<Event>,
}

impl Supervisor {
    /// Opens the port at which the processes join. Nothing is started yet.
    ///
    /// # Errors
    /// If there are no processes to start, or no port.
    pub fn new(settings: SupervisorSettings) -> Result<Self, ClusterError> {
        if settings.processes == 0 {
            return Err(ClusterError::Zero { setting: "the number of processes" });
        }
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(|source| {
            ClusterError::Bind { address: "127.0.0.1:0".into(), source: Arc::new(source) }
        })?;
        let address = listener.local_addr().map_err(ClusterError::socket("read our address"))?;
        let (events, received) = mpsc::channel();
        Ok(Self { settings, listener, address, events, received })
    }

    /// A handle that asks all processes to stop.
    pub fn stop_handle(&self) -> StopHandle {
        StopHandle { events: self.events.clone() }
    }

    /// Starts every process with the command that `command` makes from its index and invitation,
    /// and returns when all have ended.
    ///
    /// # Errors
    /// If a process cannot be started. That processes failed is no error but an outcome.
    pub fn run(
        self,
        mut command: impl FnMut(usize, &Invitation) -> Command,
    ) -> Result<SupervisorOutcome, ClusterError> {
        let Self { settings, listener, address, events, received } = self;
        let (secret, processes) = (Secret::generate()?, settings.processes);
        let mut children = Children::new(settings);
        for process in 0..processes {
            let invitation = Invitation { address, process, secret: secret.clone() };
            children.start(process, command(process, &invitation))?;
        }
        let joining = Joining { secret, processes, events };
        let acceptor = Acceptor::start(listener, &Arc::<Greetings>::default(), {
            move |stream, greeting| joining.accepted(stream, greeting)
        })?;
        children.watch(&received, acceptor)
    }
}

/// The state of the threads that greet the processes.
#[derive(Clone)]
struct Joining {
    secret: Secret,
    processes: usize,
    events: Sender<Event>,
}

impl Joining {
    fn report(&self, event: Event) {
        // The receiver may be gone: then nothing matters any more.
        let _ = self.events.send(event);
    }

    /// Greets a process, and listens to it for as long as it lives.
    fn accepted(&self, stream: Arc<TcpStream>, mut greeting: Greeting) {
        let greeted = self.greet(stream, &mut greeting);
        drop(greeting);
        match greeted {
            Ok((process, port, channel)) => {
                let lifeline = Arc::new(channel);
                let ours = Arc::clone(&lifeline);
                self.report(Event::Joined { process, lifeline: ours, port });
                while let Ok(FromChild::Beat) = lifeline.receive() {
                    self.report(Event::Heard { process });
                }
            }
            Err(error) => tracing::debug!(%error, "dropped a caller"),
        }
    }

    fn greet(
        &self,
        stream: Arc<TcpStream>,
        greeting: &mut Greeting,
    ) -> io::Result<(usize, u16, Channel)> {
        let deadline = Instant::now() + GREETING_TIMEOUT;
        stream.set_nodelay(true)?;
        stream.set_write_timeout(Some(WRITE_TIMEOUT))?;
        let between = Between::ChildAndSupervisor;
        let channel = Channel::answer(stream, &self.secret, between, deadline)?;
        match channel.receive_until(deadline)? {
            FromChild::Join { process, port } if process < self.processes => {
                greeting.known();
                channel.stream().set_read_timeout(None)?;
                Ok((process, port, channel))
            }
            _ => Err(io::Error::new(io::ErrorKind::InvalidData, "it does not join")),
        }
    }
}

struct Process {
    handle: Child,
    outcome: Option<ChildOutcome>,
    killed: Option<Killed>,
    lifeline: Option<(Arc<Channel>, u16)>,
    heard: Instant,
}

/// The processes; dropping them ends them.
struct Children {
    settings: SupervisorSettings,
    all: Vec<Process>,
    /// Every process has been sent the addresses of all.
    introduced: bool,
    stopping: bool,
    first_failure: Option<Instant>,
}

impl Children {
    fn new(settings: SupervisorSettings) -> Self {
        let all = Vec::new();
        Self { settings, all, introduced: false, stopping: false, first_failure: None }
    }

    fn start(&mut self, process: usize, mut command: Command) -> Result<(), ClusterError> {
        let handle = command.spawn().map_err(|source| ClusterError::StartProcess {
            process,
            program: command.get_program().to_string_lossy().into_owned(),
            source: Arc::new(source),
        })?;
        let (outcome, lifeline) = (None, None);
        self.all.push(Process { handle, outcome, killed: None, lifeline, heard: Instant::now() });
        Ok(())
    }

    /// Returns when all processes have ended. The port is open until all have joined.
    fn watch(
        mut self,
        events: &Receiver<Event>,
        acceptor: Acceptor,
    ) -> Result<SupervisorOutcome, ClusterError> {
        let mut open = Some(acceptor);
        let outcome = self.watch_until_all_ended(events, &mut open);
        open.into_iter().for_each(Acceptor::stop);
        outcome
    }

    fn watch_until_all_ended(
        &mut self,
        events: &Receiver<Event>,
        open: &mut Option<Acceptor>,
    ) -> Result<SupervisorOutcome, ClusterError> {
        let join_deadline = Instant::now() + self.settings.join_deadline;
        let mut looked = Instant::now();
        loop {
            match events.recv_timeout(TICK) {
                Ok(Event::Joined { process, lifeline, port }) => {
                    self.joined(process, lifeline, port);
                    if self.introduced {
                        open.take().into_iter().for_each(Acceptor::stop);
                    }
                }
                Ok(Event::Heard { process }) => self.all[process].heard = Instant::now(),
                Ok(Event::Stop) => self.stop(),
                Ok(Event::End) => self.kill(Killed::Asked, |_| true)?,
                // Without a sender there are only the children to look at.
                Err(_) => {}
            }
            let now = Instant::now();
            // A process that was stopped together with this one gets another deadline.
            let overslept = now - looked > self.settings.silence_deadline / 3;
            looked = now;
            self.reap(now)?;
            let finished: Option<Vec<_>> = self.all.iter().map(|child| child.outcome).collect();
            if let Some(children) = finished {
                return Ok(SupervisorOutcome { children, stopped_early: self.stopped_early() });
            }
            self.kill_silent_processes(now, overslept)?;
            let incomplete = !self.introduced
                && !self.stopping
                && self.all.iter().any(|child| child.outcome.is_some());
            if self.first_failure.is_none()
                && (incomplete || (!self.introduced && now >= join_deadline))
            {
                self.first_failure = Some(now);
            }
            if let Some(failure) = self.first_failure {
                if !self.introduced {
                    self.hang_up();
                }
                if now - failure >= self.settings.grace {
                    self.kill(Killed::Outlived, |_| true)?;
                }
            }
        }
    }

    /// Whether the processes were asked to stop before they could begin.
    fn stopped_early(&self) -> bool {
        self.stopping && !self.introduced
    }

    fn joined(&mut self, process: usize, lifeline: Arc<Channel>, port: u16) {
        let stopping = self.stopped_early();
        let child = &mut self.all[process];
        if child.lifeline.is_some() || self.first_failure.is_some() {
            lifeline.shutdown(Shutdown::Both);
            return;
        }
        child.lifeline = Some((lifeline, port));
        if stopping {
            child.tell(&ToChild::Stop);
            return;
        }
        let ports: Option<Vec<u16>> =
            self.all.iter().map(|child| child.lifeline.as_ref().map(|(_, port)| *port)).collect();
        let Some(ports) = ports else { return };
        let addresses: Vec<String> =
            ports.into_iter().map(|port| format!("{}:{port}", Ipv4Addr::LOCALHOST)).collect();
        let beat = self.settings.silence_deadline / 5;
        let beat_milliseconds = u64::try_from(beat.as_millis()).unwrap_or(u64::MAX).max(1);
        for child in &mut self.all {
            let addresses = addresses.clone();
            child.heard = Instant::now();
            child.tell(&ToChild::Assignment { addresses, beat_milliseconds });
        }
        self.introduced = true;
    }

    fn stop(&mut self) {
        self.stopping = true;
        self.all.iter().for_each(|child| child.tell(&ToChild::Stop));
    }

    fn reap(&mut self, now: Instant) -> Result<(), ClusterError> {
        let mut ended = Vec::new();
        for (process, child) in self.all.iter_mut().enumerate() {
            if child.outcome.is_some() {
                continue;
            }
            let waited = child.handle.try_wait();
            if let Some(status) = waited.map_err(ClusterError::socket("wait for a process"))? {
                child.outcome = Some(ChildOutcome { status, killed: child.killed });
                ended.push((process, status));
            }
        }
        for (process, status) in ended.into_iter().filter(|(_, status)| !status.success()) {
            if !self.introduced && was_asked_to_stop(status) {
                // The signal came before the process had a handler for it; it was meant for all processes.
                self.stop();
                continue;
            }
            self.first_failure.get_or_insert(now);
            self.all.iter().for_each(|child| child.tell(&ToChild::Ended { process }));
        }
        Ok(())
    }

    fn kill_silent_processes(&mut self, now: Instant, overslept: bool) -> Result<(), ClusterError> {
        if overslept {
            self.all.iter_mut().for_each(|child| child.heard = now);
        }
        let deadline = self.settings.silence_deadline;
        let introduced = self.introduced;
        self.kill(Killed::Silent, |child| introduced && now - child.heard >= deadline)
    }

    fn kill(&mut self, why: Killed, which: impl Fn(&Process) -> bool) -> Result<(), ClusterError> {
        for child in &mut self.all {
            if child.outcome.is_none() && child.killed.is_none() && which(child) {
                child.handle.kill().map_err(ClusterError::socket("kill a process"))?;
                child.killed = Some(why);
            }
        }
        Ok(())
    }

    /// Closes every lifeline: the processes that are still waiting to be introduced give up.
    fn hang_up(&mut self) {
        for child in &self.all {
            if let Some((lifeline, _)) = &child.lifeline {
                lifeline.shutdown(Shutdown::Both);
            }
        }
    }
}

impl Process {
    fn tell(&self, message: &ToChild) {
        if let Some((lifeline, _)) = &self.lifeline {
            // A failed write means that the child has ended, which `reap` notices.
            let _ = lifeline.send(message);
        }
    }
}

impl Drop for Children {
    fn drop(&mut self) {
        for child in self.all.iter_mut().filter(|child| child.outcome.is_none()) {
            let _ = child.handle.kill();
            let _ = child.handle.wait();
        }
        self.hang_up();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt;

    fn exit_code(wait_statuses: &[i32]) -> u8 {
        outcome(wait_statuses).exit_code()
    }

    fn outcome(wait_statuses: &[i32]) -> SupervisorOutcome {
        let children = wait_statuses
            .iter()
            .map(|&raw| ChildOutcome { status: ExitStatus::from_raw(raw), killed: None })
            .collect();
        SupervisorOutcome { children, stopped_early: false }
    }

    #[test]
    fn the_input_s_fault_comes_before_everything_else() {
        let (ok, input, flags, restart, signal) = (0, 1 << 8, 2 << 8, 75 << 8, 9);
        assert_eq!(exit_code(&[ok, ok]), 0);
        assert_eq!(exit_code(&[restart, input, signal]), 1);
        assert_eq!(exit_code(&[restart, flags]), 2);
        assert_eq!(exit_code(&[ok, signal]), 75);
        assert_eq!(exit_code(&[restart, ok]), 75);
        assert_eq!(exit_code(&[101 << 8, ok]), 75);
        assert_eq!(exit_code(&[SIGINT, SIGTERM, ok]), 75);
        for (statuses, expected) in [([SIGINT, SIGTERM, ok], 0), ([signal, SIGINT, ok], 75)] {
            let stopped = SupervisorOutcome { stopped_early: true, ..outcome(&statuses) };
            assert_eq!(stopped.exit_code(), expected);
        }
    }
}
