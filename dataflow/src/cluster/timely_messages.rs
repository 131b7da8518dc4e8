//! Timely's messages in the bytes of a peer, checked before timely sees them.
//!
//! A message is a header of six big-endian u64 (channel, source, first target, end of targets,
//! length, sequence number) and a payload of that length; a length of zero ends the stream
//! (`timely_communication::networking::MessageHeader`). Timely believes a header: a target that is
//! not there panics its thread, a length near 2^64 has it loop for ever. A peer cannot do that
//! here: a header that could not be one of its own is an error, and is not
//! handed on, not even in part.

use std::ops::Range;

const HEADER_BYTES: usize = 48;
/// The longest message that is taken from a peer. Timely needs up to twice as much room for one.
const MESSAGE_LIMIT_BYTES: u64 = 256 << 20;
/// Timely numbers channels from zero, a few for each dataflow.
const CHANNEL_LIMIT: u64 = 1 << 32;

/// Follows the messages of one peer through its byte stream.
pub(super) struct Messages {
    /// The peer's workers.
    sources: Range<u64>,
    /// This process's workers.
    targets: Range<u64>,
    place: Place,
}

/// A place in the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// In a header; after the stream was cut off, `zeros` bytes of it were added as zeros.
    Header {
        zeros: usize,
    },
    Payload {
        left_bytes: usize,
    },
    End,
}

const BOUNDARY: Place = Place::Header { zeros: 0 };

/// A message of a peer that timely must not see.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Impossible(pub String);

impl Messages {
    /// Checks messages from process `peer` to process `process`, where each process has `workers` workers.
    pub(super) fn new(process: usize, peer: usize, workers: usize) -> Self {
        let of = |process: usize| (process * workers) as u64..((process + 1) * workers) as u64;
        Self { sources: of(peer), targets: of(process), place: BOUNDARY }
    }

    /// How many of `bytes`, which come next in the stream, may be handed on: all except an incomplete
    /// header at their end.
    pub(super) fn check(&mut self, bytes: &[u8]) -> Result<usize, Impossible> {
        let (mut place, mut rest) = (self.place, bytes);
        while !rest.is_empty() {
            let passed = match place {
                Place::End => return Err(Impossible("bytes after its last message".to_string())),
                Place::Payload { left_bytes } => {
                    let passed = left_bytes.min(rest.len());
                    place = Place::in_payload(left_bytes - passed);
                    passed
                }
                Place::Header { .. } => {
                    let Some(header) = rest.first_chunk() else { break };
                    place = self.after(header)?;
                    HEADER_BYTES
                }
            };
            rest = &rest[passed..];
        }
        // Bytes are handed on only if all of them are accepted.
        self.place = place;
        Ok(bytes.len() - rest.len())
    }

    /// The place in the stream after a header.
    fn after(&self, header: &[u8; HEADER_BYTES]) -> Result<Place, Impossible> {
        let (words, _) = header.as_chunks();
        let word = |index: usize| u64::from_be_bytes(words[index]);
        let [channel, source, target, targets_end, length] = [0, 1, 2, 3, 4].map(word);
        if length == 0 {
            return Ok(Place::End);
        }
        let impossible = |what: String| Err(Impossible(what));
        if length > MESSAGE_LIMIT_BYTES {
            let most = MESSAGE_LIMIT_BYTES;
            return impossible(format!(
                "a message of {length} bytes, and at most {most} are taken"
            ));
        }
        if !self.sources.contains(&source) {
            let own = &self.sources;
            return impossible(format!("a message of worker {source}, and its are {own:?}"));
        }
        let ours = &self.targets;
        if target < ours.start || targets_end > ours.end || target >= targets_end {
            return impossible(format!(
                "a message for workers {target}..{targets_end}, and here are {ours:?}"
            ));
        }
        if channel >= CHANNEL_LIMIT {
            return impossible(format!("a message for channel {channel}"));
        }
        // At most 2^28.
        Ok(Place::in_payload(length as usize))
    }

    pub(super) fn ended(&self) -> bool {
        self.place == Place::End
    }

    /// Goes on with zeros where the stream was cut off: they fill up its last payload, and then
    /// make a header that ends it. How many bytes of `buffer` they take; none after the end.
    pub(super) fn fill_up(&mut self, buffer: &mut [u8]) -> usize {
        let (left_bytes, after) = match self.place {
            Place::End => return 0,
            Place::Payload { left_bytes } => (left_bytes, BOUNDARY),
            Place::Header { zeros } => (HEADER_BYTES - zeros, Place::End),
        };
        let count = left_bytes.min(buffer.len());
        buffer[..count].fill(0);
        self.place = match self.place {
            _ if count == left_bytes => after,
            Place::Header { zeros } => Place::Header { zeros: zeros + count },
            _ => Place::in_payload(left_bytes - count),
        };
        count
    }
}

impl Place {
    fn in_payload(left_bytes: usize) -> Self {
        if left_bytes > 0 { Self::Payload { left_bytes } } else { BOUNDARY }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A message from process 1 to process 0, of two workers each.
    fn message(length: u64) -> Vec<u8> {
        raw([3, 2, 0, 2, length, 7], length as usize)
    }

    fn raw(header: [u64; 6], payload: usize) -> Vec<u8> {
        let mut bytes: Vec<u8> = header.iter().flat_map(|field| field.to_be_bytes()).collect();
        bytes.resize(bytes.len() + payload, 0xab);
        bytes
    }

    fn messages() -> Messages {
        Messages::new(0, 1, 2)
    }

    #[test]
    fn wherever_the_stream_is_cut_zeros_end_it() {
        let whole: Vec<u8> = [message(700), message(1), message(65_000)].concat();
        for cut in (0..900).chain(whole.len() - 3..=whole.len()) {
            let mut messages = messages();
            let mut held = Vec::new();
            for piece in whole[..cut].chunks(13) {
                held.extend_from_slice(piece);
                let released = messages.check(&held).unwrap();
                held.drain(..released);
                assert!(held.len() < HEADER_BYTES);
            }
            let mut zeros = 0;
            // Timely sees the bytes that were handed on, and then zeros, in pieces of any size.
            let mut seen = whole[..cut - held.len()].to_vec();
            while !messages.ended() {
                let mut buffer = [0xcd; 37];
                let count = messages.fill_up(&mut buffer);
                seen.extend_from_slice(&buffer[..count]);
                zeros += count;
                assert!(zeros < 200_000, "no end after a cut at {cut}");
            }
            let mut timely = self::messages();
            assert_eq!((timely.check(&seen), timely.ended()), (Ok(seen.len()), true));
        }
    }

    #[test]
    fn a_clean_end_is_seen_as_one_and_nothing_follows_it() {
        let mut messages = messages();
        messages.check(&[message(5), message(0)].concat()).unwrap();
        assert!(messages.ended());
        assert!(messages.check(&[0]).unwrap_err().0.contains("after its last message"));
        assert_eq!(messages.fill_up(&mut [0; 9]), 0);
    }

    #[test]
    fn headers_that_would_hang_or_panic_timely_are_refused() {
        let max = u64::MAX;
        for (header, expected) in [
            ([3, 2, 0, 2, max - 47, 7], "bytes, and at most"),
            ([3, 2, 0, 2, max, 7], "bytes, and at most"),
            ([3, 2, 0, 2, MESSAGE_LIMIT_BYTES + 1, 7], "bytes, and at most"),
            ([3, 2, 7, 9, 8, 7], "for workers 7..9, and here are 0..2"),
            ([3, 2, 0, max, 8, 7], "for workers"),
            ([3, 2, max, max, 8, 7], "for workers"),
            ([3, 2, 1, 1, 8, 7], "for workers 1..1"),
            ([3, 2, 1, 0, 8, 7], "for workers 1..0"),
            ([3, 1, 0, 1, 8, 7], "of worker 1, and its are 2..4"),
            ([3, 4, 0, 1, 8, 7], "of worker 4"),
            ([max, 2, 0, 1, 8, 7], "for channel"),
        ] {
            let stream = [message(9), raw(header, 8)].concat();
            let Impossible(found) = messages().check(&stream).unwrap_err();
            assert!(found.contains(expected), "{header:?}: {found}");
        }
        assert_eq!(messages().check(&raw([3, 3, 1, 2, MESSAGE_LIMIT_BYTES, 7], 8)), Ok(56));
    }
}
