//! Results of the newest tokens: logits, the most likely tokens, drawn tokens, and the head's
//! input.

use tidemill_kernels::backend::{DrawSettings, Output};
use tidemill_kernels::shape::GrainRows;
use tidemill_kernels::{Backend, Matrix, Slice, SliceMut};

use super::{Rows, Sequences, table_rows};
use crate::error::{ModelError, Result};
use crate::generation::incremental::Piece;
use crate::language_model::LanguageModel;
use crate::norm::NormPass;
use crate::trainable::Device;

impl<B: Backend> Sequences<'_, B> {
    /// The logits after the newest token of every sequence: `logits[b, v]`, without padding.
    ///
    /// # Errors
    /// A sequence without tokens, or a device that fails.
    pub fn logits(&mut self, device: &mut Device<'_, B>) -> Result<&[f32]> {
        self.form_logits(device)?;
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
        Ok(&self.host_logits)
    }

    /// The most likely token after the newest one of every sequence, found on the device: the first
    /// of equal ones, and [`NO_TOKEN`](tidemill_kernels::backend::NO_TOKEN) where a logit is not a
    /// finite number.
    ///
    /// # Errors
    /// As [`logits`](Self::logits).
    pub fn likeliest(&mut self, device: &mut Device<'_, B>) -> Result<Vec<u32>> {
        self.form_logits(device)?;
        let (sequences, scale) = (self.lengths.len(), self.model.head().logit_scale);
        let logits = without_padding(self.model, &self.logits, sequences)?;
        let Device { backend, stream } = device;
        let tokens = SliceMut::new(&mut self.chosen, 0, sequences)?;
        backend.likeliest(stream, tokens, logits, scale)?;
        self.read_chosen(device)
    }

    /// A token drawn on the device after the newest one of every sequence, with its number in
    /// `uniforms`. It is [`NO_TOKEN`](tidemill_kernels::backend::NO_TOKEN) where a logit is not a
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
        backend.write(stream, SliceMut::new(&mut self.uniforms, 0, sequences)?, uniforms)?;
        let uniforms = Slice::new(&self.uniforms, 0, sequences)?;
        let tokens = SliceMut::new(&mut self.chosen, 0, sequences)?;
        backend.draw(stream, tokens, logits, uniforms, scale, settings)?;
        self.read_chosen(device)
    }

    /// The tokens that the device has chosen.
    fn read_chosen(&self, device: &mut Device<'_, B>) -> Result<Vec<u32>> {
        let mut tokens = vec![0; self.lengths.len()];
        let chosen = Slice::new(&self.chosen, 0, tokens.len())?;
        device.backend.read(device.stream, &mut tokens, chosen)?;
        Ok(tokens)
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
        let Rows { normed, norm, .. } = &mut self.rows;
        let input = Slice::all(&self.newest).matrix(sequences, head.width)?;
        let grains = GrainRows::new(sequences, sequences)?;
        let out = SliceMut::all(normed).matrix(sequences, head.width)?;
        head.norm.forward(device, out, norm, NormPass { parameters, input, grains })?;
        let Device { backend, stream } = device;
        backend.ordered_matmul_f32(
            stream,
            SliceMut::all(&mut self.logits).matrix(sequences, table_rows)?,
            Slice::all(normed).matrix(sequences, head.width)?,
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
        let Rows { residual, normed, norm, .. } = &mut self.rows;
        let Device { backend, stream } = device;
        let residual = Slice::all(residual).matrix(piece.rows(), head.width)?;
        let out = SliceMut::all(gathered).matrix(count, head.width)?;
        backend.embedding_forward(stream, out, residual, rows, Output::Overwrite)?;
        let input = Slice::all(gathered).matrix(count, head.width)?;
        let grains = GrainRows::new(count, count)?;
        let out = SliceMut::all(normed).matrix(count, head.width)?;
        head.norm.forward(device, out, norm, NormPass { parameters, input, grains })?;
        Ok(Slice::all(normed).matrix(count, head.width)?)
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
