//! Compiles sources to machine code of the present device, with hiprtc.

use std::sync::OnceLock;

use super::{BACKEND, Hip};
use crate::error::Result;
use crate::gpu::source::{Source, SourceOptions};
use crate::gpu::vendor::compiler::{Compiler, Names};
use crate::gpu::vendor::library::{OpenLibrary, once};

/// hiprtc, once it is needed. Before HIP 6 it is part of the runtime's own library.
///
/// # Errors
/// A library that is not there, or lacks a function.
pub(super) fn compiler() -> Result<&'static Compiler> {
    static COMPILER: OnceLock<Compiler> = OnceLock::new();
    once(&COMPILER, || {
        let hip = Hip::get()?;
        let own = format!("libhiprtc{}", hip.suffix);
        let runtime = format!("libamdhip64{}", hip.suffix);
        let names = [own.as_str(), "libhiprtc.so", runtime.as_str()];
        find(OpenLibrary::first_of(BACKEND, "AMD's run-time compiler", &names)?)
    })
}

/// hiprtc in `library`.
///
/// # Errors
/// The first function that the library lacks.
pub(super) fn find(library: OpenLibrary) -> Result<Compiler> {
    const NAMES: Names = Names { prefix: "hiprtc", image: "Code", extension: "hsaco" };
    Compiler::find(library, BACKEND, &NAMES)
}

/// The code object of `source` for `architecture`, which the compiler knows.
pub(super) fn code_object(
    source: &'static Source,
    options: SourceOptions,
    architecture: &str,
) -> Result<Vec<u8>> {
    let compiler = compiler()?;
    let version = format!("hiprtc {} of HIP {}", compiler.version()?, Hip::get()?.version);
    compiler.cached(
        source,
        architecture,
        &arguments(source, options, architecture),
        &version,
        || Ok(()),
    )
}

/// The arguments of hiprtc. Contraction is off, since kernels write their fused multiply-adds
/// explicitly.
fn arguments(source: &Source, options: SourceOptions, architecture: &str) -> Vec<String> {
    let mut arguments = vec![
        format!("--offload-arch={architecture}"),
        "-O3".to_owned(),
        "-std=c++17".to_owned(),
        "-ffp-contract=off".to_owned(),
    ];
    arguments.extend(source.arguments(options));
    arguments
}
