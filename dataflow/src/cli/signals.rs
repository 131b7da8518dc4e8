//! Ctrl-C and SIGTERM, counted as a user means them.
//!
//! One request may arrive more than once: `timeout` sends its signal to the program and then to the
//! program's group, and a shell's group may get what its launcher passes on as well. What follows that
//! closely is the same request.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context;

/// Signals that follow a counted one within this time are the same request.
const SAME_REQUEST: Duration = Duration::from_millis(200);

/// Calls `act` with the number of requests to stop so far, at each.
pub(super) fn on_requests_to_stop(act: impl Fn(u32) + Send + 'static) -> anyhow::Result<()> {
    let requests = Mutex::new(Requests::default());
    let handler = move || {
        let mut requests = requests.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(number) = requests.count(Instant::now()) {
            act(number);
        }
    };
    ctrlc::set_handler(handler).context("listening for Ctrl-C failed")
}

/// Requests so far, and when the latest was counted.
#[derive(Default)]
struct Requests {
    number: u32,
    latest: Option<Instant>,
}

impl Requests {
    /// The number of the request that a signal at `now` is, unless it was counted before.
    fn count(&mut self, now: Instant) -> Option<u32> {
        if self.latest.is_some_and(|latest| now.duration_since(latest) < SAME_REQUEST) {
            return None;
        }
        self.latest = Some(now);
        self.number += 1;
        Some(self.number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_that_is_delivered_twice_is_one_request() {
        let mut requests = Requests::default();
        let begin = Instant::now();
        let counted = [0, 0, 3, 199, 200, 399, 1_000]
            .map(|milliseconds| requests.count(begin + Duration::from_millis(milliseconds)));
        assert_eq!(counted, [Some(1), None, None, None, Some(2), None, Some(3)]);
    }
}
