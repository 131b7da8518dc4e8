//! The size of tokens and the cost of decoding them, by encoding and compression of their pages.
//!
//! ```text
//! cargo bench -p tidemill-streaming-data --bench encodings -- DATA_SET [MILLIONS_OF_TOKENS]
//! ```
//!
//! The tokens are the first of a data set that `prepare` made. They are written as `prepare` writes them (row groups of about 1 MiB,
//! a page each, format 2, fixed-size lists without nulls), except for the encoding and the compression. The first table is of files
//! written by the `parquet` crate, read by this crate and by that one; the second of values alone, without levels and pages:
//! compressed by `zstd`, decompressed, and converted into two bytes a token, the least work of any reader of
//! that form. CPU time depends little on other programs that run on the machine, unlike wall-clock time.

mod cpu;

use std::{fs::File, num::NonZeroU64, num::NonZeroUsize, path::Path, sync::Arc};

use arrow::{
    array::{Array, ArrayRef, AsArray, FixedSizeListArray, Int32Array, RecordBatch},
    datatypes::{DataType, Field, Int32Type, Schema},
};
use bytes::Bytes;
use cpu::cpu_seconds;
use parquet::{
    arrow::{ArrowWriter, arrow_reader::ParquetRecordBatchReaderBuilder},
    basic::{Compression, Encoding, ZstdLevel},
    file::properties::{EnabledStatistics, WriterProperties, WriterVersion},
};
use tidemill_streaming_data::{
    DataSet, Mixture,
    data_set::index::TOKENS_COLUMN,
    order::{ShuffleOrder, ShuffleSettings},
    reader::{Decoder, DecoderSettings},
};

/// Bytes of a row group's tokens.
const GROUP_BYTES: usize = 1 << 20;

/// Fewer samples than a row group has, so that no page is skipped.
const STRIDE: u64 = 61;

/// The least CPU seconds of a measurement, since the CPU clock has steps of 10 ms.
const LEAST_SECONDS: f64 = 1.0;

const LEVELS: [i32; 6] = [1, 2, 3, 4, 6, 9];

/// The tokens of a data set and the length of its rows.
struct Tokens {
    values: Vec<i32>,
    row: usize,
}

fn main() {
    let arguments: Vec<String> =
        std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    let Some(folder) = arguments.first() else {
        println!("expected a data set, and millions of tokens to take of it");
        return;
    };
    let millions = arguments.get(1).map_or(16.0, |number| number.parse().expect("a number"));
    let tokens = read_tokens(Path::new(folder), (millions * 1e6) as usize);
    let count = tokens.values.len() as f64;
    println!("{:.1} million tokens in rows of {}", count / 1e6, tokens.row);
    println!(
        "\n| encoding | compression | bits a token | M tokens/s written | read here | read by parquet |"
    );
    println!("|---|---|---|---|---|---|");
    for encoding in [
        Some(Encoding::PLAIN),
        Some(Encoding::BYTE_STREAM_SPLIT),
        Some(Encoding::DELTA_BINARY_PACKED),
        None,
    ] {
        let zstd =
            LEVELS.map(|level| Compression::ZSTD(ZstdLevel::try_new(level).expect("a level")));
        for compression in [Compression::UNCOMPRESSED, Compression::SNAPPY].into_iter().chain(zstd)
        {
            of_files(&tokens, encoding, compression);
        }
    }
    println!("\n| values | zstd | bits a token | M tokens/s decoded |");
    println!("|---|---|---|---|");
    for form in [Form::FourBytes, Form::TwoBytes, Form::FourBytesSplit, Form::TwoBytesSplit] {
        LEVELS.iter().for_each(|&level| of_values(&tokens, form, level));
    }
}

/// The first tokens of a data set, in whole rows.
fn read_tokens(folder: &Path, most: usize) -> Tokens {
    let data_set = DataSet::open(folder).expect("a data set");
    let row = data_set.seq_len() + 1;
    let mut values = Vec::with_capacity(most);
    for shard in data_set.shards() {
        if values.len() >= most {
            break;
        }
        let file = File::open(shard.path()).expect("a shard");
        let batches = ParquetRecordBatchReaderBuilder::try_new(file).expect("a shard").build();
        for batch in batches.expect("a shard") {
            let batch = batch.expect("rows");
            let rows = batch.column(0).as_fixed_size_list();
            values.extend_from_slice(rows.values().as_primitive::<Int32Type>().values());
        }
    }
    values.truncate(most.max(row) / row * row);
    Tokens { values, row }
}

/// Millions of tokens that `work` reads in a second.
fn rate(tokens: f64, mut work: impl FnMut()) -> f64 {
    let (begun, mut times) = (cpu_seconds(), 0.0);
    loop {
        work();
        times += 1.0;
        let spent = cpu_seconds() - begun;
        if spent >= LEAST_SECONDS {
            return tokens * times / 1e6 / spent;
        }
    }
}

/// A file of an encoding, or of a dictionary.
fn of_files(tokens: &Tokens, encoding: Option<Encoding>, compression: Compression) {
    let group_rows = GROUP_BYTES / (4 * tokens.row);
    let mut properties = WriterProperties::builder()
        .set_writer_version(WriterVersion::PARQUET_2_0)
        .set_statistics_enabled(EnabledStatistics::None)
        .set_compression(compression)
        .set_dictionary_enabled(encoding.is_none())
        .set_dictionary_page_size_limit(i32::MAX as usize)
        .set_data_page_size_limit(i32::MAX as usize)
        .set_data_page_row_count_limit(i32::MAX as usize)
        .set_max_row_group_row_count(Some(group_rows));
    if let Some(encoding) = encoding {
        properties = properties.set_encoding(encoding);
    }
    let properties = properties.build();
    let item = Arc::new(Field::new_list_field(DataType::Int32, false));
    let values: ArrayRef = Arc::new(Int32Array::from(tokens.values.clone()));
    let rows: ArrayRef =
        Arc::new(FixedSizeListArray::new(Arc::clone(&item), tokens.row as i32, values, None));
    let field = Field::new(TOKENS_COLUMN, rows.data_type().clone(), false);
    let schema = Arc::new(Schema::new(vec![field]));
    let batch = RecordBatch::try_new(Arc::clone(&schema), vec![rows]).expect("rows");
    let write = || {
        let schema = Arc::clone(&schema);
        let mut writer = ArrowWriter::try_new(Vec::new(), schema, Some(properties.clone()))
            .expect("a schema of lists");
        writer.write(&batch).expect("memory takes what is written");
        writer.into_inner().expect("memory takes what is written")
    };
    let bytes = write();
    let count = tokens.values.len() as f64;
    let written = rate(count, || _ = write());
    let folder = tempfile::tempdir().expect("a folder for temporary files");
    let path = folder.path().join("shard-00000.parquet");
    std::fs::write(&path, &bytes).expect("a temporary file");
    let data_set = DataSet::open(folder.path()).expect("a folder of Parquet files");
    let window_samples = NonZeroU64::new(4096).expect("it is not 0");
    let shuffle = ShuffleSettings { order: ShuffleOrder::None, window_samples, seed: 17 };
    let samples = data_set.samples();
    let mixture = Mixture::of(data_set, shuffle).expect("a data set that is not empty");
    // Memory for a few pieces but not for the shard, so that every piece is decoded each time.
    let settings = DecoderSettings { threads: NonZeroUsize::MIN, memory_bytes: 2 << 20 };
    let decoder = Decoder::new(mixture, settings).expect("a decoder");
    let here = rate(count, || {
        let plan = (0..samples / STRIDE).map(|at| at * STRIDE..at * STRIDE + 1);
        let sum = decoder.reader(plan).map(|sample| sample.expect("a sample").tokens[0]);
        std::hint::black_box(sum.fold(0, u32::wrapping_add));
    });
    let bytes = Bytes::from(bytes);
    let by_parquet = rate(count, || {
        let reader = ParquetRecordBatchReaderBuilder::try_new(bytes.clone()).expect("the file");
        let batches = reader.with_batch_size(group_rows).build().expect("the file");
        let rows: usize = batches.map(|batch| batch.expect("rows").num_rows()).sum();
        assert_eq!(rows * tokens.row, tokens.values.len(), "all rows are read");
    });
    let encoding = encoding.map_or("dictionary".to_owned(), |encoding| encoding.to_string());
    let bits = bytes.len() as f64 * 8.0 / count;
    println!(
        "| {encoding} | {compression} | {bits:.2} | {written:.0} | {here:.0} | {by_parquet:.0} |"
    );
}

/// The layout of a page's values before compression.
#[derive(Debug, Clone, Copy)]
enum Form {
    /// PLAIN.
    FourBytes,
    /// PLAIN for 16-bit integers, which Parquet does not have.
    TwoBytes,
    /// BYTE_STREAM_SPLIT: the first bytes of all values, then the second, and so on.
    FourBytesSplit,
    TwoBytesSplit,
}

impl Form {
    fn bytes(self) -> usize {
        match self {
            Form::FourBytes | Form::FourBytesSplit => 4,
            Form::TwoBytes | Form::TwoBytesSplit => 2,
        }
    }

    fn lay_out(self, values: &[i32]) -> Vec<u8> {
        let byte = |value: &i32, at: usize| value.to_le_bytes()[at];
        match self {
            Form::FourBytes | Form::TwoBytes => {
                let places = 0..self.bytes();
                values.iter().flat_map(|value| places.clone().map(|at| byte(value, at))).collect()
            }
            Form::FourBytesSplit | Form::TwoBytesSplit => {
                (0..self.bytes()).flat_map(|at| values.iter().map(move |v| byte(v, at))).collect()
            }
        }
    }

    /// The low two bytes of each value; returns whether all other bytes are 0.
    fn decode(self, bytes: &[u8], values: &mut Vec<u16>) -> bool {
        values.clear();
        match self {
            Form::FourBytes => {
                let (wide, _) = bytes.as_chunks::<4>();
                let wide = wide.iter().map(|&value| u32::from_le_bytes(value));
                let all = wide.clone().fold(0, |all, value| all | value);
                values.extend(wide.map(|value| value as u16));
                all <= u32::from(u16::MAX)
            }
            Form::TwoBytes => {
                let (narrow, _) = bytes.as_chunks::<2>();
                values.extend(narrow.iter().map(|&value| u16::from_le_bytes(value)));
                true
            }
            Form::FourBytesSplit | Form::TwoBytesSplit => {
                let count = bytes.len() / self.bytes();
                let (low, rest) = bytes.split_at(count);
                let (high, rest) = rest.split_at(count);
                let pairs = low.iter().zip(high);
                values.extend(pairs.map(|(&low, &high)| u16::from_le_bytes([low, high])));
                rest.iter().fold(0, |all, byte| all | byte) == 0
            }
        }
    }
}

/// Measures the compressed values of row groups, without pages.
fn of_values(tokens: &Tokens, form: Form, level: i32) {
    let group = GROUP_BYTES / (4 * tokens.row) * tokens.row;
    if tokens.values.iter().any(|&token| token > i32::from(u16::MAX)) {
        println!("| {form:?} | {level} | tokens above 65,535 need more than two bytes | |");
        return;
    }
    let compress = |group| {
        zstd::bulk::compress(&form.lay_out(group), level).expect("memory takes what is written")
    };
    let groups: Vec<Vec<u8>> = tokens.values.chunks(group).map(compress).collect();
    let mut decompressor = zstd::bulk::Decompressor::new().expect("memory for zstd");
    let (mut plain, mut narrow) = (Vec::with_capacity(group * 4), Vec::with_capacity(group));
    let count = tokens.values.len() as f64;
    let decoded = rate(count, || {
        for group in &groups {
            decompressor.decompress_to_buffer(group, &mut plain).expect("what was compressed");
            assert!(form.decode(&plain, &mut narrow), "no token needs more than two bytes");
            std::hint::black_box(&narrow);
        }
    });
    let bits = groups.iter().map(Vec::len).sum::<usize>() as f64 * 8.0 / count;
    println!("| {form:?} | {level} | {bits:.2} | {decoded:.0} |");
}
