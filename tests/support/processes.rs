//! Processes seen from outside: their parents, their ends, and signals.

use std::process::Command;
use std::time::{Duration, Instant};

use super::program::DEADLINE;

/// Waits for an event in another thread or process.
#[track_caller]
pub fn wait_until(what: &str, mut happened: impl FnMut() -> bool) {
    let started = Instant::now();
    while !happened() {
        assert!(started.elapsed() < DEADLINE, "waited in vain for {what}");
        std::thread::park_timeout(Duration::from_millis(1));
    }
}

/// Sends a signal to a process, or to a group where `target` is negative.
pub fn signal(signal: &str, target: &str) {
    // The shell's own kill, as a program of that name may be missing. The process may have ended
    // before.
    let line = format!("kill -s {signal} -- {target}");
    let _ = Command::new("sh").args(["-c", &line]).stderr(std::process::Stdio::null()).status();
}

/// The state letter and the parent of a process; `None` if it does not exist.
fn state(pid: u32) -> Option<(char, u32)> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // pid (name) state parent ...: the name may contain any character.
    let mut words = text.rsplit_once(") ")?.1.split(' ');
    Some((words.next()?.chars().next()?, words.next()?.parse().ok()?))
}

/// The live children of `parent`, in the order of their start.
pub fn children(parent: u32) -> Vec<u32> {
    let listing = std::fs::read_dir("/proc").expect("these tests read /proc");
    let mut pids: Vec<u32> = listing
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter(|&pid| state(pid).is_some_and(|(letter, of)| of == parent && letter != 'Z'))
        .collect();
    pids.sort_unstable();
    pids
}

/// Whether a process has ended, reaped or not.
pub fn is_gone(pid: u32) -> bool {
    state(pid).is_none_or(|(letter, _)| letter == 'Z' || letter == 'X')
}
