//! ROCm for tests, on machines without AMD GPUs: libraries that stand for HIP's runtime, hiprtc, hipBLASLt and rocBLAS, with the CPU
//! below.
//!
//! They are built from `kernels/tests/hip_runtime` by the host's `g++`, once for a change of their sources. The product opens them as
//! it opens AMD's, by their names. Where the environment asks for `rocm`, tests use what the machine has instead.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The libraries in the order in which they need each other: name, source, and the library that it is linked to.
pub const LIBRARIES: [(&str, &str, Option<&str>); 4] = [
    ("libamdhip64.so.7", "runtime.cpp", None),
    ("libhiprtc.so.7", "hiprtc.cpp", None),
    ("libhipblaslt.so.1", "hipblaslt.cpp", Some("libamdhip64.so.7")),
    ("librocblas.so.5", "rocblas.cpp", Some("libamdhip64.so.7")),
];

/// Where the libraries lie: what `LD_LIBRARY_PATH` names for a program that is to find them.
pub fn folder() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let kernels = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().find_map(|folder| {
            let kernels = folder.join("kernels");
            kernels.join("tests/hip_runtime").is_dir().then_some(kernels)
        });
        let kernels = kernels.expect("the sources of the runtime");
        let sources = kernels.join("tests/hip_runtime");
        let built = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("hip-{}", key(&sources)));
        if !built.is_dir() {
            build(&sources, &kernels.join("gpu/emulator.h"), &built);
        }
        built
    })
}

/// Follows from every source.
fn key(sources: &Path) -> String {
    let mut files: Vec<PathBuf> =
        std::fs::read_dir(sources).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    let mut hasher = DefaultHasher::new();
    files.push(PathBuf::from(file!()));
    for file in &files {
        (file.file_name(), std::fs::read(file).unwrap_or_default()).hash(&mut hasher);
    }
    format!("{:016x}", hasher.finish())
}

/// Builds aside and renames, because other test programs may build too.
fn build(sources: &Path, emulator: &Path, into: &Path) {
    let aside = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for (library, source, needed) in LIBRARIES {
        let mut command = Command::new("g++");
        command
            .args(["-std=c++20", "-O3", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"])
            .args(["-fPIC", "-shared", "-pthread", "-fvisibility=hidden"])
            .arg(format!("-DEMULATOR_HEADER=\"{}\"", emulator.display()))
            .arg(format!("-Wl,-soname,{library}"))
            .arg(sources.join(source))
            .arg("-o")
            .arg(aside.path().join(library));
        if let Some(needed) = needed {
            command.arg("-L").arg(aside.path()).arg(format!("-l:{needed}"));
        }
        let built = command.output().expect("g++ is there");
        assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    }
    // Another program that was faster has left the same there.
    if std::fs::rename(aside.path(), into).is_ok() {
        let _ = aside.keep();
    }
    assert!(into.is_dir(), "the runtime for tests was not built");
}
