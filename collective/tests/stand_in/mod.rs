//! The library that stands in for NCCL on emulated devices.

use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;

use tidemill_kernels::gpu::collectives::CollectiveLibrary;

/// The library, built once for a test program.
pub fn library() -> CollectiveLibrary {
    static BUILT: OnceLock<CollectiveLibrary> = OnceLock::new();
    let library = BUILT.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        let source =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../collective/tests/stand_in/nccl.cpp");
        let path = folder.path().join("stand_in.so");
        let built = Command::new("g++")
            .args(["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-o"])
            .args([&path, &source])
            .output()
            .unwrap();
        assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
        // It stays when its file is gone.
        CollectiveLibrary::open(path).unwrap()
    });
    library.clone()
}
