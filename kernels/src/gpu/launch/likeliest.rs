//! The likeliest token of each row of logits.

use bytemuck::{Pod, Zeroable};

use super::sizes::{Access, blocks, size32, stride_bytes};
use super::{exactly_mut, row_stride};
use crate::backend::{Element, Likeliest};
use crate::error::Result;
use crate::gpu::buffer::Place;
use crate::gpu::driver::{Address, Driver};
use crate::gpu::precision::Precision;
use crate::gpu::source::LIKELIEST;
use crate::gpu::{Gpu, GpuStream};
use crate::view::{Matrix, SliceMut};

const THREADS: u32 = 1024;
/// Columns that a thread loads at once of aligned rows: `COLUMNS` of likeliest.cu.
const COLUMNS: usize = 4;

/// `Likeliest` of likeliest.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Arguments {
    tokens: Address,
    logits: Address,
    row_stride: u64,
    columns: u32,
    scale: f32,
    wide: u32,
    unused: u32,
}

impl<D: Driver, P: Precision> Likeliest for Gpu<D, P> {
    fn likeliest(
        &self,
        stream: &mut GpuStream<D>,
        tokens: SliceMut<'_, Self, u32>,
        logits: Matrix<'_, Self, f32>,
        scale: f32,
    ) -> Result<()> {
        // SAFETY: the kernel reads fp32.
        unsafe { self.launch_likeliest(stream, "likeliest", tokens, logits, scale) }
    }

    fn likeliest_of_activations(
        &self,
        stream: &mut GpuStream<D>,
        tokens: SliceMut<'_, Self, u32>,
        logits: Matrix<'_, Self, P::Activation>,
        scale: f32,
    ) -> Result<()> {
        const KERNEL: &str = "likeliest_of_activations";
        // SAFETY: the kernel reads the type of activations that its source is compiled for.
        unsafe { self.launch_likeliest(stream, KERNEL, tokens, logits, scale) }
    }
}

impl<D: Driver, P: Precision> Gpu<D, P> {
    /// A block for each row; `name` is the kernel of logits of type T.
    ///
    /// # Safety
    /// `name` must read elements of type T.
    unsafe fn launch_likeliest<T: Element>(
        &self,
        stream: &mut GpuStream<D>,
        name: &'static str,
        tokens: SliceMut<'_, Self, u32>,
        logits: Matrix<'_, Self, T>,
        scale: f32,
    ) -> Result<()> {
        const KERNEL: &str = "likeliest";
        let (rows, columns) = (logits.rows, logits.columns);
        exactly_mut(KERNEL, "tokens", &tokens, rows)?;
        let row_stride = row_stride(KERNEL, "logits", &logits, rows, columns)?;
        let of_rows = (logits.address(), stride_bytes::<T>(row_stride));
        let access = Access::of((COLUMNS * size_of::<T>()) as u64, &[of_rows]);
        let arguments = Arguments {
            tokens: tokens.address(),
            logits: logits.address(),
            row_stride,
            columns: size32(KERNEL, "columns", columns)?,
            scale,
            wide: u32::from(access == Access::Wide),
            unused: 0,
        };
        let launch = blocks(KERNEL, rows, THREADS)?;
        // SAFETY: there is a token for each row of the logits; the caller guarantees the validity of their type.
        unsafe { self.launch(stream, &LIKELIEST, name, launch, arguments) }
    }
}
