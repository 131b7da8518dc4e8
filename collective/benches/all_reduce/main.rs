//! `all_reduce` bandwidth of the host's communicators.
//!
//! ```text
//! cargo bench -p tidemill-collective --bench all_reduce -- [--megabytes 256] [--window-kib 1024] [--rounds 7]
//! ```
//!
//! Every worker holds S bytes; they are summed at their owners and sent back to all. The number is S over
//! the time of a round: the median, the first round (cold memory) left out. Threads read each other's
//! memory; between processes chunks cross TCP loopback. The peer's number is OpenMPI over TCP, 1.15-1.4 GB/s.

mod exchange;

use exchange::{Ends, Settings, other_process, report, run, value};

fn execute(
    configuration: timely::CommunicationConfig,
    ends: Ends,
    settings: Settings,
) -> Option<Vec<f64>> {
    let configuration =
        timely::Config { communication: configuration, worker: timely::WorkerConfig::default() };
    let guards =
        timely::execute(configuration, move |worker| run(worker, &ends, settings)).unwrap();
    guards.join().into_iter().next().map(Result::unwrap)
}

fn main() {
    let settings = Settings::from_arguments();
    let port = value("--port", 23_470);
    let cluster = |process| timely::CommunicationConfig::Cluster {
        threads: 1,
        process,
        addresses: (0..2).map(|index| format!("127.0.0.1:{}", port + index)).collect(),
        report: false,
        zerocopy: false,
    };
    if value("--process", 0) == 1 {
        execute(cluster(1), Ends::new(1, 1, 2), settings);
        return;
    }
    for threads in [1, 2] {
        let ends = Ends::new(threads, 0, 1);
        let seconds = execute(timely::CommunicationConfig::Process(threads), ends, settings);
        report(&format!("{threads} threads"), settings, seconds.unwrap());
    }
    let mut other = other_process().spawn().expect("the other process starts");
    let seconds = execute(cluster(0), Ends::new(1, 0, 2), settings);
    other.wait().expect("the other process ends");
    report("2 processes over TCP loopback", settings, seconds.unwrap());
}
