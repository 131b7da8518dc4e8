//! The exchange that is measured: every worker's chunks are summed at their owners and sent back to all.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tidemill_collective::{
    BUCKET_ELEMENTS, BucketPlan, CHUNK_ELEMENTS, Chunk, ChunkHeader, ChunkPlan, Credit,
    CreditLedger, Node, Pace, Part, SegmentUses, Tree, TreeReducer, by_destination,
};
use timely::container::CapacityContainerBuilder;
use timely::dataflow::operators::generic::OutputBuilder;
use timely::dataflow::operators::generic::builder_rc::OperatorBuilder;
use timely::dataflow::operators::{ConnectLoop, Feedback, Input, Probe};
use timely::dataflow::{InputHandle, ProbeHandle, Stream, StreamVec};
use timely::worker::Worker;

/// What is exchanged.
#[derive(Clone, Copy)]
pub struct Settings {
    pub elements: usize,
    pub window_bytes: usize,
    pub rounds: usize,
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
pub fn run(worker: &mut Worker, settings: Settings) -> Vec<f64> {
    let (index, workers) = (worker.index(), worker.peers());
    let plan = Arc::new(ChunkPlan::new(std::iter::once(0..settings.elements)));
    let whole = [SegmentUses { range: 0..settings.elements, uses: vec![(0, 0)] }];
    let owners = BucketPlan::new(&plan, &whole, BUCKET_ELEMENTS).chunk_owners(&plan, workers);
    let tree = Tree::new(workers).expect("a power of two");
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

/// Prints the median and the best of the rounds but the first.
pub fn report(name: &str, settings: Settings, mut seconds: Vec<f64>) {
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

impl Settings {
    /// Those of the command line.
    pub fn from_arguments() -> Self {
        Self {
            elements: value("--megabytes", 256) * 1_000_000 / 4,
            window_bytes: value("--window-kib", 1_024) << 10,
            rounds: value("--rounds", 7).max(2),
        }
    }
}

/// A number of the command line.
pub fn value(name: &str, default: usize) -> usize {
    let mut arguments = std::env::args().skip_while(|argument| argument != name);
    arguments.nth(1).map_or(default, |value| value.parse().expect("a number"))
}

/// This program as process 1, with the same arguments.
pub fn other_process() -> std::process::Command {
    let mut command = std::process::Command::new(std::env::current_exe().expect("a program"));
    command.args(std::env::args().skip(1).filter(|argument| argument != "--bench"));
    command.args(["--process", "1"]);
    command
}
