//! A small model of two segments, and the parts of its checkpoints.

use std::ffi::OsString;
use std::path::Path;
use std::sync::Arc;

use tidemill_model::hugging_face::FILE_BYTES;
use tidemill_model::optimizer::StateSpec;
use tidemill_model::{Decay, Layout};

use super::file_plan::FilePlan;
use super::write::CheckpointFiles;

/// Two states, as AdamW has them.
pub const STATES: [StateSpec; 2] =
    [StateSpec::of_elements("exp_avg"), StateSpec::of_elements("exp_avg_sq")];

pub fn layout() -> Arc<Layout> {
    let mut layout = Layout::new();
    layout.segment("embedding");
    layout.tensor("table", &[5, 3], Decay::Decayed, 8);
    layout.segment("layers.0");
    layout.tensor("vector", &[7], Decay::Exempt, 1);
    Arc::new(layout)
}

/// Values that tell elements apart, and arenas of other seeds; padding is zero.
pub fn arena(layout: &Layout, seed: f32) -> Vec<f32> {
    let mut arena = vec![0.0; layout.parameter_elements()];
    for tensor in layout.tensors() {
        for index in tensor.range() {
            arena[index] = seed + index as f32;
        }
    }
    arena
}

pub fn files(layout: &Arc<Layout>) -> CheckpointFiles {
    files_of(layout, FILE_BYTES)
}

/// One file of the model and one of the optimizer; then one of each segment.
pub const FILE_SIZES: [u64; 2] = [FILE_BYTES, 64];

pub fn files_of(layout: &Arc<Layout>, file_bytes: u64) -> CheckpointFiles {
    CheckpointFiles {
        plan: Arc::new(FilePlan::new(layout, &STATES, file_bytes)),
        config: serde_json::json!({"model_type": "test"}),
        tokenizer: Some(Arc::from(&b"{}"[..])),
        keep: 2,
    }
}

/// The files of a folder, by their names.
pub fn bytes(folder: &Path) -> Vec<(OsString, Vec<u8>)> {
    let mut files: Vec<_> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap())
        .map(|entry| (entry.file_name(), std::fs::read(entry.path()).unwrap()))
        .collect();
    files.sort();
    files
}
