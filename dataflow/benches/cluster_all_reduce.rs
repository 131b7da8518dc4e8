//! `all_reduce` between two processes of a cluster: the cost of encryption.
//!
//! ```text
//! cargo bench -p tidemill --bench cluster_all_reduce -- [--megabytes 256] [--window-kib 1024] [--rounds 7]
//! ```
//!
//! The exchange is the one of `tidemill-collective`'s benchmark `all_reduce`, between two processes of one worker over
//! TCP loopback: over timely's own connections, which carry plain bytes, and over a cluster's connections, which are
//! encrypted and authenticated. Both run alternately, three times, so that changes of the machine's load affect both.

#[path = "../../collective/benches/all_reduce/exchange.rs"]
mod exchange;

use exchange::{Ends, Settings, other_process, report, run, value};
use tidemill::cluster::{Admission, ClusterSettings, Secret, WorkerContext};

const TURNS: usize = 3;

fn plain(process: usize, port: usize, settings: Settings) -> Option<Vec<f64>> {
    let communication = timely::CommunicationConfig::Cluster {
        threads: 1,
        process,
        addresses: addresses(port),
        report: false,
        zerocopy: false,
    };
    let config = timely::Config { communication, worker: timely::WorkerConfig::default() };
    let ends = Ends::new(1, process, 2);
    let guards = timely::execute(config, move |worker| run(worker, &ends, settings)).unwrap();
    guards.join().into_iter().next().map(Result::unwrap)
}

fn sealed(process: usize, port: usize, settings: Settings) -> Option<Vec<f64>> {
    let mut cluster = ClusterSettings::process(1, process, addresses(port));
    let secret = Secret::new("of this benchmark alone", "its source").unwrap();
    cluster.admission = Admission::Secret(secret);
    let ends = Ends::new(1, process, 2);
    let measure = move |context: &mut WorkerContext<'_>| Ok(run(context, &ends, settings));
    let seconds = tidemill::cluster::execute(cluster, measure);
    seconds.unwrap().into_iter().next()
}

fn addresses(port: usize) -> Vec<String> {
    (0..2).map(|index| format!("127.0.0.1:{}", port + index)).collect()
}

fn main() {
    let (settings, first_port) = (Settings::from_arguments(), value("--port", 23_480));
    let process = value("--process", 0);
    let other = (process == 0).then(|| other_process().spawn().expect("the other process starts"));
    for turn in 0..TURNS {
        let port = first_port + 4 * turn;
        type Execute = fn(usize, usize, Settings) -> Option<Vec<f64>>;
        let arms: [(_, Execute, _); 2] = [("plain", plain, port), ("sealed", sealed, port + 2)];
        for (name, execute, port) in arms {
            let seconds = execute(process, port, settings).expect("a worker");
            if process == 0 {
                report(&format!("2 processes over TCP loopback, {name}"), settings, seconds);
            }
        }
    }
    if let Some(mut other) = other {
        other.wait().expect("the other process ends");
    }
}
