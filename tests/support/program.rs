//! The program, started as a user starts it.

use std::ffi::OsString;
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::device::{backend, with_device};
use super::processes::{self, is_gone, wait_until};

/// Longer than any step of a test, also on a busy machine.
pub const DEADLINE: Duration = Duration::from_secs(600);

/// The secret of a test's cluster.
const SECRET: (&str, &str) = ("TIDEMILL_CLUSTER_SECRET", "known to these tests alone");

/// Names another program to test.
const PROGRAM_VARIABLE: &str = "TIDEMILL_PROGRAM";

/// The program of the build that these tests belong to.
pub fn program() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| match std::env::var_os(PROGRAM_VARIABLE) {
        // A relative path would be wrong in the folders in which tests start the program.
        Some(path) => std::path::absolute(path).expect("a path from here"),
        None => built_program(),
    })
}

/// `cargo test --workspace` has built it; if only these tests were built, or sources are newer,
/// cargo builds it now.
fn built_program() -> PathBuf {
    // target/<profile>/deps/promises-<hash>
    let tests = std::env::current_exe().unwrap();
    let profile_folder = tests.ancestors().nth(2).unwrap();
    let program = profile_folder.join("tidemill").with_extension(std::env::consts::EXE_EXTENSION);
    if is_current(&program) {
        return program;
    }
    let profile = match profile_folder.file_name().and_then(|name| name.to_str()) {
        Some("debug") | None => "dev",
        Some(name) => name,
    };
    let built = Command::new(env!("CARGO"))
        .args(["build", "--quiet", "--package", "tidemill", "--bin", "tidemill"])
        .args(["--profile", profile])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .status();
    assert!(built.expect("start cargo").success(), "building the program failed");
    assert!(program.exists(), "no program at {}", program.display());
    program
}

/// The crates of the program.
const CRATES: [&str; 7] =
    ["collective", "dataflow", "evaluation", "files", "kernels", "model", "streaming-data"];

/// Whether all sources of the program are older than it. (Cargo's own list of these files may be
/// absent: it is left out if cargo cannot tell what the build script of a dependency read.)
fn is_current(program: &Path) -> bool {
    let modified = |path: &Path| std::fs::metadata(path).and_then(|metadata| metadata.modified());
    let Ok(built) = modified(program) else { return false };
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut paths = vec![workspace.join("Cargo.lock")];
    for name in CRATES {
        let folder = workspace.join(name);
        paths.extend([folder.join("Cargo.toml"), folder.join("src")]);
        paths.extend(["gpu", "suites", "tasks"].map(|files| folder.join(files)));
    }
    while let Some(path) = paths.pop() {
        match std::fs::read_dir(&path) {
            Ok(entries) => paths.extend(entries.flatten().map(|entry| entry.path())),
            // Not a folder, or not one of this crate.
            Err(_) if path.exists() => match modified(&path) {
                Ok(modified) if modified <= built => {}
                _ => return false,
            },
            Err(_) => {}
        }
    }
    true
}

/// A running program, alone in a process group; the drop kills the whole group.
pub struct Running {
    child: Child,
    arguments: String,
    stdout: Option<JoinHandle<String>>,
    stderr: Option<JoinHandle<String>>,
}

/// A program that has ended.
#[derive(Debug)]
pub struct Finished {
    pub arguments: String,
    pub status: ExitStatus,
    pub stdout: String,
    pub stderr: String,
}

impl Running {
    /// Starts the program in `folder`.
    pub fn start(folder: &Path, arguments: &[&str]) -> Self {
        Self::start_into(Stdio::piped(), folder, arguments)
    }

    /// Starts the program in `folder` with these variables in its environment.
    pub fn start_with(environment: &[(String, String)], folder: &Path, arguments: &[&str]) -> Self {
        let mut command = Command::new(program());
        command.args(with_device(arguments)).envs(environment.iter().cloned());
        Self::spawn(folder, command, Stdio::piped())
    }

    /// Starts the program through a line of shell, in which it is `"$@"`.
    pub fn start_in_shell(folder: &Path, line: &str, arguments: &[&str]) -> Self {
        let mut command = Command::new("sh");
        command.args(["-c", line, "sh"]).arg(program()).args(with_device(arguments));
        Self::spawn(folder, command, Stdio::piped())
    }

    /// Starts the program with its standard output redirected.
    pub fn start_into(stdout: Stdio, folder: &Path, arguments: &[&str]) -> Self {
        let mut command = Command::new(program());
        command.args(with_device(arguments));
        Self::spawn(folder, command, stdout)
    }

    fn spawn(folder: &Path, mut command: Command, stdout: Stdio) -> Self {
        let words: Vec<OsString> = command.get_args().map(OsString::from).collect();
        command.current_dir(folder).env_remove("TIDEMILL_LOG").process_group(0);
        command.env(SECRET.0, SECRET.1);
        command.stdin(Stdio::null()).stdout(stdout).stderr(Stdio::piped());
        let mut child = command.spawn().expect("start the program");
        Self {
            arguments: words.join(" ".as_ref()).to_string_lossy().into_owned(),
            stdout: child.stdout.take().map(read_to_end),
            stderr: child.stderr.take().map(read_to_end),
            child,
        }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The child processes of the program, once there are `count`.
    pub fn children(&self, count: usize) -> Vec<u32> {
        let mut children = Vec::new();
        wait_until("the processes to start", || {
            children = processes::children(self.pid());
            children.len() == count
        });
        children
    }

    /// Sends a signal to the process alone.
    pub fn signal(&self, signal: &str) {
        processes::signal(signal, &self.pid().to_string());
    }

    /// Sends a signal to the process and then to its group, as `timeout` does.
    pub fn signal_as_timeout_does(&self, signal: &str) {
        processes::signal(signal, &format!("{0} -{0}", self.pid()));
    }

    /// Sends a signal again and again, until the process ends; returns its output.
    pub fn signal_until_it_ends(self, signal: &str) -> Finished {
        wait_until("the process to end", || {
            self.signal(signal);
            is_gone(self.pid())
        });
        self.finish()
    }

    /// Sends a signal to the process and all its children, as a terminal does.
    pub fn signal_group(&self, signal: &str) {
        processes::signal(signal, &format!("-{}", self.pid()));
    }

    pub fn has_ended(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }

    /// Waits until it ends.
    pub fn finish(self) -> Finished {
        self.finish_within(DEADLINE)
    }

    /// Waits until it ends and its pipes are closed, which other processes may hold; fails when `deadline` is over.
    pub fn finish_within(mut self, deadline: Duration) -> Finished {
        let started = Instant::now();
        let status = loop {
            let ended = self.child.try_wait().unwrap();
            let mut pipes = self.stdout.iter().chain(&self.stderr);
            match ended {
                Some(status) if pipes.all(JoinHandle::is_finished) => break status,
                _ if started.elapsed() > deadline => {
                    processes::signal("KILL", &format!("-{}", self.pid()));
                    panic!("{}: not over within {deadline:?}, ended: {ended:?}", self.arguments);
                }
                _ => std::thread::park_timeout(Duration::from_millis(2)),
            }
        };
        let text = |thread: Option<JoinHandle<String>>| {
            thread.map_or_else(String::new, |thread| thread.join().unwrap())
        };
        let (stdout, stderr) = (text(self.stdout.take()), text(self.stderr.take()));
        let arguments = std::mem::take(&mut self.arguments);
        assert!(!stderr.contains("panicked"), "{arguments}: {stderr}");
        Finished { arguments, status, stdout, stderr }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if self.child.try_wait().is_ok_and(|status| status.is_none()) {
            processes::signal("KILL", &format!("-{}", self.pid()));
            let _ = self.child.wait();
        }
    }
}

fn read_to_end(mut pipe: impl Read + Send + 'static) -> JoinHandle<String> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = pipe.read_to_end(&mut bytes);
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

impl Finished {
    /// Fails unless it ended with exit code `code`.
    #[track_caller]
    pub fn expect(self, code: i32) -> Self {
        let Self { arguments, status, stdout, stderr } = &self;
        assert_eq!(status.code(), Some(code), "{arguments}: {status}\n{stdout}\n{stderr}");
        self
    }

    /// Fails unless the program refused its input: exit code `code`, one line on standard error
    /// that contains every one of `parts`, and an empty standard output.
    #[track_caller]
    pub fn refused(self, code: i32, parts: &[&str]) -> Self {
        let refused = self.expect(code);
        let Self { arguments, stdout, stderr, .. } = &refused;
        assert_eq!(stdout, "", "{arguments}");
        assert_eq!(stderr.matches('\n').count(), 1, "{arguments}: one line, not {stderr:?}");
        for part in parts {
            assert!(stderr.contains(part), "{arguments}: {part:?} is not in {stderr:?}");
        }
        refused
    }

    /// Fails unless the program ended with `code` after it had begun: any progress on standard
    /// error, then one line (one of each process, if several met the same error at once) that
    /// contains every one of `parts`, and an empty standard output.
    #[track_caller]
    pub fn failed(self, code: i32, parts: &[&str]) -> Self {
        let failed = self.expect(code);
        let Self { arguments, stdout, stderr, .. } = &failed;
        assert_eq!(stdout, "", "{arguments}");
        let is_progress = |line: &&str| {
            let starts = ["starting: ", "resuming after step ", "note: ", "step "];
            starts.iter().any(|start| line.starts_with(start)) || is_of_shared_gpu(line)
        };
        let rest: Vec<&str> = stderr.lines().skip_while(is_progress).collect();
        let most = if arguments.contains("-n 2") { 2 } else { 1 };
        assert!((1..=most).contains(&rest.len()), "{arguments}: one line, not {stderr:?}");
        for line in rest {
            let said = line.strip_prefix("tidemill: ").unwrap_or_default();
            for part in parts {
                assert!(said.contains(part), "{arguments}: {part:?} is not in {stderr:?}");
            }
        }
        failed
    }

    /// The JSON that standard output consists of.
    #[track_caller]
    pub fn json(&self) -> serde_json::Value {
        let parsed = serde_json::from_str(&self.stdout);
        parsed.unwrap_or_else(|error| panic!("{}: {error}: {:?}", self.arguments, self.stdout))
    }
}

/// Whether a line of standard error reports that processes share a GPU, which these tests do on a
/// machine with one.
pub fn is_of_shared_gpu(line: &str) -> bool {
    line.contains("workers 0 and 1 share a GPU") && backend() != "cpu"
}

/// The lines of a hosts file: addresses of this machine that had no listener a moment ago.
pub fn free_hosts(processes: usize) -> String {
    let listeners: Vec<_> =
        (0..processes).map(|_| std::net::TcpListener::bind("127.0.0.1:0").unwrap()).collect();
    listeners.iter().map(|listener| format!("{}\n", listener.local_addr().unwrap())).collect()
}
