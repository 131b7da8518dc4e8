//! Generation: prompts in, new tokens out.
//!
//! [`Sequences`] holds the state of a batch of sequences and advances it; [`Sampler`] chooses from
//! logits; [`generate`] and [`generate_batch`] do both until an answer ends. [`Incremental`] is
//! what a block must implement for generation.

mod sampling;
mod sequences;
mod write;

pub use sampling::{Sampler, SamplingSettings};
pub use sequences::Sequences;
pub(crate) use sequences::table_rows;
use serde::{Deserialize, Serialize};
pub use write::{Prompt, Written, generate, generate_batch};

pub use crate::block::incremental::{
    Capacity, Incremental, PIECE_POSITIONS, Piece, PiecePass, adopt_row, keep_rows,
};

/// How many tokens are written, and how they are chosen.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct GenerationSettings {
    /// The most new tokens.
    pub max_new_tokens: usize,
    /// The token that ends an answer, usually the end of a document. The returned tokens include
    /// it, as in transformers.
    pub stop_token: Option<u32>,
    /// How each token is chosen.
    pub sampling: SamplingSettings,
}

impl Default for GenerationSettings {
    fn default() -> Self {
        Self { max_new_tokens: 128, stop_token: None, sampling: SamplingSettings::default() }
    }
}
