//! Short training runs: the whole way from text to weights, whose bits must not depend on how the work is shared out.

use std::net::TcpListener;
use std::num::NonZeroUsize;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Context;
use tempfile::TempDir;
use tidemill_streaming_data::prepare::{ByteTokenizer, PrepareSettings, prepare};

use super::advice::REPORT;
use super::page::{Check, Section};
use crate::cli::exit::one_line;
use crate::cluster::ClusterSettings;
use crate::device::{BackendChoice, DeviceChoice, DeviceSettings, Precision};
use crate::job::{ResolvedRun, RunConfig, StopRequest, TrainEvent, TrainOptions, train};

const STEPS: usize = 3;
const LANES: usize = 4;

const CONFIG: &str = r#"
[model]
kind = "mamba"
d_model = 24
n_layers = 2
d_state = 16
d_conv = 4
expand = 2

[batch]
samples_per_step = 8
lanes = 4
grain_samples = 1

[optimizer]
learning_rate = 3e-3

[schedule]
name = "constant"
warmup_steps = 0
"#;

/// How far losses of a GPU may be from the CPU's: more shows that something is wrong, not only rounded.
const FARTHEST: [(Precision, f64); 2] = [(Precision::Fp32, 1e-3), (Precision::Bf16, 0.1)];

/// How the work of a run is shared out.
struct Shared {
    workers: usize,
    processes: usize,
    microbatch_grains: usize,
}

/// The files that a run leaves.
struct Left {
    losses: Vec<f64>,
    /// The files of weights and of the optimizer's state.
    files: [Vec<u8>; 2],
}

/// Runs on a data set of their own.
struct Runs {
    folder: TempDir,
}

/// Adds what training on the backend comes to.
pub(super) fn add(section: &mut Section, backend: BackendChoice) {
    for (precision, farthest) in FARTHEST {
        if backend == BackendChoice::Cpu && precision == Precision::Bf16 {
            continue;
        }
        let check = format!("training, {}", precision.word());
        section.add(match compared(backend, precision, farthest) {
            Ok(Ok(found)) => Check::works(check, found),
            Ok(Err(wrong)) => Check::fails(check, wrong, REPORT),
            Err(error) => Check::fails(check, one_line(error.as_ref()), REPORT),
        });
    }
}

/// The properties in which runs agree, or the first in which they differ.
fn compared(
    backend: BackendChoice,
    precision: Precision,
    farthest: f64,
) -> anyhow::Result<Result<String, String>> {
    let runs = Runs::new()?;
    let settings = DeviceSettings { backend, precision, ..Default::default() };
    let workers = DeviceChoice::new(&settings)?.default_workers(LANES, 1).max(2);
    let alone = Shared { workers: 1, processes: 1, microbatch_grains: 2 };
    let expected = runs.train("alone", backend, precision, &alone)?;
    let [first, last] = [expected.losses.first(), expected.losses.last()].map(|loss| loss.copied());
    let (Some(first), Some(last)) = (first, last) else {
        return Ok(Err("no step was told".to_owned()));
    };
    if last.is_nan() || last >= first {
        return Ok(Err(format!("the loss does not fall: {:?}", expected.losses)));
    }
    let others = [
        (format!("{workers} workers"), Shared { workers, processes: 1, microbatch_grains: 1 }),
        ("2 processes".to_owned(), Shared { workers: 1, processes: 2, microbatch_grains: 4 }),
    ];
    let mut same = Vec::new();
    for (words, shared) in others {
        let found = runs.train(&words, backend, precision, &shared)?;
        if found.files != expected.files {
            return Ok(Err(format!("{words} leave other weights than one")));
        }
        same.push(words);
    }
    let mut found = format!(
        "{STEPS} steps, loss {first:.4} to {last:.4}; {} leave the same bytes as one",
        same.join(" and ")
    );
    if backend != BackendChoice::Cpu {
        let on_cpu = runs.train("cpu", BackendChoice::Cpu, Precision::Fp32, &alone)?;
        let apart = expected.losses.iter().zip(&on_cpu.losses).map(|(a, b)| (a - b).abs());
        let apart = apart.fold(0.0, f64::max);
        if apart.is_nan() || apart > farthest {
            return Ok(Err(format!("losses are up to {apart:.1e} from the CPU's")));
        }
        found.push_str(&format!("; losses within {apart:.1e} of the CPU's"));
    }
    Ok(Ok(found))
}

impl Runs {
    fn new() -> anyhow::Result<Self> {
        let folder = tempfile::tempdir().context("making a folder for short runs")?;
        let text = folder.path().join("text.txt");
        let words = "the tide turns the mill, and the mill turns the stone. ";
        std::fs::write(&text, words.repeat(40)).context("writing a text to train on")?;
        let seq_len = NonZeroUsize::new(24).context("a length")?;
        let settings = PrepareSettings::new(vec![text], folder.path().join("data"), seq_len);
        prepare(&settings, &ByteTokenizer, &mut |_| ControlFlow::Continue(()))?;
        Ok(Self { folder })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A run in a folder that is called as it is shared out.
    fn train(
        &self,
        name: &str,
        backend: BackendChoice,
        precision: Precision,
        shared: &Shared,
    ) -> anyhow::Result<Left> {
        let dir = self.path(name);
        let losses = Arc::new(Mutex::new(Vec::new()));
        let processes: Vec<ClusterSettings> = match shared.processes {
            1 => vec![ClusterSettings::workers(shared.workers)],
            processes => neighbours(processes, shared.workers)?,
        };
        std::thread::scope(|scope| {
            let started: Vec<_> = processes
                .into_iter()
                .map(|cluster| {
                    let losses = Arc::clone(&losses);
                    let (dir, grains) = (&dir, shared.microbatch_grains);
                    scope.spawn(move || {
                        self.take_part(dir, backend, precision, grains, cluster, &losses)
                    })
                })
                .collect();
            started.into_iter().try_for_each(|process| match process.join() {
                Ok(result) => result,
                Err(_) => Err(anyhow::anyhow!("a thread of a short run panicked")),
            })
        })?;
        let checkpoint = dir.join(format!("checkpoints/step-{STEPS:08}"));
        let read = |file: &str| {
            std::fs::read(checkpoint.join(file))
                .with_context(|| format!("reading {file} of a short run"))
        };
        let files = [read("model.safetensors")?, read("optimizer.safetensors")?];
        let losses = std::mem::take(&mut *losses.lock().unwrap_or_else(PoisonError::into_inner));
        Ok(Left { losses, files })
    }

    /// One process of a run.
    fn take_part(
        &self,
        dir: &Path,
        backend: BackendChoice,
        precision: Precision,
        microbatch_grains: usize,
        cluster: ClusterSettings,
        losses: &Arc<Mutex<Vec<f64>>>,
    ) -> anyhow::Result<()> {
        let set = [
            format!("run.dir={dir:?}"),
            format!("run.steps={STEPS}"),
            format!("data.dataset={:?}", self.path("data")),
            format!("batch.microbatch_grains={microbatch_grains}"),
            format!("device.backend={:?}", backend.word()),
            format!("device.precision={:?}", precision.word()),
        ];
        let config = RunConfig::parse(CONFIG, "the doctor's run", &set)?;
        let run = ResolvedRun::new(config, cluster.workers)?;
        let losses = Arc::clone(losses);
        let observer = Arc::new(move |event: &TrainEvent| {
            if let TrainEvent::Step(metrics) = event {
                losses.lock().unwrap_or_else(PoisonError::into_inner).push(metrics.loss);
            }
        });
        let stop = StopRequest::default();
        train(run, TrainOptions { cluster, stop, observer, trace: None })?;
        Ok(())
    }
}

/// Processes of a cluster on this machine, which are threads here.
fn neighbours(processes: usize, threads: usize) -> anyhow::Result<Vec<ClusterSettings>> {
    let listeners = (0..processes)
        .map(|_| TcpListener::bind("127.0.0.1:0"))
        .collect::<Result<Vec<_>, _>>()
        .context("listening for processes of a short run")?;
    let addresses = listeners
        .iter()
        .map(|listener| listener.local_addr().map(|address| address.to_string()))
        .collect::<Result<Vec<_>, _>>()
        .context("listening for processes of a short run")?;
    let settings = |(process, listener)| ClusterSettings {
        listener: Some(listener),
        ..ClusterSettings::process(threads, process, addresses.clone())
    };
    Ok(listeners.into_iter().enumerate().map(settings).collect())
}
