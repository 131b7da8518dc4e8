//! Checkpoints: a run's state in the Hugging Face layout, complete or absent.
//!
//! A checkpoint is `config.json`, `model.safetensors` (the fp32 masters) and, where the data set has one,
//! `tokenizer.json`, as `transformers` opens them; and beside these `optimizer.safetensors` and `trainer.json`. Larger models
//! are several files with an index, also as `transformers` has them.
//! Tensors are logical, never per worker, and the bytes depend only on the state.
//!
//! [`CheckpointWriter`] receives chunks of arenas in any order and writes them in place, so that it never
//! holds a model; it writes aside, syncs, and renames. [`Checkpoint`] verifies checksums before anything is
//! believed, and [`StateFiles`] while it reads the state that a run goes on from.

mod file_plan;
#[cfg(test)]
mod fixtures;
mod folder;
mod local_copy;
mod read;
mod remote;
mod share;
mod side_by_side;
mod state_files;
mod tensor_writer;
mod trainer_state;
mod write;

pub use file_plan::{FilePlan, FileShare};
pub use folder::{
    CHECKPOINTS_FOLDER, CheckpointEntry, checkpoint_name, checkpoint_name_of, checkpoint_path,
    latest, list, retain, step_of, sweep,
};
pub use local_copy::{LocalCopy, Wanted, model_folder};
pub use read::Checkpoint;
pub use remote::{RUN_FILE, RemoteCheckpoints, RunRecord};
pub use share::ShareWriter;
pub use state_files::{RestoredState, StateFiles};
pub use trainer_state::{TRAINER_FILE, TrainerState, checksum, checksum_file, device_keys};
pub use write::{CheckpointFiles, CheckpointWriter};

#[cfg(test)]
pub(crate) use trainer_state::tests::state as state_for_tests;
