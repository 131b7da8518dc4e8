//! What is trained: models as ordered lists of blocks over one flat arena of parameters.
//!
//! - [`trainable`] is the contract with the training graph; a user's own model implements
//!   [`Trainable`].
//! - [`layout`] says where parameters and gradients live: tensors, segments, blocks, uses.
//! - [`language_model`] is what families share: an embedding, a list of [`block`]s, a [`head`], losses grain by
//!   grain. A family is a file that lists [`layer_block`]s: [`mamba`].
//! - [`settings`] and [`preset`] say what the `[model]` table of a run means; [`optimizer`] and [`schedule`] are the
//!   tables of the same names.
//! - [`hugging_face`] reads and writes models as transformers does; [`generation`] and [`score`] use them.

#![forbid(unsafe_code)]

pub mod block;
pub mod embedding;
pub mod error;
pub mod generation;
pub mod head;
pub mod hugging_face;
pub mod initialization;
pub mod language_model;
pub mod layer_block;
pub mod layout;
pub mod mamba;
pub mod norm;
pub mod optimizer;
pub mod parameter_list;
pub mod preset;
pub mod schedule;
pub mod score;
pub mod settings;
pub mod trainable;

pub use error::{ModelError, Result};
pub use language_model::LanguageModel;
pub use layer_block::LayerBlock;
pub use layout::{Decay, Layout, Segment, Tensor, Use};
pub use mamba::{Mamba, MambaConfig};
pub use settings::{ModelKind, ModelSettings, ResolvedModel};
pub use trainable::{
    Device, GradientSink, GrainLoss, Lease, Microbatch, MicrobatchShape, Parameters, Trainable,
};
