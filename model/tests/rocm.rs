//! Every test body of the model through HIP, in bf16 on a device in waves of 64 with hipBLASLt. (Kernels are tested there in both
//! precisions, and the model on the emulator too.)
//!
//! Without an AMD GPU the libraries of HIP are those of `kernels/tests/hip_runtime`. With
//! `TIDEMILL_TEST_BACKEND=rocm` they are the machine's own, and its first device runs the bodies.

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
            fn $test() {
                $body(&ARM);
            }
        )*
    };
}

every_body!(tests);
