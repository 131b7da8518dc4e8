//! What the GPUs of one process take from each other, by the size of a bucket: sums along the tree, and copies of what was
//! updated.
//!
//! Each rank is a thread with a device, and owns its share of every bucket of one gibibyte. Printed is what a rank receives a
//! second; the floor is the link. Needs two GPUs; without them nothing is measured, which is said.

use std::ops::{ControlFlow, Range};
use std::process::ExitCode;
use std::sync::Barrier;
use std::time::Instant;

use tidemill_collective::communicator::{CommunicatorError, Cut, OwnPart, Part, Threads, Update};
use tidemill_collective::{Node, Tree};
use tidemill_kernels::{Cuda, Fp32, Gpu, Runtime, Shared, SliceMut};

type Device = Gpu<Cuda, Fp32>;
type Ranks = Threads<Device, f32>;

/// Bytes of what is summed and gathered on every device.
const ARENA_BYTES: usize = 1 << 30;
const ELEMENTS: usize = ARENA_BYTES / size_of::<f32>();
/// How often the whole of it is.
const ROUNDS: u64 = 16;
/// Elements that a cut is a multiple of.
const GRANULE: usize = 65_536;

fn main() -> ExitCode {
    let devices = match open() {
        ControlFlow::Continue(devices) => devices,
        ControlFlow::Break(reason) => {
            println!("NOT RUN: {reason}");
            return ExitCode::SUCCESS;
        }
    };
    println!("GPUs  bucket MiB  summed GB/s  gathered GB/s");
    for ranks in 2..=devices.len() {
        for bucket_mib in [1, 4, 16, 32, 64, 256, 1024] {
            match measure(&devices[..ranks], (bucket_mib << 20) / size_of::<f32>()) {
                Ok([summed, gathered]) => {
                    println!("{ranks:4}  {bucket_mib:10}  {summed:11.0}  {gathered:13.0}");
                }
                Err(error) => {
                    eprintln!("{error}");
                    return ExitCode::FAILURE;
                }
            }
        }
    }
    ExitCode::SUCCESS
}

fn open() -> ControlFlow<String, Vec<Device>> {
    let said = |error| ControlFlow::Break(format!("{error}"));
    let devices = match Cuda::device_count() {
        Ok(devices) if devices > 1 => devices,
        Ok(_) => return ControlFlow::Break("there is one GPU".to_owned()),
        Err(error) => return said(error),
    };
    let devices: Result<Vec<_>, _> = (0..devices).map(|n| Cuda::open(n).map(Gpu::new)).collect();
    devices.map_or_else(said, ControlFlow::Continue)
}

/// Gigabytes that a rank receives a second, of sums and of what is gathered.
fn measure(devices: &[Device], bucket: usize) -> Result<[f64; 2], CommunicatorError> {
    let ranks = devices.len();
    let backends: Vec<_> = devices.iter().collect();
    let lanes = ranks.next_power_of_two();
    let ends = Ranks::group(&backends, Tree::new(lanes)?)?;
    let together = Barrier::new(ranks);
    let rates = std::thread::scope(|scope| {
        let run = |(device, ends)| {
            let together = &together;
            scope.spawn(move || Rank::new(device, ends, bucket, lanes)?.measure(together))
        };
        let running: Vec<_> = devices.iter().zip(ends).map(run).collect();
        let ended = running.into_iter().map(|rank| rank.join().expect("a thread of the bench"));
        ended.collect::<Result<Vec<_>, CommunicatorError>>()
    })?;
    let received = ROUNDS as f64 * ARENA_BYTES as f64 * (ranks - 1) as f64 / ranks as f64 / 1e9;
    let slowest = |of: usize| rates.iter().map(|seconds| seconds[of]).fold(0.0, f64::max);
    Ok([received / slowest(0), received / slowest(1)])
}

fn share(buffer: &<Device as Runtime>::Buffer<f32>) -> Shared<Device, f32> {
    Device::share(buffer).expect("a device with a memory of its own")
}

struct Rank<'a> {
    device: &'a Device,
    ends: Ranks,
    /// Where the sums would have been computed, and are final long before their turn comes: so it is in training, but for the
    /// last buckets of a step.
    compute: <Device as Runtime>::DeviceStream,
    /// Buckets take turns: while one of them ends or begins, the other keeps the link busy.
    streams: [<Device as Runtime>::DeviceStream; 2],
    arena: <Device as Runtime>::Buffer<f32>,
    owned: <Device as Runtime>::Buffer<f32>,
    cuts: Vec<(usize, Cut)>,
    nodes: Vec<Node>,
}

impl<'a> Rank<'a> {
    fn new(
        device: &'a Device,
        ends: Ranks,
        bucket: usize,
        lanes: usize,
    ) -> Result<Self, CommunicatorError> {
        let mut compute = device.device_stream()?;
        let streams = [device.device_stream()?, device.device_stream()?];
        let arena = device.allocate(&mut compute, ELEMENTS)?;
        let cut = tidemill_collective::lane_cut(lanes, ends.ranks())?[ends.rank()].clone();
        let nodes = Tree::new(lanes)?.cover(&cut);
        let starts = (0..ELEMENTS).step_by(bucket).enumerate();
        let granule = GRANULE.min(bucket / ends.ranks());
        let cuts = starts.map(|(first, start)| {
            let elements = bucket.min(ELEMENTS - start);
            (start, Cut::new(elements, ends.ranks(), granule, first))
        });
        let cuts: Vec<_> = cuts.collect();
        let owned = cuts.iter().map(|(_, cut)| cut.of_rank(ends.rank()).len()).sum();
        let owned = device.allocate(&mut compute, owned)?;
        Ok(Self { device, ends, compute, streams, arena, owned, cuts, nodes })
    }

    /// Seconds of all rounds, of sums and of what is gathered.
    fn measure(mut self, together: &Barrier) -> Result<[f64; 2], CommunicatorError> {
        // Kernels are compiled, and links awake. A rank that fails goes on to the barrier, where the others wait.
        let warm = self.sum(0).and_then(|()| self.gather(0)).and_then(|()| self.finish());
        together.wait();
        let summed = warm.and_then(|()| self.time(Self::sum));
        together.wait();
        Ok([summed?, self.time(Self::gather)?])
    }

    fn time(
        &mut self,
        work: impl Fn(&mut Self, u64) -> Result<(), CommunicatorError>,
    ) -> Result<f64, CommunicatorError> {
        let since = Instant::now();
        (1..=ROUNDS).try_for_each(|round| work(self, round))?;
        self.finish()?;
        Ok(since.elapsed().as_secs_f64())
    }

    /// Waits for all that was enqueued.
    fn finish(&mut self) -> Result<(), CommunicatorError> {
        for stream in &mut self.streams {
            self.device.wait(&self.device.record(stream)?)?;
        }
        Ok(())
    }

    fn sum(&mut self, round: u64) -> Result<(), CommunicatorError> {
        let Self { device, ends, compute, streams, arena, owned, cuts, nodes } = self;
        let ready = device.record(compute)?;
        let sums = share(arena);
        let part = |&node: &Node| Part { node, sums: sums.clone() };
        let parts: Vec<_> = nodes.iter().map(part).collect();
        let mut at = 0;
        for bucket in 0..cuts.len() {
            ends.post().sums(round, bucket as u32, &parts, &ready)?;
        }
        for (bucket, (start, cut)) in cuts.iter().enumerate() {
            let Range { start: first, end } = cut.of_rank(ends.rank());
            let out = SliceMut::new(owned, at, end - first)?;
            let stream = &mut streams[bucket % 2];
            let range = start + first..start + end;
            ends.reduce_scatter(device, stream, (round, bucket as u32), &[range], out)?;
            at += end - first;
        }
        Ok(())
    }

    fn gather(&mut self, round: u64) -> Result<(), CommunicatorError> {
        let Self { device, ends, compute, streams, arena, owned, cuts, .. } = self;
        let ready = device.record(compute)?;
        let values = share(owned);
        let mut at = 0;
        for (bucket, (_, cut)) in cuts.iter().enumerate() {
            let update = Update { values: values.clone(), start: at };
            ends.post().updated(round, bucket as u32, &update, &ready)?;
            at += cut.of_rank(ends.rank()).len();
        }
        for (bucket, (start, cut)) in cuts.iter().enumerate() {
            let (key, own) = ((round, bucket as u32), OwnPart::IsThere);
            let stream = &mut streams[bucket % 2];
            let out = SliceMut::new(arena, *start, cut.of_rank(cut.ranks() - 1).end)?;
            ends.gather(device, stream, key, cut, out, own)?;
        }
        Ok(())
    }
}
