//! Documents, and the shards that they must become.

use std::{
    fs,
    io::Write,
    num::NonZeroUsize,
    ops::ControlFlow,
    path::{Path, PathBuf},
};

use arrow::{
    array::{Array, AsArray},
    datatypes::Int32Type,
};
use flate2::{Compression, write::GzEncoder};
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use tempfile::TempDir;
use tidemill_streaming_data::prepare::{
    ByteTokenizer, Phase, PrepareError, PrepareReport, PrepareSettings, Progress, SkippedDocument,
    Strictness, prepare,
};

use crate::outcome::{content, line};

/// Every file of a data set with its content.
pub type Files = Vec<(String, Vec<u8>)>;

/// A folder to work in.
pub struct Bench {
    folder: TempDir,
}

impl Bench {
    pub fn new() -> Bench {
        Bench { folder: tempfile::tempdir().unwrap() }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn write(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, content).unwrap();
        path
    }

    /// Settings for the inputs of these names, with rows of 18 tokens.
    pub fn settings(&self, inputs: &[&str]) -> PrepareSettings {
        let inputs = inputs.iter().map(|name| self.path(name)).collect();
        let settings = PrepareSettings::new(inputs, self.path("out"), number(17));
        PrepareSettings { shard_samples: Some(number(40_000)), ..settings }
    }

    /// Prepares in one pass, and takes away what was written.
    pub fn prepare(
        &self,
        settings: &PrepareSettings,
    ) -> Result<(PrepareReport, Files), PrepareError> {
        self.prepare_as(settings, &[Phase::Tokenizing, Phase::Publishing])
    }

    /// Prepares in two passes, and takes away what was written.
    pub fn prepare_in_phases(
        &self,
        settings: &PrepareSettings,
    ) -> Result<(PrepareReport, Files), PrepareError> {
        self.prepare_as(
            settings,
            &[Phase::Comparing, Phase::Sorting, Phase::Tokenizing, Phase::Publishing],
        )
    }

    fn prepare_as(
        &self,
        settings: &PrepareSettings,
        phases: &[Phase],
    ) -> Result<(PrepareReport, Files), PrepareError> {
        let mut last = Progress::default();
        let mut seen = Vec::new();
        let result = prepare(settings, &ByteTokenizer, &mut |progress| {
            if seen.last() != Some(&progress.phase) {
                seen.push(progress.phase);
                last = Progress::default();
            }
            assert!(progress.bytes_done >= last.bytes_done);
            assert!(progress.bytes_done <= progress.bytes_total);
            last = progress;
            ControlFlow::Continue(())
        });
        let report = match result {
            Ok(report) => report,
            Err(error) => {
                assert!(!settings.output.exists(), "nothing half-written");
                let folder = fs::read_dir(self.folder.path()).unwrap();
                let names = folder.map(|entry| entry.unwrap().file_name());
                let hidden = names.filter(|name| name.to_string_lossy().starts_with('.')).count();
                assert_eq!(hidden, 0, "nothing is left behind");
                return Err(error);
            }
        };
        assert_eq!(seen, phases);
        assert_eq!((last.bytes_done, last.samples), (last.bytes_total, report.samples));
        let files = content(&settings.output);
        fs::remove_dir_all(&settings.output).unwrap();
        Ok((report, files))
    }

    /// The report and files for the inputs, equal for any number of workers.
    pub fn prepare_with_all_workers(&self, inputs: &[&str]) -> (PrepareReport, Files) {
        let mut settings = self.settings(inputs);
        let (report, expected) = self.prepare(&settings).unwrap();
        for workers in [2, 5] {
            settings.workers = number(workers);
            let (_, files) = self.prepare(&settings).unwrap();
            assert!(files == expected, "{inputs:?} with {workers} workers");
        }
        (report, expected)
    }

    /// The line that refuses the inputs.
    pub fn refused(&self, settings: &PrepareSettings) -> String {
        line(&self.prepare(settings).map(|(report, _)| report).unwrap_err())
    }

    /// The line that refuses the inputs if they are to be without fault.
    pub fn refused_strictly(&self, inputs: &[&str]) -> String {
        let strictness = Strictness::Strict;
        self.refused(&PrepareSettings { strictness, ..self.settings(inputs) })
    }

    /// The report and files for the documents as JSON lines, which is quicker and shown to be the same.
    pub fn as_lines(&self, documents: &[String]) -> (PrepareReport, Files) {
        let line = |text: &String| format!("{}\n", serde_json::json!({"text": text}));
        self.write("as-lines.jsonl", documents.iter().map(line).collect::<String>());
        self.prepare(&self.settings(&["as-lines.jsonl"])).unwrap()
    }

    /// The report and files for the documents as text files.
    pub fn as_texts(&self, documents: &[String]) -> (PrepareReport, Files) {
        for (at, document) in documents.iter().enumerate() {
            self.write(&format!("texts/{at:06}.txt"), document);
        }
        self.prepare(&self.settings(&["texts"])).unwrap()
    }
}

/// All tokens of a shard in order, those that rows share once.
pub fn tokens(path: &Path) -> Vec<i32> {
    let mut tokens: Vec<i32> = Vec::new();
    let file = fs::File::open(path).unwrap();
    for batch in ParquetRecordBatchReaderBuilder::try_new(file).unwrap().build().unwrap() {
        let batch = batch.unwrap();
        let rows = batch.column_by_name("tokens").unwrap().as_fixed_size_list();
        for row in 0..rows.len() {
            let row = rows.value(row);
            let shared = usize::from(!tokens.is_empty());
            tokens.extend(&row.as_primitive::<Int32Type>().values()[shared..]);
        }
    }
    tokens
}

pub fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

pub fn number(number: usize) -> NonZeroUsize {
    NonZeroUsize::new(number).unwrap()
}

/// The names of skipped files and why.
pub fn skipped(report: &PrepareReport) -> Vec<(String, String)> {
    let told = |one: &SkippedDocument| {
        let name = one.path.file_name().unwrap().to_string_lossy().into_owned();
        (name, line(&one.reason))
    };
    report.skipped.iter().map(told).collect()
}

/// The places of broken documents and why.
pub fn broken(report: &PrepareReport) -> Vec<String> {
    let told = report.named_broken.iter();
    told.map(|one| format!("{}: {}", one.place, one.reason)).collect()
}

/// Documents of all lengths, some empty, in characters of one to four bytes and all that JSON
/// escapes; together about 2.2 MB, which is several parts.
pub fn documents() -> Vec<String> {
    let letters = ['a', 'e', ' ', '\n', '"', '\\', '\t', '\u{1}', 'é', '€', '🦀', '/', '\u{2028}'];
    let mut state = 17_u32;
    let mut next = move |below: u32| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) % below
    };
    let mut document = |at: u32| {
        let characters = match at % 50 {
            7 => 0,
            13 => 20_000,
            _ => next(1000),
        };
        (0..characters).map(|_| letters[next(letters.len() as u32) as usize]).collect()
    };
    (0..1000).map(&mut document).collect()
}
