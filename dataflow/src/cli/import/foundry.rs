//! Training files of LLM Foundry (`scripts/train`, `TrainConfig`), with the times and schedulers of Composer.

mod data;
mod model;
mod training;

use super::duration::{Scale, Time, Unit};
use super::translation::Translation;

/// Whether the leaves are from a file of this framework.
pub(super) fn is_one(translation: &Translation) -> bool {
    let others = ["max_duration", "train_loader", "global_train_batch_size"];
    translation.has("model") && others.iter().any(|key| translation.has(key))
}

/// Translates every leaf, or says why it is left out.
///
/// # Errors
/// A value that its key cannot have.
pub(super) fn translate(translation: &mut Translation) -> Result<(), String> {
    let seq_len = ["max_seq_len", "train_loader.dataset.max_seq_len", "model.max_seq_len"];
    let seq_len =
        seq_len.iter().find_map(|path| translation.whole(path).transpose()).transpose()?;
    let scale = Scale {
        samples_per_step: translation.whole("global_train_batch_size")?,
        seq_len,
        run: Time::read(translation, "max_duration")?,
    };
    run(translation, scale)?;
    model::translate(translation)?;
    data::translate(translation, scale)?;
    batch(translation)?;
    training::optimizer(translation)?;
    training::schedule(translation, scale)?;
    checkpoint(translation, scale)?;
    evaluation(translation, scale)?;
    device(translation)?;
    spread(translation)?;
    leave_the_rest(translation);
    Ok(())
}

fn run(translation: &mut Translation, scale: Scale) -> Result<(), String> {
    let name = translation.text("run_name")?.unwrap_or_else(|| "imported".to_owned());
    let folder = translation.text("save_folder")?;
    let folder = folder.map(|folder| folder.replace("{run_name}", &name));
    // Composer fills in all other names in braces when it runs.
    let folder = folder.filter(|folder| !folder.is_empty() && !folder.contains('{'));
    let folder = folder.unwrap_or_else(|| format!("runs/{name}"));
    translation.fill_in("run.dir", folder, &["run_name", "save_folder"], "the run folder");
    if let Some(seed) = translation.whole("seed")? {
        translation.write("run.seed", seed as i64, &["seed"], "");
    } else if let Some(seed) = translation.whole("global_seed")? {
        translation.write("run.seed", seed as i64, &["global_seed"], "");
    }
    let paths = &["max_duration"][..];
    match scale.run.filter(|run| !run.is_zero()) {
        Some(Time { value, unit: Unit::Batches }) => {
            translation.write("run.steps", value as i64, paths, "");
        }
        Some(Time { value, unit: Unit::Tokens }) => {
            translation.write("run.tokens", value as i64, paths, "predicted ones");
        }
        Some(Time { value, unit: Unit::Epochs }) => {
            translation.write("run.epochs", value, paths, "");
        }
        Some(time) if time.unit == Unit::Samples && scale.steps(time).is_some() => {
            let steps = scale.steps(time).unwrap_or_default().max(1);
            translation.write("run.steps", steps as i64, paths, "of global_train_batch_size");
        }
        _ => translation.fill_in("run.steps", 1000, paths, "how long the run is"),
    }
    Ok(())
}

fn batch(translation: &mut Translation) -> Result<(), String> {
    let global = "global_train_batch_size";
    match translation.whole(global)?.filter(|&samples| samples > 0) {
        Some(samples) => {
            translation.write("batch.samples_per_step", samples as i64, &[global], "");
        }
        None => translation.fill_in("batch.samples_per_step", 32, &[global], "samples of a step"),
    }
    let micro = "device_train_microbatch_size";
    let remark = "memory, never numerics: per worker";
    match translation.text(micro)?.as_deref() {
        None => {}
        Some("auto") => translation.write("batch.microbatch_grains", "auto", &[micro], remark),
        Some(_) => match translation.number(micro)? {
            Some(samples) if samples.fract() == 0.0 && (1.0..1e6).contains(&samples) => {
                translation.write("batch.microbatch_grains", samples as i64, &[micro], remark);
            }
            _ => translation.leave(&[micro], "A microbatch is whole samples"),
        },
    }
    let weighted = "accumulate_train_batch_on_tokens";
    translation.remark(
        "batch",
        &[weighted],
        "Every predicted token of a step counts alike, whatever microbatch it is in",
    );
    Ok(())
}

/// A key that counts steps, from an interval of Composer.
fn interval(
    translation: &mut Translation,
    path: &str,
    key: &str,
    scale: Scale,
) -> Result<(), String> {
    let Some(time) = Time::read(translation, path)? else { return Ok(()) };
    match scale.steps(time).filter(|&steps| steps > 0) {
        Some(steps) => translation.write(key, steps as i64, &[path], ""),
        None => translation.fill_in(key, 1000, &[path], "steps, as only those are counted"),
    }
    Ok(())
}

fn checkpoint(translation: &mut Translation, scale: Scale) -> Result<(), String> {
    interval(translation, "save_interval", "checkpoint.every_steps", scale)?;
    let keep = "save_num_checkpoints_to_keep";
    match translation.number(keep)? {
        None => {}
        Some(kept) if kept >= 1.0 && kept.fract() == 0.0 => {
            translation.write("checkpoint.keep", kept as i64, &[keep], "");
        }
        Some(kept) if kept < 0.0 => {
            translation.write("checkpoint.keep", 1_000_000, &[keep], "all of them");
        }
        Some(_) => translation.leave(&[keep], "At least one checkpoint is kept"),
    }
    let resume = [
        "autoresume",
        "save_overwrite",
        "save_latest_filename",
        "save_filename",
        "save_weights_only",
        "save_ignore_keys",
        "only_hf_checkpoint",
        "only_composer_checkpoint",
    ];
    translation.remark(
        "checkpoint",
        &resume,
        "A run goes on from its last checkpoint by itself; checkpoints have names of their own, the layout of \
         Hugging Face and the state of the optimizer",
    );
    translation.leave(
        &["load_path", "load_weights_only", "load_strict_model_weights", "load_ignore_keys"],
        "Checkpoints of Composer are not read; model.from takes a folder in the layout of Hugging Face",
    );
    Ok(())
}

fn evaluation(translation: &mut Translation, scale: Scale) -> Result<(), String> {
    let every = Time::read(translation, "eval_interval")?;
    let is_off = every.is_some_and(Time::is_zero);
    if is_off || !translation.has("eval_loader") {
        let reason =
            if is_off { "Evaluations are switched off there" } else { "There is no eval_loader" };
        let keys = ["eval_loader", "eval_interval", "eval_subset_num_batches", "eval_first"];
        translation.leave(&keys, reason);
        translation.leave(&["device_eval_batch_size"], reason);
    } else {
        data::evaluation(translation)?;
        interval(translation, "eval_interval", "evaluation.every_steps", scale)?;
    }
    if translation.flag("eval_first")? == Some(false)
        && translation.tables.contains_key("evaluation")
    {
        let reason = "Without a key: nothing is evaluated before the first step";
        translation.remark("evaluation", &["eval_first"], reason);
    }
    translation.leave(&["eval_first"], "Nothing is evaluated before the first step");
    translation.leave(
        &["icl_tasks", "icl_tasks_str", "icl_subset_num_batches", "icl_seq_len"],
        "To be written as [[evaluation.tasks]], such as task = \"foundry/lambada_openai\" and data = \"local_data\"",
    );
    translation.leave(
        &["eval_gauntlet", "eval_gauntlet_str"],
        "A part of the gauntlet is a suite: to be written as [[evaluation.tasks]], task = \"foundry\" and data = \"local_data\"",
    );
    Ok(())
}

fn device(translation: &mut Translation) -> Result<(), String> {
    let path = &["precision"][..];
    match translation.text("precision")?.as_deref() {
        None => {}
        Some("fp32") => translation.write("device.precision", "fp32", path, ""),
        Some("amp_bf16") => {
            let remark = "weights, sums and the residual stream in fp32; GPUs only";
            translation.write("device.precision", "bf16", path, remark);
        }
        Some(_) => {
            translation.leave(path, "There is fp32 and bf16 alone; this file says bf16, on GPUs");
            translation.write("device.precision", "bf16", &[], "of another precision, see the top");
        }
    }
    Ok(())
}

/// How the run is spread.
fn spread(translation: &mut Translation) -> Result<(), String> {
    let strategy = "fsdp_config.sharding_strategy";
    let all = "a worker holds its part of parameters, gradients and states";
    let word = match translation.text(strategy)?.as_deref() {
        Some("FULL_SHARD") => Some(("parameters", all)),
        Some("HYBRID_SHARD" | "_HYBRID_SHARD_ZERO2") => {
            Some(("parameters", "the workers of a process share them, and so does each process"))
        }
        Some("SHARD_GRAD_OP") => Some(("gradients", "and states, not parameters")),
        Some("NO_SHARD") => Some(("optimizer", "the states alone")),
        Some(_) => {
            translation.leave(&[strategy], "No such way to share; the optimizer's state is");
            None
        }
        // FSDP's own default.
        None if translation.has("fsdp_config") => Some(("parameters", "FSDP's default")),
        None => None,
    };
    if let Some((word, remark)) = word {
        translation.write("parallel.shard", word, &[strategy], remark);
    }
    let mixed = "fsdp_config.mixed_precision";
    translation.remark(
        "parallel",
        &[mixed],
        "Gradients are summed in fp32, in one order whatever the number of workers",
    );
    let offload = "fsdp_config.activation_cpu_offload";
    if translation.flag(offload)? == Some(true) {
        translation.leave(&[offload], "Nothing is moved to the host's memory");
    }
    translation.remark(
        "parallel",
        &["fsdp_config"],
        "Of PyTorch's FSDP; parameters are always gathered a block at a time, while others compute",
    );
    translation.leave(
        &["tp_config", "parallelism_config"],
        "There is no tensor parallelism; [parallel] sets how workers shard their state",
    );
    Ok(())
}

/// Leaves out the settings of PyTorch or Composer themselves, or of services around them.
fn leave_the_rest(translation: &mut Translation) {
    translation.leave(
        &["loggers"],
        "No service is written to; metrics.jsonl of the run folder has loss, rate, norm and times of every step",
    );
    let callbacks = [
        "callbacks.speed_monitor",
        "callbacks.lr_monitor",
        "callbacks.memory_monitor",
        "callbacks.runtime_estimator",
        "callbacks.optimizer_monitor",
    ];
    translation.remark(
        "run",
        &callbacks,
        "Without a key: metrics.jsonl has these of every step, and the terminal shows what is left",
    );
    translation.remark(
        "run",
        &["callbacks.hf_checkpointer"],
        "Without a key: every checkpoint is a folder in the layout of Hugging Face",
    );
    translation.leave(&["callbacks"], "There are no callbacks");
    let plain = ["progress_bar", "log_to_console", "console_log_interval", "python_log_level"];
    translation.remark(
        "run",
        &plain,
        "Without a key: progress goes to standard error, and TIDEMILL_LOG=debug says more",
    );
    translation.remark(
        "run",
        &["dist_timeout"],
        "Without a key here: run.step_deadline_seconds and run.peer_deadline_seconds are its like",
    );
    let torch = [
        "compile_config",
        "expandable_segments",
        "max_split_size_mb",
        "profiler",
        "log_config",
        "metadata",
        "code_paths",
        "flatten_imports",
        "spin_dataloaders",
    ];
    translation.leave(&torch, "Of PyTorch, Composer or MosaicML's platform");
    let placement =
        ["name", "image", "integrations", "command", "compute", "scheduling", "cluster"];
    translation.leave(&placement, "Of MosaicML's platform");
    let norms = ["algorithms.low_precision_layernorm", "algorithms.fused_layernorm"];
    translation.remark(
        "device",
        &norms,
        "Norms read and write what device.precision says and compute in fp32",
    );
    translation.leave(&["algorithms"], "There is no such algorithm");
}
