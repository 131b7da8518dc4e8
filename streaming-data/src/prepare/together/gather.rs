//! Puts the readings of all processes into the order of the inputs: process 0's side of a pass.

use std::{
    ops::ControlFlow,
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

use super::{
    backlog::{Backlog, Popped},
    deal::{deal, dealt_to},
    forward::{Share, read_share},
    order::give_orders,
    page::{Item, Page, Summary},
    peers::{MOMENT, Peers},
};
use crate::prepare::{
    Phase, PrepareError, Progress,
    choose::admit::{Pass, Rules},
    input::find::Input,
    pipeline::{self, Outcome, batch::Collect, job::Work},
    upkeep::Wanted,
};

pub(crate) type Report<'a> = dyn FnMut(Progress) -> ControlFlow<()> + 'a;

/// As [`pipeline::run`] with a collector, over all processes. The collector takes the batches of all, input after input, on this
/// thread.
///
/// # Errors
/// As [`pipeline::run`], and [`PrepareError::Parted`].
pub(crate) fn gather(
    work: &Work<'_>,
    collector: &mut dyn Collect,
    progress: &mut Report<'_>,
) -> Result<Outcome, PrepareError> {
    let Some(peers) = work.peers else {
        return pipeline::run(work, None, Some(collector), progress);
    };
    let owners = deal(work.inputs.iter().map(|input| input.bytes), peers.processes());
    let position = Progress {
        phase: match work.rules.pass {
            Pass::Record(..) => Phase::Comparing,
            _ => Phase::Tokenizing,
        },
        bytes_total: work.inputs.iter().map(|input| input.bytes).sum(),
        ..Progress::default()
    };
    let go_on = &mut || ask(progress, position);
    give_orders(peers, work.rules.pass, work.inputs, &owners, go_on)?;
    let own = OwnShare::new(work, &owners);
    let (backlog, signals) = (Backlog::new(), Signals::default());
    thread::scope(|scope| {
        let (own, backlog, signals) = (&own, &backlog, &signals);
        let _stops = StopsAtPanic(&signals.is_stopped);
        let reader = scope.spawn(move || {
            let _ended = EndsWithThis(Some(backlog), signals);
            let share = Share { numbers: &own.numbers };
            let read = read_share(&own.work(work), share, None, backlog, &mut |_| signals.flow());
            signals.is_read.store(read.is_ok(), Ordering::Relaxed);
            read
        });
        let mut merge = Merge {
            work,
            peers,
            backlog,
            signals,
            pages: (0..peers.processes()).map(|_| None).collect(),
            position,
            input_done: 0,
            summary: Summary::default(),
            progress,
        };
        let merged = merge.run(&owners, collector).map(|()| merge.summary.outcome);
        signals.is_stopped.store(merged.is_err(), Ordering::Relaxed);
        let read = reader.join().expect("what reads texts does not panic");
        match (merged, read) {
            (Ok(outcome), Ok(())) => Ok(outcome),
            (merged, read) => Err(cause(merged.err().into_iter().chain(read.err()))),
        }
    })
}

/// Which of the errors with which threads of a process ended says why they did: where one fails, the others are interrupted, and
/// so are they where the work of all was ended.
pub(super) fn cause(errors: impl IntoIterator<Item = PrepareError>) -> PrepareError {
    let says_little = |error: &PrepareError| match error {
        PrepareError::Interrupted => 2,
        PrepareError::Parted(_) => 1,
        _ => 0,
    };
    errors.into_iter().min_by_key(says_little).unwrap_or(PrepareError::Interrupted)
}

/// Asks the caller whether to go on.
pub(crate) fn ask(progress: &mut Report<'_>, position: Progress) -> Result<(), PrepareError> {
    match progress(position) {
        ControlFlow::Continue(()) => Ok(()),
        ControlFlow::Break(()) => Err(PrepareError::Interrupted),
    }
}

/// Messages between the threads of a process.
#[derive(Debug, Default)]
pub(super) struct Signals {
    /// Whether the threads are to stop.
    pub is_stopped: AtomicBool,
    /// Whether the thread that reads has ended.
    pub has_ended: AtomicBool,
    /// Whether that thread has read everything without an error.
    pub is_read: AtomicBool,
}

impl Signals {
    pub(super) fn flow(&self) -> ControlFlow<()> {
        match self.is_stopped.load(Ordering::Relaxed) {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    }

    /// An error where nothing more is wanted.
    pub(super) fn go_on(&self) -> Result<(), PrepareError> {
        match self.flow() {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(PrepareError::Interrupted),
        }
    }

    /// An error, once the thread that reads ended with one, which says why.
    pub(super) fn check(&self) -> Result<(), PrepareError> {
        let has_ended = self.has_ended.load(Ordering::Acquire);
        match has_ended && !self.is_read.load(Ordering::Relaxed) {
            true => Err(PrepareError::Interrupted),
            false => Ok(()),
        }
    }
}

/// Ends a backlog, if there is one, and signals this, however the thread that fills it ends.
pub(super) struct EndsWithThis<'a>(pub Option<&'a Backlog>, pub &'a Signals);

impl Drop for EndsWithThis<'_> {
    fn drop(&mut self) {
        self.1.has_ended.store(true, Ordering::Release);
        self.0.into_iter().for_each(Backlog::end);
    }
}

/// Tells other threads of a panic of this one: a scope ends when all its threads have, and they wait for each other.
pub(super) struct StopsAtPanic<'a>(pub &'a AtomicBool);

impl Drop for StopsAtPanic<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.store(true, Ordering::Relaxed);
        }
    }
}

/// The inputs of process 0.
pub(super) struct OwnShare {
    pub numbers: Vec<usize>,
    inputs: Vec<Input>,
    wanted: Option<Wanted>,
}

impl OwnShare {
    pub(super) fn new(work: &Work<'_>, owners: &[usize]) -> OwnShare {
        let numbers = dealt_to(owners, 0);
        let inputs = numbers.iter().map(|&number| work.inputs[number].clone()).collect();
        let wanted = match work.rules.pass {
            Pass::Fetch(all) => Some(all.of_inputs(&numbers)),
            _ => None,
        };
        OwnShare { numbers, inputs, wanted }
    }

    /// The work of all, with these inputs alone.
    pub(super) fn work<'a>(&'a self, work: &Work<'a>) -> Work<'a> {
        let pass = match &self.wanted {
            Some(wanted) => Pass::Fetch(wanted),
            None => work.rules.pass,
        };
        let rules = Rules { pass, ..work.rules };
        Work { inputs: &self.inputs, rules, peers: None, ..*work }
    }
}

/// Puts the pages of all processes in order.
struct Merge<'a, 'b> {
    work: &'a Work<'a>,
    peers: &'a dyn Peers,
    backlog: &'a Backlog,
    signals: &'a Signals,
    /// The current page of each process.
    pages: Vec<Option<Page>>,
    position: Progress,
    /// Bytes of the current input that were read.
    input_done: u64,
    summary: Summary,
    progress: &'a mut Report<'b>,
}

impl Merge<'_, '_> {
    fn run(&mut self, owners: &[usize], collector: &mut dyn Collect) -> Result<(), PrepareError> {
        self.report()?;
        for (number, &owner) in owners.iter().enumerate() {
            loop {
                match self.next(owner)? {
                    Item::Batch(input, mut batch) if input == number => {
                        // Documents that are not tokenized get records only.
                        self.position.documents += batch.tokenized + batch.documents.len() as u64;
                        self.position.tokens += batch.tokens.len() as u64;
                        self.advance(number, batch.read_bytes);
                        let named = std::mem::take(&mut batch.named_broken);
                        self.summary.outcome.broken.take(batch.broken, named);
                        collector.take(number, batch)?;
                    }
                    Item::End(input, ended) if input == number => {
                        collector.end(number, ended)?;
                        self.advance(number, u64::MAX);
                        self.input_done = 0;
                        break;
                    }
                    _ => return Err(PrepareError::Message { process: owner }),
                }
                self.report()?;
            }
        }
        for process in 0..self.peers.processes() {
            match self.next(process)? {
                Item::Summary(summary) if summary.is_of_inputs(owners.len()) => {
                    self.work.rules.exclusions.note_used(&summary.used_exclusions);
                    self.summary.add(*summary);
                }
                _ => return Err(PrepareError::Message { process }),
            }
        }
        self.report()
    }

    /// The next item of a process.
    fn next(&mut self, process: usize) -> Result<Item, PrepareError> {
        loop {
            if let Some(page) = &mut self.pages[process] {
                match page.next()? {
                    Some(item) => return Ok(item),
                    None => self.pages[process] = None,
                }
            }
            self.signals.check()?;
            let message = match process {
                0 => match self.backlog.pop(MOMENT)? {
                    Popped::Message(message) => Some(message),
                    Popped::Nothing => None,
                    Popped::End => return Err(PrepareError::Interrupted),
                },
                _ => self.peers.receive(&[process], MOMENT)?.map(|(_, message)| message),
            };
            match message {
                Some(message) => self.pages[process] = Some(Page::new(message, process)),
                None => self.report()?,
            }
        }
    }

    /// Counts bytes of the current input, at most as many as it has.
    fn advance(&mut self, input: usize, bytes: u64) {
        let bytes = bytes.min(self.work.inputs[input].bytes.saturating_sub(self.input_done));
        self.input_done += bytes;
        self.position.bytes_done += bytes;
    }

    fn report(&mut self) -> Result<(), PrepareError> {
        ask(self.progress, self.position)
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;
    use crate::prepare::Parted;

    #[test]
    fn what_says_why_is_told_of_several_errors() {
        let interrupted = || PrepareError::Interrupted;
        let parted = || PrepareError::Parted(Parted);
        let of_disk = || PrepareError::io("write", "a")(io::Error::other("the disk is full"));
        for errors in [
            vec![interrupted(), interrupted(), of_disk()],
            vec![interrupted(), of_disk(), parted()],
            vec![of_disk(), interrupted()],
        ] {
            assert!(matches!(cause(errors), PrepareError::Data(_)));
        }
        assert!(matches!(cause([interrupted(), parted()]), PrepareError::Parted(_)));
        assert!(matches!(cause([interrupted(), interrupted()]), PrepareError::Interrupted));
    }
}
