//! The work of a process that is not process 0: pass after pass, as ordered.

use std::{
    num::NonZeroUsize,
    ops::ControlFlow,
    path::Path,
    sync::{
        atomic::{AtomicBool, Ordering},
        mpsc::{RecvTimeoutError, channel},
    },
    thread,
};

use super::{
    backlog::{Backlog, Popped},
    compare::{Comparing, compare, judge_for_others, send_groups},
    forward::{Share, read_share},
    gather::{EndsWithThis, Report, Signals, StopsAtPanic, ask, cause},
    order::{Order, PassOrder, What},
    page::PageWriter,
    peers::{MOMENT, Peers, receive, send, wait_for_end},
    setup::Setup,
    unseen::Unseen,
};
use crate::prepare::{
    PrepareError, Progress, Tokenize, bounds,
    choose::{
        admit::{Pass, Rules},
        duplicates::Verdicts,
        exclude::Exclusions,
    },
    input::Sources,
    output::shard::{ShardFormat, encoding_error},
    pipeline::job::Work,
    tokens::pack::{Cut, Rows},
    upkeep::Known,
};

/// Takes part until process 0 says that all is done.
///
/// # Errors
/// Whatever ends the preparation here, and [`PrepareError::Parted`] where it was ended elsewhere.
pub(super) fn assist(
    peers: &dyn Peers,
    tokenizer: &dyn Tokenize,
    workers: NonZeroUsize,
    progress: &mut Report<'_>,
) -> Result<(), PrepareError> {
    let next = |progress: &mut Report<'_>| -> Result<Order, PrepareError> {
        let go_on = &mut || ask(progress, Progress::default());
        let (_, message) = receive(peers, &[0], go_on)?;
        let mut order = Order::read(&message, peers.processes())?;
        if let Order::Pass(order) = &mut order {
            order.complete(peers, go_on)?;
        }
        Ok(order)
    };
    let Order::Setup(setup) = next(progress)? else {
        return Err(PrepareError::Message { process: 0 });
    };
    setup.check_tokenizer(tokenizer, peers.process())?;
    let exclusions = setup.open_exclusions(peers.process())?;
    // An assistant packs no rows: `Work` asks for a format, and any will do.
    let nowhere = Path::new("");
    let format = ShardFormat::new(setup.seq_len).map_err(|error| encoding_error(nowhere, error))?;
    let mut assistant = Assistant {
        peers,
        tokenizer,
        setup: *setup,
        exclusions,
        format,
        workers: workers.get(),
        verdicts: None,
    };
    loop {
        match next(progress)? {
            Order::Pass(order) => assistant.pass(&order, progress)?,
            Order::Dismiss => return Ok(()),
            Order::Setup(_) => return Err(PrepareError::Message { process: 0 }),
        }
    }
}

struct Assistant<'a> {
    peers: &'a dyn Peers,
    tokenizer: &'a dyn Tokenize,
    setup: Setup,
    exclusions: Exclusions,
    format: ShardFormat,
    workers: usize,
    /// Verdicts of the pass that compared.
    verdicts: Option<Verdicts>,
}

impl Assistant<'_> {
    fn pass(&mut self, order: &PassOrder, progress: &mut Report<'_>) -> Result<(), PrepareError> {
        if let What::Judge = order.what {
            let settings = (self.setup.dedup_settings(), self.setup.reporting);
            return judge_for_others(self.peers, settings, progress);
        }
        let PassOrder { what, numbers, inputs } = order;
        let unseen = Unseen::first_of(inputs);
        let mut looked_at = inputs.clone();
        let sources = Sources::new(&mut looked_at, self.setup.text_key.as_deref());
        let sources = match (sources, &unseen) {
            (Err(PrepareError::Data(_)), Some(unseen)) => {
                let go_on = &mut || ask(progress, Progress::default());
                send(self.peers, 0, unseen.needed().message(), go_on)?;
                return Err(wait_for_end(self.peers, go_on));
            }
            (sources, _) => sources?.among(self.setup.contents()),
        };
        let known = Known::new();
        let dedup = self.setup.dedup;
        let pass = match what {
            What::Sign { .. } => Pass::Sign(dedup),
            What::Tokenize { is_compared: false } => Pass::Tokenize(None),
            What::Tokenize { is_compared: true } => {
                let not_compared = PrepareError::Message { process: 0 };
                Pass::Tokenize(Some(self.verdicts.as_ref().ok_or(not_compared)?))
            }
            What::Record => Pass::Record(dedup, &known),
            What::Fetch(wanted) => Pass::Fetch(wanted),
            What::Judge => unreachable!("it reads nothing"),
        };
        let rules = Rules {
            exclusions: &self.exclusions,
            filters: &self.setup.filters,
            pass,
            reporting: self.setup.reporting,
        };
        let work = Work {
            inputs: &looked_at,
            sources: &sources,
            rules,
            tokenizer: self.tokenizer,
            vocab_size: self.setup.vocab_size,
            cut: Cut {
                seq_len: self.setup.seq_len,
                row_group_samples: 1,
                shard_samples: 1,
                rows: Rows::Apart,
            },
            format: &self.format,
            folder: Path::new(""),
            strictness: self.setup.strictness,
            workers: self.workers,
            bounds: bounds(self.workers),
            peers: None,
        };
        let share = Share { numbers };
        match what {
            What::Sign { owners } => {
                if let Some(unseen) = unseen {
                    let go_on = &mut || ask(progress, Progress::default());
                    send(self.peers, 0, unseen.message(), go_on)?;
                }
                let settings = self.setup.dedup_settings();
                let reporting = self.setup.reporting;
                let comparing = Comparing { peers: self.peers, settings, reporting, owners, share };
                let (mut verdicts, summary) = compare(&work, comparing, progress)?;
                let go_on = &mut || ask(progress, Progress::default());
                send_groups(self.peers, verdicts.groups.take(), go_on)?;
                self.verdicts = Some(verdicts);
                let mut page = PageWriter::default();
                page.summary(&summary);
                send(self.peers, 0, page.take(), go_on)
            }
            _ => forward(&work, share, unseen, self.peers, progress),
        }
    }
}

/// Reads, while another thread sends the batches to process 0.
fn forward(
    work: &Work<'_>,
    share: Share<'_>,
    unseen: Option<Unseen>,
    peers: &dyn Peers,
    progress: &mut Report<'_>,
) -> Result<(), PrepareError> {
    let (backlog, signals, has_failed) =
        (Backlog::new(), Signals::default(), AtomicBool::new(false));
    thread::scope(|scope| {
        let (backlog, signals, has_failed) = (&backlog, &signals, &has_failed);
        let _stops = StopsAtPanic(&signals.is_stopped);
        let (done, is_done) = channel();
        let sender = scope.spawn(move || {
            let sent = send_pages(peers, backlog, signals);
            has_failed.store(sent.is_err(), Ordering::Relaxed);
            // Where it is not waited for, it need not be told.
            let _ = done.send(());
            sent
        });
        let ended = EndsWithThis(Some(backlog), signals);
        let mut report = |now: Progress| match has_failed.load(Ordering::Relaxed) {
            true => ControlFlow::Break(()),
            false => progress(now),
        };
        let read = read_share(work, share, unseen, backlog, &mut report)
            .or_else(|error| backlog.push(Unseen::of_error(error)?.message()));
        drop(ended);
        signals.is_stopped.store(read.is_err(), Ordering::Relaxed);
        while let Err(RecvTimeoutError::Timeout) = is_done.recv_timeout(MOMENT) {
            if report(Progress::default()).is_break() {
                signals.is_stopped.store(true, Ordering::Relaxed);
            }
        }
        let sent = sender.join().expect("what sends does not panic");
        match (read, sent) {
            (Ok(()), Ok(())) => Ok(()),
            (read, sent) => Err(cause(read.err().into_iter().chain(sent.err()))),
        }
    })
}

/// Sends messages to process 0, as it takes them, until there are no more.
fn send_pages(peers: &dyn Peers, backlog: &Backlog, signals: &Signals) -> Result<(), PrepareError> {
    let mut go_on = || signals.go_on();
    loop {
        match backlog.pop(MOMENT)? {
            Popped::Message(page) => send(peers, 0, page, &mut go_on)?,
            Popped::Nothing => go_on()?,
            Popped::End => return Ok(()),
        }
    }
}
