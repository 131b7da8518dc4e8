//! The measured exchange: every worker's buckets are summed at their owners, and the sums are gathered by all.

use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tidemill_collective::communicator::{
    Communicator, CommunicatorError, Cut, Holders, Host, Key, Threads, Topology, Values, ValuesMut,
};
use tidemill_collective::{BUCKET_ELEMENTS, CHUNK_ELEMENTS, Carry, LaneSchedule, Node};
use tidemill_kernels::{Cpu, Runtime, Slice, SliceMut};
use timely::container::CapacityContainerBuilder;
use timely::dataflow::InputHandle;
use timely::worker::Worker;

/// The size and number of exchanges.
#[derive(Clone, Copy)]
pub struct Settings {
    pub elements: usize,
    pub window_bytes: usize,
    pub rounds: usize,
}

/// The communicators of the workers of a process.
pub struct Ends(Mutex<Vec<Option<Box<dyn Communicator<Cpu>>>>>);

impl Ends {
    /// For process `process` of `processes`, which have `threads` workers each.
    pub fn new(threads: usize, process: usize, processes: usize) -> Self {
        let cpu = cpu();
        let (cpus, workers) = (vec![&cpu; threads], threads * processes);
        let schedule = Arc::new(LaneSchedule::at_once(workers, workers).unwrap());
        let boxed: Vec<Option<Box<dyn Communicator<Cpu>>>> = if processes == 1 {
            let ends = Threads::group(&cpus, &schedule).unwrap();
            ends.into_iter().map(|end| Some(Box::new(end) as Box<_>)).collect()
        } else {
            let groups: Vec<_> =
                (0..processes).map(|group| group * threads..(group + 1) * threads).collect();
            let topology = Topology::of_groups(groups).unwrap();
            let ends = Host::group(&cpus, &topology, process, &schedule, Holders::EACH).unwrap();
            ends.into_iter().map(|end| Some(Box::new(end) as Box<_>)).collect()
        };
        Self(Mutex::new(boxed))
    }
}

fn cpu() -> Cpu {
    Cpu::new(NonZeroUsize::MIN).unwrap()
}

/// Seconds of each round.
pub fn run(worker: &mut Worker, ends: &Ends, settings: Settings) -> Vec<f64> {
    let local = worker.index() % ends.0.lock().unwrap().len();
    let mut end = ends.0.lock().unwrap()[local].take().expect("each is taken once");
    let mut until = InputHandle::<u64, CapacityContainerBuilder<Vec<()>>>::new();
    if let Some(courier) = end.courier() {
        worker.dataflow::<u64, _, _>(|scope| {
            until.to_stream(scope).carry(courier, settings.window_bytes);
        });
    }
    let waker = std::thread::current();
    let thread = std::thread::spawn(move || {
        let seconds = (0..settings.rounds)
            .scan(Rank::new(end, settings.elements), |rank, round| Some(rank.round(round)))
            .collect::<Result<Vec<_>, _>>();
        waker.unpark();
        seconds.unwrap()
    });
    while !thread.is_finished() {
        worker.step_or_park(Some(Duration::from_millis(10)));
    }
    drop(until);
    while worker.step_or_park(Some(Duration::from_millis(10))) {}
    thread.join().unwrap()
}

/// The state of one rank: its communicator and its buffers.
struct Rank {
    end: Box<dyn Communicator<Cpu>>,
    cpu: Cpu,
    stream: <Cpu as Runtime>::DeviceStream,
    /// The stream of the posting thread.
    posts: <Cpu as Runtime>::DeviceStream,
    /// The terms to sum.
    arena: <Cpu as Runtime>::Buffer<f32>,
    /// The own sums, then the gathered ones.
    owned: <Cpu as Runtime>::Buffer<f32>,
}

impl Rank {
    fn new(end: Box<dyn Communicator<Cpu>>, elements: usize) -> Self {
        let cpu = cpu();
        let mut stream = cpu.device_stream().unwrap();
        let posts = cpu.device_stream().unwrap();
        let arena = cpu.allocate(&mut stream, elements).unwrap();
        let owned = cpu.allocate(&mut stream, elements).unwrap();
        Self { end, cpu, stream, posts, arena, owned }
    }

    /// The buckets: their places, and the owners of their parts.
    fn buckets(&self) -> Vec<(std::ops::Range<usize>, Cut)> {
        let elements = self.arena.len();
        let bucket = |(index, start): (usize, usize)| {
            let end = elements.min(start + BUCKET_ELEMENTS);
            (start..end, Cut::new(end - start, self.end.ranks(), CHUNK_ELEMENTS, index))
        };
        (0..elements).step_by(BUCKET_ELEMENTS).enumerate().map(bucket).collect()
    }

    fn round(&mut self, round: usize) -> Result<f64, CommunicatorError> {
        let buckets = self.buckets();
        let (rank, ranks, step) = (self.end.rank(), self.end.ranks(), round as u64);
        self.arena.fill((rank + round) as f32);
        let Self { end, cpu, stream, posts, arena, owned } = self;
        let start = Instant::now();
        let (post, node) = (end.post(), Node::leaf(rank as u32));
        // As in training, another thread computes and posts the terms.
        std::thread::scope(|scope| {
            let (sums, cpu_there, buckets) = (&*arena, &*cpu, &buckets);
            let posting = scope.spawn(move || {
                for (index, (range, _)) in buckets.iter().enumerate() {
                    let (key, uses) = (Key::new(step, index as u32), std::slice::from_ref(range));
                    post.sums(cpu_there, posts, key, &[(node, sums)], uses)?;
                }
                Ok::<(), CommunicatorError>(())
            });
            for (index, (range, cut)) in buckets.iter().enumerate() {
                let own = cut.of_rank(rank);
                let out = SliceMut::new(owned, range.start + own.start, own.len())?;
                end.reduce_scatter(cpu, stream, Key::new(step, index as u32), cut, out)?;
            }
            posting.join().expect("the thread does not panic")
        })?;
        // Owners update their parts in the buffer that gathers.
        for (index, (range, cut)) in buckets.iter().enumerate() {
            let own = cut.of_rank(rank);
            let values = Slice::new(owned, range.start + own.start, own.len())?;
            end.updated(cpu, stream, Key::new(step, index as u32), cut, Values::Fp32(values))?;
        }
        for (index, (range, cut)) in buckets.iter().enumerate() {
            let out = SliceMut::new(owned, range.start, range.len())?;
            end.gather(cpu, stream, Key::new(step, index as u32), cut, ValuesMut::Fp32(out))?;
        }
        drop(end.take_cost());
        let seconds = start.elapsed().as_secs_f64();
        let expected = (0..ranks).map(|rank| (rank + round) as f32).sum::<f32>();
        assert!(self.owned.iter().all(|&value| value == expected), "a wrong sum");
        Ok(seconds)
    }
}

/// Prints the median and the best of all rounds after the first.
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
    /// From the command line.
    pub fn from_arguments() -> Self {
        Self {
            elements: value("--megabytes", 256) * 1_000_000 / 4,
            window_bytes: value("--window-kib", 1_024) << 10,
            rounds: value("--rounds", 7).max(2),
        }
    }
}

/// A number from the command line.
pub fn value(name: &str, default: usize) -> usize {
    let mut arguments = std::env::args().skip_while(|argument| argument != name);
    arguments.nth(1).map_or(default, |value| value.parse().expect("a number"))
}

/// A command that runs this program as process 1, with the same arguments.
pub fn other_process() -> std::process::Command {
    let mut command = std::process::Command::new(std::env::current_exe().expect("a program"));
    command.args(std::env::args().skip(1).filter(|argument| argument != "--bench"));
    command.args(["--process", "1"]);
    command
}
