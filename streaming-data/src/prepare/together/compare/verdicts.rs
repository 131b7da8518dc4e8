//! Entries of a process's own buckets, and verdicts: those that it finds, and those on its documents.

use std::{ops::ControlFlow, sync::Mutex};

use super::{
    BANDS, COMPLETE, COPIES, Comparing, FOUND_COPIES, FOUND_NEAR, JUDGED, Judging, MESSAGE_BYTES,
    ORDINAL_BITS, lock,
};
use crate::prepare::{
    PrepareError,
    duplicates::{Bucket, Likeness, Sorter},
    together::{
        backlog::{Backlog, Popped},
        gather::Signals,
        packet::{Packet, Unpacked},
        peers::{MOMENT, Peers, receive, send},
    },
};

/// Sends verdicts until there are no more.
pub(super) fn send_verdicts(
    peers: &dyn Peers,
    verdicts: &Backlog,
    signals: &Signals,
) -> Result<(), PrepareError> {
    let go_on = || match signals.flow() {
        ControlFlow::Continue(()) => Ok(()),
        ControlFlow::Break(()) => Err(PrepareError::Interrupted),
    };
    loop {
        match verdicts.pop(MOMENT)? {
            Popped::Message(addressed) => {
                let mut unpacked = Unpacked::new(&addressed, peers.process());
                let to = unpacked.count()?;
                let message = unpacked.some(unpacked.len())?.to_vec();
                send(peers, to, message, &mut &go_on)?;
            }
            Popped::Nothing => go_on()?,
            Popped::End => return Ok(()),
        }
    }
}

/// Verdicts in the making: for each process those on copies and on near copies, which begin with its number.
struct Telling<'a> {
    pages: Vec<[Packet; 2]>,
    owners: &'a [usize],
    out: &'a Backlog,
    failed: Option<PrepareError>,
}

impl Telling<'_> {
    fn tell(&mut self, likeness: Likeness, rank: u64) {
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

    /// Sends what is left, and that it was all.
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
    /// Until all entries are there.
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
        let telling = Telling { pages, owners: comparing.owners, out, failed: None };
        let sorter = Some(Sorter::new(comparing.settings));
        Receiver { comparing, sorter, complete: 0, telling, judging }
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
            sorter.insert(bucket, rank, &mut |likeness, rank| telling.tell(likeness, rank))?;
        }
        telling.check()
    }

    fn judge(
        &mut self,
        go_on: &mut dyn FnMut() -> Result<(), PrepareError>,
    ) -> Result<(), PrepareError> {
        let sorter = self.sorter.take().expect("entries are complete once");
        let telling = &mut self.telling;
        sorter.finish(&mut |likeness, rank| telling.tell(likeness, rank), go_on)?;
        telling.finish();
        telling.check()
    }

    fn take_verdicts(
        &mut self,
        likeness: Likeness,
        unpacked: &mut Unpacked<'_>,
    ) -> Result<(), PrepareError> {
        let mut judging = lock(self.judging);
        let Judging { before, found } = &mut *judging;
        while !unpacked.is_empty() {
            let rank = unpacked.number()?;
            let number = (rank >> ORDINAL_BITS) as usize;
            let own = self.comparing.share.numbers.binary_search(&number);
            let before = before[own.map_err(|_| unpacked.wrong())?];
            found.insert(likeness, before + (rank & ((1 << ORDINAL_BITS) - 1)));
        }
        Ok(())
    }
}
