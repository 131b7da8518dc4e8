//! `bench data` reads the same data as training: folders and URLs, samples and rows; and it names
//! the bottleneck.
//!
//! Seen red: with the flags of the cache not passed on, with only the first of the columns, with orders confused, and
//! with threads that decode looked for by another name.

use std::path::Path;

use crate::support::web_server::WebServer;
use crate::support::{Finished, Workbench, assert_same};

fn read(bench: &Workbench, arguments: &[&str]) -> Finished {
    let common = ["bench", "data", "--batch", "8", "--seconds", "0.05", "--window-samples", "50"];
    bench.tidemill(&[&common, arguments].concat())
}

fn json(bench: &Workbench, arguments: &[&str]) -> serde_json::Value {
    read(bench, &[arguments, &["--format", "json"]].concat()).expect(0).json()
}

/// How many shards a cache holds.
fn shards(cache: &Path) -> usize {
    let names = std::fs::read_dir(cache).unwrap().map(|entry| entry.unwrap().path());
    names.filter(|path| path.extension().is_some_and(|extension| extension == "shard")).count()
}

#[test]
fn samples_of_folders_and_urls() {
    let bench = Workbench::new();
    let samples = json(&bench, &["data"])["samples"].clone();
    let file = format!("file://{}", bench.path("data").display());
    let server = WebServer::start(bench.folder());
    let web = server.url("data");
    for (dataset, order) in [("data", "full"), (&file, "shard"), (&web, "window"), (&web, "none")] {
        let read = json(&bench, &[dataset, "--shuffle", order, "--cache-dir", "cache"]);
        assert_eq!((&read["samples"], &read["tokens_per_sample"]), (&samples, &18.into()));
        for key in ["samples_per_second", "megabytes_per_second", "first_batch_seconds"] {
            assert!(read[key].as_f64().unwrap() > 0.0, "{key}: {read}");
        }
        for key in ["consumer_waited", "decoding_busy"] {
            assert!((0.0..=1.0).contains(&read[key].as_f64().unwrap()), "{key}: {read}");
        }
        let bounds = ["consumer", "decoding", "source"];
        assert!(bounds.contains(&read["bound_by"].as_str().unwrap()), "{read}");
    }
    // Downloaded shards are in the given cache folder. (The last may have been in flight when a
    // reader ended.)
    let kept = shards(&bench.path("cache"));
    assert!((1..=server.count(".parquet")).contains(&kept), "{kept} shards");
    let limited = ["--cache-dir", "cache", "--cache-limit-bytes", "5"];
    read(&bench, &[&[&web[..]], &limited[..]].concat())
        .refused(1, &["cache is 5 bytes, expected at least"]);
    read(&bench, &[&server.url("nowhere")]).refused(1, &["nowhere", "index.json"]);
    let words = read(&bench, &["data"]).expect(0).stdout;
    let lines: Vec<&str> = words.lines().collect();
    assert_eq!(lines.len(), 3, "{words}");
    assert!(lines[0].contains(" samples/s of 18 tokens ("), "{words}");
    assert!(lines[1].starts_with("first batch of 8 after ") && lines[2].starts_with("bound by "));
}

/// A run whose data set is at a URL equals that of the folder, to the bit, and caches shards in the
/// given folder.
#[test]
fn training_from_a_url_is_training_from_the_folder() {
    let bench = Workbench::new();
    let server = WebServer::start(bench.folder());
    let dataset = format!("data.dataset={:?}", server.url("data"));
    let train = |dir: &str, more: &[&str]| {
        let run_dir = format!("run.dir={dir}");
        let set = more.iter().flat_map(|assignment| ["--set", assignment]);
        let arguments = ["train", "run.toml", "-w", "2", "--set", &run_dir].into_iter().chain(set);
        bench.tidemill(&arguments.collect::<Vec<_>>())
    };
    train("local", &[]).expect(0);
    let cache = ["data.cache_dir=kept", "data.cache_limit_bytes=1000000"];
    train("remote", &[&[&dataset[..]], &cache[..]].concat()).expect(0);
    assert_same(&bench.outcome("remote"), &bench.outcome("local"), "of a URL");
    let kept = shards(&bench.path("kept"));
    assert!((1..=server.count(".parquet")).contains(&kept), "{kept} shards");
    let small = [&dataset[..], "data.cache_dir=kept", "data.cache_limit_bytes=5"];
    train("refused", &small).refused(1, &["kept", "is 5 bytes"]);
}

#[test]
fn rows_of_columns() {
    let bench = Workbench::new();
    let samples = json(&bench, &["data"])["samples"].clone();
    let server = WebServer::start(bench.folder());
    for dataset in ["data", &server.url("data")] {
        let arguments = [dataset, "--columns", "tokens", "--cache-dir", "cache"];
        let read = json(&bench, &arguments);
        assert_eq!((&read["rows"], &read["tokens_per_sample"]), (&samples, &().into()));
        assert!(read["rows_per_second"].as_f64().unwrap() > 0.0, "{read}");
        let words = self::read(&bench, &arguments).expect(0).stdout;
        assert!(words.contains(" rows/s (") && words.contains(" MB/s as Arrow)"), "{words}");
    }
    let wrong = ["data", "--columns", "tokens,text"];
    read(&bench, &wrong).refused(1, &["columns [tokens]", "expected a column text"]);
}

/// `inspect --order` takes the same names as `--shuffle` here, or none for all orders.
#[test]
fn orders_are_named_alike() {
    let bench = Workbench::new();
    let keys = |arguments: &[&str]| -> Vec<String> {
        let all = [&["inspect", "data", "--format", "json", "--order"], arguments].concat();
        let facts = bench.tidemill(&all).expect(0).json();
        let keys = facts.as_object().unwrap().keys().filter(|key| key.starts_with("shuffle "));
        keys.cloned().collect()
    };
    assert_eq!(keys(&["shard"]), ["shuffle shard"]);
    let all = ["shuffle full", "shuffle none", "shuffle shard", "shuffle window"];
    assert_eq!(keys(&[]), all);
    read(&bench, &["data", "--shuffle", "all"]).refused(2, &["all"]);
}
