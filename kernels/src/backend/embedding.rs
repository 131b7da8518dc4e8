//! Rows of a table, and their gradients.

use super::{Output, Runtime};
use crate::error::Result;
use crate::shape::GrainRows;
use crate::view::{Matrix, MatrixMut, Slice};

/// Embeddings of tokens. See the [module](super) for what every kernel promises.
pub trait Embedding: Runtime {
    /// `out[rows, d] (+)= table[tokens[row]]`, rows of the fp32 residual stream.
    fn embedding_forward(
        &self,
        stream: &mut Self::DeviceStream,
        out: MatrixMut<'_, Self, f32>,
        table: Matrix<'_, Self, f32>,
        tokens: Slice<'_, Self, u32>,
        output: Output,
    ) -> Result<()>;

    /// For each grain in order: `lane_table[v, d] += sum over the grain's rows, in order, of dout`.
    /// The grain's sum is formed from +0.0, then added.
    fn embedding_backward_add(
        &self,
        stream: &mut Self::DeviceStream,
        lane_table: MatrixMut<'_, Self, f32>,
        dout: Matrix<'_, Self, f32>,
        tokens: Slice<'_, Self, u32>,
        grains: GrainRows,
    ) -> Result<()>;
}
