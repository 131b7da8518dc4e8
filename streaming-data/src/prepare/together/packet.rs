//! Numbers and bytes in a message. All numbers are little-endian; a run of bytes has its length before it.

use crate::prepare::PrepareError;

/// A message that is being written.
#[derive(Debug, Default)]
pub(super) struct Packet {
    bytes: Vec<u8>,
}

impl Packet {
    /// A message that begins with a byte for its kind.
    pub(super) fn of(kind: u8) -> Packet {
        Packet { bytes: vec![kind] }
    }

    pub(super) fn byte(&mut self, byte: u8) {
        self.bytes.push(byte);
    }

    pub(super) fn number(&mut self, number: u64) {
        self.bytes.extend_from_slice(&number.to_le_bytes());
    }

    pub(super) fn wide(&mut self, number: u128) {
        self.bytes.extend_from_slice(&number.to_le_bytes());
    }

    pub(super) fn bytes(&mut self, bytes: &[u8]) {
        self.number(bytes.len() as u64);
        self.bytes.extend_from_slice(bytes);
    }

    pub(super) fn tokens(&mut self, tokens: &[u32]) {
        self.number(tokens.len() as u64);
        self.bytes.reserve(4 * tokens.len());
        self.bytes.extend(tokens.iter().flat_map(|token| token.to_le_bytes()));
    }

    pub(super) fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Takes the bytes of the message; the next one begins.
    pub(super) fn take(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.bytes)
    }
}

/// A message that is being read.
#[derive(Debug)]
pub(super) struct Unpacked<'a> {
    left: &'a [u8],
    /// Which process sent it.
    process: usize,
}

impl<'a> Unpacked<'a> {
    pub(super) fn new(message: &'a [u8], process: usize) -> Unpacked<'a> {
        Unpacked { left: message, process }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.left.is_empty()
    }

    /// How many bytes are left.
    pub(super) fn len(&self) -> usize {
        self.left.len()
    }

    /// The error that the message is malformed.
    pub(super) fn wrong(&self) -> PrepareError {
        PrepareError::Message { process: self.process }
    }

    pub(super) fn some(&mut self, bytes: usize) -> Result<&'a [u8], PrepareError> {
        let (some, left) = self.left.split_at_checked(bytes).ok_or_else(|| self.wrong())?;
        self.left = left;
        Ok(some)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], PrepareError> {
        let mut array = [0; N];
        array.copy_from_slice(self.some(N)?);
        Ok(array)
    }

    pub(super) fn byte(&mut self) -> Result<u8, PrepareError> {
        Ok(self.array::<1>()?[0])
    }

    pub(super) fn number(&mut self) -> Result<u64, PrepareError> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    /// A number of documents, bytes or the like that others are added to: none has more digits than its sum with many others.
    pub(super) fn tally(&mut self, binary_digits: u32) -> Result<u64, PrepareError> {
        let number = self.number()?;
        if number >> binary_digits == 0 { Ok(number) } else { Err(self.wrong()) }
    }

    pub(super) fn wide(&mut self) -> Result<u128, PrepareError> {
        Ok(u128::from_le_bytes(self.array()?))
    }

    /// A number of things that are in memory, or are to be.
    pub(super) fn count(&mut self) -> Result<usize, PrepareError> {
        usize::try_from(self.number()?).map_err(|_| self.wrong())
    }

    pub(super) fn bytes(&mut self) -> Result<&'a [u8], PrepareError> {
        let length = self.count()?;
        self.some(length)
    }

    pub(super) fn text(&mut self) -> Result<&'a str, PrepareError> {
        let bytes = self.bytes()?;
        std::str::from_utf8(bytes).map_err(|_| self.wrong())
    }

    pub(super) fn tokens(&mut self) -> Result<Vec<u32>, PrepareError> {
        let length = self.count()?.checked_mul(4).ok_or_else(|| self.wrong())?;
        let token = |bytes: &[u8]| u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        Ok(self.some(length)?.chunks_exact(4).map(token).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_packed_is_unpacked_and_what_is_cut_off_is_an_error() {
        let mut packet = Packet::of(7);
        packet.number(1 << 60);
        packet.wide(u128::MAX - 1);
        packet.bytes(b"");
        packet.bytes("tide".as_bytes());
        packet.tokens(&[1, u32::MAX]);
        let message = packet.take();
        let read = |message: &[u8]| -> Result<(), PrepareError> {
            let mut unpacked = Unpacked::new(message, 3);
            assert_eq!((unpacked.byte()?, unpacked.number()?), (7, 1 << 60));
            assert_eq!((unpacked.wide()?, unpacked.bytes()?), (u128::MAX - 1, &b""[..]));
            assert_eq!((unpacked.text()?, unpacked.tokens()?), ("tide", vec![1, u32::MAX]));
            assert!(unpacked.is_empty());
            Ok(())
        };
        read(&message).unwrap();
        for length in 0..message.len() {
            let error = read(&message[..length]).unwrap_err();
            assert!(matches!(error, PrepareError::Message { process: 3 }), "{error}");
        }
        let mut long = Packet::default();
        long.number(u64::MAX);
        let long = long.take();
        Unpacked::new(&long, 0).bytes().unwrap_err();
        Unpacked::new(&long, 0).tokens().unwrap_err();
        Unpacked::new(&long, 0).tally(63).unwrap_err();
        let mut short = Packet::default();
        short.number(7);
        assert_eq!(Unpacked::new(&short.take(), 0).tally(3).unwrap(), 7);
    }
}
