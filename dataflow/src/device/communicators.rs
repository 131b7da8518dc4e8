//! How the workers of one process reach each other's devices.

use std::sync::{Mutex, PoisonError};

use tidemill_collective::Tree;
use tidemill_collective::communicator::{CommunicatorError, Threads};
use tidemill_kernels::{Backend, MemoryPlace};

use crate::error::Result;

/// The ends of the workers of a process between all workers, until each has taken its own.
pub struct Communicators<B: Backend>(Mutex<Vec<Option<Threads<B, f32>>>>);

impl<B: Backend> Communicators<B> {
    /// Those of the workers of a process that compute on `backends`, where these are all `workers`, which sum over `lanes` lanes,
    /// and their devices read each other's memory. Elsewhere none: then what workers have to tell each other goes through the host.
    ///
    /// # Errors
    /// A number of lanes that is no power of two, or a device that fails.
    pub fn new(backends: &[&B], workers: usize, lanes: usize) -> Result<Self> {
        let none = || Self(Mutex::new(Vec::new()));
        let is_shared = backends.iter().all(|backend| backend.memory() == MemoryPlace::Device);
        if !is_shared || workers == 1 || workers != backends.len() {
            return Ok(none());
        }
        let tree = Tree::new(lanes).map_err(CommunicatorError::from)?;
        match Threads::group(backends, tree) {
            Ok(ends) => Ok(Self(Mutex::new(ends.into_iter().map(Some).collect()))),
            Err(error @ CommunicatorError::OutOfReach { .. }) => {
                tracing::warn!("{error}: gradients go through the host, which is slow");
                Ok(none())
            }
            Err(error) => Err(error.into()),
        }
    }

    /// That of the worker with this index among those of the process.
    pub fn take(&self, local_index: usize) -> Option<Threads<B, f32>> {
        let mut ends = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        ends.get_mut(local_index)?.take()
    }
}
