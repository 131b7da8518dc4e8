//! The translations of leaves, section by section.

use super::translate;

const FOUNDRY: &str =
    "model:\n  name: mpt_causal_lm\nglobal_train_batch_size: 8\nmax_seq_len: 16\n";

/// The translation of [`FOUNDRY`] and `more`, as text and as TOML.
fn of_foundry(more: &str) -> (String, toml::Table) {
    parsed(&format!("{FOUNDRY}{more}"))
}

fn parsed(text: &str) -> (String, toml::Table) {
    let text = translate(text, "file").unwrap_or_else(|error| panic!("{error}: {text}"));
    let table = text.parse().unwrap_or_else(|error| panic!("{error}: {text}"));
    (text, table)
}

#[track_caller]
fn expect(written: &(String, toml::Table), table: &str, key: &str, value: impl Into<toml::Value>) {
    let found = written.1.get(table).and_then(|table| table.get(key));
    assert_eq!(found, Some(&value.into()), "{table}.{key} of {}", written.0);
}

/// The text before the first table, which names the leaves that are not taken over.
fn left(written: &(String, toml::Table)) -> &str {
    written.0.split("\n[run]").next().unwrap()
}

#[test]
fn lengths_and_intervals_are_counted() {
    let written = of_foundry("max_duration: 20ba\nsave_interval: 0.25dur\n");
    expect(&written, "run", "steps", 20);
    expect(&written, "checkpoint", "every_steps", 5);
    expect(&of_foundry("max_duration: 1_000tok\n"), "run", "tokens", 1000);
    expect(&of_foundry("max_duration: 17sp\n"), "run", "steps", 3);
    expect(&of_foundry("max_duration: 2\n"), "run", "epochs", 2.0);
    let written = of_foundry("max_duration: 30sec\n");
    assert!(left(&written).contains("Fill in: run.dir, run.steps"), "{}", written.0);
}

#[test]
fn warm_ups_keep_their_unit_where_there_is_one() {
    let schedule = |more: &str| {
        of_foundry(&format!("max_duration: 100ba\nscheduler:\n  name: cosine_with_warmup\n{more}"))
    };
    expect(&schedule("  t_warmup: 10ba\n"), "schedule", "warmup_steps", 10);
    expect(&schedule("  t_warmup: 640tok\n"), "schedule", "warmup_tokens", 640);
    expect(&schedule("  t_warmup: 0.1dur\n"), "schedule", "warmup_fraction", 0.1);
    expect(&schedule("  alpha_f: 0.2\n"), "schedule", "final_fraction", 0.2);
    // A fraction refers to the duration of the run, even where the schedule is longer.
    let longer = schedule("  t_warmup: 0.1dur\n  t_max: 200ba\n");
    expect(&longer, "schedule", "warmup_steps", 10);
    expect(&longer, "schedule", "steps", 200);
    let never = schedule("  t_warmup: 1ep\n");
    assert!(left(&never).contains("schedule.warmup_steps"), "{}", never.0);
}

#[test]
fn optimizers_keep_their_decay() {
    let optimizer = |name: &str| {
        let settings = "lr: 2e-4\n  weight_decay: 1e-4\n  betas: [0.9, 0.95]\n";
        of_foundry(&format!("max_duration: 1ep\noptimizer:\n  name: {name}\n  {settings}"))
    };
    expect(&optimizer("decoupled_adamw"), "optimizer", "weight_decay", 1e-4);
    expect(&optimizer("adamw"), "optimizer", "weight_decay", 1e-4);
    expect(&optimizer("decoupled_lionw"), "optimizer", "weight_decay", 0.5);
    let unknown = optimizer("sgd");
    expect(&unknown, "optimizer", "name", "decoupled_adamw");
    assert!(left(&unknown).contains("optimizer.name = \"sgd\""), "{}", unknown.0);
}

#[test]
fn what_no_rule_knows_and_what_has_no_value_is_said() {
    let written = of_foundry("max_duration: 1ep\nnovel:\n  key: 'a\n\n    b'\nsave_folder:\n");
    assert!(left(&written).contains("Not known here"), "{}", written.0);
    assert!(left(&written).contains("novel.key = \"a b\""), "{}", written.0);
    assert!(!left(&written).contains("save_folder"), "{}", written.0);
    assert!(written.0.contains("save_folder = null"), "{}", written.0);
}

/// Texts of a file cannot end a comment and become keys.
#[test]
fn no_text_leaves_its_comment() {
    let written = of_foundry("max_duration: 1ep\nnovel: \"a\\n[run]\\nsteps = 1\\r\\u2028x\"\n");
    assert!(written.1["run"].get("steps").is_none(), "{}", written.0);
    let written = of_foundry("max_duration: 1ep\n\"k\\n[x]\\ny\": 1\nrun_name: \"b\\n\\\"c\"\n");
    expect(&written, "run", "dir", "runs/b\n\"c");
    assert!(written.1.get("x").is_none(), "{}", written.0);
}

#[test]
fn batch_sizes_of_deepspeed_keep_their_rule() {
    let written = parsed(
        "{\"train_batch_size\": 64, \"train_micro_batch_size_per_gpu\": 4, \"gradient_accumulation_steps\": 2}",
    );
    expect(&written, "batch", "samples_per_step", 64);
    expect(&written, "batch", "microbatch_grains", 4);
    assert!(written.0.contains("of 8 GPUs"), "{}", written.0);
    let wrong = "{\"train_batch_size\": 60, \"train_micro_batch_size_per_gpu\": 4, \"gradient_accumulation_steps\": 2}";
    let error = translate(wrong, "file").unwrap_err();
    assert!(error.contains("train_batch_size: expected a multiple of"), "{error}");
    let error = translate("{\"train_batch_size\": 0}", "file").unwrap_err();
    assert!(error.contains("at least 1, found 0"), "{error}");
}

#[test]
fn stages_and_schedules_of_deepspeed() {
    let config = |rest: &str| parsed(&format!("{{\"train_batch_size\": 8, {rest}}}"));
    for (stage, word) in [(0, "optimizer"), (1, "optimizer"), (2, "gradients"), (3, "parameters")] {
        let written = config(&format!("\"zero_optimization\": {{\"stage\": {stage}}}"));
        expect(&written, "parallel", "shard", word);
    }
    let decay = config(
        "\"scheduler\": {\"type\": \"WarmupDecayLR\", \"params\": {\"total_num_steps\": 50, \"warmup_max_lr\": 0.01}}",
    );
    expect(&decay, "run", "steps", 50);
    expect(&decay, "optimizer", "learning_rate", 0.01);
    expect(&decay, "schedule", "warmup_steps", 1000);
    assert!(left(&decay).contains("logarithm"), "{}", decay.0);
    let auto = config("\"gradient_clipping\": \"auto\", \"fp16\": {\"enabled\": true}");
    assert!(left(&auto).contains("optimizer.clip_norm"), "{}", auto.0);
    assert!(left(&auto).contains("fp16.enabled = true"), "{}", auto.0);
}

#[test]
fn other_files_are_neither() {
    for text in ["a: 1\n", "model: x\n", "{\"model_type\": \"mamba\"}"] {
        let error = translate(text, "file").unwrap_err();
        assert!(error.contains("found neither"), "{error}");
    }
}
