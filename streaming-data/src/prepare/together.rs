//! Several processes, perhaps on several hosts, prepare one data set.
//!
//! Every process calls [`prepare_together`] or [`update_together`] with the same settings and its own [`Peers`],
//! which carry messages between them (the program's are a timely dataflow). Process 0 lists the inputs, deals them
//! out and alone writes; the others, and it too, do all that takes time with the inputs that were dealt to
//! them: reading, filtering, signing, tokenizing.
//!
//! ```text
//! each process:   its inputs -> documents -> signatures --by bucket--> the process of the bucket
//!                                   |                                        | what is not first in it
//!                                   |            <--by input-----------------+
//!                                   +--> tokens of the kept, or records --in order of inputs--> process 0: rows, shards, state
//! ```
//!
//! # Contract
//! - The data set and the report equal those of a single process, to the byte, for any number of processes and workers. A
//!   document's rank is its input's number and its own number in that; which process reads it decides nothing. What an
//!   update knew of texts before is not counted by filters, whether one process updates or several,
//!   but process 0 alone has that knowledge.
//! - Inputs must be readable by all processes under the same paths. One that a process cannot read although process 0 can is
//!   an error that names both ([`PrepareError::InputUnseen`]); one that process 0 cannot read either is treated as by one process.
//!   The output is used by process 0 alone, except for the tokenizer of an update.
//! - The first error of any process ends the preparation: of several inputs that are wrong, another may be named
//!   than by one process. Nothing is left of the output then, as with one process; what a process holds in its temporary
//!   files has no name and ends with it. A process learns that the work was ended as often as it asks whether to go on, the last time before
//!   the data set is put in place.
//!
//! # Bounds
//! - An input is read by one process: a single file is read by one, for any number of processes. (Its documents
//!   are tokenized by all threads of that process.)
//! - Process 0 receives all tokens, 4 bytes each, and encodes all shards, with as many threads as it reads with: 60 million
//!   tokens and more a CPU second, which is a tenth of the work of tokenizing with the fastest library. So with that, some ten times the
//!   speed of its host is the most there is, and its network carries about as many bytes as the texts have. Of an updatable data set it also receives the records of all documents,
//!   150 bytes each, and sends entries of all to the processes of their buckets, which otherwise each process does for its own.
//! - Memory: as of one process, in each; [`DedupSettings`](super::DedupSettings)'s is for the records in the buckets of
//!   one process. Beside that a process holds 32 MiB of what others have not asked for yet, and what is beyond that in a file without a
//!   name in its folder for temporary files: while it tokenizes 4 bytes for each token of its inputs, while it records (of an updatable
//!   data set) some 150 bytes for each document and its path, and while it compares 8 bytes for each time that a document is not the first
//!   of a bucket (with `near` a document has 15 buckets). Messages in flight between two processes are bounded by [`Peers`].
//!
//! | module | holds |
//! |---|---|
//! | [`peers`] | [`Peers`]: the carrier of messages, and sending and receiving that ends when the work does |
//! | [`packet`] | numbers and bytes in a message |
//! | [`deal`] | which process reads which input |
//! | [`setup`], [`order`] | what process 0 tells the others, once and for each pass |
//! | [`backlog`] | messages that wait for their turn, on disk where they are many |
//! | [`page`], [`counts`], [`forward`] | batches and counts, as messages to process 0 |
//! | [`unseen`] | inputs that a process cannot read |
//! | [`gather`] | the batches of all processes, in order again |
//! | [`pack`] | its tokens to shards |
//! | [`compare`] | duplicates: entries to the processes of their buckets, and verdicts back |
//! | [`assist`] | the work of a process that is not process 0 |

mod assist;
mod backlog;
mod compare;
mod counts;
mod deal;
mod forward;
mod gather;
mod order;
mod pack;
mod packet;
mod page;
mod peers;
mod setup;
mod unseen;

use std::{ops::ControlFlow, time::Duration};

use self::gather::Report;
pub use self::peers::{Parted, Peers};
pub(crate) use self::{
    compare::{compare_together, judge_records},
    gather::{ask, gather},
    pack::pack_together,
    setup::{Setup, greet},
};
use super::{
    PrepareError, PrepareReport, PrepareSettings, Progress, Tokenize, UpdateReport, UpdateSettings,
    prepare_with, update_with,
};

/// Prepares a data set together with other processes, which all call this with the same settings. Process 0 gets the
/// report, the others nothing.
///
/// # Errors
/// The errors of [`prepare`](super::prepare()); [`PrepareError::InputUnseen`], [`PrepareError::OtherProcess`] where a process
/// has other inputs or another tokenizer; [`PrepareError::Parted`] where another process ended the work: its error is
/// the one that matters.
pub fn prepare_together(
    peers: &dyn Peers,
    settings: &PrepareSettings,
    tokenizer: &dyn Tokenize,
    progress: &mut dyn FnMut(Progress) -> ControlFlow<()>,
) -> Result<Option<PrepareReport>, PrepareError> {
    until_parted(peers, progress, |progress| {
        if peers.process() > 0 {
            assist::assist(peers, tokenizer, settings.workers, progress)?;
            return Ok(None);
        }
        let report = prepare_with(several(peers), settings, tokenizer, progress)?;
        order::dismiss(peers);
        Ok(Some(report))
    })
}

/// Makes a new version of a data set together with other processes, which all call this with the same settings. Process 0
/// gets the report, the others nothing.
///
/// # Errors
/// The errors of [`update`](super::update()) and of [`prepare_together`].
pub fn update_together(
    peers: &dyn Peers,
    settings: &UpdateSettings,
    tokenizer: &dyn Tokenize,
    progress: &mut dyn FnMut(Progress) -> ControlFlow<()>,
) -> Result<Option<UpdateReport>, PrepareError> {
    until_parted(peers, progress, |progress| {
        if peers.process() > 0 {
            assist::assist(peers, tokenizer, settings.workers, progress)?;
            return Ok(None);
        }
        let report = update_with(several(peers), settings, tokenizer, progress)?;
        order::dismiss(peers);
        Ok(Some(report))
    })
}

/// Does work that is broken off as soon as the work of all was ended, also where it has no messages to send or to receive.
fn until_parted<R>(
    peers: &dyn Peers,
    progress: &mut Report<'_>,
    work: impl FnOnce(&mut Report<'_>) -> Result<R, PrepareError>,
) -> Result<R, PrepareError> {
    let mut parted = None;
    let done = work(&mut |now| match peers.receive(&[], Duration::ZERO) {
        Ok(_) => progress(now),
        Err(over) => {
            parted = Some(over);
            ControlFlow::Break(())
        }
    });
    match (done, parted) {
        (Err(PrepareError::Interrupted), Some(over)) => Err(over.into()),
        (done, _) => done,
    }
}

/// The peers, if there are others.
fn several(peers: &dyn Peers) -> Option<&dyn Peers> {
    Some(peers).filter(|peers| peers.processes() > 1)
}
