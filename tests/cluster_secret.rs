//! A cluster over several machines needs a secret, and a stop before its processes have met ends it
//! cleanly.
//!
//! Seen red: without the refusal, and with a stop that is an error of its own.

use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;

use crate::support::processes::wait_until;
use crate::support::{Finished, Running, Workbench, program};

const WAIT_ALONE: [&str; 7] = ["train", "run.toml", "-p", "0", "--hosts", "hosts", "-w"];

/// A process of a cluster that is started with these variables only.
fn alone(bench: &Workbench, environment: &str, arguments: &[&str]) -> Finished {
    let line = format!("unset TIDEMILL_CLUSTER_SECRET; exec env {environment} \"$@\"");
    let arguments = [&WAIT_ALONE[..], &["1"], arguments].concat();
    Running::start_in_shell(bench.folder(), &line, &arguments).finish()
}

#[test]
fn a_cluster_over_machines_without_a_secret_is_refused() {
    let bench = Workbench::new();
    bench.write("hosts", "127.0.0.1:2101\n192.0.2.1:2101\n");
    let needed = ["192.0.2.1", "TIDEMILL_CLUSTER_SECRET", "openssl rand -hex 32", "--insecure"];
    alone(&bench, "", &[]).refused(1, &needed);
    let short = "TIDEMILL_CLUSTER_SECRET=hunter2";
    let refused = alone(&bench, short, &[]).refused(1, &["16 to 4096 bytes", "found 7"]);
    assert!(!refused.stderr.contains("hunter2"), "{refused:?}");

    bench.write("secret", "0123456789abcdef0123456789abcdef\n");
    let mode = |mode| {
        let permissions = std::fs::Permissions::from_mode(mode);
        std::fs::set_permissions(bench.path("secret"), permissions).unwrap();
    };
    let file = "TIDEMILL_CLUSTER_SECRET_FILE=secret";
    mode(0o644);
    alone(&bench, file, &[]).refused(1, &["mode 644", "chmod 600 secret"]);
    let both = format!("{file} TIDEMILL_CLUSTER_SECRET=0123456789abcdef");
    alone(&bench, &both, &[]).refused(1, &["both TIDEMILL_CLUSTER_SECRET and"]);
    // With `--insecure` the cluster starts; its hosts cannot reach each other.
    mode(0o600);
    alone(&bench, file, &[]).refused(1, &["127.0.0.1:2101", "192.0.2.1:2101", "loopback"]);
    assert!(!bench.path("run").exists());
}

#[test]
fn a_cluster_of_one_machine_without_a_secret_is_told_who_can_join() {
    let bench = Workbench::new();
    bench.write("hosts", program::free_hosts(2));
    let deadline = ["--set", "run.connect_deadline_seconds=0.3"];
    let failed = alone(&bench, "", &deadline).failed(75, &["within 0.3 s to process 1"]);
    assert!(
        failed.stderr.contains("note: without TIDEMILL_CLUSTER_SECRET any user of this machine")
    );
}

const STOPPED: &str = "stopped before the first step; the same command goes on\n";

#[test]
fn a_stop_while_a_process_waits_for_its_peers_is_a_clean_end() {
    let bench = Workbench::new();
    let hosts = program::free_hosts(2);
    bench.write("hosts", &hosts);
    for signal in ["INT", "TERM"] {
        let waiting = bench.start(&[&WAIT_ALONE[..], &["1"]].concat());
        let address = hosts.lines().next().unwrap();
        wait_until("the port", || TcpStream::connect(address).is_ok());
        waiting.signal(signal);
        let finished = waiting.finish().expect(0);
        assert_eq!((finished.stdout.as_str(), finished.stderr.as_str()), (STOPPED, ""));
    }
}

/// At any time: before the processes are up, while they join, while they meet, or later.
#[test]
fn a_stop_of_a_supervisor_at_any_moment_is_a_clean_end_said_once() {
    let bench = Workbench::new();
    let endless = ["train", "run.toml", "-n", "2", "-w", "1", "--set", "run.steps=1000000"];
    for delay in [0, 3, 10, 20, 40] {
        let run = bench.start(&endless);
        run.children(2);
        std::thread::park_timeout(std::time::Duration::from_millis(delay));
        run.signal_group("INT");
        let finished = run.finish().expect(0);
        assert_eq!(finished.stdout.matches("stopped ").count(), 1, "{finished:?}");
    }
}
