//! Every test body of the model through HIP, in fp32. (Kernels are tested there in both precisions and both widths of waves.)
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

use std::sync::LazyLock;

use bodies::arm::{Arm, Sizes};
use bodies::every_body;
use tidemill_kernels::gpu::Installed;
use tidemill_kernels::{Fp32, Gpu, Rocm};

/// One for all: what the matrix library is pinned to is found once.
static ARM: LazyLock<Arm<Gpu<Rocm, Fp32>>> = LazyLock::new(|| {
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
