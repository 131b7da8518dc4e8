//! Small data sets, written straight through `parquet`.

pub mod outcome;

use std::{fs, path::Path, sync::Arc};

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
    file::properties::{WriterProperties, WriterPropertiesBuilder, WriterVersion},
};
use tidemill_streaming_data::{
    hash::{ContentHash, HASH_ALGORITHM},
    index::{Column, FORMAT_VERSION, INDEX_FILE, Index, ShardEntry, TOKENS_COLUMN},
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
        }
    }

    fn properties(&self) -> WriterPropertiesBuilder {
        WriterProperties::builder()
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
    let file = fs::File::create(path).unwrap();
    let properties = form.properties().build();
    let mut writer = ArrowWriter::try_new(file, schema, Some(properties)).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
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
            ShardEntry { file, samples, bytes: bytes.len() as u64, hash }
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
        shards,
    };
    fs::write(folder.join(INDEX_FILE), index.to_bytes()).unwrap();
}

/// A data set of example rows with an index.
pub fn indexed_example(samples: &[u64], row_tokens: usize) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let form = Form::plain();
    write_example(folder.path(), samples, row_tokens, &form);
    write_index(folder.path(), row_tokens - 1, EXAMPLE_VOCABULARY, samples, &form);
    folder
}
