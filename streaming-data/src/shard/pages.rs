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
//! | `header` | the header of a page |
//! | `levels` | runs and packed values; the levels of a valid page |
//! | `values` | tokens of PLAIN pages and of dictionaries |
//! | `decompress` | pages out of their compression |

use std::ops::Range;

use arrow_schema::DataType;
use parquet::{basic::Type as PhysicalType, file::metadata::ColumnChunkMetaData};

use super::{RowRule, chunk::column_range, tokens::DecodedTokens};
use crate::{cache::memory::Weigh, error::DataError};

mod decompress;
mod header;
mod levels;
mod values;

pub(crate) use decompress::Scratch;

use decompress::Codec;
use header::encoding;
pub(crate) use header::{PageContent, PageHeader};
use levels::{are_all, are_rows};
use values::{Dictionary, Width, append_plain};

/// Reads a range of the file into a buffer, which then holds that and nothing else.
pub(super) type ReadRange<'a> = dyn Fn(Range<u64>, &mut Vec<u8>) -> Result<(), DataError> + 'a;

/// Bytes that are read to find the header of a page; statistics can make a header longer.
pub(crate) const HEADER_BYTES: u64 = 512;

/// The longest header that is looked for.
pub(crate) const MAX_HEADER_BYTES: u64 = 64 << 10;

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
    /// The place of its first token in the row group.
    first: u64,
    tokens: usize,
    form: Form,
    is_plain: bool,
}

#[derive(Debug, Clone, Copy)]
enum Form {
    /// Levels, each preceded by their length, and values, compressed together.
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
    /// The errors of `read`.
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

    /// The pieces that hold a row of the group.
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
    /// The errors of `read`.
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
    /// The errors of `read`.
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

/// Levels of a version 1 page, which begin with their length in four bytes, and the rest of the page.
fn take_levels(page: &[u8]) -> Option<(&[u8], &[u8])> {
    let (length, rest) = page.split_first_chunk::<4>()?;
    rest.split_at_checked(u32::from_le_bytes(*length) as usize)
}

#[cfg(test)]
mod tests;
