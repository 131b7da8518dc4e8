//! The messages from a process to process 0 about its inputs: pages of batches, ends of inputs, and in the end a
//! summary.

use super::{
    counts::{read_tally, write_tally},
    packet::{Packet, Unpacked},
    setup::{path_of_bytes, path_to_bytes},
    unseen::{UNSEEN, Unseen, look_at},
};
use crate::prepare::{
    BrokenDocument, BrokenReason, DedupReport, Place, PrepareError, Rule, SkipReason,
    SkippedDocument,
    choose::admit::LeftOut,
    input::skip::NAMED_BROKEN,
    pipeline::{
        Outcome,
        batch::{Batch, Ended},
    },
    upkeep::{Judged, Record, RecordReader, RecordWriter},
};

// Beside these there is [`UNSEEN`].
const BATCH: u8 = 1;
const END: u8 = 2;
const SUMMARY: u8 = 3;

/// A page is sent at this number of bytes.
const PAGE_BYTES: usize = 128 << 10;

/// Binary digits of the counts of a batch, and of a process in a pass, at most: sums over all batches and processes have more.
const BATCH_DIGITS: u32 = 40;
const PASS_DIGITS: u32 = 52;

/// A page that is being written.
#[derive(Debug, Default)]
pub(super) struct PageWriter {
    packet: Packet,
    /// Documents that were named as broken so far.
    named: usize,
}

/// The content of pages.
#[derive(Debug)]
pub(super) enum Item {
    /// The next part read of an input.
    Batch(usize, Batch),
    /// An input gives nothing more.
    End(usize, Ended),
    /// All that is left to say, and the end of the pages of a pass.
    Summary(Box<Summary>),
}

/// The outcome of a process's pass.
#[derive(Debug, Default)]
pub(super) struct Summary {
    pub outcome: Outcome,
    pub dedup: DedupReport,
    /// Which keys of the list some document had.
    pub used_exclusions: Vec<u8>,
}

impl PageWriter {
    /// Appends a batch of an input, by the number of this among all.
    pub(super) fn batch(&mut self, input: usize, batch: &Batch) {
        let named = batch.named_broken.len().min(NAMED_BROKEN - self.named);
        self.named += named;
        let packet = &mut self.packet;
        packet.byte(BATCH);
        packet.number(input as u64);
        for number in [batch.tokenized, batch.empty, batch.nulls, batch.broken, batch.read_bytes] {
            packet.number(number);
        }
        packet.number(named as u64);
        for broken in &batch.named_broken[..named] {
            let (kind, number) = match broken.place {
                Place::Line(number) => (0, number),
                Place::Row(number) => (1, number),
                Place::Sample(number) => (2, number),
            };
            packet.byte(kind);
            packet.number(number);
            packet.bytes(path_to_bytes(&broken.path));
            packet.bytes(broken.reason.to_string().as_bytes());
        }
        packet.tokens(&batch.tokens);
        packet.number(batch.lengths.len() as u64);
        batch.lengths.iter().for_each(|&length| packet.number(length as u64));
        packet.number(batch.documents.len() as u64);
        let mut records = RecordWriter::default();
        for document in &batch.documents {
            records.write(&Record::Document(document.clone()));
        }
        packet.bytes(&records.take_bytes());
    }

    pub(super) fn end(&mut self, input: usize, ended: Ended) {
        self.packet.byte(END);
        self.packet.number(input as u64);
        self.packet.byte(u8::from(ended == Ended::Skipped));
    }

    pub(super) fn unseen(&mut self, unseen: &Unseen) {
        unseen.write(&mut self.packet);
    }

    pub(super) fn summary(&mut self, summary: &Summary) {
        let Summary { outcome, dedup, used_exclusions } = summary;
        let packet = &mut self.packet;
        packet.byte(SUMMARY);
        for number in [
            outcome.documents,
            outcome.empty,
            outcome.nulls,
            outcome.text_bytes,
            u64::from(outcome.largest_token),
            outcome.left_out.excluded,
            dedup.copies,
            dedup.near_copies,
        ] {
            packet.number(number);
        }
        let filtered = &outcome.left_out.filtered;
        for counts in [&filtered.rejected, &filtered.dropped_lines] {
            packet.number(counts.len() as u64);
            for (rule, count) in counts {
                packet.bytes(rule.table.as_bytes());
                packet.bytes(rule.key.as_bytes());
                packet.number(*count);
            }
        }
        packet.number(outcome.skipped.len() as u64);
        for SkippedDocument { path, reason } in &outcome.skipped {
            packet.bytes(path_to_bytes(path));
            packet.bytes(reason.line().as_bytes());
            packet.byte(u8::from(matches!(reason, SkipReason::Unreadable { .. })));
        }
        packet.bytes(used_exclusions);
        write_tally(packet, &outcome.left_out.tally);
    }

    /// The page, if it is full enough to be sent.
    pub(super) fn take_full(&mut self) -> Option<Vec<u8>> {
        (self.packet.len() >= PAGE_BYTES).then(|| self.packet.take())
    }

    /// The page as it is.
    pub(super) fn take(&mut self) -> Vec<u8> {
        self.packet.take()
    }
}

/// A page that is being read.
#[derive(Debug)]
pub(super) struct Page {
    message: Vec<u8>,
    at: usize,
    process: usize,
}

impl Page {
    pub(super) fn new(message: Vec<u8>, process: usize) -> Page {
        Page { message, at: 0, process }
    }

    /// The next item; none at the end of the page.
    ///
    /// # Errors
    /// [`PrepareError::Message`], and the errors of [`Unseen::look`].
    pub(super) fn next(&mut self) -> Result<Option<Item>, PrepareError> {
        let mut unpacked = Unpacked::new(&self.message[self.at..], self.process);
        let item = loop {
            if unpacked.is_empty() {
                return Ok(None);
            }
            match unpacked.byte()? {
                UNSEEN => Unseen::read(&mut unpacked)?.look(self.process)?,
                kind => break self.read(kind, &mut unpacked)?,
            }
        };
        self.at = self.message.len() - unpacked.len();
        Ok(Some(item))
    }

    fn read(&self, kind: u8, unpacked: &mut Unpacked<'_>) -> Result<Item, PrepareError> {
        Ok(match kind {
            BATCH => {
                let input = unpacked.count()?;
                Item::Batch(input, read_batch(unpacked)?)
            }
            END => {
                let (input, how) = (unpacked.count()?, unpacked.byte()?);
                Item::End(input, if how == 0 { Ended::Whole } else { Ended::Skipped })
            }
            SUMMARY => Item::Summary(Box::new(read_summary(unpacked, self.process)?)),
            _ => return Err(unpacked.wrong()),
        })
    }
}

fn read_batch(unpacked: &mut Unpacked<'_>) -> Result<Batch, PrepareError> {
    let mut batch = Batch {
        tokenized: unpacked.tally(BATCH_DIGITS)?,
        empty: unpacked.tally(BATCH_DIGITS)?,
        nulls: unpacked.tally(BATCH_DIGITS)?,
        broken: unpacked.tally(BATCH_DIGITS)?,
        read_bytes: unpacked.number()?,
        ..Batch::default()
    };
    for _ in 0..unpacked.count()? {
        let (kind, number) = (unpacked.byte()?, unpacked.number()?);
        let place = match kind {
            0 => Place::Line(number),
            1 => Place::Row(number),
            2 => Place::Sample(number),
            _ => return Err(unpacked.wrong()),
        };
        let path = path_of_bytes(unpacked.bytes()?);
        let reason = BrokenReason::Told { words: unpacked.text()?.to_owned() };
        batch.named_broken.push(BrokenDocument { path, place, reason });
    }
    batch.tokens = unpacked.tokens()?;
    for _ in 0..unpacked.count()? {
        batch.lengths.push(unpacked.count()?);
    }
    if batch
        .lengths
        .iter()
        .try_fold(0_usize, |sum, &length| sum.checked_add(length))
        .is_none_or(|sum| !batch.lengths.is_empty() && sum != batch.tokens.len())
    {
        return Err(unpacked.wrong());
    }
    let (documents, mut records) = (unpacked.number()?, unpacked.bytes()?);
    let mut reader = RecordReader::default();
    for _ in 0..documents {
        match reader.read(&mut records) {
            Ok(Some(Record::Document(document)))
                if is_of_a_rule(&document.judged)
                    && document.bytes.is_none_or(|bytes| bytes >> BATCH_DIGITS == 0) =>
            {
                batch.documents.push(document);
            }
            _ => return Err(unpacked.wrong()),
        }
    }
    Ok(batch)
}

/// Whether a document that was rejected says by which rule.
fn is_of_a_rule(judged: &Judged) -> bool {
    match judged {
        Judged::Rejected(rule) => Rule::parse(rule).is_some(),
        Judged::Excluded | Judged::Chosen(_) => true,
    }
}

fn read_summary(unpacked: &mut Unpacked<'_>, process: usize) -> Result<Summary, PrepareError> {
    let mut summary = Summary::default();
    let outcome = &mut summary.outcome;
    outcome.documents = unpacked.tally(PASS_DIGITS)?;
    outcome.empty = unpacked.tally(PASS_DIGITS)?;
    outcome.nulls = unpacked.tally(PASS_DIGITS)?;
    outcome.text_bytes = unpacked.tally(PASS_DIGITS)?;
    outcome.largest_token = u32::try_from(unpacked.number()?).map_err(|_| unpacked.wrong())?;
    let excluded = unpacked.tally(PASS_DIGITS)?;
    outcome.left_out = LeftOut { excluded, ..LeftOut::default() };
    summary.dedup.copies = unpacked.tally(PASS_DIGITS)?;
    summary.dedup.near_copies = unpacked.tally(PASS_DIGITS)?;
    let filtered = &mut outcome.left_out.filtered;
    for counts in [&mut filtered.rejected, &mut filtered.dropped_lines] {
        for _ in 0..unpacked.count()? {
            let rule = Rule::named(unpacked.text()?, unpacked.text()?);
            let rule = rule.ok_or_else(|| unpacked.wrong())?;
            counts.insert(rule, unpacked.tally(PASS_DIGITS)?);
        }
    }
    for _ in 0..unpacked.count()? {
        let path = path_of_bytes(unpacked.bytes()?);
        let (words, is_unreadable) = (unpacked.text()?.to_owned(), unpacked.byte()? == 1);
        // Process 0 failed to read it too, but may be able to by now.
        if is_unreadable && process > 0 {
            look_at(&path, process, &words)?;
        }
        outcome.skipped.push(SkippedDocument { path, reason: SkipReason::Told { words } });
    }
    summary.used_exclusions = unpacked.bytes()?.to_vec();
    summary.outcome.left_out.tally = read_tally(unpacked)?;
    Ok(summary)
}

impl Summary {
    /// Whether it counts only the first `inputs` inputs.
    pub(super) fn is_of_inputs(&self, inputs: usize) -> bool {
        self.outcome.left_out.tally.is_of_inputs(inputs)
    }

    /// Adds what another process did. Its skipped files are appended.
    pub(super) fn add(&mut self, other: Summary) {
        let (own, outcome) = (&mut self.outcome, other.outcome);
        own.documents += outcome.documents;
        own.empty += outcome.empty;
        own.nulls += outcome.nulls;
        own.text_bytes += outcome.text_bytes;
        own.largest_token = own.largest_token.max(outcome.largest_token);
        own.left_out.add(&outcome.left_out);
        own.skipped.extend(outcome.skipped);
        self.dedup.copies += other.dedup.copies;
        self.dedup.near_copies += other.dedup.near_copies;
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;
    use crate::prepare::upkeep::{Document, Fate, Judged};

    #[test]
    fn pages_are_read_as_they_were_written() {
        let broken = |number| BrokenDocument {
            path: "in/a.jsonl".into(),
            place: Place::Line(number),
            reason: BrokenReason::NoKey { key: "text".to_owned() },
        };
        let document = |place| Document {
            place,
            source: u128::from(place) << 70,
            judged: Judged::Chosen(None),
            fate: Fate::Open,
            bytes: (place % 2 == 0).then_some(1000 * place),
        };
        let mut batch = Batch {
            tokens: vec![7; 30],
            lengths: vec![10, 20],
            tokenized: 2,
            broken: 300,
            named_broken: (0..70).map(broken).collect(),
            documents: (3..90).map(document).collect(),
            ..Batch::default()
        };
        let mut writer = PageWriter::default();
        writer.batch(5, &batch);
        writer.batch(5, &batch);
        writer.end(5, Ended::Skipped);
        let mut summary = Summary::default();
        summary.outcome.documents = 4;
        summary.outcome.left_out.filtered.rejected =
            [(Rule { table: "c4", key: "min_sentences" }, 9)].into();
        let reason = SkipReason::Unreadable { source: io::ErrorKind::NotFound.into() };
        let expected = reason.line();
        summary.outcome.skipped.push(SkippedDocument { path: "no/such/file".into(), reason });
        summary.used_exclusions = vec![1, 2];
        writer.summary(&summary);
        let message = writer.take();
        let mut page = Page::new(message.clone(), 1);
        for named in [70, 30] {
            let Some(Item::Batch(5, found)) = page.next().unwrap() else { panic!() };
            assert_eq!((&found.tokens, &found.lengths), (&batch.tokens, &batch.lengths));
            assert_eq!((found.documents, found.broken), (batch.documents.clone(), 300));
            assert_eq!(found.named_broken.len(), named, "so many are named in all");
            assert_eq!(found.named_broken[0].line(), batch.named_broken[0].line());
            batch.named_broken.truncate(30);
        }
        assert!(matches!(page.next().unwrap(), Some(Item::End(5, Ended::Skipped))));
        let Some(Item::Summary(found)) = page.next().unwrap() else { panic!() };
        assert_eq!(found.outcome.documents, 4);
        assert_eq!(found.outcome.left_out.filtered, summary.outcome.left_out.filtered);
        assert_eq!(found.outcome.skipped[0].reason.line(), expected);
        assert_eq!(found.used_exclusions, [1, 2]);
        assert!(page.next().unwrap().is_none());
        for length in 1..message.len() {
            let mut page = Page::new(message[..length].to_vec(), 1);
            while let Ok(Some(_)) = page.next() {}
        }
    }

    #[test]
    fn an_input_that_process_0_can_read_is_not_skipped_because_another_cannot() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.txt");
        let mut summary = Summary::default();
        let reason = SkipReason::Unreadable { source: io::ErrorKind::PermissionDenied.into() };
        summary.outcome.skipped.push(SkippedDocument { path: path.clone(), reason });
        let read = |process| {
            let mut writer = PageWriter::default();
            writer.summary(&summary);
            Page::new(writer.take(), process).next()
        };
        read(2).unwrap();
        std::fs::write(&path, "").unwrap();
        let error = read(2).unwrap_err();
        assert!(matches!(error, PrepareError::InputUnseen { process: 2, .. }), "{error}");
        let Some(Item::Summary(own)) = read(0).unwrap() else { panic!() };
        assert_eq!(
            own.outcome.skipped.len(),
            1,
            "one of its own that came back is skipped all the same"
        );
    }

    #[test]
    fn counts_that_no_sum_can_take_are_refused() {
        type Change = dyn Fn(&mut Batch, &mut Summary);
        let page = |change: &Change| {
            let (mut batch, mut summary) = (Batch::default(), Summary::default());
            change(&mut batch, &mut summary);
            let mut writer = PageWriter::default();
            writer.batch(0, &batch);
            writer.summary(&summary);
            let mut page = Page::new(writer.take(), 1);
            page.next().and_then(|_| page.next()).map(|_| ())
        };
        page(&|batch, summary| {
            batch.read_bytes = u64::MAX;
            summary.outcome.text_bytes = 1 << 50;
        })
        .unwrap();
        let wrong: [&Change; 4] = [
            &|batch, _| batch.tokenized = u64::MAX,
            &|batch, _| batch.broken = 1 << 63,
            &|_, summary| summary.outcome.documents = u64::MAX,
            &|_, summary| summary.dedup.copies = 1 << 60,
        ];
        for change in wrong {
            let error = page(change).unwrap_err();
            assert!(matches!(error, PrepareError::Message { process: 1 }), "{error}");
        }
    }
}
