//! Small files that stand for large ones: `prepare` takes the memory of what it works on, not of what
//! an input claims.
//!
//! Every byte that this program allocates is counted, so the tests run one at a time. (What Zstandard
//! allocates itself is not seen.)

use std::{
    fs::{self, File},
    num::NonZeroUsize,
    ops::ControlFlow,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use arrow::array::{ArrayRef, RecordBatch, StringArray};
use parquet::{
    arrow::ArrowWriter,
    basic::{Compression, GzipLevel, ZstdLevel},
    file::properties::WriterProperties,
};
use peak_alloc::PeakAlloc;
use tempfile::TempDir;
use tidemill_streaming_data::prepare::{
    ByteTokenizer, PrepareReport, PrepareSettings, Strictness, prepare,
};

#[path = "support/outcome.rs"]
mod outcome;

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Held while memory is counted.
fn alone() -> MutexGuard<'static, ()> {
    ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Prepares an input strictly: the report or the error in a line, and the most bytes that were held.
fn prepared(folder: &TempDir, input: &Path) -> (Result<PrepareReport, String>, usize) {
    let seq_len = NonZeroUsize::new(1023).unwrap();
    let output = folder.path().join("out");
    let settings = PrepareSettings::new(vec![input.to_owned()], output.clone(), seq_len);
    let settings = PrepareSettings { seq_len: None, strictness: Strictness::Strict, ..settings };
    let before = MEMORY.current_usage();
    MEMORY.reset_peak_usage();
    let result = prepare(&settings, &ByteTokenizer, &mut |_| ControlFlow::Continue(()));
    let most = MEMORY.peak_usage().saturating_sub(before);
    let _ = fs::remove_dir_all(output);
    (result.map_err(|error| outcome::line(&error)), most)
}

/// A Parquet file of texts, in pages and dictionaries of so many bytes.
fn parquet(
    folder: &TempDir,
    texts: &[String],
    compression: Compression,
    dictionary_bytes: usize,
) -> PathBuf {
    let path = folder.path().join("in.parquet");
    let column: ArrayRef = Arc::new(StringArray::from_iter_values(texts));
    let batch = RecordBatch::try_from_iter([("text", column)]).unwrap();
    let properties = WriterProperties::builder()
        .set_compression(compression)
        .set_write_batch_size(1)
        .set_data_page_size_limit(1 << 20)
        .set_dictionary_enabled(dictionary_bytes > 0)
        .set_dictionary_page_size_limit(dictionary_bytes)
        .build();
    let mut writer =
        ArrowWriter::try_new(File::create(&path).unwrap(), batch.schema(), Some(properties))
            .unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
    path
}

/// Memory in flight for each byte of a document: its page, its text, its tokens (four bytes each, and
/// room for as many more), and these in rows (16 a token).
const HELD_BYTES_PER_TEXT_BYTE: usize = 32;

#[test]
fn large_documents_of_parquet_are_held_one_at_a_time() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let bytes = 2 << 20;
    let texts: Vec<String> =
        (0..24).map(|at| char::from(b'a' + at).to_string().repeat(bytes)).collect();
    let path = parquet(&folder, &texts, Compression::ZSTD(ZstdLevel::default()), 0);
    let (report, most) = prepared(&folder, &path);
    assert_eq!(report.unwrap().documents, 24);
    // 16 at a time would be twelve times as much.
    assert!(most < HELD_BYTES_PER_TEXT_BYTE * bytes, "{most} bytes for documents of {bytes}");
}

#[test]
fn one_large_text_that_a_dictionary_repeats_is_held_once() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let bytes = 2 << 20;
    let texts = vec!["x".repeat(bytes); 24];
    let path = parquet(&folder, &texts, Compression::ZSTD(ZstdLevel::default()), 4 << 20);
    assert!(fs::metadata(&path).unwrap().len() < 4096, "a small file");
    let (report, most) = prepared(&folder, &path);
    assert_eq!(report.unwrap().documents, 24);
    assert!(most < HELD_BYTES_PER_TEXT_BYTE * bytes, "{most} bytes for documents of {bytes}");
}

/// The bytes of a page's header that state its size: a field of 32 bits in 7-bit groups.
fn varint(mut value: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    loop {
        let low = (value & 0x7f) as u8;
        value >>= 7;
        match value {
            0 => return [bytes, vec![low]].concat(),
            _ => bytes.push(low | 0x80),
        }
    }
}

/// Replaces bytes that must stand there once, where they stand first.
fn replace(path: &Path, from: &[u8], to: &[u8]) {
    assert_eq!(from.len(), to.len());
    let mut bytes = fs::read(path).unwrap();
    let at = bytes.windows(from.len()).position(|window| window == from).expect("stands there");
    bytes[at..at + to.len()].copy_from_slice(to);
    fs::write(path, bytes).unwrap();
}

#[test]
fn a_page_that_states_two_gigabytes_is_refused_before_it_is_decompressed() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    // So long that its size takes as many bytes as that of two gigabytes.
    let text = "x".repeat(140 << 20);
    let path = parquet(&folder, &[text], Compression::ZSTD(ZstdLevel::default()), 0);
    // A page of one value is preceded by its levels or not; the header says what it adds up to.
    let stated = varint(2 * ((140 << 20) + 4));
    replace(&path, &stated, &varint(2 * 0x7fff_fff0));
    let (result, most) = prepared(&folder, &path);
    let error = result.unwrap_err();
    let expected = "a page of 2147483632 bytes, expected at most 1073741824";
    assert!(
        error.contains("in.parquet: it is damaged from row 0 on") && error.contains(expected),
        "{error}"
    );
    assert!(most < 16 << 20, "{most} bytes");
}

#[test]
fn a_page_in_gzip_that_is_longer_than_it_states_is_refused_before_it_is_decompressed() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let bytes = 60 << 20;
    let path = parquet(&folder, &["x".repeat(bytes)], Compression::GZIP(GzipLevel::default()), 0);
    replace(&path, &varint(2 * (bytes as u64 + 4)), &varint(2 * (1 << 25)));
    let (result, most) = prepared(&folder, &path);
    let error = result.unwrap_err();
    assert!(
        error.contains("a page has more than the 33554432 bytes that its header says"),
        "{error}"
    );
    assert!(most < 16 << 20, "{most} bytes");
}

/// A byte of LZ4 can become 255, and nothing says beforehand how many it becomes.
#[test]
fn a_page_in_lz4_that_could_become_more_than_a_page_may_is_refused() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let mut drawn = 1_u64;
    let mut letter = || {
        drawn =
            drawn.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        char::from(b'0' + (drawn >> 58) as u8)
    };
    // No four letters stand twice near each other: it stays as long as it is.
    let text: String = (0..5 << 20).map(|_| letter()).collect();
    let path = parquet(&folder, &[text], Compression::LZ4, 0);
    let (result, most) = prepared(&folder, &path);
    let error = result.unwrap_err();
    assert!(error.contains("expected at most 4210752: write smaller pages"), "{error}");
    assert!(most < 4 << 20, "{most} bytes");
}

/// An MDS data set of tokens: a shard of so many samples, which becomes so many bytes, compressed.
fn mds(folder: &TempDir, samples: u32, raw: &[u8]) -> PathBuf {
    let set = folder.path().join("set");
    let zip = zstd::encode_all(raw, 1).unwrap();
    let file = |name: &str, bytes: usize| serde_json::json!({"basename": name, "bytes": bytes});
    let index = serde_json::json!({"version": 2, "shards": [{
        "column_encodings": ["ndarray:int32"], "column_names": ["tokens"], "column_sizes": [null],
        "compression": "zstd", "format": "mds", "version": 2, "samples": samples,
        "raw_data": file("s.mds", raw.len()), "zip_data": file("s.mds.zstd", zip.len()),
    }]});
    fs::create_dir(&set).unwrap();
    fs::write(set.join("index.json"), index.to_string()).unwrap();
    fs::write(set.join("s.mds.zstd"), zip).unwrap();
    set
}

#[test]
fn a_shard_that_states_millions_of_samples_takes_no_memory_for_them() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let samples = 10_000_000_u32;
    let table_bytes = 8 + 4 * samples;
    let mut raw = samples.to_le_bytes().to_vec();
    for _ in 0..=samples {
        raw.extend(table_bytes.to_le_bytes());
    }
    let set = mds(&folder, samples, &raw);
    drop(raw);
    let (result, most) = prepared(&folder, &set);
    let error = result.unwrap_err();
    assert!(error.contains("found sample 0 of 0 bytes"), "{error}");
    assert!(most < 8 << 20, "{most} bytes for a table of {table_bytes}");
}

#[test]
fn a_first_sample_that_is_longer_than_a_document_may_be_is_not_read() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let sample_bytes = 70 << 20;
    let (start, end) = (12, 12 + 4 + sample_bytes);
    let mut raw: Vec<u8> = [1, start, end, sample_bytes].map(u32::to_le_bytes).concat();
    raw.resize(end as usize, 0);
    let set = mds(&folder, 1, &raw);
    drop(raw);
    let (result, most) = prepared(&folder, &set);
    let error = result.unwrap_err();
    assert!(error.contains("it is longer than 67108864 bytes"), "{error}");
    assert!(most < 8 << 20, "{most} bytes for a sample of {sample_bytes}");
}
