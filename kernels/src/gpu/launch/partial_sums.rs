//! The gradients of parameters, whose partial sums are those of runs of rows.

use bytemuck::{Pod, Zeroable};

use super::KernelName;
use super::sizes::{blocks, size32};
use crate::error::Result;
use crate::gpu::driver::{Address, Driver};
use crate::gpu::precision::Precision;
use crate::gpu::source::PARTIAL_SUMS;
use crate::gpu::{Gpu, GpuStream, ScratchSlot};
use crate::shape::GrainRows;

/// Threads of a block, each of which has a column: `SUM_THREADS` of partial_sums.cu.
const SUM_THREADS: u32 = 64;
/// Grains of so many runs and more have several threads a column, which gives the same bits.
const MANY_RUNS: u32 = 512;
/// Columns and threads of a block then, as in partial_sums.cu.
const COLUMNS_OF_MANY: usize = 32;
const THREADS_OF_MANY: u32 = 256;

/// How the rows of grains are cut into runs, for `width` columns.
#[derive(Clone, Copy)]
pub(super) struct Runs {
    /// Runs of all grains.
    pub(super) runs: usize,
    pub(super) runs_per_grain: u32,
    pub(super) rows: u64,
    pub(super) rows_per_grain: u64,
    pub(super) width: u32,
    grains: usize,
}

impl Runs {
    /// Runs of `run_rows` rows at the most, each grain's from its first row.
    ///
    /// # Errors
    /// More columns, or runs of a grain, than a kernel counts.
    pub(super) fn new(
        kernel: KernelName,
        grains: GrainRows,
        run_rows: usize,
        width: usize,
    ) -> Result<Self> {
        // A grain of more rows than exist is one grain.
        let rows_per_grain = grains.rows_per_grain().min(grains.rows());
        let runs_per_grain = rows_per_grain.div_ceil(run_rows);
        let last_grain = grains.range(grains.grains() - 1);
        Ok(Self {
            runs: (grains.grains() - 1) * runs_per_grain + last_grain.len().div_ceil(run_rows),
            runs_per_grain: size32(kernel, "runs of rows", runs_per_grain)?,
            rows: grains.rows() as u64,
            rows_per_grain: rows_per_grain as u64,
            width: size32(kernel, "width", width)?,
            grains: grains.grains(),
        })
    }

    fn elements(&self) -> usize {
        self.grains * self.width as usize
    }
}

/// The gradients of one parameter or two, and the partial sums from which they are computed. The addresses of a missing parameter
/// are null.
pub(super) struct PartialSums {
    gradients: [Address; 2],
    /// `[runs, d]` each.
    pub(super) partials: [Address; 2],
    runs: Runs,
}

/// `SumPartials` of partial_sums.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct SumPartials {
    gradients: [Address; 2],
    partials: [Address; 2],
    runs: u64,
    elements: u64,
    runs_per_grain: u32,
    width: u32,
}

impl<D: Driver, P: Precision> Gpu<D, P> {
    /// Scratch memory for the partial sums of `gradients`, `[grains, d]` each, of which the second may be null.
    pub(super) fn partial_sums(
        &self,
        stream: &mut GpuStream<D>,
        gradients: [Address; 2],
        runs: Runs,
    ) -> Result<PartialSums> {
        let bytes = runs.runs * runs.width as usize * size_of::<f32>();
        let parameters = if gradients[1] == Address::NULL { 1 } else { 2 };
        let first = stream.scratch(&self.driver, ScratchSlot::First, parameters * bytes)?;
        let second = if parameters == 2 { first.offset(bytes) } else { Address::NULL };
        Ok(PartialSums { gradients, partials: [first, second], runs })
    }

    /// Adds the partial sums of each grain's runs, in order.
    ///
    /// # Safety
    /// Gradients of every grain, and partial sums that kernels before have formed.
    pub(super) unsafe fn launch_sum_partials(
        &self,
        stream: &mut GpuStream<D>,
        kernel: KernelName,
        sums: &PartialSums,
    ) -> Result<()> {
        let elements = sums.runs.elements();
        let parameters = if sums.gradients[1] == Address::NULL { 1 } else { 2 };
        let arguments = SumPartials {
            gradients: sums.gradients,
            partials: sums.partials,
            runs: sums.runs.runs as u64,
            elements: elements as u64,
            runs_per_grain: sums.runs.runs_per_grain,
            width: sums.runs.width,
        };
        let (name, columns, threads) = if arguments.runs_per_grain < MANY_RUNS {
            ("sum_partials", SUM_THREADS as usize, SUM_THREADS)
        } else {
            ("sum_partials_of_many", COLUMNS_OF_MANY, THREADS_OF_MANY)
        };
        let launch = blocks(kernel, (parameters * elements).div_ceil(columns), threads)?;
        // SAFETY: the caller's; the partial sums have the scratch memory that `partial_sums` asked for.
        unsafe { self.launch(stream, &PARTIAL_SUMS, name, launch, arguments) }
    }
}
