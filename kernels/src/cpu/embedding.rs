//! Rows of a table, and their gradients.

use super::Cpu;
use super::device_stream::{DeviceStream, TokenRow};
use super::dispatch::Kernel;
use super::rows::{Rows, RowsMut, elements, exactly};
use super::simd::{LANES, Lanes, Simd};
use crate::backend::{Embedding, Output};
use crate::error::{KernelError, Result};
use crate::float_environment::FloatEnvironment;
use crate::shape::GrainRows;
use crate::view::{Matrix, MatrixMut, Slice};

/// The row of the first token outside the vocabulary is an error.
fn check_tokens(kernel: &'static str, tokens: &[u32], vocab_size: usize) -> Result<()> {
    match tokens.iter().position(|&token| token as usize >= vocab_size) {
        None => Ok(()),
        Some(row) => {
            Err(KernelError::TokenOutOfRange { kernel, row, token: tokens[row], vocab_size })
        }
    }
}

impl Embedding for Cpu {
    fn embedding_forward(
        &self,
        _: &mut DeviceStream,
        out: MatrixMut<'_, Cpu, f32>,
        table: Matrix<'_, Cpu, f32>,
        tokens: Slice<'_, Cpu, u32>,
        output: Output,
    ) -> Result<()> {
        const KERNEL: &str = "embedding_forward";
        let tokens = elements(tokens);
        let (vocab_size, width) = (table.rows, table.columns);
        let mut out = RowsMut::new(KERNEL, "out", out, tokens.len(), width)?;
        let table = Rows::new(KERNEL, "table", table, vocab_size, width)?;
        check_tokens(KERNEL, tokens, vocab_size)?;
        let _standard = FloatEnvironment::standard();
        for (row, &token) in tokens.iter().enumerate() {
            let (out, from) = (out.row_mut(row), table.row(token as usize));
            match output {
                Output::Overwrite => out.copy_from_slice(from),
                Output::Add => out.iter_mut().zip(from).for_each(|(out, x)| *out += x),
            }
        }
        Ok(())
    }

    fn embedding_backward_add(
        &self,
        stream: &mut DeviceStream,
        lane_table: MatrixMut<'_, Cpu, f32>,
        dout: Matrix<'_, Cpu, f32>,
        tokens: Slice<'_, Cpu, u32>,
        grains: GrainRows,
    ) -> Result<()> {
        const KERNEL: &str = "embedding_backward_add";
        let (vocab_size, width) = (lane_table.rows, lane_table.columns);
        let tokens = exactly(KERNEL, "tokens", tokens, grains.rows())?;
        let dout = Rows::new(KERNEL, "dout", dout, grains.rows(), width)?;
        let mut lane_table = RowsMut::new(KERNEL, "lane_table", lane_table, vocab_size, width)?;
        check_tokens(KERNEL, tokens, vocab_size)?;
        let (sum, token_rows) = stream.with_token_rows(width.div_ceil(LANES))?;
        for grain in 0..grains.grains() {
            token_rows.clear();
            token_rows.extend(grains.range(grain).map(|row| (tokens[row], row)));
            token_rows.sort_unstable();
            self.dispatch.run(EmbeddingBackward {
                lane_table: &mut lane_table,
                dout,
                token_rows,
                sum: &mut *sum,
            });
        }
        Ok(())
    }
}

/// `lane_table[v, d] += sum over the grain's rows, in order, of dout`, the sum formed from +0.0.
///
/// Only rows of tokens that the grain holds are visited. That is equal to the bit, as a lane is itself
/// a sum from +0.0: it never holds -0.0, the one number that adding +0.0 would change.
struct EmbeddingBackward<'a, 'table> {
    lane_table: &'a mut RowsMut<'table>,
    dout: Rows<'a>,
    /// One for every row of the grain, sorted.
    token_rows: &'a [TokenRow],
    /// The sum of the gradients of a row of the table.
    sum: &'a mut [Lanes],
}

impl Kernel for EmbeddingBackward<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for rows in self.token_rows.chunk_by(|a, b| a.0 == b.0) {
            self.sum.fill(Lanes::ZERO);
            for &(_, row) in rows {
                let dout = self.dout.row(row);
                for (sum, dout) in self.sum.iter_mut().zip(dout.chunks(LANES)) {
                    let v = s.add(s.load(&sum.0), s.load_row(dout));
                    s.store(&mut sum.0, v);
                }
            }
            let lane = self.lane_table.row_mut(rows[0].0 as usize);
            for (lane, sum) in lane.chunks_mut(LANES).zip(&*self.sum) {
                s.store_row(lane, s.add(s.load_row(lane), s.load(&sum.0)));
            }
        }
    }
}
