//! A model so small that a whole run takes milliseconds, and so ill-scaled that the order of every
//! sum shows in its bits.

use std::sync::Arc;

use tidemill::kernels::Cpu;
use tidemill::model::{
    Decay, Device, Direction, GradientSink, GrainLoss, Layout, Microbatch, MicrobatchShape,
    ModelError, ParameterSource, Tokens, Trainable,
};

pub const VOCAB: usize = 67;
const SCALES: usize = 9;
/// A sample that begins with this token makes the model panic.
pub const PANIC_TOKEN: u32 = 1_000;
/// A sample that begins with this token has a loss that is no number.
pub const NAN_TOKEN: u32 = 1_001;

/// A sample that begins with this token may wait for something.
pub const STUCK_TOKEN: u32 = 1_002;

/// The loss of a grain, and the gradients of the four uses.
type GrainGradients = (GrainLoss, [Vec<f32>; 4]);

/// Predicts `value(y) = table[x] scale[x % 9] + bias[y] + table[y] / 8` with squared errors that are weighted over
/// eight decades. The table is used by two blocks: it is tied.
pub struct Bigram {
    layout: Layout,
    /// Called for a sample that begins with [`STUCK_TOKEN`].
    pub stuck: Option<Arc<dyn Fn() + Send + Sync>>,
}

impl Bigram {
    pub fn new() -> Self {
        let mut layout = Layout::new();
        let table = layout.segment("table");
        layout.tensor("table", &[VOCAB, 1], Decay::Decayed, 8);
        let scale = layout.segment("scale");
        layout.tensor("scale", &[SCALES], Decay::Exempt, 1);
        let bias = layout.segment("bias");
        layout.tensor("bias", &[VOCAB], Decay::Exempt, 1);
        layout.tensor("unused", &[3, 2], Decay::Decayed, 1);
        layout.block("embedding", &[table]);
        layout.block("middle", &[scale]);
        layout.block("head", &[bias, table]);
        Self { layout, stuck: None }
    }

    fn grains(
        &self,
        device: &mut Device<'_, Cpu>,
        parameters: &mut dyn ParameterSource<Cpu>,
        head: Direction,
        microbatch: Microbatch<'_>,
    ) -> Result<Vec<GrainGradients>, ModelError> {
        // Kept beyond their blocks, as this model computes everything in its head.
        let mut values = Vec::new();
        for (block, direction, uses) in
            [(0, Direction::Forward, 0..1), (1, Direction::Forward, 1..2), (2, head, 2..4)]
        {
            parameters.enter(device, block, direction)?;
            for use_index in uses {
                let elements = self.layout.reads(use_index).next().map(|(of, _)| of.elements());
                let lease = parameters.lease(use_index)?;
                values.push(lease.vector(&(0..elements.unwrap_or(0)))?.values().to_vec());
            }
        }
        let [table, scale, bias, table_of_head] = &values[..] else {
            unreachable!("the uses are four")
        };
        let grain = |samples: &[Tokens]| {
            let mut loss = GrainLoss::default();
            let mut gradients = [0, 1, 2, 3]
                .map(|use_index| vec![0.0_f32; self.layout.gradient_range(use_index).len()]);
            for sample in samples {
                assert_ne!(sample[0], PANIC_TOKEN, "the model panics on purpose");
                if let (STUCK_TOKEN, Some(wait)) = (sample[0], &self.stuck) {
                    wait();
                }
                for pair in sample.windows(2) {
                    let (x, y) = (pair[0] as usize % VOCAB, pair[1] as usize % VOCAB);
                    let weight = 10_f32.powi((y % 9) as i32 - 4);
                    let value = (y as f32 - 33.0) / 20.0;
                    let error =
                        table[x] * scale[x % SCALES] + bias[y] + table_of_head[y] / 8.0 - value;
                    let slope = error * weight;
                    loss.loss_sum += f64::from(0.5 * error * slope);
                    loss.tokens += 1;
                    gradients[0][x] += slope * scale[x % SCALES];
                    gradients[1][x % SCALES] += slope * table[x];
                    gradients[2][y] += slope;
                    gradients[3][y] += slope / 8.0;
                }
                if sample[0] == NAN_TOKEN {
                    loss.loss_sum = f64::NAN;
                }
            }
            (loss, gradients)
        };
        Ok(microbatch.grains().map(grain).collect())
    }
}

impl Trainable<Cpu> for Bigram {
    type Sample = Tokens;
    type Workspace = MicrobatchShape;

    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn initialize(&self, seed: u64) -> Vec<f32> {
        let mut arena = vec![0.0; self.layout.parameter_elements()];
        for tensor in self.layout.tensors() {
            for index in tensor.range() {
                arena[index] = super::random(seed ^ index as u64) as f32 / u64::MAX as f32 - 0.3;
            }
        }
        arena
    }

    fn config_json(&self) -> serde_json::Value {
        serde_json::json!({ "model_type": "bigram" })
    }

    fn plan(
        &self,
        _device: &mut Device<'_, Cpu>,
        shape: MicrobatchShape,
    ) -> Result<MicrobatchShape, ModelError> {
        Ok(shape)
    }

    fn forward(
        &self,
        device: &mut Device<'_, Cpu>,
        workspace: &mut MicrobatchShape,
        parameters: &mut dyn ParameterSource<Cpu>,
        microbatch: Microbatch<'_>,
    ) -> Result<Vec<GrainLoss>, ModelError> {
        assert!(microbatch.samples.len() <= workspace.samples, "more than was planned");
        let grains = self.grains(device, parameters, Direction::Forward, microbatch)?;
        Ok(grains.into_iter().map(|(loss, _)| loss).collect())
    }

    fn forward_backward(
        &self,
        device: &mut Device<'_, Cpu>,
        workspace: &mut MicrobatchShape,
        parameters: &mut dyn ParameterSource<Cpu>,
        microbatch: Microbatch<'_>,
        sink: &mut dyn GradientSink<Cpu>,
    ) -> Result<Vec<GrainLoss>, ModelError> {
        assert!(microbatch.samples.len() <= workspace.samples, "more than was planned");
        let grains = self.grains(device, parameters, Direction::Backward, microbatch)?;
        for (block, uses) in [(2, 2..4), (1, 1..2), (0, 0..1)] {
            if block < 2 {
                parameters.enter(device, block, Direction::Backward)?;
            }
            for use_index in uses {
                let lane = sink.accumulator(use_index).values();
                for (_, gradients) in &grains {
                    for (lane, gradient) in lane.iter_mut().zip(&gradients[use_index]) {
                        *lane += gradient;
                    }
                }
            }
            sink.block_done(device, block)?;
        }
        Ok(grains.into_iter().map(|(loss, _)| loss).collect())
    }
}
