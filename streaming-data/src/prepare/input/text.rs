//! Reading UTF-8 text: a document at once, or any piece of it alone.
//!
//! A document that is not UTF-8 is skipped whole, and a large one is not held in memory: so it is
//! checked before its first token is made, and both passes read it in pieces, on any thread and in
//! any order. A piece begins and ends at the first character boundary at or after its nominal
//! ends: both neighbours apply the one rule to the same three bytes, so that every byte belongs to
//! exactly one piece, and the document is UTF-8 if and only if every piece is.

use std::{
    io::{Read, Seek, SeekFrom},
    ops::Range,
    path::Path,
};

use super::skip::SkipReason;

/// A character of UTF-8 has at most this many bytes after its first.
const MAX_CONTINUATION_BYTES: u64 = 3;

/// Reads a whole document.
pub(crate) fn read_document(path: &Path) -> Result<String, SkipReason> {
    let mut bytes = Vec::new();
    tidemill_files::open(path)?.read_to_end(&mut bytes)?;
    decode(bytes, 0)
}

/// Reads the piece of a document of `document_bytes` whose nominal ends are `piece`, at least
/// [`MAX_CONTINUATION_BYTES`] apart except for the last piece.
pub(crate) fn read_piece(
    path: &Path,
    document_bytes: u64,
    piece: Range<u64>,
) -> Result<String, SkipReason> {
    let mut file = tidemill_files::open(path)?;
    let found = file.metadata()?.len();
    if found != document_bytes {
        return Err(SkipReason::Changed { expected: document_bytes, found });
    }
    file.seek(SeekFrom::Start(piece.start))?;
    let nominal = (piece.end - piece.start) as usize;
    let behind = MAX_CONTINUATION_BYTES.min(document_bytes - piece.end) as usize;
    let mut bytes = vec![0; nominal + behind];
    file.read_exact(&mut bytes)?;
    bytes.truncate(nominal + continuation_bytes(&bytes[nominal..]));
    let before = if piece.start == 0 { 0 } else { continuation_bytes(&bytes) };
    bytes.drain(..before);
    decode(bytes, piece.start + before as u64)
}

/// Length of the run of continuation bytes (10xxxxxx) with which the bytes begin, at most
/// [`MAX_CONTINUATION_BYTES`].
fn continuation_bytes(bytes: &[u8]) -> usize {
    let first = bytes.iter().take(MAX_CONTINUATION_BYTES as usize);
    first.take_while(|&byte| byte & 0b1100_0000 == 0b1000_0000).count()
}

/// The bytes as text; `offset` is where they begin in their document.
fn decode(bytes: Vec<u8>, offset: u64) -> Result<String, SkipReason> {
    String::from_utf8(bytes).map_err(|error| {
        let valid = error.utf8_error().valid_up_to() as u64;
        SkipReason::NotUtf8 { offset: offset + valid }
    })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// The document read in pieces: its text, or the offset of its first wrong byte.
    fn in_pieces(path: &Path, bytes: u64, piece_bytes: u64) -> Result<String, u64> {
        let mut text = String::new();
        for start in (0..bytes).step_by(piece_bytes as usize) {
            match read_piece(path, bytes, start..bytes.min(start + piece_bytes)) {
                Ok(piece) => text.push_str(&piece),
                Err(SkipReason::NotUtf8 { offset }) => return Err(offset),
                Err(other) => panic!("{other}"),
            }
        }
        Ok(text)
    }

    #[test]
    fn pieces_of_any_size_make_up_the_document_or_find_its_first_wrong_byte() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("text");
        let cases: [&[u8]; 12] = [
            "aé€🦀\0🦀€éa🦀🦀🦀€€€ééé".as_bytes(),
            "🦀".as_bytes(),
            b"plain",
            b"ab\x80cdefgh",                     // a continuation byte alone
            b"abc\xf0\x9f\xa6\x80\x80\x80\x80z", // more of them than a character has
            b"abcd\xe2\x82",                     // a character cut off at the end
            b"abcdefg\xe2\x82hijkl",             // and in the middle
            b"abcd\xff\x80\x80\x80\x80\x80\x80\x80",
            b"\x80\x80\x80\x80\x80\x80\x80\x80",
            b"abcdefgh\xed\xa0\x80ij", // a surrogate
            b"abcdef\xc0\xafgh",       // an overlong form
            b"abcde\xf4\x90\x80\x80g", // beyond U+10FFFF
        ];
        for bytes in cases {
            fs::write(&path, bytes).unwrap();
            let expected = match std::str::from_utf8(bytes) {
                Ok(text) => Ok(text.to_owned()),
                Err(error) => Err(error.valid_up_to() as u64),
            };
            for piece_bytes in 3..=bytes.len() as u64 + 1 {
                let found = in_pieces(&path, bytes.len() as u64, piece_bytes);
                assert_eq!(found, expected, "{bytes:?} in pieces of {piece_bytes}");
            }
        }
    }

    #[test]
    fn a_document_that_grew_or_shrank_is_noticed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("text");
        fs::write(&path, "abcdefgh").unwrap();
        for document_bytes in [7, 9] {
            let error = read_piece(&path, document_bytes, 0..4).unwrap_err();
            assert!(matches!(error, SkipReason::Changed { found: 8, .. }), "{error}");
        }
    }
}
