//! How a store is used.

use std::{
    num::{NonZeroU32, NonZeroUsize},
    time::Duration,
};

/// How a remote store is used; nothing here changes a sample.
#[derive(Clone, PartialEq, Eq)]
pub struct StoreSettings {
    /// Requests that a data set may have under way at the same time.
    pub requests: NonZeroUsize,
    /// Bytes that may be downloaded before they are asked for.
    pub ahead_bytes: u64,
    /// How often an operation is tried without any progress before its error is reported.
    pub attempts: NonZeroU32,
    /// How long a store that has answered before is waited for when it no longer does, beyond those
    /// attempts.
    pub outage: Duration,
    /// Time before the second attempt; it doubles with every further one, and a half of it is
    /// random.
    pub back_off: Duration,
    /// The longest time between two attempts.
    pub back_off_limit: Duration,
    /// An attempt that makes no progress for this long is given up, whether no answer comes or a
    /// body stops half way.
    pub progress_deadline: Duration,
    /// An operation ends after this time and one second for every 100 KiB that it is to
    /// transfer, independent of its progress.
    pub operation_deadline: Duration,
    /// Selects the random part of the times between attempts. Processes should differ in it, so
    /// that they do not all come back at once.
    pub seed: u64,
    /// Settings of the store by the names that its environment variables have, such as
    /// `AWS_ENDPOINT`. They take precedence over the environment.
    pub options: Vec<(String, String)>,
}

impl Default for StoreSettings {
    /// 16 requests, 1 GiB ahead; 6 attempts 0.2 s to 10 s apart, and on for 2 minutes where the store
    /// has answered before, each given up after 30 s without progress, in 10 minutes in all; the
    /// process number as seed.
    fn default() -> StoreSettings {
        StoreSettings {
            requests: NonZeroUsize::new(16).expect("not zero"),
            ahead_bytes: 1 << 30,
            attempts: NonZeroU32::new(6).expect("not zero"),
            outage: Duration::from_secs(120),
            back_off: Duration::from_millis(200),
            back_off_limit: Duration::from_secs(10),
            progress_deadline: Duration::from_secs(30),
            operation_deadline: Duration::from_secs(600),
            seed: u64::from(std::process::id()),
            options: Vec::new(),
        }
    }
}

impl std::fmt::Debug for StoreSettings {
    /// Options by name only: some of them are secrets.
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let options: Vec<&str> = self.options.iter().map(|(name, _)| name.as_str()).collect();
        formatter
            .debug_struct("StoreSettings")
            .field("requests", &self.requests)
            .field("ahead_bytes", &self.ahead_bytes)
            .field("attempts", &self.attempts)
            .field("outage", &self.outage)
            .field("back_off", &self.back_off)
            .field("back_off_limit", &self.back_off_limit)
            .field("progress_deadline", &self.progress_deadline)
            .field("operation_deadline", &self.operation_deadline)
            .field("seed", &self.seed)
            .field("options", &options)
            .finish()
    }
}
