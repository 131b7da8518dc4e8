//! The connections that carry messages between the processes.

use std::time::Duration;

use crate::prepare::PrepareError;

/// The other processes are gone, or the work was ended for all.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the work of all processes was ended")]
pub struct Parted;

/// The processes that prepare a data set together, as one of them sees them. Used by several threads at once.
///
/// # Contract
/// - Messages from one process to another arrive in the order in which they were sent, whole, once.
/// - Between two processes there is room for a few megabytes of messages that were sent and not received; one that is
///   larger has room when there is no other.
/// - After the work has ended, for any reason, every call answers [`Parted`], also one that waits.
pub trait Peers: Send + Sync {
    /// The number of this process, from 0.
    fn process(&self) -> usize;

    /// How many processes there are.
    fn processes(&self) -> usize;

    /// Sends a message to a process, which may be this one, as soon as there is room; gives it back where there is none in
    /// time.
    ///
    /// # Errors
    /// [`Parted`].
    fn send(
        &self,
        to: usize,
        message: Vec<u8>,
        patience: Duration,
    ) -> Result<Option<Vec<u8>>, Parted>;

    /// The next message of any of these processes, and which of them sent it; none where none comes in time. Of no processes
    /// none comes: that asks, or waits to hear, whether the work was ended.
    ///
    /// # Errors
    /// [`Parted`].
    fn receive(
        &self,
        from: &[usize],
        patience: Duration,
    ) -> Result<Option<(usize, Vec<u8>)>, Parted>;
}

/// How long something is waited for before it is asked whether to go on.
pub(super) const MOMENT: Duration = Duration::from_millis(100);

/// Asks whether to go on.
pub(super) type GoOn<'a> = dyn FnMut() -> Result<(), PrepareError> + 'a;

/// Sends a message, and asks now and then whether to go on.
///
/// # Errors
/// [`PrepareError::Parted`], or the error of `go_on`.
pub(super) fn send(
    peers: &dyn Peers,
    to: usize,
    message: Vec<u8>,
    go_on: &mut GoOn<'_>,
) -> Result<(), PrepareError> {
    let mut message = Some(message);
    while let Some(left) = message {
        message = peers.send(to, left, MOMENT)?;
        if message.is_some() {
            go_on()?;
        }
    }
    Ok(())
}

/// Waits until the work is ended, and asks now and then whether to go on; the error that ends it.
pub(super) fn wait_for_end(peers: &dyn Peers, go_on: &mut GoOn<'_>) -> PrepareError {
    loop {
        let waited = peers.receive(&[], MOMENT).map_err(PrepareError::from);
        if let Err(error) = waited.and_then(|_| go_on()) {
            return error;
        }
    }
}

/// The next message of some processes; asks whether to go on while none comes.
///
/// # Errors
/// [`PrepareError::Parted`], or the error of `go_on`.
pub(super) fn receive(
    peers: &dyn Peers,
    from: &[usize],
    go_on: &mut GoOn<'_>,
) -> Result<(usize, Vec<u8>), PrepareError> {
    loop {
        match peers.receive(from, MOMENT)? {
            Some(received) => return Ok(received),
            None => go_on()?,
        }
    }
}
