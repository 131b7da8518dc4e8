//! Configs of DeepSpeed (`ds_config.json`). Such a file knows neither model nor data nor length, which are to be filled in.

mod training;

use super::optimizer::is_auto;
use super::translation::Translation;
use crate::job::config::PLACEHOLDER;

/// Keys that no other file has.
const OWN: [&str; 4] = [
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "zero_optimization",
];

/// Whether the leaves are from a file of this framework.
pub(super) fn is_one(translation: &Translation) -> bool {
    OWN.iter().any(|key| translation.has(key))
}

/// Translates every leaf, or says why it is left out.
///
/// # Errors
/// A value that its key cannot have, and batch sizes that contradict each other.
pub(super) fn translate(translation: &mut Translation) -> Result<(), String> {
    translation.fill_in("run.dir", "runs/imported", &[], "the run folder");
    training::length(translation)?;
    translation.fill_in(
        "model.preset",
        "mpt-125m",
        &[],
        "what is trained, a preset, a folder (from) or a kind",
    );
    translation.fill_in("data.dataset", PLACEHOLDER, &[], "a prepared data set");
    batch(translation)?;
    training::optimizer(translation)?;
    training::schedule(translation)?;
    precision(translation)?;
    zero(translation)?;
    leave_the_rest(translation);
    Ok(())
}

/// A whole number from 1; none where it is not there or left to another program.
fn count(translation: &Translation, path: &str) -> Result<Option<u64>, String> {
    if is_auto(translation, path) {
        return Ok(None);
    }
    match translation.whole(path)? {
        Some(0) => Err(translation.wrong(path, "at least 1")),
        count => Ok(count),
    }
}

/// `train_batch_size = train_micro_batch_size_per_gpu * gradient_accumulation_steps * GPUs`.
fn batch(translation: &mut Translation) -> Result<(), String> {
    let [all, micro, steps] =
        ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"];
    let (samples, of_one, accumulated) =
        (count(translation, all)?, count(translation, micro)?, count(translation, steps)?);
    if let (Some(samples), Some(of_one)) = (samples, of_one) {
        let of_gpu = of_one.saturating_mul(accumulated.unwrap_or(1));
        if samples % of_gpu != 0 {
            let expected = format!("a multiple of {micro} times {steps}, {of_gpu}");
            return Err(translation.wrong(all, &expected));
        }
        if accumulated.is_some() {
            let gpus = samples / of_gpu;
            translation.say(
                "batch",
                &format!("These sizes are of {gpus} GPUs; here they are of any number"),
            );
        }
    }
    match (samples, of_one) {
        (Some(samples), _) => {
            translation.write("batch.samples_per_step", samples as i64, &[all], "");
        }
        (None, Some(of_one)) => {
            let of_gpu = of_one.saturating_mul(accumulated.unwrap_or(1));
            let what = format!("{of_gpu} samples of a GPU, times GPUs");
            let of_gpu = i64::try_from(of_gpu).unwrap_or(i64::MAX);
            translation.fill_in("batch.samples_per_step", of_gpu, &[all], &what);
        }
        (None, None) => {
            translation.fill_in(
                "batch.samples_per_step",
                32,
                &[all],
                "samples of a step, of all GPUs",
            );
        }
    }
    match of_one {
        Some(of_one) => {
            let remark = "memory, never numerics: per worker";
            translation.write("batch.microbatch_grains", of_one as i64, &[micro], remark);
        }
        None => translation.write("batch.microbatch_grains", "auto", &[micro], "what has room"),
    }
    translation.remark(
        "batch",
        &[steps],
        "Without a key: batch.samples_per_step over microbatches and workers",
    );
    Ok(())
}

fn precision(translation: &mut Translation) -> Result<(), String> {
    let half = "fp16.enabled";
    let paths = ["bf16.enabled", "bfloat16.enabled"];
    let mut word = None;
    for path in paths {
        if is_auto(translation, path) {
            translation.fill_in("device.precision", "fp32", &[path], "bf16 on GPUs, or fp32");
            word = Some("");
        } else if translation.flag(path)? == Some(true) {
            word = Some("bf16");
        }
    }
    let halves = !is_auto(translation, half) && translation.flag(half)? == Some(true);
    match word {
        Some("bf16") => {
            let remark = "weights, sums and the residual stream in fp32; GPUs only";
            translation.write("device.precision", "bf16", &paths, remark);
        }
        None if halves => {
            translation.write(
                "device.precision",
                "bf16",
                &[],
                "in place of fp16, see the top; GPUs only",
            );
        }
        None => translation.write("device.precision", "fp32", &paths, ""),
        Some(_) => {}
    }
    if !halves && !is_auto(translation, half) {
        translation.remark("device", &["fp16"], "Without a key: there is no fp16");
    }
    translation
        .leave(&["fp16", "amp"], "There is no fp16, and so no scale of the loss; bf16 needs none");
    let rest = ["bf16", "bfloat16", "data_types", "communication_data_type"];
    translation.remark("device", &rest, "Without a key: gradients are summed in fp32");
    Ok(())
}

fn zero(translation: &mut Translation) -> Result<(), String> {
    let path = "zero_optimization.stage";
    let (word, remark) = match translation.whole(path)? {
        // Its own default.
        None | Some(0) => ("optimizer", "stage 1 takes no more time, so that there is no stage 0"),
        Some(1) => ("optimizer", ""),
        Some(2) => ("gradients", ""),
        Some(3) => ("parameters", ""),
        Some(_) => return Err(translation.wrong(path, "a stage from 0 to 3")),
    };
    translation.write("parallel.shard", word, &[path], remark);
    let offload = ["offload_optimizer", "offload_param", "cpu_offload", "cpu_offload_params"];
    let offload = offload.map(|key| format!("zero_optimization.{key}"));
    let offload = offload.each_ref().map(String::as_str);
    translation.leave(&offload, "Nothing is moved to the host's memory or to disks");
    let quantized =
        ["zero_quantized_weights", "zero_quantized_gradients", "zero_hpz_partition_size"];
    let quantized = quantized.map(|key| format!("zero_optimization.{key}"));
    let quantized = quantized.each_ref().map(String::as_str);
    translation.leave(&quantized, "What workers send each other is never rounded");
    translation.remark(
        "parallel",
        &["zero_optimization", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"],
        "Without a key: of how DeepSpeed sends; here buckets go while others compute, summed in one order",
    );
    Ok(())
}

/// Leaves out the settings of DeepSpeed itself, or of services around it.
fn leave_the_rest(translation: &mut Translation) {
    translation.leave(
        &["tensorboard", "wandb", "comet", "csv_monitor"],
        "No service is written to; metrics.jsonl of the run folder has loss, rate, norm and times of every step",
    );
    translation.leave(
        &["pipeline", "tensor_parallel"],
        "There are no stages of a pipeline and no parts of tensors: workers share samples",
    );
    translation.leave(
        &[
            "compression_training",
            "sparse_attention",
            "curriculum_learning",
            "data_efficiency",
            "progressive_layer_drop",
            "eigenvalue",
            "quantize_training",
        ],
        "There is no such way to train",
    );
    translation.leave(
        &["activation_checkpointing"],
        "Which blocks are formed again, DeepSpeed's caller says; here model.recompute = \"block\" does",
    );
    translation.remark(
        "run",
        &[
            "steps_per_print",
            "wall_clock_breakdown",
            "dump_state",
            "flops_profiler",
            "comms_logger",
            "memory_breakdown",
        ],
        "Without a key: metrics.jsonl has every step, and `tidemill bench` measures",
    );
    translation.remark(
        "run",
        &["checkpoint", "elasticity", "load_universal_checkpoint"],
        "Without a key: every checkpoint goes on with any number of workers",
    );
    translation.remark(
        "parallel",
        &[
            "prescale_gradients",
            "gradient_predivide_factor",
            "sparse_gradients",
            "disable_allgather",
        ],
        "Without a key: gradients are the mean of all samples, summed in fp32 in one order",
    );
    translation.leave(
        &["autotuning", "aio", "nebula", "hybrid_engine", "compile", "torch_autocast"],
        "Of DeepSpeed alone",
    );
}
