//! What all processes read, in the order of the inputs again: process 0's side of a pass.

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
    admit::{Pass, Rules},
    batch::Collect,
    find::Input,
    job::Work,
    pipeline::{self, Outcome},
    upkeep::Wanted,
};

pub(crate) type Report<'a> = dyn FnMut(Progress) -> ControlFlow<()> + 'a;

/// As [`pipeline::run`] with a collector, over all processes. The collector takes what they read, input after input, on this
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
        let reader = scope.spawn(move || {
            let _ended = EndsWithThis(Some(backlog), signals);
            let share = Share { numbers: &own.numbers };
            let read = read_share(&own.work(work), share, backlog, &mut |_| signals.flow());
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
            // It waited in vain for what this process reads.
            (Err(PrepareError::Interrupted), Err(error)) | (Ok(_), Err(error)) => Err(error),
            (merged, _) => merged,
        }
    })
}

/// Asks the caller whether to go on.
pub(crate) fn ask(progress: &mut Report<'_>, position: Progress) -> Result<(), PrepareError> {
    match progress(position) {
        ControlFlow::Continue(()) => Ok(()),
        ControlFlow::Break(()) => Err(PrepareError::Interrupted),
    }
}

/// What the threads of a process tell each other.
#[derive(Debug, Default)]
pub(super) struct Signals {
    /// Nobody wants anything more.
    pub is_stopped: AtomicBool,
    /// The thread that reads is at its end.
    pub has_ended: AtomicBool,
    /// And all was well.
    pub is_read: AtomicBool,
}

impl Signals {
    pub(super) fn flow(&self) -> ControlFlow<()> {
        match self.is_stopped.load(Ordering::Relaxed) {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
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

/// Ends a backlog, if there is one, and says so, whatever becomes of the thread that fills it.
pub(super) struct EndsWithThis<'a>(pub Option<&'a Backlog>, pub &'a Signals);

impl Drop for EndsWithThis<'_> {
    fn drop(&mut self) {
        self.1.has_ended.store(true, Ordering::Release);
        self.0.into_iter().for_each(Backlog::end);
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
            Pass::Fetch(all) => {
                let mut wanted = Wanted::default();
                for &number in &numbers {
                    wanted.push(all.all_of(number).to_vec());
                }
                Some(wanted)
            }
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
    /// The page at hand of each process.
    pages: Vec<Option<Page>>,
    position: Progress,
    /// Bytes of the input at hand that were read.
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
                        self.position.documents += batch.tokenized;
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
                Item::Summary(summary) => {
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

    /// Counts bytes of the input at hand, of which there are no more than it has.
    fn advance(&mut self, input: usize, bytes: u64) {
        let bytes = bytes.min(self.work.inputs[input].bytes.saturating_sub(self.input_done));
        self.input_done += bytes;
        self.position.bytes_done += bytes;
    }

    fn report(&mut self) -> Result<(), PrepareError> {
        ask(self.progress, self.position)
    }
}
