//! Writing on: prompts in, new tokens out.
//!
//! [`Sequences`] holds what a model remembers of a batch of sequences and moves it on; [`Sampler`] chooses from logits;
//! [`generate`] and [`generate_batch`] do both until enough has been written. What a block must be able to do for that is
//! [`Incremental`].

mod incremental;
mod sampling;
mod sequences;
mod write;

use serde::{Deserialize, Serialize};

pub use incremental::{Incremental, PIECE_POSITIONS, Piece, PiecePass, Room, adopt_row, keep_rows};
pub use sampling::{Sampler, SamplingSettings};
pub use sequences::Sequences;
pub(crate) use sequences::table_rows;
pub use write::{Prompt, Written, generate, generate_batch};

/// How much is written, and how.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct GenerationSettings {
    /// New tokens at most.
    pub max_new_tokens: usize,
    /// The token after which nothing more is written, usually the end of a document; it is part of what is
    /// returned, as in transformers.
    pub stop_token: Option<u32>,
    /// How each token is chosen.
    pub sampling: SamplingSettings,
}

impl Default for GenerationSettings {
    fn default() -> Self {
        Self { max_new_tokens: 128, stop_token: None, sampling: SamplingSettings::default() }
    }
}
