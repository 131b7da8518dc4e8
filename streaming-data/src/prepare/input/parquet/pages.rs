//! Pages of a column of text, each looked at before it is decompressed.
//!
//! The general reader takes a page for as large as its header says, and decompresses some kinds
//! without regard to that: a file of a few kilobytes may take any memory. So the header of every
//! page is read here first, and compared with [`PAGE_BYTES_LIMIT`]; what can only be found out by
//! decompressing is decompressed once to be counted.

use std::{
    fs::File,
    io::{self, Read},
    ops::Range,
};

use flate2::bufread::MultiGzDecoder;
use parquet::{
    basic::Compression,
    column::page::{Page, PageMetadata, PageReader},
    errors::ParquetError,
    file::reader::{ChunkReader, RowGroupReader},
};

use crate::{
    prepare::PAGE_BYTES_LIMIT,
    shard::{HEADER_BYTES, MAX_HEADER_BYTES, PageContent, PageHeader},
};

/// The most that a byte of LZ4 can become.
const LZ4_RATIO: u64 = 255;

/// The pages of a column of a row group.
pub(super) struct BoundedPages {
    pages: Box<dyn PageReader>,
    file: File,
    compression: Compression,
    /// The column from the next page on.
    left: Range<u64>,
}

impl BoundedPages {
    /// The pages of a leaf column; `file` is the one that the row group is of.
    pub(super) fn new(
        group: &dyn RowGroupReader,
        leaf: usize,
        file: &File,
    ) -> Result<BoundedPages, ParquetError> {
        let column = group.metadata().column(leaf);
        let (start, bytes) = column.byte_range();
        Ok(BoundedPages {
            pages: group.get_column_page_reader(leaf)?,
            file: file.try_clone()?,
            compression: column.compression(),
            left: start..start.saturating_add(bytes),
        })
    }

    /// Whether the next page may be decompressed. Pages that hold no values are passed over, as they
    /// are by the reader.
    fn check_next(&mut self) -> Result<(), ParquetError> {
        while !self.left.is_empty() {
            let (header, content) = self.header()?;
            let end = content.saturating_add(header.compressed_bytes as u64);
            if end > self.left.end {
                return Err(ParquetError::EOF(format!("a page ends at {end}, outside its column")));
            }
            self.left.start = end;
            if header.content != PageContent::Other {
                return self.check(&header, content);
            }
        }
        Ok(())
    }

    /// The header of the next page, and where its content begins.
    fn header(&self) -> Result<(PageHeader, u64), ParquetError> {
        let start = self.left.start;
        for most_bytes in [HEADER_BYTES, MAX_HEADER_BYTES] {
            let bytes = (self.left.end - start).min(most_bytes) as usize;
            let bytes = self.file.get_bytes(start, bytes)?;
            if let Some((header, header_bytes)) = PageHeader::parse(&bytes) {
                return Ok((header, start.saturating_add(header_bytes as u64)));
            }
        }
        Err(ParquetError::General(format!("there is no header of a page at {start}")))
    }

    fn check(&self, header: &PageHeader, content: u64) -> Result<(), ParquetError> {
        let most = |bytes: usize, most: u64| match bytes as u64 <= most {
            true => Ok(()),
            false => Err(ParquetError::General(format!(
                "a page of {bytes} bytes, expected at most {most}: write smaller pages"
            ))),
        };
        most(header.uncompressed_bytes, PAGE_BYTES_LIMIT)?;
        most(header.compressed_bytes, PAGE_BYTES_LIMIT)?;
        match self.compression {
            Compression::GZIP(_) => self.check_gzip(header, content),
            Compression::LZ4 => most(header.compressed_bytes, PAGE_BYTES_LIMIT / LZ4_RATIO),
            _ => Ok(()),
        }
    }

    /// Whether Gzip becomes as many bytes as the header says.
    fn check_gzip(&self, header: &PageHeader, content: u64) -> Result<(), ParquetError> {
        let levels = match header.content {
            PageContent::DataV2 { is_compressed: false, .. } => return Ok(()),
            PageContent::DataV2 { repetition_bytes, definition_bytes, .. } => {
                repetition_bytes.saturating_add(definition_bytes)
            }
            _ => 0,
        };
        // Sizes that do not add up are left to the reader, which reports them.
        let (Some(stored), Some(plain)) = (
            header.compressed_bytes.checked_sub(levels),
            header.uncompressed_bytes.checked_sub(levels),
        ) else {
            return Ok(());
        };
        let stored = self.file.get_bytes(content.saturating_add(levels as u64), stored)?;
        let mut found = MultiGzDecoder::new(&stored[..]).take(plain as u64 + 1);
        if io::copy(&mut found, &mut io::sink())? > plain as u64 {
            let wrong = format!("a page has more than the {plain} bytes that its header says");
            return Err(ParquetError::General(wrong));
        }
        Ok(())
    }
}

impl PageReader for BoundedPages {
    fn get_next_page(&mut self) -> Result<Option<Page>, ParquetError> {
        self.check_next()?;
        self.pages.get_next_page()
    }

    fn peek_next_page(&mut self) -> Result<Option<PageMetadata>, ParquetError> {
        self.pages.peek_next_page()
    }

    fn skip_next_page(&mut self) -> Result<(), ParquetError> {
        self.check_next()?;
        self.pages.skip_next_page()
    }
}

impl Iterator for BoundedPages {
    type Item = Result<Page, ParquetError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.get_next_page().transpose()
    }
}
