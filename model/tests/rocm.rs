//! Test bodies of the model through HIP, in bf16 on a device in waves of 64 with hipBLASLt.
//!
//! Without an AMD GPU the libraries of HIP are those of `kernels/tests/hip_runtime`, and those bodies run that use every kind of
//! kernel once: all of them take as long as many other tests together, and run on the emulator without HIP. With
//! `TIDEMILL_TEST_BACKEND=rocm` the libraries are the machine's own, and `--include-ignored` runs all bodies on its first device.

mod bodies;
#[path = "../../tests/support/hip_runtime.rs"]
mod hip_runtime;
#[path = "../../tests/support/loaded_hip.rs"]
mod loaded_hip;
#[path = "../../tests/support/tested_backend.rs"]
mod tested_backend;

use std::sync::LazyLock;

use bodies::arm::{Arm, Sizes};
use bodies::every_body;
use tidemill_kernels::gpu::Installed;
use tidemill_kernels::{Bf16, Gpu, Rocm};

/// One for all tests, so that the matrix library's algorithms are chosen once. The first emulated device is in waves of 64.
static ARM: LazyLock<Arm<Gpu<Rocm, Bf16>>> = LazyLock::new(|| {
    loaded_hip::load();
    let backend = Gpu::new(Rocm::open(0).unwrap());
    Arm { name: "rocm".to_owned(), backend, sizes: Sizes::Small }
});

macro_rules! tests {
    ($($test:ident: $body:path;)*) => {
        $(
            #[test]
            #[ignore = "takes long on an emulated device; for a machine with an AMD GPU"]
            fn $test() {
                $body(&ARM);
            }
        )*
    };
}

mod all {
    use super::*;

    every_body!(tests);
}

#[test]
fn forward_and_backward_passes_agree() {
    bodies::gradients::agree_with_the_cpu(&ARM);
    bodies::gradients::attention_agrees_with_the_cpu(&ARM);
    bodies::grains::microbatches_change_no_bit(&ARM);
    bodies::contract::blocks_are_finished_backwards(&ARM);
}

#[test]
fn updates_agree() {
    bodies::training::six_steps(&ARM);
}

#[test]
fn scores_and_tokens_agree() {
    bodies::scores::scores_are_losses(&ARM);
    bodies::transformers::log_probabilities(&ARM);
    bodies::transformers::greedy_tokens(&ARM);
    bodies::generation::draws_in_doubt_are_the_hosts(&ARM);
}
