//! Threads that talk to stores, and how callers wait for them.
//!
//! Stores are asynchronous, readers are threads. All stores of the process share a runtime of two
//! threads, which move bytes and wait; hashing, decoding and files are on the callers' side.
//! Callers wait on a channel: that works inside of another runtime too, where blocking on a future
//! would panic.

use std::{
    io,
    pin::pin,
    sync::{Arc, LazyLock, mpsc},
};

use futures_util::future::{Either, select};
use tokio::{
    runtime::{Builder, Runtime},
    sync::watch,
};

const THREADS: usize = 2;

static RUNTIME: LazyLock<io::Result<Runtime>> = LazyLock::new(|| {
    Builder::new_multi_thread()
        .worker_threads(THREADS)
        .thread_name("tidemill-store")
        .enable_all()
        .build()
});

/// Ends operations on stores. Clones are the same.
#[derive(Debug, Clone)]
pub struct Cancel(Arc<watch::Sender<bool>>);

impl Default for Cancel {
    fn default() -> Cancel {
        Cancel(Arc::new(watch::Sender::new(false)))
    }
}

impl Cancel {
    /// Operations that are under way, or begin later, end at once, with
    /// [`DataError::Cancelled`](crate::DataError::Cancelled).
    pub fn cancel(&self) {
        self.0.send_replace(true);
    }

    /// The value of a future; none, as soon as this is cancelled.
    pub(super) async fn unless<T>(&self, future: impl Future<Output = T>) -> Option<T> {
        let mut cancelled = self.0.subscribe();
        let cancelled = pin!(cancelled.wait_for(|&cancelled| cancelled));
        match select(pin!(future), cancelled).await {
            Either::Left((value, _)) => Some(value),
            Either::Right(_) => None,
        }
    }
}

/// Why a future gave no value.
#[derive(Debug)]
pub(super) enum NotRun {
    /// It was cancelled, or panicked.
    Cancelled,
    /// There are no threads to run it.
    NoRuntime(io::Error),
}

/// Starts a future; its value is received by the caller's thread.
pub(super) fn start<T: Send + 'static>(
    future: impl Future<Output = T> + Send + 'static,
    cancel: &Cancel,
) -> Result<mpsc::Receiver<T>, NotRun> {
    let runtime = RUNTIME
        .as_ref()
        .map_err(|error| NotRun::NoRuntime(io::Error::new(error.kind(), error.to_string())))?;
    let cancel = cancel.clone();
    let (sender, receiver) = mpsc::sync_channel(1);
    runtime.spawn(async move {
        if let Some(value) = cancel.unless(future).await {
            // The caller may have gone.
            let _ = sender.send(value);
        }
    });
    Ok(receiver)
}

/// Runs a future to its end while the caller's thread waits.
pub(super) fn wait<T: Send + 'static>(
    future: impl Future<Output = T> + Send + 'static,
    cancel: &Cancel,
) -> Result<T, NotRun> {
    start(future, cancel)?.recv().map_err(|_| NotRun::Cancelled)
}

#[cfg(test)]
mod tests {
    use std::{future, thread};

    use super::*;

    #[test]
    fn a_future_that_never_ends_can_be_cancelled_and_values_arrive_inside_of_a_runtime() {
        let cancel = Cancel::default();
        let other = cancel.clone();
        let waiting = thread::spawn(move || wait(future::pending::<()>(), &other));
        cancel.cancel();
        assert!(matches!(waiting.join().unwrap(), Err(NotRun::Cancelled)));
        assert!(matches!(wait(future::pending::<()>(), &cancel), Err(NotRun::Cancelled)));

        let outer = Builder::new_current_thread().build().unwrap();
        outer.block_on(async {
            assert_eq!(wait(async { 7 }, &Cancel::default()).unwrap(), 7);
        });
    }
}
