//! The checkpoints under `tests/fixtures/transformers`, made by `generate.py` there.

use std::path::{Path, PathBuf};

/// The folder of a checkpoint: where this was built, or below the working folder where it has been carried to another
/// machine.
pub fn folder(name: &str) -> PathBuf {
    let built = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/transformers");
    let here = if built.exists() { built } else { PathBuf::from("tests/fixtures/transformers") };
    here.join(name)
}
