//! A part of a message between two processes, as timely carries it: a container of one.
//!
//! Inside a process it moves as a pointer; between processes its bytes are copied into the network's memory and out of it at
//! once, so that this is free again. What arrives is checked as far as it can be: one that is malformed says so when it is
//! looked at, as a container cannot answer an error while timely decodes it.

use std::io::Write;

use timely::Accountable;
use timely::bytes::arc::Bytes;
use timely::communication::Push;
use timely::container::PushInto;
use timely::dataflow::channels::pact::DistributorPact;
use timely::dataflow::channels::pushers::exchange::Distributor;
use timely::dataflow::channels::{ContainerBytes, Message};

/// The kind of a parcel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Kind {
    /// Nothing: the place of a parcel that was taken.
    #[default]
    Empty,
    /// A part of a message that has more.
    Part,
    /// The last part of a message.
    Last,
    /// Room for more bytes, of a length of 8 bytes.
    Credit,
    /// Something else arrived.
    Malformed,
}

/// See the [module](self).
#[derive(Clone, Debug, Default)]
pub(super) struct Parcel {
    pub kind: Kind,
    pub to: u32,
    pub from: u32,
    pub bytes: Vec<u8>,
}

/// Bytes of the header: kind, destination, origin, and the length of the rest.
const HEADER_BYTES: usize = 24;
const MAGIC: u32 = 0x7469_6470;

impl Parcel {
    /// Room for so many bytes more.
    pub(super) fn credit(to: usize, from: usize, bytes: u64) -> Parcel {
        let bytes = bytes.to_le_bytes().to_vec();
        Parcel { kind: Kind::Credit, to: to as u32, from: from as u32, bytes }
    }

    /// The bytes of a credit; none where this is another kind of parcel.
    pub(super) fn credited(&self) -> Option<u64> {
        let bytes = self.bytes.as_slice().try_into().ok()?;
        (self.kind == Kind::Credit).then(|| u64::from_le_bytes(bytes))
    }

    fn decode(bytes: &[u8]) -> Option<Parcel> {
        let (header, rest) = bytes.split_at_checked(HEADER_BYTES)?;
        let word = |at: usize| -> Option<u32> {
            Some(u32::from_le_bytes(header.get(4 * at..4 * at + 4)?.try_into().ok()?))
        };
        let kind = match word(1)? {
            1 => Kind::Part,
            2 => Kind::Last,
            3 => Kind::Credit,
            _ => return None,
        };
        let length = u64::from_le_bytes(header[16..].try_into().ok()?);
        let bytes = rest.get(..usize::try_from(length).ok()?)?.to_vec();
        (word(0)? == MAGIC).then_some(Parcel { kind, to: word(2)?, from: word(3)?, bytes })
    }
}

impl Accountable for Parcel {
    fn record_count(&self) -> i64 {
        i64::from(self.kind != Kind::Empty)
    }
}

impl PushInto<Parcel> for Parcel {
    fn push_into(&mut self, parcel: Parcel) {
        debug_assert!(self.is_empty(), "a parcel is a container of one");
        *self = parcel;
    }
}

impl ContainerBytes for Parcel {
    fn from_bytes(bytes: Bytes) -> Self {
        Self::decode(&bytes).unwrap_or(Self { kind: Kind::Malformed, ..Self::default() })
    }

    fn length_in_bytes(&self) -> usize {
        (HEADER_BYTES + self.bytes.len()).next_multiple_of(8)
    }

    fn into_bytes<W: Write>(&self, writer: &mut W) {
        let kind: u32 = match self.kind {
            Kind::Empty | Kind::Malformed => 0,
            Kind::Part => 1,
            Kind::Last => 2,
            Kind::Credit => 3,
        };
        let mut header = Vec::with_capacity(HEADER_BYTES);
        header.extend([MAGIC, kind, self.to, self.from].iter().flat_map(|word| word.to_le_bytes()));
        header.extend((self.bytes.len() as u64).to_le_bytes());
        let padding = self.length_in_bytes() - HEADER_BYTES - self.bytes.len();
        let written = writer
            .write_all(&header)
            .and_then(|()| writer.write_all(&self.bytes))
            .and_then(|()| writer.write_all(&[0; 8][..padding]));
        // Timely writes into memory of `length_in_bytes`, which cannot fail.
        written.expect("writing to a slab");
    }
}

/// Sends parcels to the workers that they name.
pub(super) struct ByDestination;

impl Distributor<Parcel> for ByDestination {
    fn partition<T: Clone, P: Push<Message<T, Parcel>>>(
        &mut self,
        parcel: &mut Parcel,
        time: &T,
        pushers: &mut [P],
    ) {
        let to = parcel.to as usize % pushers.len();
        Message::push_at(parcel, time.clone(), &mut pushers[to]);
    }

    fn flush<T: Clone, P: Push<Message<T, Parcel>>>(&mut self, _time: &T, _pushers: &mut [P]) {}
}

/// Routes each parcel to the worker that it names.
pub(super) fn by_destination() -> DistributorPact<fn(usize) -> ByDestination> {
    DistributorPact(|_peers| ByDestination)
}

#[cfg(test)]
mod tests {
    use super::*;
    use timely::bytes::arc::BytesMut;

    fn encoded(parcel: &Parcel) -> Vec<u8> {
        let mut bytes = Vec::new();
        parcel.into_bytes(&mut bytes);
        assert_eq!(bytes.len(), parcel.length_in_bytes());
        bytes
    }

    fn decoded(bytes: Vec<u8>) -> Parcel {
        Parcel::from_bytes(BytesMut::from(bytes).freeze())
    }

    #[test]
    fn parcels_survive_the_wire_and_what_is_damaged_says_so() {
        for length in [0, 1, 7, 8, 9, 1000] {
            let bytes = (0..length).map(|at| at as u8).collect();
            let parcel = Parcel { kind: Kind::Part, to: 3, from: 1 << 20, bytes };
            let wire = encoded(&parcel);
            let found = decoded(wire.clone());
            assert_eq!((found.kind, found.to, found.from), (Kind::Part, 3, 1 << 20));
            assert_eq!(found.bytes, parcel.bytes);
            for cut in 0..HEADER_BYTES + length {
                assert_eq!(decoded(wire[..cut].to_vec()).kind, Kind::Malformed);
            }
            for at in [0, 4] {
                let mut other = wire.clone();
                other[at] ^= 0x40;
                assert_eq!(decoded(other).kind, Kind::Malformed);
            }
            let mut long = wire;
            long[16..24].copy_from_slice(&u64::MAX.to_le_bytes());
            assert_eq!(decoded(long).kind, Kind::Malformed);
        }
        let credit = decoded(encoded(&Parcel::credit(1, 2, 1 << 40)));
        assert_eq!((credit.credited(), credit.record_count()), (Some(1 << 40), 1));
        assert_eq!(Parcel { kind: Kind::Last, bytes: vec![0; 8], ..credit }.credited(), None);
        assert_eq!(Parcel::default().record_count(), 0);
    }
}
