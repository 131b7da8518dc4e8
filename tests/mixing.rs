//! Data sets mixed in `[[data.streams]]`: elastic like one, resumed exactly, and every change of
//! their settings is noticed.

use tidemill::job::{ResolvedRun, RunConfig};
use tidemill::streaming_data::DataSet;

use crate::support::workbench::{causes, config};
use crate::support::{Job, Workbench, assert_same};

/// The config of the workbench with its two data sets mixed, with the given settings of each.
fn mixed(bench: &Workbench, first: &str, second: &str) -> String {
    let streams = format!(
        "[[data.streams]]\nname = \"tales\"\ndataset = {:?}\n{first}\n\
         [[data.streams]]\nname = \"notes\"\ndataset = {:?}\n{second}\n",
        bench.path("data"),
        bench.path("validation"),
    );
    let config = config();
    assert!(config.contains("dataset = \"data\"\n"));
    config.replace("dataset = \"data\"\n", "").replace("\n[batch]", &format!("{streams}\n[batch]"))
}

#[test]
fn a_mixture_is_elastic_and_resumes() {
    let bench = Workbench::new();
    let config = mixed(&bench, "proportion = 0.8", "proportion = 0.2");
    let run = |dir, workers, set: &[&str]| {
        bench.try_train_with(&config, Job { dir, workers, set }).unwrap();
        bench.outcome(dir)
    };
    let reference = run("reference", 1, &[]);
    assert_same(&run("three", 3, &["batch.microbatch_grains=1"]), &reference, "three workers");
    run("stopped", 2, &["run.steps=2", "schedule.steps=5"]);
    assert_same(&run("stopped", 5, &["schedule.steps=5"]), &reference, "resumed with others");

    // It is the mixture that was asked for, and not one of its data sets.
    let set = [format!("run.dir={:?}", bench.path("looked-at"))];
    let resolved =
        ResolvedRun::new(RunConfig::parse(&config, "run.toml", &set).unwrap(), 1).unwrap();
    for step in 0..5 {
        let positions = step * 45..(step + 1) * 45;
        let notes = positions.filter(|&position| resolved.data.sample_at(position).part == 1);
        assert_eq!(notes.count(), 9, "a fifth of step {step}");
    }
    let other = [&set[..], &["run.seed=18".to_owned()]].concat();
    let other =
        ResolvedRun::new(RunConfig::parse(&config, "run.toml", &other).unwrap(), 1).unwrap();
    let differs = |at| resolved.data.sample_at(at).sample != other.data.sample_at(at).sample;
    assert!((0..225).any(differs), "another seed is another order");
    bench.train(Job { dir: "alone", workers: 1, set: &[] });
    assert_ne!(
        bench.outcome("alone").latest()["model.safetensors"],
        reference.latest()["model.safetensors"]
    );
}

/// Streams with a chosen number of samples and with repeated samples: epochs of the mixture and of
/// its data sets end in the middle of steps, and a run resumes behind them.
#[test]
fn a_mixture_goes_on_past_its_epochs() {
    let bench = Workbench::new();
    let config = mixed(&bench, "samples = 20", "repeat = 2.0");
    let notes = DataSet::open(bench.path("validation")).unwrap().samples();
    assert!(20 + 2 * notes <= 2 * 45, "two steps are an epoch or more");
    let run = |dir, workers, steps: &str| {
        let set = [&format!("run.steps={steps}"), "schedule.steps=5"];
        bench.try_train_with(&config, Job { dir, workers, set: &set }).unwrap();
        bench.outcome(dir)
    };
    let expected = run("reference", 1, "5");
    run("stopped", 2, "2");
    run("stopped", 5, "4");
    assert_same(&run("stopped", 3, "5"), &expected, "gone on with twice");
}

#[test]
fn a_changed_stream_is_named_on_resume() {
    let bench = Workbench::new();
    let train = |first: &str, second: &str| {
        let job = Job { dir: "run", workers: 1, set: &["run.steps=2", "schedule.steps=2"] };
        bench.try_train_with(&mixed(&bench, first, second), job)
    };
    train("proportion = 0.8", "proportion = 0.2").unwrap();
    let changes = [
        (("proportion = 0.8", "proportion = 0.1"), ["data.streams.notes.amount", "0.2", "0.1"]),
        (("repeat = 4", "repeat = 1"), ["data.streams.tales.amount", "0.8", "repeat = 4"]),
        (("samples = 70", "samples = 7"), ["data.streams.tales.amount", "0.8", "samples = 70"]),
    ];
    for ((first, second), expected) in changes {
        let error = causes(&train(first, second).unwrap_err());
        for part in expected {
            assert!(error.contains(part), "{part:?} is not in {error:?}");
        }
    }
    let job = Job { dir: "run", workers: 1, set: &["run.steps=2", "schedule.steps=2"] };
    let error = causes(&bench.try_train(job).unwrap_err());
    assert!(error.contains("data.number of streams is 2"), "{error}");
    // The same shares in other keys are the same mixture.
    train("proportion = 80", "proportion = 20").unwrap();
}

#[test]
fn a_wrong_stream_is_refused_by_its_name() {
    let bench = Workbench::new();
    let refused = |config: &str, expected: &[&str]| {
        let job = Job { dir: "run", workers: 1, set: &[] };
        let error = causes(&bench.try_train_with(config, job).unwrap_err());
        for part in expected {
            assert!(error.contains(part), "{part:?} is not in {error:?}");
        }
        assert!(!bench.path("run").exists(), "nothing is written");
    };
    let expected = ["data.streams.notes", "at most one of proportion, repeat and samples"];
    refused(&mixed(&bench, "", "repeat = 1.0\nsamples = 3"), &expected);
    refused(
        &mixed(&bench, "proportion = 0.5", ""),
        &["tales has a proportion beside other amounts"],
    );
    refused(&mixed(&bench, "", "samples = 0"), &["notes has samples = 0"]);
    refused(&mixed(&bench, "", "weight = 1.0"), &["weight", "unknown field"]);
    let both = mixed(&bench, "", "").replace("[data]\n", "[data]\ndataset = \"data\"\n");
    refused(&both, &["data.dataset, data.streams", "exactly one of them", "both"]);
    let missing = mixed(&bench, "", "").replace("validation\"", "nowhere\"");
    refused(&missing, &["nowhere", "expected a folder, found nothing"]);
    let tokenizer = bench.path("validation").join("tokenizer.json");
    let text = std::fs::read_to_string(&tokenizer).unwrap();
    std::fs::write(&tokenizer, text.replace("<|pad|>", "<|nothing|>")).unwrap();
    refused(&mixed(&bench, "", ""), &["data.streams.notes (its tokenizer)", "tales"]);
}
