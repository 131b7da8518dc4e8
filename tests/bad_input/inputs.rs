//! Inputs of `prepare`: wrong lines, columns, samples and flags.

use std::path::{Path, PathBuf};

use crate::support::outcome::files;
use crate::support::{Finished, Running, Workbench};

fn prepare(bench: &Workbench, arguments: &[&str]) -> Finished {
    bench.tidemill(&[&["prepare", "--output", "out"], arguments].concat())
}

fn mds(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../streaming-data/tests/fixtures/mds").join(name)
}

#[test]
fn filters_that_are_none() {
    let bench = Workbench::new();
    bench.write("mine.toml", "[gopher]\n\nmin_word = 3\n");
    bench.write("text/a.txt", "the tide");
    for (filter, expected) in [
        ("gopher,c5", "expected one of gopher, repetition, c4, fineweb, refinedweb, nemo-english"),
        ("mine.toml", "filter file mine.toml, line 3 (min_word = 3): unknown field `min_word`"),
        ("none.toml", "none.toml"),
    ] {
        prepare(&bench, &["--input", "text", "--filter", filter]).refused(1, &[expected]);
    }
    bench.tidemill(&["prepare", "--print-filter", "c5"]).refused(1, &["c5", "repetition"]);
    let printed = bench.tidemill(&["prepare", "--print-filter", "c4"]).expect(0);
    bench.write("c4.toml", &printed.stdout);
    let rejected = ["--input", "text", "--filter", "c4.toml"];
    prepare(&bench, &rejected).refused(1, &["most of them by c4.min_sentences"]);
}

/// An error of a decoder is the input's fault: a restart would not help.
#[test]
fn damaged_compressed_shards() {
    let bench = Workbench::new();
    for (name, shard) in [
        ("tokens-int64-zstd", "shard.00000.mds.zstd"),
        ("tokens-uint16-gz", "shard.00000.mds.gz"),
        ("tokens-fixed-br", "shard.00000.mds.br"),
        ("tokens-any-snappy", "shard.00000.mds.snappy"),
    ] {
        for entry in std::fs::read_dir(mds(name)).unwrap() {
            let entry = entry.unwrap();
            let content = std::fs::read(entry.path()).unwrap();
            bench.write(&format!("{name}/{}", entry.file_name().display()), content);
        }
        let path = bench.path(name).join(shard);
        let good = std::fs::read(&path).unwrap();
        let mut empty = good.clone();
        empty.fill(0);
        for at in [0, good.len() / 2, good.len() - 1] {
            let mut flipped = good.clone();
            flipped[at] ^= 0x55;
            for damaged in [&flipped, &empty] {
                std::fs::write(&path, damaged).unwrap();
                // Damage that the decoder itself misses must not reach the samples.
                let finished = prepare(&bench, &["--input", name, "--vocab-size", "99999"]);
                match finished.status.code() {
                    Some(0) => std::fs::remove_dir_all(bench.path("out")).unwrap(),
                    _ => drop(finished.refused(1, &[shard])),
                }
            }
        }
    }
}

/// Lines that are not documents are named and counted; with `--strict` the first is an error.
#[test]
fn lines_of_documents() {
    let bench = Workbench::new();
    let good = format!("{{\"text\": {:?}}}\n", "a".repeat(50));
    std::fs::create_dir(bench.path("in")).unwrap();
    bench.write("in/a.jsonl", format!("{good}{}{good}", "{\"txt\": 1}\n".repeat(30)));
    bench.write("in/b.txt", "b".repeat(50));
    let input = ["--input", "in", "--seq-len", "16", "--format", "json"];
    let finished = prepare(&bench, &input).expect(0);
    let report = finished.json();
    assert_eq!((&report["documents"], &report["broken"]), (&3.into(), &30.into()));
    assert_eq!(report["named_broken"][0]["place"], "line 2");
    let said: Vec<&str> = finished.stderr.lines().collect();
    assert_eq!(said.len(), 21, "{finished:?}");
    assert_eq!(said[0], "skipped in/a.jsonl, line 2: it has no key \"text\"");
    assert_eq!(said[20], "skipped 10 other lines or rows");
    std::fs::remove_dir_all(bench.path("out")).unwrap();

    let key = ["--text-key", "body.text"];
    for (arguments, parts) in [
        (&["--strict"][..], &["cannot take line 2 of in/a.jsonl: it has no key \"text\""][..]),
        (&key, &["32 lines or rows skipped", "in/a.jsonl, line 1: it has no key \"body.text\""]),
        (&["--eos-token", "x", "--tokenizer", "bytes"], &["--eos-token: expected only with a"]),
        (&["--vocab-size", "258"], &["vocab_size is 258, expected at least"]),
    ] {
        let all = [&["--input", "in/a.jsonl", "--seq-len", "16"], arguments].concat();
        prepare(&bench, &all).refused(1, parts);
        assert!(!bench.path("out").exists(), "{arguments:?}");
    }
    prepare(&bench, &["--input", "in", "--eos-token", "x"]).refused(2, &["--tokenizer"]);
}

/// An output may be a URL. The error for an unusable one hides secrets in it; a data set that is
/// still being prepared cannot be inspected.
#[test]
fn outputs_at_urls() {
    let bench = Workbench::new();
    let at = |output: &str| {
        bench.tidemill(&["prepare", "--input", "data-text", "--seq-len", "16", "--output", output])
    };
    for (output, parts) in [
        ("ftp://host/out", &["ftp://host/out: found scheme \"ftp\", expected s3, gs, az"][..]),
        ("s3://bucket/out?key=secret", &["s3://bucket/out: found a query or fragment"]),
        (
            "https://me:secret@host/out#secret",
            &["cannot use https://host/out: found a user or password"],
        ),
        ("s3:///out", &["found no name behind ://"]),
        ("memory://here/out", &["a place that outlives the program, found memory://here/out"]),
    ] {
        let refused = at(output).refused(1, parts);
        assert!(!refused.stderr.contains("secret"), "{refused:?}");
    }
    // The folder where shards would wait is checked before anything is uploaded.
    let nowhere = "TMPDIR=nowhere exec \"$@\"";
    let arguments = ["prepare", "--input", "data-text", "--output", "s3://bucket/out"];
    let finished = Running::start_in_shell(bench.folder(), nowhere, &arguments).finish();
    finished.refused(1, &["cannot create a temporary file in nowhere: No such file"]);
    let out = bench.path("out");
    let prepared = at(&format!("file://{}", out.display())).expect(0);
    assert!(prepared.stdout.starts_with(&format!("{}: ", out.display())), "{prepared:?}");
    bench.tidemill(&["inspect", "out"]).expect(0);
    bench.write("out/index.json", "{\"preparing\": \"1\"}");
    for arguments in
        [&["inspect", "out"][..], &["inspect", "out", "--order"], &["bench", "data", "out"]]
    {
        bench.tidemill(arguments).refused(1, &["data set out is still being prepared, or its"]);
    }
}

/// Samples that are tokenized already become rows as they are, and say what their vocabulary is.
#[test]
fn samples_of_tokens() {
    let bench = Workbench::new();
    let tokens = mds("tokens-uint16-gz").display().to_string();
    let report = prepare(&bench, &["--input", &tokens]).expect(0);
    let vocabulary = "from 40 samples that were tokenized already; vocabulary of 997: the largest";
    assert!(report.stdout.contains("40 samples of 32 tokens"), "{report:?}");
    assert!(report.stdout.contains(vocabulary), "{report:?}");
    let before = files(&bench.path("out"));
    let inspected = bench.tidemill(&["inspect", "out", "--format", "json"]).expect(0).json();
    assert_eq!((&inspected["samples"], &inspected["seq_len"]), (&40.into(), &32.into()));
    std::fs::remove_dir_all(bench.path("out")).unwrap();
    prepare(&bench, &["--input", &tokens, "-w", "1", "--seq-len", "32"]).expect(0);
    assert!(files(&bench.path("out")) == before);
    std::fs::remove_dir_all(bench.path("out")).unwrap();

    let name = |name: &str| mds(name).display().to_string();
    for (inputs, arguments, part) in [
        (vec![tokens.clone()], &["--seq-len", "64"][..], "predict 32, expected seq_len 64"),
        (vec![tokens.clone()], &["--vocab-size", "900"], "found token 90"),
        (vec![tokens.clone()], &["--tokenizer", "bytes"], "(vocabulary of 259)"),
        (vec![tokens.clone(), "data-text".to_owned()], &[], "expected the one or the other"),
        (vec![name("pickled")], &[], "column \"meta\" of pickled objects (pkl)"),
        (vec![name("tokens-bz2")], &[], "shards[0].compression is \"bz2\""),
        (vec![name("tokens-uneven")], &[], "found 32 tokens, expected 33 as in the first sample"),
    ] {
        let inputs: Vec<&str> = inputs.iter().map(String::as_str).collect();
        prepare(&bench, &[&["--input"], &inputs[..], arguments].concat()).refused(1, &[part]);
        assert!(!bench.path("out").exists(), "{part}");
    }
}
