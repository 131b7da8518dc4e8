//! The cost of an update compared with a preparation from scratch, by the size of the change.
//!
//! ```text
//! cargo bench -p tidemill-streaming-data --bench updating -- DOCUMENTS.jsonl [SAMPLES_OF_A_SHARD]
//! ```
//!
//! The documents are in files of 100. Each update is compared with a preparation from scratch.

mod cpu;

use std::{
    fs::{self, File},
    io::{BufRead, BufReader},
    num::NonZeroUsize,
    ops::ControlFlow,
    path::{Path, PathBuf},
    time::{Duration, Instant, SystemTime},
};

use cpu::cpu_seconds;
use tidemill_streaming_data::prepare::{
    ByteTokenizer, Dedup, DedupSettings, Layout, PrepareSettings, UpdateSettings, prepare, update,
};

/// Documents of a file.
const OF_A_FILE: usize = 100;

const THREADS: NonZeroUsize = NonZeroUsize::new(2).unwrap();

struct Inputs {
    folder: PathBuf,
    lines: Vec<String>,
    written: u64,
}

impl Inputs {
    /// Writes a file with a modification time long ago.
    fn write(&mut self, file: usize) {
        let path = self.folder.join(format!("{file:06}.jsonl"));
        let end = self.lines.len().min((file + 1) * OF_A_FILE);
        fs::write(&path, self.lines[file * OF_A_FILE..end].concat()).expect("a folder to write in");
        self.written += 1;
        let time = SystemTime::UNIX_EPOCH + Duration::from_secs(1_600_000_000 + self.written);
        let file = File::options().append(true).open(path).expect("the file that was written");
        file.set_modified(time).expect("a file system with times");
    }

    /// Changes some documents, evenly spread.
    fn change(&mut self, count: usize) {
        let every = self.lines.len() / count;
        let mut files = Vec::new();
        for at in (0..count).map(|change| change * every + every / 3) {
            let line = &mut self.lines[at];
            let end = line.rfind("\"}").expect("a line of JSON");
            line.insert_str(end, &format!(" edited {}", self.written));
            files.push(at / OF_A_FILE);
        }
        files.dedup();
        files.into_iter().for_each(|file| self.write(file));
    }
}

fn settings(inputs: &Path, output: PathBuf, shard_samples: usize) -> PrepareSettings {
    let seq_len = NonZeroUsize::new(2048).expect("it is not 0");
    PrepareSettings {
        dedup: DedupSettings { dedup: Dedup::Near, ..DedupSettings::default() },
        workers: THREADS,
        shard_samples: NonZeroUsize::new(shard_samples),
        layout: Layout::Updatable,
        ..PrepareSettings::new(vec![inputs.to_owned()], output, seq_len)
    }
}

/// Wall-clock seconds and CPU seconds.
fn timed<T>(work: impl FnOnce() -> T) -> (f64, f64, T) {
    let (began, cpu) = (Instant::now(), cpu_seconds());
    let done = work();
    (began.elapsed().as_secs_f64(), cpu_seconds() - cpu, done)
}

fn main() {
    let arguments: Vec<String> =
        std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    let Some(path) = arguments.first() else {
        println!("expected a file of JSON lines with the key \"text\", and samples of a shard");
        return;
    };
    let shard_samples = arguments.get(1).map_or(512, |samples| samples.parse().expect("a number"));
    let line = |line: Result<String, _>| line.expect("lines of UTF-8") + "\n";
    let mut lines: Vec<String> =
        BufReader::new(File::open(path).expect("the documents")).lines().map(line).collect();
    let bench = tempfile::tempdir().expect("a folder for temporary files");
    let folder = bench.path().join("in");
    fs::create_dir(&folder).expect("a folder in it");
    // Documents to append later, in whole files, so that no other file changes.
    let kept = lines.len() * 99 / 100 / OF_A_FILE * OF_A_FILE;
    let later = lines.split_off(kept);
    let mut inputs = Inputs { folder: folder.clone(), lines, written: 0 };
    (0..kept.div_ceil(OF_A_FILE)).for_each(|file| inputs.write(file));
    let go_on = &mut |_| ControlFlow::Continue(());
    let output = bench.path().join("out");
    let new = |name: &str| settings(&folder, bench.path().join(name), shard_samples);
    let (seconds, cpu, report) =
        timed(|| prepare(&new("out"), &ByteTokenizer, go_on).expect("a data set"));
    println!(
        "{} documents, {} kept ({:.1} MB), {} shards; from nothing {seconds:.2} s, {cpu:.2} s of CPU",
        kept,
        report.documents,
        report.text_bytes as f64 / 1e6,
        report.shards
    );
    let thousandth = kept / 1000;
    let changes: [(&str, usize); 5] = [
        ("nothing", 0),
        ("1 document", 1),
        ("0.1 % of the documents", thousandth),
        ("1 % of the documents", 10 * thousandth),
        ("1 % appended", later.len()),
    ];
    for (name, count) in changes {
        if name.ends_with("appended") {
            let first = inputs.lines.len() / OF_A_FILE;
            inputs.lines.extend(later.iter().cloned());
            (first..inputs.lines.len().div_ceil(OF_A_FILE)).for_each(|file| inputs.write(file));
        } else if count > 0 {
            inputs.change(count);
        }
        let settings = UpdateSettings { workers: THREADS, ..UpdateSettings::new(output.clone()) };
        let (seconds, cpu, updated) =
            timed(|| update(&settings, &ByteTokenizer, go_on).expect("a version"));
        let (prepared, changes) = (&updated.prepared, &updated.prepared.changes);
        let expected = prepare(&new("new"), &ByteTokenizer, go_on).expect("a data set");
        assert_eq!(prepared.fingerprint, expected.fingerprint, "{name}: another data set");
        let index = |set: &str| fs::read(bench.path().join(set).join("index.json"));
        assert_eq!(index("out").expect("an index"), index("new").expect("an index"));
        fs::remove_dir_all(bench.path().join("new")).expect("a folder to remove");
        println!(
            "{name}: {seconds:.2} s, {cpu:.2} s of CPU; {} of {} shards written, {} read; {} inputs and {} texts read, {} \
             tokenized",
            prepared.shards - changes.shards_kept,
            prepared.shards,
            changes.shards_read,
            changes.inputs_read,
            changes.texts_read,
            changes.texts_tokenized,
        );
    }
}
