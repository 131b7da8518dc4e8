//! What the tests of a model share: a lane on the host, and small models with odd sizes.

use std::num::NonZeroUsize;

use tidemill_kernels::cpu::{Buffer, DeviceStream};
use tidemill_kernels::{Backend, Cpu, SliceMut};
use tidemill_model::{
    Device, GradientSink, GrainLoss, Layout, Mamba, MambaConfig, Microbatch, MicrobatchShape,
    ModelError, Parameters, Trainable,
};

/// A processor with one compute thread.
pub fn one_thread() -> Cpu {
    Cpu::new(NonZeroUsize::MIN).expect("one thread")
}

/// Sizes that are multiples of nothing: 13 tokens, 7 wide, 2 layers, 3 states, 3 taps, 15 channels, rank 2.
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

/// Initial parameters moved by up to `amount`, so that no gradient is special; padding stays zero.
pub fn moved_parameters(model: &Mamba, amount: f32) -> Vec<f32> {
    let mut arena = model.initialize(17);
    for (index, tensor) in model.layout().tensors().iter().enumerate() {
        for (value, x) in arena[tensor.range()].iter_mut().zip(noise(index as u64 + 1, 1 << 20)) {
            *value += amount * x;
        }
    }
    arena
}

/// One lane's accumulators, and the order in which blocks were finished.
pub struct Lane {
    accumulators: Vec<Buffer<f32>>,
    pub finished: Vec<usize>,
    /// The block after which the receiver is gone.
    pub closed_after: Option<usize>,
}

impl Lane {
    pub fn new(backend: &Cpu, stream: &mut DeviceStream, layout: &Layout) -> Self {
        let uses = 0..layout.uses().len();
        let elements = uses.map(|index| layout.gradient_range(index).len());
        let accumulators =
            elements.map(|n| backend.allocate(stream, n).expect("an accumulator")).collect();
        Self { accumulators, finished: Vec::new(), closed_after: None }
    }

    /// The gradient arena.
    pub fn gradients(&self) -> Vec<f32> {
        self.accumulators.iter().flat_map(|buffer| buffer.iter().copied()).collect()
    }
}

impl GradientSink<Cpu> for Lane {
    fn accumulator(&mut self, use_index: usize) -> SliceMut<'_, Cpu, f32> {
        SliceMut::all(&mut self.accumulators[use_index])
    }

    fn block_done(
        &mut self,
        _device: &mut Device<'_, Cpu>,
        block: usize,
    ) -> tidemill_model::Result<()> {
        self.finished.push(block);
        if self.closed_after == Some(block) { Err(ModelError::SinkClosed) } else { Ok(()) }
    }
}

/// How the samples of a lane are walked through.
#[derive(Clone, Copy, Debug)]
pub struct Walk {
    pub samples: usize,
    pub positions: usize,
    pub samples_per_grain: usize,
    pub grains_per_microbatch: usize,
}

/// Losses and gradient arena of one lane of `tokens`.
pub fn run_lane(
    backend: &Cpu,
    model: &Mamba,
    arena: &[f32],
    tokens: &[u32],
    walk: Walk,
) -> (Vec<GrainLoss>, Vec<f32>) {
    let stream = &mut backend.device_stream().expect("a device stream");
    let mut lane = Lane::new(backend, stream, model.layout());
    let device = &mut Device { backend, stream };
    let parameters = Parameters::from_host(device, model.layout(), arena).expect("parameters");
    let samples = (walk.samples_per_grain * walk.grains_per_microbatch).min(walk.samples);
    let (positions, samples_per_grain) = (walk.positions, walk.samples_per_grain);
    let shape = MicrobatchShape { samples, positions, samples_per_grain };
    let mut workspace = model.plan(device, shape).expect("a workspace");
    let mut losses = Vec::new();
    for tokens in tokens.chunks(samples * (positions + 1)) {
        let samples = tokens.len() / (positions + 1);
        let microbatch = Microbatch { tokens, samples, positions, samples_per_grain };
        let run =
            model.forward_backward(device, &mut workspace, &parameters, microbatch, &mut lane);
        losses.extend(run.expect("forward and backward"));
    }
    (losses, lane.gradients())
}

/// The sum of losses of a forward pass alone.
pub fn loss(backend: &Cpu, model: &Mamba, arena: &[f32], tokens: &[u32], walk: Walk) -> f64 {
    let device = &mut Device { backend, stream: &mut backend.device_stream().expect("a stream") };
    let parameters = Parameters::from_host(device, model.layout(), arena).expect("parameters");
    let Walk { samples, positions, samples_per_grain, .. } = walk;
    let shape = MicrobatchShape { samples, positions, samples_per_grain };
    let mut workspace = model.plan(device, shape).expect("a workspace");
    let microbatch = Microbatch { tokens, samples, positions, samples_per_grain };
    let losses = model.forward(device, &mut workspace, &parameters, microbatch).expect("forward");
    losses.iter().map(|loss| loss.loss_sum).sum()
}

/// Bits, for comparisons that know no tolerance.
pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}
