//! A new run may begin with the parameters of a checkpoint, of this program or of transformers.
//!
//! With transformers' checkpoints the losses, norms and rates of six steps are those that transformers and PyTorch computed on the
//! same batches (`fixtures/transformers/generate.py`).

use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tidemill::metrics::{self, StepMetrics};
use tidemill::model::hugging_face::save;
use tidemill::model::{Blueprint, ModelConfig};

use crate::support::Workbench;
use crate::support::device::{backend, precision};

/// Checkpoints that transformers wrote, the first two in several files, the last in bf16.
const CHECKPOINTS: [&str; 3] = ["llama", "mamba2", "mistral"];

/// The largest difference of a loss or norm from transformers', relative where these are above 1.
fn tolerance() -> f64 {
    match precision().as_str() {
        "fp32" => 5e-5,
        _ => 4e-2,
    }
}

/// A difference that no tolerance lets pass.
const FAR: f64 = 0.05;

fn folder(checkpoint: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/transformers").join(checkpoint)
}

/// A run on the batches on which transformers trained a checkpoint, with the same optimizer.
struct Continued {
    bench: Workbench,
    expected: Value,
}

impl Continued {
    fn new(checkpoint: &str) -> Self {
        let bench = Workbench::new();
        let path = folder(checkpoint).join("expected.json");
        let mut expected: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        let expected = expected["training"].take();
        let batches: Vec<Vec<Vec<u32>>> =
            serde_json::from_value(expected["batches"].clone()).unwrap();
        assert_eq!(batches[..3], batches[3..], "the second epoch repeats the first");
        let rows = batches[..3].concat();
        assert_eq!(rows.len(), 15);
        write_mds(&bench, &rows);
        bench.tidemill(&["prepare", "--input", "rows", "--output", "other-data"]).expect(0);
        Self { bench, expected }
    }

    /// Six steps from the parameters in `from`.
    fn train(&self, dir: &str, from: &Path) -> Vec<StepMetrics> {
        self.train_to(6, 2, dir, from)
    }

    /// The first `steps` steps from the parameters in `from`, or those that are left of them.
    fn train_to(&self, steps: u64, workers: usize, dir: &str, from: &Path) -> Vec<StepMetrics> {
        let settings = &self.expected["settings"];
        let config = format!(
            "[run]\ndir = {dir:?}\nsteps = {steps}\n\
             [model]\nfrom = {from:?}\n\
             [data]\ndataset = \"other-data\"\nshuffle = \"none\"\n\
             [batch]\nsamples_per_step = 5\n\
             [optimizer]\nlearning_rate = {}\nbetas = {}\neps = {}\nweight_decay = {}\nclip_norm = {}\n\
             [schedule]\nsteps = {}\nwarmup_steps = {}\nfinal_fraction = {}\n\
             [device]\nbackend = {:?}\nprecision = {:?}\n",
            settings["learning_rate"],
            settings["betas"],
            settings["eps"],
            settings["weight_decay"],
            settings["clip_norm"],
            settings["horizon"],
            settings["warmup_steps"],
            settings["final_fraction"],
            backend(),
            precision()
        );
        let file = format!("{dir}.toml");
        self.bench.write(&file, config);
        self.bench.tidemill(&["train", &file, "-w", &workers.to_string()]).expect(0);
        metrics::read(&self.bench.path(dir)).unwrap()
    }
}

/// Writes rows of tokens as an MDS data set in the folder `rows`.
fn write_mds(bench: &Workbench, rows: &[Vec<u32>]) {
    let (samples, row_bytes) = (rows.len(), 4 * rows[0].len());
    let table_bytes = 4 * (samples + 2);
    let offsets = (0..=samples).map(|row| (table_bytes + row * row_bytes) as u32);
    let words = std::iter::once(samples as u32).chain(offsets).chain(rows.concat());
    let shard: Vec<u8> = words.flat_map(u32::to_le_bytes).collect();
    let index = json!({"version": 2, "shards": [{
        "column_encodings": [format!("ndarray:int32:{}", rows[0].len())],
        "column_names": ["tokens"], "column_sizes": [row_bytes], "compression": null, "format": "mds",
        "raw_data": {"basename": "shard.00000.mds", "bytes": shard.len(), "hashes": {}},
        "samples": samples, "version": 2, "zip_data": null,
    }]});
    bench.write("rows/index.json", index.to_string());
    bench.write("rows/shard.00000.mds", shard);
}

#[test]
fn a_checkpoint_of_transformers_goes_on_as_in_transformers() {
    for checkpoint in CHECKPOINTS {
        let continued = Continued::new(checkpoint);
        let found = continued.train("run", &folder(checkpoint));
        let expected = continued.expected["steps"].as_array().unwrap();
        assert_eq!((found.len(), expected.len()), (6, 6));
        for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
            let step = index as u64 + 1;
            assert_eq!((found.step, found.tokens), (step, step * 5 * 13), "{checkpoint}");
            for (what, found, tolerance) in [
                ("loss", found.loss, tolerance()),
                ("grad_norm", found.grad_norm, tolerance()),
                ("learning_rate", found.learning_rate, 1e-12),
            ] {
                let expected = expected[what].as_f64().unwrap();
                let error = (found - expected).abs() / expected.max(1.0);
                assert!(
                    error < tolerance,
                    "{checkpoint}, step {step}: {what} {found}, transformers {expected}"
                );
            }
        }
    }
}

/// A continued run has its parameters in its own checkpoints, and the sizes in `config.json` of the folder.
#[test]
fn a_continued_run_resumes_without_the_parameters_that_it_began_with() {
    let continued = Continued::new("mistral");
    let bench = &continued.bench;
    let [config, parameters] = ["config.json", "model.safetensors"].map(|name| {
        let bytes = std::fs::read(folder("mistral").join(name)).unwrap();
        bench.write(&format!("model/{name}"), bytes)
    });
    let from = bench.path("model");
    continued.train("undisturbed", &from);
    continued.train_to(3, 3, "run", &from);
    std::fs::remove_file(parameters).unwrap();
    continued.train_to(6, 1, "run", &from);
    let (found, reference) = (bench.outcome("run"), bench.outcome("undisturbed"));
    assert_eq!(found.steps, reference.steps);
    assert_eq!(found.latest(), reference.latest());
    // Sizes that are no longer there, or others.
    std::fs::remove_file(&config).unwrap();
    bench.tidemill(&["train", "run.toml"]).refused(1, &["config.json"]);
    let sizes = std::fs::read_to_string(folder("mistral").join("config.json")).unwrap();
    std::fs::write(&config, sizes.replace("\"rope_theta\": 10000.0", "\"rope_theta\": 5000.0"))
        .unwrap();
    bench.tidemill(&["train", "run.toml"]).refused(1, &["model.rope_theta", "10000", "5000"]);
}

/// The same sizes with other parameters are far from transformers' loss.
#[test]
fn a_fresh_model_does_not_begin_where_a_checkpoint_does() {
    for checkpoint in CHECKPOINTS {
        let continued = Continued::new(checkpoint);
        let config = ModelConfig::read(&folder(checkpoint)).unwrap();
        let fresh = Blueprint::new(&config).unwrap();
        let from = continued.bench.path("fresh");
        std::fs::create_dir(&from).unwrap();
        save(&from, fresh.config_json(), fresh.layout(), &fresh.initialize(17)).unwrap();
        let found = continued.train_to(1, 2, "run", &from)[0].loss;
        let expected = continued.expected["steps"][0]["loss"].as_f64().unwrap();
        let error = (found - expected).abs() / expected.max(1.0);
        assert!(error > FAR, "{checkpoint}: {found}, transformers {expected}");
    }
}

/// With a learning rate of zero the parameters stay those of the checkpoint.
#[test]
fn a_checkpoint_is_a_model_to_begin_from() {
    let bench = Workbench::new();
    bench.tidemill(&["train", "run.toml", "-w", "2"]).expect(0);
    let reference = bench.outcome("run");
    for folder in ["run/checkpoints/step-00000005", "run", "exported"] {
        if folder == "exported" {
            std::fs::create_dir(bench.path(folder)).unwrap();
            for name in ["config.json", "model.safetensors"] {
                std::fs::write(bench.path(folder).join(name), &reference.latest()[name]).unwrap();
            }
        }
        let (dir, from) =
            (format!("run.dir=from-{}", folder.len()), format!("model={{from = {folder:?}}}"));
        let still = ["--set", "optimizer.learning_rate=0", "--set", "run.steps=2"];
        let arguments = ["train", "run.toml", "-w", "2", "--set", &dir, "--set", &from];
        bench.tidemill(&[&arguments, &still[..]].concat()).expect(0);
        let run_folder = bench.path(&format!("from-{}", folder.len()));
        let found = bench.outcome(run_folder.to_str().unwrap());
        assert_eq!(found.latest()["model.safetensors"], reference.latest()["model.safetensors"]);
        let lines = metrics::read::<StepMetrics>(&run_folder).unwrap();
        assert!(lines[0].loss < reference.loss(0), "it begins where the other ended");
    }
}
