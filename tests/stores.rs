//! Data sets and runs in a store equal those in folders: a run with samples from S3 and checkpoints
//! in S3 has the same bits, whatever is killed; and an error of a store is one clear line.
//!
//! Seen red: with `trainer.json` written first, with logs that are not written before a checkpoint or not fetched, with
//! checksums that are not compared, with checkpoints that no record names, and with a local folder that keeps what an
//! earlier run left.
//!
//! The server runs in this process and keeps its buckets in folders, so that tests can read the
//! contents of the store.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use crate::s3_server::{S3Server, SECRET};
use crate::support::outcome::files;
use crate::support::processes::wait_until;
use crate::support::workbench::random;
use crate::support::{Finished, Job, Outcome, Running, Workbench, assert_same};

const STEPS: u64 = 12;

/// The config of every run here.
const SETTINGS: [&str; 3] = ["run.steps=12", "checkpoint.every_steps=1", "checkpoint.keep=2"];

/// The run's URL as messages show it.
const SHOWN: &str = "s3://bucket/a%20run";

const EVALUATION: &str = "evaluation={every_steps = 3, samples = 9, dataset = ";

/// The files of the run in a folder when it is not disturbed.
static REFERENCE: LazyLock<Outcome> = LazyLock::new(|| {
    let bench = Workbench::new();
    let evaluation = format!("{EVALUATION}{:?}}}", bench.path("validation"));
    let set = [&SETTINGS[..], &[&evaluation]].concat();
    let reference = bench.train(Job { dir: "run", workers: 2, set: &set });
    assert_eq!(reference.checkpoint_steps(), [STEPS - 1, STEPS]);
    reference
});

/// A workbench, and a store that holds its data sets.
struct Stored {
    bench: Workbench,
    server: S3Server,
}

impl Stored {
    fn new() -> Self {
        let bench = Workbench::new();
        for name in ["data", "validation"] {
            let folder = bench.path("store/bucket").join(name);
            std::fs::create_dir_all(&folder).unwrap();
            for (file, bytes) in files(&bench.path(name)) {
                std::fs::write(folder.join(file), bytes).unwrap();
            }
        }
        let server = S3Server::start(&bench.path("store"));
        Self { bench, server }
    }

    /// Starts the program with access to the store.
    fn start(&self, arguments: &[&str]) -> Running {
        Running::start_with(&self.server.options(), self.bench.folder(), arguments)
    }

    fn tidemill(&self, arguments: &[&str]) -> Finished {
        self.start(arguments).finish()
    }

    /// Starts the run in the store, on a machine with this cache.
    fn train(&self, cache: &str, more: &[&str]) -> Running {
        with_arguments(cache, more, |arguments| self.start(arguments))
    }

    /// As [`train`](Self::train), with a limit on file sizes in blocks of 512 bytes, which acts as
    /// a full disk.
    fn train_with_blocks(&self, blocks: usize, cache: &str) -> Running {
        let variables = self.server.options().into_iter();
        let exports: String =
            variables.map(|(name, value)| format!("export {name}='{value}'; ")).collect();
        let line = format!("{exports}trap '' XFSZ; ulimit -f {blocks}; exec \"$@\"");
        with_arguments(cache, &["-w", "2"], |arguments| {
            Running::start_in_shell(self.bench.folder(), &line, arguments)
        })
    }

    /// The run's files in the store. The server leaves empty folders where objects were, which no
    /// store shows.
    fn outcome(&self) -> Outcome {
        let run = self.bench.path("store/bucket/a run");
        for entry in std::fs::read_dir(run.join("checkpoints")).unwrap() {
            // A folder that is not empty stays.
            let _ = std::fs::remove_dir(entry.unwrap().path());
        }
        Outcome::read(&run)
    }

    /// The name of the folder of a checkpoint.
    fn checkpoint(&self, step: u64) -> String {
        let folder = self.bench.path("store/bucket/a run/checkpoints");
        let names = std::fs::read_dir(folder).unwrap();
        let mut names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.find(|name| name.starts_with(&format!("step-{step:08}-"))).unwrap()
    }

    /// Fails unless the store has the run as a folder would have it.
    fn assert_whole(&self, what: &str) {
        assert_same(&self.outcome(), &REFERENCE, what);
        let found = files(&self.bench.path("store/bucket/a run"));
        let others: Vec<&str> = (found.keys().map(String::as_str))
            .filter(|name| !name.starts_with("checkpoints/step-"))
            .collect();
        let logs = ["evaluation.jsonl", "history.jsonl", "metrics.jsonl"];
        let expected = [&["devices.json"], &logs[..], &["run.json", "run.toml"]].concat();
        assert_eq!(others, expected);
    }
}

/// Starts with the arguments of the run in the store.
fn with_arguments(cache: &str, more: &[&str], start: impl FnOnce(&[&str]) -> Running) -> Running {
    let cache = format!("data.cache_dir={cache}");
    let evaluation = format!("{EVALUATION}\"s3://bucket/validation\"}}");
    let mut arguments = vec!["train", "run.toml"];
    let places = ["run.dir=s3://bucket/a run", "data.dataset=s3://bucket/data", &cache];
    for assignment in places.into_iter().chain(SETTINGS).chain([&evaluation[..]]) {
        arguments.extend(["--set", assignment]);
    }
    arguments.extend(more);
    start(&arguments)
}

#[test]
fn a_run_in_a_store_is_the_run_in_a_folder() {
    let stored = Stored::new();
    let finished = stored.train("cache", &["-w", "2"]).finish().expect(0);
    let last = format!("checkpoint: {SHOWN}/checkpoints/{}\n", stored.checkpoint(STEPS));
    assert!(finished.stdout.ends_with(&last), "{finished:?}");
    stored.assert_whole("two workers");
    // On this machine only the logs are left, beside the locked file.
    let local: Vec<_> = files(&stored.bench.path("cache/runs")).into_keys().collect();
    assert_eq!(local.len(), 3, "{local:?}");
    assert!(local.iter().all(|name| name.ends_with(".jsonl")), "{local:?}");

    // A further start has nothing to do, and writes nothing.
    let puts = stored.server.count("PUT");
    stored.train("cache", &["-w", "1"]).finish().expect(0);
    assert_eq!(stored.server.count("PUT"), puts);

    // A setting that may not change is compared with the checkpoint in the store.
    let other = ["-w", "1", "--set", "optimizer.learning_rate=0.5", "--set", "run.steps=14"];
    let words = ["optimizer.learning_rate", "s3://bucket/a%20run/checkpoints/step-00000012-"];
    stored.train("cache", &other).finish().failed(1, &words);
    stored.assert_whole("after a refusal");

    // On another machine, two processes continue from the store.
    let goes_on = ["-n", "2", "-w", "1", "--set", "run.steps=14", "--set", "schedule.steps=12"];
    let finished = stored.train("another cache", &goes_on).finish().expect(0);
    assert!(finished.stdout.starts_with("done: 14 steps"), "{finished:?}");
    assert!(finished.stderr.contains("fetching s3://bucket/a%20run/checkpoints/"), "{finished:?}");
    assert!(finished.stderr.contains("schedule ends with step 12"), "{finished:?}");
    // Standard error is no terminal here, so that steps are lines.
    let first = finished.stderr.lines().find(|line| line.starts_with("step 13 of 14: loss "));
    assert!(
        first.is_some_and(|line| line.contains(" tokens/s") && line.contains(" eta ")),
        "{finished:?}"
    );
    let fewer = stored.train("another cache", &["-w", "1"]).finish().expect(0);
    assert!(fewer.stderr.contains("more steps already than the 12 "), "{fewer:?}");
    let outcome = stored.outcome();
    assert_eq!(outcome.checkpoint_steps(), [13, 14]);
    assert_eq!(outcome.steps[..STEPS as usize], REFERENCE.steps[..]);
}

#[test]
fn a_data_set_prepared_to_a_store_is_that_of_a_folder() {
    let stored = Stored::new();
    let prepare = |output: &str, more: &[&str]| {
        let cut = ["--seq-len", "17", "--shard-samples", "97"];
        let arguments = ["prepare", "--input", "data-text", "--output", output];
        stored.tidemill(&[&arguments[..], &cut, more].concat())
    };
    prepare("s3://bucket/made", &["-w", "2"]).expect(0);
    let made = files(&stored.bench.path("store/bucket/made"));
    let shard =
        made.keys().find_map(|name| name.strip_prefix("shard")?.strip_suffix("-00000.parquet"));
    let token = shard.expect("a shard whose name holds a token").to_owned();
    assert_eq!(token.len(), 1 + 16, "{token}");
    let without_token = |(name, bytes): (String, Vec<u8>)| match &*name {
        "index.json" => {
            let index = String::from_utf8(bytes).unwrap().replace(&token, "");
            (name, index.into_bytes())
        }
        _ => (name.replace(&token, ""), bytes),
    };
    let made: BTreeMap<_, _> = made.into_iter().map(without_token).collect();
    assert!(made == files(&stored.bench.path("data")), "{:?}", made.keys());
    prepare("s3://bucket/made", &["-w", "1"]).refused(1, &["s3://bucket/made", "a data set"]);
    prepare("s3://nowhere/made", &["-w", "1"]).refused(1, &["s3://nowhere/made", "NoSuchBucket"]);
    let inspect = ["inspect", "s3://bucket/made", "--format", "json"];
    let local = stored.tidemill(&["inspect", "data", "--format", "json"]).expect(0);
    let inspected = stored.tidemill(&inspect).expect(0).stdout;
    assert_eq!(inspected.replace(&token, ""), local.stdout);
}

#[test]
fn models_of_a_store_can_be_used() {
    let stored = Stored::new();
    stored.train("cache", &["-w", "2"]).finish().expect(0);
    let folder = stored.bench.path("store/bucket/a run");
    let last = format!("checkpoints/{}", stored.checkpoint(STEPS));
    let of_folder = |inner: &str| folder.join(inner).to_str().unwrap().to_owned();
    for (inner, kind) in [("", "run"), (last.as_str(), "checkpoint")] {
        let (url, local) = (format!("s3://bucket/a run/{inner}"), of_folder(inner));
        let inspected = |path: &str| {
            let finished = stored.tidemill(&["inspect", path, "--format", "json"]).expect(0);
            assert!(finished.stdout.contains(&format!("\"kind\":\"{kind}\"")), "{finished:?}");
            finished.stdout
        };
        if kind == "checkpoint" {
            assert_eq!(inspected(&url), inspected(&local));
        } else {
            assert!(inspected(&url).contains("\"checkpoints\":[11,12]"));
        }
        let generated = |path: &str| {
            let prompt = ["--prompt", "the tide", "--max-new-tokens", "9", "--temperature", "0"];
            stored.tidemill(&[&["generate", "--model", path][..], &prompt].concat()).expect(0)
        };
        assert_eq!(generated(&url).stdout, generated(&local).stdout);
    }
    // Another run begins with its weights.
    let of_weights = |path: &str, dir: &str| {
        let (dir, from) = (format!("run.dir={dir}"), format!("model={{from = {path:?}}}"));
        let arguments =
            ["train", "run.toml", "-w", "1", "--set", &dir, "--set", &from, "--set", "run.steps=3"];
        stored.tidemill(&arguments).expect(0);
        stored.bench.outcome(&dir["run.dir=".len()..])
    };
    let from_store = of_weights("s3://bucket/a run", "from-store");
    assert_same(&from_store, &of_weights(&of_folder(""), "from-folder"), "model.from");

    // With one changed byte in the weights, the file is downloaded again, in vain.
    let model = folder.join(&last).join("model.safetensors");
    let mut bytes = std::fs::read(&model).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&model, bytes).unwrap();
    let gets = || stored.server.count(&format!("GET /bucket/a%20run/{last}/model.safetensors"));
    let before = gets();
    let named = format!("{SHOWN}/{last}/model.safetensors: damaged: checksum");
    let model = ["generate", "--model", "s3://bucket/a run", "--prompt", "x"];
    stored.tidemill(&model).refused(1, &[&named]);
    assert_eq!(gets() - before, 3);
    let again = ["-w", "1", "--set", "run.steps=14", "--set", "schedule.steps=12"];
    stored.train("cache", &again).finish().failed(1, &[&named]);
}

/// Kills that land in the middle of a request: while samples are downloaded, while a checkpoint goes up, before its last
/// file, while an old one is removed, while the next run begins.
#[test]
fn kills_change_nothing_in_a_store() {
    let stored = Stored::new();
    let run = "/bucket/a%20run/";
    let of_run = |request: &str, inner: &str| format!("{request} {run}{inner}");
    let held = [
        "GET /bucket/data/shard-".to_owned(),
        of_run("PUT", "run.json"),
        of_run("PUT", "checkpoints/step-00000001-*/model.safetensors"),
        of_run("PUT", "metrics.jsonl"),
        of_run("PUT", "checkpoints/step-00000003-*/trainer.json"),
        // Something is being removed.
        "POST /bucket?delete".to_owned(),
        of_run("GET", "checkpoints/"),
        "POST /bucket?delete".to_owned(),
        of_run("PUT", "evaluation.jsonl"),
        of_run("PUT", "checkpoints/step-00000012-*/optimizer.safetensors"),
    ];
    let worlds: [&[&str]; 3] = [&["-w", "1"], &["-w", "3"], &["-n", "2", "-w", "1"]];
    for (index, request) in held.iter().enumerate() {
        // The same machine, or another.
        let cache = format!("cache-{}", random(100 + index as u64) % 2);
        let before = stored.server.count(request);
        stored.server.hold(Some(request));
        let mut killed = stored.train(&cache, worlds[index % worlds.len()]);
        wait_until(request, || stored.server.count(request) > before || killed.has_ended());
        assert!(!killed.has_ended(), "{request}: it ended before it was killed");
        killed.signal_group("KILL");
        killed.finish();
        stored.server.hold(None);
    }
    stored.train("cache-0", &["-w", "2"]).finish().expect(0);
    stored.assert_whole("after kills");
}

/// A stopped machine: another continues its run, and it wakes up when that is done.
#[test]
fn a_run_that_was_taken_over_ends_and_changes_nothing() {
    let stored = Stored::new();
    let third = "PUT /bucket/a%20run/checkpoints/step-00000003-";
    let mut first = stored.train("cache", &["-w", "2"]);
    wait_until(third, || stored.server.count(third) > 0 || first.has_ended());
    first.signal_group("STOP");
    assert!(!first.has_ended());
    stored.train("another cache", &["-w", "1"]).finish().expect(0);
    let after = files(&stored.bench.path("store/bucket/a run"));
    first.signal_group("CONT");
    first.finish().failed(1, &[SHOWN, "was taken over by a run that started later"]);
    stored.assert_whole("after the first run woke up");
    let names = |files: &std::collections::BTreeMap<String, Vec<u8>>| -> Vec<String> {
        files.keys().filter(|name| !name.contains("step-00000003")).cloned().collect()
    };
    assert_eq!(names(&files(&stored.bench.path("store/bucket/a run"))), names(&after));
}

/// First there is no room for a shard; then there is, but not for a checkpoint; then for both.
#[test]
fn full_disks_lose_nothing() {
    let stored = Stored::new();
    let bytes = |name: &str| REFERENCE.latest()[name].len();
    let shard = files(&stored.bench.path("data"))["shard-00000.parquet"].len();
    let before_model = (shard + bytes("model.safetensors")) / 2;
    assert!(shard > 1024 && before_model < bytes("model.safetensors"), "{shard}");
    let no_shard = stored.train_with_blocks(shard / 2 / 512, "cache").finish().expect(75);
    let no_checkpoint = stored.train_with_blocks(before_model / 512, "cache").finish().expect(75);
    for (finished, named) in
        [(no_shard, "cache/tidemill-"), (no_checkpoint, "step-00000001.partial/model.safetensors")]
    {
        let said: Vec<&str> =
            finished.stderr.lines().filter(|line| line.starts_with("tidemill: ")).collect();
        assert!(said.len() == 1 && said[0].contains(named), "{finished:?}");
    }
    stored.train("cache", &["-w", "2"]).finish().expect(0);
    stored.assert_whole("with room");
}

#[test]
fn what_a_store_refuses_is_one_line() {
    let stored = Stored::new();
    let set = |assignment: &str| {
        let local = ["--set", "run.dir=run"];
        let more = if assignment.starts_with("run.dir") { &[][..] } else { &local[..] };
        [&["-w", "1", "--set", assignment][..], more]
            .concat()
            .iter()
            .map(|&it| it.to_owned())
            .collect::<Vec<_>>()
    };
    let refused = |assignment: &str, expected: &[&str]| {
        let arguments = set(assignment);
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        stored.train("cache", &arguments).finish().refused(1, expected);
        assert!(!stored.bench.path("run").exists(), "{assignment}: nothing is written");
        assert!(!stored.bench.path("store/bucket/a run").exists(), "{assignment}");
    };
    refused("data.dataset=s3://nowhere/data", &["s3://nowhere/data", "NoSuchBucket"]);
    refused("data.dataset=s3://bucket/nothing", &["s3://bucket/nothing has no samples"]);
    refused("run.dir=s3://nowhere/run", &["s3://nowhere/run", "NoSuchBucket"]);
    refused("run.dir=ftp://host/run", &["run.dir", "s3, gs or az", "found scheme \"ftp\""]);
    refused("run.dir=s3:///run", &["run.dir", "no name behind ://"]);
    refused("run.dir=memory://name/run", &["run.dir", "s3, gs or az", "memory://name/run"]);
    refused("run.dir=https://host/run", &["run.dir", "s3, gs or az", "https://host/run"]);
    let secret = stored.train("cache", &["--set", "run.dir=https://user:word@host/run"]).finish();
    let secret = secret.refused(1, &["run.dir", "found a user or password"]);
    assert!(!secret.stderr.contains("word@"), "{secret:?}");

    let mut environment = stored.server.options();
    for (_, value) in environment.iter_mut().filter(|(_, value)| value == SECRET) {
        *value = "another-secret".to_owned();
    }
    for (dataset, dir) in [("s3://bucket/data", "run"), ("data", "s3://bucket/a run")] {
        let (dataset, dir) = (format!("data.dataset={dataset}"), format!("run.dir={dir}"));
        let arguments = ["train", "run.toml", "--set", &dataset, "--set", &dir];
        let run = Running::start_with(&environment, stored.bench.folder(), &arguments);
        let finished = run.finish().refused(1, &["s3://bucket/", "access was refused"]);
        assert!(!finished.stderr.contains("another-secret"), "{finished:?}");
    }
}
