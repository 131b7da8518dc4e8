//! A model that looks its tokens up without having looked at them: what the device then finds must end the run.

use std::sync::Arc;

use tidemill::kernels::backend::Output;
use tidemill::kernels::shape::GrainRows;
use tidemill::kernels::{Backend, Runtime, Slice, SliceMut};
use tidemill::model::{
    Decay, Device, Direction, GradientSink, GrainLoss, Layout, Microbatch, MicrobatchShape,
    ModelError, ParameterSource, Reading, Tokens, Trainable,
};

const WIDTH: usize = 4;
pub const VOCAB: usize = 67;
/// The device of a worker that is given this token never returns.
pub const STUCK_TOKEN: u32 = 99_999;

/// `tokens[b (t + 1)]` on the device, and the row of each.
type Found<B> = (<B as Runtime>::Buffer<u32>, <B as Runtime>::Buffer<f32>);

/// The loss of a sample is the sum of what its tokens find in a table.
pub struct Lookup {
    layout: Layout,
    /// Waits where a token is [`STUCK_TOKEN`].
    pub stuck: Option<Arc<dyn Fn() + Send + Sync>>,
}

impl Lookup {
    pub fn new() -> Self {
        let mut layout = Layout::new();
        let table = layout.segment("table");
        let tensor = layout.tensor("table", &[VOCAB, WIDTH], Decay::Decayed, 1);
        layout.set_reading(tensor, Reading::Fp32);
        layout.block("table", &[table]);
        Self { layout, stuck: None }
    }

    fn look_up<B: Backend>(
        &self,
        device: &mut Device<'_, B>,
        parameters: &dyn ParameterSource<B>,
        tokens: &[u32],
    ) -> Result<Found<B>, ModelError> {
        if let Some(stuck) = self.stuck.as_ref().filter(|_| tokens.contains(&STUCK_TOKEN)) {
            stuck();
        }
        let table = parameters.lease(0)?.vector(&(0..VOCAB * WIDTH))?;
        let Device { backend, stream } = device;
        let mut places = backend.allocate(stream, tokens.len())?;
        backend.write(stream, SliceMut::all(&mut places), tokens)?;
        let mut rows = backend.allocate(stream, tokens.len() * WIDTH)?;
        let out = SliceMut::all(&mut rows).matrix(tokens.len(), WIDTH)?;
        let table = table.matrix(VOCAB, WIDTH)?;
        backend.embedding_forward(stream, out, table, Slice::all(&places), Output::Overwrite)?;
        Ok((places, rows))
    }
}

fn losses<B: Backend>(
    device: &mut Device<'_, B>,
    rows: &B::Buffer<f32>,
    microbatch: Microbatch<'_>,
) -> Result<Vec<GrainLoss>, ModelError> {
    let mut host = vec![0.0; B::elements(rows)];
    device.backend.read(device.stream, &mut host, Slice::all(rows))?;
    let grain_tokens = (microbatch.positions + 1) * microbatch.samples_per_grain;
    let loss = |values: &[f32]| GrainLoss {
        loss_sum: values.iter().map(|&value| f64::from(value)).sum(),
        tokens: (values.len() / WIDTH) as u64,
    };
    Ok(host.chunks(grain_tokens * WIDTH).map(loss).collect())
}

impl<B: Backend> Trainable<B> for Lookup {
    type Sample = Tokens;
    type Workspace = ();

    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn initialize(&self, _seed: u64) -> Vec<f32> {
        vec![0.5; self.layout.parameter_elements()]
    }

    fn config_json(&self) -> serde_json::Value {
        serde_json::json!({ "model_type": "lookup" })
    }

    fn plan(&self, _: &mut Device<'_, B>, _: MicrobatchShape) -> Result<(), ModelError> {
        Ok(())
    }

    fn forward(
        &self,
        device: &mut Device<'_, B>,
        (): &mut (),
        parameters: &mut dyn ParameterSource<B>,
        microbatch: Microbatch<'_>,
    ) -> Result<Vec<GrainLoss>, ModelError> {
        parameters.enter(device, 0, Direction::Forward)?;
        let (_, rows) = self.look_up(device, parameters, &microbatch.samples.concat())?;
        losses(device, &rows, microbatch)
    }

    fn forward_backward(
        &self,
        device: &mut Device<'_, B>,
        (): &mut (),
        parameters: &mut dyn ParameterSource<B>,
        microbatch: Microbatch<'_>,
        sink: &mut dyn GradientSink<B>,
    ) -> Result<Vec<GrainLoss>, ModelError> {
        let tokens = &microbatch.samples.concat()[..];
        parameters.enter(device, 0, Direction::Backward)?;
        let (places, rows) = self.look_up(device, parameters, tokens)?;
        let lane = sink.accumulator(0).sub(0, VOCAB * WIDTH)?.matrix(VOCAB, WIDTH)?;
        let grain_rows = (microbatch.positions + 1) * microbatch.samples_per_grain;
        device.backend.embedding_backward_add(
            device.stream,
            lane,
            Slice::all(&rows).matrix(tokens.len(), WIDTH)?,
            Slice::all(&places),
            GrainRows::new(tokens.len(), grain_rows)?,
        )?;
        sink.block_done(device, 0)?;
        losses(device, &rows, microbatch)
    }
}
