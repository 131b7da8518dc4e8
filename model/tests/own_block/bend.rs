//! A block without memory.

use std::ops::Range;

use tidemill_kernels::{Cpu, SliceMut};
use tidemill_model::block::{BlockPass, ResidualGradient, RowMap};
use tidemill_model::initialization::Initializer;
use tidemill_model::linear::Products;
use tidemill_model::parameter_list::{NewTensor, ParameterList};
use tidemill_model::{Decay, Device, Lease, Reading, Result};

/// `out = input + weight tanh(input)`, `weight[d]`
#[derive(Debug)]
pub struct Bend {
    weight: Range<usize>,
}

impl Bend {
    pub fn add(parameters: &mut ParameterList, index: usize, width: usize) -> Self {
        let weight = parameters.tensor(NewTensor {
            name: format!("blocks.{index}.weight"),
            shape: &[width],
            decay: Decay::Exempt,
            reading: Reading::Fp32,
            initializer: Initializer::Constant(0.4),
        });
        Self { weight }
    }
}

impl RowMap<Cpu> for Bend {
    fn width(&self) -> usize {
        self.weight.len()
    }

    fn apply(
        &self,
        _: &mut Device<'_, Cpu>,
        residual: SliceMut<'_, Cpu, f32>,
        parameters: Lease<'_, Cpu>,
        _: Products,
    ) -> Result<()> {
        let weight = parameters.vector(&self.weight)?.values();
        for row in residual.values().chunks_exact_mut(self.width()) {
            row.iter_mut().zip(weight).for_each(|(x, weight)| *x += weight * x.tanh());
        }
        Ok(())
    }

    fn backward(
        &self,
        _: &mut Device<'_, Cpu>,
        grad: &mut ResidualGradient<Cpu>,
        lane: SliceMut<'_, Cpu, f32>,
        pass: BlockPass<'_, Cpu>,
    ) -> Result<()> {
        let (d, grains, grad) = (self.width(), pass.shape.grain_rows()?, grad.gradient_mut());
        let weight = pass.parameters.vector(&self.weight)?.values();
        let lane = &mut lane.values()[self.weight.clone()];
        for grain in 0..grains.grains() {
            let mut of_grain = vec![0.0; d];
            for row in grains.range(grain) {
                for column in 0..d {
                    let at = row * d + column;
                    let bent = pass.input[at].tanh();
                    of_grain[column] += grad[at] * bent;
                    grad[at] *= 1.0 + weight[column] * (1.0 - bent * bent);
                }
            }
            lane.iter_mut().zip(of_grain).for_each(|(lane, gradient)| *lane += gradient);
        }
        Ok(())
    }
}
