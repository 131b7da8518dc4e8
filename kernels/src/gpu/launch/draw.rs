//! A token drawn from each row of logits.

use bytemuck::{Pod, Zeroable};

use super::sizes::{blocks, size32};
use super::{exactly, exactly_mut, row_stride};
use crate::backend::{Draw, DrawSettings};
use crate::error::Result;
use crate::gpu::buffer::Place;
use crate::gpu::driver::{Address, Driver};
use crate::gpu::precision::Precision;
use crate::gpu::source::DRAW;
use crate::gpu::{Gpu, GpuStream};
use crate::view::{Matrix, Slice, SliceMut};

const THREADS: u32 = 512;

/// `Draw` of draw.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Arguments {
    tokens: Address,
    logits: Address,
    uniforms: Address,
    row_stride: u64,
    temperature: f64,
    top_p: f64,
    min_p: f64,
    top_k: u32,
    columns: u32,
    scale: f32,
    unused: u32,
}

impl<D: Driver, P: Precision> Draw for Gpu<D, P> {
    fn draw(
        &self,
        stream: &mut GpuStream<D>,
        tokens: SliceMut<'_, Self, u32>,
        logits: Matrix<'_, Self, f32>,
        uniforms: Slice<'_, Self, f64>,
        scale: f32,
        settings: &DrawSettings,
    ) -> Result<()> {
        const KERNEL: &str = "draw";
        settings.check()?;
        let (rows, columns) = (logits.rows, logits.columns);
        exactly_mut(KERNEL, "tokens", &tokens, rows)?;
        exactly(KERNEL, "uniform numbers", &uniforms, rows)?;
        let columns = size32(KERNEL, "columns", columns)?;
        let arguments = Arguments {
            tokens: tokens.address(),
            logits: logits.address(),
            uniforms: uniforms.address(),
            row_stride: row_stride(KERNEL, "logits", &logits, rows, logits.columns)?,
            temperature: settings.temperature,
            top_p: settings.top_p,
            min_p: settings.min_p,
            // A top-k of at least the number of columns keeps all.
            top_k: u32::try_from(settings.top_k).unwrap_or(0),
            columns,
            scale,
            unused: 0,
        };
        let launch = blocks(KERNEL, rows, THREADS)?;
        // SAFETY: there are a token and a uniform number for each row of the logits.
        unsafe { self.launch(stream, &DRAW, KERNEL, launch, arguments) }
    }
}
