//! Scaled sums of elements.

use bytemuck::{Pod, Zeroable};

use super::optimizer::{THREADS, UPDATED};
use super::sizes::{Access, WIDE_BYTES, blocks};
use crate::backend::{Elementwise, Values, ValuesMut, check_axpby};
use crate::error::Result;
use crate::gpu::buffer::Place;
use crate::gpu::driver::{Address, Driver};
use crate::gpu::precision::Precision;
use crate::gpu::source::OPTIMIZER;
use crate::gpu::{Gpu, GpuStream};

/// `Axpby` of optimizer.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Arguments {
    out: Address,
    x: Address,
    elements: u64,
    keep: f32,
    factor: f32,
    out_is_fp32: u32,
    x_is_fp32: u32,
}

impl<D: Driver, P: Precision> Elementwise for Gpu<D, P> {
    fn axpby(
        &self,
        stream: &mut GpuStream<D>,
        out: ValuesMut<'_, Self>,
        keep: f32,
        factor: f32,
        x: Values<'_, Self>,
    ) -> Result<()> {
        let elements = check_axpby(&out, &x)?;
        // A pack of four has 16 bytes of fp32, and half of that of bf16.
        let activation_bytes = 4 * size_of::<P::Activation>() as u64;
        let (out, out_bytes, out_is_fp32) = match out {
            ValuesMut::Fp32(out) => (out.address(), WIDE_BYTES, true),
            ValuesMut::Activations(out) => (out.address(), activation_bytes, false),
        };
        let (x, x_bytes, x_is_fp32) = match x {
            Values::Fp32(x) => (x.address(), WIDE_BYTES, true),
            Values::Activations(x) => (x.address(), activation_bytes, false),
        };
        let access = Access::of(out_bytes, &[(out, 0)]).and(Access::of(x_bytes, &[(x, 0)]));
        let arguments = Arguments {
            out,
            x,
            elements: elements as u64,
            keep,
            factor,
            out_is_fp32: out_is_fp32.into(),
            x_is_fp32: x_is_fp32.into(),
        };
        let launch = blocks("axpby", elements.div_ceil(UPDATED), THREADS)?;
        let name = access.choose("axpby_wide", "axpby_single");
        // SAFETY: both have `elements` elements of the types that the arguments state, and their alignment is checked.
        unsafe { self.launch(stream, &OPTIMIZER, name, launch, arguments) }
    }
}
