//! The short way from pages to tokens: where the pages of a row group are, and any of them decoded
//! alone.
//!
//! Where every row has the same length, the token with which a row begins is known by a
//! multiplication, and the headers of the pages say which tokens each holds: so that a sample
//! costs a page or two, however large its row group is (other writers make row groups of a million
//! rows), and the memory of a window is that of its pages. Everything that is not so simple
//! (another encoding, a null, a row of another length, a token outside of the vocabulary) is
//! answered with `None`: the long way of [`super::decode`] then reads the row group, or says what
//! is wrong with it.
//!
//! | module | holds |
//! |---|---|
//! | `header` | what the header of a page says |
//! | `levels` | runs and packed values; what levels must be |
//! | `values` | tokens of PLAIN pages and of dictionaries |
//! | `decompress` | pages out of their compression |

use std::ops::Range;

use arrow::datatypes::DataType;
use parquet::{basic::Type as PhysicalType, file::metadata::ColumnChunkMetaData};

use super::{RowRule, chunk::column_range, tokens::DecodedTokens};
use crate::{cache::Weigh, error::DataError};

mod decompress;
mod header;
mod levels;
mod values;

pub(crate) use decompress::Scratch;

use decompress::Codec;
use header::{PageContent, PageHeader, encoding};
use levels::{are_all, are_rows};
use values::{Dictionary, Width, append_plain};

/// Reads a range of the file into a buffer, which then holds that and nothing else.
pub(super) type ReadRange<'a> = dyn Fn(Range<u64>, &mut Vec<u8>) -> Result<(), DataError> + 'a;

/// What is read in order to find the header of a page; statistics can make one longer.
const HEADER_BYTES: u64 = 512;

/// The longest header that is looked for.
const MAX_HEADER_BYTES: u64 = 64 << 10;

/// The largest page that is decoded here, decompressed: a damaged header may state anything.
const MAX_PAGE_BYTES: usize = 256 << 20;

/// Pages are decoded together until a piece has this many tokens.
const PIECE_TOKENS: u64 = 128 << 10;

/// A column of one row group.
#[derive(Clone, Copy)]
pub(super) struct Column<'a> {
    pub(super) metadata: &'a ColumnChunkMetaData,
    /// Type of a token.
    pub(super) element: &'a DataType,
    /// Rows of the group.
    pub(super) rows: usize,
}

/// Where the pages of a column of tokens are.
#[derive(Debug)]
pub(super) struct PageDirectory {
    rule: RowRule,
    codec: Codec,
    width: Width,
    definition: Definition,
    dictionary: Option<Dictionary>,
    pages: Vec<DataPage>,
    /// Pages that are decoded together.
    pieces: Vec<Piece>,
}

/// The definition level of a value, and the bits in which levels are stored.
#[derive(Debug, Clone, Copy)]
struct Definition {
    level: u32,
    bit_width: usize,
}

#[derive(Debug)]
struct DataPage {
    /// Where its content is in the file.
    content: Range<u64>,
    uncompressed_bytes: usize,
    /// Place of its first token among those of the row group.
    first: u64,
    tokens: usize,
    form: Form,
    is_plain: bool,
}

#[derive(Debug, Clone, Copy)]
enum Form {
    /// Levels, each behind their length, and values, compressed together.
    V1,
    /// Levels, then values, which may be compressed.
    V2 { repetition_bytes: usize, definition_bytes: usize, is_compressed: bool },
}

#[derive(Debug)]
struct Piece {
    first: u64,
    pages: Range<usize>,
}

impl PageDirectory {
    /// Finds the pages; `None` where they are not of the simple kind.
    ///
    /// # Errors
    /// Those of `read`.
    pub(super) fn find(
        column: Column<'_>,
        rule: RowRule,
        read: &ReadRange<'_>,
        scratch: &mut Scratch,
    ) -> Result<Option<PageDirectory>, DataError> {
        let description = column.metadata.column_descr();
        let (Some(width), Some(codec), Ok(range)) = (
            simple_width(column),
            Codec::of(column.metadata.compression()),
            column_range(column.metadata),
        ) else {
            return Ok(None);
        };
        let Ok(level @ 1..) = u32::try_from(description.max_def_level()) else { return Ok(None) };
        let definition =
            Definition { level, bit_width: (u32::BITS - level.leading_zeros()) as usize };
        let mut directory = PageDirectory {
            rule,
            codec,
            width,
            definition,
            dictionary: None,
            pages: Vec::new(),
            pieces: Vec::new(),
        };
        let expected = column.rows as u64 * rule.row_tokens as u64;
        let (mut at, mut first) = (range.start, 0);
        while first < expected {
            let Some((header, length)) = read_header(at..range.end, read, scratch)? else {
                return Ok(None);
            };
            let start = at + length as u64;
            let content = start..start.saturating_add(header.compressed_bytes as u64);
            if content.end > range.end || header.uncompressed_bytes > MAX_PAGE_BYTES {
                return Ok(None);
            }
            at = content.end;
            let uncompressed_bytes = header.uncompressed_bytes;
            match header.content {
                PageContent::Dictionary { values, .. } => {
                    read(content, &mut scratch.stored)?;
                    let is_first = directory.dictionary.is_none() && directory.pages.is_empty();
                    let dictionary = scratch
                        .decompress(codec, 0, uncompressed_bytes)
                        .and_then(|()| Dictionary::new(&scratch.plain, width, values, rule));
                    match dictionary {
                        Some(dictionary) if is_first => directory.dictionary = Some(dictionary),
                        _ => return Ok(None),
                    }
                }
                other => {
                    let Some(page) = directory.data_page(other, content, uncompressed_bytes, first)
                    else {
                        return Ok(None);
                    };
                    first += page.tokens as u64;
                    directory.pages.push(page);
                }
            }
        }
        if first != expected {
            return Ok(None);
        }
        directory.make_pieces();
        Ok(Some(directory))
    }

    /// A page of the simple kind, or none.
    fn data_page(
        &self,
        content: PageContent,
        place: Range<u64>,
        uncompressed_bytes: usize,
        first: u64,
    ) -> Option<DataPage> {
        let (tokens, values, form) = match content {
            PageContent::Data {
                values: tokens,
                encoding: values,
                repetition_encoding: encoding::RLE,
                definition_encoding: encoding::RLE,
            } => (tokens, values, Form::V1),
            PageContent::DataV2 {
                values: tokens,
                encoding: values,
                repetition_bytes,
                definition_bytes,
                is_compressed,
            } => (tokens, values, Form::V2 { repetition_bytes, definition_bytes, is_compressed }),
            _ => return None,
        };
        let is_plain = match values {
            encoding::PLAIN => true,
            encoding::PLAIN_DICTIONARY | encoding::RLE_DICTIONARY => {
                self.dictionary.as_ref()?;
                false
            }
            _ => return None,
        };
        Some(DataPage { content: place, uncompressed_bytes, first, tokens, form, is_plain })
    }

    fn make_pieces(&mut self) {
        let mut begun: Option<Piece> = None;
        for (at, page) in self.pages.iter().enumerate() {
            match &mut begun {
                Some(piece) if page.first - piece.first < PIECE_TOKENS => piece.pages.end = at + 1,
                _ => self
                    .pieces
                    .extend(begun.replace(Piece { first: page.first, pages: at..at + 1 })),
            }
        }
        self.pieces.extend(begun);
    }

    /// Those pieces that hold a row of the group.
    pub(super) fn pieces_of(&self, row: u64) -> Range<usize> {
        let row_tokens = self.rule.row_tokens as u64;
        let start = self.pieces.partition_point(|piece| piece.first <= row * row_tokens);
        let end = self.pieces.partition_point(|piece| piece.first < (row + 1) * row_tokens);
        start.saturating_sub(1)..end
    }

    /// Places of the tokens of a piece in the row group.
    pub(super) fn places(&self, piece: usize) -> Range<u64> {
        let pages = &self.pages[self.pieces[piece].pages.clone()];
        let end = pages.last().map_or(0, |page| page.first + page.tokens as u64);
        self.pieces[piece].first..end
    }

    /// Decodes all pieces as one; `None` where something is not as it should be.
    ///
    /// # Errors
    /// Those of `read`.
    pub(super) fn decode_all(
        &self,
        read: &ReadRange<'_>,
        scratch: &mut Scratch,
    ) -> Result<Option<DecodedTokens>, DataError> {
        self.decode_pages(&self.pages, read, scratch)
    }

    /// Decodes a piece; `None` where something is not as it should be.
    ///
    /// # Errors
    /// Those of `read`.
    pub(super) fn decode(
        &self,
        piece: usize,
        read: &ReadRange<'_>,
        scratch: &mut Scratch,
    ) -> Result<Option<DecodedTokens>, DataError> {
        self.decode_pages(&self.pages[self.pieces[piece].pages.clone()], read, scratch)
    }

    fn decode_pages(
        &self,
        pages: &[DataPage],
        read: &ReadRange<'_>,
        scratch: &mut Scratch,
    ) -> Result<Option<DecodedTokens>, DataError> {
        let first = pages.first().map_or(0, |page| page.first);
        let count: usize = pages.iter().map(|page| page.tokens).sum();
        // A damaged header may state anything; more memory is taken where there is more.
        let capacity = count.min(MAX_PAGE_BYTES);
        let mut tokens = DecodedTokens::with_capacity(first, capacity, self.rule);
        for page in pages {
            read(page.content.clone(), &mut scratch.stored)?;
            if self.append(page, scratch, &mut tokens).is_none() {
                return Ok(None);
            }
        }
        Ok(Some(tokens))
    }

    /// Appends the tokens of the page that `scratch` holds as it is stored.
    fn append(
        &self,
        page: &DataPage,
        scratch: &mut Scratch,
        tokens: &mut DecodedTokens,
    ) -> Option<()> {
        let (repetition, definition, values) = match page.form {
            Form::V1 => {
                scratch.decompress(self.codec, 0, page.uncompressed_bytes)?;
                let (repetition, rest) = take_levels(&scratch.plain)?;
                let (definition, values) = take_levels(rest)?;
                (repetition, definition, values)
            }
            Form::V2 { repetition_bytes, definition_bytes, is_compressed } => {
                let levels_bytes = repetition_bytes.checked_add(definition_bytes)?;
                let codec = if is_compressed { self.codec } else { Codec::Uncompressed };
                let values_bytes = page.uncompressed_bytes.checked_sub(levels_bytes)?;
                scratch.decompress(codec, levels_bytes, values_bytes)?;
                let levels = scratch.stored.get(..levels_bytes)?;
                let (repetition, definition) = levels.split_at(repetition_bytes);
                (repetition, definition, &scratch.plain[..])
            }
        };
        if !are_rows(repetition, page.tokens, page.first, self.rule.row_tokens) {
            return None;
        }
        if page.is_plain {
            // A null has levels but no value: as many values as levels mean that there is none.
            return append_plain(values, self.width, page.tokens, tokens);
        }
        let Definition { level, bit_width } = self.definition;
        if !are_all(definition, page.tokens, bit_width, level) {
            return None;
        }
        self.dictionary.as_ref()?.append(values, page.tokens, tokens)
    }
}

impl Weigh for PageDirectory {
    fn weight_bytes(&self) -> usize {
        size_of::<PageDirectory>()
            + self.pages.capacity() * size_of::<DataPage>()
            + self.pieces.capacity() * size_of::<Piece>()
            + self.dictionary.as_ref().map_or(0, Dictionary::bytes)
    }
}

fn simple_width(column: Column<'_>) -> Option<Width> {
    if column.metadata.column_descr().max_rep_level() != 1 {
        return None;
    }
    match (column.metadata.column_type(), column.element) {
        (PhysicalType::INT32, DataType::Int8 | DataType::Int16 | DataType::Int32) => {
            Some(Width::Signed32)
        }
        (PhysicalType::INT32, DataType::UInt8 | DataType::UInt16 | DataType::UInt32) => {
            Some(Width::Unsigned32)
        }
        (PhysicalType::INT64, DataType::Int64) => Some(Width::Signed64),
        (PhysicalType::INT64, DataType::UInt64) => Some(Width::Unsigned64),
        _ => None,
    }
}

/// The header with which a range begins, and its length; `None` where there is none.
fn read_header(
    range: Range<u64>,
    read: &ReadRange<'_>,
    scratch: &mut Scratch,
) -> Result<Option<(PageHeader, usize)>, DataError> {
    let mut length = HEADER_BYTES;
    loop {
        let end = range.end.min(range.start.saturating_add(length));
        if range.start >= end {
            return Ok(None);
        }
        read(range.start..end, &mut scratch.stored)?;
        if let Some(found) = PageHeader::parse(&scratch.stored) {
            return Ok(Some(found));
        }
        if end == range.end || length >= MAX_HEADER_BYTES {
            return Ok(None);
        }
        length *= 8;
    }
}

/// Levels of a version 1 page, which begin with their length in four bytes, and what follows.
fn take_levels(page: &[u8]) -> Option<(&[u8], &[u8])> {
    let (length, rest) = page.split_first_chunk::<4>()?;
    rest.split_at_checked(u32::from_le_bytes(*length) as usize)
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path, sync::Arc};

    use arrow::{
        array::{ArrayRef, FixedSizeListArray, Int64Array, ListArray, RecordBatch, UInt16Array},
        buffer::OffsetBuffer,
        datatypes::Field,
    };
    use parquet::{
        arrow::ArrowWriter,
        basic::{Compression, Encoding, ZstdLevel},
        file::properties::{WriterProperties, WriterPropertiesBuilder, WriterVersion},
    };

    use super::*;
    use crate::shard::{Footer, ShardFile};

    const ROW_TOKENS: usize = 9;
    const ROWS: usize = 1000;
    const RULE: RowRule = RowRule { row_tokens: ROW_TOKENS, vocab_size: Some(900) };

    fn write(path: &Path, lists: ArrayRef, properties: WriterPropertiesBuilder) {
        let batch = RecordBatch::try_from_iter([("tokens", lists)]).unwrap();
        let properties = properties.set_data_page_size_limit(500).set_write_batch_size(4).build();
        let file = fs::File::create(path).unwrap();
        let mut writer = ArrowWriter::try_new(file, batch.schema(), Some(properties)).unwrap();
        writer.write(&batch).unwrap();
        writer.close().unwrap();
    }

    fn token(at: usize) -> u16 {
        (at * 7 % 900) as u16
    }

    /// Rows without nulls, as `prepare` writes them but for the width.
    fn fixed() -> ArrayRef {
        let item = Arc::new(Field::new("element", DataType::UInt16, false));
        let tokens = UInt16Array::from_iter_values((0..ROW_TOKENS * ROWS).map(token));
        Arc::new(FixedSizeListArray::new(item, ROW_TOKENS as i32, Arc::new(tokens), None))
    }

    /// Rows and tokens that might be null, as other writers write them.
    fn nullable(null: Option<usize>) -> ArrayRef {
        let item = Arc::new(Field::new("item", DataType::Int64, true));
        let tokens: Int64Array = (0..ROW_TOKENS * ROWS)
            .map(|at| (Some(at) != null).then(|| i64::from(token(at))))
            .collect();
        let offsets = OffsetBuffer::from_lengths([ROW_TOKENS; ROWS]);
        Arc::new(ListArray::new(item, offsets, Arc::new(tokens), None))
    }

    /// Pieces of the file that were decoded the short way, of how many; none without a directory.
    fn short_way(path: &Path, rule: RowRule) -> Option<(usize, usize)> {
        let bytes = fs::read(path).unwrap();
        let read = |range: Range<u64>, out: &mut Vec<u8>| {
            out.clear();
            out.extend_from_slice(&bytes[range.start as usize..range.end as usize]);
            Ok(())
        };
        let footer = Footer::read(&ShardFile::open(path).unwrap()).unwrap();
        let mut scratch = Scratch::default();
        let column = footer.column(0);
        let mut directory = PageDirectory::find(column, rule, &read, &mut scratch).unwrap()?;
        // A piece for each page.
        directory.pieces = (0..directory.pages.len())
            .map(|at| Piece { first: directory.pages[at].first, pages: at..at + 1 })
            .collect();
        let mut decoded = Vec::new();
        for piece in 0..directory.pieces.len() {
            decoded.push(directory.decode(piece, &read, &mut scratch).unwrap());
        }
        for row in 0..ROWS {
            let places = (row * ROW_TOKENS) as u64..((row + 1) * ROW_TOKENS) as u64;
            let pieces = &decoded[directory.pieces_of(row as u64)];
            if pieces.iter().all(Option::is_some) {
                let mut tokens = Vec::new();
                for piece in pieces.iter().flatten() {
                    assert_ne!(piece.copy_to(places.clone(), &mut tokens), 0, "needed");
                }
                let expected: Vec<u32> =
                    (places.start..places.end).map(|at| u32::from(token(at as usize))).collect();
                assert_eq!(tokens, expected, "row {row}");
            }
        }
        let short = decoded.iter().flatten().count();
        Some((short, decoded.len()))
    }

    /// No common form may fall back in silence to the long way.
    #[test]
    fn pages_of_every_common_form_are_decoded_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.parquet");
        for version in [WriterVersion::PARQUET_1_0, WriterVersion::PARQUET_2_0] {
            for compression in [
                Compression::ZSTD(ZstdLevel::default()),
                Compression::SNAPPY,
                Compression::UNCOMPRESSED,
            ] {
                for dictionary in [false, true] {
                    for lists in [fixed(), nullable(None)] {
                        let properties = WriterProperties::builder()
                            .set_writer_version(version)
                            .set_compression(compression)
                            .set_dictionary_enabled(dictionary);
                        let properties = match dictionary {
                            true => properties,
                            false => properties.set_encoding(Encoding::PLAIN),
                        };
                        write(&path, lists, properties);
                        let (short, all) = short_way(&path, RULE).expect("a directory");
                        assert_eq!(short, all, "{version:?} {compression:?} {dictionary}");
                        assert!(all > 20, "many pages");
                        // What is wrong is left to the long way.
                        let few = RowRule { vocab_size: Some(899), ..RULE };
                        assert!(short_way(&path, few).is_none_or(|(short, all)| short < all));
                        let longer = RowRule { row_tokens: ROW_TOKENS + 1, ..RULE };
                        assert_eq!(short_way(&path, longer), None);
                    }
                }
            }
        }
    }

    #[test]
    fn pages_with_a_null_or_of_another_form_are_left_to_the_long_way() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.parquet");
        for dictionary in [false, true] {
            for null in [0, 4567, ROW_TOKENS * ROWS - 1] {
                let properties = WriterProperties::builder().set_dictionary_enabled(dictionary);
                write(&path, nullable(Some(null)), properties);
                let (short, all) = short_way(&path, RULE).expect("a directory");
                assert_eq!(short, all - 1, "all but the page with the null");
            }
        }
        let delta = WriterProperties::builder()
            .set_dictionary_enabled(false)
            .set_encoding(Encoding::DELTA_BINARY_PACKED);
        write(&path, fixed(), delta);
        assert_eq!(short_way(&path, RULE), None);
        let lz4 = WriterProperties::builder().set_compression(Compression::LZ4_RAW);
        write(&path, fixed(), lz4);
        assert_eq!(short_way(&path, RULE), None);
    }
}
