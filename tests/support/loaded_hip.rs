//! The ROCm of tests, in this process.

use std::sync::OnceLock;

use super::hip_runtime::{LIBRARIES, folder};
use super::tested_backend::BACKEND_VARIABLE;

/// Whether the environment asks for the machine's own libraries.
pub fn is_the_machines() -> bool {
    std::env::var(BACKEND_VARIABLE).is_ok_and(|backend| backend == "rocm")
}

/// Opens the libraries in this process, so that their names find them; does nothing if the
/// environment asks for the machine's own.
pub fn load() {
    static LOADED: OnceLock<Vec<libloading::Library>> = OnceLock::new();
    LOADED.get_or_init(|| {
        if is_the_machines() {
            return Vec::new();
        }
        // SAFETY: the libraries are those that were built here, and opening them runs no code but the C++ library's.
        let open = |(library, ..): &(&str, _, _)| unsafe {
            libloading::Library::new(folder().join(library)).unwrap()
        };
        LIBRARIES.iter().map(open).collect()
    });
}
