//! The library that stands in for NCCL on emulated devices.

mod build;

use std::sync::OnceLock;

use tidemill_kernels::gpu::collectives::CollectiveLibrary;

/// The library, built once for a test program.
pub fn library() -> CollectiveLibrary {
    static BUILT: OnceLock<CollectiveLibrary> = OnceLock::new();
    BUILT.get_or_init(|| build::opened("stand_in.so", &[])).clone()
}
