//! What a report says of a data set: the same for any number of workers and processes, what an independent look at the documents says,
//! and nothing that a document could do to a page.
//!
//! Seen red: with `<` that is not escaped; with links of groups that process 0 passes over; with a text in pieces counted as its last
//! piece; with a byte too many for each document; with inputs that are never put together by folders.

#[path = "../support/peers.rs"]
mod peers;

mod page;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    num::NonZeroUsize,
    ops::ControlFlow,
    path::{Path, PathBuf},
};

use tempfile::TempDir;
use tidemill_streaming_data::{
    hash::ContentHash,
    prepare::{
        ByteTokenizer, DataReport, Dedup, DedupSettings, FilterSettings, Layout, PrepareReport,
        PrepareSettings, Reporting,
        data_report::{
            Bucket, EXAMPLES, EXCERPT_CHARACTERS, Histogram, OfVerdict, REPORT_FILE, REPORT_PAGE,
            SOURCES, Verdict,
        },
        prepare, prepare_together,
    },
};

use page::check_page;
use peers::in_processes;

struct Bench {
    folder: TempDir,
}

impl Bench {
    fn new() -> Bench {
        let memory = Path::new("/dev/shm");
        let folder = match memory.is_dir() {
            true => tempfile::tempdir_in(memory).unwrap(),
            false => tempfile::tempdir().unwrap(),
        };
        Bench { folder }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, content).unwrap();
        path
    }

    fn settings(&self) -> PrepareSettings {
        let (inputs, output) = (vec![self.path("in")], self.path("out"));
        PrepareSettings {
            shard_samples: Some(number(60)),
            reporting: Reporting::Files,
            ..PrepareSettings::new(inputs, output, number(16))
        }
    }

    /// The report, the page and what was printed; the data set is taken away.
    fn prepare(&self, settings: &PrepareSettings) -> (DataReport, String, PrepareReport) {
        let go_on = &mut |_| ControlFlow::Continue(());
        let printed = prepare(settings, &ByteTokenizer, go_on).unwrap();
        let bytes = fs::read(self.path("out").join(REPORT_FILE)).unwrap();
        let report = DataReport::from_bytes(&bytes).unwrap();
        assert_eq!(report.to_bytes(), bytes);
        let page = fs::read_to_string(self.path("out").join(REPORT_PAGE)).unwrap();
        fs::remove_dir_all(self.path("out")).unwrap();
        (report, page, printed)
    }
}

fn number(number: usize) -> NonZeroUsize {
    NonZeroUsize::new(number).unwrap()
}

/// Numbers as random as is needed here, the same each time.
struct Chance(u64);

impl Chance {
    fn below(&mut self, most: usize) -> usize {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % most.max(1)
    }

    /// A text of few kinds, so that there are many copies and near copies, some of them long.
    fn text(&mut self) -> String {
        let mut of_kind = Chance(self.below(60) as u64);
        let count = [2, 4, 30, 30, 90, 700][of_kind.below(6)];
        let mut words: Vec<String> = (0..count).map(|_| word(&mut of_kind)).collect();
        for _ in 0..self.below(3) {
            let at = self.below(words.len());
            words[at] = word(self);
        }
        words.join(" ")
    }
}

fn word(chance: &mut Chance) -> String {
    (0..4).map(|_| char::from(b'a' + chance.below(26) as u8)).collect()
}

/// A document, and where it is.
#[derive(Debug, Clone)]
struct Document {
    path: PathBuf,
    line: Option<u64>,
    text: String,
}

/// Documents in files, in the order of their paths: large ones, which are read in several parts, and small ones.
fn mixed(bench: &Bench, seed: u64) -> Vec<Document> {
    let mut chance = Chance(seed);
    let mut documents = Vec::new();
    for (name, lines) in [("a/x.jsonl", 3000), ("b.jsonl", 0), ("c/y/z.jsonl", 40)] {
        let path = bench.path("in").join(name);
        let mut file = String::new();
        for line in 1..=lines {
            if chance.below(50) == 0 {
                file += ["{\"text\": 7}\n", "{broken\n", "{\"text\": \"\"}\n"][chance.below(3)];
                continue;
            }
            let text = chance.text();
            file += &format!("{}\n", serde_json::json!({ "text": text }));
            documents.push(Document { path: path.clone(), line: Some(line), text });
        }
        bench.write(&format!("in/{name}"), file);
    }
    for at in 0..12 {
        let (name, text) = (format!("in/d/{at:02}.txt"), chance.text());
        let path = bench.write(&name, &text);
        documents.push(Document { path, line: None, text });
    }
    documents
}

/// A list that leaves out a file, a line, and a text.
fn list(bench: &Bench, documents: &[Document]) -> PathBuf {
    let line = &documents[17];
    let keys = format!(
        "{}\n{}\t{}\n{}\n",
        bench.path("in/d/04.txt").display(),
        line.path.display(),
        line.line.unwrap(),
        ContentHash::of(documents[40].text.as_bytes())
    );
    bench.write("keys.txt", keys)
}

fn filters() -> FilterSettings {
    let mut filters = FilterSettings::default();
    filters
        .append_toml("[gopher]\nmin_words = 5\nmax_words = 500\n", "test.toml".as_ref())
        .unwrap();
    filters
}

fn dedup(dedup: Dedup, memory_bytes: u64) -> DedupSettings {
    DedupSettings { dedup, memory_bytes }
}

#[test]
fn workers_processes_memory_and_the_order_of_inputs_change_no_byte() {
    let bench = Bench::new();
    let exclude = Some(list(&bench, &mixed(&bench, 1)));
    for layout in [Layout::Stream, Layout::Updatable] {
        for kind in [Dedup::None, Dedup::Exact, Dedup::Near] {
            let settings = PrepareSettings {
                layout,
                filters: filters(),
                exclude: exclude.clone(),
                dedup: dedup(kind, 1 << 20),
                ..bench.settings()
            };
            let (expected, expected_page, _) = bench.prepare(&settings);
            assert!(expected.verdicts.len() >= 3 + usize::from(kind != Dedup::None));
            let inputs = ["in/d", "in/c", "in/b.jsonl", "in/a", "in"].map(|name| bench.path(name));
            for (processes, workers, memory_bytes) in [(1, 4, 0), (2, 1, 1 << 20), (3, 2, 0)] {
                let settings = PrepareSettings {
                    workers: number(workers),
                    dedup: dedup(kind, memory_bytes),
                    inputs: match layout {
                        Layout::Stream => inputs.to_vec(),
                        // The inputs stand in the state.
                        Layout::Updatable => settings.inputs.clone(),
                    },
                    ..settings.clone()
                };
                let (report, _) = in_processes(processes, 4 << 20, |peers| {
                    let go_on = &mut |_| ControlFlow::Continue(());
                    prepare_together(peers, &settings, &ByteTokenizer, go_on)
                })
                .unwrap();
                let read = |name: &str| fs::read(bench.path("out").join(name)).unwrap();
                let (json, page) = (read(REPORT_FILE), read(REPORT_PAGE));
                fs::remove_dir_all(bench.path("out")).unwrap();
                let found = DataReport::from_bytes(&json).unwrap();
                let what = format!("{layout:?} {kind:?} {processes} x {workers}");
                // Paths that lead to an input once more are counted.
                let reached_again = found.inputs.reached_again;
                let mut found = found;
                found.inputs.reached_again = expected.inputs.reached_again;
                assert_eq!(found, expected, "{what}");
                if reached_again == expected.inputs.reached_again {
                    assert!(json == expected.to_bytes(), "{what}");
                }
                assert!(page == expected_page.as_bytes(), "the page of {what}");
                assert_eq!(report.documents, expected.documents.kept);
            }
        }
    }
}

/// The verdicts on documents, formed in the simplest way.
fn judged(documents: &[Document], bench: &Bench, has_list: bool) -> Vec<Verdict> {
    let mut seen = BTreeSet::new();
    let excluded = [&documents[17], &documents[40]].map(|document| document.clone());
    documents
        .iter()
        .map(|document| {
            let is_at = document.path == excluded[0].path && document.line == excluded[0].line;
            let is_listed = document.path == bench.path("in/d/04.txt")
                || is_at
                || document.text == excluded[1].text;
            let words = document.text.split(' ').count();
            if has_list && is_listed {
                Verdict::Excluded
            } else if words < 5 {
                Verdict::Rejected("gopher.min_words".to_owned())
            } else if words > 500 {
                Verdict::Rejected("gopher.max_words".to_owned())
            } else if seen.insert(document.text.clone()) {
                Verdict::Kept
            } else {
                Verdict::Copy
            }
        })
        .collect()
}

/// Sizes counted one by one into buckets that are searched.
fn counted(sizes: &[u64]) -> Histogram {
    let mut buckets: Vec<Bucket> =
        (0..40).map(|power| Bucket { from: 1 << power, to: (2 << power) - 1, count: 0 }).collect();
    for size in sizes {
        let bucket = buckets.iter_mut().find(|it| (it.from..=it.to).contains(size)).unwrap();
        bucket.count += 1;
    }
    while buckets.last().is_some_and(|bucket| bucket.count == 0) {
        buckets.pop();
    }
    let first = buckets.iter().position(|bucket| bucket.count > 0).unwrap_or(0);
    Histogram {
        count: sizes.len() as u64,
        total: sizes.iter().sum(),
        largest: sizes.iter().copied().max().unwrap_or(0),
        buckets: buckets.split_off(first),
    }
}

#[test]
fn counts_and_examples_are_those_of_an_independent_look() {
    let bench = Bench::new();
    let documents = mixed(&bench, 2);
    let exclude = Some(list(&bench, &documents));
    let verdicts = judged(&documents, &bench, true);
    for layout in [Layout::Stream, Layout::Updatable] {
        let settings = PrepareSettings {
            layout,
            filters: filters(),
            exclude: exclude.clone(),
            dedup: dedup(Dedup::Exact, 1 << 20),
            workers: number(3),
            ..bench.settings()
        };
        let (report, page, printed) = bench.prepare(&settings);
        let all: BTreeSet<&Verdict> = verdicts.iter().collect();
        assert_eq!(report.verdicts.iter().map(|of| &of.verdict).collect::<BTreeSet<_>>(), all);
        for of in &report.verdicts {
            let same = documents.iter().zip(&verdicts).filter(|it| *it.1 == of.verdict);
            let same: Vec<&Document> = same.map(|it| it.0).collect();
            assert_eq!(of.documents, same.len() as u64, "{}", of.verdict);
            assert_eq!(of.bytes, same.iter().map(|it| it.text.len() as u64).sum::<u64>());
            assert_eq!(of.examples.len(), same.len().min(EXAMPLES));
            for (example, document) in of.examples.iter().zip(same) {
                assert_eq!(example.path, document.path.to_str().unwrap());
                assert_eq!(example.place, document.line.map(|line| format!("line {line}")));
                assert_eq!(example.hash, Some(ContentHash::of(document.text.as_bytes())));
                let begins: String = document.text.chars().take(EXCERPT_CHARACTERS).collect();
                assert_eq!(example.excerpt.text, begins);
                assert_eq!(example.excerpt.document_bytes, document.text.len() as u64);
                assert!(page.contains(&begins));
            }
        }
        let of = |is_kept: bool| -> Vec<u64> {
            let of = documents.iter().zip(&verdicts);
            let of = of.filter(|it| (*it.1 == Verdict::Kept) == is_kept);
            of.map(|it| it.0.text.len() as u64).collect()
        };
        let (kept, left_out) = (of(true), of(false));
        assert_eq!(report.lengths.kept_bytes, counted(&kept));
        assert_eq!(report.lengths.left_out_bytes, counted(&left_out));
        let tokens: Vec<u64> = kept.iter().map(|bytes| bytes + 1).collect();
        assert_eq!(report.lengths.kept_tokens, counted(&tokens));
        assert_eq!(report.documents.read, documents.len() as u64);
        assert_eq!(report.documents.kept, printed.documents);
        let none = &report.documents;
        let expected = (printed.empty, printed.nulls, printed.broken);
        assert_eq!((none.empty, none.nulls, none.broken), expected);
        assert!(none.empty > 0 && none.broken > 0);
        assert_eq!(report.data.tokens, tokens.iter().sum::<u64>());
        assert_eq!(report.data.dropped_tokens, printed.dropped_tokens);
        assert_eq!(report.fingerprint, printed.fingerprint);

        let mut copies: BTreeMap<&str, u64> = BTreeMap::new();
        for (document, verdict) in documents.iter().zip(&verdicts) {
            if matches!(verdict, Verdict::Kept | Verdict::Copy) {
                *copies.entry(&document.text).or_default() += 1;
            }
        }
        let sizes: Vec<u64> = copies.into_values().collect();
        let groups = report.duplicates.unwrap();
        assert_eq!(groups.sizes, counted(&sizes));
        assert_eq!(groups.compared, sizes.iter().sum::<u64>());
        assert_eq!(groups.groups, sizes.iter().filter(|size| **size > 1).count() as u64);
        assert_eq!(groups.documents, sizes.iter().filter(|size| **size > 1).sum::<u64>());

        let by_path = |path: &str| {
            let of = documents.iter().zip(&verdicts).filter(|it| it.0.path.to_str() == Some(path));
            let kept = of.clone().filter(|it| *it.1 == Verdict::Kept);
            let tokens = kept.clone().map(|it| it.0.text.len() as u64 + 1).sum::<u64>();
            (of.count() as u64, kept.count() as u64, tokens)
        };
        assert_eq!(report.sources.listed.len(), 15);
        assert!(report.sources.listed.is_sorted_by(|a, b| a.tokens >= b.tokens));
        for source in &report.sources.listed {
            assert_eq!((source.documents, source.kept, source.tokens), by_path(&source.path));
        }
        assert_eq!(report.dropped_lines.is_some(), layout == Layout::Stream);
    }
}

/// Groups of near copies are what buckets connect: they are the same in memory and sorted in parts, whole copies are together, and
/// there is one document that is kept in each at least.
#[test]
fn groups_of_near_copies_hold_together() {
    let bench = Bench::new();
    mixed(&bench, 3);
    let near = |memory_bytes| {
        let settings =
            PrepareSettings { dedup: dedup(Dedup::Near, memory_bytes), ..bench.settings() };
        bench.prepare(&settings).0
    };
    let report = near(1 << 30);
    let groups = report.duplicates.clone().unwrap();
    assert_eq!(groups, near(0).duplicates.unwrap());
    let of = |verdict: Verdict| {
        report.verdicts.iter().find(|of| of.verdict == verdict).map_or(0, |of| of.documents)
    };
    let (kept, near_copies) = (of(Verdict::Kept), of(Verdict::NearCopy));
    assert!(near_copies > 10, "{near_copies}");
    assert_eq!(groups.compared, kept + near_copies + of(Verdict::Copy));
    let alone = groups.compared - groups.documents;
    assert!(groups.groups + alone <= kept, "each has a document that is kept");
    assert_eq!(groups.sizes.count, groups.groups + alone);
    assert_eq!(groups.sizes.total, groups.compared);
}

#[test]
fn a_large_text_that_is_read_in_pieces_is_one_document() {
    let bench = Bench::new();
    let text = "水 and more, ".repeat(100_000);
    bench.write("in/large.txt", &text);
    bench.write("in/small.txt", "small");
    for workers in [1, 3] {
        let settings = PrepareSettings {
            workers: number(workers),
            shard_samples: Some(number(10_000)),
            ..bench.settings()
        };
        let (report, _, printed) = bench.prepare(&settings);
        let lengths = [text.len() as u64, 5];
        assert_eq!(report.lengths.kept_bytes, counted(&lengths));
        assert_eq!(report.lengths.kept_tokens, counted(&lengths.map(|bytes| bytes + 1)));
        assert_eq!((report.documents.read, report.data.tokens), (2, printed.tokens));
        let [large, small] = &report.verdicts[0].examples[..] else { panic!("two are shown") };
        assert_eq!(large.excerpt.text, text.chars().take(EXCERPT_CHARACTERS).collect::<String>());
        assert_eq!((large.excerpt.document_bytes, large.hash), (text.len() as u64, None));
        assert_eq!(small.hash, Some(ContentHash::of(b"small")));
    }
}

#[test]
fn samples_that_are_tokenized_already_are_counted() {
    let bench = Bench::new();
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/mds/tokens-int32");
    let inputs = vec![fixture];
    let settings =
        PrepareSettings { inputs, seq_len: None, shard_samples: None, ..bench.settings() };
    let (report, page, printed) = bench.prepare(&settings);
    let tokens = printed.tokens / printed.documents;
    assert_eq!(report.lengths.kept_tokens, counted(&vec![tokens; printed.documents as usize]));
    assert_eq!(report.lengths.kept_bytes, Histogram::default());
    assert_eq!((report.verdicts.len(), report.verdicts[0].examples.len()), (1, 0));
    assert_eq!((report.duplicates, report.dropped_lines), (None, None));
    check_page(&page);
}

#[test]
fn of_many_inputs_folders_are_told_and_what_is_left_out_is_counted() {
    let bench = Bench::new();
    for folder in 0..4 {
        for at in 0..30 {
            bench.write(&format!("in/{folder}/{at}.txt"), "text ".repeat(10 + folder));
        }
    }
    let (report, page, _) = bench.prepare(&bench.settings());
    let paths: Vec<&str> = report.sources.listed.iter().map(|source| &source.path[..]).collect();
    let folders: Vec<String> =
        (0..4).rev().map(|at| format!("{}/", bench.path(&format!("in/{at}")).display())).collect();
    assert_eq!(paths, folders);
    assert!(report.sources.listed.iter().all(|source| source.inputs == 30));
    for at in 0..300 {
        bench.write(&format!("in/{at:03}.txt"), "a");
    }
    for folder in 0..4 {
        fs::remove_dir_all(bench.path(&format!("in/{folder}"))).unwrap();
    }
    let (flat, flat_page, _) = bench.prepare(&bench.settings());
    assert_eq!(
        (flat.sources.listed.len(), flat.sources.others.sources),
        (SOURCES, 300 - SOURCES as u64)
    );
    assert_eq!(flat.sources.others.tokens, 2 * (300 - SOURCES as u64));
    assert!(flat_page.contains("250 other sources are not listed") && !page.contains("not listed"));
}
