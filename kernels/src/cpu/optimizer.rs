//! AdamW over a chunk of parameters.

use super::dispatch::Kernel;
use super::simd::{LANES, Simd};
use crate::backend::AdamWStep;

/// One update in the order of PyTorch's; all slices have one length.
pub(crate) struct AdamW<'a> {
    pub(crate) parameters: &'a mut [f32],
    pub(crate) exp_avg: &'a mut [f32],
    pub(crate) exp_avg_sq: &'a mut [f32],
    pub(crate) gradient: &'a [f32],
    pub(crate) step: AdamWStep,
}

impl<'a> AdamW<'a> {
    /// Parts of `elements` elements each, the last of what is left.
    pub(crate) fn parts(self, elements: usize) -> impl Iterator<Item = AdamW<'a>> {
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
