//! Headers of pages, as far as a column of tokens needs them.
//!
//! The Parquet format writes them in Thrift's compact protocol (apache/thrift, "Thrift Compact
//! protocol encoding"; the fields are defined in parquet.thrift, `PageHeader`). The general reader
//! keeps them to itself and hands out pages one after the other, decompressed into memory of their
//! own; to go straight to the page that holds a row one must know where the pages are.
//!
//! Contract: any bytes are answered, with [`None`] for bytes that are no header or are cut off, without
//! panicking, recursing deeply or taking memory.

/// The header of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PageHeader {
    /// Size of the page's content in the file.
    pub(crate) compressed_bytes: usize,
    /// Size of the page's content when it is decompressed.
    pub(crate) uncompressed_bytes: usize,
    pub(crate) content: PageContent,
}

/// The kind of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PageContent {
    /// Levels and values compressed together, levels preceded by their length.
    Data {
        values: usize,
        encoding: i32,
        repetition_encoding: i32,
        definition_encoding: i32,
    },
    /// Levels outside of the compressed part.
    DataV2 {
        values: usize,
        encoding: i32,
        repetition_bytes: usize,
        definition_bytes: usize,
        is_compressed: bool,
    },
    Dictionary {
        values: usize,
        encoding: i32,
    },
    /// An index page, or one of a kind unknown here.
    Other,
}

/// Numbers of `Encoding` in parquet.thrift.
pub(super) mod encoding {
    pub(in super::super) const PLAIN: i32 = 0;
    pub(in super::super) const PLAIN_DICTIONARY: i32 = 2;
    pub(in super::super) const RLE: i32 = 3;
    pub(in super::super) const RLE_DICTIONARY: i32 = 8;
}

impl PageHeader {
    /// Parses the header with which the bytes begin, and says how long it is.
    pub(crate) fn parse(bytes: &[u8]) -> Option<(PageHeader, usize)> {
        let mut input = Compact { bytes, at: 0 };
        let (mut kind, mut uncompressed, mut compressed) = (None, None, None);
        let (mut data, mut data_v2, mut dictionary) = (None, None, None);
        input.fields(|input, field, of| {
            match (field, of) {
                (1, I32) => kind = Some(input.int()?),
                (2, I32) => uncompressed = Some(input.size()?),
                (3, I32) => compressed = Some(input.size()?),
                (5, STRUCT) => data = Some(input.data_header()?),
                (7, STRUCT) => dictionary = Some(input.dictionary_header()?),
                (8, STRUCT) => data_v2 = Some(input.data_header_v2()?),
                _ => input.skip(of, MAX_DEPTH)?,
            }
            Some(())
        })?;
        let content = match kind? {
            0 => data?,
            2 => dictionary?,
            3 => data_v2?,
            _ => PageContent::Other,
        };
        let header = PageHeader {
            compressed_bytes: compressed?,
            uncompressed_bytes: uncompressed?,
            content,
        };
        Some((header, input.at))
    }
}

/// Wire types of the compact protocol; a boolean field's value is its type.
const TRUE: u8 = 1;
const FALSE: u8 = 2;
const BYTE: u8 = 3;
const I16: u8 = 4;
const I32: u8 = 5;
const I64: u8 = 6;
const DOUBLE: u8 = 7;
const BINARY: u8 = 8;
const LIST: u8 = 9;
const SET: u8 = 10;
const MAP: u8 = 11;
const STRUCT: u8 = 12;

/// Structures within structures that are skipped; statistics have one level.
const MAX_DEPTH: usize = 8;

struct Compact<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Compact<'_> {
    fn data_header(&mut self) -> Option<PageContent> {
        let (mut values, mut encoding, mut definition, mut repetition) = (None, None, None, None);
        self.fields(|input, field, of| {
            match (field, of) {
                (1, I32) => values = Some(input.size()?),
                (2, I32) => encoding = Some(input.int()?),
                (3, I32) => definition = Some(input.int()?),
                (4, I32) => repetition = Some(input.int()?),
                _ => input.skip(of, MAX_DEPTH)?,
            }
            Some(())
        })?;
        Some(PageContent::Data {
            values: values?,
            encoding: encoding?,
            repetition_encoding: repetition?,
            definition_encoding: definition?,
        })
    }

    fn data_header_v2(&mut self) -> Option<PageContent> {
        let (mut values, mut encoding, mut definition, mut repetition) = (None, None, None, None);
        let mut is_compressed = true;
        self.fields(|input, field, of| {
            match (field, of) {
                (1, I32) => values = Some(input.size()?),
                (4, I32) => encoding = Some(input.int()?),
                (5, I32) => definition = Some(input.size()?),
                (6, I32) => repetition = Some(input.size()?),
                (7, TRUE | FALSE) => is_compressed = of == TRUE,
                _ => input.skip(of, MAX_DEPTH)?,
            }
            Some(())
        })?;
        Some(PageContent::DataV2 {
            values: values?,
            encoding: encoding?,
            repetition_bytes: repetition?,
            definition_bytes: definition?,
            is_compressed,
        })
    }

    fn dictionary_header(&mut self) -> Option<PageContent> {
        let (mut values, mut encoding) = (None, None);
        self.fields(|input, field, of| {
            match (field, of) {
                (1, I32) => values = Some(input.size()?),
                (2, I32) => encoding = Some(input.int()?),
                _ => input.skip(of, MAX_DEPTH)?,
            }
            Some(())
        })?;
        Some(PageContent::Dictionary { values: values?, encoding: encoding? })
    }

    /// Reads a structure: `take` reads or skips the value of each field, given its number and type.
    fn fields(&mut self, mut take: impl FnMut(&mut Self, i64, u8) -> Option<()>) -> Option<()> {
        let mut field = 0_i64;
        loop {
            let byte = self.byte()?;
            if byte == 0 {
                return Some(());
            }
            // A step from the number of the field before, or zero and the number itself.
            field = match byte >> 4 {
                0 => self.zigzag()?,
                step => field.checked_add(i64::from(step))?,
            };
            take(self, field, byte & 0x0f)?;
        }
    }

    fn skip(&mut self, of: u8, depth: usize) -> Option<()> {
        match of {
            TRUE | FALSE => Some(()),
            BYTE => self.advance(1),
            I16 | I32 | I64 => self.varint().map(drop),
            DOUBLE => self.advance(8),
            BINARY => {
                let length = self.varint()?;
                self.advance(usize::try_from(length).ok()?)
            }
            LIST | SET => {
                let byte = self.byte()?;
                let count = match byte >> 4 {
                    15 => self.varint()?,
                    count => u64::from(count),
                };
                self.skip_all(count, &[byte & 0x0f], depth)
            }
            MAP => match self.varint()? {
                0 => Some(()),
                count => {
                    let byte = self.byte()?;
                    self.skip_all(count, &[byte >> 4, byte & 0x0f], depth)
                }
            },
            STRUCT => {
                let depth = depth.checked_sub(1)?;
                self.fields(|input, _, of| input.skip(of, depth))
            }
            _ => None,
        }
    }

    /// Skips `count` times elements of the types; within a collection a boolean takes a byte.
    fn skip_all(&mut self, count: u64, types: &[u8], depth: usize) -> Option<()> {
        let depth = depth.checked_sub(1)?;
        // Every element takes a byte at least, so that the loop ends with the input.
        for _ in 0..count {
            for &of in types {
                match of {
                    TRUE | FALSE => self.advance(1)?,
                    of => self.skip(of, depth)?,
                }
            }
        }
        Some(())
    }

    fn advance(&mut self, count: usize) -> Option<()> {
        self.at = self.at.checked_add(count).filter(|&at| at <= self.bytes.len())?;
        Some(())
    }

    fn byte(&mut self) -> Option<u8> {
        let byte = *self.bytes.get(self.at)?;
        self.at += 1;
        Some(byte)
    }

    fn varint(&mut self) -> Option<u64> {
        let mut value = 0_u64;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            value |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Some(value);
            }
        }
        None
    }

    fn zigzag(&mut self) -> Option<i64> {
        let value = self.varint()?;
        Some((value >> 1) as i64 ^ -((value & 1) as i64))
    }

    fn int(&mut self) -> Option<i32> {
        i32::try_from(self.zigzag()?).ok()
    }

    /// A 32-bit integer that counts something.
    fn size(&mut self) -> Option<usize> {
        usize::try_from(self.int()?).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A header of a version 1 page with statistics, as they are written.
    const DATA: [u8; 33] = [
        0x15, 0x00, // 1: type 0
        0x15, 0xa0, 0x1f, // 2: 2000 bytes uncompressed
        0x15, 0xd0, 0x0f, // 3: 1000 bytes
        0x15, 0x02, // 4: a checksum
        0x1c, // 5: data page header
        0x15, 0xc8, 0x01, // 1: 100 values
        0x15, 0x10, // 2: encoding 8
        0x15, 0x06, // 3: definition levels 3
        0x15, 0x06, // 4: repetition levels 3
        0x1c, // 5: statistics
        0x36, 0x00, // 3: null count
        0x28, 0x04, 1, 2, 3, 4,    // 5: a maximum of four bytes
        0x00, // end of statistics
        0x00, // end of data page header
        0x00, // end
        0xff, // not part of it
    ];

    #[test]
    fn headers_of_all_kinds_are_read_and_their_length_told() {
        let expected = PageHeader {
            compressed_bytes: 1000,
            uncompressed_bytes: 2000,
            content: PageContent::Data {
                values: 100,
                encoding: encoding::RLE_DICTIONARY,
                repetition_encoding: encoding::RLE,
                definition_encoding: encoding::RLE,
            },
        };
        assert_eq!(PageHeader::parse(&DATA), Some((expected, DATA.len() - 1)));

        // Version 2, not compressed: field 8, reached by a step of 5.
        let v2 = [
            0x15, 0x06, 0x15, 0x08, 0x15, 0x08, 0x5c, 0x15, 0x14, 0x15, 0x00, 0x15, 0x02, 0x15,
            0x00, 0x15, 0x04, 0x15, 0x06, 0x12, 0x00, 0x00,
        ];
        let (header, length) = PageHeader::parse(&v2).unwrap();
        assert_eq!((header.compressed_bytes, header.uncompressed_bytes, length), (4, 4, v2.len()));
        let content = PageContent::DataV2 {
            values: 10,
            encoding: encoding::PLAIN,
            repetition_bytes: 3,
            definition_bytes: 2,
            is_compressed: false,
        };
        assert_eq!(header.content, content);

        let dictionary =
            [0x15, 0x04, 0x15, 0x08, 0x15, 0x08, 0x4c, 0x15, 0x14, 0x15, 0x04, 0x11, 0x00, 0x00];
        let (header, length) = PageHeader::parse(&dictionary).unwrap();
        let content = PageContent::Dictionary { values: 10, encoding: encoding::PLAIN_DICTIONARY };
        assert_eq!((header.content, length), (content, dictionary.len()));
    }

    #[test]
    fn what_is_cut_off_or_no_header_is_answered_with_none() {
        for length in 0..DATA.len() - 1 {
            assert_eq!(PageHeader::parse(&DATA[..length]), None, "{length} bytes");
        }
        // A negative size, a list that claims 2^63 elements, structures without an end.
        assert_eq!(PageHeader::parse(&[0x15, 0x00, 0x15, 0x01, 0x15, 0x02, 0x00]), None);
        let mut list = vec![0x19, 0xf5];
        list.extend([0xff; 9]);
        assert_eq!(PageHeader::parse(&list), None);
        assert_eq!(PageHeader::parse(&[0x9c; 10_000]), None);
        // With any single byte changed there is an answer, right or wrong, and no panic.
        for at in 0..DATA.len() {
            for value in 0..=255 {
                let mut bytes = DATA;
                bytes[at] = value;
                if let Some((_, length)) = PageHeader::parse(&bytes) {
                    assert!(length <= bytes.len());
                }
            }
        }
    }
}
