//! What two GPUs take from each other while each sums its half along the tree.
//!
//! Each device owns half of every bucket: it adds its own half and that of its peer, which it reads over the link, both at
//! the same time. The floor is the link. Gigabytes received a second, by the size of a bucket.

use std::process::ExitCode;
use std::sync::Barrier;
use std::time::Instant;

use tidemill_kernels::backend::TreeTerm;
use tidemill_kernels::{Backend, Cuda, Fp32, Gpu, PeerAccess, Result, Runtime, Slice, SliceMut};

type Device = Gpu<Cuda, Fp32>;

/// Bytes that each device receives in a measurement.
const RECEIVED_BYTES: usize = 8 << 30;
/// Bytes of what is summed on each device, both halves.
const ARENA_BYTES: usize = 1 << 30;

fn main() -> ExitCode {
    match Cuda::device_count() {
        Ok(devices) if devices > 1 => {}
        Ok(_) => {
            println!("NOT RUN: there is one GPU");
            return ExitCode::SUCCESS;
        }
        Err(error) => {
            println!("NOT RUN: {error}");
            return ExitCode::SUCCESS;
        }
    }
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    let devices = [Device::new(Cuda::open(0)?), Device::new(Cuda::open(1)?)];
    for [own, peer] in [[0, 1], [1, 0]] {
        if devices[own].reach(&devices[peer])? == PeerAccess::Absent {
            println!("NOT RUN: GPU {own} cannot read the memory of GPU {peer}");
            return Ok(());
        }
    }
    let elements = ARENA_BYTES / size_of::<f32>();
    let mut streams = [devices[0].device_stream()?, devices[1].device_stream()?];
    let [first, second] = &mut streams;
    let arenas = [
        devices[0].allocate::<f32>(first, elements)?,
        devices[1].allocate::<f32>(second, elements)?,
    ];
    let mut sums = [
        devices[0].allocate::<f32>(first, elements / 2)?,
        devices[1].allocate::<f32>(second, elements / 2)?,
    ];
    println!("bucket MiB   GB/s received by each");
    for bucket_mib in [1, 4, 16, 64, 256, 1024] {
        let bucket = (bucket_mib << 20) / size_of::<f32>();
        let seconds = measure(&devices, &mut streams, &arenas, &mut sums, bucket)?;
        let rates = seconds.map(|seconds| RECEIVED_BYTES as f64 / seconds / 1e9);
        println!("{bucket_mib:10}   {:.0} {:.0}", rates[0], rates[1]);
    }
    Ok(())
}

/// Seconds that each device takes to receive [`RECEIVED_BYTES`], in buckets of `bucket` elements.
fn measure(
    devices: &[Device; 2],
    streams: &mut [<Device as Runtime>::DeviceStream; 2],
    arenas: &[<Device as Runtime>::Buffer<f32>; 2],
    sums: &mut [<Device as Runtime>::Buffer<f32>; 2],
    bucket: usize,
) -> Result<[f64; 2]> {
    let together = Barrier::new(2);
    let mut workers = streams.iter_mut().zip(sums).enumerate().map(|(rank, (stream, sum))| {
        let together = &together;
        move || -> Result<f64> {
            let rounds = RECEIVED_BYTES / (ARENA_BYTES / 2);
            // Kernels are compiled, and the link is awake.
            let warm = sum_arena(&devices[rank], stream, arenas, sum, rank, bucket)
                .and_then(|()| devices[rank].wait(&devices[rank].record(stream)?));
            together.wait();
            warm?;
            let since = Instant::now();
            for _ in 0..rounds {
                sum_arena(&devices[rank], stream, arenas, sum, rank, bucket)?;
            }
            devices[rank].wait(&devices[rank].record(stream)?)?;
            Ok(since.elapsed().as_secs_f64())
        }
    });
    let mut worker = || workers.next().expect("there are two");
    let (mut first, second) = (worker(), worker());
    std::thread::scope(|scope| {
        let second = scope.spawn(second);
        let first = first();
        let second = second.join().expect("a thread of the bench");
        Ok([first?, second?])
    })
}

/// The half of every bucket that `rank` owns.
fn sum_arena(
    device: &Device,
    stream: &mut <Device as Runtime>::DeviceStream,
    arenas: &[<Device as Runtime>::Buffer<f32>; 2],
    sum: &mut <Device as Runtime>::Buffer<f32>,
    rank: usize,
    bucket: usize,
) -> Result<()> {
    let half = bucket / 2;
    for start in (0..ARENA_BYTES / size_of::<f32>()).step_by(bucket) {
        let term = |arena, joins| {
            let values = Slice::new(arena, start + rank * half, half)?;
            Ok(TreeTerm { values: Some(values), joins })
        };
        let terms = [term(&arenas[0], 0)?, term(&arenas[1], 1)?];
        device.tree_sum(stream, SliceMut::new(sum, start / 2, half)?, &terms)?;
    }
    Ok(())
}
