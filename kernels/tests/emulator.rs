//! Every test body on the emulated GPU, in several orders of threads: fp32 in warps of 32 threads, and bf16 in warps of 64.
//! (`rocm.rs` has the other two.)
//!
//! The launchers and the kernels' own sources run, compiled by the host's `g++`. The order in which threads take their turns
//! must change no bit.

#[path = "bodies/algorithms.rs"]
mod algorithms;
mod bodies;
#[path = "emulator/checks.rs"]
mod checks;
#[path = "emulator/forgotten.rs"]
mod forgotten;
#[path = "emulator/forgotten_groups.rs"]
mod forgotten_groups;

use std::sync::Arc;

use bodies::agreement::Transcript;
use bodies::arm::{Arm, agree};
use bodies::attention_case::{self, AttentionCase, attention_shape};
use bodies::device::Device;
use bodies::every_body;
use bodies::head_scan_case::{self, HeadScanCase};
use bodies::inputs::Inputs;
use bodies::memory::handed_on;
use bodies::number::Number;
use bodies::scan_case::{Regime, ScanCase};
use bodies::selective_scan::{self, Regated};
use tidemill_kernels::backend::{
    AttentionBackward, HeadScanBackward, SelectiveScanBackward, WeightGradient,
};
use tidemill_kernels::emulator::{Emulator, EmulatorSettings, Schedule, SourceChange};
use tidemill_kernels::gpu::Precision;
use tidemill_kernels::shape::{GrainRows, ScanShape, SequenceShape};
use tidemill_kernels::{Bf16, Fp32, Gpu, Runtime, Slice, SliceMut};

/// Orders of threads: as they are numbered, and two random ones.
const SEEDS: [u64; 3] = [0, 1, 0x7469_6465];

/// The orders whose bits are compared.
const NUMBERED_AND_RANDOM: &[u64] = &[SEEDS[0], SEEDS[1]];
const TWO_RANDOM: &[u64] = &[SEEDS[1], SEEDS[2]];

fn arm<P: Precision>(warp: u32, seed: u64) -> Arm<Gpu<Emulator, P>> {
    let emulator = Emulator::new(EmulatorSettings { warp, seed }).unwrap();
    Arm::new(format!("warps of {warp}, seed {seed}"), Gpu::new(emulator))
}

/// An arm whose groups of warps multiply together.
fn groups(seed: u64) -> Arm<Gpu<Emulator, Bf16>> {
    let emulator = Emulator::new(EmulatorSettings { warp: 32, seed }).unwrap();
    let backend = Gpu::new(emulator.with_group_products().unwrap());
    Arm::new(format!("groups of warps, seed {seed}"), backend)
}

/// Runs `body` with each order of threads; the bits must be the same.
fn agree_in<B>(orders: &[u64], arm: impl Fn(u64) -> Arm<B>, body: fn(&Arm<B>) -> Transcript) {
    let arms: Vec<_> = orders.iter().map(|&seed| arm(seed)).collect();
    agree(&arms.iter().collect::<Vec<_>>(), body);
}

macro_rules! tests {
    (
        of_all_arms { $($of_all:ident: $every:path;)* }
        of_one_arm { $($of_one:ident: $one:path;)* }
        of_groups { $($of_groups:ident: $by_groups:path;)* }
        of_one_in_groups { $($of_one_in_groups:ident: $one_by_groups:path;)* }
    ) => {
        tests!(fp32_in_warps_of_32, Fp32, 32, NUMBERED_AND_RANDOM, $($of_all: $every;)* $($of_groups: $by_groups;)*);
        tests!(bf16_in_warps_of_64, Bf16, 64, TWO_RANDOM, $($of_all: $every;)* $($of_groups: $by_groups;)*);
        mod bf16_in_groups {
            use super::*;
            $(
                #[test]
                fn $of_groups() {
                    agree_in(NUMBERED_AND_RANDOM, groups, $by_groups);
                }
            )*
        }
        tests!(fp32, Fp32, $($of_one: $one;)* $($of_one_in_groups: $one_by_groups;)*);
        tests!(bf16, Bf16, $($of_one: $one;)* $($of_one_in_groups: $one_by_groups;)*);
    };
    ($module:ident, $precision:ty, $warp:literal, $orders:ident, $($test:ident: $body:path;)*) => {
        mod $module {
            use super::*;
            $(
                #[test]
                fn $test() {
                    agree_in($orders, |seed| arm::<$precision>($warp, seed), $body);
                }
            )*
        }
    };
    ($module:ident, $precision:ty, $($test:ident: $body:path;)*) => {
        mod $module {
            use super::*;
            $(
                #[test]
                fn $test() {
                    $body(&arm::<$precision>(32, SEEDS[1]));
                }
            )*
        }
    };
}

every_body!(tests);

/// A device whose queues run when the schedule chooses.
fn scheduled<P: Precision>(schedule: &Arc<Schedule>) -> Gpu<Emulator, P> {
    let emulator = Emulator::new(EmulatorSettings { warp: 32, seed: SEEDS[1] }).unwrap();
    Gpu::new(emulator.with_schedule(schedule))
}

/// Results with every step run at once equal those with steps that run only when the host waits for
/// them.
#[test]
fn what_runs_later_gives_the_same() {
    use bodies::memory;
    for seed in 0..8 {
        let backend = scheduled::<Bf16>(&Schedule::new(seed));
        let arm = Arm::new(format!("a schedule of seed {seed}"), backend);
        memory::buffers_hold_what_is_written(&arm);
        memory::pinned_memory_holds_what_is_copied(&arm);
        memory::streams_wait_for_each_other(&arm);
        memory::events_complete(&arm);
        memory::rounded_copies_follow_their_masters(&arm);
        bodies::graphs::repeat_what_was_recorded(&arm);
        bodies::graphs::keep_what_was_dropped(&arm);
    }
    let at_once = arm::<Bf16>(32, SEEDS[1]);
    let later = Arm::new("a schedule", scheduled(&Schedule::new(0)));
    for body in [bodies::cross_entropy::agrees, bodies::gradient_sums::sums_of_squares_agree] {
        agree(&[&at_once, &later], body);
    }
}

/// Two devices share memory ordered by events alone; without the wait for one event, some order shows the error.
#[test]
fn devices_wait_for_each_other() {
    let pair = |seed, waits| {
        let schedule = Schedule::new(seed);
        let devices: [Gpu<Emulator, Fp32>; 2] = std::array::from_fn(|_| scheduled(&schedule));
        let [found, expected] = handed_on(devices.each_ref(), |stream, event| {
            if waits {
                devices[0].wait_for(stream, event).unwrap();
            }
        });
        found == expected
    };
    assert!((0..20).all(|seed| pair(seed, true)));
    let lucky = (0..20).filter(|&seed| pair(seed, false)).count();
    assert!(lucky < 20, "a missing wait must show in some order");
}

/// Algorithms that must not be chosen for a product are passed over.
mod algorithms_of_a_library {
    use super::*;

    macro_rules! rules {
        ($($rule:ident)*) => {
            $(
                #[test]
                fn $rule() {
                    algorithms::$rule(&arm::<Fp32>(32, SEEDS[0]));
                    algorithms::$rule(&arm::<Bf16>(32, SEEDS[0]));
                }
            )*
        };
    }

    algorithms::every_rule!(rules);
}

/// The memory that a stream keeps after `run`.
fn memory_kept<P: Precision<Activation: Number>>(
    arm: &Arm<Gpu<Emulator, P>>,
    run: impl FnOnce(&mut Device<'_, Gpu<Emulator, P>>),
) -> usize {
    let mut device = Device::new(arm);
    let free = || arm.backend.free_memory_bytes().unwrap().unwrap();
    let before = free();
    run(&mut device);
    before - free()
}

/// The scratch memory of attention is the stated one, with groups of warps and without.
#[test]
fn attention_takes_the_scratch_memory_that_it_says() {
    fn check<P: Precision<Activation: Number>>(arm: &Arm<Gpu<Emulator, P>>) {
        // A count of the forward pass; and memory is allocated in multiples of 256 bytes.
        const BESIDE: usize = 512;
        let mut inputs = Inputs::new(17);
        for (rows, heads) in [([2, 150], [3, 64]), ([1, 300], [2, 100])] {
            let shape = attention_shape(rows, heads, 0.1, None);
            let case = AttentionCase::new::<P::Activation>(&mut inputs, shape);
            let found = memory_kept(arm, |device| {
                attention_case::run(device, "scratch", &case, shape);
            });
            let said = arm.backend.attention_scratch_bytes(shape);
            assert!((said..=said + BESIDE).contains(&found), "{}: {found}, said {said}", arm.name);
        }
    }
    check(&arm::<Fp32>(32, SEEDS[0]));
    check(&arm::<Bf16>(64, SEEDS[0]));
    check(&groups(SEEDS[0]));
}

/// So is the scratch memory of the scan, for sixteen states and others, except for the values carried between segments.
#[test]
fn the_scan_takes_about_the_scratch_memory_that_it_says() {
    fn check<P: Precision<Activation: Number>>(arm: &Arm<Gpu<Emulator, P>>) {
        let mut inputs = Inputs::new(18);
        for [samples, positions, channels, states] in [[2, 200, 96, 16], [1, 300, 40, 5]] {
            let sequences = SequenceShape::new(samples, positions).unwrap();
            let shape = ScanShape::new(sequences, 1, channels, states).unwrap();
            let case = ScanCase::new::<P::Activation>(&mut inputs, shape, Regime::Mild);
            let found = memory_kept(arm, |device| {
                selective_scan::run(device, "scratch", &case, shape, Regated::Asked);
            });
            let said = arm.backend.selective_scan_scratch_bytes(shape);
            assert!((said..said + said / 4).contains(&found), "{}: {found}, said {said}", arm.name);
        }
    }
    check(&arm::<Fp32>(32, SEEDS[0]));
    check(&arm::<Bf16>(64, SEEDS[0]));
}

/// So is the scratch memory of the scan of heads, for whole heads and for heads in parts.
#[test]
fn the_scan_of_heads_takes_the_scratch_memory_that_it_says() {
    fn check<P: Precision<Activation: Number>>(arm: &Arm<Gpu<Emulator, P>>) {
        // Each of two slots is allocated in multiples of 256 bytes.
        const BESIDE: usize = 512;
        let mut inputs = Inputs::new(19);
        for heads in [[3, 8, 1, 5], [2, 70, 2, 9], [1, 40, 1, 200]] {
            let shape = head_scan_case::shape_of([2, 40], 1, heads);
            let case = HeadScanCase::new::<P::Activation>(&mut inputs, shape, Regime::Mild);
            let found = memory_kept(arm, |device| {
                head_scan_case::run(device, "scratch", &case, shape);
            });
            let said = arm.backend.head_scan_scratch_bytes(shape);
            assert!((said..=said + BESIDE).contains(&found), "{}: {found}, said {said}", arm.name);
        }
    }
    check(&arm::<Fp32>(32, SEEDS[0]));
    check(&arm::<Bf16>(64, SEEDS[0]));
}

/// So is the scratch memory of gradients of weights.
#[test]
fn weight_gradients_take_the_scratch_memory_that_they_say() {
    fn check<P: Precision<Activation: Number>>(arm: &Arm<Gpu<Emulator, P>>) {
        // Memory is allocated in multiples of 256 bytes.
        const BESIDE: usize = 256;
        for (weight, rows, rows_per_grain) in [([3, 8], 10, 10), ([5, 7], 9000, 4500)] {
            let grains = GrainRows::new(rows, rows_per_grain).unwrap();
            let found = memory_kept(arm, |device| {
                let [m, k] = weight;
                let (backend, stream) = (&arm.backend, &mut device.stream);
                let [grad_out, input] =
                    [m, k].map(|columns| backend.allocate(stream, rows * columns).unwrap());
                let mut lane = backend.allocate(stream, m * k).unwrap();
                let lane = SliceMut::all(&mut lane).matrix(m, k).unwrap();
                let grad_out = Slice::all(&grad_out).matrix(rows, m).unwrap();
                let input = Slice::all(&input).matrix(rows, k).unwrap();
                backend.weight_gradient_add(stream, lane, grad_out, input, grains).unwrap();
            });
            let said = arm.backend.weight_gradient_scratch_bytes(weight, grains);
            assert!((said..said + BESIDE).contains(&found), "{}: {found}, said {said}", arm.name);
        }
    }
    check(&arm::<Fp32>(32, SEEDS[0]));
    check(&arm::<Bf16>(64, SEEDS[0]));
}

#[test]
fn every_source_compiles() {
    arm::<Fp32>(32, SEEDS[0]).backend.compile_all().unwrap();
    arm::<Bf16>(64, SEEDS[0]).backend.compile_all().unwrap();
    groups(SEEDS[0]).backend.compile_all().unwrap();
}
