//! Entries of a process's documents, sent to the processes of their buckets.

use std::sync::Mutex;

use super::{BANDS, COMPLETE, COPIES, Comparing, Judging, MESSAGE_BYTES, ORDINAL_BITS, lock};
use crate::prepare::{
    PrepareError,
    choose::duplicates::{Bucket, Listed, Signature},
    pipeline::{
        Outcome,
        batch::{Batch, Collect},
    },
    together::{
        gather::{Report, Signals},
        packet::Packet,
        peers::{send, wait_for_end},
        unseen::Unseen,
    },
};

/// Reads, and sends entries.
pub(super) fn sign(
    read: impl FnOnce(&mut Signing<'_>, &mut Report<'_>) -> Result<Outcome, PrepareError>,
    comparing: Comparing<'_>,
    judging: &Mutex<Judging>,
    signals: &Signals,
    progress: &mut Report<'_>,
) -> Result<(Listed, Outcome), PrepareError> {
    let processes = comparing.peers.processes();
    let mut signing = Signing {
        comparing,
        judging,
        signals,
        listed: Listed::default(),
        begun: None,
        entries: (0..2 * processes).map(|_| Packet::default()).collect(),
    };
    let outcome = read(&mut signing, progress)?;
    for page in 0..2 * processes {
        signing.flush(page)?;
    }
    (0..processes).try_for_each(|to| signing.send(to, vec![COMPLETE]))?;
    Ok((signing.listed, outcome))
}

/// Takes signatures, and sends entries.
pub(super) struct Signing<'a> {
    comparing: Comparing<'a>,
    judging: &'a Mutex<Judging>,
    signals: &'a Signals,
    pub(super) listed: Listed,
    /// The current input, and the documents before it.
    begun: Option<(usize, u64)>,
    /// For each process two messages in the making: of copies and of bands.
    entries: Vec<Packet>,
}

impl Signing<'_> {
    fn send(&self, to: usize, message: Vec<u8>) -> Result<(), PrepareError> {
        send(self.comparing.peers, to, message, &mut || self.signals.go_on())
    }

    /// The error with which reading ends that ended with this one. Whether an input must be read that cannot be read here, process 0
    /// says, and ends the work.
    pub(super) fn ended_by(&self, error: PrepareError) -> PrepareError {
        let peers = self.comparing.peers;
        if peers.process() == 0 {
            return error;
        }
        let sent = Unseen::of_error(error).and_then(|unseen| self.send(0, unseen.message()));
        match sent {
            Ok(()) => wait_for_end(peers, &mut || self.signals.go_on()),
            Err(error) => error,
        }
    }

    /// Takes the next document of input `number`; `before` documents of other inputs came before it.
    pub(super) fn push(
        &mut self,
        (number, before): (usize, u64),
        signature: Option<&Signature>,
    ) -> Result<(), PrepareError> {
        let rank = rank(number, self.listed.push(signature) - before)?;
        let mut buckets = signature.into_iter().flat_map(Signature::buckets);
        buckets.try_for_each(|bucket| self.enter(bucket, rank))
    }

    fn flush(&mut self, page: usize) -> Result<(), PrepareError> {
        match self.entries[page].take() {
            empty if empty.is_empty() => Ok(()),
            message => {
                // Verdicts on these may come as soon as it is sent.
                lock(self.judging).documents = self.listed.documents();
                self.send(page / 2, message)
            }
        }
    }

    fn enter(&mut self, bucket: Bucket, rank: u64) -> Result<(), PrepareError> {
        let processes = self.entries.len() as u64 / 2;
        // Keys are hashes: any of their bits will do.
        let page = match bucket {
            Bucket::Copies(key) => 2 * (key as u64 % processes),
            Bucket::Band(key) => 2 * (key % processes) + 1,
        };
        let page = page as usize;
        let entries = &mut self.entries[page];
        if entries.len() == 0 {
            entries.byte(if page.is_multiple_of(2) { COPIES } else { BANDS });
        }
        match bucket {
            Bucket::Copies(key) => entries.wide(key),
            Bucket::Band(key) => entries.number(key),
        }
        entries.number(rank);
        if entries.len() >= MESSAGE_BYTES { self.flush(page) } else { Ok(()) }
    }
}

impl Collect for Signing<'_> {
    fn take(&mut self, input: usize, batch: Batch) -> Result<(), PrepareError> {
        self.listed.begin(batch.digest);
        let before = match self.begun {
            Some((begun, before)) if begun == input => before,
            _ => {
                let before = self.listed.documents();
                lock(self.judging).before[input] = before;
                self.begun = Some((input, before));
                before
            }
        };
        let begun = (self.comparing.share.numbers[input], before);
        let mut signatures = batch.signatures.iter();
        signatures.try_for_each(|signature| self.push(begun, signature.as_ref()))
    }
}

/// A document's entry in the order of all.
fn rank(input: usize, ordinal: u64) -> Result<u64, PrepareError> {
    let most_inputs = 1 << (u64::BITS - ORDINAL_BITS);
    if input as u64 >= most_inputs {
        let (key, found, expected) =
            ("inputs", input as u64 + 1, "at most 2^28 for several processes");
        return Err(PrepareError::Setting { key, found, expected });
    }
    if ordinal >> ORDINAL_BITS != 0 {
        let (key, found) = ("documents of an input", ordinal + 1);
        let expected = "at most 2^36 for several processes";
        return Err(PrepareError::Setting { key, found, expected });
    }
    Ok((input as u64) << ORDINAL_BITS | ordinal)
}
