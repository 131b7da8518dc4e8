//! ROCm for tests, on machines without AMD GPUs: libraries that imitate HIP's runtime, hiprtc,
//! hipBLASLt and rocBLAS on the CPU.
//!
//! The host's `g++` builds them from `kernels/tests/hip_runtime`, once for each change of their
//! sources. The program opens them by AMD's names, as it opens AMD's. If the environment asks for
//! `rocm`, tests use the machine's own libraries instead.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The libraries, each after those that it needs: name, source, and the library that it is linked
/// to.
pub const LIBRARIES: [(&str, &str, Option<&str>); 4] = [
    ("libamdhip64.so.7", "runtime.cpp", None),
    ("libhiprtc.so.7", "hiprtc.cpp", None),
    ("libhipblaslt.so.1", "hipblaslt.cpp", Some("libamdhip64.so.7")),
    ("librocblas.so.5", "rocblas.cpp", Some("libamdhip64.so.7")),
];

/// The folder of the libraries, for `LD_LIBRARY_PATH` of a program that must find them.
pub fn folder() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let kernels = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().find_map(|folder| {
            let kernels = folder.join("kernels");
            kernels.join("tests/hip_runtime").is_dir().then_some(kernels)
        });
        let kernels = kernels.expect("the sources of the runtime");
        let sources = kernels.join("tests/hip_runtime");
        let emulator =
            ["emulator.h", "emulator_launch.cpp"].map(|file| kernels.join("gpu").join(file));
        let key = key(&sources, &emulator);
        let built = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("hip-{key}"));
        if !built.is_dir() {
            build(&sources, &emulator, &built);
        }
        built
    })
}

/// Depends on every source, and on what of the emulator is compiled with them.
fn key(sources: &Path, emulator: &[PathBuf]) -> String {
    let mut files: Vec<PathBuf> =
        std::fs::read_dir(sources).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    let mut hasher = DefaultHasher::new();
    files.push(PathBuf::from(file!()));
    files.extend_from_slice(emulator);
    for file in &files {
        (file.file_name(), std::fs::read(file).unwrap_or_default()).hash(&mut hasher);
    }
    format!("{:016x}", hasher.finish())
}

/// Built under another name and renamed, because other test programs may build too.
fn build(sources: &Path, [header, launcher]: &[PathBuf; 2], into: &Path) {
    let aside = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let compile = |command: &mut Command| {
        let built = command.output().expect("g++ is there");
        assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    };
    for warp in [32, 64] {
        let mut command = compiler();
        command.args(["-O2", "-c"]).arg(format!("-DWARP={warp}")).arg(launcher);
        compile(command.arg("-o").arg(aside.path().join(format!("{warp}.o"))));
    }
    for (library, source, needed) in LIBRARIES {
        let mut command = compiler();
        command
            .args(["-O3", "-shared"])
            .arg(format!("-DEMULATOR_HEADER=\"{}\"", header.display()))
            .arg(format!("-DEMULATOR_LAUNCHERS=\"{}\"", into.display()))
            .arg(format!("-Wl,-soname,{library}"))
            .arg(sources.join(source))
            .arg("-o")
            .arg(aside.path().join(library));
        if let Some(needed) = needed {
            command.arg("-L").arg(aside.path()).arg(format!("-l:{needed}"));
        }
        compile(&mut command);
    }
    // Another program has put the same folder there first.
    if std::fs::rename(aside.path(), into).is_ok() {
        let _ = aside.keep();
    }
    assert!(into.is_dir(), "the runtime for tests was not built");
}

fn compiler() -> Command {
    let mut command = Command::new("g++");
    command.args(["-std=c++20", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"]);
    command.args(["-fPIC", "-pthread", "-fvisibility=hidden"]);
    command
}
