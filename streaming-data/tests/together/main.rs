//! Several processes prepare what one does, to the byte, and end together. The processes are threads.
//!
//! Seen red: with a process that listens no longer to one whose verdicts came before the end of its entries.

#[path = "../support/outcome.rs"]
mod outcome;
#[path = "../support/peers.rs"]
mod peers;

mod bench;
mod ends;
mod failures;

use std::{
    collections::BTreeMap,
    fs,
    io::Write,
    ops::ControlFlow,
    path::{Path, PathBuf},
};

use flate2::{Compression, write::GzEncoder};
use tidemill_streaming_data::prepare::{
    ByteTokenizer, Dedup, DedupSettings, FilterSettings, Layout, Phase, PrepareError,
    PrepareReport, PrepareSettings, Progress, prepare, prepare_together,
};

use bench::{Bench, NO_ROOM, ROOM, number};
use outcome::{line, names};
use peers::in_processes;

impl Bench {
    /// Takes the prepared files away.
    fn take(&self, report: &PrepareReport) -> Prepared {
        let files = files(&self.path("out"));
        fs::remove_dir_all(self.path("out")).unwrap();
        assert_eq!(names(self.folder.path()).iter().filter(|it| it.starts_with('.')).count(), 0);
        Prepared { files, report: told(report) }
    }

    fn alone(&self, settings: &PrepareSettings) -> Prepared {
        let report = prepare(settings, &ByteTokenizer, &mut |_| ControlFlow::Continue(()));
        self.take(&report.unwrap())
    }

    fn together(
        &self,
        settings: &PrepareSettings,
        processes: usize,
        window: usize,
    ) -> Result<Prepared, PrepareError> {
        let prepared = in_processes(processes, window, |peers| {
            let (mut last, mut phases) = (Progress::default(), Vec::new());
            let report = prepare_together(peers, settings, &ByteTokenizer, &mut |now| {
                if peers.process() == 0 {
                    if phases.last() != Some(&now.phase) {
                        phases.push(now.phase);
                        last = Progress::default();
                    }
                    assert!(now.bytes_done >= last.bytes_done);
                    assert!(now.bytes_done <= now.bytes_total);
                    last = now;
                }
                ControlFlow::Continue(())
            })?;
            if let Some(report) = &report {
                assert_eq!(phases.last(), Some(&Phase::Publishing));
                assert_eq!(last.samples, report.samples);
                // Where texts are read beside what is told, the last words of the one may come behind those of the other.
                if settings.layout == Layout::Stream {
                    assert_eq!(last.bytes_done, last.bytes_total);
                }
            }
            Ok(report)
        });
        match prepared {
            Ok((report, sent)) => {
                assert!(processes == 1 || sent.messages > 0);
                Ok(self.take(&report))
            }
            Err(error) => {
                assert_eq!(self.left(), ["in"], "nothing is left");
                Err(error)
            }
        }
    }
}

/// Every file with its content, and what the report says.
#[derive(PartialEq)]
struct Prepared {
    files: BTreeMap<String, Vec<u8>>,
    report: String,
}

#[track_caller]
fn assert_same(found: &Prepared, expected: &Prepared, what: &str) {
    assert_eq!(found.report, expected.report, "{what}");
    let names = |it: &Prepared| it.files.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(found), names(expected), "{what}");
    for (name, content) in &expected.files {
        assert!(found.files[name] == *content, "{name} is another: {what}");
    }
}

/// All that a report says, as it is printed.
fn told(report: &PrepareReport) -> String {
    let skipped: Vec<_> = report.skipped.iter().map(|it| (&it.path, line(&it.reason))).collect();
    let broken = report.named_broken.iter();
    let broken: Vec<_> =
        broken.map(|it| (&it.path, it.place.to_string(), it.reason.to_string())).collect();
    format!(
        "{:?} {} {:?}",
        (
            (report.from, report.fingerprint, &report.changes, report.documents, report.empty),
            (report.nulls, report.duplicates, report.broken, &report.filtered, report.dedup),
            (report.excluded, &report.unused_exclusions, report.text_bytes, report.tokens),
            (report.dropped_tokens, report.seq_len, report.vocab_size, report.samples),
            (report.shards, report.shard_bytes),
        ),
        format_args!("{skipped:?}"),
        broken,
    )
}

fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut files = BTreeMap::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(inner) = folders.pop() {
        for entry in fs::read_dir(&inner).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else {
                let name = path.strip_prefix(folder).unwrap().to_str().unwrap().to_owned();
                files.insert(name, fs::read(&path).unwrap());
            }
        }
    }
    // It says when inputs were last changed.
    files.remove("state/seen");
    files
}

/// Numbers as random as is needed here, the same each time.
struct Chance(u64);

impl Chance {
    fn below(&mut self, most: usize) -> usize {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % most.max(1)
    }

    fn word(&mut self, words: usize) -> String {
        let number = self.below(words);
        let letter = |power: u32| char::from(b'a' + (number / 26_usize.pow(power) % 26) as u8);
        (0..4).map(letter).collect()
    }

    /// A text of few kinds, so that there are many copies and near copies.
    fn text(&mut self) -> String {
        let mut of_kind = Chance(self.below(25) as u64);
        let mut words: Vec<String> = (0..30).map(|_| of_kind.word(5000)).collect();
        for _ in 0..self.below(3) {
            let at = self.below(words.len());
            words[at] = self.word(9000);
        }
        match self.below(12) {
            0 => words.truncate(3),
            1 => words.push("lorem ipsum".to_owned()),
            _ => {}
        }
        words.join(" ") + "."
    }

    fn lines(&mut self, count: usize) -> String {
        let mut line = || match self.below(25) {
            0 => "{broken\n".to_owned(),
            1 => "{\"text\": \"\"}\n".to_owned(),
            2 => "{\"text\": 7}\n".to_owned(),
            _ => format!("{}\n", serde_json::json!({ "text": self.text() })),
        };
        (0..count).map(|_| line()).collect()
    }
}

fn gzip(text: &str) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(text.as_bytes()).unwrap();
    encoder.finish().unwrap()
}

/// Inputs of all kinds: one that is larger than all others, empty ones, one that is damaged, one that is not UTF-8.
fn mixed(bench: &Bench, chance: &mut Chance) {
    bench.write("in/b-huge.jsonl", chance.lines(300));
    bench.write("in/c.jsonl.gz", gzip(&chance.lines(40)));
    let damaged = gzip(&chance.lines(60));
    bench.write("in/d.jsonl.gz", &damaged[..damaged.len() * 2 / 3]);
    for at in 0..12 {
        bench.write(&format!("in/{}/{at}.txt", ["a", "e", "f"][at % 3]), chance.text());
    }
    bench.write("in/e/empty.txt", "");
    bench.write("in/a/empty.jsonl", "");
    bench.write("in/f/latin.txt", b"caf\xe9");
    bench.write("in/g.jsonl", chance.lines(30));
}

fn filters() -> FilterSettings {
    let mut filters = FilterSettings::default();
    let rules = "[gopher]\nmin_words = 5\n[c4]\nreject_lorem_ipsum = true\n";
    filters.append_toml(rules, "test.toml".as_ref()).unwrap();
    filters
}

fn dedup(dedup: Dedup, memory_bytes: u64) -> DedupSettings {
    DedupSettings { dedup, memory_bytes }
}

/// Settings, with each of which one process and several prepare.
fn asked(bench: &Bench) -> Vec<(&'static str, PrepareSettings)> {
    let plain = bench.settings();
    let mut list = format!("{}\n", bench.path("in/a/0.txt").display());
    for (name, line) in [("b-huge.jsonl", 7), ("g.jsonl", 3), ("g.jsonl", 4), ("g.jsonl", 400)] {
        list += &format!("{}\t{line}\n", bench.path("in").join(name).display());
    }
    let text = fs::read(bench.path("in/f/5.txt")).unwrap();
    list += &format!("{}\n", tidemill_streaming_data::hash::ContentHash::of(&text));
    list += "in/nowhere\n";
    let exclude = Some(bench.write("list.txt", list));
    let near = dedup(Dedup::Near, 1 << 20);
    vec![
        ("plain", plain.clone()),
        ("exact", PrepareSettings { dedup: dedup(Dedup::Exact, 1 << 20), ..plain.clone() }),
        ("words", PrepareSettings { dedup: dedup(Dedup::ExactWords, 0), ..plain.clone() }),
        ("near", PrepareSettings { dedup: near, ..plain.clone() }),
        ("near in no memory", PrepareSettings { dedup: dedup(Dedup::Near, 0), ..plain.clone() }),
        ("filters", PrepareSettings { filters: filters(), ..plain.clone() }),
        ("all", PrepareSettings { filters: filters(), dedup: near, exclude, ..plain }),
    ]
}

#[test]
fn several_processes_leave_the_bytes_and_the_report_of_one() {
    let bench = Bench::new();
    mixed(&bench, &mut Chance(1));
    let mut left_out = 0;
    for layout in [Layout::Stream, Layout::Updatable] {
        for (what, settings) in asked(&bench) {
            let settings = PrepareSettings { layout, ..settings };
            let expected = bench.alone(&settings);
            left_out += usize::from(!expected.report.contains("near_copies: 0"));
            for (processes, workers, window) in
                [(1, 1, ROOM), (2, 1, ROOM), (2, 2, NO_ROOM), (3, 2, ROOM), (5, 1, NO_ROOM)]
            {
                let settings = PrepareSettings { workers: number(workers), ..settings.clone() };
                let found = bench.together(&settings, processes, window).unwrap();
                let what = format!("{what}, {layout:?}, {processes} x {workers}, {window}");
                assert_same(&found, &expected, &what);
            }
        }
    }
    assert_eq!(left_out, 6, "there are near copies where they are looked for");
}

/// However the documents are distributed over files, which are dealt out by their sizes.
#[test]
fn any_distribution_of_files_is_as_good() {
    for seed in 0..12 {
        let (bench, mut chance) = (Bench::new(), Chance(seed));
        for file in 0..1 + chance.below(9) {
            let folder = ["", "a/", "z/"][chance.below(3)];
            let name = format!("in/{folder}{}-{file}", chance.below(100));
            match chance.below(5) {
                0 => bench.write(&format!("{name}.txt"), ""),
                1 => bench.write(&format!("{name}.txt"), chance.text()),
                2 => bench.write(&format!("{name}.jsonl"), ""),
                _ => {
                    let lines = 1 + chance.below(60);
                    bench.write(&format!("{name}.jsonl"), chance.lines(lines))
                }
            };
        }
        bench.write("in/m.jsonl", chance.lines(20));
        let settings = PrepareSettings {
            dedup: dedup([Dedup::Near, Dedup::Exact][seed as usize % 2], 0),
            layout: [Layout::Stream, Layout::Updatable][seed as usize / 2 % 2],
            ..bench.settings()
        };
        let expected = bench.alone(&settings);
        for processes in [2, 3, 17] {
            let found = bench.together(&settings, processes, ROOM).unwrap();
            assert_same(&found, &expected, &format!("{seed}, {processes} processes"));
        }
    }
}

/// Which of several equal documents is kept must not depend on which process was first.
#[test]
fn the_first_in_rank_is_kept_though_it_is_read_last() {
    let bench = Bench::new();
    // Process 0 gets the first, which is large, and comes to the copy at its end last of all.
    let (mut chance, mut large) = (Chance(5), String::new());
    for at in 0..4000 {
        large += &format!("{{\"text\": \"{at} {}\"}}\n", chance.word(100_000));
    }
    let copy = "{\"text\": \"one that stands in all files\"}\n";
    bench.write("in/a.jsonl", large + copy);
    for name in ["b", "c", "d", "e"] {
        bench.write(&format!("in/{name}.jsonl"), copy);
    }
    for kind in [Dedup::Exact, Dedup::Near] {
        let settings = PrepareSettings { dedup: dedup(kind, 1 << 20), ..bench.settings() };
        let expected = bench.alone(&settings);
        assert!(expected.report.contains("copies: 4"), "{}", expected.report);
        for processes in [2, 4] {
            let found = bench.together(&settings, processes, ROOM).unwrap();
            assert_same(&found, &expected, &format!("{kind:?}, {processes}"));
        }
    }
}

/// A text that is read in pieces, and much more than process 0 takes before its turn.
#[test]
fn what_is_read_before_its_turn_waits_on_disk() {
    let bench = Bench::new();
    let mut chance = Chance(9);
    let words = |chance: &mut Chance, bytes: usize| {
        let mut text = String::with_capacity(bytes + 8);
        while text.len() < bytes {
            text += &chance.word(26 * 26 * 26);
            text.push(' ');
        }
        text
    };
    // Four bytes a token: the second is 40 MiB, more than waits in memory.
    bench.write("in/a.txt", words(&mut chance, 10 << 20));
    bench.write("in/b.txt", words(&mut chance, 10 << 20));
    bench.write("in/c.txt", words(&mut chance, 3 << 20));
    let settings = PrepareSettings {
        shard_samples: Some(number(100_000)),
        seq_len: Some(number(511)),
        ..bench.settings()
    };
    let expected = bench.alone(&settings);
    let found = bench.together(&settings, 2, ROOM).unwrap();
    assert_same(&found, &expected, "large texts");
}

#[test]
fn samples_that_are_tokenized_already_are_taken_as_they_are() {
    let bench = Bench::new();
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/mds");
    let sets: Vec<PathBuf> = fs::read_dir(&fixtures)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.join("index.json").exists())
        .collect();
    let mut prepared = 0;
    for set in &sets {
        let settings =
            PrepareSettings { inputs: vec![set.clone()], seq_len: None, ..bench.settings() };
        let alone = prepare(&settings, &ByteTokenizer, &mut |_| ControlFlow::Continue(()));
        match alone {
            Ok(report) => {
                let expected = bench.take(&report);
                let found = bench.together(&settings, 3, ROOM).unwrap();
                assert_same(&found, &expected, &set.display().to_string());
                prepared += 1;
            }
            Err(error) => {
                let found = bench.together(&settings, 3, ROOM).err().unwrap();
                assert_eq!(line(&found), line(&error));
            }
        }
    }
    assert!(prepared > 1, "{sets:?}");
}
