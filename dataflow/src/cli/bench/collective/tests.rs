//! Devices are emulated, and their queues run in any order; processes are threads with a cluster between them.

use std::net::TcpListener;

use clap::Parser;
use tidemill_kernels::emulator::{Emulator, EmulatorSettings, Schedule, SourceChange};
use tidemill_kernels::{Cpu, Fp32, Gpu, KernelError};

use super::*;
use crate::cli::exit::one_line;
use crate::cluster::{ClusterError, ExitClass};
use crate::device::{Precision, WorkerDevice};

#[path = "../../../../../collective/tests/stand_in/mod.rs"]
mod stand_in;

type Device = Gpu<Emulator, Fp32>;

#[derive(Parser)]
struct Flags {
    #[command(flatten)]
    bench: CollectiveBench,
}

fn flags(flags: &[&str]) -> CollectiveBench {
    Flags::try_parse_from([&["bench"], flags].concat()).unwrap().bench
}

/// As many as workers, with queues that run in an order of `seed`.
fn devices(workers: usize, seed: u64, change: Option<SourceChange>) -> Devices<Device> {
    let schedule = Schedule::new(seed);
    let device = |ordinal| {
        let emulator = Emulator::new(EmulatorSettings { warp: 32, seed: 1 }).unwrap();
        let emulator = emulator.with_memory_bytes(1 << 30).with_schedule(&schedule);
        let emulator = match change {
            Some(change) => emulator.with_change(change),
            None => emulator,
        };
        WorkerDevice { backend: Arc::new(Gpu::new(emulator)), name: "emulator".to_owned(), ordinal }
    };
    Devices::new((0..workers).map(device).collect(), Precision::Fp32).unwrap()
}

fn no_library() -> tidemill_kernels::Result<CollectiveLibrary> {
    Err(KernelError::shape("test", "library", "one", "none"))
}

fn measured<B: Backend>(
    devices: Devices<B>,
    library: impl Fn() -> tidemill_kernels::Result<CollectiveLibrary>,
) -> anyhow::Result<Outcome> {
    let bench = flags(&["--megabytes", "3", "--buckets", "1,2", "--rounds", "1"]);
    let workers = devices.workers().len();
    let cluster = ClusterSettings::workers(workers);
    let measuring = Measuring { bench: &bench, cluster, workers };
    measuring.measure(devices, library)
}

fn assert_complete(outcome: &Outcome, way: Way) {
    assert_eq!(outcome.way, way);
    let buckets = outcome.measured.iter().map(|row| row.bucket_mebibytes);
    assert!(buckets.eq([1, 2]), "{outcome:?}");
    for row in &outcome.measured {
        for rate in [Some(row.ours), row.library_alone].into_iter().flatten() {
            for rate in [rate.summed, rate.gathered] {
                assert!(rate.is_finite() && rate > 0.0, "{outcome:?}");
            }
        }
    }
}

#[test]
fn devices_sum_and_gather_to_the_bit() {
    for (seed, workers) in [2, 3].into_iter().enumerate() {
        let devices = devices(workers, seed as u64, None);
        assert_complete(&measured(devices, no_library).unwrap(), Way::Devices);
    }
}

#[test]
fn threads_sum_and_gather_to_the_bit() {
    for workers in [2, 3] {
        let backend = Arc::new(Cpu::new(NonZeroUsize::MIN).unwrap());
        let device = WorkerDevice { backend, name: "the CPU".to_owned(), ordinal: 0 };
        let devices = Devices::new(vec![device; workers], Precision::Fp32).unwrap();
        assert_complete(&measured(devices, no_library).unwrap(), Way::Memory);
    }
}

#[test]
fn the_rate_of_a_wrong_sum_is_an_error_that_says_where() {
    let change = SourceChange {
        source: "tree_sum.cu",
        from: "terms[i].at[j] += terms[i + width].at[j]",
        to: "terms[i].at[j] -= terms[i + width].at[j]",
    };
    let error = measured(devices(2, 0, Some(change)), no_library).unwrap_err();
    let line = one_line(error.as_ref());
    for part in ["the sum of worker ", " is wrong at element ", ", in buckets of 1 MiB: expected "]
    {
        assert!(line.contains(part), "{line}");
    }
    let error = error.downcast::<ClusterError>().unwrap();
    assert_eq!(error.exit_class(), ExitClass::FixInput);
}

/// The processes have one device each, or two that read each other's memory.
#[test]
fn devices_of_two_processes_exchange_by_a_library() {
    for of_process in [1, 2] {
        let listeners = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
        let addresses = listeners.each_ref().map(|l| l.local_addr().unwrap().to_string());
        std::thread::scope(|scope| {
            let run = |(process, listener)| {
                let addresses = addresses.to_vec();
                scope.spawn(move || {
                    let bench = flags(&["--megabytes", "3", "--buckets", "1,2", "--rounds", "1"]);
                    let mut cluster = ClusterSettings::process(of_process, process, addresses);
                    cluster.listener = Some(listener);
                    let measuring = Measuring { bench: &bench, cluster, workers: 2 * of_process };
                    measuring.measure(devices(of_process, 0, None), || Ok(stand_in::library()))
                })
            };
            let processes: Vec<_> = listeners.into_iter().enumerate().map(run).collect();
            for process in processes {
                let outcome = process.join().unwrap().unwrap();
                assert_complete(&outcome, Way::Library);
                let is_measured = outcome.measured.iter().all(|row| row.library_alone.is_some());
                assert!(is_measured, "{outcome:?}");
            }
        });
    }
}

/// Its sums have other bits than ours where there are more than two terms, and are not compared with ours.
#[test]
fn what_a_library_does_alone_is_measured_beside_ours() {
    for (seed, workers) in [2, 3].into_iter().enumerate() {
        let devices = || devices(workers, seed as u64, None);
        let outcome = measured(devices(), || Ok(stand_in::library())).unwrap();
        assert_complete(&outcome, Way::Devices);
        let json = outcome.to_json("emulator");
        for row in json["buckets"].as_array().unwrap() {
            for key in ["reduce_scatter", "all_gather"] {
                let rate = &row["nccl_alone"][format!("{key}_gigabytes_per_second")];
                assert!(rate.as_f64().unwrap() > 0.0, "{json}");
            }
        }
        let lines = outcome.lines("emulator").join("\n");
        for said in [json["nccl_alone"].as_str().unwrap(), &lines] {
            assert!(
                said.contains("order of the library's own, which training never uses"),
                "{said}"
            );
        }
        assert!(lines.contains("NCCL alone: reduce_scatter GB/s  all_gather GB/s"), "{lines}");
        let without = measured(devices(), no_library).unwrap();
        assert_eq!(
            without.to_json("emulator")["buckets"][0]["nccl_alone"],
            serde_json::Value::Null
        );
        assert!(!without.lines("emulator").join("\n").contains("NCCL"));
    }
}

#[test]
fn what_was_asked_for_is_refused_and_what_was_not_adapts() {
    let room = Room { default_mebibytes: 256, most_mebibytes: 100, workers: 2 };
    let sizes = |asked: &[&str]| flags(asked).sizes(room).map_err(|error| error.to_string());
    let found = |arena_mebibytes, buckets: &[usize]| {
        Ok(Sizes { arena_mebibytes, bucket_mebibytes: buckets.to_vec() })
    };
    assert_eq!(sizes(&[]), found(100, &[1, 4, 16, 64]));
    assert_eq!(sizes(&["--megabytes", "3"]), found(3, &[1]));
    assert_eq!(sizes(&["--megabytes", "3", "--buckets", "3,2,3"]), found(3, &[3, 2, 3]));
    let refused = |asked: &[&str]| sizes(asked).unwrap_err();
    let expected =
        "--megabytes: expected at most 100, for which 2 workers have memory now, found 101";
    assert_eq!(refused(&["--megabytes", "101"]), expected);
    let expected = "--buckets: expected at most 8, the MiB of --megabytes, found 9";
    assert_eq!(refused(&["--megabytes", "8", "--buckets", "1,9"]), expected);
    let none = flags(&[]).sizes(Room { most_mebibytes: 0, ..room }).unwrap_err().to_string();
    assert!(none.starts_with("-w: expected as many workers as have 1 MiB each"), "{none}");
    for workers in [0, 1, 257, usize::MAX] {
        assert!(check_workers(workers).is_err(), "{workers}");
    }
    assert_eq!(check_workers(2).unwrap(), 2);
}
