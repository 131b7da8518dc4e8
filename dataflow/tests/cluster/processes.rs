//! Processes that are killed or stopped. This executable starts itself for each of them.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStderr, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::Duration;

use tidemill::cluster::progress::{self, Phase};
use tidemill::cluster::{Cluster, ClusterSettings, execute};
use timely::dataflow::operators::vec::Map;
use timely::dataflow::operators::{Exchange, Inspect, ToStream};

use crate::ring::{SOON, ring};
use crate::supervisor;

/// Which part a started process plays; this variable is set for it alone.
pub const ROLE: &str = "TIDEMILL_TEST_ROLE";

/// The entry of started processes: it ends the process. In the test run itself it has no role.
#[test]
fn child_entry() {
    match std::env::var(ROLE).as_deref() {
        Err(_) => {}
        Ok("ring" | "flood" | "breathes") => member(),
        Ok("supervisor") => supervisor::supervising_child(),
        Ok(role) => supervisor::supervised_child(role),
    }
}

/// A command that runs [`child_entry`] of this executable in a role.
pub fn command(role: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "processes::child_entry", "--nocapture"]).env(ROLE, role);
    command
}

/// As [`command`], with at most this many descriptors.
pub fn limited(role: &str, descriptors: usize) -> Command {
    let command = command(role);
    let mut shell = Command::new("sh");
    shell.args(["-c", &format!("ulimit -n {descriptors}; exec \"$0\" \"$@\"")]);
    shell.arg(command.get_program()).args(command.get_args());
    shell.envs(command.get_envs().filter_map(|(key, value)| Some((key, value?))));
    shell
}

/// Opens a port, prints it, reads everyone's, runs, prints the error, and exits.
fn member() -> ! {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    println!("port {}", listener.local_addr().unwrap());
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    let mut words = line.split_whitespace();
    let mut number = || words.next().unwrap().parse::<u64>().unwrap();
    let (process, threads, deadline) = (number(), number(), number());
    let addresses = words.map(str::to_string).collect();
    let mut settings = ClusterSettings::process(threads as usize, process as usize, addresses);
    settings.listener = Some(listener);
    settings.peer_deadline = Duration::from_millis(deadline);
    let role = std::env::var(ROLE).unwrap();
    if role == "breathes" {
        let _joined = Cluster::connect(settings).unwrap();
        // Until it is killed.
        loop {
            std::thread::park();
        }
    }
    let flood = role == "flood";
    // The ring says that it moves; a flood has no steps.
    settings.step_deadline = (!flood).then_some(2 * settings.peer_deadline);
    let result = execute(settings, move |context| {
        if flood {
            let (index, peers) = (context.index() as u64, context.peers() as u64);
            let mut seen = 0u64;
            context.dataflow::<u64, _, _>(|scope| {
                (0..u64::MAX / 100)
                    .to_stream(scope)
                    .container::<Vec<_>>()
                    .map(move |number| number * peers + (index + 1) % peers)
                    .exchange(|number: &u64| *number)
                    .inspect(move |_| {
                        seen += 1;
                        if seen == 100_000 {
                            println!("\nat work");
                        }
                    });
            });
        } else {
            let peers = context.peers() as u64;
            progress::enter(Phase::WaitingForSums, 1);
            ring(context, move |token| {
                progress::moved();
                if token / peers == 5 {
                    println!("\nat work");
                }
            });
        }
        Ok(context.run_until_done()?)
    });
    let error = result.unwrap_err();
    println!("\nended: {}", error.with_causes());
    std::process::exit(error.exit_class().exit_code().into());
}

/// A started process; killed when dropped.
pub struct TestProcess {
    child: Child,
    pub stdin: ChildStdin,
    lines: Receiver<String>,
    stderr: Option<ChildStderr>,
}

impl TestProcess {
    pub fn start(role: &str) -> Self {
        Self::of(command(role))
    }

    pub fn of(mut command: Command) -> Self {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("start ourselves");
        let stderr = child.stderr.take();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        let (sender, lines) = mpsc::channel();
        std::thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                let _ = sender.send(line);
            }
        });
        Self { stdin: child.stdin.take().unwrap(), child, lines, stderr }
    }

    /// Tells it its place in the cluster.
    pub fn begin(&mut self, process: usize, threads: usize, deadline: Duration, all: &[String]) {
        let deadline = deadline.as_millis();
        let line = format!("{process} {threads} {deadline} {}\n", all.join(" "));
        self.stdin.write_all(line.as_bytes()).unwrap();
    }

    /// The rest of the next line that begins with `prefix`.
    pub fn line(&self, prefix: &str) -> String {
        loop {
            let line = self.lines.recv_timeout(SOON).unwrap_or_else(|_| panic!("no {prefix:?}"));
            if let Some(rest) = line.strip_prefix(prefix) {
                return rest.trim().to_string();
            }
        }
    }

    fn signal(&self, signal: &str) {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args([signal, &pid]).status().unwrap().success());
    }

    /// Its last words and its exit code. Nothing in it may have panicked: a peer's death is an
    /// error like any other.
    fn end(&mut self) -> (String, Option<i32>) {
        let words = self.line("ended: ");
        let mut errors = String::new();
        self.stderr.take().unwrap().read_to_string(&mut errors).unwrap();
        assert!(!errors.contains("panicked"), "{errors}");
        (words, self.child.wait().unwrap().code())
    }
}

impl Drop for TestProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Starts a cluster and waits until its workers are at work.
fn start(role: &str, processes: usize, threads: usize, deadline: Duration) -> Vec<TestProcess> {
    let mut members: Vec<TestProcess> = (0..processes).map(|_| TestProcess::start(role)).collect();
    let addresses: Vec<String> = members.iter().map(|member| member.line("port ")).collect();
    for (process, member) in members.iter_mut().enumerate() {
        member.begin(process, threads, deadline, &addresses);
    }
    for member in &members {
        member.line("at work");
    }
    members
}

#[test]
fn a_killed_process_is_named_by_the_survivors() {
    let mut members = start("ring", 3, 2, Duration::from_secs(30));
    members[2].signal("-KILL");
    for member in &mut members[..2] {
        let (words, code) = member.end();
        assert!(words.contains("process 2 (127.0.0.1:"), "{words}");
        assert!(words.ends_with("ended unexpectedly"), "{words}");
        assert_eq!(code, Some(75));
    }
}

/// As above, while the connections are full: no survivor may be torn down by a second panic.
#[test]
fn a_process_killed_under_heavy_traffic_is_named_too() {
    let mut members = start("flood", 2, 1, Duration::from_secs(30));
    members[0].signal("-KILL");
    let (words, code) = members[1].end();
    assert!(words.contains("process 0 (") && words.ends_with("ended unexpectedly"), "{words}");
    assert_eq!(code, Some(75));
}

#[test]
fn a_stopped_process_is_noticed_at_the_deadline() {
    let mut members = start("ring", 3, 1, Duration::from_secs(1));
    members[1].signal("-STOP");
    for survivor in [0, 2] {
        let (words, code) = members[survivor].end();
        assert!(words.contains("process 1 ("), "{words}");
        assert!(words.ends_with("has been silent for 1 s"), "{words}");
        assert_eq!(code, Some(75));
    }
    // When it goes on it learns what the others have decided.
    members[1].signal("-CONT");
    let (words, code) = members[1].end();
    assert!(words.contains("process 1 (") && words.ends_with("silent for 1 s"), "{words}");
    assert_eq!(code, Some(75));
}

/// A terminal stops and continues all processes together: none of them is reported as silent.
#[test]
fn a_cluster_survives_being_stopped_as_a_whole() {
    let members = start("ring", 2, 1, Duration::from_millis(500));
    members.iter().for_each(|member| member.signal("-STOP"));
    assert!(members[0].lines.recv_timeout(Duration::from_millis(1200)).is_err());
    members.iter().for_each(|member| member.signal("-CONT"));
    // Twice the deadline passes without a word.
    let next = members[0].lines.recv_timeout(Duration::from_millis(1200));
    assert_eq!(next, Err(mpsc::RecvTimeoutError::Timeout));
}
