//! Results of the newest tokens: logits, the most likely tokens, drawn tokens, and the head's
//! input.

use tidemill_kernels::backend::{DrawSettings, NO_TOKEN, Output};
use tidemill_kernels::shape::GrainRows;
use tidemill_kernels::{Backend, KernelError, Matrix, Slice, SliceMut};

use super::{Rows, Sequences, table_rows};
use crate::block::incremental::Piece;
use crate::error::{ModelError, Result};
use crate::language_model::LanguageModel;
use crate::norm::NormPass;
use crate::trainable::Device;

/// Memory for the choice of tokens on the device.
pub(super) struct Choices<B: Backend> {
    /// `uniforms[b]`: the random numbers that tokens are drawn with.
    uniforms: B::Buffer<f64>,
    /// Copies chosen tokens to the host while the device computes on.
    stream: B::DeviceStream,
    /// `on_host[b]`: the chosen tokens.
    on_host: B::Pinned<u32>,
}

impl<B: Backend> Choices<B> {
    pub(super) fn new(device: &mut Device<'_, B>, sequences: usize) -> Result<Self> {
        Ok(Self {
            uniforms: device.backend.allocate(device.stream, sequences)?,
            stream: device.backend.device_stream()?,
            on_host: device.backend.pinned(sequences)?,
        })
    }
}

impl<B: Backend> Sequences<'_, B> {
    /// The logits after the newest token of every sequence: `logits[b, v]`, without padding.
    ///
    /// # Errors
    /// A sequence without tokens, or a device that fails.
    pub fn logits(&mut self, device: &mut Device<'_, B>) -> Result<&[f32]> {
        self.form_logits(device)?;
        self.read_logits(device)?;
        Ok(&self.host_logits)
    }

    /// The logits that [`write_likeliest`](Self::write_likeliest) or [`draw`](Self::draw) chose
    /// from.
    pub(crate) fn formed_logits(&mut self, device: &mut Device<'_, B>) -> Result<&[f32]> {
        match self.read_logits(device) {
            // A step has begun with a token that could not be chosen; the logits say why.
            Err(ModelError::Kernel(KernelError::TokenOutOfRange { token: NO_TOKEN, .. })) => {
                self.read_logits(device)?;
            }
            read => read?,
        }
        Ok(&self.host_logits)
    }

    fn read_logits(&mut self, device: &mut Device<'_, B>) -> Result<()> {
        let (sequences, head) = (self.lengths.len(), self.model.head());
        let table_rows = table_rows(self.model);
        let elements = sequences * table_rows;
        self.host_logits.resize(elements, 0.0);
        let logits = Slice::new(&self.logits, 0, elements)?;
        device.backend.read(device.stream, &mut self.host_logits, logits)?;
        for sequence in 1..sequences {
            let first = sequence * table_rows;
            let to = sequence * head.vocab_size;
            self.host_logits.copy_within(first..first + head.vocab_size, to);
        }
        self.host_logits.truncate(sequences * head.vocab_size);
        self.host_logits.iter_mut().for_each(|logit| *logit *= head.logit_scale);
        Ok(())
    }

    /// The most likely token after the newest one of every sequence, found on the device: the first
    /// of equal ones, and [`NO_TOKEN`] where a logit is not a finite number.
    ///
    /// # Errors
    /// As [`logits`](Self::logits).
    pub fn likeliest(&mut self, device: &mut Device<'_, B>) -> Result<Vec<u32>> {
        self.choose_likeliest(device)?;
        self.read_chosen(device)
    }

    /// [`likeliest`](Self::likeliest), and these tokens are added to the sequences: the device
    /// begins the step before the host has the tokens, which are returned without a wait for the
    /// step. A full sequence, for which the token is the last, computes its last position once
    /// more.
    ///
    /// With [`NO_TOKEN`] among the tokens, [`formed_logits`](Self::formed_logits) must be called
    /// next: the step has left a fault.
    ///
    /// # Errors
    /// As [`logits`](Self::logits).
    pub(crate) fn write_likeliest(&mut self, device: &mut Device<'_, B>) -> Result<Vec<u32>> {
        self.choose_likeliest(device)?;
        let sequences = self.lengths.len();
        // On a stream of its own, the copy to the host is no part of what the device does in order.
        let Choices { stream: copying, on_host, .. } = &mut self.choices;
        let chosen = Slice::new(&self.rows.tokens, 0, sequences)?;
        let Device { backend, stream } = device;
        backend.wait_for(copying, &backend.record(stream)?)?;
        backend.read_async(copying, on_host, 0, chosen)?;
        self.write_chosen(device)?;
        let tokens = device.backend.pinned_values(&self.choices.on_host)?;
        Ok(tokens[..sequences].to_vec())
    }

    /// Leaves the most likely token of every sequence in `rows.tokens`.
    fn choose_likeliest(&mut self, device: &mut Device<'_, B>) -> Result<()> {
        self.form_logits(device)?;
        let (sequences, scale) = (self.lengths.len(), self.model.head().logit_scale);
        let logits = without_padding(self.model, &self.logits, sequences)?;
        let tokens = SliceMut::new(&mut self.rows.tokens, 0, sequences)?;
        Ok(device.backend.likeliest(device.stream, tokens, logits, scale)?)
    }

    /// A token drawn on the device after the newest one of every sequence, with its number in
    /// `uniforms`. It is [`NO_TOKEN`] where a logit is not a
    /// finite number, or where only the [definition](tidemill_kernels::draw) itself, given the
    /// [`logits`](Self::logits), can decide the token.
    ///
    /// # Errors
    /// More or fewer numbers than sequences, settings that [`check`](DrawSettings::check) refuses;
    /// else as [`logits`](Self::logits).
    pub fn draw(
        &mut self,
        device: &mut Device<'_, B>,
        uniforms: &[f64],
        settings: &DrawSettings,
    ) -> Result<Vec<u32>> {
        let sequences = self.lengths.len();
        if uniforms.len() != sequences {
            return Err(ModelError::Microbatch {
                what: "numbers to draw by",
                expected: sequences.to_string(),
                found: uniforms.len(),
            });
        }
        self.form_logits(device)?;
        let scale = self.model.head().logit_scale;
        let logits = without_padding(self.model, &self.logits, sequences)?;
        let Device { backend, stream } = device;
        let on_device = &mut self.choices.uniforms;
        backend.write(stream, SliceMut::new(on_device, 0, sequences)?, uniforms)?;
        let uniforms = Slice::new(on_device, 0, sequences)?;
        let tokens = SliceMut::new(&mut self.rows.tokens, 0, sequences)?;
        backend.draw(stream, tokens, logits, uniforms, scale, settings)?;
        self.read_chosen(device)
    }

    /// The tokens that the device has chosen.
    fn read_chosen(&self, device: &mut Device<'_, B>) -> Result<Vec<u32>> {
        let chosen = Slice::new(&self.rows.tokens, 0, self.lengths.len())?;
        Ok(device.backend.to_vec(device.stream, chosen)?)
    }

    /// Forms `logits[b, v]` on the device, padding included and not yet multiplied by the logit
    /// scale.
    fn form_logits(&mut self, device: &mut Device<'_, B>) -> Result<()> {
        let (sequences, head) = (self.lengths.len(), self.model.head());
        if sequences == 0 || self.lengths.contains(&0) {
            return Err(ModelError::Microbatch {
                what: "tokens before logits",
                expected: "at least 1".to_owned(),
                found: 0,
            });
        }
        let table_rows = table_rows(self.model);
        let [parameters, table] = self.model.head_parameters(self.parameters)?;
        let normed = &mut self.rows.normed;
        let input = Slice::all(&self.newest).matrix(sequences, head.width)?;
        let grains = GrainRows::new(sequences, sequences)?;
        head.norm.forward(device, normed, NormPass { parameters, input, grains })?;
        let Device { backend, stream } = device;
        backend.ordered_matmul_f32(
            stream,
            SliceMut::all(&mut self.logits).matrix(sequences, table_rows)?,
            normed.rows(sequences)?,
            table.weight(&head.table, table_rows, head.width)?,
            Output::Overwrite,
        )?;
        Ok(())
    }

    /// The head's input for some rows of the newest piece: gathers the rows to `gathered[rows, d]`
    /// and writes their norm to `normed[rows, d]`.
    pub(crate) fn normalized_rows(
        &mut self,
        device: &mut Device<'_, B>,
        piece: &Piece,
        rows: Slice<'_, B, u32>,
        gathered: &mut B::Buffer<f32>,
    ) -> Result<Matrix<'_, B, B::Activation>> {
        let (count, head) = (rows.elements(), self.model.head());
        let [parameters, _] = self.model.head_parameters(self.parameters)?;
        let Rows { residual, normed, .. } = &mut self.rows;
        let Device { backend, stream } = device;
        let residual = Slice::all(residual).matrix(piece.rows(), head.width)?;
        let out = SliceMut::all(gathered).matrix(count, head.width)?;
        backend.embedding_forward(stream, out, residual, rows, Output::Overwrite)?;
        let input = Slice::all(gathered).matrix(count, head.width)?;
        let grains = GrainRows::new(count, count)?;
        head.norm.forward(device, normed, NormPass { parameters, input, grains })?;
        normed.rows(count)
    }
}

/// `logits[b, v]` on the device.
fn without_padding<'a, B: Backend>(
    model: &LanguageModel<B>,
    logits: &'a B::Buffer<f32>,
    sequences: usize,
) -> Result<Matrix<'a, B, f32>> {
    let table_rows = table_rows(model);
    let logits = Slice::new(logits, 0, sequences * table_rows)?;
    Ok(logits.matrix(sequences, table_rows)?.columns(0, model.vocab_size())?)
}
