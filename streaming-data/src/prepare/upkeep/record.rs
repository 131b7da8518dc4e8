//! Records of inputs and their documents, which are kept when the texts are gone, and their bytes.
//!
//! Records come in the order of the stream: an input begins, its documents follow, it ends. No record has a number
//! that shifts when something is inserted: the place of a document is written as its distance from the document
//! before, so that one line more changes one record and the end of its input.

use std::{
    io::{self, ErrorKind, Read},
    sync::Arc,
};

use xxhash_rust::xxh3::Xxh3;

use crate::prepare::choose::duplicates::{BANDS, Signature};

/// A record of the stream: the beginning of an input, a document, or the end of an input.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Record {
    /// An input begins: the bytes of its path.
    Begin(Vec<u8>),
    Document(Document),
    End(InputEnd),
}

/// A document, which is not empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Document {
    /// Number of its line or row; 0 of a text.
    pub place: u64,
    /// Hash of its text as it was read.
    pub source: u128,
    pub judged: Judged,
    pub fate: Fate,
    /// Bytes of its text as it was read, where they are noted for a report.
    pub bytes: Option<u64>,
}

/// The verdict of lists and filters on a document, independent of other documents.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Judged {
    /// It is on the list.
    Excluded,
    /// The first rule that it broke.
    Rejected(Arc<str>),
    /// It may be kept; the signature where documents are compared.
    Chosen(Option<Signature>),
}

/// The fate of a document that lists and filters keep, given the other documents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fate {
    /// In the stream, with this number of tokens, including the one that ends it.
    Kept { tokens: u64 },
    /// Its text, or its words, occurred before.
    Copy,
    /// It is a near copy of another.
    NearCopy,
    /// Not known, or lists and filters decided.
    Open,
}

/// Totals of an input: its size, and its documents by digest and counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct InputEnd {
    /// Size of the input.
    pub bytes: u64,
    /// [`SourceDigest`] of the input's documents.
    pub digest: u128,
    pub documents: u64,
    pub empty: u64,
    pub nulls: u64,
    pub broken: u64,
    pub read: WasRead,
}

/// How far an input was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WasRead {
    /// The input was read to its end.
    Whole,
    /// It could not be read, or not to its end.
    InPart,
}

/// Hash of the documents of an input, with their places.
#[derive(Default)]
pub(crate) struct SourceDigest {
    hasher: Option<Box<Xxh3>>,
    documents: u64,
}

impl SourceDigest {
    pub(crate) fn update(&mut self, place: u64, source: u128) {
        let hasher = self.hasher.get_or_insert_default();
        hasher.update(&place.to_le_bytes());
        hasher.update(&source.to_le_bytes());
        self.documents += 1;
    }

    pub(crate) fn value(&self) -> u128 {
        self.hasher.as_ref().map_or(0, |hasher| hasher.digest128())
    }

    pub(crate) fn documents(&self) -> u64 {
        self.documents
    }
}

const BEGIN: u8 = 0;
const END: u8 = 1;
const EXCLUDED: u8 = 2;
const REJECTED: u8 = 3;
const CHOSEN: u8 = 4;
/// Added to these three where a document's length follows its hash.
const WITH_BYTES: u8 = 3;
/// The bits of all kinds.
const KIND_BITS: u8 = 7;

/// Bits of a [`CHOSEN`] record: the fate, and the parts of the signature that are present.
const FATE_SHIFT: u8 = 3;
const FATE_BITS: u8 = 3;
const HAS_SIGNATURE: u8 = 1 << 5;
/// The hash of the signature equals the hash of the source.
const SAME_AS_SOURCE: u8 = 1 << 6;
const HAS_BANDS: u8 = 1 << 7;

/// The longest path or rule that a record may have, in bytes.
const LONGEST: u64 = 1 << 20;

/// Values of earlier records to which a record refers.
#[derive(Debug, Default)]
struct Context {
    /// Place of the document before, in the same input.
    place: u64,
    /// Path of the input before, in the same part.
    path: Vec<u8>,
    /// In the order in which they come up in the part.
    rules: Vec<Arc<str>>,
}

impl Context {
    /// A new part is read and written without the parts before it, except for places.
    fn next_part(&mut self) {
        self.path.clear();
        self.rules.clear();
    }
}

/// Records to bytes.
#[derive(Debug, Default)]
pub(crate) struct RecordWriter {
    context: Context,
    bytes: Vec<u8>,
}

impl RecordWriter {
    pub(crate) fn write(&mut self, record: &Record) {
        match record {
            Record::Begin(path) => {
                let shared = self.context.path.iter().zip(path).take_while(|(a, b)| a == b).count();
                self.bytes.push(BEGIN);
                self.number(shared as u64);
                self.number((path.len() - shared) as u64);
                self.bytes.extend_from_slice(&path[shared..]);
                self.context.path.clone_from(path);
                self.context.place = 0;
            }
            Record::Document(document) => self.document(document),
            Record::End(end) => {
                self.bytes.push(END);
                self.bytes.push(u8::from(end.read == WasRead::InPart));
                self.bytes.extend_from_slice(&end.digest.to_le_bytes());
                for number in [end.bytes, end.documents, end.empty, end.nulls, end.broken] {
                    self.number(number);
                }
            }
        }
    }

    fn document(&mut self, document: &Document) {
        let tag = match &document.judged {
            Judged::Excluded => EXCLUDED,
            Judged::Rejected(_) => REJECTED,
            Judged::Chosen(signature) => {
                let fate = match document.fate {
                    Fate::Kept { .. } => 0,
                    Fate::Copy => 1,
                    Fate::NearCopy => 2,
                    Fate::Open => 3,
                };
                let parts = signature.map_or(0, |signature| {
                    let same = signature.copies == document.source;
                    HAS_SIGNATURE
                        | if same { SAME_AS_SOURCE } else { 0 }
                        | if signature.near.is_some() { HAS_BANDS } else { 0 }
                });
                CHOSEN | fate << FATE_SHIFT | parts
            }
        };
        let with_bytes = if document.bytes.is_some() { WITH_BYTES } else { 0 };
        self.bytes.push(tag + with_bytes);
        self.number(document.place.wrapping_sub(self.context.place));
        self.context.place = document.place;
        self.bytes.extend_from_slice(&document.source.to_le_bytes());
        document.bytes.into_iter().for_each(|bytes| self.number(bytes));
        match &document.judged {
            Judged::Excluded => {}
            Judged::Rejected(rule) => {
                let known = self.context.rules.iter().position(|known| known == rule);
                self.number(known.unwrap_or(self.context.rules.len()) as u64);
                if known.is_none() {
                    self.number(rule.len() as u64);
                    self.bytes.extend_from_slice(rule.as_bytes());
                    self.context.rules.push(Arc::clone(rule));
                }
            }
            Judged::Chosen(signature) => {
                if let Some(signature) = signature {
                    if signature.copies != document.source {
                        self.bytes.extend_from_slice(&signature.copies.to_le_bytes());
                    }
                    for band in signature.near.into_iter().flatten() {
                        self.bytes.extend_from_slice(&band.to_le_bytes());
                    }
                }
                if let Fate::Kept { tokens } = document.fate {
                    self.number(tokens);
                }
            }
        }
    }

    /// A number in as many bytes as it needs (LEB128).
    pub(crate) fn number(&mut self, mut number: u64) {
        while number >= 0x80 {
            self.bytes.push(number as u8 | 0x80);
            number >>= 7;
        }
        self.bytes.push(number as u8);
    }

    /// Takes the written bytes; the records that follow are in the next part.
    pub(crate) fn take_part(&mut self) -> Vec<u8> {
        self.context.next_part();
        std::mem::take(&mut self.bytes)
    }

    /// Takes the written bytes; the records that follow are in the same part.
    pub(crate) fn take_bytes(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.bytes)
    }

    /// Bytes that were not taken.
    pub(crate) fn len(&self) -> usize {
        self.bytes.len()
    }
}

/// Bytes to records.
#[derive(Debug, Default)]
pub(crate) struct RecordReader {
    context: Context,
}

impl RecordReader {
    /// Starts the next part: the records read from here on belong to it.
    pub(crate) fn next_part(&mut self) {
        self.context.next_part();
    }

    /// The next record; none at the end of the bytes.
    ///
    /// # Errors
    /// Errors of reading, or [`ErrorKind::InvalidData`] for bytes that are no records.
    pub(crate) fn read(&mut self, bytes: &mut impl Read) -> io::Result<Option<Record>> {
        let mut tag = [0];
        if bytes.read(&mut tag)? == 0 {
            return Ok(None);
        }
        let record = match tag[0] {
            BEGIN => Record::Begin(self.begin(bytes)?),
            END => {
                let mut how = [0];
                bytes.read_exact(&mut how)?;
                let digest = wide(bytes)?;
                let mut next = || number(bytes);
                Record::End(InputEnd {
                    read: if how[0] == 0 { WasRead::Whole } else { WasRead::InPart },
                    digest,
                    bytes: next()?,
                    documents: next()?,
                    empty: next()?,
                    nulls: next()?,
                    broken: next()?,
                })
            }
            tag => Record::Document(self.document(tag, bytes)?),
        };
        Ok(Some(record))
    }

    fn begin(&mut self, bytes: &mut impl Read) -> io::Result<Vec<u8>> {
        let shared = number(bytes)?;
        if shared > self.context.path.len() as u64 {
            return Err(wrong("a path that begins as none before"));
        }
        let mut path = self.context.path[..shared as usize].to_vec();
        path.extend(text(bytes)?);
        self.context.path.clone_from(&path);
        self.context.place = 0;
        Ok(path)
    }

    fn document(&mut self, tag: u8, bytes: &mut impl Read) -> io::Result<Document> {
        let place = self.context.place.wrapping_add(number(bytes)?);
        self.context.place = place;
        let source = wide(bytes)?;
        let has_bytes = tag & KIND_BITS > CHOSEN;
        let (tag, length) = match has_bytes {
            true => (tag - WITH_BYTES, Some(number(bytes)?)),
            false => (tag, None),
        };
        let (mut judged, mut fate) = (Judged::Excluded, Fate::Open);
        match tag {
            EXCLUDED => {}
            REJECTED => {
                let at = number(bytes)?;
                let rules = &mut self.context.rules;
                if at == rules.len() as u64 {
                    let rule = String::from_utf8(text(bytes)?).map_err(|_| wrong("a rule"))?;
                    rules.push(rule.into());
                }
                let rule = usize::try_from(at).ok().and_then(|at| rules.get(at));
                judged = Judged::Rejected(Arc::clone(rule.ok_or_else(|| wrong("a rule"))?));
            }
            tag if tag & CHOSEN != 0 && tag & 0b11 == 0 => {
                let mut signature = None;
                if tag & HAS_SIGNATURE != 0 {
                    let copies = if tag & SAME_AS_SOURCE != 0 { source } else { wide(bytes)? };
                    let near = if tag & HAS_BANDS != 0 { Some(bands(bytes)?) } else { None };
                    signature = Some(Signature { copies, near });
                }
                judged = Judged::Chosen(signature);
                fate = match tag >> FATE_SHIFT & FATE_BITS {
                    0 => Fate::Kept { tokens: number(bytes)? },
                    1 => Fate::Copy,
                    2 => Fate::NearCopy,
                    _ => Fate::Open,
                };
            }
            _ => return Err(wrong("a record of no kind")),
        }
        Ok(Document { place, source, judged, fate, bytes: length })
    }
}

/// A number that [`RecordWriter::number`] wrote.
pub(crate) fn number(bytes: &mut impl Read) -> io::Result<u64> {
    let mut number = 0_u64;
    for shift in (0..64).step_by(7) {
        let mut byte = [0];
        bytes.read_exact(&mut byte)?;
        number |= u64::from(byte[0] & 0x7f) << shift;
        if byte[0] & 0x80 == 0 {
            return Ok(number);
        }
    }
    Err(wrong("a number of more than 64 bits"))
}

fn wide(bytes: &mut impl Read) -> io::Result<u128> {
    let mut wide = [0; 16];
    bytes.read_exact(&mut wide)?;
    Ok(u128::from_le_bytes(wide))
}

fn bands(bytes: &mut impl Read) -> io::Result<[u64; BANDS]> {
    let mut bands = [0; BANDS];
    for band in &mut bands {
        let mut value = [0; 8];
        bytes.read_exact(&mut value)?;
        *band = u64::from_le_bytes(value);
    }
    Ok(bands)
}

fn text(bytes: &mut impl Read) -> io::Result<Vec<u8>> {
    let length = number(bytes)?;
    if length > LONGEST {
        return Err(wrong("a name of more than a megabyte"));
    }
    let mut text = vec![0; length as usize];
    bytes.read_exact(&mut text)?;
    Ok(text)
}

fn wrong(found: &str) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, format!("found {found}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn records() -> Vec<Record> {
        let document = |place, source, judged, fate| {
            // Some documents of each kind have a length.
            let bytes = (place % 2 == 0 || place == 3).then_some(place << 9);
            Record::Document(Document { place, source, judged, fate, bytes })
        };
        let near = Some(std::array::from_fn(|at| 1 << at));
        let signature = |copies, near| Judged::Chosen(Some(Signature { copies, near }));
        let end = InputEnd {
            bytes: 1 << 40,
            digest: 7,
            documents: 3,
            empty: 1,
            nulls: 200,
            broken: 0,
            read: WasRead::InPart,
        };
        vec![
            Record::Begin(b"in/a.txt".to_vec()),
            document(0, 1, Judged::Excluded, Fate::Open),
            Record::End(end),
            Record::Begin(b"in/b.jsonl".to_vec()),
            document(3, u128::MAX, Judged::Rejected("c4.min_sentences".into()), Fate::Open),
            document(4, 9, Judged::Rejected("gopher.min_words".into()), Fate::Open),
            document(900, 2, Judged::Rejected("c4.min_sentences".into()), Fate::Open),
            document(901, 3, Judged::Chosen(None), Fate::Kept { tokens: 1 << 33 }),
            document(902, 4, signature(4, near), Fate::Copy),
            document(903, 4, signature(5, None), Fate::NearCopy),
            document(904, 4, signature(5, near), Fate::Open),
            Record::End(InputEnd { read: WasRead::Whole, ..end }),
        ]
    }

    #[test]
    fn records_are_read_back_in_one_part_and_in_many() {
        for parts in [1, 3, 12] {
            let (mut writer, mut reader) = (RecordWriter::default(), RecordReader::default());
            for part in records().chunks(12_usize.div_ceil(parts)) {
                part.iter().for_each(|record| writer.write(record));
                let bytes = writer.take_part();
                let mut unread = &bytes[..];
                reader.next_part();
                for record in part {
                    assert_eq!(reader.read(&mut unread).unwrap().as_ref(), Some(record));
                }
                assert_eq!(reader.read(&mut unread).unwrap(), None);
            }
        }
    }

    #[test]
    fn an_insertion_changes_no_record_behind_the_next() {
        let bytes_of = |places: &[u64]| -> Vec<Vec<u8>> {
            let mut writer = RecordWriter::default();
            let mut bytes = Vec::new();
            for &place in places {
                let judged = Judged::Chosen(None);
                let fate = Fate::Kept { tokens: 5 };
                let document = Document { place, source: 1, judged, fate, bytes: Some(9) };
                writer.write(&Record::Document(document));
                bytes.push(writer.take_bytes());
            }
            bytes
        };
        assert_eq!(bytes_of(&[1, 2, 3, 4])[1..], bytes_of(&[1, 2, 3, 4, 5])[2..]);
    }

    #[test]
    fn bytes_that_are_no_records_are_errors() {
        let mut writer = RecordWriter::default();
        records().iter().for_each(|record| writer.write(record));
        let bytes = writer.take_part();
        for end in 1..bytes.len() {
            let (mut reader, mut unread) = (RecordReader::default(), &bytes[..end]);
            while let Ok(Some(_)) = reader.read(&mut unread) {}
        }
        for wrong in [&[9][..], &[1, 0], &[0, 1, 1, 7], &[3, 0], &[0, 0, 255, 255, 255, 255, 255]] {
            assert!(RecordReader::default().read(&mut &wrong[..]).is_err(), "{wrong:?}");
        }
    }
}
