//! `prepare`, seen from outside: what it writes, what it refuses, and what it leaves behind.

#[path = "support/outcome.rs"]
mod outcome;

use std::{
    fs::{self, File},
    num::NonZeroUsize,
    ops::ControlFlow,
    path::{Path, PathBuf},
};

use arrow::{
    array::{Array, AsArray},
    datatypes::{DataType, Int32Type},
};
use parquet::{
    arrow::arrow_reader::ParquetRecordBatchReaderBuilder,
    basic::{Compression, Encoding},
};
use tempfile::TempDir;
use tidemill_streaming_data::{
    DataSet,
    data_set::index::{FooterEntry, Index},
    hash::ContentHash,
    order::SampleId,
    prepare::{
        ByteTokenizer, Phase, PrepareError, PrepareReport, PrepareSettings, Progress, SkipReason,
        Strictness, Tokenize, prepare,
    },
};

use outcome::{content, line, names};

const EOS: u32 = ByteTokenizer::EOS;

/// A folder `in` with the files, and the settings to prepare it as `out` with rows of 8 tokens.
fn case(files: &[(&str, &[u8])]) -> (TempDir, PrepareSettings) {
    let folder = tempfile::tempdir().unwrap();
    let input = folder.path().join("in");
    fs::create_dir(&input).unwrap();
    for (name, content) in files {
        let path = input.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }
    let output = folder.path().join("out");
    let settings = PrepareSettings::new(vec![input], output, number(7));
    (folder, settings)
}

fn number(number: usize) -> NonZeroUsize {
    NonZeroUsize::new(number).unwrap()
}

fn run(settings: &PrepareSettings) -> Result<PrepareReport, PrepareError> {
    prepare(settings, &ByteTokenizer, &mut |_| ControlFlow::Continue(()))
}

/// All rows of the data set, shard after shard, read by the Parquet library alone.
fn rows(output: &Path) -> Vec<Vec<u32>> {
    let mut rows = Vec::new();
    for shard in Index::read(output).unwrap().shards {
        let file = File::open(output.join(&shard.file)).unwrap();
        let before = rows.len();
        for batch in ParquetRecordBatchReaderBuilder::try_new(file).unwrap().build().unwrap() {
            let batch = batch.unwrap();
            let list = batch.column_by_name("tokens").unwrap().as_fixed_size_list();
            for row in 0..list.len() {
                let tokens = list.value(row);
                let tokens = tokens.as_primitive::<Int32Type>().values();
                rows.push(tokens.iter().map(|&token| u32::try_from(token).unwrap()).collect());
            }
        }
        assert_eq!((rows.len() - before) as u64, shard.samples);
    }
    rows
}

/// Some text of the length in characters of one to four bytes.
fn text(seed: u32, characters: u32) -> String {
    (0..characters)
        .map(|i| match (i.wrapping_mul(2_654_435_761) ^ seed.wrapping_mul(40_503)) >> 7 {
            n if n % 11 == 0 => '🦀',
            n if n % 7 == 0 => 'é',
            n if n % 5 == 0 => '\n',
            n => char::from(b'a' + (n % 26) as u8),
        })
        .collect()
}

#[test]
fn every_token_but_the_first_is_predicted_exactly_once() {
    let (_folder, mut settings) = case(&[
        ("b.txt", "second é".as_bytes()),
        ("a/deep.txt", b"first\0"),
        ("c.txt", b""),
        ("d.txt", b"third"),
        ("ignored.md", b"not text"),
    ]);
    // "a/deep.txt" < "b.txt" < "d.txt"
    let stream: Vec<u32> = ["first\0", "second é", "third"]
        .iter()
        .flat_map(|text| text.bytes().map(u32::from).chain([EOS]))
        .collect();
    for (seq_len, shard_samples) in [(1, 4), (3, 2), (7, 1), (7, 100), (11, 1), (22, 1)] {
        settings.seq_len = Some(number(seq_len));
        settings.shard_samples = Some(number(shard_samples));
        let report = run(&settings).unwrap();
        let samples = (stream.len() - 1) / seq_len;
        let rows = rows(&settings.output);
        assert_eq!(rows.len(), samples, "seq_len {seq_len}");
        for (at, row) in rows.iter().enumerate() {
            assert_eq!(row[..], stream[at * seq_len..=(at + 1) * seq_len], "row {at}");
        }
        assert_eq!(report.documents, 3);
        assert_eq!(report.empty, 1);
        assert_eq!(report.tokens, stream.len() as u64);
        assert_eq!(report.dropped_tokens as usize, stream.len() - (samples * seq_len + 1));
        assert_eq!(report.samples, samples as u64);
        assert_eq!(report.shards as usize, samples.div_ceil(shard_samples));
        assert_eq!(report.text_bytes as usize, stream.len() - 3);
        assert!(report.skipped.is_empty());
        fs::remove_dir_all(&settings.output).unwrap();
    }
}

#[test]
fn the_same_bytes_for_any_number_of_workers() {
    let texts: Vec<_> = (0..40).map(|seed| text(seed, seed * seed * 40)).collect();
    let large = text(41, 1_500_000);
    let names: Vec<_> = (0..40).map(|at| format!("{}/{at}.txt", at % 3)).collect();
    let mut files: Vec<(&str, &[u8])> =
        names.iter().map(String::as_str).zip(texts.iter().map(String::as_bytes)).collect();
    files.push(("1/large.txt", large.as_bytes()));
    files.push(("1/bad.txt", b"a\xff"));
    let (folder, mut settings) = case(&files);
    settings.seq_len = Some(number(129));
    settings.shard_samples = Some(number(3001));
    let mut all = Vec::new();
    for workers in [1, 2, 5] {
        settings.workers = number(workers);
        settings.output = folder.path().join(format!("out-{workers}"));
        let report = run(&settings).unwrap();
        assert!(report.shards > 3 && report.skipped.len() == 1, "{report:?}");
        all.push(content(&settings.output));
    }
    for other in &all[1..] {
        assert!(*other == all[0], "other bytes");
    }
    let stream_bytes: usize = texts.iter().map(String::len).sum::<usize>() + large.len();
    let predicted = rows(&settings.output).len() * 129;
    let tokens = stream_bytes + texts.iter().filter(|text| !text.is_empty()).count() + 1;
    assert_eq!(predicted, (tokens - 1) / 129 * 129);
}

#[test]
fn the_output_opens_as_a_data_set_with_the_same_rows() {
    let (_folder, mut settings) = case(&[("a.txt", text(7, 60_000).as_bytes())]);
    settings.seq_len = Some(number(255));
    settings.shard_samples = Some(number(130));
    let report = run(&settings).unwrap();
    let rows = rows(&settings.output);
    for index in ["with", "without"] {
        let data_set = DataSet::open(&settings.output).unwrap();
        assert_eq!((data_set.samples(), data_set.seq_len()), (report.samples, 255), "{index}");
        let mut expected = rows.iter();
        for (shard, entry) in data_set.shards().iter().enumerate() {
            entry.verify().unwrap();
            for row in 0..entry.samples() {
                let tokens = data_set.sample(SampleId { epoch: 0, shard, row }).unwrap();
                assert_eq!(Some(&tokens), expected.next(), "{index}: shard {shard}, row {row}");
            }
        }
        assert_eq!(expected.next(), None);
        if index == "with" {
            assert_eq!(data_set.eos_token_id(), Some(EOS));
            fs::remove_file(settings.output.join("index.json")).unwrap();
        }
    }
}

#[test]
fn the_index_and_the_shards_are_as_documented() {
    let (_folder, mut settings) = case(&[("a.txt", text(1, 400_000).as_bytes())]);
    settings.seq_len = Some(number(512));
    settings.shard_samples = Some(number(700));
    run(&settings).unwrap();
    let index = Index::read(&settings.output).unwrap();
    assert_eq!(
        (index.seq_len, index.vocab_size, index.row_group_samples),
        (512, 259, 511),
        "row groups of about 1 MiB"
    );
    assert_eq!(
        (index.bos_token_id, index.eos_token_id, index.pad_token_id),
        (Some(256), Some(257), Some(258))
    );
    assert_eq!(index.tokenizer_file.as_deref(), Some("tokenizer.json"));
    let tokenizer = fs::read_to_string(settings.output.join("tokenizer.json")).unwrap();
    assert_eq!(tokenizer, ByteTokenizer.tokenizer_json().unwrap());
    assert_eq!(index.columns.len(), 1);
    let column = &index.columns[0];
    assert_eq!(
        (&*column.name, &*column.kind, &*column.element, column.length),
        ("tokens", "fixed_size_list", "int32", 513)
    );
    assert!(index.shards.len() > 1);
    for (at, shard) in index.shards.iter().enumerate() {
        assert_eq!(shard.file, format!("shard-{at:05}.parquet"));
        let path = settings.output.join(&shard.file);
        assert_eq!(shard.bytes, path.metadata().unwrap().len());
        assert_eq!(shard.hash, ContentHash::of_file(&path).unwrap());
        let reader = ParquetRecordBatchReaderBuilder::try_new(File::open(&path).unwrap()).unwrap();
        let field = reader.schema().field(0);
        let DataType::FixedSizeList(item, 513) = field.data_type() else { panic!("{field}") };
        assert!(!field.is_nullable() && !item.is_nullable());
        // A row group can be read alone, and so verified alone.
        let bytes = fs::read(&path).unwrap();
        let hashes: Vec<String> = (reader.metadata().row_groups().iter())
            .map(|group| {
                let (start, length) = group.column(0).byte_range();
                let pages = &bytes[start as usize..(start + length) as usize];
                ContentHash::of(pages).to_string().replace("xxh3-128:", "")
            })
            .collect();
        let stated = reader.metadata().file_metadata().key_value_metadata().unwrap();
        let stated = stated.iter().find(|stated| stated.key == "tidemill.row_group_hashes");
        let expected = format!("xxh3-128:{}", hashes.join(","));
        assert_eq!(stated.unwrap().value, Some(expected));
        let (rest, end) = bytes.split_last_chunk::<8>().unwrap();
        let length = u32::from_le_bytes(end[..4].try_into().unwrap()) as usize;
        let hash = ContentHash::of(&bytes[rest.len() - length..]);
        let bytes = length as u64 + 8;
        assert_eq!(shard.footer, Some(FooterEntry { bytes, hash }));
        let metadata = reader.metadata();
        assert_eq!(metadata.file_metadata().created_by(), Some("tidemill"));
        let samples: Vec<_> = metadata.row_groups().iter().map(|group| group.num_rows()).collect();
        let expected = if shard.samples > 511 {
            vec![511, shard.samples as i64 - 511]
        } else {
            vec![shard.samples as i64]
        };
        assert_eq!(samples, expected, "all row groups but the last are full");
        for group in metadata.row_groups() {
            let column = group.column(0);
            assert!(matches!(column.compression(), Compression::ZSTD(_)));
            assert!(column.dictionary_page_offset().is_none() && column.statistics().is_none());
            assert!(column.encodings().any(|encoding| encoding == Encoding::PLAIN));
        }
    }
    let mut expected: Vec<_> = index.shards.iter().map(|shard| shard.file.clone()).collect();
    expected.insert(0, "index.json".to_owned());
    expected.push("tokenizer.json".to_owned());
    assert_eq!(names(&settings.output), expected);
}

#[test]
fn files_that_are_not_utf8_are_skipped_whole_and_named_with_the_offset() {
    // The late one is large enough to be read in pieces, and breaks at its very end.
    let mut late = text(5, 1_000_000).into_bytes();
    late.push(0xe2);
    let (_folder, mut settings) = case(&[
        ("a.txt", b"good one"),
        ("b.txt", b"bad \xc3("),
        ("c.txt", &late),
        ("d.txt", b"good two"),
    ]);
    settings.workers = number(2);
    let report = run(&settings).unwrap();
    let skipped: Vec<_> = report
        .skipped
        .iter()
        .map(|one| match &one.reason {
            SkipReason::NotUtf8 { offset } => (one.path.file_name().unwrap(), *offset),
            other => panic!("{other}"),
        })
        .collect();
    assert_eq!(skipped, [("b.txt".as_ref(), 4), ("c.txt".as_ref(), late.len() as u64 - 1)]);
    assert_eq!((report.documents, report.text_bytes), (2, 16));
    let stream: Vec<u32> = b"good one".iter().map(|&byte| u32::from(byte)).collect();
    assert_eq!(rows(&settings.output)[0], stream);
    assert_eq!(report.tokens, 18);

    fs::remove_dir_all(&settings.output).unwrap();
    settings.strictness = Strictness::Strict;
    let error = line(&run(&settings).unwrap_err());
    assert!(error.ends_with("b.txt: it is not UTF-8 at byte 4"), "{error}");
    fs::remove_file(settings.inputs[0].join("b.txt")).unwrap();
    let error = line(&run(&settings).unwrap_err());
    assert!(error.contains("c.txt: it is not UTF-8 at byte"), "{error}");
    assert_eq!(names(settings.output.parent().unwrap()), ["in"], "nothing is left behind");
}

#[cfg(target_os = "linux")]
#[test]
fn files_that_cannot_be_read_are_skipped_and_named() {
    use std::os::unix::{fs::symlink, net::UnixListener};

    let (folder, mut settings) = case(&[("a.txt", b"good one")]);
    let input = settings.inputs[0].clone();
    symlink("nowhere", input.join("dangling.txt")).unwrap();
    // Opens, and fails to be read, also for a superuser.
    symlink("/proc/self/mem", input.join("mem.txt")).unwrap();
    let _socket = UnixListener::bind(input.join("socket.txt")).unwrap();
    let report = run(&settings).unwrap();
    let skipped: Vec<_> = report
        .skipped
        .iter()
        .map(|one| (one.path.file_name().unwrap().to_str().unwrap(), one.reason.to_string()))
        .collect();
    let unreadable = "it cannot be read".to_owned();
    assert_eq!(
        skipped,
        [
            ("dangling.txt", unreadable.clone()),
            ("mem.txt", unreadable),
            ("socket.txt", "it is not a regular file".to_owned())
        ]
    );
    assert_eq!(report.documents, 1);

    fs::remove_dir_all(&settings.output).unwrap();
    settings.strictness = Strictness::Strict;
    let error = line(&run(&settings).unwrap_err());
    assert!(error.contains("dangling.txt: it cannot be read: No such file"), "{error}");
    fs::remove_file(input.join("dangling.txt")).unwrap();
    fs::remove_file(input.join("socket.txt")).unwrap();
    let error = line(&run(&settings).unwrap_err());
    assert!(error.contains("mem.txt: it cannot be read: "), "{error}");
    assert_eq!(names(folder.path()), ["in"], "nothing is left behind");
}

#[test]
fn too_few_tokens_are_an_error_that_says_how_many() {
    let (folder, mut settings) = case(&[("a.txt", b"abc"), ("b.txt", b"d"), ("c.txt", b"\xff")]);
    settings.seq_len = Some(number(6));
    let error = line(&run(&settings).unwrap_err());
    let skipped = settings.inputs[0].join("c.txt");
    assert_eq!(
        error,
        format!(
            "found 6 tokens in 2 documents (1 files and 0 lines or rows skipped, the first {}: it is \
             not UTF-8 at byte 0), expected at least 7: one row of seq_len + 1",
            skipped.display()
        )
    );
    assert_eq!(names(folder.path()), ["in"]);
    settings.seq_len = Some(number(5));
    let report = run(&settings).unwrap();
    assert_eq!((report.samples, report.dropped_tokens), (1, 0));
}

#[test]
fn wrong_settings_are_refused_before_anything_is_written() {
    let (folder, settings) = case(&[("a.txt", b"some text"), ("b.md", b"")]);
    fs::write(folder.path().join("file"), "mine").unwrap();
    fs::create_dir(folder.path().join("full")).unwrap();
    fs::write(folder.path().join("full/mine"), "").unwrap();
    let missing = folder.path().join("missing");
    let cases: Vec<(&str, PrepareSettings)> = vec![
        (
            "full: found a folder that is not empty",
            PrepareSettings { output: folder.path().join("full"), ..settings.clone() },
        ),
        (
            "file: found a file",
            PrepareSettings { output: folder.path().join("file"), ..settings.clone() },
        ),
        ("cannot read input", PrepareSettings { inputs: vec![missing], ..settings.clone() }),
        ("parse glob \"{a\"", PrepareSettings { glob: "{a".to_owned(), ..settings.clone() }),
        ("glob \"*.rs\"", PrepareSettings { glob: "*.rs".to_owned(), ..settings.clone() }),
        (
            "found no document",
            PrepareSettings { inputs: Vec::<PathBuf>::new(), ..settings.clone() },
        ),
        ("seq_len", PrepareSettings { seq_len: Some(NonZeroUsize::MAX), ..settings.clone() }),
    ];
    for (expected, settings) in cases {
        let error = line(&run(&settings).unwrap_err());
        assert!(error.contains(expected), "{expected}: {error}");
        assert_eq!(names(folder.path()), ["file", "full", "in"]);
    }
    assert_eq!(names(&folder.path().join("full")), ["mine"]);
    assert_eq!(fs::read(folder.path().join("file")).unwrap(), b"mine");
}

#[test]
fn progress_ends_at_the_total_and_can_break_it_off() {
    let large = text(2, 1_000_000);
    let (folder, settings) =
        case(&[("a.txt", large.as_bytes()), ("b.txt", b"\xff\xff\xff"), ("c.txt", b"end")]);
    let mut seen: Vec<Progress> = Vec::new();
    let report = prepare(&settings, &ByteTokenizer, &mut |progress| {
        seen.push(progress);
        ControlFlow::Continue(())
    })
    .unwrap();
    let total = large.len() as u64 + 6;
    assert!(seen.is_sorted_by_key(|progress| (progress.bytes_done, progress.samples)));
    assert_eq!(
        seen.last(),
        Some(&Progress {
            phase: Phase::Publishing,
            bytes_done: total,
            bytes_total: total,
            documents: 2,
            tokens: report.tokens,
            samples: report.samples
        })
    );

    fs::remove_dir_all(&settings.output).unwrap();
    let result = prepare(&settings, &ByteTokenizer, &mut |progress| match progress.samples {
        0 => ControlFlow::Continue(()),
        _ => ControlFlow::Break(()),
    });
    assert!(matches!(result, Err(PrepareError::Interrupted)));
    assert_eq!(names(folder.path()), ["in"], "nothing is left behind");
}
