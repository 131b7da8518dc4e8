//! The order of reading: inputs in order, large texts in pieces, the others part by part.
//!
//! A large document is read twice. Nothing of a document that is not UTF-8 may enter the stream,
//! so all of its pieces are checked before the first is tokenized; meanwhile the plan has nothing
//! to hand out, and the threads finish what they have.
//!
//! An input that is read from front to back is with one thread at a time: nothing more of it is
//! handed out until that thread says whether it goes on.

use std::ops::Range;

use crate::prepare::input::{More, find::Input, format::Format};

/// One thing to read, on any thread.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Reading {
    /// Which input, from 0.
    pub input: usize,
    /// How much of it.
    pub extent: Extent,
    /// Bytes of text that it holds; of a part, about as many.
    pub bytes: u64,
}

/// How much of an input is read, and what for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Extent {
    /// All of it, to be tokenized.
    Whole,
    /// A piece, only to find out whether it is UTF-8.
    Check(Range<u64>),
    /// A piece, to be tokenized.
    Piece(Range<u64>),
    /// The next part of an input of many documents, which is only to be cut off.
    Part,
}

/// Hands out what to read, in the order of the stream.
#[derive(Debug)]
pub(crate) struct Plan<'a> {
    inputs: &'a [Input],
    /// Texts larger than this are read in pieces of this many bytes; `u64::MAX` for never.
    piece_bytes: u64,
    /// The expected content of a part.
    part_bytes: u64,
    input: usize,
    pass: Pass,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pass {
    /// The input was not begun.
    Begin,
    /// Pieces up to `at` were handed out to be checked; `waiting` of them are not back yet.
    Check { at: u64, waiting: u64, verdict: Verdict },
    /// Pieces up to `at` were handed out to be tokenized.
    Tokenize { at: u64 },
    /// The next part was handed out and is not back.
    PartOut,
    /// The last part is back, and there may be more.
    PartBack,
}

/// The result of checking a piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// It is UTF-8.
    Good,
    /// The document is to be skipped.
    Bad,
}

impl<'a> Plan<'a> {
    pub(crate) fn new(inputs: &'a [Input], piece_bytes: u64, part_bytes: u64) -> Plan<'a> {
        Plan { inputs, piece_bytes, part_bytes, input: 0, pass: Pass::Begin }
    }

    /// The next reading; `None` at the end, and while checks or a part are not back.
    pub(crate) fn peek(&self) -> Option<Reading> {
        let input = self.inputs.get(self.input)?;
        let reading = |extent, bytes| Reading { input: self.input, extent, bytes };
        let piece = |at: u64| at..input.bytes.min(at.saturating_add(self.piece_bytes));
        match self.pass {
            Pass::PartOut => None,
            Pass::PartBack => Some(reading(Extent::Part, self.part_bytes)),
            Pass::Begin if input.format != Format::Text => {
                Some(reading(Extent::Part, self.part_bytes))
            }
            Pass::Begin if input.bytes <= self.piece_bytes => {
                Some(reading(Extent::Whole, input.bytes))
            }
            Pass::Begin => {
                let piece = piece(0);
                Some(reading(Extent::Check(piece.clone()), piece.end))
            }
            Pass::Check { at, verdict, .. } => {
                let piece = piece(at);
                let more = at < input.bytes && verdict == Verdict::Good;
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
            Extent::Part => self.pass = Pass::PartOut,
            Extent::Whole => self.input += 1,
            Extent::Check(piece) => {
                let waiting = match self.pass {
                    Pass::Check { waiting, .. } => waiting,
                    _ => 0,
                };
                self.pass =
                    Pass::Check { at: piece.end, waiting: waiting + 1, verdict: Verdict::Good };
            }
            Extent::Piece(piece) if piece.end == self.inputs[reading.input].bytes => {
                self.next_input();
            }
            Extent::Piece(piece) => self.pass = Pass::Tokenize { at: piece.end },
        }
        Some(reading)
    }

    /// Takes the result of checking a piece; returns whether this is the first bad piece of its
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
        let all_handed_out = at == self.inputs[self.input].bytes;
        self.pass = match verdict {
            Verdict::Good if waiting == 0 && all_handed_out => Pass::Tokenize { at: 0 },
            Verdict::Bad if waiting == 0 => {
                self.input += 1;
                Pass::Begin
            }
            Verdict::Good | Verdict::Bad => Pass::Check { at, waiting, verdict },
        };
        first_bad
    }

    /// Learns that a part is back, and whether its input has more.
    ///
    /// # Panics
    /// When no part is out, which only a bug of the caller can cause.
    pub(crate) fn part_is_back(&mut self, more: More) {
        assert_eq!(self.pass, Pass::PartOut, "a part came back that was not handed out");
        match more {
            More::Yes => self.pass = Pass::PartBack,
            More::No => self.next_input(),
        }
    }

    fn next_input(&mut self) {
        self.input += 1;
        self.pass = Pass::Begin;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prepare::input::format::Compression;

    fn texts(sizes: &[u64]) -> Vec<Input> {
        let text = |&bytes: &u64| Input {
            path: bytes.to_string().into(),
            bytes,
            format: Format::Text,
            changed: None,
        };
        sizes.iter().map(text).collect()
    }

    #[test]
    fn large_documents_are_checked_whole_before_their_first_piece() {
        let inputs = texts(&[10, 25, 0]);
        let mut plan = Plan::new(&inputs, 10, 7);
        let next = |plan: &mut Plan<'_>| plan.take().map(|r| (r.input, r.extent, r.bytes));
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
        let inputs = texts(&[45, 3]);
        let mut plan = Plan::new(&inputs, 10, 7);
        for _ in 0..3 {
            assert!(matches!(plan.take().unwrap().extent, Extent::Check(_)));
        }
        assert!(!plan.checked(Verdict::Good));
        assert!(plan.checked(Verdict::Bad));
        assert_eq!(plan.take(), None, "no further check of a bad document");
        assert!(!plan.checked(Verdict::Bad), "the document is skipped only once");
        assert_eq!(plan.take().unwrap().input, 1);
        assert_eq!(plan.take(), None);
    }

    #[test]
    fn a_part_is_handed_out_when_the_one_before_is_back() {
        let mut inputs = texts(&[10, 100, 3]);
        inputs[1].format = Format::JsonLines(Compression::None);
        let mut plan = Plan::new(&inputs, 50, 7);
        assert_eq!(plan.take().unwrap().extent, Extent::Whole);
        for more in [More::Yes, More::Yes, More::No] {
            let part = Reading { input: 1, extent: Extent::Part, bytes: 7 };
            assert_eq!(plan.peek().as_ref(), Some(&part));
            assert_eq!(plan.take(), Some(part));
            assert_eq!(plan.take(), None);
            plan.part_is_back(more);
        }
        assert_eq!(plan.take().unwrap().input, 2);
        assert_eq!(plan.take(), None);
    }
}
