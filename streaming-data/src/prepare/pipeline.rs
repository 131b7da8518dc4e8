//! Threads that read, tokenize and encode ahead, and the one that puts everything in order.
//!
//! Any thread may do any job; which one does, and when it is done, decides nothing. The calling
//! thread numbers the texts as it hands them out, packs their tokens in that order, numbers the
//! row groups that come of it, and writes them in that order. So the shards are the same to the
//! byte for any number of threads.
//!
//! Memory: a text is charged for all that it becomes on its way to the file, from when it is
//! handed out until its row groups are written; no further text is handed out above
//! [`Bounds::held_bytes`]. The one exception is a single text above the bound (a large document of
//! a tokenizer that needs it whole), which then is held alone.

use std::{
    mem,
    ops::ControlFlow,
    sync::{
        Mutex,
        mpsc::{Receiver, Sender, channel},
    },
    thread,
};

use super::{
    Progress, Strictness,
    documents::Document,
    in_order::InOrder,
    job::{Done, Found, Job, Numbered, TextDone, Work, perform_all},
    pack::{Packer, RowGroup},
    plan::{Extent, Plan, Reading, Verdict},
    shard::{EncodedRowGroup, ShardWriter},
    text::{SkipReason, SkippedDocument},
    tokenize::Pieces,
};
use crate::{error::DataError, index::ShardEntry};

/// What a byte of text is charged: itself, its token (4 bytes), the token in its row (4), its two
/// levels while it is encoded (4), and at worst its place in the page (4).
const HELD_BYTES_PER_TEXT_BYTE: u64 = 17;

/// What a token is charged once its text is gone; a text has at most one token a byte, but for
/// the one that ends it.
const HELD_BYTES_PER_TOKEN: u64 = 16;

/// What the smallest text is charged: it bounds how many are handed out at once.
const HELD_BYTES_AT_LEAST: u64 = 4096;

/// What was done.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    /// What an index says of each shard.
    pub shards: Vec<ShardEntry>,
    /// Documents that were neither empty nor skipped.
    pub documents: u64,
    /// Documents without a byte.
    pub empty: u64,
    /// Bytes of text of the documents.
    pub text_bytes: u64,
    /// Documents that could not be read, in order.
    pub skipped: Vec<SkippedDocument>,
    /// Tokens of the stream.
    pub tokens: u64,
    /// Tokens at its end that are in no row.
    pub dropped_tokens: u64,
    /// The most memory that was charged at once.
    pub peak_held_bytes: u64,
}

/// Does the work; `progress` is asked after each text and row group whether to go on.
///
/// # Errors
/// The first error in the order of the stream, or [`DataError::Interrupted`]. The folder then
/// holds whatever was written.
pub(crate) fn run(
    work: &Work<'_>,
    progress: &mut dyn FnMut(Progress) -> ControlFlow<()>,
) -> Result<Outcome, DataError> {
    let (jobs, job_receiver) = channel();
    let job_receiver = Mutex::new(job_receiver);
    thread::scope(|scope| {
        let (results, result_receiver) = channel();
        for _ in 0..work.workers {
            let (jobs, results) = (&job_receiver, results.clone());
            scope.spawn(move || perform_all(work, jobs, &results));
        }
        // On an error both channels are dropped with the conductor, and every thread ends after
        // the job at hand.
        Conductor::new(work, jobs, result_receiver, progress).conduct()
    })
}

/// The calling thread: hands out jobs, and takes their results in order.
struct Conductor<'a> {
    work: &'a Work<'a>,
    plan: Plan<'a>,
    packer: Packer,
    writer: ShardWriter<'a>,
    jobs: Sender<Numbered<Job>>,
    results: Receiver<Numbered<Done>>,
    texts: InOrder<Result<TextDone, DataError>>,
    row_groups: InOrder<Result<EncodedRowGroup, DataError>>,
    held_bytes: u64,
    outcome: Outcome,
    position: Progress,
    progress: &'a mut dyn FnMut(Progress) -> ControlFlow<()>,
}

impl<'a> Conductor<'a> {
    fn new(
        work: &'a Work<'a>,
        jobs: Sender<Numbered<Job>>,
        results: Receiver<Numbered<Done>>,
        progress: &'a mut dyn FnMut(Progress) -> ControlFlow<()>,
    ) -> Conductor<'a> {
        let piece_bytes = match work.tokenizer.pieces() {
            Pieces::Whole => u64::MAX,
            Pieces::AtCharacters => work.bounds.piece_bytes,
        };
        let bytes_total = work.documents.iter().map(|document| document.bytes).sum();
        Conductor {
            work,
            plan: Plan::new(work.documents, piece_bytes),
            packer: Packer::new(work.cut),
            writer: ShardWriter::new(work.format, work.folder),
            jobs,
            results,
            texts: InOrder::new(),
            row_groups: InOrder::new(),
            held_bytes: 0,
            outcome: Outcome::default(),
            position: Progress { bytes_total, ..Progress::default() },
            progress,
        }
    }

    fn conduct(mut self) -> Result<Outcome, DataError> {
        self.report()?;
        loop {
            self.hand_out_texts();
            if self.texts.outstanding() == 0 && self.row_groups.outstanding() == 0 {
                break;
            }
            self.take_result()?;
        }
        let end = mem::replace(&mut self.packer, Packer::new(self.work.cut)).finish();
        self.outcome.tokens = end.tokens;
        self.outcome.dropped_tokens = end.dropped_tokens;
        if let Some(row_group) = end.row_group {
            self.hand_out_row_group(row_group);
            self.take_result()?;
        }
        self.outcome.shards = self.writer.finish()?;
        Ok(self.outcome)
    }

    fn hand_out_texts(&mut self) {
        while let Some(reading) = self.plan.peek() {
            let held = held_bytes(&reading);
            if self.held_bytes > 0 && self.held_bytes + held > self.work.bounds.held_bytes {
                return;
            }
            self.plan.take();
            self.hold(held);
            let number = self.texts.number();
            self.send(Numbered { number, item: Job::Read(reading) });
        }
    }

    fn hand_out_row_group(&mut self, row_group: RowGroup) {
        self.hold(row_group.tokens.len() as u64 * HELD_BYTES_PER_TOKEN);
        let number = self.row_groups.number();
        self.send(Numbered { number, item: Job::Encode(row_group) });
    }

    fn send(&self, job: Numbered<Job>) {
        self.jobs.send(job).expect("the receiver outlives the conductor");
    }

    fn hold(&mut self, bytes: u64) {
        self.held_bytes += bytes;
        self.outcome.peak_held_bytes = self.outcome.peak_held_bytes.max(self.held_bytes);
    }

    /// Waits for one result, and goes on with all that are now next in their order.
    fn take_result(&mut self) -> Result<(), DataError> {
        let Numbered { number, item } =
            self.results.recv().expect("threads answer every job, also by a caught panic");
        match item {
            Done::Text(text) => self.texts.arrived(number, text),
            Done::RowGroup(row_group) => self.row_groups.arrived(number, row_group),
        }
        while let Some(text) = self.texts.next() {
            self.take_text(text?)?;
        }
        while let Some(row_group) = self.row_groups.next() {
            let row_group = row_group?;
            let samples = row_group.samples;
            self.writer.append(row_group)?;
            let tokens = samples * self.work.cut.seq_len + 1;
            self.held_bytes -= tokens as u64 * HELD_BYTES_PER_TOKEN;
            self.position.samples += samples as u64;
            self.report()?;
        }
        Ok(())
    }

    fn take_text(&mut self, TextDone { reading, found }: TextDone) -> Result<(), DataError> {
        self.held_bytes -= held_bytes(&reading);
        let document = &self.work.documents[reading.document];
        let mut bytes_done = 0;
        match (&reading.extent, found) {
            (Extent::Check(_), Found::Skipped(reason)) => {
                if self.plan.checked(Verdict::Bad) {
                    self.skip(document, reason)?;
                    bytes_done = document.bytes;
                }
            }
            (Extent::Check(_), _) => {
                self.plan.checked(Verdict::Good);
            }
            (_, Found::Skipped(reason)) => {
                self.skip(document, reason)?;
                bytes_done = document.bytes;
            }
            (_, Found::Empty) => self.outcome.empty += 1,
            (_, Found::Tokens { tokens, text_bytes }) => {
                for row_group in self.packer.push(&tokens) {
                    self.hand_out_row_group(row_group);
                }
                self.outcome.text_bytes += text_bytes;
                bytes_done = reading.bytes;
                let ends_document = match &reading.extent {
                    Extent::Piece(piece) => piece.end == document.bytes,
                    Extent::Whole | Extent::Check(_) => true,
                };
                self.outcome.documents += u64::from(ends_document);
            }
            (_, Found::Checked) => unreachable!("only checks are answered so"),
        }
        self.position.bytes_done += bytes_done;
        self.position.documents = self.outcome.documents;
        self.report()
    }

    fn skip(&mut self, document: &Document, reason: SkipReason) -> Result<(), DataError> {
        let path = document.path.clone();
        match self.work.strictness {
            Strictness::Strict => Err(DataError::Document { path, reason }),
            Strictness::Lenient => {
                self.outcome.skipped.push(SkippedDocument { path, reason });
                Ok(())
            }
        }
    }

    fn report(&mut self) -> Result<(), DataError> {
        match (self.progress)(self.position) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(DataError::Interrupted),
        }
    }
}

fn held_bytes(reading: &Reading) -> u64 {
    reading.bytes.saturating_mul(HELD_BYTES_PER_TEXT_BYTE).max(HELD_BYTES_AT_LEAST)
}

#[cfg(test)]
mod tests {
    use std::{fs, path::PathBuf};

    use super::*;
    use crate::prepare::{
        ByteTokenizer, Tokenize, TokenizeError, documents::find_documents, job::Bounds, pack::Cut,
        shard::ShardFormat,
    };

    /// A tokenizer that may do harm, and needs documents whole or not.
    struct Harmful {
        pieces: Pieces,
        encode: fn(&str) -> Result<Vec<u32>, TokenizeError>,
    }

    impl Tokenize for Harmful {
        fn encode(&self, text: &str, tokens: &mut Vec<u32>) -> Result<(), TokenizeError> {
            tokens.extend((self.encode)(text)?);
            Ok(())
        }
        fn vocab_size(&self) -> u32 {
            ByteTokenizer::VOCAB_SIZE
        }
        fn bos_token_id(&self) -> Option<u32> {
            None
        }
        fn eos_token_id(&self) -> u32 {
            ByteTokenizer::EOS
        }
        fn pad_token_id(&self) -> Option<u32> {
            None
        }
        fn tokenizer_json(&self) -> Option<String> {
            None
        }
        fn pieces(&self) -> Pieces {
            self.pieces
        }
    }

    fn run_on(
        input: PathBuf,
        tokenizer: &dyn Tokenize,
        workers: usize,
        bounds: Bounds,
    ) -> Result<Outcome, DataError> {
        let documents = find_documents(&[input], "**/*.txt")?.documents;
        let format = ShardFormat::new(63).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let work = Work {
            documents: &documents,
            tokenizer,
            cut: Cut { seq_len: 63, row_group_samples: 100, shard_samples: 1000 },
            format: &format,
            folder: folder.path(),
            strictness: Strictness::Strict,
            workers,
            bounds,
        };
        run(&work, &mut |_| ControlFlow::Continue(()))
    }

    const SMALL: Bounds = Bounds { piece_bytes: 1 << 16, held_bytes: 4 << 20 };

    #[test]
    fn memory_is_bounded_however_large_a_document_or_however_many() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("large.txt");
        let line = "a line of 32 bytes, with an é.\n";
        assert_eq!(line.len(), 32);
        fs::write(&path, line.repeat(2 << 20)).unwrap();
        let outcome = run_on(path, &ByteTokenizer, 3, SMALL).unwrap();
        assert_eq!((outcome.text_bytes, outcome.tokens), (64 << 20, (64 << 20) + 1));
        // A row group may be completed by a text that brings only its last token.
        let row_group = (100 * 63 + 1) * HELD_BYTES_PER_TOKEN;
        let peak = outcome.peak_held_bytes;
        assert!(peak <= SMALL.held_bytes + row_group, "held {peak} bytes");
        assert!(peak > SMALL.held_bytes / 2, "the threads are kept busy, held {peak} bytes");

        for number in 0..3000 {
            fs::write(folder.path().join(format!("{number}.txt")), "").unwrap();
        }
        fs::remove_file(folder.path().join("large.txt")).unwrap();
        let outcome = run_on(folder.path().to_owned(), &ByteTokenizer, 2, SMALL).unwrap();
        assert_eq!((outcome.empty, outcome.tokens), (3000, 0));
        assert!(outcome.peak_held_bytes <= SMALL.held_bytes);
    }

    #[test]
    fn pieces_make_the_same_shards_as_whole_documents() {
        let folder = tempfile::tempdir().unwrap();
        let text: String = (0..60_000_u32).map(|i| ['a', 'é', '€', '🦀'][i as usize % 4]).collect();
        fs::write(folder.path().join("a.txt"), &text).unwrap();
        fs::write(folder.path().join("b.txt"), &text[..100_001 / 10 * 10]).unwrap();
        let bytes: fn(&str) -> _ = |text| Ok(text.bytes().map(u32::from).collect());
        let mut all = Vec::new();
        for (pieces, piece_bytes, workers) in [
            (Pieces::Whole, 10, 1),
            (Pieces::AtCharacters, u64::MAX, 2),
            (Pieces::AtCharacters, 1001, 3),
            (Pieces::AtCharacters, 99_991, 2),
        ] {
            let tokenizer = Harmful { pieces, encode: bytes };
            let bounds = Bounds { piece_bytes, held_bytes: 1 << 20 };
            let outcome = run_on(folder.path().to_owned(), &tokenizer, workers, bounds).unwrap();
            assert_eq!(outcome.documents, 2);
            all.push((outcome.shards, outcome.tokens, outcome.dropped_tokens, outcome.text_bytes));
        }
        assert!(all[0].0.len() > 1, "several shards");
        assert!(all.iter().all(|one| *one == all[0]), "{all:?}");
    }

    #[test]
    fn harm_done_by_a_tokenizer_ends_the_run_with_an_error_that_names_the_document() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["a", "b", "c", "d"] {
            fs::write(folder.path().join(name).with_extension("txt"), name).unwrap();
        }
        let fail = |encode| {
            let tokenizer = Harmful { pieces: Pieces::Whole, encode };
            run_on(folder.path().to_owned(), &tokenizer, 3, SMALL).unwrap_err()
        };
        // Every document but the first is refused: the first refused in order is the one named.
        for _ in 0..20 {
            let error = fail(|text| if text == "a" { Ok(vec![1]) } else { Err("no".into()) });
            assert!(matches!(&error, DataError::Tokenize { .. }), "{error}");
            assert!(error.to_string().ends_with("b.txt"), "{error}");
        }
        let error = fail(|text| Ok(vec![if text == "c" { 259 } else { 258 }]));
        let message = error.to_string();
        assert!(message.contains("c.txt: the tokenizer gave token 259"), "{message}");
        let error = fail(|text| if text == "b" { panic!("at {text}") } else { Ok(vec![]) });
        let message = error.to_string();
        assert!(message.contains("b.txt: at b"), "{message}");
    }
}
