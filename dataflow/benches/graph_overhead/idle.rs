//! A model that has parameters and computes nothing.

use tidemill::kernels::Cpu;
use tidemill::model::{
    Decay, Device, Direction, GradientSink, GrainLoss, Layout, Microbatch, MicrobatchShape,
    ModelError, ParameterSource, Tokens, Trainable,
};

/// Few enough that arithmetic does not count.
pub const CHUNK_ELEMENTS: usize = 16;

/// One tensor whose gradient is zero.
pub struct Idle {
    layout: Layout,
}

impl Idle {
    /// A model of `chunks` chunks.
    pub fn new(chunks: usize) -> Self {
        let mut layout = Layout::new();
        let segment = layout.segment("only");
        layout.tensor("weight", &[chunks * CHUNK_ELEMENTS], Decay::Decayed, 1);
        layout.block("only", &[segment]);
        Self { layout }
    }
}

fn losses(microbatch: Microbatch<'_>) -> Vec<GrainLoss> {
    vec![GrainLoss { loss_sum: 1.0, tokens: 1 }; microbatch.grains().len()]
}

impl Trainable<Cpu> for Idle {
    type Sample = Tokens;
    type Workspace = ();

    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn initialize(&self, _seed: u64) -> Vec<f32> {
        vec![0.0; self.layout.parameter_elements()]
    }

    fn config_json(&self) -> serde_json::Value {
        serde_json::json!({ "model_type": "idle" })
    }

    fn plan(&self, _: &mut Device<'_, Cpu>, _: MicrobatchShape) -> Result<(), ModelError> {
        Ok(())
    }

    fn forward(
        &self,
        device: &mut Device<'_, Cpu>,
        (): &mut (),
        parameters: &mut dyn ParameterSource<Cpu>,
        microbatch: Microbatch<'_>,
    ) -> Result<Vec<GrainLoss>, ModelError> {
        parameters.enter(device, 0, Direction::Forward)?;
        Ok(losses(microbatch))
    }

    fn forward_backward(
        &self,
        device: &mut Device<'_, Cpu>,
        (): &mut (),
        parameters: &mut dyn ParameterSource<Cpu>,
        microbatch: Microbatch<'_>,
        sink: &mut dyn GradientSink<Cpu>,
    ) -> Result<Vec<GrainLoss>, ModelError> {
        parameters.enter(device, 0, Direction::Backward)?;
        sink.block_done(device, 0)?;
        Ok(losses(microbatch))
    }
}
