//! Every test body of the model through HIP, in both precisions.
//!
//! Without an AMD GPU the libraries of HIP are those of `kernels/tests/hip_runtime`; `TIDEMILL_TEST_BACKEND=rocm` asks for the
//! machine's own.

mod bodies;
#[path = "../../tests/support/hip_runtime.rs"]
mod hip_runtime;
#[path = "../../tests/support/loaded_hip.rs"]
mod loaded_hip;
#[path = "../../tests/support/tested_backend.rs"]
mod tested_backend;

use bodies::arm::{Arm, Sizes};
use bodies::every_body;
use tidemill_kernels::gpu::{Installed, Precision};
use tidemill_kernels::{Bf16, Fp32, Gpu, Rocm};

/// The emulated devices.
const IN_WAVES_OF_64: usize = 0;
const IN_WAVES_OF_32: usize = 2;

fn arm<P: Precision>(ordinal: usize) -> Arm<Gpu<Rocm, P>> {
    loaded_hip::load();
    let backend = Gpu::new(Rocm::open(ordinal).unwrap());
    Arm { name: format!("rocm, device {ordinal}"), backend, sizes: Sizes::Small }
}

macro_rules! tests {
    ($($test:ident: $body:path;)*) => {
        tests!(fp32, Fp32, IN_WAVES_OF_64, $($test: $body;)*);
        tests!(bf16, Bf16, IN_WAVES_OF_32, $($test: $body;)*);
    };
    ($module:ident, $precision:ty, $ordinal:expr, $($test:ident: $body:path;)*) => {
        mod $module {
            use super::*;
            $(
                #[test]
                fn $test() {
                    $body(&arm::<$precision>($ordinal));
                }
            )*
        }
    };
}

every_body!(tests);
