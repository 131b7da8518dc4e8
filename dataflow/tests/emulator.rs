//! The training graph on the emulated GPU: the bits of a small Mamba in both precisions, and what a device may refuse.

#[path = "graph/harness.rs"]
mod harness;
#[path = "graph/lane_owner.rs"]
mod lane_owner;
#[path = "graph/lookup.rs"]
mod lookup;
#[path = "graph/on_device.rs"]
mod on_device;
#[path = "../../collective/tests/stand_in/mod.rs"]
mod stand_in;

use std::collections::BTreeSet;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use harness::{Outcome, Run, Subject};
use lane_owner::worker_of;
use lookup::{Lookup, STUCK_TOKEN, VOCAB};
use on_device::{Arm, every_body, mamba};
use tidemill::cluster::ClusterError;
use tidemill::kernels::emulator::{
    Emulator, EmulatorSettings, HostTraffic, Schedule, SourceChange,
};
use tidemill::kernels::gpu::Precision;
use tidemill::kernels::gpu::collectives::CollectiveLibrary;
use tidemill::kernels::{Bf16, Fp32, Gpu, Runtime};
use tidemill::model::{LanguageModel, MambaConfig};
use tidemill::parallel::Sharding;

fn emulator(warp: u32) -> Emulator {
    Emulator::new(EmulatorSettings { warp, seed: 1 }).unwrap()
}

macro_rules! tests {
    ($($test:ident: $body:path;)*) => {
        tests!(fp32, Fp32, 64, $($test: $body;)*);
        tests!(bf16, Bf16, 32, $($test: $body;)*);
    };
    ($module:ident, $precision:ty, $warp:literal, $($test:ident: $body:path;)*) => {
        mod $module {
            use super::*;

            static ARM: LazyLock<Arm<Gpu<Emulator, $precision>>> =
                LazyLock::new(|| Arm::new(stringify!($module), Gpu::new(emulator($warp))));

            $(
                #[test]
                fn $test() {
                    $body(&ARM);
                }
            )*
        }
    };
}

every_body!(tests);

/// Devices of workers, each with queues of its own, all of which run in an order of `seed`.
fn devices<P: Precision>(
    count: usize,
    seed: u64,
) -> Subject<Gpu<Emulator, P>, LanguageModel<Gpu<Emulator, P>>> {
    let schedule = Schedule::new(seed);
    let device = || Arc::new(Gpu::<Emulator, P>::new(emulator(32).with_schedule(&schedule)));
    Subject { others: (1..count).map(|_| device()).collect(), ..mamba(device()) }
}

/// Each worker has a device, and reads the memory of the others: any number of them, also more than divide the lanes, buckets
/// of a segment, of some and of all, and whatever the devices do first.
fn any_number_of_devices_gives_the_same_bits<P: Precision>() {
    let run = Run { samples: 11, lanes: 8, steps: 4, checkpoint_every: 2, ..Run::default() };
    let on = |run: &Run, seed| {
        let outcome = run.run_on(&devices::<P>(run.workers, seed));
        outcome.unwrap_or_else(|error| panic!("{run:?}, {seed}: {}", error.with_causes()))
    };
    let expected = mamba(Arc::new(Gpu::<Emulator, P>::new(emulator(32))));
    let expected = run.run_on(&expected).unwrap();
    use Sharding::{Gradients, Optimizer, Parameters};
    let cases = [(1, 300), (2, 1), (2, 1 << 20), (3, 300), (5, 1), (8, 300)];
    for (seed, (workers, bucket_elements)) in cases.into_iter().enumerate() {
        for sharding in Sharding::ALL {
            let run = Run { workers, bucket_elements, sharding, ..run.clone() };
            let found = on(&run, seed as u64);
            assert_eq!(found, expected, "{workers} devices, {bucket_elements}, {sharding:?}");
        }
    }
    // A run may resume with any other number of workers, and share out other state.
    for (before, after) in [((3, Optimizer), (2, Parameters)), ((1, Parameters), (5, Gradients))] {
        let with = |(workers, sharding)| Run { workers, sharding, ..run.clone() };
        let half = on(&with(before), 7);
        let resume = Some((2, half.checkpoints[&2].clone()));
        let rest = on(&Run { resume, ..with(after) }, 8);
        assert_eq!(rest.checkpoints[&4], expected.checkpoints[&4], "{before:?} then {after:?}");
        assert_eq!(rest.reports, expected.reports[2..]);
    }
}

/// Workers of several processes, whose devices a library connects: the sums are still those of our kernels.
fn any_number_of_processes_gives_the_same_bits<P: Precision>() {
    let run = Run { samples: 11, lanes: 8, steps: 4, checkpoint_every: 2, ..Run::default() };
    let subject = mamba(Arc::new(Gpu::<Emulator, P>::new(emulator(32))));
    let expected = run.run_on(&subject).unwrap();
    let library = Some(stand_in::library as fn() -> CollectiveLibrary);
    use Sharding::{Gradients, Optimizer, Parameters};
    // With several workers in a process, updates take another path where each worker holds all parameters.
    let cases = [(2, 2, Optimizer), (3, 3, Gradients), (2, 4, Optimizer), (2, 4, Parameters)];
    for (processes, workers, sharding) in cases {
        let run = Run { processes, workers, library, sharding, ..run.clone() };
        let found = run.run_on(&subject);
        let found = found.unwrap_or_else(|error| panic!("{run:?}: {}", error.with_causes()));
        assert_eq!(found, expected, "{workers} workers of {processes} processes");
        let resume = Some((2, found.checkpoints[&2].clone()));
        let rest = Run { processes: 1, workers: 3, resume, ..run }.run_on(&subject).unwrap();
        assert_eq!(rest.checkpoints[&4], expected.checkpoints[&4]);
    }
}

#[test]
fn any_number_of_processes_gives_the_same_bits_in_fp32() {
    any_number_of_processes_gives_the_same_bits::<Fp32>();
}

#[test]
fn any_number_of_processes_gives_the_same_bits_in_bf16() {
    any_number_of_processes_gives_the_same_bits::<Bf16>();
}

/// A device of one of `workers` workers of `processes` never returns from a lane of the third step, while others wait for its sums
/// of it, with lanes of their own behind them or without: all of them end, with the name of the one that is stuck.
fn a_device_that_never_returns_is_named(workers: usize, processes: usize) {
    const DEADLINE: Duration = Duration::from_millis(500);
    const SOON: Duration = Duration::from_secs(20);
    let backend = Arc::new(Gpu::<Emulator, Fp32>::new(emulator(32)));
    let library = Some(stand_in::library as fn() -> CollectiveLibrary);
    // It is of the second lane: where these leave one by one, others have one behind it.
    let (sample, poison) = (3, Some((11 * 2 + 3, STUCK_TOKEN)));
    for sharding in Sharding::ALL {
        let step_deadline = Some(DEADLINE);
        let run = Run { samples: 11, lanes: 4, workers, processes, library, ..Run::default() };
        let run = Run { steps: 4, checkpoint_every: 2, poison, step_deadline, sharding, ..run };
        let (mut model, gate) = (Lookup::new(), run.gate.clone());
        model.stuck = Some(Arc::new(move || gate.wait()));
        let (model, backend) = (Arc::new(model), Arc::clone(&backend));
        let (others, vocab_size) = (Vec::new(), VOCAB);
        let subject = Subject { backend, others, model, vocab_size, chunk_elements: 70 };
        // Kernels are compiled when they are first used, which may take longer.
        let warm = Run { steps: 1, poison: None, step_deadline: None, ..run.clone() };
        warm.run_on(&subject).unwrap_or_else(|error| panic!("{}", error.with_causes()));
        let start = Instant::now();
        let (error, checkpoints) = run.run_to_failure_on(&subject);
        assert!(start.elapsed() < SOON, "{:?}", start.elapsed());
        let (text, left) = match error {
            ClusterError::LeftBehind { cause, left, .. } => (cause.unwrap().to_string(), left),
            other => (other.to_string(), Vec::new()),
        };
        let worker = worker_of(&run, sample);
        let stuck = format!("thread device-{worker}");
        assert!(text.contains(&stuck), "{workers} of {processes}, {sharding:?}: {text}");
        assert!(text.ends_with("in step 3: forward and backward"), "{text}");
        // The error is that of the first process, which names only its own threads.
        let left_behind = if worker < workers / processes { vec![stuck] } else { Vec::new() };
        let left: Vec<_> = left.iter().map(ToString::to_string).collect();
        assert_eq!(left, left_behind, "no other waits any more: {sharding:?}");
        assert!(checkpoints.keys().all(|&step| step <= 2), "{:?}", checkpoints.keys());
    }
}

#[test]
fn a_device_that_never_returns_ends_the_threads_that_wait_for_its_gradients() {
    a_device_that_never_returns_is_named(3, 1);
}

#[test]
fn a_device_that_never_returns_ends_the_processes_that_wait_for_its_gradients() {
    a_device_that_never_returns_is_named(2, 2);
}

#[test]
fn any_number_of_devices_gives_the_same_bits_in_fp32() {
    any_number_of_devices_gives_the_same_bits::<Fp32>();
}

#[test]
fn any_number_of_devices_gives_the_same_bits_in_bf16() {
    any_number_of_devices_gives_the_same_bits::<Bf16>();
}

/// One step on a device with so much memory.
fn run_in(bytes: usize, workers: usize) -> Result<Outcome, ClusterError> {
    let backend = Gpu::<Emulator, Fp32>::new(emulator(32).with_memory_bytes(bytes));
    Run { workers, samples: 4, lanes: 4, steps: 1, ..Run::default() }
        .run_on(&mamba(Arc::new(backend)))
}

/// The least memory of a device on which a step of four workers of `processes` runs, to a fiftieth, where there are many blocks.
fn least_memory(sharding: Sharding, processes: usize) -> usize {
    let library = Some(stand_in::library as fn() -> CollectiveLibrary);
    let config = MambaConfig { d_state: 3, d_conv: 3, dt_rank: 2, ..MambaConfig::new(13, 12, 16) };
    let model = Arc::new(LanguageModel::new(&config).unwrap());
    let (mut fits, mut does_not) = (1 << 20, 0);
    while fits - does_not > fits / 50 {
        let bytes = (fits + does_not) / 2;
        let device = || Arc::new(Gpu::<Emulator, Fp32>::new(emulator(32).with_memory_bytes(bytes)));
        let others = (1..4).map(|_| device()).collect();
        let (backend, model) = (device(), Arc::clone(&model));
        let vocab_size = model.vocab_size();
        let subject = Subject { backend, others, model, vocab_size, chunk_elements: 70 };
        let run = Run { workers: 4, samples: 4, lanes: 4, steps: 1, sharding, ..Run::default() };
        let run = Run { bucket_elements: 1, processes, library, ..run };
        match run.run_on(&subject) {
            Ok(_) => fits = bytes,
            Err(_) => does_not = bytes,
        }
    }
    fits
}

#[test]
fn what_is_shared_out_takes_less_memory() {
    let [optimizer, gradients, parameters] =
        Sharding::ALL.map(|sharding| least_memory(sharding, 1));
    println!("{optimizer} {gradients} {parameters}");
    assert!(parameters < gradients && gradients < optimizer);
    // The two workers of a process hold them together: each half, where of one process of four each has a quarter.
    let [gradients, halved] =
        [Sharding::Gradients, Sharding::Parameters].map(|sharding| least_memory(sharding, 2));
    println!("{gradients} {halved} of two processes");
    assert!(parameters < halved && halved < gradients);
}

/// Bytes that cross between the host and devices.
#[derive(Debug, PartialEq, Eq)]
struct Crossed {
    /// In a step: to the host, and to devices.
    of_step: [u64; 2],
    /// To the host, of the cut at the end and one evaluation.
    of_cut: u64,
}

/// The traffic of a run of a model with so many blocks, with the numbers of its parameters and chunks.
fn crossed(run: &Run, blocks: usize) -> (Crossed, [u64; 2]) {
    let config =
        MambaConfig { d_state: 3, d_conv: 3, dt_rank: 2, ..MambaConfig::new(29, 6, blocks) };
    let model = Arc::new(LanguageModel::new(&config).unwrap());
    let in_steps = |steps| {
        let emulators: Vec<_> = (0..run.workers).map(|_| emulator(32)).collect();
        let traffic: Vec<_> = emulators.iter().map(Emulator::host_traffic).collect();
        let device = |emulator| Arc::new(Gpu::<Emulator, Bf16>::new(emulator));
        let mut devices = emulators.into_iter().map(device);
        let (backend, model) = (devices.next().expect("a worker"), Arc::clone(&model));
        let (others, vocab_size) = (devices.collect(), model.vocab_size());
        let subject = Subject { backend, others, model, vocab_size, chunk_elements: 70 };
        let run = Run { steps, ..run.clone() };
        run.run_on(&subject).unwrap_or_else(|error| panic!("{}", error.with_causes()));
        let sum = |bytes: fn(&HostTraffic) -> u64| traffic.iter().map(|of| bytes(of)).sum::<u64>();
        let sizes =
            [subject.model.layout().parameter_elements(), run.plan(&subject).chunks.chunks().len()];
        ([sum(HostTraffic::to_host), sum(HostTraffic::to_device)], sizes.map(|size| size as u64))
    };
    let ((of_two, sizes), (of_four, _)) = (in_steps(2), in_steps(4));
    let of_step = [0, 1].map(|way| (of_four[way] - of_two[way]) / 2);
    (Crossed { of_step, of_cut: of_two[0] - 2 * of_step[0] }, sizes)
}

/// In one process: what a step brings to the host are losses, and a sum of squares of 8 bytes for each chunk, whatever the number of
/// workers and what they share out; what it brings to devices are tokens, and tables by chunk. A cut is 12 bytes a parameter, once.
#[test]
fn no_gradient_and_no_parameter_crosses_the_host_in_a_step() {
    let run = Run { samples: 11, lanes: 4, checkpoint_every: 100, ..Run::default() };
    let (alone, [few, few_chunks]) = crossed(&run, 1);
    let (deeper, [many, many_chunks]) = crossed(&run, 3);
    let chunks = many_chunks - few_chunks;
    assert!(many > 2 * few && chunks > 10, "{few} and {many} parameters, {chunks} chunks more");
    assert_eq!(deeper.of_step[0] - alone.of_step[0], 8 * chunks);
    assert!(deeper.of_step[1] - alone.of_step[1] <= 32 * chunks, "{alone:?}, {deeper:?}");
    assert_eq!(deeper.of_cut - alone.of_cut, 12 * (many - few));
    for sharding in Sharding::ALL {
        let (shared, _) = crossed(&Run { workers: 3, sharding, ..run.clone() }, 3);
        assert_eq!(shared.of_step[0], deeper.of_step[0], "{sharding:?}");
        assert_eq!(shared.of_cut, deeper.of_cut, "{sharding:?}");
        // A few numbers more for each worker.
        assert!(
            shared.of_step[1] <= deeper.of_step[1] + 3 * 32,
            "{sharding:?}: {shared:?}, {deeper:?}"
        );
    }
    // Between processes without a library they do: sums in fp32, and what was updated.
    let (sent, _) = crossed(&Run { workers: 2, processes: 2, ..run }, 3);
    assert!(sent.of_step.iter().all(|bytes| *bytes > 4 * many), "{sent:?}");
}

/// A device without room for it all, whichever part it refuses: the state, the workspace, the sums of lanes, the
/// scratch memory of a kernel. It is one line that says so, and never a hang; with enough room, nothing is different.
#[test]
fn a_device_without_room_is_one_line() {
    let sufficient = 1 << 20;
    let expected = run_in(sufficient, 1).unwrap();
    for workers in [1, 2] {
        let mut refused = BTreeSet::new();
        let mut bytes = sufficient;
        // Nearly as much as before each time: small parts come last, and are refused too.
        while bytes > 0 {
            match run_in(bytes, workers) {
                Ok(outcome) => assert_eq!(outcome, expected, "{workers} workers, {bytes} bytes"),
                Err(error) => {
                    let line = error.with_causes();
                    let (actor, rest) = line.split_once(" failed: ").unwrap();
                    let (_, size) = rest.split_once("allocating ").unwrap();
                    let (size, rest) = size.split_once(" bytes on ").unwrap();
                    assert_eq!(rest, "emulator with warps of 32 failed: out of memory", "{line}");
                    refused.insert((actor.to_owned(), size.parse::<usize>().unwrap()));
                }
            }
            bytes = bytes / 20 * 17;
        }
        println!("{workers} workers: {refused:?}");
        let by = |thread| refused.iter().filter(|(actor, _)| actor.contains(thread)).count();
        assert!(by("device-") > 3 && by("optimizer-") > 0, "{refused:?}");
    }
}

/// Reported with the compiler's own words, from whichever thread first needs the kernel.
#[test]
fn a_kernel_that_does_not_compile_ends_the_run() {
    for (source, actor) in
        [("scan_any.cu", "thread device-0"), ("optimizer.cu", "thread optimizer-0")]
    {
        let change = SourceChange {
            source,
            from: "#include \"",
            to: "static_assert(false, \"broken on purpose\");\n#include \"",
        };
        let backend = Gpu::<Emulator, Fp32>::new(emulator(32).with_change(change));
        let run = Run { samples: 4, lanes: 1, steps: 1, ..Run::default() };
        let (error, checkpoints) = run.run_to_failure_on(&mamba(Arc::new(backend)));
        let text = error.with_causes();
        assert!(text.starts_with(&format!("{actor} failed: ")), "{text}");
        assert!(text.contains(&format!("compiling {source} for the emulator failed: ")), "{text}");
        assert!(text.contains("broken on purpose"), "{text}");
        assert!(checkpoints.is_empty());
    }
}

/// The device threads still compute the second step when the first checkpoint fails. What they hold is free when the run has
/// ended, whatever is shared out and between whom: another finds the memory that it needs.
#[test]
fn a_second_run_finds_the_memory_of_the_first_free() {
    let samples = Run { samples: 4, lanes: 4, steps: 3, checkpoint_every: 1, ..Run::default() };
    let library = Some(stand_in::library as fn() -> CollectiveLibrary);
    let subject = mamba(Arc::new(Gpu::<Emulator, Fp32>::new(emulator(32))));
    samples.run_on(&subject).unwrap();
    for (workers, processes) in [(1, 1), (3, 1), (2, 2)] {
        for sharding in Sharding::ALL {
            let run = Run { workers, processes, sharding, library, ..samples.clone() };
            run.run_on(&subject).unwrap();
            // Memory for compiled kernels and plans stays after a run.
            let before = subject.backend.free_memory_bytes().unwrap();
            let failing = Run { full_disk: Some(1), ..run.clone() };
            let (error, _) = failing.run_to_failure_on(&subject);
            let line = error.with_causes();
            assert!(line.ends_with("no space left on device"), "{line}");
            let free = subject.backend.free_memory_bytes().unwrap();
            assert_eq!(free, before, "{workers} of {processes}, {sharding:?}");
        }
    }
}
