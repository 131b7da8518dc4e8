//! Every test body of the model through HIP: in fp32 on a device in waves of 64 with hipBLASLt, and in bf16 on one in waves of 32 with
//! rocBLAS. (Kernels are tested there in both precisions on both.)
//!
//! Without an AMD GPU the libraries of HIP are those of `kernels/tests/hip_runtime`. With
//! `TIDEMILL_TEST_BACKEND=rocm` they are the machine's own, and its first device runs both.

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
use tidemill_kernels::gpu::{Installed, Precision};
use tidemill_kernels::{Bf16, Fp32, Gpu, Rocm};

/// The emulated devices.
const IN_WAVES_OF_64: usize = 0;
const IN_WAVES_OF_32: usize = 2;

fn arm<P: Precision>(emulated: usize) -> Arm<Gpu<Rocm, P>> {
    loaded_hip::load();
    let ordinal = if loaded_hip::is_the_machines() { 0 } else { emulated };
    let backend = Gpu::new(Rocm::open(ordinal).unwrap());
    Arm { name: format!("rocm, device {ordinal}"), backend, sizes: Sizes::Small }
}

macro_rules! tests {
    ($($test:ident: $body:path;)*) => {
        tests!(fp32, Fp32, IN_WAVES_OF_64, $($test: $body;)*);
        tests!(bf16, Bf16, IN_WAVES_OF_32, $($test: $body;)*);
    };
    ($module:ident, $precision:ty, $device:expr, $($test:ident: $body:path;)*) => {
        mod $module {
            use super::*;

            /// One for all tests, so that the matrix library's algorithms are chosen once.
            static ARM: LazyLock<Arm<Gpu<Rocm, $precision>>> = LazyLock::new(|| arm($device));

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
