//! Settings that are not numerics change no bit of a checkpoint's files, a loss, a norm or an
//! evaluation.
//!
//! The model has a tied embedding, odd sizes, lanes that grains of two divide evenly, and lanes
//! that they do not.
//!
//! Seen red: with the reducer adding nodes as they arrive (see
//! [`arrival_order`](super::arrival_order)), and with gradients formed over the whole microbatch
//! instead of grain by grain.

use std::sync::LazyLock;

use tidemill::kernels::FloatEnvironment;
use tidemill::streaming_data::DataSet;

use crate::support::{Job, Outcome, Workbench, assert_same, program};

static BENCH: LazyLock<Workbench> = LazyLock::new(Workbench::new);

/// One worker, two grains at a time.
static REFERENCE: LazyLock<Outcome> =
    LazyLock::new(|| BENCH.train(Job { dir: "reference", workers: 1, set: &[] }));

fn same(workers: usize, set: &[&str]) {
    let what = format!("{workers} workers {set:?}");
    let dir = what.replace(|letter: char| !letter.is_ascii_alphanumeric(), "-");
    assert_same(&BENCH.train(Job { dir: &dir, workers, set }), &REFERENCE, &what);
}

#[test]
fn the_reference_learns_and_leaves_everything() {
    assert_eq!(REFERENCE.checkpoint_steps(), [2, 4, 5]);
    let steps: Vec<_> = REFERENCE.steps.iter().map(|line| (line[0], line[4])).collect();
    assert_eq!(steps, (1..=5).map(|step| (step, step * 45 * 17)).collect::<Vec<_>>());
    assert!(
        REFERENCE.loss(4) < REFERENCE.loss(0) - 0.1,
        "{} {}",
        REFERENCE.loss(0),
        REFERENCE.loss(4)
    );
    let names: Vec<_> = REFERENCE.latest().keys().map(String::as_str).collect();
    let expected = [
        "config.json",
        "model.safetensors",
        "optimizer.safetensors",
        "tokenizer.json",
        "trainer.json",
    ];
    assert_eq!(names, expected);
    let config = String::from_utf8_lossy(&REFERENCE.latest()["config.json"]);
    assert!(config.contains("\"tie_word_embeddings\": true"), "{config}");
}

#[test]
fn any_number_of_threads() {
    for workers in [2, 3, 5, 8] {
        same(workers, &[]);
    }
}

/// Any sharding, and any number of microbatches in a lane.
#[test]
fn any_part_of_the_state_may_be_shared_out() {
    for shard in ["parallel.shard=gradients", "parallel.shard=parameters"] {
        for (workers, microbatch) in [(1, "1"), (3, "100"), (8, "2")] {
            same(workers, &[shard, &format!("batch.microbatch_grains={microbatch}")]);
        }
    }
}

/// An embedder's thread has called a library built with `-ffast-math`, and one that rounds
/// differently: from the reading of the config to the last checkpoint nothing depends on that.
#[test]
fn any_floating_point_environment_of_the_callers_thread() {
    let runs: [(usize, &[&str]); 2] = [(1, &[]), (2, &["device.threads=3"])];
    for (workers, set) in runs {
        let dir = format!("foreign-{workers}");
        let job = Job { dir: &dir, workers, set };
        let foreign = FloatEnvironment::foreign();
        let trained = BENCH.try_train(job);
        // What the run has left is read by the test.
        drop(foreign);
        trained.unwrap();
        assert_same(&BENCH.outcome(&dir), &REFERENCE, &format!("{workers} workers"));
    }
}

#[test]
fn any_microbatch() {
    // A lane has three grains.
    for microbatch in ["1", "3", "1000", "\"auto\""] {
        let microbatch = format!("batch.microbatch_grains={microbatch}");
        same(1, &[&microbatch]);
        same(3, &[&microbatch]);
    }
}

#[test]
fn any_read_ahead() {
    for steps in [1, 3, 4] {
        same(2, &[&format!("data.read_ahead_steps={steps}")]);
    }
    // A window of decoded samples that is smaller than a step.
    same(5, &["data.read_ahead_steps=4", "data.cache_mib=1"]);
}

#[test]
fn any_number_of_compute_threads() {
    same(1, &["device.threads=3"]);
    same(2, &["device.threads=2", "batch.microbatch_grains=3"]);
}

/// 13 samples in 8 lanes: some lanes have one sample, others two, and grains of two are mostly short.
#[test]
fn lanes_of_one_sample_and_of_two() {
    for grain_samples in ["batch.grain_samples=1", "batch.grain_samples=2"] {
        let arm = |workers: usize, microbatch: &str| {
            let set = ["batch.samples_per_step=13", grain_samples, microbatch];
            let dir = format!("short-{workers}-{}", [grain_samples, microbatch].join("-"));
            BENCH.train(Job { dir: &dir, workers, set: &set })
        };
        let expected = arm(1, "batch.microbatch_grains=1");
        for (workers, microbatch) in [(3, 1), (5, 2), (8, 1), (8, 9)] {
            let found = arm(workers, &format!("batch.microbatch_grains={microbatch}"));
            assert_same(&found, &expected, &format!("{grain_samples}: {workers}, {microbatch}"));
        }
    }
}

/// A model of the usual sizes, with grains of one and four lanes.
#[test]
fn a_model_of_usual_sizes() {
    let arm = |workers: usize, microbatch: &str| {
        let set = [
            "model.d_model=32",
            "model.d_state=16",
            "model.d_conv=4",
            "model.expand=2",
            "data.shuffle=full",
            "batch.samples_per_step=16",
            "batch.lanes=4",
            "batch.grain_samples=1",
            microbatch,
        ];
        let dir = format!("usual-{workers}-{microbatch}");
        BENCH.train(Job { dir: &dir, workers, set: &set })
    };
    let expected = arm(1, "batch.microbatch_grains=1");
    for (workers, microbatch) in [(1, 4), (2, 3), (4, 2)] {
        let found = arm(workers, &format!("batch.microbatch_grains={microbatch}"));
        assert_same(&found, &expected, &format!("{workers} workers, {microbatch} grains"));
    }
}

#[test]
fn evaluation_changes_nothing_and_is_elastic_itself() {
    let validation = format!("evaluation.dataset={:?}", BENCH.path("validation"));
    let arm = |workers: usize| {
        let set = [validation.as_str(), "evaluation.every_steps=2", "evaluation.samples=31"];
        BENCH.train(Job { dir: &format!("evaluated-{workers}"), workers, set: &set })
    };
    let expected = arm(1);
    let evaluated: Vec<_> = expected.evaluations.iter().map(|line| (line[0], line[2])).collect();
    assert_eq!(evaluated, [2, 4, 5].map(|step| (step, 31 * 17)));
    let without = Outcome { evaluations: Vec::new(), ..arm(3) };
    assert_same(&without, &REFERENCE, "evaluated");
    for workers in [5, 8] {
        assert_same(&arm(workers), &expected, &format!("evaluated by {workers} workers"));
    }
}

/// Steps larger than the data set: each begins in one epoch and ends in another, for workers,
/// processes and resumed runs alike, and none of them waits for the others between epochs.
#[test]
fn epochs_follow_each_other_without_a_seam() {
    let samples = DataSet::open(BENCH.path("validation")).unwrap().samples();
    assert!(samples < 45, "{samples} samples");
    let validation = format!("data.dataset={:?}", BENCH.path("validation"));
    for shuffle in ["window", "full"] {
        let shuffled = format!("data.shuffle={shuffle}");
        let train = |dir: &str, workers: usize, more: &[&str]| {
            let set = [&[validation.as_str(), &shuffled, "schedule.steps=5"], more].concat();
            BENCH.train(Job { dir: &format!("{shuffle}-{dir}"), workers, set: &set })
        };
        let expected = train("epochs", 1, &[]);
        assert_eq!(expected.steps.last().unwrap()[4], 5 * 45 * 17, "no batch is short");
        for workers in [3, 8] {
            assert_same(&train(&format!("epochs-{workers}"), workers, &[]), &expected, shuffle);
        }
        train("stopped", 2, &["run.steps=4"]);
        assert_same(&train("stopped", 5, &[]), &expected, "gone on with in a later epoch");
        let dir = format!("{shuffle}-epochs-processes");
        let (run_dir, world) = (format!("run.dir={dir}"), ["-n", "3", "-w", "1"]);
        let set = ["--set", &run_dir, "--set", &validation, "--set", &shuffled];
        BENCH.tidemill(&[&["train", "run.toml"], &world[..], &set].concat()).expect(0);
        assert_same(&BENCH.outcome(&dir), &expected, "processes");
    }
}

/// Two and three processes, with one and two workers each; the bits are those of one thread of this process.
#[test]
fn any_number_of_processes() {
    let shards = ["optimizer", "gradients", "parameters", "gradients"];
    for ((processes, workers), shard) in
        [("2", "1"), ("2", "2"), ("3", "1"), ("3", "2")].into_iter().zip(shards)
    {
        let dir = format!("processes-{processes}-{workers}");
        let (run_dir, shard) = (format!("run.dir={dir}"), format!("parallel.shard={shard}"));
        let arguments = ["train", "run.toml", "-n", processes, "-w", workers, "--set", &run_dir];
        BENCH.tidemill(&[&arguments[..], &["--set", &shard]].concat()).expect(0);
        assert_same(&BENCH.outcome(&dir), &REFERENCE, &dir);
    }
}

/// Processes that are started separately, each with its index in a hosts file; only the first has
/// the run folder.
#[test]
fn processes_of_a_hosts_file() {
    BENCH.write("hosts", program::free_hosts(3));
    let start = |process: &str| {
        let run_dir = format!("run.dir=hosts-run-{process}");
        let arguments =
            ["train", "run.toml", "-p", process, "--hosts", "hosts", "-w", "2", "--set", &run_dir];
        BENCH.start(&arguments)
    };
    for process in ["2", "1", "0"].map(start) {
        process.finish().expect(0);
    }
    assert_same(&BENCH.outcome("hosts-run-0"), &REFERENCE, "a hosts file");
    assert!(!BENCH.path("hosts-run-1").exists() && !BENCH.path("hosts-run-2").exists());
}
