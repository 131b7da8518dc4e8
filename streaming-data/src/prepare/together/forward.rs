//! Sends the batches of a process's own inputs to process 0.

use std::ops::ControlFlow;

use super::{
    backlog::Backlog,
    page::{PageWriter, Summary},
    unseen::Unseen,
};
use crate::prepare::{
    DedupReport, PrepareError, Progress,
    choose::admit::Pass,
    pipeline::{
        self, Outcome,
        batch::{Batch, Collect, Ended},
        job::Work,
    },
    upkeep::Wanted,
};

/// Tokens of a document that go in one message: a text file may have any number.
const MESSAGE_TOKENS: usize = 256 << 10;

/// The inputs of one process in a pass.
#[derive(Debug, Clone, Copy)]
pub(super) struct Share<'a> {
    /// The number of each among all inputs of the pass, in order.
    pub numbers: &'a [usize],
}

/// Reads the inputs of a process, and puts the items for process 0 into the backlog, preceded by an input that this process does
/// not find.
///
/// # Errors
/// As [`pipeline::run`].
pub(super) fn read_share(
    work: &Work<'_>,
    share: Share<'_>,
    unseen: Option<Unseen>,
    backlog: &Backlog,
    progress: &mut dyn FnMut(Progress) -> ControlFlow<()>,
) -> Result<(), PrepareError> {
    let wanted = match work.rules.pass {
        Pass::Fetch(wanted) => Some(wanted),
        _ => None,
    };
    let mut forward = Forward {
        share,
        backlog,
        wanted,
        fetched: vec![0; work.inputs.len()],
        page: PageWriter::default(),
    };
    if let Some(unseen) = unseen {
        forward.page.unseen(&unseen);
    }
    let outcome = pipeline::run(work, None, Some(&mut forward), progress)?;
    let mut page = forward.page;
    page.summary(&summary(work, share, outcome, DedupReport::default()));
    backlog.push(page.take())
}

/// The outcome of a process's pass.
pub(super) fn summary(
    work: &Work<'_>,
    share: Share<'_>,
    mut outcome: Outcome,
    dedup: DedupReport,
) -> Summary {
    outcome.left_out.tally.renumber(share.numbers);
    Summary { outcome, dedup, used_exclusions: work.rules.exclusions.used() }
}

struct Forward<'a> {
    share: Share<'a>,
    backlog: &'a Backlog,
    wanted: Option<&'a Wanted>,
    /// Documents of each input that were fetched.
    fetched: Vec<usize>,
    page: PageWriter,
}

impl Forward<'_> {
    fn send_full(&mut self) -> Result<(), PrepareError> {
        self.page.take_full().map_or(Ok(()), |page| self.backlog.push(page))
    }
}

impl Collect for Forward<'_> {
    fn take(&mut self, input: usize, mut batch: Batch) -> Result<(), PrepareError> {
        self.fetched[input] += batch.lengths.len();
        let number = self.share.numbers[input];
        let first = match batch.lengths.is_empty() {
            true => batch.tokens.len().min(MESSAGE_TOKENS),
            // Documents that were fetched one by one stay together.
            false => batch.tokens.len(),
        };
        let others = batch.tokens.split_off(first);
        self.page.batch(number, &batch);
        self.send_full()?;
        for tokens in others.chunks(MESSAGE_TOKENS) {
            self.page.batch(number, &Batch { tokens: tokens.to_vec(), ..Batch::default() });
            self.send_full()?;
        }
        Ok(())
    }

    fn end(&mut self, input: usize, ended: Ended) -> Result<(), PrepareError> {
        self.page.end(self.share.numbers[input], ended);
        self.send_full()
    }

    fn may_skip(&self, input: usize) -> bool {
        self.wanted.is_none_or(|wanted| self.fetched[input] == wanted.count(input))
    }
}
