//! Kernels that are broken on purpose: the emulator must detect it, or its other tests prove nothing.

use tidemill_kernels::emulator::{Emulator, EmulatorSettings, SourceChange};
use tidemill_kernels::gpu::{Driver, ElementKind, Launch, Source, SourceOptions, Start};
use tidemill_kernels::{KernelError, Result};

/// Sums of blocks of 256 numbers.
static SOURCE: Source = Source {
    name: "block_sums.cu",
    text: r#"
#include "dialect.h"
struct BlockSumsArguments {
    float* out;
    const float* in;
};
KERNEL(block_sums, 256, 1, BlockSumsArguments) {
    SHARED(float, partial);
    const u32 thread = threadIdx.x;
    float sum = warp_sum(arguments.in[blockIdx.x * 256u + thread]);
    if (thread % WARP == 0) partial[thread / WARP] = sum;
    __syncthreads();
    sum = thread < 256 / WARP ? partial[thread] : 0.0f;
    sum = warp_sum(sum);
    if (thread == 0) arguments.out[blockIdx.x] = sum;
}
"#,
    definitions: &[],
};

const BLOCKS: usize = 3;

/// The expected sums, of integers that fp32 holds exactly.
fn expected() -> Vec<f32> {
    (0..BLOCKS).map(|block| (block * 256..(block + 1) * 256).sum::<usize>() as f32).collect()
}

/// Both widths of warps, and several orders of threads.
fn every_setting() -> impl Iterator<Item = EmulatorSettings> {
    [32, 64].into_iter().flat_map(|warp| [0, 1, 2].map(|seed| EmulatorSettings { warp, seed }))
}

/// The source with its barrier replaced.
fn barrier_replaced(to: &'static str) -> Option<SourceChange> {
    Some(SourceChange { source: SOURCE.name, from: "__syncthreads();", to })
}

/// The sums that the kernel computes, with or without a change.
fn block_sums(settings: EmulatorSettings, change: Option<SourceChange>) -> Result<Vec<f32>> {
    let mut emulator = Emulator::new(settings)?;
    if let Some(change) = change {
        emulator = emulator.with_change(change);
    }
    let module = emulator.load(&SOURCE, SourceOptions { activation: ElementKind::F32 })?;
    let kernel = emulator.kernel(&module, "block_sums")?;
    let input: Vec<f32> = (0..BLOCKS * 256).map(|i| i as f32).collect();
    let mut queue = emulator.queue()?;
    let device_out = emulator.allocate(&mut queue, BLOCKS * 4)?;
    let device_in = emulator.allocate(&mut queue, input.len() * 4)?;
    emulator.upload(&mut queue, &device_in, 0, bytemuck::cast_slice(&input))?;
    let addresses = [Emulator::address(&device_out), Emulator::address(&device_in)];
    let grid = [BLOCKS as u32, 1, 1];
    let launch = Launch { grid, threads: 256, shared_bytes: 256, start: Start::Ordered };
    // SAFETY: the struct is two addresses, of memory for as many numbers as the kernel reaches.
    unsafe { emulator.launch(&mut queue, &kernel, launch, bytemuck::bytes_of(&addresses))? };
    let mut out = vec![0.0_f32; BLOCKS];
    emulator.download(&mut queue, bytemuck::cast_slice_mut(&mut out), &device_out, 0)?;
    Ok(out)
}

#[track_caller]
fn assert_error(settings: EmulatorSettings, change: Option<SourceChange>, part: &str) {
    match block_sums(settings, change) {
        Err(KernelError::Device { answer, .. }) => {
            assert!(answer.contains(part), "{settings:?}: {answer}");
            assert!(answer.contains("block_sums: block ("), "{settings:?}: {answer}");
        }
        other => panic!("{settings:?}: expected an error, found {other:?}"),
    }
}

#[test]
fn the_kernel_is_right_before_it_is_broken() {
    for settings in every_setting() {
        assert_eq!(block_sums(settings, None).unwrap(), expected(), "{settings:?}");
    }
}

#[test]
fn a_missing_barrier_shows_in_the_result() {
    for settings in every_setting() {
        let found = block_sums(settings, barrier_replaced("")).unwrap();
        assert_ne!(found, expected(), "{settings:?}");
    }
}

#[test]
fn a_barrier_that_some_threads_never_reach_is_an_error() {
    let change = barrier_replaced("if (thread % WARP < 16) warp_barrier(); else __syncthreads();");
    for settings in every_setting() {
        assert_error(settings, change, "a barrier that others never reach");
        // The abandoned fibers do no harm.
        assert_eq!(block_sums(settings, None).unwrap(), expected(), "{settings:?}");
    }
}

#[test]
fn threads_at_different_barriers_are_an_error() {
    let change = barrier_replaced("if (thread == 7) __syncthreads();\nelse __syncthreads();");
    for settings in every_setting() {
        assert_error(settings, change, "different barriers");
    }
}

#[test]
fn a_change_that_changes_nothing_is_an_error() {
    let change = SourceChange { source: SOURCE.name, from: "no such text", to: "" };
    let settings = EmulatorSettings { warp: 32, seed: 0 };
    assert!(matches!(block_sums(settings, Some(change)), Err(KernelError::Device { .. })));
}
