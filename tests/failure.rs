//! One panic, death or silent process ends every worker and every process within seconds, with the
//! cause.
//!
//! Seen red: with an abort that raises no flag, and with peers that are never declared silent.

use std::fs::File;
use std::io::{ErrorKind, Write};
use std::num::NonZeroUsize;
use std::ops::Range;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use tidemill::batch::{BatchPlan, BatchSettings, MicrobatchMemory};
use tidemill::cluster::{ClusterError, ClusterSettings, Failure, WorkerContext, execute};
use tidemill::communicators::Communicators;
use tidemill::kernels::Cpu;
use tidemill::model::optimizer::OptimizerSettings;
use tidemill::model::schedule::ScheduleSettings;
use tidemill::model::{
    Device, GradientSink, GrainLoss, LanguageModel, Layout, MambaConfig, Microbatch,
    MicrobatchShape, ModelError, ParameterSource, Tokens, Trainable,
};
use tidemill::operators::{
    InitialState, SampleSource, ScheduledRule, Training, TrainingPlan, Wake,
};
use timely::dataflow::operators::{Exchange, Inspect};

use crate::support::outcome::{assert_same, files};
use crate::support::processes::{is_gone, signal, wait_until};
use crate::support::{Running, Workbench, program};

/// Far less than a test may wait, far more than the end of a run takes.
const SOON: Duration = Duration::from_secs(20);

const VOCAB_SIZE: usize = 50;
const POSITIONS: usize = 9;
const LANES: usize = 8;
/// A token in one sample of the third step only, which belongs to worker 1 of 3.
const FATAL_TOKEN: u32 = 49;
const FATAL_POSITION: u64 = 2 * 8 + 4;

/// Where the program fails.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Breaks {
    /// The model, on the device thread of one worker.
    Model,
    /// An operator of the user's own, on one worker.
    OwnOperator,
    /// The source of samples of one worker.
    Source,
    /// The source returns an error instead of a panic.
    SourceError,
}

/// A user's own model: a Mamba that panics on one of its tokens.
struct Fragile {
    mamba: LanguageModel<Cpu>,
    breaks: Breaks,
}

impl Trainable<Cpu> for Fragile {
    type Sample = Tokens;
    type Workspace = <LanguageModel<Cpu> as Trainable<Cpu>>::Workspace;

    fn layout(&self) -> &Layout {
        Trainable::<Cpu>::layout(&self.mamba)
    }

    fn initialize(&self, seed: u64) -> Vec<f32> {
        Trainable::<Cpu>::initialize(&self.mamba, seed)
    }

    fn config_json(&self) -> serde_json::Value {
        Trainable::<Cpu>::config_json(&self.mamba)
    }

    fn plan(
        &self,
        device: &mut Device<'_, Cpu>,
        shape: MicrobatchShape,
    ) -> Result<Self::Workspace, ModelError> {
        self.mamba.plan(device, shape)
    }

    fn forward(
        &self,
        device: &mut Device<'_, Cpu>,
        workspace: &mut Self::Workspace,
        parameters: &mut dyn ParameterSource<Cpu>,
        microbatch: Microbatch<'_>,
    ) -> Result<Vec<GrainLoss>, ModelError> {
        self.mamba.forward(device, workspace, parameters, microbatch)
    }

    fn forward_backward(
        &self,
        device: &mut Device<'_, Cpu>,
        workspace: &mut Self::Workspace,
        parameters: &mut dyn ParameterSource<Cpu>,
        microbatch: Microbatch<'_>,
        sink: &mut dyn GradientSink<Cpu>,
    ) -> Result<Vec<GrainLoss>, ModelError> {
        let fatal = microbatch.samples.concat().contains(&FATAL_TOKEN);
        assert!(self.breaks != Breaks::Model || !fatal, "broken on purpose");
        self.mamba.forward_backward(device, workspace, parameters, microbatch, sink)
    }
}

/// Samples that are a function of their position.
struct Synthetic {
    breaks: Breaks,
    requested: Vec<u64>,
}

impl SampleSource for Synthetic {
    type Sample = Tokens;

    fn request(&mut self, positions: Range<u64>) {
        self.requested.extend(positions);
    }

    fn poll(&mut self) -> Result<Option<(u64, Tokens)>, Failure> {
        if self.requested.is_empty() {
            return Ok(None);
        }
        let position = self.requested.remove(0);
        let fatal = position == FATAL_POSITION;
        assert!(self.breaks != Breaks::Source || !fatal, "broken on purpose");
        if self.breaks == Breaks::SourceError && fatal {
            return Err(Failure::fix_input("broken on purpose"));
        }
        let token = |index| ((position * 7 + index * index) % 49) as u32;
        let mut tokens: Vec<u32> = (0..=POSITIONS as u64).map(token).collect();
        if fatal {
            tokens[3] = FATAL_TOKEN;
        }
        Ok(Some((position, tokens)))
    }

    fn set_wake(&mut self, _wake: Wake) {}
}

fn batch() -> BatchPlan {
    let batch =
        BatchSettings { samples_per_step: Some(8), lanes: Some(LANES), ..Default::default() };
    batch.plan(MicrobatchMemory { sample_bytes: 0, workspace_bytes: 0 }).unwrap()
}

fn worker(
    context: &mut WorkerContext<'_>,
    (cpu, ends): (&Arc<Cpu>, &Communicators<Cpu>),
    breaks: Breaks,
) -> Result<(), Failure> {
    let mut config = MambaConfig::new(VOCAB_SIZE, 16, 2);
    config.d_state = 5;
    let model = Arc::new(Fragile { mamba: LanguageModel::new(&config)?, breaks });
    let steps = 1_000_000;
    let schedule = ScheduleSettings { warmup_steps: Some(0), ..Default::default() };
    let training = Training {
        plan: Arc::new(TrainingPlan::new(batch(), model.layout(), POSITIONS, steps)),
        backend: Arc::clone(cpu),
        state: InitialState { parameters: Arc::new(model.initialize(1)), states: None },
        model,
        rule: ScheduledRule::new(&OptimizerSettings::default(), schedule, steps),
        connection: ends.take(context, cpu)?,
        stop: Arc::new(AtomicBool::new(false)),
        checkpoints: None,
        abort: context.abort().clone(),
    };
    context.dataflow::<u64, _, _>(|scope| {
        let source = Synthetic { breaks, requested: Vec::new() };
        let reports = training.build(scope, source, None).reports;
        reports.exchange(|_| 2).inspect(move |report| {
            assert!(breaks != Breaks::OwnOperator || report.step < 3, "broken on purpose");
        });
    });
    Ok(context.run_until_done()?)
}

#[test]
fn whatever_breaks_on_one_worker_ends_all_with_its_message() {
    let cases = [
        (Breaks::Model, "worker 1"),
        (Breaks::OwnOperator, "worker 2"),
        (Breaks::Source, "worker 1"),
        (Breaks::SourceError, "worker 1"),
    ];
    for (breaks, who) in cases {
        let (sender, ended) = mpsc::channel();
        std::thread::spawn(move || {
            let settings = ClusterSettings::workers(3);
            let cpu = Arc::new(Cpu::new(NonZeroUsize::MIN).unwrap());
            let ends = Communicators::of_cluster(&[&*cpu; 3], &settings, &batch()).unwrap();
            let work =
                move |context: &mut WorkerContext<'_>| worker(context, (&cpu, &ends), breaks);
            let _ = sender.send(execute(settings, work));
        });
        let ended = ended.recv_timeout(SOON).expect("all workers end");
        let error: ClusterError = ended.expect_err("it breaks");
        let text = error.with_causes();
        assert!(text.contains("broken on purpose"), "{breaks:?}: {text}");
        assert!(breaks == Breaks::Model || text.contains(who), "{breaks:?}: {text}");
        // The supervisor restarts after an error of the program, but not after wrong input.
        let code = if breaks == Breaks::SourceError { 1 } else { 75 };
        assert_eq!(error.exit_class().exit_code(), code, "{breaks:?}");
    }
}

const ENDLESS: [&str; 6] = [
    "--set",
    "run.steps=1000000",
    "--set",
    "checkpoint.every_steps=1000000",
    "--set",
    "run.peer_deadline_seconds=2",
];

fn wait_for_steps(bench: &Workbench) {
    let metrics = bench.path("run/metrics.jsonl");
    wait_until("the first steps", || {
        std::fs::read_to_string(&metrics).is_ok_and(|text| text.matches('\n').count() >= 3)
    });
}

#[test]
fn a_stopped_process_is_noticed_at_the_deadline() {
    let bench = Workbench::new();
    let run = bench.start(&[&["train", "run.toml", "-n", "2", "-w", "1"], &ENDLESS[..]].concat());
    let children = run.children(2);
    wait_for_steps(&bench);
    signal("STOP", &children[1].to_string());
    let stopped = Instant::now();
    let finished = run.finish().expect(75);
    assert!(stopped.elapsed() < SOON, "{:?}", stopped.elapsed());
    assert!(finished.stderr.contains("process 1"), "{finished:?}");
    assert!(finished.stderr.contains("silent"), "{finished:?}");
    wait_until("the processes to end", || children.iter().all(|&child| is_gone(child)));
}

#[test]
fn a_killed_supervisor_takes_its_processes_along() {
    let bench = Workbench::new();
    let run = bench.start(&[&["train", "run.toml", "-n", "3", "-w", "1"], &ENDLESS[..]].concat());
    let children = run.children(3);
    wait_for_steps(&bench);
    run.signal("KILL");
    let killed = Instant::now();
    wait_until("the processes to end", || children.iter().all(|&child| is_gone(child)));
    assert!(killed.elapsed() < SOON, "{:?}", killed.elapsed());
    assert_eq!(run.finish().status.code(), None);
}

/// The processes of a killed run release its folder shortly after it; here one of them does so as
/// late as the test wants.
#[test]
fn a_restart_right_after_a_kill_waits_for_those_that_are_still_dying() {
    let bench = Workbench::new();
    let mut run =
        bench.start(&[&["train", "run.toml", "-n", "2", "-w", "1"], &ENDLESS[..]].concat());
    let holder = run.children(2)[0];
    wait_for_steps(&bench);
    signal("STOP", &holder.to_string());
    run.signal("KILL");
    // The output ends with that of the stopped process, which writes to the same pipe.
    wait_until("the supervisor to end", || run.has_ended());
    let next = bench.start(&["train", "run.toml", "-w", "1"]);
    wait_until("the next run to look at the lock", || {
        let open = std::fs::read_dir(format!("/proc/{}/fd", next.pid())).into_iter().flatten();
        let mut targets = open.flatten().flat_map(|entry| std::fs::read_link(entry.path()));
        targets.any(|target| target.ends_with("run.lock"))
    });
    signal("CONT", &holder.to_string());
    next.finish().expect(0);
    assert!(is_gone(holder));
    assert_eq!(run.finish().status.code(), None);
}

/// Another run may be writing the file under the old name.
#[test]
fn a_run_folder_that_is_renamed_ends_its_run_and_leaves_the_next_alone() {
    for world in [&["-w", "1"][..], &["-n", "2", "-w", "1"]] {
        renamed(world);
    }
}

fn renamed(world: &[&str]) {
    let bench = Workbench::new();
    let train = |more: &[&str]| bench.start(&[&["train", "run.toml"], world, more].concat());
    train(&["--set", "run.dir=reference"]).finish().expect(0);
    let every = ["--set", "checkpoint.every_steps=1"];
    let first = train(&[&ENDLESS[..], &every].concat());
    wait_until("the second checkpoint", || {
        let checkpoints = std::fs::read_dir(bench.path("run/checkpoints"));
        let names = checkpoints.into_iter().flatten().flatten().map(|entry| entry.file_name());
        let step = |name: &str| name.strip_prefix("step-")?.parse::<u64>().ok();
        names.filter_map(|name| step(name.to_str()?)).any(|step| step >= 2)
    });
    std::fs::rename(bench.path("run"), bench.path("moved")).unwrap();
    let second = train(&[]);
    first.finish().failed(75, &["run was removed or renamed"]);
    second.finish().expect(0);
    assert_same(&bench.outcome("run"), &bench.outcome("reference"), "the next run");
    let reference = files(&bench.path("reference"));
    assert!(files(&bench.path("run")).keys().eq(reference.keys()), "nothing of the first");
    // The first log is complete up to its last step.
    let moved = bench.outcome("moved").checkpoint_steps();
    assert!(moved.len() <= 3 && moved.last() >= Some(&2), "{moved:?}");
}

/// Without a supervisor, the other processes notice by themselves.
#[test]
fn a_killed_process_of_a_hosts_file_is_named_by_the_others() {
    let bench = Workbench::new();
    bench.write("hosts", program::free_hosts(3));
    let start = |process: &str| {
        let arguments = ["train", "run.toml", "-p", process, "--hosts", "hosts", "-w", "1"];
        bench.start(&[&arguments, &ENDLESS[..]].concat())
    };
    let [first, second, third] = ["0", "1", "2"].map(start);
    wait_for_steps(&bench);
    second.signal("KILL");
    let killed = Instant::now();
    for survivor in [first, third] {
        let finished = survivor.finish().failed(75, &["process 1"]);
        assert!(killed.elapsed() < SOON, "{finished:?}");
    }
    assert_eq!(second.finish().status.code(), None);
}

/// A process that is alive but silent is given up at the deadline, by its peers alone.
#[test]
fn a_silent_process_of_a_hosts_file_is_given_up() {
    let bench = Workbench::new();
    bench.write("hosts", program::free_hosts(2));
    let start = |process: &str| {
        let arguments = ["train", "run.toml", "-p", process, "--hosts", "hosts", "-w", "2"];
        bench.start(&[&arguments, &ENDLESS[..]].concat())
    };
    let [first, second] = ["0", "1"].map(start);
    wait_for_steps(&bench);
    second.signal("STOP");
    let stopped = Instant::now();
    first.finish().failed(75, &["process 1", "silent for 2 s"]);
    assert!(stopped.elapsed() < SOON, "{:?}", stopped.elapsed());
}

/// A run that would wait for its last step for ever.
const PATIENT: [&str; 2] = ["--set", "run.peer_deadline_seconds=1000"];

/// Two processes of a hosts file, the second of which is stopped with SIGSTOP in the middle of
/// training.
fn one_of_two_stopped(bench: &Workbench, set: &[&str]) -> [Running; 2] {
    bench.write("hosts", program::free_hosts(2));
    let start = |process: &str| {
        let arguments = ["train", "run.toml", "-p", process, "--hosts", "hosts", "-w", "1"];
        bench.start(&[&arguments, &ENDLESS[..], &PATIENT, set].concat())
    };
    let runs = ["0", "1"].map(start);
    wait_for_steps(bench);
    runs[1].signal("STOP");
    runs
}

/// The first asks for a last step, in which the other process would have to take part.
#[test]
fn the_second_signal_ends_a_run_that_waits_for_another_process() {
    let bench = Workbench::new();
    let [first, _second] = one_of_two_stopped(&bench, &[]);
    let asked = Instant::now();
    first.signal_until_it_ends("TERM").expect(75);
    assert!(asked.elapsed() < SOON, "{:?}", asked.elapsed());
}

#[test]
fn the_second_signal_to_a_supervisor_ends_its_processes_with_it() {
    let bench = Workbench::new();
    let arguments = ["train", "run.toml", "-n", "2", "-w", "1"];
    let run = bench.start(&[&arguments, &ENDLESS[..], &PATIENT].concat());
    let children = run.children(2);
    wait_for_steps(&bench);
    signal("STOP", &children[1].to_string());
    let asked = Instant::now();
    run.signal_until_it_ends("TERM").expect(75);
    assert!(asked.elapsed() < SOON, "{:?}", asked.elapsed());
    assert!(children.iter().all(|&child| is_gone(child)), "none is left behind");
}

/// A single signal is not waited for without end either.
#[test]
fn a_request_to_stop_that_cannot_be_met_ends_at_the_step_deadline() {
    let bench = Workbench::new();
    let [first, _second] = one_of_two_stopped(&bench, &["--set", "run.step_deadline_seconds=1"]);
    let asked = Instant::now();
    first.signal("TERM");
    let finished = first.finish().failed(75, &["process 1", "has stood still for 1 s"]);
    assert!(asked.elapsed() < SOON, "{finished:?}");
}

/// A pipe that is full, and has no reader.
fn full_pipe(path: &Path) -> File {
    const NON_BLOCKING: i32 = 0o4000;
    assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
    let mut options = File::options();
    let mut pipe = options.read(true).write(true).custom_flags(NON_BLOCKING).open(path).unwrap();
    for bytes in [vec![b'.'; 4096], vec![b'.']] {
        loop {
            match pipe.write(&bytes) {
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => panic!("{error}"),
            }
        }
    }
    pipe
}

/// The observer of the run's progress blocks, and with it the reporting worker: the program cannot
/// even print that.
#[test]
fn a_run_whose_words_find_no_reader_ends_at_the_step_deadline() {
    let bench = Workbench::new();
    let _unread = full_pipe(&bench.path("unread"));
    let set = ["--set", "run.step_deadline_seconds=1"];
    let arguments = [&["train", "run.toml", "-w", "1"], &ENDLESS[..], &set].concat();
    let run = Running::start_in_shell(bench.folder(), "exec \"$@\" 2>unread", &arguments);
    run.finish_within(SOON).expect(75);
}

/// Processes with other settings or other work for the same run do not begin.
#[test]
fn processes_with_other_settings_are_refused() {
    let cases = [("batch.lanes", ["8", "4"]), ("parallel.shard", ["gradients", "parameters"])];
    for (key, values) in cases {
        let bench = Workbench::new();
        bench.write("hosts", program::free_hosts(2));
        let start = |(process, value): (&str, &str)| {
            let set = format!("{key}={value}");
            let place = ["train", "run.toml", "-p", process, "--hosts", "hosts", "-w", "1"];
            bench.start(&[&place[..], &["--set", &set]].concat())
        };
        let runs = [("0", values[0]), ("1", values[1])].map(start);
        for run in runs {
            run.finish().refused(1, &[key, values[0], values[1]]);
        }
        assert!(!bench.path("run").exists());
    }
}
