//! Bytes between two processes, sealed in frames: the bytes that arrive are those that were sent, all of them and in
//! order, and it cannot be read on the way.
//!
//! A frame is the length of its payload and the payload, each encrypted by AES-256-GCM and followed
//! by its tag of 16 bytes. The nonces are running numbers, two a frame, and each direction of each
//! connection has a key of its own; so a frame that was changed, left out, repeated, moved or taken
//! from elsewhere does not open. A length is opened before it is believed, and no byte of a payload
//! is handed on before its tag is right.
//!
//! It costs a pass over the bytes at each end, which take their copy anyway: AES-GCM is several
//! times faster than the loopback device where the processor has instructions for it.

use std::io::{self, Read};

use super::ciphers::{DataCipher, DataKey, TAG_BYTES};

/// The longest payload of a frame: it stays in a processor's cache from the pass that seals it to
/// the copy into the socket.
pub(super) const PAYLOAD_LIMIT_BYTES: usize = 256 << 10;
const LENGTH_BYTES: usize = 4;
const HEADER_BYTES: usize = LENGTH_BYTES + TAG_BYTES;
const FRAME_LIMIT_BYTES: usize = HEADER_BYTES + PAYLOAD_LIMIT_BYTES + TAG_BYTES;

/// The keys of both directions, as one end sees them.
#[derive(Debug)]
pub(super) struct DataKeys {
    pub sending: DataKey,
    pub receiving: DataKey,
}

/// The sending end. Not `Clone`: two of a key would use its nonces twice.
pub(super) struct Sealer {
    cipher: DataCipher,
    /// No two seals under one key share a number.
    number: u64,
    frame: Vec<u8>,
}

impl Sealer {
    pub(super) fn new(key: &DataKey) -> Self {
        Self { cipher: key.cipher(), number: 0, frame: Vec::new() }
    }

    /// A frame with the first bytes of `bytes`, [`PAYLOAD_LIMIT_BYTES`] at most, and their number.
    pub(super) fn seal(&mut self, bytes: &[u8]) -> (&[u8], usize) {
        let payload = &bytes[..bytes.len().min(PAYLOAD_LIMIT_BYTES)];
        let length = u32::try_from(payload.len()).expect("the limit is far below 2^32");
        self.frame.clear();
        for part in [&length.to_be_bytes()[..], payload] {
            let start = self.frame.len();
            self.frame.extend_from_slice(part);
            let tag = self.cipher.seal(self.number, &mut self.frame[start..]);
            self.number += 1;
            self.frame.extend_from_slice(&tag);
        }
        (&self.frame, payload.len())
    }
}

/// The receiving end.
pub(super) struct Opener {
    cipher: DataCipher,
    number: u64,
    /// Bytes from the socket; `start..end` of them are not opened yet.
    input: Vec<u8>,
    start: usize,
    end: usize,
}

impl Opener {
    pub(super) fn new(key: &DataKey) -> Self {
        let input = vec![0; 2 * FRAME_LIMIT_BYTES];
        Self { cipher: key.cipher(), number: 0, input, start: 0, end: 0 }
    }

    /// Reads until the next frame is complete. Returns the length of its payload, which
    /// [`Opener::open`] then opens.
    ///
    /// # Errors
    /// Errors of `reader`, `UnexpectedEof` at its end, and `InvalidData` for bytes that were not sealed by
    /// the other end.
    pub(super) fn next_frame(&mut self, reader: &mut impl Read) -> io::Result<usize> {
        self.fill(HEADER_BYTES, reader)?;
        let mut length = [0; LENGTH_BYTES];
        self.take(&mut length)?;
        let length = u32::from_be_bytes(length) as usize;
        if length == 0 || length > PAYLOAD_LIMIT_BYTES {
            return Err(invalid(format!("a frame of {length} bytes")));
        }
        self.fill(length + TAG_BYTES, reader)?;
        Ok(length)
    }

    /// Opens the payload whose length [`Opener::next_frame`] has returned, into all of `payload`.
    pub(super) fn open(&mut self, payload: &mut [u8]) -> io::Result<()> {
        self.take(payload)
    }

    fn take(&mut self, plain: &mut [u8]) -> io::Result<()> {
        let (sealed, rest) = self.input[self.start..self.end].split_at(plain.len());
        let tag = &rest[..TAG_BYTES];
        let number = self.number;
        self.number += 1;
        self.start += plain.len() + TAG_BYTES;
        self.cipher.open(number, sealed, tag, plain)
    }

    /// Reads until `count` bytes are there.
    fn fill(&mut self, count: usize, reader: &mut impl Read) -> io::Result<()> {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
        if self.start + count > self.input.len() {
            self.input.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        while self.end - self.start < count {
            match reader.read(&mut self.input[self.end..]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(read) => self.end += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

fn invalid(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

/// A stream as something on the way may leave it.
#[cfg(test)]
pub(super) fn mutate(stream: &mut Vec<u8>, seed: u64) {
    let mut drawn = 0u64;
    let mut random = |below: usize| {
        drawn += 1;
        xxhash_rust::xxh3::xxh3_64_with_seed(&drawn.to_le_bytes(), seed) as usize % below
    };
    for _ in 0..[1, 1, 2, 5][random(4)] {
        let at = random(stream.len());
        match random(5) {
            0 => stream[at] ^= 1 << random(8),
            1 => stream.insert(at, random(256) as u8),
            2 if stream.len() > 1 => drop(stream.remove(at)),
            3 => stream.truncate(at + 1),
            _ => stream.extend_from_within(at..),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZES: [usize; 6] = [1, 48, 1000, PAYLOAD_LIMIT_BYTES - 1, PAYLOAD_LIMIT_BYTES, 77];
    const SMALL: [usize; 6] = [1, 48, 1000, 9, 5, 77];

    fn payload(size: usize) -> Vec<u8> {
        (0..size).map(|index| (index * 31 + size) as u8).collect()
    }

    /// The frames of payloads of these sizes, and their key.
    fn sealed(sizes: [usize; 6]) -> (DataKey, Vec<Vec<u8>>) {
        let key = DataKey::generate().unwrap();
        let mut sealer = Sealer::new(&key);
        let frames = sizes.map(|size| {
            let payload = payload(size);
            let (frame, count) = sealer.seal(&payload);
            assert_eq!(count, size);
            frame.to_vec()
        });
        (key, frames.to_vec())
    }

    /// How many payloads open; each must be the one that was sealed.
    fn opened(key: &DataKey, sizes: [usize; 6], stream: &[u8]) -> (usize, io::ErrorKind) {
        let (mut opener, mut reader) = (Opener::new(key), stream);
        for (count, size) in sizes.into_iter().enumerate() {
            let mut plain = Vec::new();
            let open = opener.next_frame(&mut reader).and_then(|length| {
                plain.resize(length, 0);
                opener.open(&mut plain)
            });
            if let Err(error) = open {
                return (count, error.kind());
            }
            assert!(plain == payload(size), "payload {count}");
        }
        (sizes.len(), opener.next_frame(&mut reader).unwrap_err().kind())
    }

    #[test]
    fn payloads_come_back_and_more_than_a_frame_is_cut() {
        let (key, frames) = sealed(SIZES);
        let all = opened(&key, SIZES, &frames.concat());
        assert_eq!(all, (SIZES.len(), io::ErrorKind::UnexpectedEof));
        let long = vec![7; PAYLOAD_LIMIT_BYTES + 1];
        assert_eq!(Sealer::new(&key).seal(&long).1, PAYLOAD_LIMIT_BYTES);
    }

    #[test]
    fn frames_that_are_changed_missing_repeated_moved_or_foreign_do_not_open() {
        let (key, frames) = sealed(SMALL);
        let opened = |stream: &[u8]| opened(&key, SMALL, stream);
        let invalid = io::ErrorKind::InvalidData;
        for bit in 0..8 * frames[1].len() {
            let mut changed = frames.clone();
            changed[1][bit / 8] ^= 1 << (bit % 8);
            assert_eq!(opened(&changed.concat()), (1, invalid), "bit {bit}");
        }
        let order = |order: &[usize]| -> Vec<u8> {
            order.iter().flat_map(|&frame| frames[frame].clone()).collect()
        };
        assert_eq!(opened(&order(&[0, 2, 3])), (1, invalid));
        assert_eq!(opened(&order(&[0, 1, 1, 2])), (2, invalid));
        assert_eq!(opened(&order(&[1, 0, 2])), (0, invalid));
        let cut = &frames.concat()[..frames[0].len() + 50];
        assert_eq!(opened(cut), (1, io::ErrorKind::UnexpectedEof));
        let (foreign, _) = sealed(SMALL);
        assert_eq!(self::opened(&foreign, SMALL, &frames.concat()), (0, invalid));
    }

    #[test]
    fn mutated_streams_open_to_nothing_that_was_not_sent() {
        const SEED: u64 = 20_261_122;
        let (key, frames) = sealed(SMALL);
        let whole = frames.concat();
        for case in 0..2000 {
            let mut stream = whole.clone();
            mutate(&mut stream, SEED + case);
            let intact = stream.iter().zip(&whole).take_while(|(one, other)| one == other).count();
            // Each payload that opens is compared there.
            let (count, _) = opened(&key, SMALL, &stream);
            let opened_bytes: usize = frames[..count].iter().map(Vec::len).sum();
            assert!(opened_bytes <= intact, "seed {SEED}, case {case}");
        }
    }
}
