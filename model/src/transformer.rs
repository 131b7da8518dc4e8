//! The block of a pre-norm transformer (Vaswani et al., 2017), as MPT, GPT-Neo, Llama and hybrids use it.
//!
//! [`block`] says what it computes and keeps, [`query_key_value`] has the steps between the
//! projections and attention, [`query_key_norms`] the norms among them, [`slopes`] the slopes of ALiBi, [`rotary`] the angles of rotary
//! positions, [`mlp`] the part after attention.

mod backward;
pub mod block;
pub(crate) mod forward;
pub mod generation;
pub mod mlp;
pub mod query_key_norms;
pub mod query_key_value;
pub mod rotary;
pub mod slopes;

pub use block::{Attention, TransformerBlock};
pub use mlp::{Activation, Mlp, MlpBackward};
pub use query_key_norms::{QueryKeyNorms, QueryKeyNormsScratch, QueryKeyPass};
pub use query_key_value::Rows;
pub use rotary::{RopeScaling, Rotary};
pub use slopes::alibi_slopes;
