//! Row groups to Parquet: encoded on any thread, written by one.
//!
//! The fastest encoding to decode, as measured with rows of 2,049 tokens: values of 32 bits, stored PLAIN
//! without a dictionary, one page a row group of about 1 MiB, in pages of format 2 (whose levels
//! lie outside the compressed part), zstd. Of real tokens no other encoding is smaller: zstd finds words that
//! come again where a token is four bytes in a row. Level 3 takes a tenth fewer bytes than level 1 and is read faster, as fewer
//! sequences are carried out; higher levels cost more to write than a tokenizer leaves time for (BENCHMARKS, *Encodings of token
//! columns*). Parquet has no integers below 32 bits: 16-bit
//! tokens take as many bytes in the file, and only add a conversion when it is read. Signed ones
//! are read by everything that reads Parquet.
//!
//! The footer states a hash of every row group, and the index a hash of the footer, so that parts of a shard
//! can be verified on their own.
//!
//! The bytes of a shard depend on its rows alone: no time, no version of this crate.

use std::{
    fs::File,
    io::{self, Write},
    path::{Path, PathBuf},
    sync::Arc,
};

use arrow_array::{ArrayRef, FixedSizeListArray, Int32Array};
use arrow_schema::{DataType, Field, FieldRef, Schema, SchemaRef};
use parquet::{
    arrow::{
        ArrowSchemaConverter, add_encoded_arrow_schema_to_metadata,
        arrow_writer::{ArrowColumnChunk, ArrowRowGroupWriterFactory, compute_leaves},
    },
    basic::{Compression, Encoding, ZstdLevel},
    errors::ParquetError,
    file::{
        metadata::KeyValue,
        properties::{EnabledStatistics, WriterProperties, WriterPropertiesPtr, WriterVersion},
        writer::SerializedFileWriter,
    },
    schema::types::TypePtr,
};

use super::Output;
use crate::prepare::tokens::pack::{Cut, RowGroup};
use crate::{
    data_set::index::{Column, FooterEntry, ShardEntry, TOKENS_COLUMN},
    hash::{ContentHash, ContentHasher},
    prepare::PrepareError,
    shard::{CREATED_BY, GROUP_HASHES_KEY, GroupHashes, footer_at_end},
};

/// Bytes of a token, decoded and before compression.
pub(crate) const TOKEN_BYTES: usize = size_of::<i32>();

/// How hard zstd tries: the state of an updatable data set names it, as shards of another are others.
pub(crate) const ZSTD_LEVEL: i32 = 3;

/// A page that is encoded at once, for any size of a row group.
const UNLIMITED: usize = i32::MAX as usize;

/// The settings that all shards of a data set share.
#[derive(Debug)]
pub(crate) struct ShardFormat {
    seq_len: usize,
    schema: SchemaRef,
    parquet_schema: TypePtr,
    properties: WriterPropertiesPtr,
    encoders: ArrowRowGroupWriterFactory,
}

/// A row group in its stored form.
#[derive(Debug)]
pub(crate) struct EncodedRowGroup {
    /// Which shard it belongs to, from 0.
    pub shard: usize,
    /// Number of rows.
    pub samples: usize,
    chunk: Box<ArrowColumnChunk>,
}

impl ShardFormat {
    /// The format of rows of `seq_len + 1` tokens; `seq_len` is below 2^31 - 1.
    ///
    /// # Errors
    /// [`ParquetError`] when the Parquet library refuses the schema.
    pub(crate) fn new(seq_len: usize) -> Result<ShardFormat, ParquetError> {
        let row = DataType::FixedSizeList(token_field(), (seq_len + 1) as i32);
        let schema = Arc::new(Schema::new(vec![Field::new(TOKENS_COLUMN, row, false)]));
        let mut properties = WriterProperties::builder()
            .set_created_by(CREATED_BY.to_owned())
            .set_writer_version(WriterVersion::PARQUET_2_0)
            .set_encoding(Encoding::PLAIN)
            .set_dictionary_enabled(false)
            .set_statistics_enabled(EnabledStatistics::None)
            .set_compression(Compression::ZSTD(ZstdLevel::try_new(ZSTD_LEVEL)?))
            .set_data_page_size_limit(UNLIMITED)
            .set_data_page_row_count_limit(UNLIMITED)
            .build();
        // Parquet knows lists only; this says that they are of a fixed size.
        add_encoded_arrow_schema_to_metadata(&schema, &mut properties);
        let properties = Arc::new(properties);
        let parquet_schema = ArrowSchemaConverter::new().convert(&schema)?.root_schema_ptr();
        let any_file =
            SerializedFileWriter::new(io::sink(), parquet_schema.clone(), properties.clone())?;
        let encoders = ArrowRowGroupWriterFactory::new(&any_file, schema.clone());
        Ok(ShardFormat { seq_len, schema, parquet_schema, properties, encoders })
    }

    /// The column as an index describes it.
    pub(crate) fn column(&self) -> Column {
        Column {
            name: TOKENS_COLUMN.to_owned(),
            kind: "fixed_size_list".to_owned(),
            element: "int32".to_owned(),
            length: self.seq_len + 1,
        }
    }

    /// Lays out the rows and encodes them. Tokens are below 2^31.
    ///
    /// # Errors
    /// [`ParquetError`] when the Parquet library refuses them.
    pub(crate) fn encode(
        &self,
        row_group: &RowGroup,
        cut: &Cut,
    ) -> Result<EncodedRowGroup, ParquetError> {
        let RowGroup { shard, samples, ref tokens } = *row_group;
        assert_eq!(tokens.len(), cut.tokens_of(samples), "the packer cut whole rows");
        let mut values = Vec::with_capacity(samples * (self.seq_len + 1));
        for row in 0..samples {
            let first = row * cut.stride();
            values.extend(tokens[first..=first + self.seq_len].iter().map(|&token| token as i32));
        }
        let values: ArrayRef = Arc::new(Int32Array::from(values));
        let length = (self.seq_len + 1) as i32;
        let rows: ArrayRef =
            Arc::new(FixedSizeListArray::try_new(token_field(), length, values, None)?);
        let no_column = || ParquetError::General("the schema has no column".to_owned());
        // The number of a row group matters only to encryption.
        let mut writer =
            self.encoders.create_column_writers(0)?.into_iter().next().ok_or_else(no_column)?;
        for leaf in compute_leaves(self.schema.field(0), &rows)? {
            writer.write(&leaf)?;
        }
        Ok(EncodedRowGroup { shard, samples, chunk: Box::new(writer.close()?) })
    }
}

fn token_field() -> FieldRef {
    Arc::new(Field::new_list_field(DataType::Int32, false))
}

/// The file name of a shard, before [`Output::name_of`].
pub(crate) fn shard_file(shard: usize) -> String {
    format!("shard-{shard:05}.parquet")
}

/// Whether it is a name that [`shard_file`] gives.
pub(crate) fn is_shard_file(name: &str) -> bool {
    let number = name.strip_prefix("shard-").and_then(|name| name.strip_suffix(".parquet"));
    let number = number.and_then(|number| number.parse().ok());
    number.is_some_and(|number| shard_file(number) == name)
}

/// Shards that may be complete here and not yet where they are to be.
pub(crate) const ON_THEIR_WAY: usize = 3;

/// The names of shards.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Naming {
    /// Shards are named by their numbers.
    Number,
    /// Shards are named by the hashes of their content.
    Content,
}

/// The file name of a shard by its content; `before` are the shards before it.
pub(crate) fn content_name(hash: ContentHash, before: &[ShardEntry]) -> String {
    repeated_content_name(hash, before.iter().filter(|shard| shard.hash == hash).count())
}

/// As [`content_name`], for a shard after `before` shards with the same content.
pub(crate) fn repeated_content_name(hash: ContentHash, before: usize) -> String {
    let digits = hash.digits();
    match before {
        0 => format!("shard-{digits}.parquet"),
        same => format!("shard-{digits}-{same}.parquet"),
    }
}

/// Writes the row groups of a data set, one shard after the other.
pub(crate) struct ShardWriter<'a> {
    format: &'a ShardFormat,
    output: &'a mut dyn Output,
    naming: Naming,
    open: Option<OpenShard>,
    written: Vec<ShardEntry>,
}

#[derive(Debug)]
struct OpenShard {
    path: PathBuf,
    writer: SerializedFileWriter<HashedFile>,
    samples: u64,
    group_hashes: GroupHashes,
}

impl<'a> ShardWriter<'a> {
    pub(crate) fn new(
        format: &'a ShardFormat,
        output: &'a mut dyn Output,
        naming: Naming,
    ) -> ShardWriter<'a> {
        ShardWriter { format, output, naming, open: None, written: Vec::new() }
    }

    /// Continues after a shard that exists already.
    ///
    /// # Errors
    /// As [`ShardWriter::append`].
    pub(crate) fn keep(&mut self, shard: ShardEntry) -> Result<(), PrepareError> {
        self.close()?;
        self.written.push(shard);
        Ok(())
    }

    /// The name by its content of a shard that comes next.
    ///
    /// # Errors
    /// As [`ShardWriter::append`].
    pub(crate) fn next_name(&mut self, hash: ContentHash) -> Result<String, PrepareError> {
        self.close()?;
        Ok(content_name(hash, &self.written))
    }

    /// Where the shards go.
    pub(crate) fn output(&mut self) -> &mut dyn Output {
        self.output
    }

    /// Whether there is room for a row group; where there is none, it waits a moment.
    ///
    /// # Errors
    /// The error of a shard that cannot be stored.
    pub(crate) fn has_room_for(
        &mut self,
        row_group: &EncodedRowGroup,
    ) -> Result<bool, PrepareError> {
        let ends_shard = self.open.is_some() && row_group.shard != self.written.len();
        self.output.has_at_most(ON_THEIR_WAY - usize::from(ends_shard))
    }

    /// Appends a row group; the row groups of a shard follow each other, shard after shard.
    ///
    /// # Errors
    /// [`DataError::Io`] when the file cannot be written, or [`PrepareError::ShardEncoding`].
    pub(crate) fn append(&mut self, row_group: EncodedRowGroup) -> Result<(), PrepareError> {
        if self.open.is_some() && row_group.shard != self.written.len() {
            self.close()?;
        }
        assert_eq!(row_group.shard, self.written.len(), "shards come in order");
        let shard = match &mut self.open {
            Some(shard) => shard,
            none => none.insert(OpenShard::create(self.format, self.output, row_group.shard)?),
        };
        shard.samples += row_group.samples as u64;
        let append = || {
            // This drops the magic number in front of the first row group; nothing is in front of later ones.
            shard.writer.flush()?;
            shard.writer.inner_mut().cut();
            let mut writer = shard.writer.next_row_group()?;
            row_group.chunk.append_to_row_group(&mut writer)?;
            let column_bytes = writer.close()?.column(0).compressed_size();
            shard.writer.flush()?;
            let pages = shard.writer.inner_mut().cut();
            assert_eq!(pages.len() as i64, column_bytes, "a row group is the pages of its column");
            shard.group_hashes.push(ContentHash::of(&pages));
            Ok(())
        };
        append().map_err(|error| encoding_error(&shard.path, error))
    }

    /// Ends the last shard.
    ///
    /// # Errors
    /// As [`ShardWriter::append`].
    pub(crate) fn close(&mut self) -> Result<(), PrepareError> {
        if let Some(OpenShard { path, mut writer, samples, group_hashes }) = self.open.take() {
            let (key, value) = (GROUP_HASHES_KEY.to_owned(), group_hashes.to_text());
            writer.append_key_value_metadata(KeyValue::new(key, value));
            let mut written = writer.into_inner().map_err(|error| encoding_error(&path, error))?;
            let footer = footer(&written.cut()).map_err(|error| encoding_error(&path, error))?;
            let HashedFile { file, hasher, .. } = written;
            let written_as = self.output.name_of(&shard_file(self.written.len()));
            let bytes = file.metadata().map_err(PrepareError::io("read", &path))?.len();
            let (hash, footer) = (hasher.finish(), Some(footer));
            let name = match self.naming {
                Naming::Number => written_as.clone(),
                Naming::Content => content_name(hash, &self.written),
            };
            self.output.take(&written_as, &name, file)?;
            self.written.push(ShardEntry { file: name, samples, bytes, hash, footer });
        }
        Ok(())
    }

    /// Whether all shards are where they are to be; where one is not, it waits a moment.
    ///
    /// # Errors
    /// The error of a shard that cannot be stored.
    pub(crate) fn are_stored(&mut self) -> Result<bool, PrepareError> {
        self.output.has_at_most(0)
    }

    /// The index entry of each shard.
    pub(crate) fn written(self) -> Vec<ShardEntry> {
        self.written
    }
}

impl OpenShard {
    fn create(
        format: &ShardFormat,
        output: &dyn Output,
        shard: usize,
    ) -> Result<OpenShard, PrepareError> {
        let name = output.name_of(&shard_file(shard));
        let (path, file) = (output.folder().join(&name), output.create(&name)?);
        let file = HashedFile { file, hasher: ContentHasher::new(), since_cut: Vec::new() };
        let (schema, properties) = (format.parquet_schema.clone(), format.properties.clone());
        let writer = SerializedFileWriter::new(file, schema, properties)
            .map_err(|error| encoding_error(&path, error))?;
        Ok(OpenShard { path, writer, samples: 0, group_hashes: GroupHashes::default() })
    }
}

/// The error of a shard: what the operating system says, where it is the cause.
pub(crate) fn encoding_error(path: &Path, error: ParquetError) -> PrepareError {
    let source = match error {
        ParquetError::External(source) => match source.downcast::<io::Error>() {
            Ok(source) => {
                return PrepareError::io("write", path)(*source);
            }
            Err(source) => ParquetError::External(source),
        },
        error => error,
    };
    PrepareError::ShardEncoding { path: path.to_owned(), source }
}

/// A file whose content is hashed while it is written.
struct HashedFile {
    file: File,
    hasher: ContentHasher,
    /// Bytes of the row group being written, or of the footer after the last row group.
    since_cut: Vec<u8>,
}

impl HashedFile {
    /// Takes the bytes that were written since the last cut.
    fn cut(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.since_cut)
    }
}

/// The index's entry for the footer, which is the last part of `end`, the last bytes of a file.
fn footer(end: &[u8]) -> Result<FooterEntry, ParquetError> {
    let footer = footer_at_end(end)?;
    Ok(FooterEntry { bytes: footer.len() as u64, hash: ContentHash::of(footer) })
}

impl std::fmt::Debug for HashedFile {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("HashedFile").field("file", &self.file).finish_non_exhaustive()
    }
}

impl Write for HashedFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.file.write(bytes)?;
        self.hasher.update(&bytes[..written]);
        self.since_cut.extend_from_slice(&bytes[..written]);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}
