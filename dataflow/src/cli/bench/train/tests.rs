//! Devices are emulated.

use clap::Parser;
use tidemill_kernels::emulator::{Emulator, EmulatorSettings};
use tidemill_kernels::{Fp32, Gpu, MemoryPlace};

use super::*;
use crate::cli::device::advise;
use crate::cli::exit::one_line;
use crate::device::{Precision, WorkerDevice};

#[derive(Parser)]
struct Flags {
    #[command(flatten)]
    bench: TrainBench,
}

/// The refusal of a quick model that needs more than a device with so many bytes for each parameter has.
fn refused_with(bytes_per_parameter: usize, flags: &[&str]) -> String {
    let sizes = ["bench", "--vocab-size", "31", "--seq-len", "4", "--samples-per-step", "8"];
    let bench = Flags::try_parse_from([&sizes, flags].concat()).unwrap().bench;
    let model = bench.model().unwrap();
    let bytes = bytes_per_parameter * model.layout().parameter_elements();
    let emulator = Emulator::new(EmulatorSettings { warp: 32, seed: 1 }).unwrap();
    let backend = Arc::new(Gpu::<Emulator, Fp32>::new(emulator.with_memory_bytes(bytes)));
    let device = WorkerDevice { backend, name: "emulator".to_owned(), ordinal: 0 };
    let devices = Devices::new(vec![device], Precision::Fp32).unwrap();
    let cut = bench.cut(&bench.batch()).unwrap();
    let (fitting, cluster) = (FittingDevices::default(), ClusterSettings::workers(1));
    let measurement = Measurement {
        bench: &bench,
        batch: bench.batch(),
        cut: &cut,
        model: &model,
        cluster,
        fitting: &fitting,
    };
    let error = measurement.run(devices).err().expect("no room");
    let ways = bench.device.ways(bench.smaller(&cut, fitting.way(1, SHARD)), MemoryPlace::Device);
    one_line(advise(error, ways, MemoryPlace::Device).as_ref())
}

#[test]
fn a_model_that_does_not_fit_is_told_on_how_many_devices_it_would() {
    let others = "use --precision bf16, or use --backend cpu: allocating ";
    let line = refused_with(20, &[]);
    let (more, rest) = line.split_once(" such GPUs, or ").unwrap();
    let devices: usize = more.rsplit(' ').next().unwrap().parse().unwrap();
    assert!((2..=8).contains(&devices), "{line}");
    // Fewer would do where they share out all.
    let rest = rest.split_once(" with --shard parameters, or ").map_or(rest, |(_, rest)| rest);
    let start = "this does not fit into the device's memory: train on ";
    assert_eq!(more, format!("{start}{devices}"));
    let smaller = format!("lower --seq-len, or use a smaller --preset, or {others}");
    assert!(rest.starts_with(&smaller), "{line}");
    // One lane allows one worker at most.
    let line = refused_with(10, &["--lanes", "1", "--microbatch-grains", "2"]);
    let expected = format!("memory: lower --microbatch-grains, which is 2, or {others}");
    assert!(line.contains(&expected), "{line}");
}
