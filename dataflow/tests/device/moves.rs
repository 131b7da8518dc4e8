//! Runs that move between the CPU and another kind of device.

use std::collections::BTreeMap;
use std::net::TcpListener;
use std::num::NonZeroUsize;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use tempfile::TempDir;
use tidemill::JobError;
use tidemill::cluster::ClusterSettings;
use tidemill::job::{
    ResolvedRun, RunConfig, StopRequest, TrainEvent, TrainOptions, TrainSummary, train,
};
use tidemill::streaming_data::prepare::{ByteTokenizer, PrepareSettings, prepare};

const STEPS: u64 = 6;

const CONFIG: &str = r#"
[model]
kind = "mamba"
d_model = 20
n_layers = 2
d_state = 5
d_conv = 3
expand = 3

[batch]
samples_per_step = 9
lanes = 4
grain_samples = 2
microbatch_grains = 1

[optimizer]
learning_rate = 3e-3

[schedule]
warmup_steps = 2
steps = 6
"#;

/// Another kind of device than the CPU.
pub struct Other {
    /// `device.backend`.
    pub backend: &'static str,
}

/// Runs on a data set of their own, and what they told.
struct Moves {
    folder: TempDir,
    losses: Arc<Mutex<BTreeMap<u64, f64>>>,
    changes: Arc<Mutex<Vec<String>>>,
}

impl Moves {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let text = folder.path().join("text.txt");
        std::fs::write(&text, "the tide turns the mill, and the mill turns the stone. ".repeat(40))
            .unwrap();
        let seq_len = NonZeroUsize::new(17).unwrap();
        let settings = PrepareSettings::new(vec![text], folder.path().join("data"), seq_len);
        prepare(&settings, &ByteTokenizer, &mut |_| ControlFlow::Continue(())).unwrap();
        Self { folder, losses: Arc::default(), changes: Arc::default() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Trains in the run folder `dir` up to `steps`.
    fn train(
        &self,
        dir: &str,
        backend: &str,
        steps: u64,
        cluster: ClusterSettings,
    ) -> Result<TrainSummary, JobError> {
        let set = [
            format!("run.dir={:?}", self.path(dir)),
            format!("run.steps={steps}"),
            format!("data.dataset={:?}", self.path("data")),
            format!("device.backend={backend:?}"),
        ];
        let config = RunConfig::parse(CONFIG, "run.toml", &set)?;
        let (losses, changes) = (Arc::clone(&self.losses), Arc::clone(&self.changes));
        let observer = move |event: &TrainEvent| match event {
            TrainEvent::Started { device_changes, .. } => {
                changes.lock().unwrap().extend(device_changes.iter().cloned());
            }
            TrainEvent::Step(metrics) => {
                losses.lock().unwrap().insert(metrics.step, metrics.loss);
            }
            _ => {}
        };
        let run = ResolvedRun::new(config, cluster.workers)?;
        let (stop, observer) = (StopRequest::default(), Arc::new(observer));
        train(run, TrainOptions { cluster, stop, observer, trace: None })
    }

    /// The events since the last call: losses by step, and changes of the kind of device.
    fn told(&self) -> (BTreeMap<u64, f64>, Vec<String>) {
        let losses = std::mem::take(&mut *self.losses.lock().unwrap());
        (losses, std::mem::take(&mut *self.changes.lock().unwrap()))
    }
}

/// With losses that stay close to those of a run that never moved.
pub fn a_run_may_move_and_move_back_at_a_checkpoint(other: &Other) {
    let moves = Moves::new();
    let train = |dir, backend, steps| {
        let summary = moves.train(dir, backend, steps, ClusterSettings::workers(2)).unwrap();
        assert_eq!(summary.step, steps);
        moves.told()
    };
    let (expected, changes) = train("reference", "cpu", STEPS);
    assert!(changes.is_empty(), "{changes:?}");
    let (mut found, _) = train("moving", "cpu", 2);
    for (backend, steps) in [(other.backend, 4), ("cpu", STEPS)] {
        let (losses, changes) = train("moving", backend, steps);
        assert!(!changes.is_empty(), "the move to {backend} was not told");
        found.extend(losses);
    }
    assert_eq!(found.len() as u64, STEPS);
    for (step, expected) in expected {
        let found = found[&step];
        assert!((expected - found).abs() < 1e-3, "step {step}: {expected} {found}");
    }
}

/// Both processes refuse, before anything is written.
pub fn peers_on_another_kind_of_device_are_refused(other: &Other) {
    let moves = Moves::new();
    let listeners = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
    let addresses: Vec<String> =
        listeners.iter().map(|listener| listener.local_addr().unwrap().to_string()).collect();
    std::thread::scope(|scope| {
        let backends = ["cpu", other.backend];
        let mut peers = Vec::new();
        for (process, (listener, backend)) in listeners.into_iter().zip(backends).enumerate() {
            let cluster = ClusterSettings {
                listener: Some(listener),
                ..ClusterSettings::process(1, process, addresses.clone())
            };
            let moves = &moves;
            peers.push(scope.spawn(move || moves.train("run", backend, STEPS, cluster)));
        }
        for peer in peers {
            let error = peer.join().unwrap().unwrap_err().to_string();
            for part in ["peers disagree on device.backend", "cpu ", other.backend] {
                assert!(error.contains(part), "{part:?} is not in {error:?}");
            }
        }
    });
    assert!(!moves.path("run").exists(), "the run folder was made");
}
