//! Entries of a process's own buckets, and verdicts: the ones that it finds, and the ones on its documents.

use std::sync::Mutex;

use super::{
    BANDS, COMPLETE, COPIES, Comparing, FOUND_COPIES, FOUND_NEAR, JUDGED, Judging, MESSAGE_BYTES,
    ORDINAL_BITS, lock,
};
use crate::prepare::{
    PrepareError,
    choose::duplicates::{Bucket, Likeness, Sorter},
    data_report::groups::Groups,
    together::{
        backlog::{Backlog, Popped},
        gather::Signals,
        packet::{Packet, Unpacked},
        peers::{MOMENT, Peers, receive, send},
        unseen::{UNSEEN, Unseen},
    },
};

/// Sends verdicts until there are no more.
pub(super) fn send_verdicts(
    peers: &dyn Peers,
    verdicts: &Backlog,
    signals: &Signals,
) -> Result<(), PrepareError> {
    let mut go_on = || signals.go_on();
    loop {
        match verdicts.pop(MOMENT)? {
            Popped::Message(addressed) => {
                let mut unpacked = Unpacked::new(&addressed, peers.process());
                let to = unpacked.count()?;
                let message = unpacked.some(unpacked.len())?.to_vec();
                send(peers, to, message, &mut go_on)?;
            }
            Popped::Nothing => go_on()?,
            Popped::End => return Ok(()),
        }
    }
}

/// Verdicts in the making: for each process the verdicts on copies and on near copies, which begin with its number.
struct Telling<'a> {
    pages: Vec<[Packet; 2]>,
    owners: &'a [usize],
    out: &'a Backlog,
    failed: Option<PrepareError>,
    /// The groups of documents that share buckets, where they are reported.
    groups: Option<Groups>,
}

impl Telling<'_> {
    fn tell(&mut self, likeness: Likeness, rank: u64, first: u64) {
        self.groups.iter_mut().for_each(|groups| groups.link(rank, first));
        // An entry whose input there is not was refused.
        let to = self.owners[(rank >> ORDINAL_BITS) as usize];
        let (which, kind) = match likeness {
            Likeness::Copy => (0, FOUND_COPIES),
            Likeness::NearCopy => (1, FOUND_NEAR),
        };
        let page = &mut self.pages[to][which];
        if page.len() == 0 {
            page.number(to as u64);
            page.byte(kind);
        }
        page.number(rank);
        if page.len() >= MESSAGE_BYTES {
            let message = page.take();
            self.put(message);
        }
    }

    fn put(&mut self, message: Vec<u8>) {
        if let Err(error) = self.out.push(message) {
            self.failed.get_or_insert(error);
        }
    }

    /// Sends the remaining verdicts, and a mark that they were the last.
    fn finish(&mut self) {
        for to in 0..self.pages.len() {
            for which in 0..2 {
                let message = self.pages[to][which].take();
                if !message.is_empty() {
                    self.put(message);
                }
            }
            let mut last = Packet::default();
            last.number(to as u64);
            last.byte(JUDGED);
            self.put(last.take());
        }
    }

    fn check(&mut self) -> Result<(), PrepareError> {
        self.failed.take().map_or(Ok(()), Err)
    }
}

/// Takes entries of this process's buckets, and verdicts on its documents.
pub(super) struct Receiver<'a> {
    comparing: Comparing<'a>,
    /// The sorter of entries, until all entries have arrived.
    sorter: Option<Sorter>,
    /// Processes that have sent all their entries.
    complete: usize,
    telling: Telling<'a>,
    judging: &'a Mutex<Judging>,
}

impl<'a> Receiver<'a> {
    pub(super) fn new(
        comparing: Comparing<'a>,
        out: &'a Backlog,
        judging: &'a Mutex<Judging>,
    ) -> Receiver<'a> {
        let pages = (0..comparing.peers.processes()).map(|_| Default::default()).collect();
        let groups = Groups::asked(comparing.reporting);
        let telling = Telling { pages, owners: comparing.owners, out, failed: None, groups };
        let sorter = Some(Sorter::new(comparing.settings));
        Receiver { comparing, sorter, complete: 0, telling, judging }
    }

    /// Groups of the documents in this process's buckets, by their ranks.
    pub(super) fn into_groups(self) -> Option<Groups> {
        self.telling.groups
    }

    pub(super) fn run(
        &mut self,
        go_on: &mut dyn FnMut() -> Result<(), PrepareError>,
    ) -> Result<(), PrepareError> {
        go_on()?;
        let peers = self.comparing.peers;
        let mut open: Vec<usize> = (0..peers.processes()).collect();
        // Entries and verdicts are sent by two threads: either may end first.
        let mut ends = vec![0; peers.processes()];
        while !open.is_empty() {
            let (process, message) = receive(peers, &open, go_on)?;
            // Also where one follows the other for hours.
            go_on()?;
            let mut unpacked = Unpacked::new(&message, process);
            let kind = unpacked.byte()?;
            match kind {
                COPIES | BANDS => self.take_entries(kind, &mut unpacked)?,
                COMPLETE => {
                    ends[process] += 1;
                    self.complete += 1;
                    if self.complete == peers.processes() {
                        self.judge(go_on)?;
                    }
                }
                FOUND_COPIES => self.take_verdicts(Likeness::Copy, &mut unpacked)?,
                FOUND_NEAR => self.take_verdicts(Likeness::NearCopy, &mut unpacked)?,
                JUDGED => ends[process] += 1,
                UNSEEN if peers.process() == 0 => Unseen::read(&mut unpacked)?.look(process)?,
                _ => return Err(unpacked.wrong()),
            }
            if ends[process] == 2 {
                open.retain(|&other| other != process);
            }
        }
        Ok(())
    }

    fn take_entries(&mut self, kind: u8, unpacked: &mut Unpacked<'_>) -> Result<(), PrepareError> {
        let telling = &mut self.telling;
        let sorter = self.sorter.as_mut().ok_or_else(|| unpacked.wrong())?;
        while !unpacked.is_empty() {
            let bucket = match kind {
                COPIES => Bucket::Copies(unpacked.wide()?),
                _ => Bucket::Band(unpacked.number()?),
            };
            let rank = unpacked.number()?;
            if (rank >> ORDINAL_BITS) as usize >= telling.owners.len() {
                return Err(unpacked.wrong());
            }
            let tell = &mut |likeness, rank, first| telling.tell(likeness, rank, first);
            sorter.insert(bucket, rank, tell)?;
        }
        telling.check()
    }

    fn judge(
        &mut self,
        go_on: &mut dyn FnMut() -> Result<(), PrepareError>,
    ) -> Result<(), PrepareError> {
        let sorter = self.sorter.take().expect("entries are complete once");
        let telling = &mut self.telling;
        sorter.finish(&mut |likeness, rank, first| telling.tell(likeness, rank, first), go_on)?;
        telling.finish();
        telling.check()
    }

    fn take_verdicts(
        &mut self,
        likeness: Likeness,
        unpacked: &mut Unpacked<'_>,
    ) -> Result<(), PrepareError> {
        let mut judging = lock(self.judging);
        let Judging { before, documents, found } = &mut *judging;
        while !unpacked.is_empty() {
            let rank = unpacked.number()?;
            let number = (rank >> ORDINAL_BITS) as usize;
            let own = self.comparing.share.numbers.binary_search(&number);
            let before = before[own.map_err(|_| unpacked.wrong())?];
            let document = before + (rank & ((1 << ORDINAL_BITS) - 1));
            if document >= *documents {
                return Err(unpacked.wrong());
            }
            found.insert(likeness, document);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::atomic::{AtomicUsize, Ordering},
        time::Duration,
    };

    use super::*;
    use crate::prepare::{
        Dedup, DedupSettings, Parted, Reporting, choose::duplicates::Found,
        together::forward::Share,
    };

    /// Peers from which the same message comes again and again, `left` times.
    struct Flood {
        message: Vec<u8>,
        left: AtomicUsize,
    }

    impl Peers for Flood {
        fn process(&self) -> usize {
            0
        }

        fn processes(&self) -> usize {
            2
        }

        fn send(&self, _: usize, _: Vec<u8>, _: Duration) -> Result<Option<Vec<u8>>, Parted> {
            unreachable!("another thread sends")
        }

        fn receive(&self, _: &[usize], _: Duration) -> Result<Option<(usize, Vec<u8>)>, Parted> {
            match self.left.load(Ordering::Relaxed) {
                0 => Err(Parted),
                left => {
                    self.left.store(left - 1, Ordering::Relaxed);
                    Ok(Some((1, self.message.clone())))
                }
            }
        }
    }

    /// Receives such messages in a process with two inputs, which may have sent the entries of ten documents.
    fn receive_flood(
        flood: &Flood,
        go_on: &mut dyn FnMut() -> Result<(), PrepareError>,
    ) -> Result<(), PrepareError> {
        let comparing = Comparing {
            peers: flood,
            settings: DedupSettings { dedup: Dedup::Exact, memory_bytes: 0 },
            reporting: Reporting::None,
            owners: &[0, 1, 0],
            share: Share { numbers: &[0, 2] },
        };
        let judging = Judging { before: vec![0, 6], documents: 10, found: Found::default() };
        let (judging, out) = (Mutex::new(judging), Backlog::new());
        Receiver::new(comparing, &out, &judging).run(go_on)
    }

    #[test]
    fn a_request_to_stop_is_heard_while_messages_flow() {
        let flood = Flood { message: vec![COPIES], left: AtomicUsize::new(1000) };
        let mut asked = 0;
        let received = receive_flood(&flood, &mut || {
            asked += 1;
            if asked < 5 { Ok(()) } else { Err(PrepareError::Interrupted) }
        });
        assert!(matches!(received, Err(PrepareError::Interrupted)), "{received:?}");
        let taken = 1000 - flood.left.into_inner();
        assert!(taken <= 5, "{taken} messages were taken");
    }

    #[test]
    fn verdicts_on_documents_that_are_not_there_are_refused() {
        let verdict = |input: u64, ordinal: u64| {
            let mut packet = Packet::of(FOUND_COPIES);
            packet.number(input << ORDINAL_BITS | ordinal);
            let flood = Flood { message: packet.take(), left: AtomicUsize::new(1) };
            receive_flood(&flood, &mut || Ok(())).unwrap_err()
        };
        for (input, ordinal) in [(0, 5), (2, 0), (2, 3)] {
            let error = verdict(input, ordinal);
            assert!(matches!(error, PrepareError::Parted(_)), "{input}, {ordinal}: {error}");
        }
        for (input, ordinal) in [(2, 4), (0, (1 << ORDINAL_BITS) - 1), (1, 0), (7, 0)] {
            let error = verdict(input, ordinal);
            let is_refused = matches!(error, PrepareError::Message { process: 1 });
            assert!(is_refused, "{input}, {ordinal}: {error}");
        }
    }
}
