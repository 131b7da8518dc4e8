//! A model of tokens over samples of another type.
//!
//! A model of tokens need not be given tokens: [`Tokenized`] trains any of them on samples that say
//! which tokens they are ([`ToTokens`]). The graph then carries those samples, and their sources and
//! the operators before training see nothing else.

use std::fmt::{self, Debug};
use std::marker::PhantomData;

use tidemill_kernels::Backend;

use crate::error::Result;
use crate::layout::Layout;
use crate::parameter_source::ParameterSource;
use crate::sample::{Microbatch, MicrobatchShape, Sample, Tokens};
use crate::trainable::{Device, GradientSink, GrainLoss, Trainable};

/// A sample that a model of tokens can read.
///
/// ```
/// # use tidemill_model::{Sample, Tokens};
/// # use tidemill_model::tokenized::ToTokens;
/// /// A text that is read letter by letter.
/// #[derive(Clone)]
/// struct Line(String);
///
/// impl Sample for Line {
///     fn positions(&self) -> usize {
///         self.0.len().saturating_sub(1)
///     }
/// }
///
/// impl ToTokens for Line {
///     fn to_tokens(&self) -> Tokens {
///         self.0.bytes().map(u32::from).collect()
///     }
/// }
/// assert_eq!(Line("ab".to_owned()).to_tokens(), [97, 98]);
/// ```
pub trait ToTokens: Sample {
    /// `tokens[t + 1]`, t being [`positions`](Sample::positions).
    fn to_tokens(&self) -> Tokens;
}

/// The model `M` of tokens, trained on samples of type `S`: to the bits of `M` on their tokens.
pub struct Tokenized<S, M> {
    model: M,
    sample: PhantomData<fn(&S)>,
}

impl<S, M> Tokenized<S, M> {
    /// `model`, to be trained on samples of type `S`.
    pub fn new(model: M) -> Self {
        Self { model, sample: PhantomData }
    }

    /// The model of tokens.
    pub fn model(&self) -> &M {
        &self.model
    }
}

impl<S, M: Debug> Debug for Tokenized<S, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Tokenized").field(&self.model).finish()
    }
}

/// Calls `work` with the tokens of a microbatch.
fn with_tokens<S: ToTokens, R>(
    microbatch: Microbatch<'_, S>,
    work: impl FnOnce(Microbatch<'_>) -> R,
) -> R {
    let Microbatch { samples, positions, samples_per_grain, document_end } = microbatch;
    let samples: Vec<Tokens> = samples.iter().map(S::to_tokens).collect();
    work(Microbatch { samples: &samples, positions, samples_per_grain, document_end })
}

impl<B, S, M> Trainable<B> for Tokenized<S, M>
where
    B: Backend,
    S: ToTokens,
    M: Trainable<B, Sample = Tokens>,
{
    type Sample = S;
    type Workspace = M::Workspace;

    fn layout(&self) -> &Layout {
        self.model.layout()
    }

    fn initialize(&self, seed: u64) -> Vec<f32> {
        self.model.initialize(seed)
    }

    fn config_json(&self) -> serde_json::Value {
        self.model.config_json()
    }

    fn plan(&self, device: &mut Device<'_, B>, shape: MicrobatchShape) -> Result<M::Workspace> {
        self.model.plan(device, shape)
    }

    fn counted_tokens(&self, microbatch: Microbatch<'_, S>) -> Option<u64> {
        with_tokens(microbatch, |tokens| self.model.counted_tokens(tokens))
    }

    fn forward(
        &self,
        device: &mut Device<'_, B>,
        workspace: &mut M::Workspace,
        parameters: &mut dyn ParameterSource<B>,
        microbatch: Microbatch<'_, S>,
    ) -> Result<Vec<GrainLoss>> {
        with_tokens(microbatch, |tokens| self.model.forward(device, workspace, parameters, tokens))
    }

    fn forward_greedy(
        &self,
        device: &mut Device<'_, B>,
        workspace: &mut M::Workspace,
        parameters: &mut dyn ParameterSource<B>,
        microbatch: Microbatch<'_, S>,
    ) -> Result<(Vec<GrainLoss>, Option<Vec<bool>>)> {
        with_tokens(microbatch, |tokens| {
            self.model.forward_greedy(device, workspace, parameters, tokens)
        })
    }

    fn forward_onto(
        &self,
        device: &mut Device<'_, B>,
        workspace: &mut M::Workspace,
        parameters: &mut dyn ParameterSource<B>,
        microbatch: Microbatch<'_, S>,
        so_far: GrainLoss,
    ) -> Result<GrainLoss> {
        with_tokens(microbatch, |tokens| {
            self.model.forward_onto(device, workspace, parameters, tokens, so_far)
        })
    }

    fn forward_backward(
        &self,
        device: &mut Device<'_, B>,
        workspace: &mut M::Workspace,
        parameters: &mut dyn ParameterSource<B>,
        microbatch: Microbatch<'_, S>,
        sink: &mut dyn GradientSink<B>,
    ) -> Result<Vec<GrainLoss>> {
        with_tokens(microbatch, |tokens| {
            self.model.forward_backward(device, workspace, parameters, tokens, sink)
        })
    }
}
