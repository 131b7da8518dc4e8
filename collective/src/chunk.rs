//! One message between workers: a header and a run of fp32, exchanged at the speed of a memory copy.
//!
//! A chunk is a timely container of one record. Inside a process it moves as a pointer; between processes it is
//! written once into the network's slab and read as a view of it. A view pins its slab, so a receiver
//! adds or copies a chunk at once. Chunks are routed whole by [`by_destination`] to the worker that their header names.
//!
//! Messages from the network are checked as far as they can be: length, magic, part and routing. A container cannot
//! answer an error while timely decodes it, so a malformed message becomes a chunk whose every accessor
//! answers [`CollectiveError::Malformed`]. (Damage to timely's own framing is a panic of timely.)

use std::borrow::Cow;
use std::io::Write;

use bytemuck::{Pod, Zeroable};
use tidemill_kernels::HostView;
use timely::Accountable;
use timely::bytes::arc::Bytes;
use timely::communication::Push;
use timely::container::PushInto;
use timely::dataflow::channels::pact::DistributorPact;
use timely::dataflow::channels::pushers::exchange::Distributor;
use timely::dataflow::channels::{ContainerBytes, Message};

use crate::error::{CollectiveError, Result};
use crate::node::Node;

/// The meaning of the elements of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Part {
    /// The gradients of one use of a worker's part of a bucket: sums of token losses' gradients over a tree node.
    Gradient {
        /// The bucket.
        bucket: u32,
        /// The number of the use, counted within the bucket.
        use_index: u16,
        /// The worker that owns the part: the destination, or the worker for which the destination adds.
        owner: u32,
    },
    /// Parameters of a worker's part of a bucket, after their update.
    Update {
        /// The bucket.
        bucket: u32,
        /// Whether these are the second precision of a bucket that is gathered in two.
        beside: bool,
        /// The worker that owns the part: the source, or the worker whose update the source passes on.
        owner: u32,
    },
    /// A part of the training state.
    State(StatePart),
}

/// The parts of the training state, for every parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum StatePart {
    /// The parameter itself.
    Parameter,
    /// A state of the optimizer: its place among those that the update rule names.
    State(u8),
}

impl StatePart {
    /// The parameters, then `states` states of the optimizer: every part, in the order that checkpoints are written in.
    ///
    /// # Panics
    /// When there are more states than a part can tell apart: 255.
    pub fn all(states: usize) -> impl Iterator<Item = Self> + Clone {
        let states = u8::try_from(states).expect("an update rule has 255 states at most");
        std::iter::once(Self::Parameter).chain((0..states).map(Self::State))
    }

    /// The place in [`all`](Self::all).
    pub fn index(self) -> usize {
        match self {
            Self::Parameter => 0,
            Self::State(state) => 1 + usize::from(state),
        }
    }
}

impl Part {
    fn encode(self) -> [u32; 3] {
        match self {
            Self::Gradient { bucket, use_index, owner } => {
                [1 | u32::from(use_index) << 16, bucket, owner]
            }
            Self::State(part) => [2, part.index() as u32, 0],
            Self::Update { bucket, beside, owner } => [3 | u32::from(beside) << 16, bucket, owner],
        }
    }

    fn decode(code: [u32; 3]) -> Option<Self> {
        let [kind, of, owner] = code;
        match (kind & 0xffff, kind >> 16) {
            (1, use_index) => {
                Some(Self::Gradient { bucket: of, use_index: use_index as u16, owner })
            }
            (2, 0) if owner == 0 => match of.checked_sub(1) {
                None => Some(Self::State(StatePart::Parameter)),
                Some(state) => u8::try_from(state).ok().map(StatePart::State).map(Self::State),
            },
            (3, beside @ 0..=1) => Some(Self::Update { bucket: of, beside: beside == 1, owner }),
            _ => None,
        }
    }
}

/// The meaning of a chunk, its source and its destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkHeader {
    /// The worker that it goes to.
    pub destination: u32,
    /// The worker that it comes from: credit goes back there.
    pub source: u32,
    /// The meaning of its elements.
    pub part: Part,
    /// Its number among the pieces: of the training state, that of the planned chunk; of a worker's part of a bucket, that of
    /// the piece in units of [`CHUNK_ELEMENTS`](crate::CHUNK_ELEMENTS).
    pub chunk: u32,
    /// The lanes that it is a sum over.
    pub node: Node,
    /// The step.
    pub step: u64,
}

const MAGIC: u32 = 0x746d_636b;

/// The header as it is written: 56 bytes, then the elements, then zeros up to a multiple of 8.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Wire {
    magic: u32,
    destination: u32,
    source: u32,
    part: [u32; 3],
    chunk: u32,
    node: [u32; 2],
    /// 0, so that the values behind it are aligned.
    unused: u32,
    step: u64,
    elements: u64,
}

const WIRE_BYTES: usize = size_of::<Wire>();

/// The elements of a chunk.
#[derive(Clone)]
enum Payload {
    /// In this process's memory; a clone is a pointer.
    Here(HostView<f32>),
    /// A view of a network slab.
    Network(Bytes),
}

impl Payload {
    fn bytes(&self) -> usize {
        match self {
            Self::Here(values) => 4 * values.len(),
            Self::Network(bytes) => bytes.len(),
        }
    }

    /// The elements: borrowed wherever they are aligned, which timely's padding sees to.
    fn values(&self) -> Cow<'_, [f32]> {
        match self {
            Self::Here(values) => Cow::Borrowed(values),
            Self::Network(bytes) => match bytemuck::try_cast_slice(bytes) {
                Ok(values) => Cow::Borrowed(values),
                Err(_) => bytes.chunks_exact(4).map(bytemuck::pod_read_unaligned).collect(),
            },
        }
    }
}

#[derive(Clone, Default)]
enum Content {
    #[default]
    Empty,
    Full(ChunkHeader, Payload),
    Malformed(&'static str),
}

/// A timely container of exactly one run of elements, or none.
#[derive(Clone, Default)]
pub struct Chunk {
    content: Content,
}

impl Chunk {
    /// A chunk of elements in this process's memory, which several may share: a broadcast costs one pointer a peer.
    pub fn new(header: ChunkHeader, values: impl Into<HostView<f32>>) -> Self {
        Self { content: Content::Full(header, Payload::Here(values.into())) }
    }

    /// The header.
    ///
    /// # Errors
    /// A message that is no chunk.
    pub fn header(&self) -> Result<&ChunkHeader> {
        match &self.content {
            Content::Full(header, _) => Ok(header),
            Content::Empty => Err(CollectiveError::Malformed { what: "it is empty" }),
            Content::Malformed(what) => Err(CollectiveError::Malformed { what }),
        }
    }

    /// [`header`](Self::header), checked to be for worker `worker`.
    ///
    /// # Errors
    /// A message that is no chunk, or one for another worker.
    pub fn header_for(&self, worker: usize) -> Result<&ChunkHeader> {
        let header = self.header()?;
        let destination = header.destination as usize;
        if destination == worker {
            Ok(header)
        } else {
            Err(CollectiveError::Misrouted { destination, worker })
        }
    }

    /// The elements.
    ///
    /// # Errors
    /// A message that is no chunk.
    pub fn values(&self) -> Result<Cow<'_, [f32]>> {
        self.header()?;
        Ok(match &self.content {
            Content::Full(_, payload) => payload.values(),
            _ => Cow::Borrowed(&[]),
        })
    }

    /// The number of elements.
    pub fn elements(&self) -> usize {
        self.payload_bytes() / size_of::<f32>()
    }

    /// Bytes of the elements, in which credit is counted.
    pub fn payload_bytes(&self) -> usize {
        match &self.content {
            Content::Full(_, payload) => payload.bytes(),
            _ => 0,
        }
    }

    fn wire(&self) -> Option<(Wire, Cow<'_, [f32]>)> {
        let Content::Full(header, payload) = &self.content else { return None };
        let values = payload.values();
        let wire = Wire {
            magic: MAGIC,
            destination: header.destination,
            source: header.source,
            part: header.part.encode(),
            chunk: header.chunk,
            node: [header.node.lo, header.node.hi],
            unused: 0,
            step: header.step,
            elements: values.len() as u64,
        };
        Some((wire, values))
    }

    fn decode(mut bytes: Bytes) -> std::result::Result<(ChunkHeader, Payload), &'static str> {
        if bytes.len() < WIRE_BYTES {
            return Err("it is shorter than a header");
        }
        let wire: Wire = bytemuck::pod_read_unaligned(&bytes[..WIRE_BYTES]);
        if wire.magic != MAGIC {
            return Err("its first bytes are not those of a chunk");
        }
        let part = Part::decode(wire.part).ok_or("it holds an unknown part")?;
        let _ = bytes.extract_to(WIRE_BYTES);
        let payload_bytes = usize::try_from(wire.elements)
            .ok()
            .and_then(|elements| elements.checked_mul(4))
            .filter(|&payload_bytes| payload_bytes <= bytes.len())
            .ok_or("it is shorter than its header says")?;
        let header = ChunkHeader {
            destination: wire.destination,
            source: wire.source,
            part,
            chunk: wire.chunk,
            node: Node { lo: wire.node[0], hi: wire.node[1] },
            step: wire.step,
        };
        Ok((header, Payload::Network(bytes.extract_to(payload_bytes))))
    }
}

impl Accountable for Chunk {
    fn record_count(&self) -> i64 {
        if matches!(self.content, Content::Empty) { 0 } else { 1 }
    }
}

impl PushInto<Chunk> for Chunk {
    fn push_into(&mut self, chunk: Chunk) {
        debug_assert!(self.is_empty(), "a chunk is a container of one");
        *self = chunk;
    }
}

impl ContainerBytes for Chunk {
    fn from_bytes(bytes: Bytes) -> Self {
        let content = match Self::decode(bytes) {
            Ok((header, payload)) => Content::Full(header, payload),
            Err(what) => Content::Malformed(what),
        };
        Self { content }
    }

    fn length_in_bytes(&self) -> usize {
        (WIRE_BYTES + self.payload_bytes()).next_multiple_of(8)
    }

    fn into_bytes<W: Write>(&self, writer: &mut W) {
        let written = match self.wire() {
            Some((wire, values)) => writer
                .write_all(bytemuck::bytes_of(&wire))
                .and_then(|()| writer.write_all(bytemuck::cast_slice(&values))),
            None => writer.write_all(&[0; WIRE_BYTES]),
        };
        let padding = self.length_in_bytes() - WIRE_BYTES - self.payload_bytes();
        // Timely writes into memory of `length_in_bytes`, which cannot fail.
        written.and_then(|()| writer.write_all(&[0; 8][..padding])).expect("writing to a slab");
    }
}

/// Sends whole containers to the worker that their header names.
#[derive(Clone, Copy, Debug)]
pub struct ByDestination;

impl Distributor<Chunk> for ByDestination {
    fn partition<T: Clone, P: Push<Message<T, Chunk>>>(
        &mut self,
        container: &mut Chunk,
        time: &T,
        pushers: &mut [P],
    ) {
        // The receiver refuses a chunk whose header names no worker: `Chunk::header_for`.
        let destination = container.header().map_or(0, |header| header.destination as usize);
        Message::push_at(container, time.clone(), &mut pushers[destination % pushers.len()]);
    }

    fn flush<T: Clone, P: Push<Message<T, Chunk>>>(&mut self, _time: &T, _pushers: &mut [P]) {}
}

/// The pact of [`by_destination`].
pub type ByDestinationPact = DistributorPact<fn(usize) -> ByDestination>;

/// Routes each chunk, whole, to the worker that its header names.
pub fn by_destination() -> ByDestinationPact {
    DistributorPact(|_peers| ByDestination)
}

#[cfg(test)]
mod tests {
    use super::*;
    use timely::bytes::arc::BytesMut;

    fn header() -> ChunkHeader {
        ChunkHeader {
            destination: 3,
            source: 1,
            part: Part::Gradient { bucket: 90_000, use_index: 7, owner: 5 },
            chunk: 11,
            node: Node { lo: 4, hi: 8 },
            step: 1 << 40,
        }
    }

    fn encode(chunk: &Chunk) -> Vec<u8> {
        let mut bytes = Vec::new();
        chunk.into_bytes(&mut bytes);
        assert_eq!(bytes.len(), chunk.length_in_bytes());
        bytes
    }

    fn decode(bytes: Vec<u8>) -> Chunk {
        Chunk::from_bytes(BytesMut::from(bytes).freeze())
    }

    #[test]
    fn chunks_survive_the_wire() {
        for elements in [0, 1, 2, 3, 1_000] {
            let values: Vec<f32> = (0..elements).map(|i| i as f32 - 0.1).collect();
            let state = StatePart::all(255).map(Part::State);
            let updates = [false, true].map(|beside| Part::Update { bucket: 3, beside, owner: 6 });
            for part in state.chain([header().part]).chain(updates) {
                let header = ChunkHeader { part, ..header() };
                let chunk = decode(encode(&Chunk::new(header, values.clone())));
                assert_eq!(chunk.header(), Ok(&header));
                assert_eq!(chunk.values().unwrap(), values);
                assert_eq!(chunk.record_count(), 1);
                assert_eq!(decode(encode(&chunk)).values().unwrap(), values);
            }
        }
    }

    #[test]
    fn misaligned_bytes_are_read_all_the_same() {
        let mut bytes = vec![0xff];
        bytes.extend(encode(&Chunk::new(header(), vec![1.5, -2.5, 3.5])));
        let mut bytes = BytesMut::from(bytes).freeze();
        let _ = bytes.extract_to(1);
        assert_eq!(Chunk::from_bytes(bytes).values().unwrap(), [1.5_f32, -2.5, 3.5].as_slice());
    }

    #[test]
    fn damaged_messages_are_errors_of_whoever_reads_them() {
        let good = encode(&Chunk::new(header(), vec![1.0; 10]));
        for length in 0..good.len() {
            assert!(decode(good[..length].to_vec()).values().is_err(), "{length} bytes");
        }
        let mut flipped = good.clone();
        flipped[0] ^= 1;
        assert!(decode(flipped).header().is_err());
        let mut part = good.clone();
        part[12] = 77;
        assert!(decode(part).header().is_err());
        let mut long = good;
        long[48..56].copy_from_slice(&u64::MAX.to_le_bytes());
        assert!(decode(long).header().is_err());
        let malformed = decode(vec![1; 64]);
        assert_eq!(malformed.record_count(), 1, "progress counts what arrived");
        assert!(decode(encode(&malformed)).values().is_err());
    }

    #[test]
    fn chunks_of_others_are_found_out() {
        let chunk = Chunk::new(header(), vec![0.0]);
        assert!(chunk.header_for(3).is_ok());
        let error = chunk.header_for(2).unwrap_err();
        assert_eq!(error, CollectiveError::Misrouted { destination: 3, worker: 2 });
    }
}
