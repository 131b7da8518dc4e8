//! Resident verdicts: time and memory of loading a million documents, and the time of a change.
//!
//! Summaries are generated, three in ten of them in groups that share buckets: texts never enter the dataflow, and `--bench choosing`
//! measures making summaries. `cargo bench -p tidemill-streaming-data --features live --bench live [-- DOCUMENTS WORKERS]`.

use std::time::{Duration, Instant};

use differential_dataflow::input::Input;
use peak_alloc::PeakAlloc;
use tidemill_streaming_data::live::{Summary, Verdict, verdicts};
use timely::Config;
use timely::dataflow::ProbeHandle;

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

/// Buckets of a document for near copies.
const BANDS: u64 = 14;

fn mixed(value: u64) -> u64 {
    let value = (value ^ (value >> 31)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (value ^ (value >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9)
}

/// The summary of document `key` after `version` changes.
fn summary(key: u64, version: u64) -> Summary {
    // The last three of each ten documents share some buckets with an earlier document.
    let group = if key % 10 >= 7 { key / 40 * 40 } else { key };
    let of = |bucket: u64| match bucket < 3 {
        true => mixed(group * BANDS + bucket + (version << 40)),
        false => mixed((key + (1 << 50)) * BANDS + bucket + (version << 40)),
    };
    let copies = Some(u128::from(mixed(key + (version << 40))) << 64 | u128::from(key));
    Summary::Chosen { copies, near: (0..BANDS).map(of).collect() }
}

fn main() {
    let numbers: Vec<u64> = std::env::args().skip(1).filter_map(|word| word.parse().ok()).collect();
    let documents = numbers.first().copied().unwrap_or(1_000_000);
    let workers = numbers.get(1).map_or(1, |&workers| workers as usize);
    let before = MEMORY.current_usage();
    timely::execute(Config::process(workers), move |worker| {
        let probe = ProbeHandle::new();
        let (kept, mut input) = worker.dataflow::<u64, _, _>(|scope| {
            let (input, summaries) = scope.new_collection::<(u64, Summary), isize>();
            let kept = std::rc::Rc::new(std::cell::Cell::new(0_isize));
            let counted = std::rc::Rc::clone(&kept);
            let count = move |((_, verdict), _, by): &((u64, Verdict), u64, isize)| {
                let by = if *verdict == Verdict::Kept { *by } else { 0 };
                counted.set(counted.get() + by);
            };
            verdicts(summaries).inspect(count).probe_with(&probe);
            (kept, input)
        });
        let (index, peers) = (worker.index() as u64, worker.peers() as u64);
        let start = Instant::now();
        (0..documents).filter(|key| key % peers == index).for_each(|key| {
            input.insert((key, summary(key, 0)));
        });
        let mut moment = 1;
        input.advance_to(moment);
        input.flush();
        worker.step_or_park_while(None, || probe.less_than(&moment));
        if index == 0 {
            let bytes = (MEMORY.current_usage() - before) as f64 / documents as f64;
            let (loaded, kept) = (start.elapsed().as_secs_f64(), kept.get());
            println!("{documents} documents, {workers} workers: loaded in {loaded:.2} s, {bytes:.0} bytes a document, {kept} kept by worker 0");
        }
        for changes in [1, 100, 1_000, 10_000] {
            let mut took = Vec::new();
            for round in 0..9_u64 {
                let start = Instant::now();
                // Each document is removed and added with another text.
                for change in (0..changes).filter(|change| change % peers == index) {
                    let key = mixed(change + (round << 32) + (changes << 48)) % documents;
                    let key = key / changes * changes + change;
                    let key = if key < documents { key } else { change };
                    input.remove((key, summary(key, 0)));
                    input.insert((key, summary(key, round + 1 + (changes << 8))));
                }
                moment += 1;
                input.advance_to(moment);
                input.flush();
                worker.step_or_park_while(None, || probe.less_than(&moment));
                took.push(start.elapsed());
                // The changes are undone.
                for change in (0..changes).filter(|change| change % peers == index) {
                    let key = mixed(change + (round << 32) + (changes << 48)) % documents;
                    let key = key / changes * changes + change;
                    let key = if key < documents { key } else { change };
                    input.remove((key, summary(key, round + 1 + (changes << 8))));
                    input.insert((key, summary(key, 0)));
                }
                moment += 1;
                input.advance_to(moment);
                input.flush();
                worker.step_or_park_while(None, || probe.less_than(&moment));
            }
            took.sort();
            let milliseconds = |took: Duration| took.as_secs_f64() * 1e3;
            if index == 0 {
                let (middle, most) = (milliseconds(took[4]), milliseconds(took[8]));
                println!("+{changes} -{changes}: {middle:.3} ms, at most {most:.3}");
            }
        }
    })
    .expect("timely runs")
    .join()
    .into_iter()
    .for_each(|worker| worker.expect("no worker panics"));
}
