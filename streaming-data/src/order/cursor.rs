//! Where a stream is, and whether another stream may go on from there.
//!
//! The canonical order is a function of position, so a position is the whole state: a cursor is
//! that number and the inputs of the function. It is the same for any number of workers.
//!
//! A stream may move on to a newer version of its data set: from the position of a [`Move`] on it holds the
//! samples of another stream, which begins there.
//!
//! ```
//! use std::num::NonZeroU64;
//! use tidemill_streaming_data::{
//!     hash::ContentHash,
//!     order::{
//!         ShuffleOrder, ShuffleSettings,
//!         cursor::{Cursor, StreamIdentity},
//!     },
//! };
//!
//! let shuffle = ShuffleSettings {
//!     order: ShuffleOrder::Window,
//!     window_samples: NonZeroU64::new(4096).unwrap(),
//!     seed: 17,
//! };
//! let fingerprint = ContentHash::of(b"data");
//! let stream =
//!     StreamIdentity { fingerprint, samples: 90, seq_len: 512, shuffle, parts: Vec::new() };
//! let saved = Cursor { position: 3200, ..Cursor::start(stream.clone()) };
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
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamIdentity {
    /// Identity of the data set; never its path.
    pub fingerprint: ContentHash,
    /// Samples in an epoch.
    pub samples: u64,
    /// Predicted tokens per sample.
    pub seq_len: usize,
    /// How the samples are ordered.
    pub shuffle: ShuffleSettings,
    /// The parts of a mixture; none of one data set alone.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub parts: Vec<PartIdentity>,
}

/// The properties of one part of a mixture on which samples depend.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartIdentity {
    /// The name of the part; it may change.
    pub name: String,
    /// Its amount, as the user stated it: `proportion = 0.7`.
    pub amount: String,
    /// Its turns in a round of all parts' turns, which follow from the amounts of all parts.
    pub share: u64,
    /// Samples in its data set.
    pub samples: u64,
    /// Identity of its data set.
    pub fingerprint: ContentHash,
}

/// Where a stream went over to other data.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Move {
    /// The first position that has a sample of it.
    pub position: u64,
    /// The epoch of it that begins there. Epochs are counted on over moves: each has an order of its own, and in one of a
    /// mixture a part that is not read as a whole goes on where the epoch before it ended.
    pub epoch: u64,
    /// The stream.
    pub stream: StreamIdentity,
}

/// The place of a stream, from which it goes on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cursor {
    /// The next position to read, over all epochs and moves.
    pub position: u64,
    /// The mixture that it began with.
    pub stream: StreamIdentity,
    /// The mixtures that it changed to later, in the order of the positions, which are below this one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub moves: Vec<Move>,
}

impl Cursor {
    /// The start of a stream.
    pub fn start(stream: StreamIdentity) -> Cursor {
        Cursor { position: 0, stream, moves: Vec::new() }
    }

    /// The stream that was read last, and the position at which it began.
    pub fn current(&self) -> (&StreamIdentity, u64) {
        self.moves.last().map_or((&self.stream, 0), |it| (&it.stream, it.position))
    }

    /// The epoch with which [`Cursor::current`] began.
    pub fn first_epoch(&self) -> u64 {
        self.moves.last().map_or(0, |it| it.epoch)
    }

    /// Whether the stream `now` continues the one that was read last: equal positions hold equal samples.
    ///
    /// Settings that the order does not use are not compared: `window_samples` matters to `window`
    /// only, and the seed to all orders but `none`.
    ///
    /// # Errors
    /// [`DataError::ResumeMismatch`], naming the first difference with both values.
    pub fn check_resume(&self, now: &StreamIdentity) -> Result<(), DataError> {
        let (saved, _) = self.current();
        let same = |key: &str, saved: &dyn ToString, now: &dyn ToString| {
            let (saved, now, key) = (saved.to_string(), now.to_string(), key.to_owned());
            if saved == now { Ok(()) } else { Err(DataError::ResumeMismatch { key, saved, now }) }
        };
        same("seq_len", &saved.seq_len, &now.seq_len)?;
        same("number of streams", &saved.parts.len().max(1), &now.parts.len().max(1))?;
        // Other numbers are another mixture only where they mean other shares: 7 and 3 are 0.7 and 0.3.
        let shares = |stream: &StreamIdentity| -> Vec<u64> {
            stream.parts.iter().map(|part| part.share).collect()
        };
        let are_shares_equal = shares(saved) == shares(now);
        for (saved, now) in saved.parts.iter().zip(&now.parts) {
            let key = |what| format!("streams.{}.{what}", now.name);
            same(&key("samples"), &saved.samples, &now.samples)?;
            same(&key("fingerprint"), &saved.fingerprint, &now.fingerprint)?;
            if !are_shares_equal {
                same(&key("amount"), &saved.amount, &now.amount)?;
            }
        }
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
        let stream =
            StreamIdentity { fingerprint, samples: 100, seq_len: 8, shuffle, parts: Vec::new() };
        Cursor { position: 1234, ..Cursor::start(stream) }
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
            let mut now = saved.stream.clone();
            change(&mut now);
            let message = saved.check_resume(&now).unwrap_err().to_string();
            assert!(message.contains(was) && message.contains(is), "{message}");
        }
    }

    #[test]
    fn a_changed_part_of_a_mixture_is_named() {
        let part = |name: &str, share| PartIdentity {
            name: name.to_owned(),
            amount: format!("proportion = 0.{share}"),
            share,
            samples: 50,
            fingerprint: ContentHash::of(name.as_bytes()),
        };
        let mut saved = cursor();
        saved.stream.parts = vec![part("web", 7), part("code", 3)];
        saved.check_resume(&saved.stream).unwrap();
        let message = |change: fn(&mut Vec<PartIdentity>)| {
            let mut now = saved.stream.clone();
            change(&mut now.parts);
            saved.check_resume(&now).map_err(|error| error.to_string())
        };
        let shares = message(|parts| {
            parts[1].share = 2;
            parts[1].amount = "proportion = 0.2".to_owned();
        });
        let shares = shares.unwrap_err();
        assert!(shares.contains("streams.code.amount was proportion = 0.3"), "{shares}");
        message(|parts| parts[1].amount = "proportion = 0.30".to_owned()).unwrap();
        let data = message(|parts| parts[1].fingerprint = ContentHash::of(b"other")).unwrap_err();
        assert!(data.contains("streams.code.fingerprint was"), "{data}");
        let longer = message(|parts| parts[0].samples = 51).unwrap_err();
        assert!(longer.contains("streams.web.samples was 50"), "{longer}");
        let fewer = message(|parts| parts.truncate(1)).unwrap_err();
        assert!(fewer.contains("number of streams was 2") && fewer.contains("is 1"), "{fewer}");
        message(|parts| parts[0].name = "renamed".to_owned()).unwrap();
        let text = serde_json::to_string(&saved).unwrap();
        assert_eq!(serde_json::from_str::<Cursor>(&text).unwrap(), saved);
    }

    #[test]
    fn what_a_stream_moved_to_is_what_goes_on() {
        let mut saved = cursor();
        let began = saved.stream.clone();
        assert_eq!(saved.current(), (&began, 0));
        let newer = StreamIdentity { fingerprint: ContentHash::of(b"two"), samples: 101, ..began };
        saved.moves.push(Move { position: 1200, epoch: 12, stream: newer.clone() });
        assert_eq!((saved.current(), saved.first_epoch()), ((&newer, 1200), 12));
        saved.check_resume(&newer).unwrap();
        assert!(saved.check_resume(&saved.stream).is_err());
        let text = serde_json::to_string(&saved).unwrap();
        assert_eq!(serde_json::from_str::<Cursor>(&text).unwrap(), saved);
    }

    #[test]
    fn settings_that_the_order_does_not_use_may_change() {
        let mut saved = cursor();
        saved.stream.shuffle.order = ShuffleOrder::None;
        let mut now = saved.stream.clone();
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
