//! The cost of filtering and comparing documents: megabytes of text for each CPU second.
//!
//! ```text
//! cargo bench -p tidemill-streaming-data --bench choosing -- DOCUMENTS.jsonl [MEGABYTES]
//! ```
//!
//! `benches/peers/choosing.py` measures datatrove on the same documents. CPU time depends little on other
//! programs that run on the machine, unlike wall-clock time.

mod cpu;

use std::{
    collections::BTreeMap,
    fs::File,
    io::{BufRead, BufReader, Write},
    num::NonZeroUsize,
    ops::ControlFlow,
};

use cpu::cpu_seconds;
use tidemill_streaming_data::prepare::{
    ByteTokenizer, Dedup, DedupSettings, FilterReport, FilterSettings, Phase, PrepareSettings,
    prepare,
};

fn main() {
    let arguments: Vec<String> =
        std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    let Some(path) = arguments.first() else {
        println!(
            "expected a file of JSON lines with the key \"text\", and megabytes of text to take"
        );
        return;
    };
    let most = arguments.get(1).map_or(f64::INFINITY, |megabytes| {
        megabytes.parse::<f64>().expect("megabytes of text are a number") * 1e6
    });
    let (mut texts, mut bytes) = (Vec::new(), 0_usize);
    let folder = tempfile::tempdir().expect("a folder for temporary files");
    let input = folder.path().join("documents.jsonl");
    let mut copy = File::create(&input).expect("a temporary file");
    for line in BufReader::new(File::open(path).expect("the documents")).lines() {
        let line = line.expect("lines of UTF-8");
        let document: BTreeMap<String, serde_json::Value> =
            serde_json::from_str(&line).expect("a line of JSON");
        let text = document["text"].as_str().expect("a text").to_owned();
        writeln!(copy, "{line}").expect("a temporary file can be written");
        bytes += text.len();
        texts.push(text);
        if bytes as f64 >= most {
            break;
        }
    }
    println!("{} documents, {:.1} MB of text", texts.len(), bytes as f64 / 1e6);
    let rate = |seconds: f64| bytes as f64 / 1e6 / seconds;
    for list in FilterSettings::names().chain(["gopher,repetition,c4,fineweb"]) {
        let filters = FilterSettings::from_list(list).expect("a named set");
        let mut report = FilterReport::default();
        let before = cpu_seconds();
        let kept = texts.iter().filter(|text| filters.apply(text, &mut report).is_some()).count();
        let rate = rate(cpu_seconds() - before);
        println!("{list:30} {rate:8.1} MB/s   kept {kept}");
    }
    drop(texts);
    for dedup in [Dedup::Exact, Dedup::ExactWords, Dedup::Near] {
        let output = folder.path().join(format!("{dedup:?}"));
        let settings = PrepareSettings {
            dedup: DedupSettings { dedup, ..DedupSettings::default() },
            ..PrepareSettings::new(
                vec![input.clone()],
                output,
                NonZeroUsize::MIN.saturating_add(2047),
            )
        };
        let mut began = BTreeMap::new();
        let report = prepare(&settings, &ByteTokenizer, &mut |progress| {
            began.entry(progress.phase as u8).or_insert_with(cpu_seconds);
            ControlFlow::Continue(())
        })
        .expect("a data set");
        let end = cpu_seconds();
        let [comparing, sorting, tokenizing] =
            [Phase::Comparing, Phase::Sorting, Phase::Tokenizing]
                .map(|phase| began[&(phase as u8)]);
        println!(
            "dedup {dedup:?}: reading and comparing {:.1} MB/s, sorting {:.2} s, reading again and packing bytes {:.1} MB/s; \
             {} kept, {} copies, {} near copies",
            rate(sorting - comparing),
            tokenizing - sorting,
            rate(end - tokenizing),
            report.documents,
            report.dedup.copies,
            report.dedup.near_copies,
        );
    }
}
