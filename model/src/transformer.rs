//! The block of a pre-norm transformer (Vaswani et al., 2017), as MPT, GPT-Neo and hybrids use it.
//!
//! [`block`] says what it computes and keeps, [`query_key_value`] what stands between the projections and attention,
//! [`slopes`] what ALiBi takes off a score.

mod backward;
pub mod block;
pub(crate) mod forward;
pub mod generation;
pub mod query_key_value;
pub mod slopes;

pub use block::{Attention, TransformerBlock};
pub use query_key_value::QueryKeyNorms;
pub use slopes::alibi_slopes;
