//! Small data sets, written straight through `parquet`.

pub mod outcome;

use std::{fs, ops::Range, path::Path, sync::Arc};

use arrow::{
    array::{
        Array, ArrayRef, FixedSizeListArray, GenericListArray, Int64Array, OffsetSizeTrait,
        RecordBatch,
    },
    buffer::OffsetBuffer,
    compute::cast,
    datatypes::{DataType, Field, Schema},
};
use parquet::{
    arrow::ArrowWriter,
    basic::Encoding,
    file::{
        metadata::{KeyValue, ParquetMetaDataReader},
        properties::{WriterProperties, WriterPropertiesBuilder, WriterVersion},
    },
};
use tidemill_streaming_data::{
    data_set::index::{
        Column, FORMAT_VERSION, FooterEntry, INDEX_FILE, Index, ShardEntry, TOKENS_COLUMN,
    },
    hash::{ContentHash, HASH_ALGORITHM},
};

/// How a column of tokens is typed.
#[derive(Debug, Clone, Copy)]
pub enum ListKind {
    Fixed,
    List,
    LargeList,
}

/// How a shard is written.
#[derive(Debug, Clone)]
pub struct Form {
    pub kind: ListKind,
    pub element: DataType,
    pub nullable: bool,
    pub writer: WriterVersion,
    pub dictionary: bool,
    pub group_rows: usize,
    pub page_rows: usize,
    pub created_by: &'static str,
    pub hashes: Hashes,
}

/// Whether the footer states the hashes of row groups, and an index those of footers.
#[derive(Debug, Clone)]
pub enum Hashes {
    None,
    Right,
    /// This text in the footer, right or wrong.
    Stated(String),
}

impl Form {
    /// As `prepare` writes, but for the sizes.
    pub fn plain() -> Form {
        Form {
            kind: ListKind::Fixed,
            element: DataType::UInt16,
            nullable: false,
            writer: WriterVersion::PARQUET_1_0,
            dictionary: false,
            group_rows: 5,
            page_rows: 2,
            created_by: "somebody",
            hashes: Hashes::None,
        }
    }

    /// The same, with hashes.
    pub fn hashed() -> Form {
        Form { created_by: "tidemill", hashes: Hashes::Right, ..Form::plain() }
    }

    fn properties(&self) -> WriterPropertiesBuilder {
        WriterProperties::builder()
            .set_created_by(self.created_by.to_owned())
            .set_writer_version(self.writer)
            .set_dictionary_enabled(self.dictionary)
            .set_encoding(Encoding::PLAIN)
            .set_max_row_group_row_count(Some(self.group_rows))
            .set_data_page_row_count_limit(self.page_rows)
            .set_write_batch_size(1)
    }
}

/// Writes rows, all of one length for [`ListKind::Fixed`].
pub fn write_shard(path: &Path, rows: &[Vec<i64>], form: &Form) {
    let flat = Int64Array::from_iter_values(rows.iter().flatten().copied());
    let elements = cast(&flat, &form.element).expect("integers cast to integers");
    assert_eq!(elements.null_count(), 0, "a token does not fit {}", form.element);
    let lengths: Vec<usize> = rows.iter().map(Vec::len).collect();
    write_array(path, list_of(elements, &lengths, form), form);
}

/// Writes any column as the column of tokens.
pub fn write_array(path: &Path, tokens: ArrayRef, form: &Form) {
    write_column(path, TOKENS_COLUMN, tokens, form);
}

/// Writes one column.
pub fn write_column(path: &Path, name: &str, array: ArrayRef, form: &Form) {
    let field = Field::new(name, array.data_type().clone(), form.nullable);
    let schema = Arc::new(Schema::new(vec![field]));
    let batch = RecordBatch::try_new(Arc::clone(&schema), vec![array]).unwrap();
    let write = |properties: WriterProperties| {
        let mut bytes = Vec::new();
        let mut writer =
            ArrowWriter::try_new(&mut bytes, Arc::clone(&schema), Some(properties)).unwrap();
        writer.write(&batch).unwrap();
        writer.close().unwrap();
        bytes
    };
    let mut bytes = write(form.properties().build());
    let hashes = match &form.hashes {
        Hashes::None => None,
        Hashes::Right => Some(row_group_hashes(&bytes)),
        Hashes::Stated(hashes) => Some(hashes.clone()),
    };
    if let Some(hashes) = hashes {
        // Row groups stand where they stood: the footer is behind them.
        let hashes = Some(vec![KeyValue::new(HASHES_KEY.to_owned(), hashes)]);
        bytes = write(form.properties().set_key_value_metadata(hashes).build());
    }
    fs::write(path, bytes).unwrap();
}

/// Where the footer of a shard states the hashes of its row groups.
pub const HASHES_KEY: &str = "tidemill.row_group_hashes";

/// Where the row groups of a shard of one column are.
pub fn row_groups(shard: &[u8]) -> Vec<Range<usize>> {
    let metadata = &shard[footer_range(shard)];
    let metadata = ParquetMetaDataReader::decode_metadata(&metadata[..metadata.len() - 8]).unwrap();
    let ranges = metadata.row_groups().iter().map(|group| {
        assert_eq!(group.num_columns(), 1);
        let (start, length) = group.column(0).byte_range();
        start as usize..(start + length) as usize
    });
    ranges.collect()
}

/// Where the footer of a shard is: metadata, their length in four bytes, and the magic number.
pub fn footer_range(shard: &[u8]) -> Range<usize> {
    let end = shard.len() - 8;
    let length = u32::from_le_bytes(shard[end..end + 4].try_into().unwrap());
    end - length as usize..shard.len()
}

/// The hashes of row groups that the footer of a shard must have.
pub fn row_group_hashes(shard: &[u8]) -> String {
    let hashes: Vec<String> = row_groups(shard)
        .into_iter()
        .map(|range| ContentHash::of(&shard[range]).to_string()["xxh3-128:".len()..].to_owned())
        .collect();
    format!("xxh3-128:{}", hashes.join(","))
}

fn list_of(elements: ArrayRef, lengths: &[usize], form: &Form) -> ArrayRef {
    fn variable<O: OffsetSizeTrait>(
        item: Arc<Field>,
        elements: ArrayRef,
        lengths: &[usize],
    ) -> ArrayRef {
        let offsets = OffsetBuffer::<O>::from_lengths(lengths.iter().copied());
        Arc::new(GenericListArray::<O>::new(item, offsets, elements, None))
    }
    let item = Arc::new(Field::new("element", elements.data_type().clone(), form.nullable));
    match form.kind {
        ListKind::Fixed => {
            let length = lengths.first().copied().unwrap_or(3) as i32;
            Arc::new(FixedSizeListArray::new(item, length, elements, None))
        }
        ListKind::List => variable::<i32>(item, elements, lengths),
        ListKind::LargeList => variable::<i64>(item, elements, lengths),
    }
}

/// The tokens of a sample of the example data sets: all samples differ, in every place.
pub fn example_row(shard: usize, row: u64, row_tokens: usize) -> Vec<u32> {
    let start = 1 + shard as u32 * 1000 + row as u32 * 7;
    (0..row_tokens as u32).map(|place| (start + place * 31) % EXAMPLE_VOCABULARY).collect()
}

/// Vocabulary of the example data sets.
pub const EXAMPLE_VOCABULARY: u32 = 60_013;

/// Writes shards of example rows, and no index.
pub fn write_example(folder: &Path, samples: &[u64], row_tokens: usize, form: &Form) {
    for (shard, &count) in samples.iter().enumerate() {
        let rows: Vec<Vec<i64>> = (0..count)
            .map(|row| example_row(shard, row, row_tokens).into_iter().map(i64::from).collect())
            .collect();
        write_shard(&folder.join(format!("shard-{shard:05}.parquet")), &rows, form);
    }
}

/// Writes an index of the Parquet files of a folder, in order of their names.
pub fn write_index(folder: &Path, seq_len: usize, vocab_size: u32, samples: &[u64], form: &Form) {
    let mut files: Vec<String> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.ends_with(".parquet"))
        .collect();
    files.sort();
    assert_eq!(files.len(), samples.len());
    let shards = files
        .into_iter()
        .zip(samples)
        .map(|(file, &samples)| {
            let bytes = fs::read(folder.join(&file)).unwrap();
            let hash = ContentHash::of(&bytes);
            let footer = matches!(form.hashes, Hashes::Right).then(|| {
                let footer = &bytes[footer_range(&bytes)];
                FooterEntry { bytes: footer.len() as u64, hash: ContentHash::of(footer) }
            });
            ShardEntry { file, samples, bytes: bytes.len() as u64, hash, footer }
        })
        .collect();
    let index = Index {
        format_version: FORMAT_VERSION,
        seq_len,
        vocab_size,
        bos_token_id: None,
        eos_token_id: Some(0),
        pad_token_id: None,
        tokenizer_file: None,
        hash_algorithm: HASH_ALGORITHM.into(),
        row_group_samples: form.group_rows as u64,
        columns: vec![Column {
            name: TOKENS_COLUMN.into(),
            kind: "fixed_size_list".into(),
            element: form.element.to_string().to_lowercase(),
            length: seq_len + 1,
        }],
        selection: None,
        state: None,
        shards,
    };
    fs::write(folder.join(INDEX_FILE), index.to_bytes()).unwrap();
}

/// A data set of example rows with an index.
pub fn indexed_example(samples: &[u64], row_tokens: usize) -> tempfile::TempDir {
    indexed_example_of(samples, row_tokens, &Form::plain())
}

/// The same, with hashes of all that is read alone.
pub fn hashed_example(samples: &[u64], row_tokens: usize) -> tempfile::TempDir {
    indexed_example_of(samples, row_tokens, &Form::hashed())
}

fn indexed_example_of(samples: &[u64], row_tokens: usize, form: &Form) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    write_example(folder.path(), samples, row_tokens, form);
    write_index(folder.path(), row_tokens - 1, EXAMPLE_VOCABULARY, samples, form);
    folder
}
