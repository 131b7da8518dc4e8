//! Common parts of the bodies: a lane of gradients, and small models with odd sizes.

use tidemill_kernels::{Backend, Slice, SliceMut};
use tidemill_model::{
    Device, GradientSink, GrainLoss, LanguageModel, Layout, MambaConfig, Microbatch,
    MicrobatchShape, ModelError, ParameterSource, Tokens, Trainable,
};

use super::arm::Arm;

/// Sizes that are multiples of nothing: 13 tokens, 5 wide, 2 blocks, 3 states, 3 taps, 15 channels, rank 2.
pub fn odd_config() -> MambaConfig {
    let mut config = MambaConfig::new(13, 5, 2);
    (config.d_state, config.d_conv, config.expand, config.dt_rank) = (3, 3, 3, 2);
    config
}

/// Numbers in `[-1, 1)` that depend on `seed` and their index alone.
pub fn noise(seed: u64, elements: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..elements).map(|_| next()).collect()
}

/// `tokens[samples, positions + 1]` below `vocab_size`.
pub fn tokens(seed: u64, samples: usize, positions: usize, vocab_size: usize) -> Vec<u32> {
    let scale = vocab_size as f32 / 2.0;
    let draws = noise(seed, samples * (positions + 1));
    draws.iter().map(|&x| ((x + 1.0) * scale) as u32).collect()
}

/// The samples of `tokens[samples, positions + 1]`; the last may be short.
pub fn rows(tokens: &[u32], positions: usize) -> Vec<Tokens> {
    tokens.chunks(positions + 1).map(<[u32]>::to_vec).collect()
}

/// Initial parameters moved by up to `amount`, so that no gradient is special; padding stays zero.
pub fn moved_parameters<B: Backend>(model: &LanguageModel<B>, amount: f32) -> Vec<f32> {
    let mut arena = model.initialize(17);
    for (index, tensor) in model.layout().tensors().iter().enumerate() {
        let moves = noise(index as u64 + 1, tensor.elements());
        for (value, x) in arena[tensor.range()].iter_mut().zip(moves) {
            *value += amount * x;
        }
    }
    arena
}

/// The accumulators of one lane, and the order in which blocks were finished.
pub struct Lane<B: Backend> {
    accumulators: Vec<B::Buffer<f32>>,
    pub finished: Vec<usize>,
    /// The block after which the receiver is gone.
    pub closed_after: Option<usize>,
}

impl<B: Backend> Lane<B> {
    pub fn new(device: &mut Device<'_, B>, layout: &Layout) -> Self {
        let uses = 0..layout.uses().len();
        let elements = uses.map(|index| layout.gradient_range(index).len());
        let accumulators = elements
            .map(|n| device.backend.allocate(device.stream, n).expect("an accumulator"))
            .collect();
        Self { accumulators, finished: Vec::new(), closed_after: None }
    }

    /// The accumulator of a use.
    pub fn slot(&self, use_index: usize) -> Slice<'_, B, f32> {
        Slice::all(&self.accumulators[use_index])
    }

    /// The gradient arena.
    pub fn gradients(&self, device: &mut Device<'_, B>) -> Vec<f32> {
        let mut arena = Vec::new();
        for buffer in &self.accumulators {
            let mut gradients = vec![f32::NAN; B::elements(buffer)];
            let from = Slice::all(buffer);
            device.backend.read(device.stream, &mut gradients, from).expect("gradients");
            arena.append(&mut gradients);
        }
        arena
    }
}

impl<B: Backend> GradientSink<B> for Lane<B> {
    fn accumulator(&mut self, use_index: usize) -> SliceMut<'_, B, f32> {
        SliceMut::all(&mut self.accumulators[use_index])
    }

    fn block_done(
        &mut self,
        _device: &mut Device<'_, B>,
        block: usize,
    ) -> tidemill_model::Result<()> {
        self.finished.push(block);
        if self.closed_after == Some(block) { Err(ModelError::SinkClosed) } else { Ok(()) }
    }
}

/// How the samples of a lane are divided.
#[derive(Clone, Copy, Debug)]
pub struct Walk {
    pub samples: usize,
    pub positions: usize,
    pub samples_per_grain: usize,
    pub grains_per_microbatch: usize,
}

/// Losses and gradient arena of one lane of `tokens`, each sample one text.
pub fn run_lane<B: Backend>(
    arm: &Arm<B>,
    model: &LanguageModel<B>,
    arena: &[f32],
    tokens: &[u32],
    walk: Walk,
) -> (Vec<GrainLoss>, Vec<f32>) {
    run_lane_of_documents(arm, model, arena, tokens, walk, None)
}

/// [`run_lane`], with independent documents that end with `document_end`.
pub fn run_lane_of_documents<B: Backend>(
    arm: &Arm<B>,
    model: &LanguageModel<B>,
    arena: &[f32],
    tokens: &[u32],
    walk: Walk,
    document_end: Option<u32>,
) -> (Vec<GrainLoss>, Vec<f32>) {
    arm.with_parameters(model, arena, |device, parameters| {
        let mut source = parameters.source(model.layout());
        run_lane_from(device, model, &mut source, tokens, walk, document_end)
    })
}

/// [`run_lane_of_documents`], its parameters from `source`.
pub fn run_lane_from<B: Backend>(
    device: &mut Device<'_, B>,
    model: &LanguageModel<B>,
    source: &mut dyn ParameterSource<B>,
    tokens: &[u32],
    walk: Walk,
    document_end: Option<u32>,
) -> (Vec<GrainLoss>, Vec<f32>) {
    let mut lane = Lane::new(device, model.layout());
    let samples = (walk.samples_per_grain * walk.grains_per_microbatch).min(walk.samples);
    let (positions, samples_per_grain) = (walk.positions, walk.samples_per_grain);
    let shape = MicrobatchShape { samples, positions, samples_per_grain };
    let mut workspace = model.plan(device, shape).expect("a workspace");
    let mut losses = Vec::new();
    for samples in rows(tokens, positions).chunks(samples) {
        let microbatch = Microbatch { samples, positions, samples_per_grain, document_end };
        let run = model.forward_backward(device, &mut workspace, source, microbatch, &mut lane);
        losses.extend(run.expect("forward and backward"));
    }
    (losses, lane.gradients(device))
}

/// The sum of losses of a separate forward pass.
pub fn loss<B: Backend>(
    arm: &Arm<B>,
    model: &LanguageModel<B>,
    arena: &[f32],
    tokens: &[u32],
    walk: Walk,
) -> f64 {
    arm.with_parameters(model, arena, |device, parameters| {
        let mut source = parameters.source(model.layout());
        let losses = forward_from(device, model, &mut source, tokens, walk);
        losses.iter().map(|loss| loss.loss_sum).sum()
    })
}

/// The losses of a separate forward pass, with parameters from `source`.
pub fn forward_from<B: Backend>(
    device: &mut Device<'_, B>,
    model: &LanguageModel<B>,
    source: &mut dyn ParameterSource<B>,
    tokens: &[u32],
    walk: Walk,
) -> Vec<GrainLoss> {
    let Walk { samples, positions, samples_per_grain, .. } = walk;
    let shape = MicrobatchShape { samples, positions, samples_per_grain };
    let mut workspace = model.plan(device, shape).expect("a workspace");
    let samples = &rows(tokens, positions)[..];
    let microbatch = Microbatch { samples, positions, samples_per_grain, document_end: None };
    model.forward(device, &mut workspace, source, microbatch).expect("forward")
}

/// The loss of samples that are run one by one, each added to the sum so far, with parameters from
/// `source`.
pub fn forward_onto_from<B: Backend>(
    device: &mut Device<'_, B>,
    model: &LanguageModel<B>,
    source: &mut dyn ParameterSource<B>,
    tokens: &[u32],
    positions: usize,
) -> GrainLoss {
    let shape = MicrobatchShape { samples: 1, positions, samples_per_grain: 1 };
    let mut workspace = model.plan(device, shape).expect("a workspace");
    rows(tokens, positions).chunks(1).fold(GrainLoss::default(), |so_far, samples| {
        let microbatch =
            Microbatch { samples, positions, samples_per_grain: 1, document_end: None };
        let run = model.forward_onto(device, &mut workspace, source, microbatch, so_far);
        run.expect("forward")
    })
}

/// The bits of numbers, for comparisons without tolerance.
pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// The same of losses.
pub fn loss_bits(losses: &[GrainLoss]) -> Vec<(u64, u64)> {
    losses.iter().map(|loss| (loss.loss_sum.to_bits(), loss.tokens)).collect()
}
