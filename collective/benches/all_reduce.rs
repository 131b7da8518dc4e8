//! `all_reduce` bandwidth of the chunk exchange: how fast gradients become the same sums everywhere.
//!
//! ```text
//! cargo bench -p tidemill-collective --bench all_reduce -- [--megabytes 256] [--window-kib 1024] [--rounds 7]
//! ```
//!
//! Every worker holds S bytes; they are summed at their owners and sent back to all. The number is S over
//! the time of a round: the median, the first round (cold memory) left out. Over threads chunks move as
//! pointers; over processes they cross TCP loopback. The peer's number is OpenMPI over TCP, 1.15-1.4 GB/s.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tidemill_collective::{
    CHUNK_ELEMENTS, Chunk, ChunkHeader, ChunkPlan, Credit, CreditLedger, Node, Pace, Part, Tree,
    TreeReducer, by_destination,
};
use timely::container::CapacityContainerBuilder;
use timely::dataflow::operators::generic::OutputBuilder;
use timely::dataflow::operators::generic::builder_rc::OperatorBuilder;
use timely::dataflow::operators::{ConnectLoop, Feedback, Input, Probe};
use timely::dataflow::{InputHandle, ProbeHandle, Stream, StreamVec};
use timely::worker::Worker;

#[derive(Clone, Copy)]
struct Settings {
    elements: usize,
    window_bytes: usize,
    rounds: usize,
}

/// A stage that consumes chunks, gives credit back, and may send others.
fn consume<'scope>(
    chunks: Stream<'scope, u64, Chunk>,
    window_bytes: usize,
    mut stage: impl FnMut(Chunk) -> Vec<Chunk> + 'static,
) -> Stream<'scope, u64, Chunk> {
    let scope = chunks.scope();
    let (credit_loop, credits) = scope.feedback::<Vec<Credit>>(1);
    let mut builder = OperatorBuilder::new("Consume".to_owned(), scope);
    let (output, sent) = builder.new_output::<Chunk>();
    let (credits_output, consumed) = builder.new_output::<Vec<Credit>>();
    let mut output = OutputBuilder::<_, CapacityContainerBuilder<Chunk>>::from(output);
    let mut credits_output =
        OutputBuilder::<_, CapacityContainerBuilder<Vec<Credit>>>::from(credits_output);
    let paced = chunks.pace(credits, window_bytes);
    let mut input = builder.new_input(paced, by_destination());
    builder.build(move |capabilities| {
        drop(capabilities);
        move |_frontiers| {
            let (mut output, mut credits_output) = (output.activate(), credits_output.activate());
            input.for_each(|time, chunk| {
                let chunk = std::mem::take(chunk);
                let mut ledger = CreditLedger::default();
                ledger.consumed(chunk.header().unwrap().source, chunk.payload_bytes());
                for mut chunk in stage(chunk) {
                    output.session(&time).give_container(&mut chunk);
                }
                credits_output.session(&time).give_iterator(ledger.settle());
            });
        }
    });
    let consumed: StreamVec<'scope, u64, Credit> = consumed;
    consumed.connect_loop(credit_loop);
    sent
}

/// Seconds of each round.
fn run(worker: &mut Worker, settings: Settings) -> Vec<f64> {
    let (index, workers) = (worker.index(), worker.peers());
    let plan = Arc::new(ChunkPlan::new(std::iter::once(0..settings.elements)));
    let (owners, tree) = (plan.owners(workers), Tree::new(workers).expect("a power of two"));
    let received = Rc::new(Cell::new(0));
    let result = Rc::new(RefCell::new(vec![0.0_f32; settings.elements]));
    let (counted, written) = (Rc::clone(&received), Rc::clone(&result));
    let (mut input, probe) = (InputHandle::new(), ProbeHandle::new());
    worker.dataflow::<u64, _, _>(|scope| {
        let chunks = scope.input_from::<CapacityContainerBuilder<Chunk>>(&mut input);
        let mut sums = BTreeMap::new();
        let sums = consume(chunks, settings.window_bytes, move |chunk| {
            let header = *chunk.header().unwrap();
            let reducer = sums
                .entry(header.chunk)
                .or_insert_with(|| TreeReducer::new(tree, chunk.payload_bytes() / 4));
            let Some(sum) = reducer.insert(chunk).unwrap() else { return Vec::new() };
            sums.remove(&header.chunk);
            let sum = Arc::new(sum);
            let copy = |destination: usize| {
                let (destination, source) = (destination as u32, index as u32);
                Chunk::shared(ChunkHeader { destination, source, ..header }, Arc::clone(&sum))
            };
            (0..workers).map(copy).collect()
        });
        consume(sums, settings.window_bytes, move |chunk| {
            let range = plan.chunks()[chunk.header().unwrap().chunk as usize].range.clone();
            written.borrow_mut()[range].copy_from_slice(&chunk.values().unwrap());
            counted.set(counted.get() + 1);
            Vec::new()
        })
        .probe_with(&probe);
    });
    let count = settings.elements.div_ceil(CHUNK_ELEMENTS);
    let mut seconds = Vec::new();
    for round in 0..settings.rounds {
        let chunks: Vec<Chunk> = (0..count)
            .map(|chunk| {
                let elements = CHUNK_ELEMENTS.min(settings.elements - chunk * CHUNK_ELEMENTS);
                let header = ChunkHeader {
                    destination: owners[chunk] as u32,
                    source: index as u32,
                    part: Part::Gradient { use_index: 0 },
                    chunk: chunk as u32,
                    node: Node::leaf(index as u32),
                    step: 2 * round as u64 + 1,
                };
                Chunk::new(header, vec![(index + round) as f32; elements])
            })
            .collect();
        // Nobody starts before everybody has its chunks.
        input.advance_to(2 * round as u64 + 1);
        while probe.less_than(input.time()) {
            worker.step_or_park(Some(Duration::from_millis(1)));
        }
        let start = Instant::now();
        for mut chunk in chunks {
            input.send_batch(&mut chunk);
            worker.step();
        }
        input.advance_to(2 * round as u64 + 2);
        while received.get() < count * (round + 1) {
            worker.step_or_park(Some(Duration::from_millis(10)));
        }
        seconds.push(start.elapsed().as_secs_f64());
        let expected = (0..workers).map(|worker| (worker + round) as f32).sum::<f32>();
        assert!(result.borrow().iter().all(|&value| value == expected), "a wrong sum");
    }
    seconds
}

fn report(name: &str, settings: Settings, mut seconds: Vec<f64>) {
    let warm = &mut seconds[1..];
    warm.sort_by(f64::total_cmp);
    let bytes = 4.0 * settings.elements as f64;
    let (median, best) = (warm[warm.len() / 2], warm[0]);
    println!(
        "{name}: {:.0} MB, window {} KiB: median {:.2} GB/s, best {:.2} GB/s",
        bytes / 1e6,
        settings.window_bytes >> 10,
        bytes / median / 1e9,
        bytes / best / 1e9,
    );
}

fn execute(configuration: timely::CommunicationConfig, settings: Settings) -> Option<Vec<f64>> {
    let configuration =
        timely::Config { communication: configuration, worker: timely::WorkerConfig::default() };
    let guards = timely::execute(configuration, move |worker| run(worker, settings)).unwrap();
    guards.join().into_iter().next().map(Result::unwrap)
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let value = |name: &str, default: usize| {
        let at = arguments.iter().position(|argument| argument == name);
        at.map_or(default, |at| arguments[at + 1].parse().expect("a number"))
    };
    let settings = Settings {
        elements: value("--megabytes", 256) * 1_000_000 / 4,
        window_bytes: value("--window-kib", 1_024) << 10,
        rounds: value("--rounds", 7).max(2),
    };
    let port = value("--port", 23_470);
    let cluster = |process| timely::CommunicationConfig::Cluster {
        threads: 1,
        process,
        addresses: (0..2).map(|index| format!("127.0.0.1:{}", port + index)).collect(),
        report: false,
        zerocopy: false,
    };
    if value("--process", 0) == 1 {
        execute(cluster(1), settings);
        return;
    }
    for threads in [1, 2] {
        let seconds = execute(timely::CommunicationConfig::Process(threads), settings);
        report(&format!("{threads} threads"), settings, seconds.unwrap());
    }
    let mut other = std::process::Command::new(std::env::current_exe().unwrap())
        .args(arguments.iter().filter(|argument| *argument != "--bench"))
        .args(["--process", "1"])
        .spawn()
        .expect("the other process starts");
    let seconds = execute(cluster(0), settings);
    other.wait().expect("the other process ends");
    report("2 processes over TCP loopback", settings, seconds.unwrap());
}
