//! Random histories of inputs: after each update the data set is what a preparation from nothing makes.
//!
//! `TIDEMILL_HISTORIES=1000` runs so many of them instead of those that CI runs.

use std::{collections::BTreeMap, fs, ops::ControlFlow};

use tidemill_streaming_data::{
    DataSet,
    order::SampleId,
    prepare::{
        ByteTokenizer, Dedup, DedupSettings, FilterSettings, Layout, PrepareSettings, Reporting,
        UpdateSettings, Verify, update_together,
    },
};

use crate::peers::in_processes;
use crate::reports::{Changes, assert_same_report, documents_of, reports, without_reports};
use crate::support::{Bench, Files, assert_holds, files, number, prepared, word};

const HISTORIES: u64 = 40;

/// Numbers as random as is needed here, the same each time.
struct Chance(u64);

impl Chance {
    fn below(&mut self, most: usize) -> usize {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % most.max(1)
    }

    /// A text of few kinds, so that there are many copies and near copies.
    fn text(&mut self) -> String {
        let kind = self.below(40);
        let mut words: Vec<String> =
            (0..20 + kind).map(|at| word(kind * 1000 + at * (kind + 3) % 97)).collect();
        for _ in 0..self.below(3) {
            let at = self.below(words.len());
            words[at] = word(100_000 + self.below(50));
        }
        match self.below(12) {
            0 => words.truncate(3),
            1 => words.push("lorem ipsum".to_owned()),
            _ => {}
        }
        words.join(" ") + "."
    }

    /// A file of lines, some of which are no documents.
    fn line(&mut self) -> String {
        match self.below(25) {
            0 => "{broken\n".to_owned(),
            1 => "{\"text\": \"\"}\n".to_owned(),
            2 => "{\"text\": null}\n".to_owned(),
            _ => format!("{}\n", serde_json::json!({"text": self.text()})),
        }
    }
}

/// The inputs as they are now.
struct World {
    bench: Bench,
    chance: Chance,
    texts: BTreeMap<String, String>,
    lines: BTreeMap<String, Vec<String>>,
    named: usize,
}

impl World {
    fn new(seed: u64) -> World {
        let mut chance = Chance(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        chance.below(1);
        let mut world = World {
            bench: Bench::new(),
            chance,
            texts: BTreeMap::new(),
            lines: BTreeMap::new(),
            named: 0,
        };
        for _ in 0..4 {
            world.add();
        }
        // There is always something left.
        let lines: String = (0..3).map(|_| world.chance.line()).collect();
        world.bench.write("in/b-always.jsonl", lines + &"{\"text\": \"stays\"}\n".repeat(9));
        world.exclude();
        world
    }

    fn name(&mut self, suffix: &str) -> String {
        self.named += 1;
        let folder = ["", "a/", "b/", "b-"][self.chance.below(4)];
        format!("in/{folder}{:03}-{}.{suffix}", self.chance.below(1000), self.named)
    }

    fn add(&mut self) {
        if self.chance.below(2) == 0 {
            for _ in 0..1 + self.chance.below(6) {
                let (name, text) = (self.name("txt"), self.chance.text());
                self.bench.write(&name, &text);
                self.texts.insert(name, text);
            }
        } else {
            let name = self.name("jsonl");
            let lines = (0..self.chance.below(40)).map(|_| self.chance.line()).collect();
            self.write_lines(name, lines);
        }
    }

    fn write_lines(&mut self, name: String, lines: Vec<String>) {
        self.bench.write(&name, lines.concat());
        self.lines.insert(name, lines);
    }

    fn any_text(&mut self) -> Option<String> {
        let at = self.chance.below(self.texts.len());
        self.texts.keys().nth(at).cloned()
    }

    fn any_lines(&mut self) -> Option<(String, Vec<String>)> {
        let at = self.chance.below(self.lines.len());
        self.lines.iter().nth(at).map(|(name, lines)| (name.clone(), lines.clone()))
    }

    /// Writes a list of documents to leave out.
    fn exclude(&mut self) {
        let mut keys = String::new();
        if self.chance.below(2) == 0
            && let Some(name) = self.any_text()
        {
            keys += &format!("{}\n", self.bench.path(&name).display());
        }
        if self.chance.below(2) == 0
            && let Some((name, lines)) = self.any_lines()
        {
            let line = 1 + self.chance.below(lines.len());
            keys += &format!("{}\t{line}\n", self.bench.path(&name).display());
        }
        if let Some(name) = self.any_text() {
            let hash = tidemill_streaming_data::hash::ContentHash::of(self.texts[&name].as_bytes());
            keys += &format!("{hash}\n");
        }
        self.bench.write("keys.txt", keys);
    }

    /// Changes something.
    fn change(&mut self) {
        match self.chance.below(9) {
            0 => self.add(),
            1 => {
                if let Some(name) = self.any_text() {
                    self.bench.remove(&name);
                    self.texts.remove(&name);
                }
            }
            2 => {
                if let Some((name, _)) = self.any_lines() {
                    self.bench.remove(&name);
                    self.lines.remove(&name);
                }
            }
            3 => {
                if let Some(name) = self.any_text() {
                    let text = self.chance.text();
                    self.bench.write(&name, &text);
                    self.texts.insert(name, text);
                }
            }
            4 => {
                if let Some((name, mut lines)) = self.any_lines() {
                    lines.extend((0..1 + self.chance.below(5)).map(|_| self.chance.line()));
                    self.write_lines(name, lines);
                }
            }
            5 => {
                if let Some((name, mut lines)) = self.any_lines() {
                    for _ in 0..1 + self.chance.below(3) {
                        let at = self.chance.below(lines.len() + 1);
                        match self.chance.below(3) {
                            0 => lines.insert(at, self.chance.line()),
                            1 if at < lines.len() => _ = lines.remove(at),
                            _ if at < lines.len() => lines[at] = self.chance.line(),
                            _ => {}
                        }
                    }
                    self.write_lines(name, lines);
                }
            }
            6 => {
                if let Some(name) = self.any_text() {
                    let renamed = self.name("txt");
                    let text = self.texts.remove(&name).unwrap();
                    self.bench.remove(&name);
                    self.bench.write(&renamed, &text);
                    self.texts.insert(renamed, text);
                }
            }
            7 => {
                if let Some((name, lines)) = self.any_lines() {
                    self.bench.touch(&name);
                    let renamed = self.name("jsonl");
                    let (from, to) = (self.bench.path(&name), self.bench.path(&renamed));
                    fs::create_dir_all(to.parent().unwrap()).unwrap();
                    // Its time stays.
                    fs::rename(from, to).unwrap();
                    self.lines.remove(&name);
                    self.lines.insert(renamed, lines);
                }
            }
            _ => self.exclude(),
        }
    }
}

/// Whether data sets of a seed have reports.
fn is_reported(seed: u64) -> bool {
    !seed.is_multiple_of(4)
}

/// The settings of a seed.
fn settings(seed: u64, bench: &Bench, output: &str) -> PrepareSettings {
    let dedup = [Dedup::Near, Dedup::None, Dedup::Exact, Dedup::Near][seed as usize % 4];
    let filters = match seed % 3 {
        0 => FilterSettings::default(),
        _ => {
            let mut filters = FilterSettings::default();
            let rules = "[gopher]\nmin_words = 5\n[c4]\nreject_lorem_ipsum = true\n";
            filters.append_toml(rules, "test.toml".as_ref()).unwrap();
            filters
        }
    };
    PrepareSettings {
        dedup: DedupSettings { dedup, ..DedupSettings::default() },
        filters,
        exclude: (seed % 5 > 1).then(|| bench.path("keys.txt")),
        shard_samples: Some(number([20, 44, 90][seed as usize % 3])),
        reporting: if is_reported(seed) { Reporting::Files } else { Reporting::None },
        ..bench.settings(output)
    }
}

/// The parts that tell versions apart: shards and state.
fn made_of(files: &Files) -> [serde_json::Value; 2] {
    let index: serde_json::Value = serde_json::from_slice(&files["index.json"]).unwrap();
    ["shards", "state"].map(|part| index.get(part).expect("every version has it").clone())
}

/// All tokens of a data set, shard after shard, and how many shards there are.
fn stream(data_set: &DataSet) -> (Vec<u32>, usize) {
    let mut tokens = Vec::new();
    for (shard, entry) in data_set.shards().iter().enumerate() {
        for row in 0..entry.samples() {
            let sample = SampleId { epoch: 0, shard, row };
            let sample = data_set.sample(sample).unwrap();
            tokens.extend_from_slice(&sample[usize::from(row > 0)..]);
        }
    }
    (tokens, data_set.shards().len())
}

#[test]
fn any_history_leaves_what_a_preparation_from_nothing_does() {
    let asked = std::env::var("TIDEMILL_HISTORIES").ok();
    let histories = asked.map_or(HISTORIES, |asked| asked.parse().expect("a number of histories"));
    let (mut updates, mut kept, mut spliced, mut tokenized, mut documents) = (0, 0, 0, 0, 0);
    for seed in 0..histories {
        let mut world = World::new(seed);
        prepared(&settings(seed, &world.bench, "out"));
        for step in 0..5 {
            let before = documents_of(&world.bench.path("in"));
            for _ in 0..1 + world.chance.below(3) {
                world.change();
            }
            let after = documents_of(&world.bench.path("in"));
            let former = files(&world.bench.path("out"));
            let update = UpdateSettings {
                workers: number(1 + (seed + step) as usize % 4),
                verify: if world.chance.below(4) == 0 { Verify::All } else { Verify::No },
                dedup_memory_bytes: if step % 2 == 0 { 0 } else { 1 << 20 },
                ..UpdateSettings::new(world.bench.path("out"))
            };
            // One process updates, or two, or three.
            let report = match 1 + (seed + 2 * step) as usize % 3 {
                1 => world.bench.update_with(&update),
                processes => in_processes(processes, 4 << 20, |peers| {
                    let go_on = &mut |_| ControlFlow::Continue(());
                    update_together(peers, &update, &ByteTokenizer, go_on)
                })
                .map(|(report, _)| report),
            };
            let report = report
                .unwrap_or_else(|error| panic!("{seed} {step}: {}", crate::outcome::line(&error)));
            let settings = settings(seed, &world.bench, "new");
            let expected = prepared(&settings);
            let updated = report.prepared;
            let (out, new) = (files(&world.bench.path("out")), files(&world.bench.path("new")));
            assert_holds(&out, &without_reports(new.clone()));
            if is_reported(seed) {
                match made_of(&former) == made_of(&out) {
                    // It is no new version, though its index may name another list that leaves out the same documents.
                    true => assert_eq!(reports(&former), reports(&out)),
                    false => {
                        assert_same_report(&out, &new, &Changes::between(&before, &after));
                    }
                }
            }
            assert_eq!(
                (
                    updated.documents,
                    updated.tokens,
                    updated.dedup,
                    updated.excluded,
                    updated.broken
                ),
                (
                    expected.documents,
                    expected.tokens,
                    expected.dedup,
                    expected.excluded,
                    expected.broken
                ),
            );
            assert_eq!(updated.changes.rejected, expected.changes.rejected);
            assert_eq!(updated.changes.unnoticed.len(), 0);
            fs::remove_dir_all(world.bench.path("new")).unwrap();
            updates += 1;
            kept += updated.changes.shards_kept;
            spliced += updated.changes.shards_read;
            tokenized += updated.changes.texts_tokenized;
            documents += updated.documents;
        }
        // The stream equals that of a preparation without a state.
        let plain =
            PrepareSettings { layout: Layout::Stream, ..settings(seed, &world.bench, "new") };
        let report = prepared(&plain);
        let (expected, _) = stream(&DataSet::open(world.bench.path("new")).unwrap());
        let data_set = DataSet::open(world.bench.path("out")).unwrap();
        let (found, shards) = stream(&data_set);
        assert!(found.len() as u64 + 17 * shards as u64 + 17 >= report.tokens);
        assert_eq!(found[..17], expected[..17]);
        let sum = |tokens: &[u32]| tokens.iter().filter(|&&token| token == 257).count();
        assert!(sum(&found) <= sum(&expected) + 1);
    }
    println!(
        "{updates} updates: {kept} shards kept, {spliced} read for their tokens, {tokenized} of {documents} documents tokenized"
    );
    assert!(kept > updates && spliced > 0 && tokenized * 3 < documents, "little was kept");
}
