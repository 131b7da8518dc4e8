//! Kills, signals and resumes at other world sizes change no bit, and nothing has to be cleaned in between.
//!
//! Moments are drawn with a fixed seed; the state of the processes at that moment varies.
//!
//! Seen red: with lines of metrics that are not dropped past the checkpoint, with moments that are not restored, and
//! with a checkpoint that is written in its final place.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::sync::LazyLock;

use crate::families::{table, with_model};
use crate::support::killed::goes_on_where_it_was_killed;
use crate::support::processes::{is_gone, signal, wait_until};
use crate::support::program::program;
use crate::support::workbench::random;
use crate::support::{Outcome, Running, Workbench, assert_same};

const STEPS: u64 = 60;

struct Long {
    bench: Workbench,
    reference: Outcome,
}

/// A run of some length, and its files when it is not disturbed.
static LONG: LazyLock<Long> = LazyLock::new(|| {
    let bench = Workbench::new();
    let config = crate::support::workbench::config()
        .replace("steps = 5", &format!("steps = {STEPS}\npeer_deadline_seconds = 20"))
        .replace("every_steps = 2", "every_steps = 7");
    bench.write("run.toml", config);
    bench.tidemill(&["train", "run.toml", "-w", "1", "--set", "run.dir=reference"]).expect(0);
    let reference = bench.outcome("reference");
    assert_eq!(reference.checkpoint_steps(), [49, 56, 60]);
    Long { bench, reference }
});

impl Long {
    fn start(&self, dir: &str, world: &[&str]) -> Running {
        let run_dir = format!("run.dir={dir}");
        let arguments = [&["train", "run.toml", "--set", &run_dir], world].concat();
        self.bench.start(&arguments)
    }

    /// Complete lines of metrics.
    fn lines(&self, dir: &str) -> u64 {
        let text = std::fs::read(self.bench.path(dir).join("metrics.jsonl")).unwrap_or_default();
        text.iter().filter(|&&byte| byte == b'\n').count() as u64
    }

    /// Waits until the run has done `steps` more steps than at its start.
    fn wait_for_steps(&self, run: &mut Running, dir: &str, steps: u64) {
        let resumed_at = self.lines(dir);
        // A resumed run first drops lines past its checkpoint.
        let mut fewest = resumed_at;
        wait_until("steps", || {
            let lines = self.lines(dir);
            fewest = fewest.min(lines);
            run.has_ended() || lines >= fewest + steps || lines > resumed_at + steps
        });
        assert!(!run.has_ended(), "{dir}: it ended before it was disturbed");
    }

    fn finish(&self, dir: &str, world: &[&str]) {
        let finished = self.start(dir, world).finish().expect(0);
        assert!(finished.stdout.starts_with("done: 60 steps"), "{finished:?}");
        assert_same(&self.bench.outcome(dir), &self.reference, dir);
    }
}

/// Kills the supervisor of `-n` processes, one of its children, or a single process, each time with
/// another world.
#[test]
fn kills_at_random_moments_change_nothing() {
    let dir = "killed";
    let worlds: [(&[&str], Option<usize>); 5] = [
        (&["-n", "2", "-w", "1"], Some(1)),
        (&["-n", "3", "-w", "2"], None),
        (&["-w", "3"], None),
        (&["-n", "2", "-w", "2"], Some(0)),
        (&["-w", "8"], None),
    ];
    for (round, (world, victim)) in worlds.into_iter().enumerate() {
        let mut run = LONG.start(dir, world);
        let processes = if world[0] == "-n" { world[1].parse().unwrap() } else { 0 };
        let children = run.children(processes);
        LONG.wait_for_steps(&mut run, dir, 1 + random(round as u64) % 9);
        match victim {
            Some(victim) => {
                signal("KILL", &children[victim].to_string());
                let finished = run.finish().expect(75);
                assert!(finished.stderr.contains("ended"), "{finished:?}");
            }
            None => {
                run.signal("KILL");
                assert_eq!(run.finish().status.code(), None);
            }
        }
        wait_until("the processes to end", || children.iter().all(|&child| is_gone(child)));
    }
    LONG.finish(dir, &["-n", "2", "-w", "1"]);
}

/// Kills while a checkpoint is being written, in whatever state it is by then.
#[test]
fn kills_while_a_checkpoint_is_written_change_nothing() {
    torn("torn", &[(&["-w", "1"], None), (&["-w", "3"], None), (&["-w", "2"], None)]);
}

/// The same for each of two processes that write it together, and for both.
#[test]
fn kills_of_any_that_write_a_checkpoint_change_nothing() {
    const TWO: &[&str] = &["-n", "2", "-w", "1"];
    torn("torn-by-two", &[(TWO, Some(0)), (TWO, Some(1)), (TWO, None)]);
}

/// Runs in these worlds in turn, each killed as a whole or in one of its processes, until three
/// have left a checkpoint half written.
fn torn(dir: &str, worlds: &[(&[&str], Option<usize>)]) {
    let checkpoints = LONG.bench.path(dir).join("checkpoints");
    let names = || -> BTreeSet<OsString> {
        let entries = std::fs::read_dir(&checkpoints).into_iter().flatten();
        entries.map(|entry| entry.unwrap().file_name()).collect()
    };
    let mut torn = 0;
    for (world, victim) in worlds.iter().cycle() {
        let every = ["--set", "checkpoint.every_steps=1"];
        let mut run = LONG.start(dir, &[&every, *world].concat());
        let children = run.children(if world[0] == "-n" { 2 } else { 0 });
        let mut seen = names();
        // The first folder seen may be one that the killed run left and this run removes.
        wait_until("a checkpoint to begin", || {
            let now = names();
            let begun = now.difference(&seen).next().is_some();
            seen = now;
            begun || run.has_ended()
        });
        match victim {
            Some(victim) => signal("KILL", &children[*victim].to_string()),
            None => run.signal("KILL"),
        }
        let finished = run.finish();
        assert!(matches!(finished.status.code(), None | Some(0 | 75)), "{finished:?}");
        wait_until("the processes to end", || children.iter().all(|&child| is_gone(child)));
        torn += usize::from(names().iter().any(|name| name.to_string_lossy().ends_with("partial")));
        if torn == 3 || finished.status.success() {
            break;
        }
    }
    assert!(torn > 0, "no kill met a checkpoint that was being written");
    LONG.start(dir, &["-w", "2"]).finish().expect(0);
    let found = LONG.bench.outcome(dir);
    assert_eq!(found.steps, LONG.reference.steps);
    assert_eq!(found.latest(), LONG.reference.latest());
    assert!(
        names().iter().all(|name| name.to_string_lossy().starts_with("step-")),
        "{:?}",
        names()
    );
}

/// A stop is one step more, a checkpoint, and exit code 0.
fn stops(dir: &str, world: &[&str], send: impl Fn(&Running)) {
    let mut run = LONG.start(dir, world);
    LONG.wait_for_steps(&mut run, dir, 3);
    send(&run);
    let finished = run.finish().expect(0);
    let stopped = LONG.bench.outcome(dir);
    let step = stopped.steps.len() as u64;
    let words = format!("stopped after step {step} of {STEPS}");
    assert!(finished.stdout.contains(&words), "{words}: {finished:?}");
    assert_eq!(stopped.checkpoint_steps().last(), Some(&step));
    assert!(step < STEPS, "it was not stopped");
    assert_eq!(stopped.steps, LONG.reference.steps[..step as usize]);
}

#[test]
fn an_interrupted_run_ends_with_a_checkpoint_and_goes_on() {
    stops("interrupted", &["-w", "2"], |run| run.signal("INT"));
    stops("interrupted", &["-w", "3"], |run| run.signal_as_timeout_does("TERM"));
    LONG.finish("interrupted", &["-w", "1"]);
}

/// A terminal interrupts the whole group; a manager of the supervisor only has its process id.
#[test]
fn interrupted_processes_end_with_a_checkpoint_and_go_on() {
    stops("interrupted-all", &["-n", "2", "-w", "1"], |run| run.signal_group("INT"));
    stops("interrupted-all", &["-n", "3", "-w", "1"], |run| run.signal("TERM"));
    stops("interrupted-all", &["-n", "2", "-w", "1"], |run| run.signal_as_timeout_does("TERM"));
    LONG.finish("interrupted-all", &["-w", "5"]);
}

/// A kill leaves nothing that could disturb a later run, because nothing of the kind exists: no
/// named memory or semaphore, no file outside of the run folder, and no stale lock in it.
#[test]
fn a_killed_run_leaves_nothing_outside_of_its_folder() {
    const DIR: &str = "alone";
    const ELSEWHERE: [&str; 2] = ["temporary", "home"];
    let bench = &LONG.bench;
    ELSEWHERE.iter().for_each(|folder| std::fs::create_dir(bench.path(folder)).unwrap());
    // Compiled kernels are cached for later runs, also by CUDA's driver, in the home folder unless
    // it is set elsewhere.
    let shell = "unset XDG_CACHE_HOME; export TMPDIR=$PWD/temporary HOME=$PWD/home CUDA_CACHE_PATH=$PWD/driver \
                 TIDEMILL_KERNEL_CACHE=$PWD/kernels; exec \"$@\"";
    let run_dir = format!("run.dir={DIR}");
    let arguments = ["train", "run.toml", "--set", &run_dir, "-n", "2", "-w", "2"];
    let mut run = Running::start_in_shell(bench.folder(), shell, &arguments);
    let children = run.children(2);
    LONG.wait_for_steps(&mut run, DIR, 8);
    let program = std::fs::canonicalize(program()).unwrap();
    for &process in &children {
        let maps = std::fs::read_to_string(format!("/proc/{process}/maps")).unwrap();
        assert!(maps.contains(program.to_str().unwrap()), "{maps}");
        let shared = maps.lines().find(|line| line.contains("/dev/shm") || line.contains("/SYSV"));
        assert_eq!(shared, None);
    }
    run.signal_group("KILL");
    assert_eq!(run.finish().status.code(), None);
    wait_until("the processes to end", || children.iter().all(|&child| is_gone(child)));
    for folder in ELSEWHERE {
        let left: Vec<_> = std::fs::read_dir(bench.path(folder)).unwrap().collect();
        assert!(left.is_empty(), "{folder}: {left:?}");
    }
    LONG.finish(DIR, &["-n", "2", "-w", "2"]);
}

/// The runs above are of a Mamba.
fn another_family_goes_on_where_it_was_killed(name: &str) {
    goes_on_where_it_was_killed(&Workbench::new(), name, &with_model(table(name)), &[]);
}

#[test]
fn a_llama_goes_on_where_it_was_killed() {
    another_family_goes_on_where_it_was_killed("llama");
}

#[test]
fn a_mamba2_goes_on_where_it_was_killed() {
    another_family_goes_on_where_it_was_killed("mamba2");
}

#[test]
fn a_hybrid_goes_on_where_it_was_killed() {
    another_family_goes_on_where_it_was_killed("hybrid-of-all");
}
