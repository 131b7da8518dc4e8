//! JSON lines.
//!
//! Seen red: with lines numbered wrongly behind a part or a line that was left out, a byte order mark that stays,
//! blank lines taken for broken ones, only the first member or frame read of a compressed file, damage that is
//! not told, no eos behind a document, empty texts taken for documents, `--strict` that is not, a cap on broken
//! lines that names the wrong ones, an `index.json` of something else taken for lines, and bytes of an input
//! counted twice.

use std::{fs, io::Write};

use tidemill_streaming_data::prepare::{PrepareSettings, SkipReason};

use crate::support::{Bench, broken, documents, gzip, skipped};

fn lines(documents: &[String]) -> String {
    let line = |(at, text): (usize, &String)| {
        let line = serde_json::json!({"id": at, "meta": {"text": "not this"}, "text": text});
        format!("{line}\n")
    };
    documents.iter().enumerate().map(line).collect()
}

fn zstd(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = zstd::Encoder::new(Vec::new(), 1).unwrap();
    encoder.include_checksum(true).unwrap();
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

#[test]
fn the_same_shards_as_of_texts() {
    let bench = Bench::new();
    let documents = documents();
    let (texts, expected) = bench.as_texts(&documents);
    assert!(texts.shards > 2 && texts.empty > 0, "{texts:?}");
    let plain = lines(&documents);
    // Compressed files may be pieces one behind the other, cut anywhere.
    let (one, two) = plain.as_bytes().split_at(plain.len() / 3);
    for (name, content) in [
        ("a.jsonl", plain.clone().into_bytes()),
        ("a.ndjson", plain.trim_end().as_bytes().to_vec()),
        ("a.json", format!("\u{feff}{}", plain.replace('\n', " \r\n\r\n")).into_bytes()),
        ("a.jsonl.gz", gzip(plain.as_bytes())),
        ("a.json.gz", [gzip(one), gzip(b""), gzip(two)].concat()),
        ("a.jsonl.zst", zstd(plain.as_bytes())),
        ("a.ndjson.zst", [zstd(one), zstd(b""), zstd(two)].concat()),
    ] {
        bench.write(name, content);
        let (report, files) = bench.prepare_with_all_workers(&[name]);
        assert!(files == expected, "{name}");
        assert_eq!(
            (report.documents, report.empty, report.text_bytes, report.broken),
            (texts.documents, texts.empty, texts.text_bytes, 0),
            "{name}"
        );
    }
    // Part of them in each of several files, among texts.
    for at in (300..1000).rev() {
        fs::remove_file(bench.path(&format!("texts/{at:06}.txt"))).unwrap();
    }
    bench.write("texts/a/000300.jsonl.gz", gzip(lines(&documents[300..500]).as_bytes()));
    bench.write("texts/b.jsonl", "");
    bench.write("texts/c.jsonl", lines(&documents[500..501]));
    bench.write("texts/d/000501.ndjson.zst", zstd(lines(&documents[501..]).as_bytes()));
    bench.write("texts/index.json", "{\"not\": \"an input\"}");
    bench.write("texts/other.json", "{\"not\": \"an input\"}");
    let (report, files) = bench.prepare_with_all_workers(&["texts"]);
    assert!(files == expected, "among texts");
    assert_eq!((report.broken, report.skipped.len()), (0, 0));
}

#[test]
fn texts_at_nested_keys() {
    let bench = Bench::new();
    let documents = &documents()[..50];
    let (_, expected) = bench.as_texts(documents);
    let line = |text: &String| format!("{}\n", serde_json::json!({"a": {"b": {"c": text}}}));
    bench.write("a.jsonl", documents.iter().map(line).collect::<String>());
    let settings = bench.settings(&["a.jsonl"]);
    let settings = PrepareSettings { text_key: Some("a.b.c".to_owned()), ..settings };
    assert!(bench.prepare(&settings).unwrap().1 == expected);
    let refused = bench.refused(&PrepareSettings { text_key: None, ..settings });
    assert!(
        refused.contains("(0 files and 50 lines or rows skipped, the first /")
            && refused.contains("a.jsonl, line 1: it has no key \"text\")"),
        "{refused}"
    );
}

#[test]
fn broken_lines_are_counted_and_named() {
    let bench = Bench::new();
    let good: Vec<String> = (0..5).map(|at| format!("good document {at}")).collect();
    let (_, expected) = bench.as_texts(&good);
    let line = |at: usize| lines(&good[at..=at]).into_bytes();
    let content = [
        b"{\"text\": \"cut o\n",
        &line(0)[..],
        b"\n  \t\n{\"txt\": 1}\n",
        &line(1),
        b"{\"text\": null}\r\n",
        &line(2),
        b"{\"text\": \"\xff\"}\n[]\n",
        &line(3),
        &line(4),
        b"{\"text\": \"no end\"",
    ]
    .concat();
    bench.write("a.jsonl", &content);
    let (report, files) = bench.prepare_with_all_workers(&["a.jsonl"]);
    assert!(files == expected);
    assert_eq!(
        broken(&report),
        [
            "line 1: it is not JSON at column 15: EOF while parsing a string",
            "line 5: it has no key \"text\"",
            "line 7: \"text\" is null, expected a string",
            "line 9: it is not UTF-8 at byte 10",
            "line 10: found a list, expected an object",
            "line 13: it is not JSON at column 17: EOF while parsing an object",
        ]
    );
    assert_eq!((report.broken, report.documents), (6, 5));
    assert_eq!(report.named_broken[0].path, bench.path("a.jsonl"));
    let refused = bench.refused_strictly(&["a.jsonl"]);
    assert!(
        refused.ends_with("a.jsonl: it is not JSON at column 15: EOF while parsing a string")
            && refused.starts_with("cannot take line 1 of "),
        "{refused}"
    );
    // Where there are too many to name, the first of the whole stream are named.
    let many = "no\n".repeat(200_000);
    bench.write("b.jsonl", [&line(0), many.as_bytes(), &line(1)].concat());
    bench.write("c.jsonl", [many.as_bytes(), &line(2), &line(3), &line(4)].concat());
    let (report, files) = bench.prepare_with_all_workers(&["c.jsonl", "b.jsonl"]);
    assert!(files == expected);
    assert_eq!((report.broken, report.named_broken.len()), (400_000, 100));
    let last = &report.named_broken[99];
    assert_eq!((&last.path, last.place.to_string()), (&bench.path("b.jsonl"), "line 101".into()));
}

#[test]
fn damaged_files_give_what_is_before_the_damage_and_are_named_with_the_place() {
    let bench = Bench::new();
    let documents = documents();
    let plain = lines(&documents);
    let (gzip, zstd) = (gzip(plain.as_bytes()), zstd(plain.as_bytes()));
    let flip = |bytes: &[u8], at: usize| {
        let mut bytes = bytes.to_vec();
        bytes[at] ^= 0x55;
        bytes
    };
    for (name, content) in [
        ("a.jsonl.gz", gzip[..gzip.len() / 2].to_vec()),
        ("b.jsonl.gz", flip(&gzip, gzip.len() - 6)),
        ("c.jsonl.gz", [&gzip, &b"garbage"[..]].concat()),
        ("d.jsonl.zst", zstd[..zstd.len() / 2].to_vec()),
        ("e.jsonl.zst", flip(&zstd, zstd.len() - 2)),
        ("f.jsonl.zst", zstd[..zstd.len() - 1].to_vec()),
    ] {
        bench.write(name, content);
        let (report, files) = bench.prepare_with_all_workers(&[name]);
        let [(skipped_name, reason)] = &skipped(&report)[..] else { panic!("{report:?}") };
        assert_eq!(skipped_name, name);
        // A checksum stands behind the lines that it is of.
        let (from, words) = match &report.skipped[0].reason {
            SkipReason::Damaged { from, .. } => (from, format!("it is damaged from {from} on: ")),
            SkipReason::Checksum { to, .. } => {
                (to, format!("its checksum is wrong: any text before {to} may be damaged"))
            }
            _ => panic!("{reason}"),
        };
        let is_checksum = matches!(&report.skipped[0].reason, SkipReason::Checksum { .. });
        assert_eq!(is_checksum, ["b.jsonl.gz", "e.jsonl.zst"].contains(&name), "{name}: {reason}");
        // The documents before that line were taken, and nothing else.
        let before: usize = from.to_string().strip_prefix("line ").unwrap().parse().unwrap();
        assert!(before > 300 && before <= 1001, "{name}: {reason}");
        let (_, expected) = bench.as_lines(&documents[..before - 1]);
        assert!(files == expected, "{name}: {reason}");
        assert_eq!(report.broken, 0);
        let refused = bench.refused_strictly(&[name]);
        assert!(refused.contains(&format!("{name}: {words}")), "{refused}");
    }
    bench.write("g.jsonl.gz", "not gzip at all");
    bench.write("h.jsonl.zst", "not zstd at all");
    bench.write("i.txt.gz", "any");
    let inputs = ["g.jsonl.gz", "h.jsonl.zst", "i.txt.gz"];
    let refused = bench.refused(&bench.settings(&inputs));
    assert!(
        refused.contains("(3 files and 0 lines") && refused.contains("g.jsonl.gz"),
        "{refused}"
    );
    let refused = bench.refused_strictly(&["i.txt.gz"]);
    assert!(refused.contains("its name ends in .gz, expected"), "{refused}");
}

/// A frame of Zstandard (RFC 8878) with one block, not compressed, that demands such a window.
fn zstd_of_window(window_log: u8, bytes: &[u8]) -> Vec<u8> {
    let block = (bytes.len() as u32) << 3 | 1;
    let head = [0x28, 0xb5, 0x2f, 0xfd, 0, (window_log - 10) << 3];
    [&head, &block.to_le_bytes()[..3], bytes].concat()
}

/// A file of a few bytes may demand any window.
#[test]
fn a_window_of_two_gigabytes_is_refused_with_what_to_do() {
    let bench = Bench::new();
    let bytes = lines(&documents()[..20]);
    bench.write("a.jsonl.zst", zstd_of_window(27, bytes.as_bytes()));
    assert_eq!(bench.prepare(&bench.settings(&["a.jsonl.zst"])).unwrap().0.broken, 0);
    bench.write("a.jsonl.zst", zstd_of_window(31, bytes.as_bytes()));
    let refused = bench.refused_strictly(&["a.jsonl.zst"]);
    let part = "larger than 128 MiB, expected one that `zstd` takes without --long";
    assert!(refused.contains("a.jsonl.zst") && refused.contains(part), "{refused}");
}
