//! Requests to a decoder, and their answers in the order of the requests.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::task::Poll;

use tidemill_streaming_data::DataError;
use tidemill_streaming_data::reader::Reader;

use super::samples::Wake;

/// Opens a reader of positions, which calls the given waker.
type Open<T> = Box<dyn Fn(Range<u64>, Wake) -> Reader<T>>;

/// A reader for each request that is not exhausted, in order.
pub(crate) struct Requests<T> {
    open: Open<T>,
    readers: VecDeque<Reader<T>>,
    wake: Wake,
}

impl<T> Requests<T> {
    /// None yet. `open` makes the reader of one.
    pub(crate) fn new(open: impl Fn(Range<u64>, Wake) -> Reader<T> + 'static) -> Self {
        Self { open: Box::new(open), readers: VecDeque::new(), wake: Arc::new(|| {}) }
    }

    /// Sets the wake-up of the requests that follow.
    pub(crate) fn set_wake(&mut self, wake: Wake) {
        self.wake = wake;
    }

    /// Asks for the items at `positions`.
    pub(crate) fn push(&mut self, positions: Range<u64>) {
        self.readers.push_back((self.open)(positions, Arc::clone(&self.wake)));
    }

    /// The next item that was asked for, if it is decoded. Never blocks.
    ///
    /// # Errors
    /// The error of its reader.
    pub(crate) fn poll(&mut self) -> Result<Option<T>, DataError> {
        while let Some(reader) = self.readers.front_mut() {
            match reader.try_next() {
                Poll::Ready(Some(next)) => return next.map(Some),
                Poll::Ready(None) => self.readers.pop_front(),
                Poll::Pending => return Ok(None),
            };
        }
        Ok(None)
    }
}
