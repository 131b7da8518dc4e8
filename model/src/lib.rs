//! The models that are trained: ordered lists of blocks over one flat arena of parameters.
//!
//! - [`trainable`] is the contract with the training graph; a user's own model implements
//!   [`Trainable`], for a [`sample`](mod@sample) of its own kind;
//!   [`tokenized`] gives a model of tokens samples of another type.
//! - [`layout`] says where parameters and gradients live: tensors, segments, blocks, uses. A model
//!   gets them block by block as a [`lease`] from a [`parameter_source`]; [`parameters`] are the
//!   ones that a device holds.
//! - [`language_model`] holds what families share: an embedding, a list of [`block`](mod@block)s, a
//!   [`head`], losses grain by grain. A kind of block is a folder, [`mamba`](mod@mamba), [`mamba2`]
//!   or [`transformer`], or one of a crate that uses this one. A family is a config that
//!   lists blocks ([`family`]): [`mamba`](mod@mamba), [`mamba2`], [`mpt`], [`gpt_neo`], [`llama`],
//!   [`hybrid`]. A [`model_config`] is the config of any of them, a [`blueprint`] its model before it
//!   is placed on a backend.
//! - [`settings`] and [`preset`] define the `[model]` table of a run; [`optimizer`] and
//!   [`schedule`] define the tables of the same names.
//! - [`hugging_face`] reads and writes models in the format of transformers; [`generation`] and
//!   [`score`] run them.

#![forbid(unsafe_code)]

#[cfg(feature = "ndarray")]
pub mod arrays;
pub mod block;
pub mod blueprint;
pub mod embedding;
pub mod error;
pub mod family;
pub mod generation;
pub mod gpt_neo;
pub mod head;
pub mod held;
pub mod hugging_face;
pub mod hybrid;
pub mod initialization;
pub mod language_model;
pub mod layout;
pub mod lease;
pub mod linear;
pub mod llama;
pub mod mamba;
pub mod mamba2;
pub mod model_config;
pub mod mpt;
pub mod norm;
pub mod optimizer;
pub mod parameter_list;
pub mod parameter_source;
pub mod parameters;
pub mod preset;
pub mod sample;
pub mod schedule;
pub mod score;
pub mod settings;
pub mod tokenized;
pub mod trainable;
pub mod transformer;

pub use block::{AnyBlock, Block};
pub use blueprint::Blueprint;
pub use error::{ModelError, Result};
pub use family::{Family, SpecialTokens};
pub use gpt_neo::GptNeoConfig;
pub use held::Held;
pub use hybrid::HybridConfig;
pub use language_model::{LanguageModel, Recompute};
pub use layout::{Decay, Direction, Layout, Passes, Reading, Segment, Tensor, Use};
pub use lease::{Lease, PackedTensor, Packing};
pub use llama::LlamaConfig;
pub use mamba::MambaConfig;
pub use mamba2::Mamba2Config;
pub use model_config::{ModelConfig, ModelKind};
pub use mpt::MptConfig;
pub use parameter_source::{BlockWalk, ParameterSource, WholeParameters};
pub use parameters::{JoinRoom, MasterPlace, Parameters};
pub use sample::{Microbatch, MicrobatchShape, Sample, Tokens, UNCOUNTED};
pub use settings::{ModelSettings, ResolvedModel};
pub use tokenized::{ToTokens, Tokenized};
pub use trainable::{Device, GradientSink, GrainLoss, Trainable};
