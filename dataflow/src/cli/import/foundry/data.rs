//! `train_loader`, `eval_loader` and `tokenizer` of LLM Foundry.
//!
//! Samples are prepared once, by `tidemill prepare`, which reads the same folders; so all that says how text becomes samples belongs to that
//! command, and what says how they are fetched is not needed.

use super::super::duration::Scale;
use super::super::translation::Translation;
use crate::job::config::PLACEHOLDER;

const PREPARE: &str = "Said when a data set is prepared, `tidemill prepare --input FOLDER --output DIR --seq-len N`, which reads MDS folders and text";
const FETCHING: &str =
    "Without a key: of the processes that PyTorch reads data by; never of the numbers here";
const ORDER: &str = "Without a key: the order of samples is that of data.shuffle and run.seed, whatever the number of workers, nodes and caches";

/// `[[data.streams]]`, as one list.
pub(super) fn streams_of(translation: &mut Translation, streams: &str) -> Result<(), String> {
    let mut tables = Vec::new();
    for name in translation.keys_of(streams) {
        let stream = format!("{streams}.{name}");
        let mut table = toml::Table::new();
        table.insert("name".to_owned(), name.clone().into());
        table.insert("dataset".to_owned(), PLACEHOLDER.into());
        let mut paths = Vec::new();
        for (from, to) in
            [("proportion", "proportion"), ("repeat", "repeat"), ("choose", "samples")]
        {
            let path = format!("{stream}.{from}");
            let Some(number) = translation.number(&path)? else { continue };
            let value = match to {
                "samples" => toml::Value::Integer(translation.whole(&path)?.unwrap_or(0) as i64),
                _ => number.into(),
            };
            table.insert(to.to_owned(), value);
            paths.push(path);
        }
        let sources = ["local", "remote", "split"].map(|key| format!("{stream}.{key}"));
        paths.extend(sources);
        let paths: Vec<&str> = paths.iter().map(String::as_str).collect();
        translation.remark("data", &paths, "Of data.streams, whose folders are to be filled in");
        translation.leave(&[&stream], "Streams have no such key");
        tables.push(toml::Value::Table(table));
    }
    translation.fill_in(
        "data.streams",
        toml::Value::Array(tables),
        &[],
        "the prepared data set of each, in the order of their names",
    );
    Ok(())
}

pub(super) fn translate(translation: &mut Translation, scale: Scale) -> Result<(), String> {
    let set = "train_loader.dataset";
    let streams = format!("{set}.streams");
    if translation.has(&streams) {
        streams_of(translation, &streams)?;
    } else {
        let what = match scale.seq_len {
            Some(tokens) => format!("a data set prepared with --seq-len {tokens}"),
            None => "a prepared data set".to_owned(),
        };
        let local = format!("{set}.local");
        let remote = format!("{set}.remote");
        let split = format!("{set}.split");
        let hub = format!("{set}.hf_name");
        let paths = [&local, &remote, &split, &hub].map(String::as_str);
        translation.fill_in("data.dataset", PLACEHOLDER, &paths, &what);
    }
    let shuffle = format!("{set}.shuffle");
    if let Some(shuffles) = translation.flag(&shuffle)? {
        let word = if shuffles { "window" } else { "none" };
        translation.write("data.shuffle", word, &[&shuffle], "");
    }
    let limit = format!("{set}.cache_limit");
    if translation.value(&limit).is_some() {
        match translation.text(&limit)?.as_deref().and_then(bytes_of) {
            Some(bytes) => {
                translation.write("data.cache_limit_bytes", bytes as i64, &[&limit], "");
            }
            None => translation.leave(&[&limit], "No number of bytes"),
        }
    }
    settle_loader(translation, "data", "train_loader")?;
    translation.remark("data", &["tokenizer", "tokenizer_name"], PREPARE);
    translation.remark("data", &["max_seq_len"], PREPARE);
    translation.remark("data", &["data_local", "data_remote"], PREPARE);
    translation.leave(&["train_loader"], "There is no such key of data");
    Ok(())
}

/// Settles the settings of a loader that need no key in `table`.
fn settle_loader(
    translation: &mut Translation,
    table: &'static str,
    loader: &str,
) -> Result<(), String> {
    let below = |keys: &[&str]| -> Vec<String> {
        keys.iter().map(|key| format!("{loader}.{key}")).collect()
    };
    let name = format!("{loader}.name");
    match translation.text(&name)?.as_deref() {
        Some("finetuning") => translation.leave(
            &[&name],
            "All tokens of a sample are predicted, those of a prompt too: there is no loss of answers alone",
        ),
        Some("text") | None => translation.remark(table, &[&name], PREPARE),
        Some(_) => translation.leave(&[&name], "No such loader; a data set is prepared from text or MDS"),
    }
    let finetuning = below(&[
        "dataset.preprocessing_fn",
        "dataset.decoder_only_format",
        "dataset.packing_ratio",
        "dataset.allow_pad_trimming",
        "dataset.target_prompts",
        "dataset.target_responses",
        "dataset.pad_to_longest",
        "dataset.auto_packing_replication",
    ]);
    let prepared = below(&[
        "dataset.max_seq_len",
        "dataset.eos_token_id",
        "dataset.bos_token_id",
        "dataset.tokenizer_name",
        "dataset.group_method",
        "dataset.token_encoding_type",
        "dataset.hf_kwargs",
        "dataset.safe_load",
        "dataset.local",
        "dataset.remote",
        "dataset.split",
        "dataset.hf_name",
    ]);
    let order = below(&[
        "dataset.shuffle",
        "dataset.shuffle_seed",
        "dataset.shuffle_algo",
        "dataset.shuffle_block_size",
        "dataset.num_canonical_nodes",
        "dataset.batching_method",
        "dataset.sampling_method",
        "dataset.sampling_granularity",
        "dataset.batch_size",
        "dataset.epoch_size",
        "dataset.partition_algo",
        "dataset.replication",
    ]);
    let fetching = below(&[
        "num_workers",
        "pin_memory",
        "prefetch_factor",
        "persistent_workers",
        "timeout",
        "dataset.predownload",
        "dataset.keep_zip",
        "dataset.download_retry",
        "dataset.download_timeout",
        "dataset.validate_hash",
        "dataset.cache_limit",
        "dataset.allow_unsafe_types",
    ]);
    let drop_last = below(&["drop_last"]);
    for (keys, reason) in [
        (&prepared, PREPARE),
        (&order, ORDER),
        (&fetching, FETCHING),
        (&drop_last, "Without a key: every step is whole, and goes on into the next epoch"),
    ] {
        translation.remark(table, &keys.iter().map(String::as_str).collect::<Vec<_>>(), reason);
    }
    let finetuning: Vec<&str> = finetuning.iter().map(String::as_str).collect();
    translation.leave(
        &finetuning,
        "Samples are cut from one stream of text, without prompts, answers or padding",
    );
    Ok(())
}

/// `[evaluation]` but its interval.
pub(super) fn evaluation(translation: &mut Translation) -> Result<(), String> {
    // One loader, or the first of several.
    let first = "eval_loader.0";
    let several = translation.has(first);
    let loader = if several { first } else { "eval_loader" };
    let sources = ["local", "remote", "split", "hf_name", "streams"];
    let sources = sources.map(|key| format!("{loader}.dataset.{key}"));
    let sources = sources.each_ref().map(String::as_str);
    let what = "a data set prepared from the evaluation's texts";
    translation.fill_in("evaluation.dataset", PLACEHOLDER, &sources, what);
    let (batches, batch) = ("eval_subset_num_batches", "device_eval_batch_size");
    let samples = match (translation.number(batches)?, translation.number(batch)?) {
        (Some(batches), Some(samples)) if batches > 0.0 => {
            Some((batches * samples).ceil()).filter(|samples| (1.0..1e15).contains(samples))
        }
        _ => None,
    };
    match samples {
        Some(samples) => {
            let remark = "their product, of one device";
            translation.write("evaluation.samples", samples as i64, &[batches, batch], remark);
        }
        None => {
            let remark = "all of them, unless there are more";
            translation.write("evaluation.samples", 1_000_000_000, &[batches], remark);
            translation.remark("evaluation", &[batch], "Without a key: memory, never numerics");
        }
    }
    settle_loader(translation, "evaluation", loader)?;
    let label = format!("{loader}.label");
    translation.remark("evaluation", &[&label], "Without a key: there is one evaluation");
    translation
        .leave(&["eval_loader"], "There is one evaluation, of the keys that [evaluation] has");
    Ok(())
}

/// `100gb` and the like, as StreamingDataset has them.
fn bytes_of(text: &str) -> Option<u64> {
    let lower = text.trim().to_ascii_lowercase();
    let (number, power) = [("tb", 4), ("gb", 3), ("mb", 2), ("kb", 1), ("b", 0), ("", 0)]
        .into_iter()
        .find_map(|(suffix, power)| Some((lower.strip_suffix(suffix)?, power)))?;
    let number: f64 = number.trim().replace('_', "").parse().ok()?;
    let bytes = number * 1024_f64.powi(power);
    (1.0..9e15).contains(&bytes).then_some(bytes as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_of_caches_have_streamings_units() {
        assert_eq!(bytes_of("100gb"), Some(100 << 30));
        assert_eq!(bytes_of("1.5kb"), Some(1536));
        assert_eq!(bytes_of("4096"), Some(4096));
        assert_eq!(bytes_of("much"), None);
    }
}
