//! Compiles sources to machine code of the present device, with NVRTC.

use std::ffi::c_int;
use std::sync::OnceLock;

use super::BACKEND;
use crate::error::{KernelError, Result};
use crate::gpu::source::{Source, SourceOptions};
use crate::gpu::vendor::compiler::{Answer, Compiler, Names};
use crate::gpu::vendor::library::{OpenLibrary, once};

/// NVRTC, once it is needed.
///
/// # Errors
/// A library that is not there, or lacks a function.
pub(super) fn compiler() -> Result<&'static Compiler> {
    static COMPILER: OnceLock<Compiler> = OnceLock::new();
    const NAMES: Names = Names { prefix: "nvrtc", image: "CUBIN", extension: "cubin" };
    once(&COMPILER, || {
        let names = ["libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so.11"];
        let library = OpenLibrary::first_of(BACKEND, "NVIDIA's run-time compiler", &names)?;
        Compiler::find(library, BACKEND, &NAMES)
    })
}

/// The machine code of `source` for `architecture`.
pub(super) fn cubin(
    source: &'static Source,
    options: SourceOptions,
    device: &str,
    architecture: &str,
) -> Result<Vec<u8>> {
    let compiler = compiler()?;
    let version = compiler.version()?;
    let arguments = arguments(source, options, architecture);
    compiler.cached(source, architecture, &arguments, &format!("NVRTC {version}"), || {
        check_architecture(compiler, device, architecture, &version)
    })
}

/// The arguments of NVRTC. Contraction is off, since kernels write their fused multiply-adds explicitly.
fn arguments(source: &Source, options: SourceOptions, architecture: &str) -> Vec<String> {
    let mut arguments = vec![
        format!("--gpu-architecture={architecture}"),
        "--std=c++17".to_owned(),
        "--fmad=false".to_owned(),
        "--device-as-default-execution-space".to_owned(),
    ];
    arguments.extend(source.arguments(options));
    arguments
}

/// Older compilers do not know newer devices.
fn check_architecture(
    compiler: &Compiler,
    device: &str,
    architecture: &str,
    version: &str,
) -> Result<()> {
    const ATTEMPTED: &str = "asking for architectures";
    let mut count: c_int = 0;
    // SAFETY: NVRTC documents both functions with this type. The first says how many numbers the second writes.
    let known = unsafe {
        let ask = |function| -> Result<unsafe extern "C" fn(*mut c_int) -> Answer> {
            compiler.library().function(function)
        };
        compiler.answered(ATTEMPTED, ask("nvrtcGetNumSupportedArchs")?(&raw mut count))?;
        let mut known = vec![0; usize::try_from(count).unwrap_or(0)];
        compiler.answered(ATTEMPTED, ask("nvrtcGetSupportedArchs")?(known.as_mut_ptr()))?;
        known
    };
    check_known(&known, device, architecture, version)
}

/// `known` are architectures as NVRTC numbers them, the oldest first.
fn check_known(known: &[i32], device: &str, architecture: &str, version: &str) -> Result<()> {
    let number: String = architecture.chars().filter(char::is_ascii_digit).collect();
    if known.iter().any(|known| known.to_string() == number) {
        return Ok(());
    }
    let expected = match (known.first(), known.last()) {
        (Some(first), Some(last)) => {
            format!("one from sm_{first} to sm_{last}, which NVRTC {version} compiles for")
        }
        _ => format!("one that NVRTC {version} compiles for"),
    };
    let (device, found) = (device.to_owned(), architecture.to_owned());
    Err(KernelError::UnsupportedArchitecture { device, found, expected })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_the_compiler_does_not_know_is_named_with_what_it_knows() {
        let known = [75, 80, 90, 100];
        for architecture in ["sm_80", "sm_90a", "sm_100a"] {
            check_known(&known, "a GPU", architecture, "12.9").unwrap();
        }
        let error = check_known(&known, "a GPU", "sm_120a", "12.9").unwrap_err();
        let expected =
            "a GPU is sm_120a, expected one from sm_75 to sm_100, which NVRTC 12.9 compiles for";
        assert_eq!(error.to_string(), expected);
    }
}
