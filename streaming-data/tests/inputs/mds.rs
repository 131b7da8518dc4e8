//! MDS data sets, written by MosaicML's own writer (`tests/fixtures/mds/generate.py`).
//!
//! Seen red: with hashes or sizes that are not compared, columns before or behind the wanted one that are not
//! passed over, offsets that may be in any order, bytes behind the last sample, samples of any length, tokens
//! outside the vocabulary, rows that overlap, a tokenizer stated that is unknown, pickles, paths that
//! lead outside, an index that is cut off and passed over, documents mixed with tokens, decompressed shards that are
//! not found, and files of an MDS folder that are read themselves.

use std::{
    fs,
    io::Read,
    path::{Path, PathBuf},
};

use flate2::read::GzDecoder;
use tidemill_streaming_data::{
    DataSet,
    order::SampleId,
    prepare::{ByteTokenizer, PrepareReport, PrepareSettings, TokenizedBy, prepare},
};

use crate::support::{Bench, broken, gzip, number};

const LENGTH: usize = 33;
const SAMPLES: usize = 40;

fn token(sample: usize, at: usize) -> u32 {
    ((31 * sample + 7 * at) % 997) as u32
}

fn row(sample: usize) -> Vec<u32> {
    (0..LENGTH).map(|at| token(sample, at)).collect()
}

fn texts() -> Vec<String> {
    let text = |sample| format!("document {sample}: {}", "tide, é🦀 ".repeat(sample));
    (0..SAMPLES).map(text).collect()
}

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/mds").join(name)
}

/// A copy of a data set, to be changed.
fn copy(bench: &Bench, name: &str) -> PathBuf {
    let folder = bench.path(name);
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    for entry in fs::read_dir(fixture(name)).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), folder.join(entry.file_name())).unwrap();
    }
    folder
}

/// Changes the text of an index.
fn edit(folder: &Path, from: &str, to: &str) {
    let path = folder.join("index.json");
    let index = fs::read_to_string(&path).unwrap();
    assert!(index.contains(from), "{from}");
    fs::write(path, index.replacen(from, to, 1)).unwrap();
}

fn of_samples(bench: &Bench, inputs: Vec<PathBuf>) -> PrepareSettings {
    PrepareSettings { inputs, seq_len: None, ..bench.settings(&[]) }
}

/// Prepares; the report and all rows, as the library reads them.
fn rows(settings: &PrepareSettings) -> (PrepareReport, Vec<Vec<u32>>) {
    let report = prepare(settings, &ByteTokenizer, &mut |_| std::ops::ControlFlow::Continue(()));
    let report = report.unwrap();
    let data_set = DataSet::open(&settings.output).unwrap();
    let mut rows = Vec::new();
    for (shard, entry) in data_set.shards().iter().enumerate() {
        for row in 0..entry.samples() {
            rows.push(data_set.sample(SampleId { epoch: 0, shard, row }).unwrap());
        }
    }
    assert_eq!(data_set.seq_len(), report.seq_len);
    fs::remove_dir_all(&settings.output).unwrap();
    (report, rows)
}

#[test]
fn samples_of_tokens_become_rows_as_they_are() {
    let bench = Bench::new();
    let expected: Vec<_> = (0..SAMPLES).map(row).collect();
    let mut all = Vec::new();
    for name in [
        "tokens-int32",
        "tokens-int64-zstd",
        "tokens-uint16-gz",
        "tokens-any-snappy",
        "tokens-fixed-br",
        "tokens-bytes",
        "text-and-tokens",
    ] {
        let mut settings = of_samples(&bench, vec![fixture(name)]);
        let (report, rows) = rows(&settings);
        assert!(rows == expected, "{name}");
        assert_eq!((report.documents, report.samples), (40, 40), "{name}");
        assert_eq!((report.tokens, report.dropped_tokens), (40 * 33, 0), "{name}");
        let largest = expected.iter().flatten().max().unwrap();
        assert_eq!((report.seq_len, report.vocab_size), (32, largest + 1), "{name}");
        for workers in [1, 3] {
            settings.workers = number(workers);
            settings.shard_samples = Some(number(7));
            all.push(bench.prepare(&settings).unwrap().1);
        }
    }
    assert!(all.iter().all(|files| *files == all[0]), "the same bytes from every form");
    let names: Vec<_> = all[0].iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!((names[0], names.len()), ("index.json", 7), "and no tokenizer");
}

#[test]
fn several_data_sets_of_tokens_in_order_of_their_paths() {
    let bench = Bench::new();
    copy(&bench, "tokens-uint16-gz");
    copy(&bench, "tokens-bytes");
    fs::create_dir(bench.path("in")).unwrap();
    fs::rename(bench.path("tokens-uint16-gz"), bench.path("in/train")).unwrap();
    fs::rename(bench.path("tokens-bytes"), bench.path("in/more")).unwrap();
    // Other files in such a folder are no inputs.
    bench.write("in/train/read me.txt", "not a document");
    bench.write("in/train/sub/deeper.txt", "not a document");
    let settings = of_samples(&bench, vec![bench.path("in")]);
    let twice: Vec<_> = (0..SAMPLES).chain(0..SAMPLES).map(row).collect();
    assert!(rows(&settings).1 == twice);
    // The index itself names its folder.
    let settings = of_samples(&bench, vec![bench.path("in/train/index.json")]);
    assert_eq!(rows(&settings).1.len(), SAMPLES);
    let text = bench.write("in/a.txt", "a document");
    let refused = bench.refused(&of_samples(&bench, vec![bench.path("in")]));
    let (tokens, documents) = (bench.path("in/more"), text);
    assert_eq!(
        refused,
        format!(
            "found samples of tokens in {} and documents in {}, expected the one or the other",
            tokens.display(),
            documents.display()
        )
    );
}

#[test]
fn the_vocabulary_is_as_stated_or_that_of_the_tokenizer() {
    let bench = Bench::new();
    let mut settings = of_samples(&bench, vec![fixture("tokens-int32")]);
    settings.vocab_size = Some(50_277);
    assert_eq!(rows(&settings).0.vocab_size, 50_277);
    settings.vocab_size = Some(996);
    let refused = bench.refused(&settings);
    assert!(
        refused.contains("shard.0000") && refused.contains(": found token 996, expected 0 to 995"),
        "{refused}"
    );
    settings.vocab_size = None;
    settings.tokenized_by = TokenizedBy::Tokenizer;
    let refused = bench.refused(&settings);
    assert!(refused.contains("sample 2: found token 265, expected 0 to 258"), "{refused}");
    settings.vocab_size = Some(1000);
    let (_, files) = bench.prepare(&settings).unwrap();
    let index: serde_json::Value = serde_json::from_slice(&files[0].1).unwrap();
    assert_eq!((&index["vocab_size"], &index["eos_token_id"]), (&1000.into(), &257.into()));
    assert_eq!(files.last().unwrap().0, "tokenizer.json");
    settings.vocab_size = Some(258);
    let refused = bench.refused(&settings);
    assert!(refused.contains("vocab_size is 258, expected at least that of"), "{refused}");
    settings.vocab_size = None;
    settings.tokenized_by = TokenizedBy::Unknown;
    settings.seq_len = Some(number(32));
    assert_eq!(rows(&settings).1.len(), SAMPLES);
    settings.seq_len = Some(number(33));
    assert_eq!(
        bench.refused(&settings),
        "found samples of 33 tokens, which predict 32, expected seq_len 33"
    );
}

#[test]
fn samples_of_text_are_documents() {
    let bench = Bench::new();
    let (texts, expected) = bench.as_texts(&texts());
    for name in ["text", "text-zstd", "text-and-tokens"] {
        let text_key = (name == "text-and-tokens").then(|| "text".to_owned());
        let mut settings = PrepareSettings { text_key, ..bench.settings(&[]) };
        settings.inputs = vec![fixture(name)];
        for workers in [1, 2, 5] {
            settings.workers = number(workers);
            let (report, files) = bench.prepare(&settings).unwrap();
            assert!(files == expected, "{name}");
            assert_eq!((report.documents, report.text_bytes), (40, texts.text_bytes), "{name}");
        }
    }
    // A cache of MosaicML's reader has decompressed shards.
    let folder = copy(&bench, "text-and-tokens");
    let zip = folder.join("shard.00000.mds.gz");
    let mut raw = Vec::new();
    GzDecoder::new(&*fs::read(&zip).unwrap()).read_to_end(&mut raw).unwrap();
    fs::write(folder.join("shard.00000.mds"), raw).unwrap();
    fs::remove_file(zip).unwrap();
    let text_key = Some("text".to_owned());
    let settings = PrepareSettings { text_key, ..bench.settings(&["text-and-tokens"]) };
    assert!(bench.prepare(&settings).unwrap().1 == expected);
}

#[test]
fn a_text_that_is_not_utf8_is_named_by_shard_and_sample() {
    let bench = Bench::new();
    let folder = copy(&bench, "text");
    let shard = folder.join("shard.00001.mds");
    let mut bytes = fs::read(&shard).unwrap();
    let at = bytes.windows(9).rposition(|window| window == b"document ").unwrap();
    bytes[at + 3] = 0xff;
    fs::write(&shard, bytes).unwrap();
    let refused = bench.refused(&bench.settings(&["text"]));
    assert!(refused.contains("shard.00001.mds is damaged: its blake2b is "), "{refused}");
    // Without hashes that are known here, this sample alone is lost.
    let index = fs::read_to_string(folder.join("index.json")).unwrap();
    let unknown = ["blake2b", "blake2s", "sha512"];
    let index = unknown.iter().fold(index, |index, name| index.replace(name, "sha3_512"));
    fs::write(folder.join("index.json"), index).unwrap();
    let (report, _) = bench.prepare_with_all_workers(&["text"]);
    let [line] = &broken(&report)[..] else { panic!("{report:?}") };
    assert!(line.starts_with("sample ") && line.ends_with("not UTF-8 at byte 3"), "{line}");
    assert_eq!(report.named_broken[0].path, shard);
    assert_eq!(report.documents, 39);
    let refused = bench.refused_strictly(&["text"]);
    assert!(refused.contains("shard.00001.mds: it is not UTF-8 at byte 3"), "{refused}");
}

#[test]
fn what_cannot_be_read_is_refused_by_name() {
    let bench = Bench::new();
    for (name, part) in [
        ("pickled", "found column \"meta\" of pickled objects (pkl), expected no pickle"),
        ("tokens-bz2", "shards[0].compression is \"bz2\", expected none, zstd, gz, snappy or br"),
        ("tokens-float", "found columns \"tokens\" (ndarray:float32), expected a column \"text\""),
        ("tokens-uneven", "shard.00001.mds, sample 11: found 32 tokens, expected 33 as in"),
    ] {
        let refused = bench.refused(&of_samples(&bench, vec![fixture(name)]));
        assert!(refused.contains(part), "{part}: {refused}");
    }
    let text_key = Some("body".to_owned());
    let settings = PrepareSettings { text_key, ..of_samples(&bench, vec![fixture("text-zstd")]) };
    let refused = bench.refused(&settings);
    assert!(
        refused.ends_with(
            "found columns \"text\" (str), \"x\" (str_decimal), expected a column \"body\" (str)"
        ),
        "{refused}"
    );
}

/// A damage to a data set.
enum Damage {
    /// The byte at this place of the first shard becomes another.
    Byte(usize, u8),
    /// A file is away.
    Missing(&'static str),
    /// A file is another.
    Short(&'static str),
    /// The index says something else.
    Index(&'static str, &'static str),
}

impl Damage {
    fn apply(&self, folder: &Path) {
        match self {
            Damage::Byte(at, to) => {
                let paths = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
                let is_first = |path: &PathBuf| path.to_string_lossy().contains("shard.00000");
                let path = paths.into_iter().find(is_first).unwrap();
                let mut bytes = fs::read(&path).unwrap();
                assert_ne!(bytes[*at], *to);
                bytes[*at] = *to;
                fs::write(path, bytes).unwrap();
            }
            Damage::Missing(file) => fs::remove_file(folder.join(file)).unwrap(),
            Damage::Short(file) => fs::write(folder.join(file), "short").unwrap(),
            Damage::Index(from, to) => edit(folder, from, to),
        }
    }
}

#[test]
fn damage_is_an_error_that_names_the_shard() {
    use Damage::{Byte, Index, Missing, Short};

    let bench = Bench::new();
    for (name, damage, part) in [
        ("tokens-int32", Byte(900, 0xee), "its xxh64 is "),
        ("tokens-uint16-gz", Byte(90, 0xee), "its md5 is "),
        ("tokens-any-snappy", Byte(90, 0xee), "its sha256 is "),
        ("tokens-bytes", Byte(0, 39), "found 39 samples, expected 40"),
        ("tokens-bytes", Byte(5, 0), "found samples from byte "),
        ("tokens-bytes", Byte(9, 0xff), "found sample 0 from byte "),
        ("tokens-bytes", Byte(9, 0), "found sample 0 from byte "),
        ("tokens-bytes", Index("\"samples\": 40", "\"samples\": 9000000"), "9000000"),
        ("tokens-int64-zstd", Byte(0, 0), "cannot read shard "),
        ("tokens-fixed-br", Byte(0, 0x91), "cannot read shard "),
        ("tokens-int32", Missing("shard.00002.mds"), "shard.00002.mds is missing"),
        (
            "tokens-int64-zstd",
            Short("shard.00002.mds.zstd"),
            "shard.00002.mds.zstd has 5 bytes, expected",
        ),
        (
            "tokens-int32",
            Index("\"shard.00000.mds\"", "\"../tokens-int32/shard.00000.mds\""),
            "shards[0].raw_data.basename is \"../tokens-int32/shard.00000.mds\", expected a path",
        ),
        ("tokens-int32", Index("\"version\": 2", "\"version\": 3"), "version is 3, expected 2"),
        ("tokens-int32", Index("\"ndarray:int32\"", ""), "column_encodings is a list of 0"),
        ("tokens-int32", Index("\"samples\"", "\"sample\""), "missing field `samples`"),
    ] {
        let folder = copy(&bench, name);
        damage.apply(&folder);
        let refused = bench.refused(&of_samples(&bench, vec![folder]));
        assert!(refused.contains(part), "{name}: {part}: {refused}");
        assert!(refused.contains(name), "{name}: {refused}");
    }
    // More bytes than samples, plain and compressed.
    for (name, file, more, part) in [
        ("tokens-bytes", "shard.00000.mds", b"xy".to_vec(), "found samples to byte "),
        ("text-and-tokens", "shard.00000.mds.gz", gzip(b"xy"), "found more bytes behind the last"),
    ] {
        let path = copy(&bench, name).join(file);
        let before = fs::read(&path).unwrap();
        let bytes = |bytes: usize| format!("\"bytes\": {bytes},");
        edit(path.parent().unwrap(), &bytes(before.len()), &bytes(before.len() + more.len()));
        fs::write(&path, [before, more].concat()).unwrap();
        let refused = bench.refused(&of_samples(&bench, vec![bench.path(name)]));
        assert!(refused.contains(file) && refused.contains(part), "{name}: {refused}");
    }
    // An index that is cut off is not passed over in silence.
    let folder = copy(&bench, "tokens-int32");
    let index = fs::read(folder.join("index.json")).unwrap();
    fs::write(folder.join("index.json"), &index[..index.len() / 2]).unwrap();
    bench.write("z.txt", "long enough for a row or two, but no more");
    let (report, _) = bench.prepare_with_all_workers(&["tokens-int32", "z.txt"]);
    assert_eq!(report.skipped[0].path, folder.join("index.json"));
    let refused = bench.refused_strictly(&["tokens-int32", "z.txt"]);
    assert!(refused.contains("tokens-int32/index.json: it is no JSON"), "{refused}");
}
