//! Where a stream is, and whether another stream may go on from there.
//!
//! The canonical order is a function of position, so a position is the whole state: a cursor is
//! that number and what the function depends on. It is the same for any number of workers.
//!
//! ```
//! use std::num::NonZeroU64;
//! use tidemill_streaming_data::{
//!     cursor::{Cursor, StreamIdentity},
//!     hash::ContentHash,
//!     order::{ShuffleOrder, ShuffleSettings},
//! };
//!
//! let shuffle = ShuffleSettings {
//!     order: ShuffleOrder::Window,
//!     window_samples: NonZeroU64::new(4096).unwrap(),
//!     seed: 17,
//! };
//! let stream =
//!     StreamIdentity { fingerprint: ContentHash::of(b"data"), samples: 90, seq_len: 512, shuffle };
//! let saved = Cursor { position: 3200, stream };
//!
//! let now = StreamIdentity { shuffle: ShuffleSettings { seed: 18, ..shuffle }, ..stream };
//! let message = saved.check_resume(&now).unwrap_err().to_string();
//! assert_eq!(
//!     message,
//!     "cannot resume the data stream: seed was 17 when it was saved and is 18 now"
//! );
//! ```

use serde::{Deserialize, Serialize};

use crate::{
    error::DataError,
    hash::ContentHash,
    order::{ShuffleOrder, ShuffleSettings},
};

/// Everything that the samples of a stream depend on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamIdentity {
    /// Identity of the data set; never its path.
    pub fingerprint: ContentHash,
    /// Samples in an epoch.
    pub samples: u64,
    /// Predicted tokens per sample.
    pub seq_len: usize,
    /// How the samples are ordered.
    pub shuffle: ShuffleSettings,
}

/// The place at which a stream stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cursor {
    /// The next position to read, over all epochs.
    pub position: u64,
    /// The stream in which it is a position.
    pub stream: StreamIdentity,
}

impl Cursor {
    /// The start of a stream.
    pub fn start(stream: StreamIdentity) -> Cursor {
        Cursor { position: 0, stream }
    }

    /// Whether the stream `now` continues the saved one: equal positions hold equal samples.
    ///
    /// Settings that the order does not use are not compared: `window_samples` matters to `window`
    /// only, and the seed to all orders but `none`.
    ///
    /// # Errors
    /// [`DataError::ResumeMismatch`], naming the first difference with both values.
    pub fn check_resume(&self, now: &StreamIdentity) -> Result<(), DataError> {
        let saved = &self.stream;
        let same = |key, saved: &dyn ToString, now: &dyn ToString| {
            let (saved, now) = (saved.to_string(), now.to_string());
            if saved == now { Ok(()) } else { Err(DataError::ResumeMismatch { key, saved, now }) }
        };
        same("seq_len", &saved.seq_len, &now.seq_len)?;
        same("samples", &saved.samples, &now.samples)?;
        same("fingerprint", &saved.fingerprint, &now.fingerprint)?;
        same("shuffle", &saved.shuffle.order, &now.shuffle.order)?;
        if now.shuffle.order == ShuffleOrder::Window {
            let (saved, now) = (saved.shuffle.window_samples, now.shuffle.window_samples);
            same("window_samples", &saved, &now)?;
        }
        if now.shuffle.order != ShuffleOrder::None {
            same("seed", &saved.shuffle.seed, &now.shuffle.seed)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cursor() -> Cursor {
        let shuffle = ShuffleSettings {
            order: ShuffleOrder::Window,
            window_samples: ShuffleSettings::DEFAULT_WINDOW_SAMPLES,
            seed: 17,
        };
        let fingerprint = ContentHash::of(b"one");
        let stream = StreamIdentity { fingerprint, samples: 100, seq_len: 8, shuffle };
        Cursor { position: 1234, stream }
    }

    #[test]
    fn each_difference_is_named_with_both_values() {
        type Change = fn(&mut StreamIdentity);
        let cases: [(&str, &str, Change); 6] = [
            ("seq_len was 8", "is 9 now", |now| now.seq_len = 9),
            ("samples was 100", "is 101 now", |now| now.samples = 101),
            ("fingerprint was xxh3-128:", "is xxh3-128:", |now| {
                now.fingerprint = ContentHash::of(b"two");
            }),
            ("shuffle was window", "is full now", |now| now.shuffle.order = ShuffleOrder::Full),
            ("window_samples was 16384", "is 1 now", |now| {
                now.shuffle.window_samples = std::num::NonZeroU64::MIN;
            }),
            ("seed was 17", "is 0 now", |now| now.shuffle.seed = 0),
        ];
        let saved = cursor();
        saved.check_resume(&saved.stream).unwrap();
        for (was, is, change) in cases {
            let mut now = saved.stream;
            change(&mut now);
            let message = saved.check_resume(&now).unwrap_err().to_string();
            assert!(message.contains(was) && message.contains(is), "{message}");
        }
    }

    #[test]
    fn settings_that_the_order_does_not_use_may_change() {
        let mut saved = cursor();
        saved.stream.shuffle.order = ShuffleOrder::None;
        let mut now = saved.stream;
        now.shuffle.seed = 5;
        now.shuffle.window_samples = std::num::NonZeroU64::MIN;
        saved.check_resume(&now).unwrap();
        saved.stream.shuffle.order = ShuffleOrder::Full;
        now.shuffle.order = ShuffleOrder::Full;
        assert!(saved.check_resume(&now).is_err());
        now.shuffle.seed = 17;
        saved.check_resume(&now).unwrap();
    }

    #[test]
    fn json_form_is_pinned_and_read_back() {
        let text = serde_json::to_string(&cursor()).unwrap();
        let expected = concat!(
            r#"{"position":1234,"stream":{"fingerprint":"xxh3-128:HASH","samples":100,"#,
            r#""seq_len":8,"shuffle":{"order":"window","window_samples":16384,"seed":17}}}"#
        );
        let hash = ContentHash::of(b"one").to_string();
        assert_eq!(text, expected.replace("xxh3-128:HASH", &hash));
        assert_eq!(serde_json::from_str::<Cursor>(&text).unwrap(), cursor());
    }
}
