//! The precisions of activations on a GPU: fp32, and bf16 with fp32 masters, accumulation and residual.

use crate::backend::ActivationElement;
use crate::gpu::GpuBuffer;
use crate::gpu::driver::{Driver, ElementKind};

/// The type of activations, and how copies of the masters in it are held.
pub trait Precision: Send + Sync + 'static {
    /// The type.
    type Activation: ActivationElement;
    /// The same, for drivers and compilers.
    const ELEMENT: ElementKind;

    /// The copies among `copies` where they differ from the masters, else the masters.
    fn compute<'a, D: Driver>(
        master: &'a GpuBuffer<D, f32>,
        copies: &'a Copies<D, Self::Activation>,
    ) -> &'a GpuBuffer<D, Self::Activation>;

    /// [`compute`](Self::compute), to be written.
    fn compute_mut<'a, D: Driver>(
        master: &'a mut GpuBuffer<D, f32>,
        copies: &'a mut Copies<D, Self::Activation>,
    ) -> &'a mut GpuBuffer<D, Self::Activation>;
}

/// Copies of the masters in activation precision; none where that is fp32.
pub struct Copies<D: Driver, T>(pub(super) Option<GpuBuffer<D, T>>);

/// Activations and products of fp32.
#[derive(Clone, Copy, Debug)]
pub struct Fp32;

/// Activations and products' operands of bf16; masters, accumulation, states and the residual stream stay fp32.
#[derive(Clone, Copy, Debug)]
pub struct Bf16;

impl Precision for Fp32 {
    type Activation = f32;
    const ELEMENT: ElementKind = ElementKind::F32;

    fn compute<'a, D: Driver>(
        master: &'a GpuBuffer<D, f32>,
        copies: &'a Copies<D, f32>,
    ) -> &'a GpuBuffer<D, f32> {
        copies.0.as_ref().unwrap_or(master)
    }

    fn compute_mut<'a, D: Driver>(
        master: &'a mut GpuBuffer<D, f32>,
        copies: &'a mut Copies<D, f32>,
    ) -> &'a mut GpuBuffer<D, f32> {
        copies.0.as_mut().unwrap_or(master)
    }
}

impl Precision for Bf16 {
    type Activation = half::bf16;
    const ELEMENT: ElementKind = ElementKind::Bf16;

    fn compute<'a, D: Driver>(
        _master: &'a GpuBuffer<D, f32>,
        copies: &'a Copies<D, half::bf16>,
    ) -> &'a GpuBuffer<D, half::bf16> {
        // `rounded_copy` allocates them whenever the precision is not that of the masters.
        copies.0.as_ref().expect("bf16 weights have copies")
    }

    fn compute_mut<'a, D: Driver>(
        _master: &'a mut GpuBuffer<D, f32>,
        copies: &'a mut Copies<D, half::bf16>,
    ) -> &'a mut GpuBuffer<D, half::bf16> {
        copies.0.as_mut().expect("bf16 weights have copies")
    }
}
