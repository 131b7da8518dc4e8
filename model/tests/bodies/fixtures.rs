//! The checkpoints under `tests/fixtures/transformers`, made by `generate.py` there.

use std::path::{Path, PathBuf};

/// The folder of a checkpoint: at the place where this was built, or below the working folder if it
/// was copied to another machine.
pub fn folder(name: &str) -> PathBuf {
    let built = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/transformers");
    let here = if built.exists() { built } else { PathBuf::from("tests/fixtures/transformers") };
    here.join(name)
}
