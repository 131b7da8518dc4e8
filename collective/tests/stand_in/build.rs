//! How the library that stands in for a vendor's is built.

use std::path::Path;
use std::process::Command;

use tidemill_kernels::gpu::collectives::CollectiveLibrary;

/// Builds the library as `name` with more arguments of the compiler, and opens it: it stays when its file is gone.
pub fn opened(name: &str, more: &[String]) -> CollectiveLibrary {
    let folder = tempfile::tempdir().unwrap();
    let source =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../collective/tests/stand_in/nccl.cpp");
    let path = folder.path().join(name);
    let built = Command::new("g++")
        .args(["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-o"])
        .args([&path, &source])
        .args(more)
        .output()
        .unwrap();
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    CollectiveLibrary::open(path).unwrap()
}
