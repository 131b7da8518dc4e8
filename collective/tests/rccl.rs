//! Ranks of several processes on AMD GPUs, through HIP, whose bytes a library moves that stands in for RCCL and is found by its
//! name.

#[path = "stand_in/build.rs"]
mod build;
mod group;
#[path = "../../tests/support/hip_runtime.rs"]
mod hip_runtime;
#[path = "../../tests/support/loaded_hip.rs"]
mod loaded_hip;
#[path = "../../tests/support/tested_backend.rs"]
mod tested_backend;

use std::sync::OnceLock;

use group::Arm;
use tidemill_kernels::gpu::Installed;
use tidemill_kernels::gpu::collectives::{CollectiveLibrary, RCCL};
use tidemill_kernels::{Fp32, Gpu, Rocm, Runtime};

const ARM: Arm<Gpu<Rocm, Fp32>> = Arm {
    device: || {
        loaded_hip::load();
        Gpu::new(Rocm::open(0).unwrap())
    },
    library: || {
        load_stand_in();
        (ARM.device)().collective_library().unwrap()
    },
};

/// Opens the library once, so that its name finds it.
fn load_stand_in() {
    static BUILT: OnceLock<CollectiveLibrary> = OnceLock::new();
    BUILT.get_or_init(|| {
        // It is linked to the runtime.
        loaded_hip::load();
        let hip = hip_runtime::folder().display();
        let more = [
            "-DWITH_HIP".to_owned(),
            format!("-Wl,-soname,{RCCL}"),
            format!("-L{hip}"),
            "-l:libamdhip64.so.7".to_owned(),
        ];
        build::opened(RCCL, &more)
    });
}

group::every_body!();
