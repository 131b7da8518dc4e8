//! Losses that are not finite: the run ends before they reach a weight, and names the samples.
//!
//! Seen red: with a step, a lane, a grain, a position or a row that is not the one at fault, and without its file.

use serde_json::{Value, json};
use tidemill::job::{ResolvedRun, RunConfig};

use super::models::with_header;
use super::nothing_half_written;
use crate::support::workbench::{SEQ_LEN, config, text};
use crate::support::{Job, Workbench};

/// A token of one document only.
const RARE: u8 = b'Q';

/// A model with a head of its own, which has no number for [`RARE`].
fn model_without_a_number(bench: &Workbench) {
    bench.train(Job { dir: "made", workers: 1, set: &["run.steps=1", "schedule.warmup_steps=1"] });
    let made = |name: &str| std::fs::read(bench.path("made/checkpoints/step-00000001").join(name));
    let mut config: Value = serde_json::from_slice(&made("config.json").unwrap()).unwrap();
    config["tie_word_embeddings"] = json!(false);
    bench.write("model/config.json", config.to_string());
    let mut place = [0, 0];
    let mut weights = with_header(&made("model.safetensors").unwrap(), |header| {
        let table = header["backbone.embeddings.weight"].clone();
        place = [0, 1].map(|end| table["data_offsets"][end].as_u64().expect("a number") as usize);
        let ends = header.values().filter_map(|tensor| tensor["data_offsets"][1].as_u64());
        let (end, bytes) = (ends.max().expect("tensors"), (place[1] - place[0]) as u64);
        let mut head = table;
        head["data_offsets"] = json!([end, end + bytes]);
        header.insert("lm_head.weight".to_owned(), head);
    });
    let header_bytes = u64::from_le_bytes(weights[..8].try_into().expect("8 bytes")) as usize;
    let table = 8 + header_bytes + place[0]..8 + header_bytes + place[1];
    weights.extend_from_within(table.clone());
    let width = config["hidden_size"].as_u64().expect("a width") as usize;
    let row = table.start + 4 * width * usize::from(RARE);
    weights[row..row + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    bench.write("model/model.safetensors", weights);
}

#[test]
fn a_sample_without_a_finite_loss_is_named_with_its_step_lane_row_and_file() {
    let bench = Workbench::new();
    model_without_a_number(&bench);
    let words = text(8, 2500);
    let (before, behind) = words.split_at(words.len() / 2);
    let texts = bench.write("rare.txt", format!("{before} Q {behind}"));
    bench.prepare(&texts, "rare");
    let set = ["data.dataset=rare", "model={from = \"model\"}", "batch.grain_samples=1"];
    let absolute = [("data.dataset", "rare"), ("run.dir", "run")]
        .map(|(key, name)| format!("{key}={:?}", bench.path(name)));
    let resolved = RunConfig::parse(&config(), "run.toml", &absolute).unwrap();
    let data = ResolvedRun::new(resolved, 1).unwrap().data;
    let shards = data.data_set(0).shards();
    assert!(shards.len() > 3, "a file to be told from others");
    // Its last token is a target, and not an input.
    let holds = |at: &u64| {
        let tokens = data.data_set(0).sample(data.sample_at(*at).sample).unwrap();
        tokens[..SEQ_LEN].contains(&u32::from(RARE))
    };
    let found: Vec<u64> = (0..data.samples()).filter(holds).collect();
    let [position] = found[..] else { panic!("one sample, not {found:?}") };
    let sample = data.sample_at(position).sample;
    let (step, in_step) = (position / 45, position % 45);
    let lane = (0..8).rfind(|lane| lane * 45 / 8 <= in_step).expect("a lane");
    let grain = in_step - lane * 45 / 8;
    assert!(step > 0 && lane > 0 && grain > 1, "not in the first of anything: {in_step}");
    let said = format!(
        "step {}: the loss is NaN in 1 of 8 lanes, first in grain {grain} of lane {lane}, at position \
         {position} (row {} of rare/{})",
        step + 1,
        sample.row,
        shards[sample.shard].path().file_name().expect("a file").display(),
    );
    let steps = format!("run.steps={}", step + 3);
    let set = set.into_iter().chain([steps.as_str()]).flat_map(|set| ["--set", set]);
    let train: Vec<&str> = ["train", "run.toml", "-w", "2"].into_iter().chain(set).collect();
    bench.tidemill(&train).failed(1, &[&said]);
    let last = format!("run/checkpoints/step-{:08}", step + 1);
    assert!(!bench.path(&last).exists(), "a checkpoint of what has no loss");
}

#[test]
fn parameters_that_have_grown_out_of_bounds_are_told_from_a_bad_sample() {
    let bench = Workbench::new();
    let absurd = ["optimizer.learning_rate=1e30", "schedule.warmup_steps=0", "data.shuffle=none"];
    for processes in ["1", "2"] {
        let set = absurd.into_iter().flat_map(|set| ["--set", set]);
        let train = ["train", "run.toml", "-w", "1", "-n", processes];
        let train: Vec<&str> = train.into_iter().chain(set).collect();
        let said = "in 8 of 8 lanes, as of parameters that have grown out of bounds, first in grain 0 of \
                    lane 0, at positions 45 to 46 (rows 45, 46 of data/";
        bench.tidemill(&train).failed(1, &["step 2: the loss is ", said]);
        nothing_half_written(&bench);
    }
}
