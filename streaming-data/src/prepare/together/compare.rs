//! Duplicates across processes: every document's entries go to the processes of their buckets, which find out which documents are
//! not the first of one, and tell the processes that have read these.
//!
//! A document's *rank* identifies it: the number of its input, and its own number in that. Ranks are ordered as documents
//! are, in whichever processes they are read, so that the first of a bucket is the same for any number of processes.
//!
//! Each process has three threads at this: one reads and sends entries, waiting where the others are slower; one takes what
//! comes, and never waits for room; and one sends verdicts, which wait in a [`Backlog`] meanwhile. So two
//! processes that send each other more than there is room for both go on.

mod entries;
mod groups;
mod verdicts;

use std::{
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

pub(super) use self::groups::send_groups;
use self::{
    entries::{Signing, sign},
    groups::receive_groups,
    verdicts::{Receiver, send_verdicts},
};
use super::{
    backlog::Backlog,
    deal::deal,
    forward::{Share, summary},
    gather::{EndsWithThis, OwnShare, Report, Signals, StopsAtPanic, ask, cause},
    order::{Order, give_order, give_orders},
    page::{Item, Page, Summary},
    peers::{Peers, receive},
};
use crate::prepare::{
    DedupReport, DedupSettings, Phase, PrepareError, Progress, Reporting,
    choose::duplicates::{Found, Verdicts},
    pipeline::{self, Outcome, job::Work},
    upkeep::{Judged, Record, Spool},
};

const COPIES: u8 = 11;
const BANDS: u8 = 12;
/// No entries follow.
const COMPLETE: u8 = 13;
const FOUND_COPIES: u8 = 14;
const FOUND_NEAR: u8 = 15;
/// No verdicts follow.
const JUDGED: u8 = 16;
/// Links between documents of a group.
const GROUPS: u8 = 17;
/// No links follow.
const GROUPS_END: u8 = 18;

/// Bytes of a message with entries or verdicts.
const MESSAGE_BYTES: usize = 64 << 10;

/// Low bits of a rank, which are a document's number in its input; the bits above are the input's.
const ORDINAL_BITS: u32 = 36;

/// The documents compared, and the processes that compare them.
#[derive(Clone, Copy)]
pub(super) struct Comparing<'a> {
    pub peers: &'a dyn Peers,
    pub settings: DedupSettings,
    pub reporting: Reporting,
    /// The process of each input of the pass.
    pub owners: &'a [usize],
    /// The inputs of this process.
    pub share: Share<'a>,
}

/// Process 0's side of the pass: verdicts on the documents that it reads itself, the outcome of all processes, and how many documents fall.
///
/// # Errors
/// As [`pipeline::run`], errors of a temporary file, and [`PrepareError::Parted`].
pub(crate) fn compare_together(
    work: &Work<'_>,
    settings: DedupSettings,
    progress: &mut Report<'_>,
) -> Result<(Verdicts, Outcome, DedupReport), PrepareError> {
    let peers = work.peers.expect("several processes compare");
    let owners = deal(work.inputs.iter().map(|input| input.bytes), peers.processes());
    let bytes_total = work.inputs.iter().map(|input| input.bytes).sum();
    let position = Progress { phase: Phase::Comparing, bytes_total, ..Progress::default() };
    let go_on = &mut || ask(progress, position);
    give_orders(peers, work.rules.pass, work.inputs, &owners, go_on)?;
    let own = OwnShare::new(work, &owners);
    let share = Share { numbers: &own.numbers };
    let reporting = work.rules.reporting;
    let comparing = Comparing { peers, settings, reporting, owners: &owners, share };
    let (mut verdicts, own_summary) = compare(&own.work(work), comparing, progress)?;
    let mut summary = own_summary;
    for process in 1..peers.processes() {
        let position = Progress { phase: Phase::Sorting, ..position };
        let go_on = &mut || ask(progress, position);
        if let Some(groups) = &mut verdicts.groups {
            receive_groups(comparing, process, groups, go_on)?;
        }
        let (_, message) = receive(peers, &[process], go_on)?;
        match Page::new(message, process).next()? {
            Some(Item::Summary(other)) if other.is_of_inputs(owners.len()) => {
                work.rules.exclusions.note_used(&other.used_exclusions);
                summary.add(*other);
            }
            _ => return Err(PrepareError::Message { process }),
        }
    }
    Ok((verdicts, summary.outcome, summary.dedup))
}

/// A process's side of the pass: verdicts on the documents that it reads, and its outcome.
///
/// # Errors
/// As [`compare_together`].
pub(super) fn compare(
    work: &Work<'_>,
    comparing: Comparing<'_>,
    progress: &mut Report<'_>,
) -> Result<(Verdicts, Summary), PrepareError> {
    let read = |signing: &mut Signing<'_>, progress: &mut Report<'_>| {
        let read = pipeline::run(work, None, Some(&mut *signing), progress);
        read.map_err(|error| signing.ended_by(error))
    };
    let (verdicts, outcome) = compare_what(read, comparing, progress)?;
    let summary = summary(work, comparing.share, outcome, verdicts.report());
    Ok((verdicts, summary))
}

/// Process 0's side of a pass in which all compare documents whose records it has: verdicts on these, by their numbers.
///
/// # Errors
/// Errors of a temporary file, and [`PrepareError::Parted`].
pub(crate) fn judge_records(
    peers: &dyn Peers,
    (settings, reporting): (DedupSettings, Reporting),
    records: &mut Spool,
    progress: &mut Report<'_>,
) -> Result<Verdicts, PrepareError> {
    let position = Progress { phase: Phase::Sorting, ..Progress::default() };
    give_order(peers, &Order::judge(), &mut || ask(progress, position))?;
    let read = |signing: &mut Signing<'_>, progress: &mut Report<'_>| {
        let mut records = records.read()?;
        let mut unasked = 0_u64;
        signing.listed.begin(0);
        while let Some((record, _)) = records.next()? {
            let Record::Document(document) = record else { continue };
            let signature = match document.judged {
                Judged::Chosen(signature) => signature,
                Judged::Excluded | Judged::Rejected(_) => None,
            };
            signing.push((0, 0), signature.as_ref())?;
            unasked += 1;
            if unasked.is_multiple_of(1 << 12) {
                ask(progress, position)?;
            }
        }
        Ok(Outcome::default())
    };
    let share = Share { numbers: &[0] };
    let comparing = Comparing { peers, settings, reporting, owners: &[0], share };
    let mut sorting = |now: Progress| progress(Progress { phase: Phase::Sorting, ..now });
    let (mut verdicts, _) = compare_what(read, comparing, &mut sorting)?;
    if let Some(groups) = &mut verdicts.groups {
        let go_on = &mut || ask(&mut sorting, position);
        for process in 1..peers.processes() {
            receive_groups(comparing, process, groups, go_on)?;
        }
    }
    Ok(verdicts)
}

/// The same pass of another process, which has no documents in it.
///
/// # Errors
/// As [`judge_records`].
pub(super) fn judge_for_others(
    peers: &dyn Peers,
    (settings, reporting): (DedupSettings, Reporting),
    progress: &mut Report<'_>,
) -> Result<(), PrepareError> {
    let share = Share { numbers: &[] };
    let comparing = Comparing { peers, settings, reporting, owners: &[0], share };
    let (verdicts, _) = compare_what(|_, _| Ok(Outcome::default()), comparing, progress)?;
    send_groups(peers, verdicts.groups, &mut || ask(progress, Progress::default()))
}

/// Compares the documents that `read` signs, while it runs on a thread of its own.
fn compare_what(
    read: impl FnOnce(&mut Signing<'_>, &mut Report<'_>) -> Result<Outcome, PrepareError> + Send,
    comparing: Comparing<'_>,
    progress: &mut Report<'_>,
) -> Result<(Verdicts, Outcome), PrepareError> {
    let before = vec![0; comparing.share.numbers.len()];
    let judging = Mutex::new(Judging { before, documents: 0, found: Found::default() });
    let (verdicts_out, signals) = (Backlog::new(), Signals::default());
    let position = Mutex::new(Progress { phase: Phase::Comparing, ..Progress::default() });
    let cannot_send = AtomicBool::new(false);
    thread::scope(|scope| {
        let (judging, verdicts_out, signals) = (&judging, &verdicts_out, &signals);
        let (position, cannot_send) = (&position, &cannot_send);
        let _stops = StopsAtPanic(&signals.is_stopped);
        let reader = scope.spawn(move || {
            let _ended = EndsWithThis(None, signals);
            let read = sign(read, comparing, judging, signals, &mut |now| {
                *position.lock().unwrap_or_else(PoisonError::into_inner) = now;
                signals.flow()
            });
            signals.is_read.store(read.is_ok(), Ordering::Relaxed);
            read
        });
        let sender = scope.spawn(move || {
            let _stops = StopsAtPanic(cannot_send);
            let sent = send_verdicts(comparing.peers, verdicts_out, signals);
            cannot_send.store(sent.is_err(), Ordering::Relaxed);
            sent
        });
        let mut receiver = Receiver::new(comparing, verdicts_out, judging);
        let mut go_on = || {
            signals.check()?;
            if cannot_send.load(Ordering::Relaxed) {
                return Err(PrepareError::Interrupted);
            }
            let now = *position.lock().unwrap_or_else(PoisonError::into_inner);
            ask(progress, now)
        };
        let received = receiver.run(&mut go_on);
        let groups = receiver.into_groups();
        verdicts_out.end();
        signals.is_stopped.store(received.is_err(), Ordering::Relaxed);
        let sent = sender.join().expect("what sends does not panic");
        let read = reader.join().expect("what reads texts does not panic");
        let (listed, outcome) = match (received, read, sent) {
            (Ok(()), Ok(read), Ok(())) => read,
            (received, read, sent) => {
                return Err(cause([received.err(), read.err(), sent.err()].into_iter().flatten()));
            }
        };
        let found = std::mem::take(&mut lock(judging).found);
        let mut verdicts = listed.judged(found);
        verdicts.groups = groups;
        Ok((verdicts, outcome))
    })
}

/// The verdicts on the documents of this process.
struct Judging {
    /// Documents before each of its inputs, once that began.
    before: Vec<u64>,
    /// Documents of all its inputs whose entries may have been sent.
    documents: u64,
    found: Found,
}

fn lock<'a>(judging: &'a Mutex<Judging>) -> MutexGuard<'a, Judging> {
    judging.lock().unwrap_or_else(PoisonError::into_inner)
}
