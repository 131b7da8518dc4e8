//! The parameters, and the two threads that take turns with them.
//!
//! The optimizer thread of a worker owns the parameters. It lends them to the device thread for a step, which gives them
//! back when it has enqueued all of it; each gives an event along, and the other's device stream waits for that. So the host
//! waits for no device, and nobody locks: who holds what is a matter of who was sent it.
//!
//! The sums of gradients are the device thread's. A worker alone gives them along with the parameters, and has them
//! back with those of the next step. Of several workers each has a [`Communicator`] by which it reads or is sent what the
//! others have summed, and the device thread computes the next step once its parameters were gathered: then all have read.

use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};

use tidemill_collective::communicator::{Communicator, Post};
use tidemill_kernels::{Backend, Runtime};
use tidemill_model::Parameters;

use super::companion::{OperatorGone, Stopped};

/// What the device thread is lent for a step.
struct Lent<B: Backend> {
    parameters: Arc<Parameters<B>>,
    /// The last sums that it gave back, to be used again.
    sums: Option<B::Buffer<f32>>,
    /// Once it is reached, the parameters are as they are to be read, and what this worker has posted was read.
    ready: B::Event,
}

/// What the device thread gives back.
pub(super) struct Returned<B: Backend> {
    /// The same parameters, which nobody reads any more once `done` is reached.
    parameters: Arc<Parameters<B>>,
    /// The gradients of all uses over all lanes, of a worker alone.
    pub(super) sums: Option<B::Buffer<f32>>,
    /// Behind the whole step.
    pub(super) done: B::Event,
}

/// Parameters to be read, and sums that may be used again.
type Borrowed<'a, B> = (&'a Parameters<B>, Option<<B as Runtime>::Buffer<f32>>);

/// The device thread's end.
pub struct Borrower<B: Backend> {
    lent: Receiver<Lent<B>>,
    returned: Sender<Returned<B>>,
    held: Option<Arc<Parameters<B>>>,
    /// Tells the other workers what is summed; `None` where there are no others.
    pub(super) post: Option<Post<B>>,
}

/// The optimizer thread's end.
pub struct Lender<B: Backend> {
    lend: Sender<Lent<B>>,
    returned: Receiver<Returned<B>>,
    /// What the other workers have; `None` where there are no others.
    pub(super) communicator: Option<Box<dyn Communicator<B>>>,
}

/// The two ends of one worker, with its end of the `communicator` between workers.
pub fn lending<B: Backend>(
    communicator: Option<Box<dyn Communicator<B>>>,
) -> (Borrower<B>, Lender<B>) {
    let (lend, lent) = mpsc::channel();
    let (give_back, returned) = mpsc::channel();
    let post = communicator.as_ref().map(|communicator| communicator.post());
    let borrower = Borrower { lent, returned: give_back, held: None, post };
    (borrower, Lender { lend, returned, communicator })
}

impl<B: Backend> Borrower<B> {
    /// What is lent, which what is enqueued on `stream` from now on may read. Waits for the
    /// optimizer thread where it has not lent them yet.
    pub(super) fn borrow(
        &mut self,
        backend: &B,
        stream: &mut B::DeviceStream,
    ) -> Result<Borrowed<'_, B>, Stopped> {
        let mut sums = None;
        if self.held.is_none() {
            let lent = self.lent.recv().map_err(|_| OperatorGone)?;
            backend.wait_for(stream, &lent.ready)?;
            (self.held, sums) = (Some(lent.parameters), lent.sums);
        }
        match &self.held {
            Some(parameters) => Ok((parameters, sums)),
            None => Err(Stopped::Unwanted),
        }
    }

    /// Gives everything back, once what is enqueued on `stream` has run.
    pub(super) fn give_back(
        &mut self,
        backend: &B,
        stream: &mut B::DeviceStream,
        sums: Option<B::Buffer<f32>>,
    ) -> Result<(), Stopped> {
        let Some(parameters) = self.held.take() else { return Ok(()) };
        let done = backend.record(stream)?;
        Ok(self.returned.send(Returned { parameters, sums, done }).map_err(|_| OperatorGone)?)
    }
}

impl<B: Backend> Lender<B> {
    /// Lends `parameters` and gives `sums` back, once what is enqueued on `stream` has run.
    pub(super) fn lend(
        &self,
        backend: &B,
        stream: &mut B::DeviceStream,
        parameters: &Arc<Parameters<B>>,
        sums: Option<B::Buffer<f32>>,
    ) -> Result<(), Stopped> {
        let ready = backend.record(stream)?;
        let parameters = Arc::clone(parameters);
        Ok(self.lend.send(Lent { parameters, sums, ready }).map_err(|_| OperatorGone)?)
    }

    /// What was lent: `stream` goes on behind the step that was computed with it. Waits for the device thread where it has not
    /// given it back yet. From now on the parameters have one owner.
    pub(super) fn take_back(
        &self,
        backend: &B,
        stream: &mut B::DeviceStream,
    ) -> Result<Option<B::Buffer<f32>>, Stopped> {
        let Returned { parameters, sums, done } = self.returned.recv().map_err(|_| OperatorGone)?;
        drop(parameters);
        backend.wait_for(stream, &done)?;
        Ok(sums)
    }
}
