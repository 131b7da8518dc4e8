//! AdamW over a chunk of parameters.

use super::dispatch::{Dispatch, Kernel};
use super::rows::{elements_mut, exactly, exactly_mut};
use super::simd::{LANES, Simd};
use super::{Cpu, DeviceStream};
use crate::backend::{self, AdamWStep};
use crate::error::Result;
use crate::master::MasterMut;
use crate::view::{Slice, SliceMut};

impl backend::AdamW for Cpu {
    fn adamw(
        &self,
        stream: &mut DeviceStream,
        parameters: SliceMut<'_, Self, f32>,
        moments: [SliceMut<'_, Self, f32>; 2],
        gradient: Slice<'_, Self, f32>,
        step: AdamWStep,
    ) -> Result<()> {
        let all = AdamW::new("adamw", parameters, moments, gradient, step)?;
        all.update(stream, self.dispatch);
        Ok(())
    }

    fn adamw_master(
        &self,
        stream: &mut DeviceStream,
        master: MasterMut<'_, Self>,
        moments: [SliceMut<'_, Self, f32>; 2],
        gradient: Slice<'_, Self, f32>,
        step: AdamWStep,
    ) -> Result<()> {
        let all = AdamW::new("adamw_master", master.rounded, moments, gradient, step)?;
        all.update(stream, self.dispatch);
        Ok(())
    }
}

/// One update in the order of PyTorch's; all slices have one length.
struct AdamW<'a> {
    parameters: &'a mut [f32],
    exp_avg: &'a mut [f32],
    exp_avg_sq: &'a mut [f32],
    gradient: &'a [f32],
    step: AdamWStep,
}

impl<'a> AdamW<'a> {
    fn new(
        kernel: &'static str,
        parameters: SliceMut<'a, Cpu, f32>,
        [exp_avg, exp_avg_sq]: [SliceMut<'a, Cpu, f32>; 2],
        gradient: Slice<'a, Cpu, f32>,
        step: AdamWStep,
    ) -> Result<Self> {
        let parameters = elements_mut(parameters);
        let count = parameters.len();
        Ok(Self {
            exp_avg: exactly_mut(kernel, "exp_avg", exp_avg, count)?,
            exp_avg_sq: exactly_mut(kernel, "exp_avg_sq", exp_avg_sq, count)?,
            gradient: exactly(kernel, "gradient", gradient, count)?,
            parameters,
            step,
        })
    }

    fn update(self, stream: &mut DeviceStream, dispatch: Dispatch) {
        let threads = stream.threads();
        let share = threads.share(self.parameters.len().div_ceil(LANES)) * LANES;
        threads.for_each(self.parts(share), |part| dispatch.run(part));
    }

    /// Cuts the parameters into parts of `elements` elements each; the last may be shorter.
    fn parts(self, elements: usize) -> impl Iterator<Item = AdamW<'a>> {
        let Self { parameters, exp_avg, exp_avg_sq, gradient, step } = self;
        parameters
            .chunks_mut(elements)
            .zip(exp_avg.chunks_mut(elements))
            .zip(exp_avg_sq.chunks_mut(elements))
            .zip(gradient.chunks(elements))
            .map(move |(((parameters, exp_avg), exp_avg_sq), gradient)| AdamW {
                parameters,
                exp_avg,
                exp_avg_sq,
                gradient,
                step,
            })
    }
}

impl Kernel for AdamW<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let step = self.step;
        let beta1 = s.splat(step.beta1);
        let beta2 = s.splat(step.beta2);
        let rest1 = s.splat(1.0 - step.beta1);
        let rest2 = s.splat(1.0 - step.beta2);
        let decay = s.splat(step.decay_factor);
        let step_size = s.splat(step.learning_rate / step.bias_correction1);
        let root_correction2 = s.splat(step.bias_correction2.sqrt());
        let eps = s.splat(step.eps);
        let scale = s.splat(step.gradient_scale);
        let rows = self
            .parameters
            .chunks_mut(LANES)
            .zip(self.exp_avg.chunks_mut(LANES))
            .zip(self.exp_avg_sq.chunks_mut(LANES))
            .zip(self.gradient.chunks(LANES));
        for (((p, m), v), g) in rows {
            let gradient = s.mul(s.load_row(g), scale);
            let first = s.mul_add(s.load_row(m), beta1, s.mul(gradient, rest1));
            let square = s.mul(s.mul(gradient, gradient), rest2);
            let second = s.mul_add(s.load_row(v), beta2, square);
            s.store_row(m, first);
            s.store_row(v, second);
            let denominator = s.add(s.div(s.sqrt(second), root_correction2), eps);
            let decayed = s.mul(s.load_row(p), decay);
            s.store_row(p, s.neg_mul_add(step_size, s.div(first, denominator), decayed));
        }
    }
}
