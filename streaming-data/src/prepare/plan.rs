//! What to read next: documents in order, large ones in pieces.
//!
//! A large document is read twice. Nothing of a document that is not UTF-8 may enter the stream,
//! so all of its pieces are checked before the first is tokenized; meanwhile the plan has nothing
//! to hand out, and the threads finish what they have.

use std::ops::Range;

use super::documents::Document;

/// One thing to read, on any thread.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Reading {
    /// Which document, from 0.
    pub document: usize,
    /// How much of it.
    pub extent: Extent,
    /// Bytes of text that it holds.
    pub bytes: u64,
}

/// How much of a document is read, and what for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Extent {
    /// All of it, to be tokenized.
    Whole,
    /// A piece, only to find out whether it is UTF-8.
    Check(Range<u64>),
    /// A piece, to be tokenized.
    Piece(Range<u64>),
}

/// Hands out what to read, in the order of the stream.
#[derive(Debug)]
pub(crate) struct Plan<'a> {
    documents: &'a [Document],
    /// Documents larger than this are read in pieces of this many bytes; `u64::MAX` for never.
    piece_bytes: u64,
    document: usize,
    pass: Pass,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pass {
    /// The document was not begun.
    Begin,
    /// Pieces up to `at` were handed out to be checked; `waiting` of them are not back yet.
    Check { at: u64, waiting: u64, verdict: Verdict },
    /// Pieces up to `at` were handed out to be tokenized.
    Tokenize { at: u64 },
}

/// What the check of a piece found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// It is UTF-8.
    Good,
    /// The document is to be skipped.
    Bad,
}

impl<'a> Plan<'a> {
    pub(crate) fn new(documents: &'a [Document], piece_bytes: u64) -> Plan<'a> {
        Plan { documents, piece_bytes, document: 0, pass: Pass::Begin }
    }

    /// What to read next; `None` at the end, and while checks are not back.
    pub(crate) fn peek(&self) -> Option<Reading> {
        let document = self.documents.get(self.document)?;
        let reading = |extent, bytes| Reading { document: self.document, extent, bytes };
        let piece = |at: u64| at..document.bytes.min(at + self.piece_bytes);
        match self.pass {
            Pass::Begin if document.bytes <= self.piece_bytes => {
                Some(reading(Extent::Whole, document.bytes))
            }
            Pass::Begin => {
                let piece = piece(0);
                Some(reading(Extent::Check(piece.clone()), piece.end))
            }
            Pass::Check { at, verdict, .. } => {
                let piece = piece(at);
                let more = at < document.bytes && verdict == Verdict::Good;
                more.then(|| reading(Extent::Check(piece.clone()), piece.end - piece.start))
            }
            Pass::Tokenize { at } => {
                let piece = piece(at);
                Some(reading(Extent::Piece(piece.clone()), piece.end - piece.start))
            }
        }
    }

    /// Hands out what [`Plan::peek`] shows.
    pub(crate) fn take(&mut self) -> Option<Reading> {
        let reading = self.peek()?;
        match &reading.extent {
            Extent::Whole => self.document += 1,
            Extent::Check(piece) => {
                let waiting = match self.pass {
                    Pass::Check { waiting, .. } => waiting,
                    Pass::Begin | Pass::Tokenize { .. } => 0,
                };
                self.pass =
                    Pass::Check { at: piece.end, waiting: waiting + 1, verdict: Verdict::Good };
            }
            Extent::Piece(piece) if piece.end == self.documents[reading.document].bytes => {
                self.document += 1;
                self.pass = Pass::Begin;
            }
            Extent::Piece(piece) => self.pass = Pass::Tokenize { at: piece.end },
        }
        Some(reading)
    }

    /// Learns what the check of a piece found; returns whether this is the first bad piece of its
    /// document.
    ///
    /// # Panics
    /// When no check is waiting, which only a bug of the caller can cause.
    pub(crate) fn checked(&mut self, found: Verdict) -> bool {
        let Pass::Check { at, waiting, verdict } = self.pass else {
            panic!("a check came back that was not handed out")
        };
        let first_bad = verdict == Verdict::Good && found == Verdict::Bad;
        let verdict = if found == Verdict::Bad { Verdict::Bad } else { verdict };
        let waiting = waiting - 1;
        let all_handed_out = at == self.documents[self.document].bytes;
        self.pass = match verdict {
            Verdict::Good if waiting == 0 && all_handed_out => Pass::Tokenize { at: 0 },
            Verdict::Bad if waiting == 0 => {
                self.document += 1;
                Pass::Begin
            }
            Verdict::Good | Verdict::Bad => Pass::Check { at, waiting, verdict },
        };
        first_bad
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn documents(sizes: &[u64]) -> Vec<Document> {
        sizes.iter().map(|&bytes| Document { path: bytes.to_string().into(), bytes }).collect()
    }

    #[test]
    fn large_documents_are_checked_whole_before_their_first_piece() {
        let documents = documents(&[10, 25, 0]);
        let mut plan = Plan::new(&documents, 10);
        let next = |plan: &mut Plan<'_>| plan.take().map(|r| (r.document, r.extent, r.bytes));
        assert_eq!(next(&mut plan), Some((0, Extent::Whole, 10)));
        for piece in [0..10, 10..20, 20..25_u64] {
            let bytes = piece.end - piece.start;
            assert_eq!(next(&mut plan), Some((1, Extent::Check(piece), bytes)));
        }
        assert_eq!(next(&mut plan), None);
        assert!(!plan.checked(Verdict::Good) && !plan.checked(Verdict::Good));
        assert_eq!(next(&mut plan), None, "the last piece was not checked yet");
        assert!(!plan.checked(Verdict::Good));
        for piece in [0..10, 10..20, 20..25_u64] {
            let bytes = piece.end - piece.start;
            assert_eq!(next(&mut plan), Some((1, Extent::Piece(piece), bytes)));
        }
        assert_eq!(next(&mut plan), Some((2, Extent::Whole, 0)));
        assert_eq!(next(&mut plan), None);
    }

    #[test]
    fn a_bad_piece_skips_its_document_when_all_checks_are_back() {
        let documents = documents(&[45, 3]);
        let mut plan = Plan::new(&documents, 10);
        for _ in 0..3 {
            assert!(matches!(plan.take().unwrap().extent, Extent::Check(_)));
        }
        assert!(!plan.checked(Verdict::Good));
        assert!(plan.checked(Verdict::Bad));
        assert_eq!(plan.take(), None, "no further check of a bad document");
        assert!(!plan.checked(Verdict::Bad), "the document is skipped only once");
        assert_eq!(plan.take().unwrap().document, 1);
        assert_eq!(plan.take(), None);
    }
}
