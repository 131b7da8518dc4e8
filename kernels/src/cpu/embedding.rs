//! Rows of a table, and their gradients.

use super::device_stream::TokenRow;
use super::dispatch::Kernel;
use super::rows::{Rows, RowsMut};
use super::simd::{LANES, Lanes, Simd};
use crate::error::{KernelError, Result};

/// The row of the first token outside the vocabulary is an error.
pub(crate) fn check_tokens(kernel: &'static str, tokens: &[u32], vocab_size: usize) -> Result<()> {
    match tokens.iter().position(|&token| token as usize >= vocab_size) {
        None => Ok(()),
        Some(row) => {
            Err(KernelError::TokenOutOfRange { kernel, row, token: tokens[row], vocab_size })
        }
    }
}

/// `lane_table[v, d] += sum over the grain's rows, in order, of dout`, the sum formed from +0.0.
///
/// Only rows of tokens that the grain holds are visited. That is equal to the bit, as a lane is itself
/// a sum from +0.0: it never holds -0.0, the one number that adding +0.0 would change.
pub(crate) struct EmbeddingBackward<'a, 'table> {
    pub(crate) lane_table: &'a mut RowsMut<'table>,
    pub(crate) dout: Rows<'a>,
    /// One for every row of the grain, sorted.
    pub(crate) token_rows: &'a [TokenRow],
    /// Where a row of the table is summed up.
    pub(crate) sum: &'a mut [Lanes],
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
