//! The gradient of a weight, added to its lane grain by grain.
//!
//! If a product added to the lane block by block, it would round differently whenever the rows of a
//! grain are several blocks. So the blocks are summed first, all but the last of them in the device
//! stream's scratch memory.

use super::device_stream::DeviceStream;
use super::matmul::matmul_added;
use super::{Cpu, rows};
use crate::backend::WeightGradient;
use crate::error::{KernelError, Result};
use crate::shape::GrainRows;
use crate::view::{Matrix, MatrixMut, SliceMut};

const KERNEL: &str = "weight_gradient_add";

impl WeightGradient for Cpu {
    fn weight_gradient_scratch_bytes(&self, [m, k]: [usize; 2], _: GrainRows) -> usize {
        m.saturating_mul(k).saturating_mul(size_of::<f32>())
    }

    fn weight_gradient_add(
        &self,
        stream: &mut DeviceStream,
        lane: MatrixMut<'_, Cpu, f32>,
        grad_out: Matrix<'_, Cpu, f32>,
        input: Matrix<'_, Cpu, f32>,
        grains: GrainRows,
    ) -> Result<()> {
        let (m, k) = (lane.rows, lane.columns);
        rows::check(KERNEL, "grad_out", grad_out.shape().into(), (grains.rows(), m))?;
        rows::check(KERNEL, "input", input.shape().into(), (grains.rows(), k))?;
        let elements = m.checked_mul(k).ok_or_else(|| {
            KernelError::shape(
                KERNEL,
                "lane",
                "a size that does not overflow",
                format!("[{m}, {k}]"),
            )
        })?;
        if elements == 0 {
            return Ok(());
        }
        let (threads, gradient) = stream.with_weight_gradient(elements)?;
        let mut lane = lane;
        for grain in 0..grains.grains() {
            let rows = grains.range(grain);
            let grad_out = grad_out.rows(rows.start, rows.len())?.transposed();
            let input = input.rows(rows.start, rows.len())?;
            let scratch = SliceMut::new(gradient, 0, elements)?.matrix(m, k)?;
            matmul_added(threads, self.dispatch, lane.reborrow(), scratch, grad_out, input)?;
        }
        Ok(())
    }
}
