//! Whichever optimizer a run has, nothing but numerics changes a bit, and a checkpoint holds the states that its rule names.
//!
//! That AdamW does is promised by all other files: it is the default.

use std::sync::LazyLock;

use crate::support::processes::wait_until;
use crate::support::{Job, Outcome, Workbench, assert_same};

static BENCH: LazyLock<Workbench> = LazyLock::new(Workbench::new);

/// Lion, at the rate that the workbench has for AdamW.
const LION: &str = "optimizer.name=lion";

/// Lion on one worker.
static REFERENCE: LazyLock<Outcome> =
    LazyLock::new(|| BENCH.train(Job { dir: "reference", workers: 1, set: &[LION] }));

/// The names of the tensors of a file in the layout of safetensors.
fn tensors(file: &[u8]) -> Vec<String> {
    let (length, rest) = file.split_first_chunk().unwrap();
    let header = &rest[..u64::from_le_bytes(*length) as usize];
    let header: serde_json::Map<_, _> = serde_json::from_slice(header).unwrap();
    header.into_iter().map(|(name, _)| name).filter(|name| name != "__metadata__").collect()
}

#[test]
fn lion_learns_and_keeps_one_state() {
    assert!(REFERENCE.loss(4) < REFERENCE.loss(0) - 0.1);
    let [model, optimizer] = ["model.safetensors", "optimizer.safetensors"]
        .map(|name| tensors(&REFERENCE.latest()[name]));
    let mut expected: Vec<_> = model.iter().map(|name| format!("exp_avg.{name}")).collect();
    let mut found = optimizer;
    expected.sort();
    found.sort();
    assert_eq!(found, expected);
    let adamw = BENCH.train(Job { dir: "adamw", workers: 1, set: &["run.steps=2"] });
    assert_eq!(adamw.steps[0][1], REFERENCE.steps[0][1], "the loss before the first update");
    assert_ne!(adamw.steps[1][1], REFERENCE.steps[1][1], "and after it");
}

#[test]
fn lion_is_elastic() {
    for (workers, set) in [
        (2, &[LION][..]),
        (5, &[LION, "batch.microbatch_grains=1"]),
        (3, &[LION, "parallel.shard=parameters"]),
    ] {
        let dir = format!("of-{workers}");
        let found = BENCH.train(Job { dir: &dir, workers, set });
        assert_same(&found, &REFERENCE, &format!("{workers} workers {set:?}"));
    }
}

/// Also where the process that goes on reads what another number of workers left, and where one was killed.
#[test]
fn lion_goes_on_where_it_was_killed() {
    let steps = ["run.steps=40", "schedule.steps=40", "checkpoint.every_steps=3", LION];
    let reference = BENCH.train(Job { dir: "undisturbed", workers: 1, set: &steps });
    let arguments = |world: &[&'static str]| {
        let set = steps.iter().chain(&["run.dir=killed"]).flat_map(|&set| ["--set", set]);
        ["train", "run.toml"].into_iter().chain(world.iter().copied()).chain(set).collect()
    };
    let checkpoints = BENCH.path("killed/checkpoints");
    let newest = || -> Option<std::ffi::OsString> {
        let entries = std::fs::read_dir(&checkpoints).into_iter().flatten();
        entries.map(|entry| entry.unwrap().file_name()).max()
    };
    for world in [["-w", "2"], ["-w", "3"]] {
        let arguments: Vec<&str> = arguments(&world);
        let mut run = BENCH.start(&arguments);
        let before = newest();
        wait_until("another checkpoint", || newest() > before || run.has_ended());
        run.signal("KILL");
        let _killed = run.finish();
    }
    let two: Vec<&str> = arguments(&["-n", "2", "-w", "1"]);
    BENCH.tidemill(&two).expect(0);
    assert_same(&BENCH.outcome("killed"), &reference, "killed twice");
}

/// It asserts itself that its losses have the same bits with one worker and with three.
#[test]
fn a_rule_of_a_users_own_is_elastic() {
    custom_optimizer::main().unwrap();
}

#[path = "../examples/custom_optimizer.rs"]
mod custom_optimizer;
