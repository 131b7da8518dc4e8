//! With any optimizer and any groups of parameters, settings that are not numerics change no bit,
//! and a checkpoint holds the states that its rule names.
//!
//! All other files test AdamW, the default.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use crate::support::killed::goes_on_where_it_was_killed;
use crate::support::workbench::config;
use crate::support::{Job, Outcome, Workbench, assert_same};

static BENCH: LazyLock<Workbench> = LazyLock::new(Workbench::new);

/// Lion, at the rate that the workbench has for AdamW.
const LION: &str = "optimizer.name=lion";

/// Adafactor, whose tensors have one owner each.
const ADAFACTOR: &str = "optimizer.name=adafactor";

/// Muon, the same.
const MUON: &str = "optimizer.name=muon";

/// Muon on one worker.
static ORTHOGONAL: LazyLock<Outcome> =
    LazyLock::new(|| BENCH.train(Job { dir: "orthogonal", workers: 1, set: &[MUON] }));

/// Adafactor on one worker, at the rate that it has by itself.
static FACTORED: LazyLock<Outcome> = LazyLock::new(|| {
    BENCH.train(Job {
        dir: "factored",
        workers: 1,
        set: &[ADAFACTOR, "optimizer.learning_rate=0.02"],
    })
});

/// Lion on one worker.
static REFERENCE: LazyLock<Outcome> =
    LazyLock::new(|| BENCH.train(Job { dir: "reference", workers: 1, set: &[LION] }));

/// Norms at a tenth of the rate with decay, and an embedding that stays unchanged.
const GROUPS: &str = r#"optimizer.groups=[
    { match = ["*.norm.*", "*.norm_f.*"], learning_rate_factor = 0.1, weight_decay = 0.3 },
    { match = ["*embeddings*"], learning_rate_factor = 0.0, weight_decay = 0.0 },
]"#;

/// AdamW with [`GROUPS`] on one worker.
static GROUPED: LazyLock<Outcome> =
    LazyLock::new(|| BENCH.train(Job { dir: "grouped", workers: 1, set: &[GROUPS] }));

/// The description of each tensor in a safetensors file, by name, and the bytes.
fn header(file: &[u8]) -> (impl Iterator<Item = (String, serde_json::Value)>, &[u8]) {
    let (length, rest) = file.split_first_chunk().unwrap();
    let (header, data) = rest.split_at(u64::from_le_bytes(*length) as usize);
    let header: serde_json::Map<_, _> = serde_json::from_slice(header).unwrap();
    (header.into_iter().filter(|(name, _)| name != "__metadata__"), data)
}

/// The shapes of the tensors of such a file.
fn shapes(file: &[u8]) -> BTreeMap<String, Vec<u64>> {
    let shape = |of: &serde_json::Value| serde_json::from_value(of["shape"].clone()).unwrap();
    header(file).0.map(|(name, of)| (name, shape(&of))).collect()
}

/// The bytes of the tensors of such a file.
fn contents(file: &[u8]) -> BTreeMap<String, &[u8]> {
    let (tensors, data) = header(file);
    let place = |of: &serde_json::Value, end: usize| {
        of["data_offsets"][end].as_u64().expect("a place in the file") as usize
    };
    tensors.map(|(name, of)| (name, &data[place(&of, 0)..place(&of, 1)])).collect()
}

/// The names of the tensors of such a file.
fn tensors(file: &[u8]) -> Vec<String> {
    contents(file).into_keys().collect()
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

#[test]
fn lion_goes_on_where_it_was_killed() {
    goes_on_where_it_was_killed(&BENCH, "lion", &config(), &[LION]);
}

#[test]
fn adafactor_goes_on_where_it_was_killed() {
    goes_on_where_it_was_killed(&BENCH, "adafactor", &config(), &[ADAFACTOR]);
}

#[test]
fn muon_goes_on_where_it_was_killed() {
    goes_on_where_it_was_killed(&BENCH, "muon", &config(), &[MUON]);
}

/// One state for matrices of hidden layers, two for all other tensors.
#[test]
fn muon_learns_and_keeps_momenta_of_hidden_matrices() {
    assert!(ORTHOGONAL.loss(4) < ORTHOGONAL.loss(0) - 0.1, "{:?}", ORTHOGONAL.steps);
    let [model, optimizer] = ["model.safetensors", "optimizer.safetensors"]
        .map(|name| shapes(&ORTHOGONAL.latest()[name]));
    let is_hidden = |name: &str| name.ends_with("_proj.weight");
    assert_eq!(model.keys().filter(|name| is_hidden(name)).count(), 8, "{:?}", model.keys());
    let mut expected = BTreeMap::new();
    for (name, shape) in &model {
        let states: &[_] = match is_hidden(name) {
            true => &["momentum_buffer"],
            false => &["exp_avg", "exp_avg_sq"],
        };
        expected.extend(states.iter().map(|state| (format!("{state}.{name}"), shape.clone())));
    }
    assert_eq!(optimizer, expected);
}

#[test]
fn muon_is_elastic() {
    for (workers, set) in [
        (2, &[MUON][..]),
        (5, &[MUON, "batch.microbatch_grains=1"]),
        (3, &[MUON, "parallel.shard=gradients"]),
        (3, &[MUON, "parallel.shard=parameters"]),
        (1, &[MUON, "device.threads=2"]),
    ] {
        let dir = format!("orthogonal-{workers}-{}", set.last().map_or(0, |last| last.len()));
        let found = BENCH.train(Job { dir: &dir, workers, set });
        assert_same(&found, &ORTHOGONAL, &format!("{workers} workers {set:?}"));
    }
}

/// A number for each row and each column of a matrix, and for each element of a vector.
#[test]
fn adafactor_learns_and_keeps_next_to_nothing() {
    assert!(FACTORED.loss(4) < FACTORED.loss(0) - 0.1, "{:?}", FACTORED.steps);
    let adamw = BENCH.train(Job { dir: "beside-factored", workers: 1, set: &["run.steps=2"] });
    assert_eq!(adamw.steps[0][1], FACTORED.steps[0][1], "the loss before the first update");
    assert_ne!(adamw.steps[1][1], FACTORED.steps[1][1], "and after it");
    let [model, optimizer] =
        ["model.safetensors", "optimizer.safetensors"].map(|name| shapes(&FACTORED.latest()[name]));
    let mut expected = BTreeMap::new();
    for (name, shape) in &model {
        let mut has = |state: &str, shape: &[u64]| {
            expected.insert(format!("{state}.{name}"), shape.to_vec());
        };
        match &shape[..] {
            [_] => has("exp_avg_sq", shape),
            [rows, columns @ ..] => {
                has("exp_avg_sq_row", &[*rows]);
                has("exp_avg_sq_col", columns);
            }
            [] => unreachable!("every tensor has a dimension"),
        }
    }
    assert_eq!(optimizer, expected);
    let values = |tensors: BTreeMap<String, Vec<u64>>| -> u64 {
        tensors.values().map(|shape| shape.iter().product::<u64>()).sum()
    };
    assert!(8 * values(optimizer) < values(model), "an eighth of a number of each parameter");
    for (name, state) in contents(&FACTORED.latest()["optimizer.safetensors"]) {
        assert!(state.iter().any(|&byte| byte != 0), "{name}");
    }
}

#[test]
fn adafactor_is_elastic() {
    let rate = "optimizer.learning_rate=0.02";
    for (workers, set) in [
        (2, &[ADAFACTOR, rate][..]),
        (5, &[ADAFACTOR, rate, "batch.microbatch_grains=1"]),
        (3, &[ADAFACTOR, rate, "parallel.shard=gradients"]),
        (3, &[ADAFACTOR, rate, "parallel.shard=parameters"]),
        (1, &[ADAFACTOR, rate, "device.threads=2"]),
    ]
    .into_iter()
    {
        let dir = format!("factored-{workers}-{}", set.len());
        let dir = format!("{dir}-{}", set.last().map_or(0, |last| last.len()));
        let found = BENCH.train(Job { dir: &dir, workers, set });
        assert_same(&found, &FACTORED, &format!("{workers} workers {set:?}"));
    }
}

/// The settings of `[optimizer.adafactor]` take effect, and a group's factor scales its steps.
#[test]
fn settings_of_adafactor_are_numerics() {
    let absolute = "optimizer.adafactor.step_size=absolute";
    let group = r#"optimizer.groups=[{ match = ["*embeddings*"], learning_rate_factor = 0.0 }]"#;
    for set in [absolute, "optimizer.adafactor.decay_exponent=0.5", group] {
        let set = [ADAFACTOR, "optimizer.learning_rate=0.02", set];
        let one = BENCH.train(Job { dir: "own-one", workers: 1, set: &set });
        let two = BENCH.train(Job { dir: "own-two", workers: 2, set: &set });
        assert_same(&one, &two, set[2]);
        assert_ne!(one.steps[4], FACTORED.steps[4], "{}", set[2]);
        for dir in ["own-one", "own-two"] {
            std::fs::remove_dir_all(BENCH.path(dir)).unwrap();
        }
    }
}

#[test]
fn groups_are_elastic() {
    for (index, (workers, set)) in [
        (2, &[GROUPS][..]),
        (5, &[GROUPS, "batch.microbatch_grains=1"]),
        (3, &[GROUPS, "parallel.shard=gradients"]),
        (3, &[GROUPS, "parallel.shard=parameters"]),
    ]
    .into_iter()
    .enumerate()
    {
        let dir = format!("grouped-{index}");
        let found = BENCH.train(Job { dir: &dir, workers, set });
        assert_same(&found, &GROUPED, &format!("{workers} workers {set:?}"));
    }
}

#[test]
fn a_run_of_groups_goes_on_as_if_it_had_not_ended() {
    let keep = "checkpoint.keep=9";
    let begun = [GROUPS, keep, "run.steps=2", "schedule.steps=5"];
    BENCH.train(Job { dir: "grouped-in-two", workers: 2, set: &begun });
    let found = BENCH.train(Job { dir: "grouped-in-two", workers: 3, set: &[GROUPS, keep] });
    assert_same(&found, &GROUPED, "a run of groups that went on");
}

/// The settings of groups take effect, also on the states: those of a frozen tensor stay zero.
#[test]
fn a_frozen_tensor_stays_what_it_was_while_others_move() {
    let nothing = ["optimizer.learning_rate=0.0", "optimizer.weight_decay=0.0"];
    let initial = BENCH.train(Job { dir: "initial", workers: 1, set: &nothing });
    let plain = BENCH.train(Job { dir: "plain", workers: 1, set: &[] });
    let models =
        [&initial, &plain, &*GROUPED].map(|it| contents(&it.latest()["model.safetensors"]));
    let [initial, plain, grouped] = models;
    let mut frozen = Vec::new();
    for (name, before) in &initial {
        // Steps of the other tensors differ too, since losses depend on all tensors.
        assert_ne!(&plain[name], before, "{name} moves where there are no groups");
        assert_ne!(plain[name], grouped[name], "{name} is the same with groups and without");
        if &grouped[name] == before {
            frozen.push(name.as_str());
        }
    }
    assert_eq!(frozen, ["backbone.embeddings.weight"]);
    for (name, state) in contents(&GROUPED.latest()["optimizer.safetensors"]) {
        let is_zero = state.iter().all(|&byte| byte == 0);
        assert_eq!(is_zero, name.ends_with("backbone.embeddings.weight"), "{name}");
    }
    // A norm's weight is 1 at first, and moves by at most about a tenth of the rates.
    let norm = "backbone.norm_f.weight";
    let farthest = |tensor: &[u8]| {
        let values = tensor.as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes));
        values.map(|value| (value - 1.0).abs()).fold(0.0, f32::max)
    };
    let [plain, grouped] = [plain[norm], grouped[norm]].map(farthest);
    assert!(grouped > 0.0 && grouped < 0.3 * plain, "{grouped} of {plain}");
}

/// A factor of 1 changes nothing, nor does a decay equal to that of `[optimizer]`.
#[test]
fn groups_that_change_nothing_change_no_bit() {
    let nothing = r#"optimizer.groups=[
        { match = ["*.norm.*"], learning_rate_factor = 1.0 },
        { match = ["*.x_proj.weight", "*.A_log"], learning_rate_factor = 1.0 },
        { match = ["*.in_proj.weight"], weight_decay = 0.1 },
    ]"#;
    let plain = BENCH.train(Job { dir: "without-groups", workers: 1, set: &[] });
    let found = BENCH.train(Job { dir: "groups-of-nothing", workers: 2, set: &[nothing] });
    assert_eq!(found.steps, plain.steps);
    for name in ["model.safetensors", "optimizer.safetensors"] {
        assert!(found.latest()[name] == plain.latest()[name], "{name} has other bytes");
    }
}

/// The example itself asserts that its losses have the same bits with one worker and with three.
#[test]
fn a_rule_of_a_users_own_is_elastic() {
    custom_optimizer::main().unwrap();
}

#[path = "../examples/custom_optimizer.rs"]
mod custom_optimizer;
