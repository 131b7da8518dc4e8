//! The parameters, and the threads that take turns with them.
//!
//! The optimizer thread of a worker owns parameters. It lends them to device threads for a step, which give them back when they
//! have enqueued all of it; each gives an event along, and the other's device stream waits for that. So the host waits for no
//! device, and there is no lock: a buffer is held where it was sent.
//!
//! A worker whose parameters are all there lends them to its own device thread alone. Where the workers of a process hold them
//! together, each lends its part to the device threads of all: they read it where it is.
//!
//! The sums of gradients are the device thread's. A worker alone gives them along with the parameters, and has them
//! back with those of the next step. Of several workers each has a [`Communicator`] by which it reads or receives the others'
//! sums, and the device thread computes the next step once its parameters were gathered: then all have read.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};

use tidemill_collective::communicator::{Abort, Communicator, Holders, Post};
use tidemill_kernels::{Backend, Runtime};
use tidemill_model::Parameters;

use super::job_thread::{OperatorGone, Stopped};
use super::span::GatheredBlocks;
use crate::cluster::progress::{self, Phase};

/// A loan to a device thread for a step.
struct Lent<B: Backend> {
    /// The member that lends the parameters.
    member: usize,
    parameters: Arc<Parameters<B>>,
    /// The last sums that it gave back, to be used again.
    sums: Option<B::Buffer<f32>>,
    /// Once it is reached, the parameters are as they are to be read, and all that this worker has posted was read.
    ready: B::Event,
}

/// A loan that a device thread gives back.
struct Returned<B: Backend> {
    /// The same parameters, which this thread does not read any more once `done` is reached.
    parameters: Arc<Parameters<B>>,
    /// The gradients of all uses over all lanes, of a worker alone.
    sums: Option<B::Buffer<f32>>,
    /// An event after the whole step.
    done: B::Event,
    /// The time that gathering parameters block by block took, from the member's own device thread.
    blocks: Option<GatheredBlocks<B>>,
}

/// The loan that a member has back.
pub(super) struct TakenBack<B: Backend> {
    /// The gradients of all uses over all lanes, of a worker alone.
    pub(super) sums: Option<B::Buffer<f32>>,
    /// Behind the step of its own device thread, and the time that gathering parameters block by block took there.
    pub(super) own: Option<(B::Event, GatheredBlocks<B>)>,
}

/// A message between the threads; `None` ends the thread that waits for one.
type Message<T> = Option<T>;

/// Parameters to be read, in the order of members, and sums that may be used again.
pub(super) type Borrowed<'a, B> = (&'a [Arc<Parameters<B>>], Option<<B as Runtime>::Buffer<f32>>);

/// The device thread's end.
pub struct Borrower<B: Backend> {
    member: usize,
    lent: Receiver<Message<Lent<B>>>,
    lenders: Vec<Sender<Message<Returned<B>>>>,
    held: Vec<Arc<Parameters<B>>>,
    /// Tells the other workers which buckets are summed; `None` if there are no others.
    pub(super) post: Option<Post<B>>,
}

/// The optimizer thread's end.
pub struct Lender<B: Backend> {
    member: usize,
    borrowers: Vec<Sender<Message<Lent<B>>>>,
    returned: Receiver<Message<Returned<B>>>,
    /// The connection with the other workers; `None` if there are none.
    pub(super) communicator: Option<Box<dyn Communicator<B>>>,
}

/// The ends of one worker, before it has a communicator.
pub struct Lending<B: Backend> {
    borrower: Borrower<B>,
    lender: Lender<B>,
}

fn holders(members: usize) -> Holders {
    Holders::together(NonZeroUsize::new(members).unwrap_or(NonZeroUsize::MIN))
}

/// The ends of `members` workers that lend their parameters to each other.
pub(crate) fn circle<B: Backend>(members: usize) -> Vec<Lending<B>> {
    let (borrowers, lent): (Vec<_>, Vec<_>) = (0..members).map(|_| mpsc::channel()).unzip();
    let (lenders, returned): (Vec<_>, Vec<_>) = (0..members).map(|_| mpsc::channel()).unzip();
    let ends = lent.into_iter().zip(returned).enumerate();
    let end = |(member, (lent, returned))| Lending {
        borrower: Borrower { member, lent, lenders: lenders.clone(), held: Vec::new(), post: None },
        lender: Lender { member, borrowers: borrowers.clone(), returned, communicator: None },
    };
    ends.map(end).collect()
}

/// The ends of a worker that has all parameters in its own memory, with its end of the `communicator` between workers.
pub fn lending<B: Backend>(
    communicator: Option<Box<dyn Communicator<B>>>,
) -> (Borrower<B>, Lender<B>) {
    circle(1).remove(0).between(communicator)
}

impl<B: Backend> Lending<B> {
    /// The two ends, with the worker's end of the `communicator` between workers.
    pub(crate) fn between(
        self,
        communicator: Option<Box<dyn Communicator<B>>>,
    ) -> (Borrower<B>, Lender<B>) {
        let Self { mut borrower, mut lender } = self;
        borrower.post = communicator.as_ref().map(|communicator| communicator.post());
        lender.communicator = communicator;
        (borrower, lender)
    }

    /// Ends the threads that wait for others, or come to.
    pub(crate) fn abort_handle(&self) -> Abort {
        let (borrowers, lenders) = (self.lender.borrowers.clone(), self.borrower.lenders.clone());
        Box::new(move || {
            // One that is gone waits for nothing.
            borrowers.iter().for_each(|borrower| drop(borrower.send(None)));
            lenders.iter().for_each(|lender| drop(lender.send(None)));
        })
    }
}

impl<B: Backend> Borrower<B> {
    /// Whether several workers lend parts of the parameters.
    pub(super) fn is_of_parts(&self) -> bool {
        self.lenders.len() > 1
    }

    /// The workers that lend them.
    pub(super) fn holders(&self) -> Holders {
        holders(self.lenders.len())
    }

    /// Which of the members it computes for.
    pub(super) fn member(&self) -> usize {
        self.member
    }

    /// Whether it was lent anything and has not given it back.
    pub(super) fn has_borrowed(&self) -> bool {
        !self.held.is_empty()
    }

    /// Borrows the parameters: work that is enqueued on `streams` from now on may read them. Waits for the
    /// optimizer threads if they have not lent them yet.
    pub(super) fn borrow<'s>(
        &mut self,
        backend: &B,
        streams: impl IntoIterator<Item = &'s mut B::DeviceStream>,
    ) -> Result<Borrowed<'_, B>, Stopped> {
        let mut sums = None;
        if self.held.is_empty() {
            // Other workers lend theirs when they have updated it, and may be behind.
            let _waiting = progress::during(Phase::WaitingForSums);
            let mut lent = Vec::with_capacity(self.lenders.len());
            while lent.len() < self.lenders.len() {
                let part: Lent<B> = self.lent.recv().ok().flatten().ok_or(OperatorGone)?;
                lent.push(part);
            }
            lent.sort_by_key(|part| part.member);
            for stream in streams {
                for part in &lent {
                    backend.wait_for(stream, &part.ready)?;
                }
            }
            for part in lent {
                sums = sums.or(part.sums);
                self.held.push(part.parameters);
            }
        }
        Ok((&self.held, sums))
    }

    /// Gives everything back, once all work that is enqueued on `stream` has run; `blocks` is the time that gathering took.
    pub(super) fn give_back(
        &mut self,
        backend: &B,
        stream: &mut B::DeviceStream,
        mut sums: Option<B::Buffer<f32>>,
        blocks: GatheredBlocks<B>,
    ) -> Result<(), Stopped> {
        if self.held.is_empty() {
            return Ok(());
        }
        let done = backend.record_timed(stream)?;
        let mut blocks = Some(blocks);
        let lenders = self.lenders.iter().enumerate();
        for (parameters, (member, lender)) in self.held.drain(..).zip(lenders) {
            let (sums, done) = (sums.take(), done.clone());
            let blocks = blocks.take_if(|_| member == self.member);
            let returned = Returned { parameters, sums, done, blocks };
            lender.send(Some(returned)).map_err(|_| OperatorGone)?;
        }
        Ok(())
    }
}

impl<B: Backend> Lender<B> {
    /// The workers that lend the parameters, each a part where they are several.
    pub(super) fn holders(&self) -> Holders {
        holders(self.borrowers.len())
    }

    /// Lends `parameters` and gives `sums` back, once all work that is enqueued on `stream` has run.
    pub(super) fn lend(
        &self,
        backend: &B,
        stream: &mut B::DeviceStream,
        parameters: &Arc<Parameters<B>>,
        mut sums: Option<B::Buffer<f32>>,
    ) -> Result<(), Stopped> {
        let ready = backend.record(stream)?;
        for borrower in &self.borrowers {
            let (parameters, sums) = (Arc::clone(parameters), sums.take());
            let lent = Lent { member: self.member, parameters, sums, ready: ready.clone() };
            borrower.send(Some(lent)).map_err(|_| OperatorGone)?;
        }
        Ok(())
    }

    /// Takes back the parameters: `stream` goes on behind the step that was computed with them. Waits for the device threads if they have not
    /// given them back yet. From now on the parameters have one owner.
    pub(super) fn take_back(
        &self,
        backend: &B,
        stream: &mut B::DeviceStream,
    ) -> Result<TakenBack<B>, Stopped> {
        let mut all = TakenBack { sums: None, own: None };
        for _ in &self.borrowers {
            let returned = self.returned.recv().ok().flatten().ok_or(OperatorGone)?;
            let Returned { parameters, sums, done, blocks } = returned;
            drop(parameters);
            backend.wait_for(stream, &done)?;
            all.sums = all.sums.or(sums);
            all.own = all.own.or(blocks.map(|blocks| (done, blocks)));
        }
        Ok(all)
    }
}
