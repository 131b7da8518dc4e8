//! The connection by which a worker that trains reaches the others; [`Communicators`](crate::communicators::Communicators) makes it.

use tidemill_collective::communicator::Communicator;
use tidemill_kernels::Backend;

use super::lending::Lending;

/// The connection of one worker with the others.
pub struct Connection<B: Backend> {
    /// Its end of the communicator.
    pub communicator: Box<dyn Communicator<B>>,
    /// With which it lends its part of the parameters to those of its process that hold them with it; none where it holds all.
    pub lending: Option<Lending<B>>,
}

impl<B: Backend> Connection<B> {
    /// A connection that consists of a communicator alone.
    pub fn by(communicator: impl Communicator<B> + 'static) -> Self {
        Self { communicator: Box::new(communicator), lending: None }
    }
}
