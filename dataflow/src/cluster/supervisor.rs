//! Starting the local processes of a cluster, and ending them together.
//!
//! The supervisor runs no workers. It starts the processes, introduces them to each other, keeps a
//! connection to each (their [`Lifeline`](super::Lifeline)), and waits. Processes end each other
//! by themselves when one fails; whoever is left a grace period later, or has stopped sending
//! signs of life, is killed. All of them are gone when [`Supervisor::run`] returns, also on error
//! and on panic; if the supervisor itself is killed, their lifelines tell them.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::io;
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, ExitStatus};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};

use super::acceptor::Acceptor;
use super::error::ClusterError;
use super::exit_class::ExitClass;
use super::frame::{UntilDeadline, read_frame, read_magic, write_frame};
use super::lifeline::{FromChild, Invitation, ToChild};

/// How often the children are looked at when nothing is heard of them.
const TICK: Duration = Duration::from_millis(50);
const GREETING_TIMEOUT: Duration = Duration::from_secs(5);
const WRITE_TIMEOUT: Duration = Duration::from_secs(1);

/// What a supervisor does, and how patient it is.
#[derive(Clone, Debug)]
pub struct SupervisorSettings {
    /// How many processes to start.
    pub processes: usize,
    /// How long they may take to join.
    pub join_deadline: Duration,
    /// How long the others may live on when one has failed.
    pub grace: Duration,
    /// How long a process may give no sign of life before it is killed. Longer than the peer
    /// deadline, so that its peers can say what happened.
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

/// How one process ended.
#[derive(Clone, Copy, Debug)]
pub struct ChildOutcome {
    /// Its status.
    pub status: ExitStatus,
    /// Whether the supervisor killed it.
    pub killed: bool,
}

/// How all processes ended, by index.
#[derive(Clone, Debug)]
pub struct SupervisorOutcome {
    /// One for each process.
    pub children: Vec<ChildOutcome>,
}

impl SupervisorOutcome {
    /// The exit code for all: 0 if all have succeeded; 1 if any returned 1; else 2 if any returned
    /// 2 (a wrong flag); else 75, also for other codes and for signals.
    pub fn exit_code(&self) -> u8 {
        let returned = |code| self.children.iter().any(|child| child.status.code() == Some(code));
        if returned(1) {
            ExitClass::FixInput.exit_code()
        } else if returned(2) {
            2
        } else if self.children.iter().all(|child| child.status.success()) {
            0
        } else {
            ExitClass::Restart.exit_code()
        }
    }
}

/// Asks the processes of a supervisor to stop; from any thread.
#[derive(Clone, Debug)]
pub struct StopHandle {
    events: Sender<Event>,
}

impl StopHandle {
    /// Tells every process to stop at the next opportunity.
    pub fn stop(&self) {
        // A supervisor that has returned has nobody left to tell.
        let _ = self.events.send(Event::Stop);
    }
}

#[derive(Debug)]
enum Event {
    Joined { process: usize, stream: TcpStream, port: u16 },
    Heard { process: usize },
    Failed(ClusterError),
    Stop,
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
        let tokens: Vec<String> = (0..settings.processes).map(|_| token()).collect();
        let mut family = Family::new(settings);
        for (process, token) in tokens.iter().enumerate() {
            let invitation = Invitation { address, token: token.clone() };
            family.start(process, command(process, &invitation))?;
        }
        let tokens: Arc<[String]> = tokens.into();
        let acceptor = Acceptor::start(listener, move |connection| {
            accepted(connection, &tokens, &events);
        })?;
        let outcome = family.watch(&received);
        acceptor.stop();
        outcome
    }
}

/// A secret that other users of this machine cannot guess; from the hasher's random keys.
fn token() -> String {
    let random = || RandomState::new().hash_one(0u8);
    format!("{:016x}{:016x}", random(), random())
}

fn accepted(connection: io::Result<TcpStream>, tokens: &Arc<[String]>, events: &Sender<Event>) {
    // The receiver may be gone: then nothing matters any more.
    let report = |event| drop(events.send(event));
    let stream = match connection {
        Ok(stream) => stream,
        Err(error) => {
            return report(Event::Failed(ClusterError::socket("accept connections")(error)));
        }
    };
    let (tokens, listener) = (Arc::clone(tokens), events.clone());
    let name = "cluster:child";
    let spawned = std::thread::Builder::new().name(name.to_string()).spawn(move || {
        match greet(&stream, &tokens).and_then(|joined| Ok((joined, stream.try_clone()?))) {
            Ok(((process, port), ours)) => {
                drop(listener.send(Event::Joined { process, stream: ours, port }));
                while let Ok(FromChild::Beat) = read_frame(&stream) {
                    drop(listener.send(Event::Heard { process }));
                }
            }
            Err(error) => tracing::debug!(%error, "dropped a caller"),
        }
    });
    if let Err(error) = spawned {
        report(Event::Failed(ClusterError::spawn(name)(error)));
    }
}

fn greet(stream: &TcpStream, tokens: &[String]) -> io::Result<(usize, u16)> {
    let deadline = Instant::now() + GREETING_TIMEOUT;
    stream.set_nodelay(true)?;
    stream.set_write_timeout(Some(WRITE_TIMEOUT))?;
    read_magic(UntilDeadline::new(stream, deadline))?;
    let stranger = || io::Error::new(io::ErrorKind::PermissionDenied, "an unknown token");
    let FromChild::Join { token, port } = read_frame(UntilDeadline::new(stream, deadline))? else {
        return Err(stranger());
    };
    let process = tokens.iter().position(|known| *known == token).ok_or_else(stranger)?;
    stream.set_read_timeout(None)?;
    Ok((process, port))
}

struct Member {
    child: Child,
    outcome: Option<ChildOutcome>,
    killed: bool,
    lifeline: Option<(TcpStream, u16)>,
    heard: Instant,
}

/// The processes; dropping them ends them.
struct Family {
    settings: SupervisorSettings,
    members: Vec<Member>,
    /// Everyone has been told the addresses of all.
    introduced: bool,
    stopping: bool,
    first_failure: Option<Instant>,
}

impl Family {
    fn new(settings: SupervisorSettings) -> Self {
        let members = Vec::new();
        Self { settings, members, introduced: false, stopping: false, first_failure: None }
    }

    fn start(&mut self, process: usize, mut command: Command) -> Result<(), ClusterError> {
        let child = command.spawn().map_err(|source| ClusterError::StartProcess {
            process,
            program: command.get_program().to_string_lossy().into_owned(),
            source: Arc::new(source),
        })?;
        let (outcome, lifeline) = (None, None);
        self.members.push(Member {
            child,
            outcome,
            killed: false,
            lifeline,
            heard: Instant::now(),
        });
        Ok(())
    }

    fn watch(mut self, events: &Receiver<Event>) -> Result<SupervisorOutcome, ClusterError> {
        let join_deadline = Instant::now() + self.settings.join_deadline;
        let mut looked = Instant::now();
        loop {
            match events.recv_timeout(TICK) {
                Ok(Event::Joined { process, stream, port }) => self.joined(process, stream, port),
                Ok(Event::Heard { process }) => self.members[process].heard = Instant::now(),
                Ok(Event::Stop) => self.stop(),
                Ok(Event::Failed(error)) => return Err(error),
                // We hold no sender here: without one there are only the children to look at.
                Err(_) => {}
            }
            let now = Instant::now();
            // Whoever was stopped together with us gets another deadline.
            let overslept = now - looked > self.settings.silence_deadline / 3;
            looked = now;
            self.reap(now)?;
            let finished: Option<Vec<_>> = self.members.iter().map(|child| child.outcome).collect();
            if let Some(children) = finished {
                return Ok(SupervisorOutcome { children });
            }
            self.kill_the_silent(now, overslept)?;
            let incomplete = !self.introduced && self.members.iter().any(|m| m.outcome.is_some());
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
                    self.kill(|_| true)?;
                }
            }
        }
    }

    fn joined(&mut self, process: usize, stream: TcpStream, port: u16) {
        let member = &mut self.members[process];
        if member.lifeline.is_some() || self.first_failure.is_some() {
            let _ = stream.shutdown(Shutdown::Both);
            return;
        }
        member.lifeline = Some((stream, port));
        let ports: Option<Vec<u16>> = self
            .members
            .iter()
            .map(|child| child.lifeline.as_ref().map(|(_, port)| *port))
            .collect();
        let Some(ports) = ports else { return };
        let addresses: Vec<String> =
            ports.into_iter().map(|port| format!("{}:{port}", Ipv4Addr::LOCALHOST)).collect();
        let beat = self.settings.silence_deadline / 5;
        let beat_milliseconds = u64::try_from(beat.as_millis()).unwrap_or(u64::MAX).max(1);
        for (process, member) in self.members.iter_mut().enumerate() {
            let addresses = addresses.clone();
            member.heard = Instant::now();
            member.tell(&ToChild::Assignment { process, addresses, beat_milliseconds });
        }
        self.introduced = true;
        if self.stopping {
            self.stop();
        }
    }

    fn stop(&mut self) {
        self.stopping = true;
        if self.introduced {
            self.members.iter().for_each(|member| member.tell(&ToChild::Stop));
        }
    }

    fn reap(&mut self, now: Instant) -> Result<(), ClusterError> {
        for member in self.members.iter_mut().filter(|member| member.outcome.is_none()) {
            let waited = member.child.try_wait();
            if let Some(status) = waited.map_err(ClusterError::socket("wait for a process"))? {
                member.outcome = Some(ChildOutcome { status, killed: member.killed });
                if !status.success() {
                    self.first_failure.get_or_insert(now);
                }
            }
        }
        Ok(())
    }

    fn kill_the_silent(&mut self, now: Instant, overslept: bool) -> Result<(), ClusterError> {
        if overslept {
            self.members.iter_mut().for_each(|member| member.heard = now);
        }
        let deadline = self.settings.silence_deadline;
        let introduced = self.introduced;
        self.kill(|member| introduced && now - member.heard >= deadline)
    }

    fn kill(&mut self, which: impl Fn(&Member) -> bool) -> Result<(), ClusterError> {
        for member in &mut self.members {
            if member.outcome.is_none() && !member.killed && which(member) {
                member.child.kill().map_err(ClusterError::socket("kill a process"))?;
                member.killed = true;
            }
        }
        Ok(())
    }

    /// Closes every lifeline: the processes that are still waiting to be introduced give up.
    fn hang_up(&mut self) {
        for member in &self.members {
            if let Some((stream, _)) = &member.lifeline {
                let _ = stream.shutdown(Shutdown::Both);
            }
        }
    }
}

impl Member {
    fn tell(&self, message: &ToChild) {
        if let Some((stream, _)) = &self.lifeline {
            // A child that cannot be told is one that has ended: we wait for it anyway.
            let _ = write_frame(stream, message);
        }
    }
}

impl Drop for Family {
    fn drop(&mut self) {
        for member in self.members.iter_mut().filter(|member| member.outcome.is_none()) {
            let _ = member.child.kill();
            let _ = member.child.wait();
        }
        self.hang_up();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt;

    fn exit_code(wait_statuses: &[i32]) -> u8 {
        let children = wait_statuses
            .iter()
            .map(|&raw| ChildOutcome { status: ExitStatus::from_raw(raw), killed: false })
            .collect();
        SupervisorOutcome { children }.exit_code()
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
    }
}
