//! Threads that read, tokenize and encode ahead, and the one that puts everything in order.
//!
//! Any thread may do any job; which one does, and when it is done, decides nothing. The calling
//! thread numbers the texts as it hands them out, packs their tokens in that order, numbers the
//! row groups that come of it, and writes them in that order. So the shards are the same to the
//! byte for any number of threads.
//!
//! An input of many documents is read by whichever thread has its reader, which gives it back with
//! the next part; the part takes its number then, so the order is the same again.
//!
//! Memory: a text is charged for its tokens and row groups too, from when it is handed out until its row
//! groups are written; no further text is handed out above
//! [`Bounds::held_bytes`]. A part is charged as much as is expected of it before it is cut off,
//! and then what it has. So the bound is exceeded only by a single large document: a file of a
//! tokenizer that needs it whole, which then is held alone, or one line, row or sample of at most
//! [`Bounds::document_bytes`].

pub(crate) mod ahead;
pub(crate) mod batch;
pub(crate) mod in_order;
pub(crate) mod job;
pub(crate) mod job_queue;
pub(crate) mod outcome;
pub(crate) mod passes;
mod plan;

use std::{
    mem,
    ops::ControlFlow,
    sync::mpsc::{Receiver, channel},
    thread,
};

pub(crate) use self::outcome::Outcome;
use self::{
    batch::{Batch, Collect, Ended},
    in_order::InOrder,
    job::{
        CutDone, Cutting, Done, Found, Job, Numbered, PartAtHand, PartDone, Taken, TextDone, Work,
        start_workers,
    },
    job_queue::JobQueue,
    outcome::PiecesDone,
    plan::{Extent, Plan, Verdict},
};
use super::{
    Phase, Progress, Strictness,
    choose::admit::{Admission, Pass},
    input::{
        More, ReadFailure, ReadParts,
        skip::{SkipReason, SkippedDocument},
    },
    output::{
        Output,
        shard::{EncodedRowGroup, Naming, ShardWriter},
    },
    tokens::{
        pack::{Packer, RowGroup},
        tokenize::Pieces,
    },
};
use crate::prepare::PrepareError;

/// The charge for a byte of text: itself, its token (4 bytes), the token in its row (4), its two
/// levels while it is encoded (4), and at worst its place in the page (4).
const HELD_BYTES_PER_TEXT_BYTE: u64 = 17;

/// The charge for a token once its text is gone; a text has at most one token a byte, and one
/// more that ends it.
const HELD_BYTES_PER_TOKEN: u64 = 16;

/// The charge for the smallest text: it bounds how many are handed out at once.
const HELD_BYTES_AT_LEAST: u64 = 4096;

/// Does the work, and hands its shards to the output, or what it read to the collector; `progress` is asked whether to go on after each text and row group, and while shards are
/// waited for.
///
/// # Errors
/// The first error in the order of the stream, that of a shard that cannot be stored, or
/// [`PrepareError::Interrupted`]. The output then holds the files written so far.
pub(crate) fn run(
    work: &Work<'_>,
    output: Option<&mut dyn Output>,
    collector: Option<&mut dyn Collect>,
    progress: &mut dyn FnMut(Progress) -> ControlFlow<()>,
) -> Result<Outcome, PrepareError> {
    let jobs = JobQueue::default();
    thread::scope(|scope| {
        let jobs = &jobs;
        let (results, result_receiver) = channel();
        // Every thread then ends after its current job, also on an error.
        let _closed_at_end = jobs.close_at_end();
        start_workers(scope, work, jobs, &results)?;
        let ends = Ends {
            // Within an option a borrow is shortened by hand.
            output: output.map(|output| output as &mut dyn Output),
            collector: collector.map(|collector| collector as &mut dyn Collect),
            progress,
        };
        Conductor::new(work, ends, jobs, result_receiver).conduct()
    })
}

/// Where results go.
struct Ends<'a> {
    output: Option<&'a mut dyn Output>,
    collector: Option<&'a mut dyn Collect>,
    progress: &'a mut dyn FnMut(Progress) -> ControlFlow<()>,
}

/// The calling thread: hands out jobs, and takes their results in order.
struct Conductor<'a> {
    work: &'a Work<'a>,
    plan: Plan<'a>,
    packer: Packer,
    /// None in a pass that packs nothing.
    writer: Option<ShardWriter<'a>>,
    jobs: &'a JobQueue,
    results: Receiver<Numbered<Done>>,
    taken: InOrder<Result<Taken, PrepareError>>,
    /// The reader of the current input, while no thread has it.
    reader: Option<Box<dyn ReadParts>>,
    /// Whether a thread has the reader of the current input.
    cutting: bool,
    /// Bytes of that input that were read.
    read_bytes: u64,
    /// Bytes of the current input in the stream.
    input_done: u64,
    /// The part read so far of a text that is read in pieces.
    pieces: PiecesDone,
    row_groups: InOrder<Result<EncodedRowGroup, PrepareError>>,
    held_bytes: u64,
    /// Texts and parts that were taken.
    batches: u64,
    /// Documents in these, in a pass that compares.
    looked_at: u64,
    outcome: Outcome,
    position: Progress,
    collector: Option<&'a mut dyn Collect>,
    progress: &'a mut dyn FnMut(Progress) -> ControlFlow<()>,
}

impl<'a> Conductor<'a> {
    fn new(
        work: &'a Work<'a>,
        ends: Ends<'a>,
        jobs: &'a JobQueue,
        results: Receiver<Numbered<Done>>,
    ) -> Conductor<'a> {
        let Ends { output, collector, progress } = ends;
        let piece_bytes = match work.tokenizer.pieces() {
            Pieces::AtCharacters if !work.rules.need_whole_documents() => work.bounds.piece_bytes,
            Pieces::AtCharacters | Pieces::Whole => u64::MAX,
        };
        let bytes_total = work.inputs.iter().map(|input| input.bytes).sum();
        Conductor {
            work,
            plan: Plan::new(work.inputs, piece_bytes, work.bounds.piece_bytes),
            packer: Packer::new(work.cut),
            writer: output.map(|output| ShardWriter::new(work.format, output, Naming::Number)),
            jobs,
            results,
            taken: InOrder::new(),
            reader: None,
            cutting: false,
            read_bytes: 0,
            input_done: 0,
            pieces: PiecesDone::default(),
            row_groups: InOrder::new(),
            held_bytes: 0,
            batches: 0,
            looked_at: 0,
            outcome: Outcome::default(),
            position: Progress {
                phase: match work.rules.pass {
                    Pass::Sign(_) | Pass::Record(..) => Phase::Comparing,
                    Pass::Tokenize(_) | Pass::Fetch(_) | Pass::Visit(_) => Phase::Tokenizing,
                },
                bytes_total,
                ..Progress::default()
            },
            collector,
            progress,
        }
    }

    fn conduct(mut self) -> Result<Outcome, PrepareError> {
        self.report()?;
        loop {
            self.hand_out_readings();
            let outstanding = self.taken.outstanding() + self.row_groups.outstanding();
            if outstanding == 0 && !self.cutting {
                break;
            }
            self.take_result()?;
        }
        self.check_end()?;
        let end = mem::replace(&mut self.packer, Packer::new(self.work.cut)).finish();
        self.outcome.tokens = end.tokens;
        self.outcome.dropped_tokens = end.dropped_tokens;
        if let Some(row_group) = end.row_group {
            self.hand_out_row_group(row_group);
            self.take_result()?;
        }
        if let Some(mut writer) = self.writer.take() {
            writer.close()?;
            while !writer.are_stored()? {
                self.report()?;
            }
            self.outcome.shards = writer.written();
        }
        Ok(self.outcome)
    }

    fn hand_out_readings(&mut self) {
        while let Some(reading) = self.plan.peek() {
            let held = held_bytes(reading.bytes);
            if self.held_bytes > 0 && self.held_bytes + held > self.work.bounds.held_bytes {
                return;
            }
            self.plan.take();
            self.hold(held);
            if reading.extent == Extent::Part {
                let reader = self.reader.take();
                self.cutting = true;
                // Its part takes a number when it is there.
                let job = Job::Cut(Cutting { input: reading.input, reader });
                self.send(Numbered { number: 0, item: job });
            } else {
                let number = self.taken.number();
                self.send(Numbered { number, item: Job::Read(reading) });
            }
        }
    }

    fn hand_out_row_group(&mut self, row_group: RowGroup) {
        self.hold(row_group.tokens.len() as u64 * HELD_BYTES_PER_TOKEN);
        let number = self.row_groups.number();
        self.send(Numbered { number, item: Job::Encode(row_group) });
    }

    fn send(&self, job: Numbered<Job>) {
        self.jobs.push(job);
    }

    fn hold(&mut self, bytes: u64) {
        self.held_bytes += bytes;
        self.outcome.peak_held_bytes = self.outcome.peak_held_bytes.max(self.held_bytes);
    }

    /// Waits for one result, and goes on with all that are now next in their order.
    fn take_result(&mut self) -> Result<(), PrepareError> {
        let Numbered { number, item } =
            self.results.recv().expect("threads answer every job, also by a caught panic");
        match item {
            Done::Taken(taken) => self.taken.arrived(number, taken),
            Done::Cut(input, cut) => self.take_cut(input, cut),
            Done::RowGroup(row_group) => self.row_groups.arrived(number, row_group),
        }
        while let Some(taken) = self.taken.next() {
            let (input, batch, ended) = match taken? {
                Taken::Text(text) => self.take_text(text)?,
                Taken::Part(part) => (part.input, self.take_part(*part), None),
                Taken::Skipped(input, reason) => {
                    self.check_empty(input)?;
                    self.skip(input, reason)?;
                    (input, Batch::default(), Some(Ended::Skipped))
                }
                Taken::InputEnd(input) => {
                    self.check_empty(input)?;
                    self.end_input(input);
                    (input, Batch::default(), Some(Ended::Whole))
                }
            };
            self.batches += 1;
            if let Some(collector) = &mut self.collector {
                collector.take(input, batch)?;
                if let Some(ended) = ended {
                    collector.end(input, ended)?;
                }
            }
            self.report()?;
        }
        while let Some(row_group) = self.row_groups.next() {
            let row_group = row_group?;
            let samples = row_group.samples;
            while !self.writer().has_room_for(&row_group)? {
                self.report()?;
            }
            self.writer().append(row_group)?;
            let tokens = self.work.cut.tokens_of(samples);
            self.held_bytes -= tokens as u64 * HELD_BYTES_PER_TOKEN;
            self.position.samples += samples as u64;
            self.report()?;
        }
        Ok(())
    }

    fn writer(&mut self) -> &mut ShardWriter<'a> {
        self.writer.as_mut().expect("a pass that packs has an output")
    }

    /// Numbers a part that was cut off, or the outcome that replaced it, and hands it out.
    fn take_cut(&mut self, input: usize, cut: Result<CutDone, ReadFailure>) {
        self.cutting = false;
        self.held_bytes -= held_bytes(self.work.bounds.piece_bytes);
        let more = match cut {
            Ok(CutDone { reader, next }) => {
                // A file may have grown since it was found.
                let read = next.read_bytes.min(self.work.inputs[input].bytes);
                let read_bytes = read.saturating_sub(self.read_bytes);
                if let Some(part) = next.part {
                    self.read_bytes += read_bytes;
                    let held_bytes = held_bytes(part.bytes);
                    self.hold(held_bytes);
                    let number = self.taken.number();
                    let item = Job::Take(PartAtHand { input, part, held_bytes, read_bytes });
                    self.send(Numbered { number, item });
                }
                match next.more {
                    More::Yes => self.reader = Some(reader),
                    More::No => self.arrive(Ok(Taken::InputEnd(input))),
                }
                next.more
            }
            Err(failure) => {
                self.arrive(match failure {
                    ReadFailure::Skip(reason) => Ok(Taken::Skipped(input, reason)),
                    ReadFailure::Fatal(error) => Err(error),
                });
                More::No
            }
        };
        if more == More::No {
            self.read_bytes = 0;
        }
        self.plan.part_is_back(more);
    }

    /// Puts something into the stream that no thread has to work for.
    fn arrive(&mut self, taken: Result<Taken, PrepareError>) {
        let number = self.taken.number();
        self.taken.arrived(number, taken);
    }

    fn take_text(
        &mut self,
        TextDone { reading, found }: TextDone,
    ) -> Result<(usize, Batch, Option<Ended>), PrepareError> {
        let mut ended = None;
        self.held_bytes -= held_bytes(reading.bytes);
        let input = &self.work.inputs[reading.input];
        match (&reading.extent, found) {
            (Extent::Check(_), Found::Skipped(reason)) => {
                if self.plan.checked(Verdict::Bad) {
                    self.skip(reading.input, reason)?;
                    ended = Some(Ended::Skipped);
                }
            }
            (Extent::Check(_), _) => {
                self.plan.checked(Verdict::Good);
            }
            (_, Found::Skipped(reason)) => {
                self.skip(reading.input, reason)?;
                ended = Some(Ended::Skipped);
            }
            (_, Found::Whole(whole)) => {
                let batch = self.take_part(*whole);
                self.end_input(reading.input);
                return Ok((reading.input, batch, Some(Ended::Whole)));
            }
            (_, Found::Piece { tokens, text_bytes, example }) => {
                self.outcome.text_bytes += text_bytes;
                self.pieces.take(tokens.len(), text_bytes, example);
                self.position.tokens += tokens.len() as u64;
                self.position.bytes_done += reading.bytes;
                self.input_done += reading.bytes;
                let ends_document =
                    matches!(&reading.extent, Extent::Piece(piece) if piece.end == input.bytes);
                if ends_document {
                    self.outcome.documents += 1;
                    let pieces = mem::take(&mut self.pieces);
                    pieces.count(&self.work.rules, reading.input, &mut self.outcome.left_out);
                    self.end_input(reading.input);
                    ended = Some(Ended::Whole);
                }
                if self.collector.is_some() {
                    let (tokenized, read_bytes) = (u64::from(ends_document), reading.bytes);
                    let batch = Batch { tokens, tokenized, read_bytes, ..Batch::default() };
                    return Ok((reading.input, batch, ended));
                }
                self.pack(&tokens);
            }
            (_, Found::Checked) => unreachable!("only checks are answered so"),
        }
        Ok((reading.input, Batch::default(), ended))
    }

    fn take_part(&mut self, part: PartDone) -> Batch {
        self.held_bytes -= part.held_bytes;
        let mut batch = part.batch;
        (batch.empty, batch.nulls, batch.broken) = (part.empty, part.nulls, part.broken.count);
        self.looked_at += (batch.signatures.len() + batch.documents.len()) as u64;
        self.position.tokens += part.tokens.len() as u64;
        if self.collector.is_some() {
            (batch.tokens, batch.lengths) = (part.tokens, part.lengths);
            (batch.tokenized, batch.read_bytes) = (part.documents, part.read_bytes);
            batch.named_broken.clone_from(&part.broken.named);
        } else {
            self.pack(&part.tokens);
        }
        self.position.bytes_done += part.read_bytes;
        self.input_done += part.read_bytes;
        let outcome = &mut self.outcome;
        outcome.documents += part.documents;
        outcome.empty += part.empty;
        outcome.nulls += part.nulls;
        outcome.text_bytes += part.text_bytes;
        outcome.broken.append(part.broken);
        outcome.left_out.add(&part.left_out);
        outcome.largest_token = outcome.largest_token.max(part.largest_token);
        batch
    }

    fn pack(&mut self, tokens: &[u32]) {
        for row_group in self.packer.push(tokens) {
            self.hand_out_row_group(row_group);
        }
    }

    fn skip(&mut self, input: usize, reason: SkipReason) -> Result<(), PrepareError> {
        self.end_input(input);
        let path = self.work.inputs[input].path.clone();
        if self.collector.as_ref().is_some_and(|collector| !collector.may_skip(input)) {
            return Err(PrepareError::Readmitted { path, reason });
        }
        match self.work.strictness {
            Strictness::Strict => Err(PrepareError::Document { path, reason }),
            Strictness::Lenient => {
                self.outcome.skipped.push(SkippedDocument { path, reason });
                Ok(())
            }
        }
    }

    /// Whether the first pass of two found as little here.
    fn check_empty(&self, input: usize) -> Result<(), PrepareError> {
        let changed = || PrepareError::InputChanged { path: self.work.inputs[input].path.clone() };
        Admission::new(self.work.rules, self.batches, input)
            .finish()
            .map(|_| ())
            .ok_or_else(changed)
    }

    /// Checks, in the second of two passes, that the first one had as many batches.
    fn check_end(&self) -> Result<(), PrepareError> {
        match (self.work.rules.pass, self.work.inputs.last()) {
            (Pass::Tokenize(Some(verdicts)), Some(input)) if verdicts.batches() != self.batches => {
                Err(PrepareError::InputChanged { path: input.path.clone() })
            }
            _ => Ok(()),
        }
    }

    /// Counts the bytes of an input outside its texts and parts as done.
    fn end_input(&mut self, input: usize) {
        self.position.bytes_done += self.work.inputs[input].bytes - self.input_done;
        self.input_done = 0;
    }

    fn report(&mut self) -> Result<(), PrepareError> {
        self.position.documents = match self.position.phase {
            Phase::Comparing => self.looked_at,
            _ => self.outcome.documents,
        };
        match (self.progress)(self.position) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(PrepareError::Interrupted),
        }
    }
}

/// The charge for `text_bytes` bytes of text.
fn held_bytes(text_bytes: u64) -> u64 {
    text_bytes.saturating_mul(HELD_BYTES_PER_TEXT_BYTE).max(HELD_BYTES_AT_LEAST)
}

#[cfg(test)]
mod tests;
