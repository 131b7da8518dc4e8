//! A wrong chunk from another process is an error that names that process. Timely carries the chunk from a worker that
//! sends what the test says.

use std::num::NonZeroUsize;
use std::sync::mpsc;
use std::time::Duration;

use tidemill_kernels::{Cpu, Runtime, Slice};
use timely::bytes::arc::BytesMut;
use timely::container::CapacityContainerBuilder;
use timely::dataflow::InputHandle;
use timely::dataflow::channels::ContainerBytes;
use timely::{CommunicationConfig, Config, WorkerConfig};

use super::updates::part_of_update;
use super::*;
use crate::carry::Carry;

/// Far less than a test may wait, far more than a chunk takes.
const SOON: Duration = Duration::from_secs(20);
const KEY: Key = Key { step: 7, round: 0, bucket: 3 };
/// Elements of rank 0's part: two chunks, the second one short.
const OWN: usize = CHUNK_ELEMENTS + 8;

/// A bucket of three ranks; the second one owns nothing.
fn cut() -> Cut {
    Cut::at(vec![OWN, OWN, OWN + 100])
}

/// Sums and gathers the bucket at two steps, as rank 0, which is a process of its own as the others are.
fn exchange(mut end: Host<Cpu>, cpu: &Cpu, what: ArrivalKind) -> Result<()> {
    let (mut stream, cut) = (cpu.device_stream()?, cut());
    let range = 0..OWN + 100;
    let sums = cpu.allocate::<f32>(&mut stream, range.len())?;
    for step in KEY.step..KEY.step + 2 {
        let key = Key { step, ..KEY };
        match what {
            ArrivalKind::Sums => {
                let (nodes, uses) = ([(Node::leaf(0), &sums)], std::slice::from_ref(&range));
                end.post().sums(cpu, &mut stream, key, &nodes, uses)?;
                let nodes = end.schedule().sums(0)?.len();
                let mut out = cpu.allocate(&mut stream, nodes * OWN)?;
                end.reduce_scatter(cpu, &mut stream, key, &cut, SliceMut::all(&mut out))?;
            }
            ArrivalKind::Update => {
                let values = Slice::new(&sums, 0, OWN)?;
                end.updated(cpu, &mut stream, key, &cut, Values::Fp32(values))?;
                let mut out = cpu.allocate(&mut stream, range.len())?;
                let out = ValuesMut::Fp32(SliceMut::all(&mut out));
                end.gather(cpu, &mut stream, key, &cut, out)?;
            }
        }
    }
    Ok(())
}

/// The error of rank 0 if rank 1 sends `chunks`, and nothing else comes; each is on a host of its own.
fn said(what: ArrivalKind, chunks: Vec<Chunk>) -> String {
    said_on(&Topology::of_groups(processes()).unwrap(), what, chunks)
}

/// Three ranks, each a process.
fn processes() -> Vec<Range<usize>> {
    (0..3).map(|rank| rank..rank + 1).collect()
}

/// The same on the hosts of `topology`.
fn said_on(topology: &Topology, what: ArrivalKind, chunks: Vec<Chunk>) -> String {
    let topology = topology.clone();
    let cpu = Cpu::new(NonZeroUsize::MIN).unwrap();
    let schedule = Arc::new(LaneSchedule::one_by_one(4, 3).unwrap());
    let (answer, answered) = mpsc::channel();
    std::thread::spawn(move || {
        let config = Config {
            communication: CommunicationConfig::ProcessBinary(3),
            worker: WorkerConfig::default(),
        };
        let workers = timely::execute(config, move |worker| {
            let mut until = InputHandle::<u64, CapacityContainerBuilder<Vec<()>>>::new();
            let mut end = (worker.index() == 0).then(|| {
                Host::group(&[&cpu], &topology, 0, &schedule, Holders::EACH).unwrap().remove(0)
            });
            let (outgoing, others) =
                courier(if topology.has_relays() { 2 } else { 1 }, |_arrived| ());
            let carried = end.as_mut().map_or(Some(others), |end| end.courier()).unwrap();
            worker.dataflow::<u64, _, _>(|scope| {
                until.to_stream(scope).carry(carried, 1 << 20);
            });
            if worker.index() == 1 {
                assert!(outgoing[0].send(chunks.clone()));
            }
            if let Some(end) = end {
                let (cpu, answer, waker) = (cpu.clone(), answer.clone(), std::thread::current());
                let thread = std::thread::spawn(move || {
                    answer.send(exchange(end, &cpu, what)).unwrap();
                    waker.unpark();
                });
                while !thread.is_finished() {
                    worker.step_or_park(Some(Duration::from_millis(100)));
                }
                thread.join().unwrap();
            }
            drop(until);
            while worker.step_or_park(None) {}
        });
        workers.unwrap().join().into_iter().for_each(|worker| worker.unwrap());
    });
    let answered = answered.recv_timeout(SOON).expect("an answer, and no waiting");
    answered.expect_err("what came is wrong").to_string()
}

/// Piece `piece` of `source`'s values, of so many elements.
fn chunk(what: ArrivalKind, source: u32, piece: u32, elements: usize) -> Chunk {
    let (part, node) = match what {
        ArrivalKind::Sums => {
            let part = Part::Gradient { bucket: KEY.bucket, use_index: 0, owner: 0 };
            (part, Node::leaf(source))
        }
        ArrivalKind::Update => (part_of_update(KEY, source as usize), Node { lo: 0, hi: 4 }),
    };
    let (destination, step) = (0, KEY.step);
    let header = ChunkHeader { destination, source, part, chunk: piece, node, step };
    Chunk::new(header, vec![0.0; elements])
}

/// The same with another header.
fn with(chunk: &Chunk, change: impl FnOnce(&mut ChunkHeader)) -> Chunk {
    let mut header = *chunk.header().unwrap();
    change(&mut header);
    Chunk::new(header, chunk.values().unwrap().into_owned())
}

fn posted(rank: u32, what: &str, wrong: &str) -> String {
    format!("rank {rank} posted {what} of bucket 3 at step 8 {wrong}")
}

#[test]
fn a_chunk_that_is_damaged_or_not_for_this_rank_is_named() {
    let damaged = || Chunk::from_bytes(BytesMut::from(vec![1; 64]).freeze());
    for what in [ArrivalKind::Sums, ArrivalKind::Update] {
        let no_chunk = "a message is no chunk: its first bytes are not those of a chunk";
        assert_eq!(said(what, vec![damaged()]), no_chunk);
        let good = chunk(what, 2, 0, 100);
        let misrouted = with(&good, |header| header.destination = 3);
        assert_eq!(said(what, vec![misrouted]), "a chunk for worker 3 arrived at worker 0");
        let state = Part::State(crate::chunk::StatePart::State(0));
        let state = with(&good, |header| header.part = state);
        let neither =
            "a message is no chunk: it is neither sums of these lanes nor what was updated";
        assert_eq!(said(what, vec![state]), neither);
    }
    let no_lanes = with(&chunk(ArrivalKind::Sums, 1, 0, 8), |header| header.node = Node::leaf(4));
    assert!(said(ArrivalKind::Sums, vec![no_lanes]).contains("neither sums of these lanes"));
}

#[test]
fn a_chunk_of_another_length_is_named() {
    for (what, in_words, source, whole) in [
        (ArrivalKind::Sums, "the sums", 1, CHUNK_ELEMENTS),
        (ArrivalKind::Update, "the update", 2, 100),
    ] {
        let expected = posted(source, in_words, "of another length");
        for (piece, elements) in [(0, whole - 1), (0, 0), (0, whole + 1), (2, whole), (9, 8)] {
            let chunks = vec![chunk(what, source, piece, elements)];
            assert_eq!(said(what, chunks), expected, "piece {piece} of {elements}");
        }
    }
}

/// Also once all of it has come: then the next that waits hears of it.
#[test]
fn a_chunk_that_comes_twice_is_named() {
    let piece = |piece, elements| chunk(ArrivalKind::Sums, 1, piece, elements);
    let (first, second) = (piece(0, CHUNK_ELEMENTS), piece(1, 8));
    let found = said(ArrivalKind::Sums, vec![first.clone(), first.clone()]);
    assert_eq!(found, posted(1, "the sums", "twice"));
    let of_others =
        [chunk(ArrivalKind::Sums, 2, 0, CHUNK_ELEMENTS), chunk(ArrivalKind::Sums, 2, 1, 8)];
    let mut chunks = vec![first.clone(), second];
    chunks.extend(of_others);
    chunks.push(first);
    assert_eq!(said(ArrivalKind::Sums, chunks), posted(1, "the sums", "after all of it had come"));
    let update = chunk(ArrivalKind::Update, 2, 0, 100);
    let found = said(ArrivalKind::Update, vec![update.clone(), update]);
    assert_eq!(found, posted(2, "the update", "after all of it had come"));
}

#[test]
fn a_chunk_of_a_rank_that_has_nothing_to_send_is_named() {
    let wrong = "that this worker has not to get from it";
    let update = chunk(ArrivalKind::Update, 1, 0, 8);
    assert_eq!(said(ArrivalKind::Update, vec![update]), posted(1, "the update", wrong));
    let none = chunk(ArrivalKind::Sums, 3, 0, CHUNK_ELEMENTS);
    let none = with(&none, |header| header.node = Node::leaf(2));
    assert_eq!(said(ArrivalKind::Sums, vec![none]), posted(3, "the sums", wrong));
    let other_lanes = chunk(ArrivalKind::Sums, 1, 0, CHUNK_ELEMENTS);
    let other_lanes = with(&other_lanes, |header| header.node = Node::leaf(2));
    assert_eq!(said(ArrivalKind::Sums, vec![other_lanes]), posted(1, "the sums", wrong));
    let other_use = chunk(ArrivalKind::Sums, 1, 0, CHUNK_ELEMENTS);
    let part = Part::Gradient { bucket: KEY.bucket, use_index: 1, owner: 0 };
    let other_use = with(&other_use, |header| header.part = part);
    assert_eq!(said(ArrivalKind::Sums, vec![other_use]), posted(1, "the sums", wrong));
}

/// Rank 0 and rank 1 are of one host: rank 0 sums for rank 2, which is of another, and passes on that rank's updates.
#[test]
fn a_chunk_that_a_relay_has_not_to_get_is_named() {
    let topology = Topology::new(processes(), vec![0..2, 2..3]).unwrap();
    let said = |what, chunks| said_on(&topology, what, chunks);
    let for_owner = |owner, source, elements| {
        let part = Part::Gradient { bucket: KEY.bucket, use_index: 0, owner };
        with(&chunk(ArrivalKind::Sums, source, 0, elements), |header| header.part = part)
    };
    let (sums, update) = ("the sums", "the update");
    let good = for_owner(2, 1, 100);
    let found = said(ArrivalKind::Sums, vec![good.clone(), good.clone()]);
    assert_eq!(found, posted(1, sums, "twice"));
    for elements in [0, 99, 101] {
        let found = said(ArrivalKind::Sums, vec![for_owner(2, 1, elements)]);
        assert_eq!(found, posted(1, sums, "of another length"), "{elements} elements");
    }
    let foreign = "that this worker has not to get from it";
    for (owner, source) in [(1, 1), (2, 2), (3, 1)] {
        let found = said(ArrivalKind::Sums, vec![for_owner(owner, source, 100)]);
        assert_eq!(found, posted(source, sums, foreign), "of rank {source} for rank {owner}");
    }
    let mut all: Vec<_> = [1, 2]
        .into_iter()
        .flat_map(|source| {
            [(0, CHUNK_ELEMENTS), (1, 8)]
                .map(|(piece, of)| chunk(ArrivalKind::Sums, source, piece, of))
        })
        .collect();
    all.extend([good.clone(), good]);
    assert_eq!(said(ArrivalKind::Sums, all), posted(1, sums, "after all of it had come"));
    // The updates of rank 2 come from rank 2 alone.
    let passed_on = with(&chunk(ArrivalKind::Update, 2, 0, 100), |header| header.source = 1);
    assert_eq!(said(ArrivalKind::Update, vec![passed_on]), posted(1, update, foreign));
    let whole = chunk(ArrivalKind::Update, 2, 0, 100);
    let found = said(ArrivalKind::Update, vec![whole.clone(), whole]);
    assert_eq!(found, posted(2, update, "after all of it had come"));
}
