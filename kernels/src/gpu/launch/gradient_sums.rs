//! Sums of gradients: of grains into a lane, of uses of a parameter, and of squares.

use bytemuck::{Pod, Zeroable};

use super::sizes::{Access, WIDE_BYTES, blocks, size32, stride_bytes};
use super::{KernelName, exactly, row_stride_mut};
use crate::backend::{GradientSums, check_uses};
use crate::error::{KernelError, Result};
use crate::gpu::buffer::Place;
use crate::gpu::driver::{Address, Driver};
use crate::gpu::precision::Precision;
use crate::gpu::source::GRADIENT_SUMS;
use crate::gpu::{Gpu, GpuStream, ScratchSlot};
use crate::view::{MatrixMut, Slice, SliceMut};

const THREADS: u32 = 256;
/// Packs that a thread of `accumulate` and `mean_gradient` has.
const BATCH: usize = 4;
/// Elements of a pack of wide loads.
const WIDE_ELEMENTS: usize = 4;
/// Gradients that one launch of `mean_gradient` adds.
const USES: usize = 8;
/// Elements of a piece of a range whose squares are summed. Numerics: it cuts the sum.
const PIECE: usize = 16_384;
/// Threads that sum the pieces of a range.
const SUM_THREADS: u32 = 64;

/// `Accumulate` of gradient_sums.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Accumulate {
    lane: Address,
    gradients: Address,
    elements: u64,
    grains: u64,
}

/// `AddParts` of gradient_sums.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct AddParts {
    lane: Address,
    parts: Address,
    lane_stride: u64,
    elements: u32,
    columns: u32,
    entries: u32,
    parts_per_grain: u32,
}

/// `parts[grains, of_grain, rows, columns]` at an address: what the gradients of grains are the sums of.
pub(in crate::gpu) struct Parts {
    pub(in crate::gpu) address: Address,
    pub(in crate::gpu) grains: usize,
    /// Parts of each grain.
    pub(in crate::gpu) of_grain: usize,
}

/// `MeanGradient` of gradient_sums.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct MeanGradient {
    out: Address,
    uses: [Address; USES],
    elements: u64,
    use_count: u32,
    count: f32,
}

/// `SquaresOfPieces` of gradient_sums.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct SquaresOfPieces {
    partials: Address,
    x: Address,
    pieces: Address,
}

/// `SumsOfPieces` of gradient_sums.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct SumsOfPieces {
    sums: Address,
    partials: Address,
    first_piece: Address,
}

/// Elements of a block whose threads have [`BATCH`] packs.
fn block_elements(access: Access) -> usize {
    let pack = match access {
        Access::Wide => WIDE_ELEMENTS,
        Access::Single => 1,
    };
    THREADS as usize * BATCH * pack
}

/// The pieces of ranges.
struct Pieces {
    /// First element and elements of each.
    places: Vec<[u64; 2]>,
    /// For each range, and after the last: the number of pieces before it.
    firsts: Vec<u64>,
}

impl Pieces {
    /// The pieces of the ranges of `elements` elements that end at `ends`.
    fn new(ends: &[usize], elements: usize) -> Result<Self> {
        const KERNEL: &str = "sums_of_squares";
        let last = ends.last().copied().unwrap_or(0);
        if last != elements {
            return Err(KernelError::shape(KERNEL, "the last end", elements, last));
        }
        let mut pieces = Self { places: Vec::new(), firsts: vec![0] };
        let mut start = 0;
        for &end in ends {
            if end < start || end > elements {
                let expected = format!("an end from {start} to {elements}");
                return Err(KernelError::shape(KERNEL, "ends", expected, end));
            }
            for first in (start..end).step_by(PIECE) {
                pieces.places.push([first as u64, PIECE.min(end - first) as u64]);
            }
            pieces.firsts.push(pieces.places.len() as u64);
            start = end;
        }
        Ok(pieces)
    }
}

impl<D: Driver, P: Precision> GradientSums for Gpu<D, P> {
    fn accumulate(
        &self,
        stream: &mut GpuStream<D>,
        lane: SliceMut<'_, Self, f32>,
        gradients: Slice<'_, Self, f32>,
    ) -> Result<()> {
        const KERNEL: &str = "accumulate";
        let elements = lane.elements;
        if elements == 0 || !gradients.elements.is_multiple_of(elements) {
            let expected = format!("a multiple of the lane's {elements} elements");
            return Err(KernelError::shape(KERNEL, "gradients", expected, gradients.elements));
        }
        let arguments = Accumulate {
            lane: lane.address(),
            gradients: gradients.address(),
            elements: elements as u64,
            grains: (gradients.elements / elements) as u64,
        };
        // A single grain is a row by itself.
        let stride = if arguments.grains > 1 { elements * size_of::<f32>() } else { 0 };
        let operands = [(arguments.lane, 0), (arguments.gradients, stride as u64)];
        let access = Access::of(WIDE_BYTES, &operands);
        let name = access.choose("accumulate_wide", "accumulate_single");
        let launch = blocks(KERNEL, elements.div_ceil(block_elements(access)), THREADS)?;
        // SAFETY: gradients are whole lanes.
        unsafe { self.launch(stream, &GRADIENT_SUMS, name, launch, arguments) }
    }

    fn mean_gradient(
        &self,
        stream: &mut GpuStream<D>,
        sums: SliceMut<'_, Self, f32>,
        first: usize,
        others: &[usize],
        elements: usize,
        count: f32,
    ) -> Result<()> {
        const KERNEL: &str = "mean_gradient";
        check_uses(first, others, elements, sums.elements)?;
        let place = |start: usize| sums.address().offset(start * size_of::<f32>());
        let uses: Vec<Address> = [&[first], others].concat().into_iter().map(place).collect();
        // SAFETY: every use lies inside `sums`, and none but the first overlaps what is written.
        unsafe { self.launch_mean(stream, KERNEL, uses[0], &uses, elements, count) }
    }

    fn sums_of_squares(
        &self,
        stream: &mut GpuStream<D>,
        out: SliceMut<'_, Self, f64>,
        x: Slice<'_, Self, f32>,
        ends: &[usize],
    ) -> Result<()> {
        const KERNEL: &str = "sums_of_squares";
        exactly(KERNEL, "out", &out.as_slice(), ends.len())?;
        let Pieces { places, firsts } = Pieces::new(ends, x.elements)?;
        if ends.is_empty() {
            return Ok(());
        }
        let tables = [bytemuck::cast_slice(&places), bytemuck::cast_slice(&firsts)].concat();
        let pieces = stream.upload_scratch(&self.driver, ScratchSlot::First, &tables)?;
        let first_piece = pieces.offset(size_of_val(places.as_slice()));
        let partial_bytes = places.len() * size_of::<f64>();
        let partials = stream.scratch(&self.driver, ScratchSlot::Second, partial_bytes)?;

        let squares = SquaresOfPieces { partials, x: x.address(), pieces };
        if !places.is_empty() {
            let launch = blocks(KERNEL, places.len(), THREADS)?;
            // SAFETY: the pieces lie inside x, and there is a partial sum for each.
            unsafe { self.launch(stream, &GRADIENT_SUMS, "squares_of_pieces", launch, squares) }?;
        }
        let of_pieces = SumsOfPieces { sums: out.address(), partials, first_piece };
        let launch = blocks(KERNEL, ends.len(), SUM_THREADS)?;
        // SAFETY: ranges are of pieces that were summed, and there is a sum for each.
        unsafe { self.launch(stream, &GRADIENT_SUMS, "sums_of_pieces", launch, of_pieces) }
    }
}

impl<D: Driver, P: Precision> Gpu<D, P> {
    /// `lane += parts[g, 0] + parts[g, 1] + ...` for each grain g in order; the parts of a grain are added first, in order.
    ///
    /// # Safety
    /// `parts` names memory of the device for as many matrices as it states, each of the lane's rows and columns.
    pub(in crate::gpu) unsafe fn launch_add_parts(
        &self,
        stream: &mut GpuStream<D>,
        lane: MatrixMut<'_, Self, f32>,
        parts: Parts,
    ) -> Result<()> {
        const KERNEL: &str = "add_parts";
        let elements = size32(KERNEL, "elements", lane.rows.saturating_mul(lane.columns))?;
        let lane_stride = row_stride_mut(KERNEL, "lane", &lane, lane.rows, lane.columns)?;
        let arguments = AddParts {
            lane: lane.address(),
            parts: parts.address,
            lane_stride,
            elements,
            columns: size32(KERNEL, "columns", lane.columns)?,
            entries: size32(KERNEL, "parts", parts.grains.saturating_mul(parts.of_grain))?,
            parts_per_grain: size32(KERNEL, "parts of a grain", parts.of_grain)?,
        };
        // A pack lies in one row if the row length keeps packs aligned.
        let operands = [
            (arguments.lane, stride_bytes::<f32>(lane_stride)),
            (arguments.parts, stride_bytes::<f32>(u64::from(arguments.columns))),
        ];
        let access = Access::of(WIDE_BYTES, &operands);
        let name = access.choose("add_parts_wide", "add_parts_single");
        let pack = if access == Access::Wide { WIDE_ELEMENTS } else { 1 };
        let launch =
            blocks(KERNEL, (elements as usize).div_ceil(THREADS as usize * pack), THREADS)?;
        // SAFETY: the lane is a view, and the caller guarantees the validity of the parts.
        unsafe { self.launch(stream, &GRADIENT_SUMS, name, launch, arguments) }
    }

    /// The sum of `uses`, in order, divided by `count`.
    ///
    /// # Safety
    /// `out` and `uses` name `elements` elements each, and nothing else borrows `out`; a use that overlaps `out` is the first, and
    /// is all of it.
    unsafe fn launch_mean(
        &self,
        stream: &mut GpuStream<D>,
        kernel: KernelName,
        out: Address,
        uses: &[Address],
        elements: usize,
        count: f32,
    ) -> Result<()> {
        let mut left = uses.iter().copied();
        // The sum so far comes first: it stays in `out` until the last launch divides it.
        let mut so_far = None;
        loop {
            let mut addresses = [Address::NULL; USES];
            let mut use_count = 0;
            for (place, address) in addresses.iter_mut().zip(so_far.into_iter().chain(&mut left)) {
                *place = address;
                use_count += 1;
            }
            let is_last = left.len() == 0;
            let arguments = MeanGradient {
                out,
                uses: addresses,
                elements: elements as u64,
                use_count,
                count: if is_last { count } else { 1.0 },
            };
            let used = addresses[..use_count as usize].iter().chain([&arguments.out]);
            let operands: Vec<_> = used.map(|&address| (address, 0)).collect();
            let access = Access::of(WIDE_BYTES, &operands);
            let name = access.choose("mean_gradient_wide", "mean_gradient_single");
            let launch = blocks(kernel, elements.div_ceil(block_elements(access)), THREADS)?;
            // SAFETY: the caller guarantees the validity of `out` and the uses; the sum so far is `out` itself.
            unsafe { self.launch(stream, &GRADIENT_SUMS, name, launch, arguments) }?;
            if is_last {
                return Ok(());
            }
            so_far = Some(out);
        }
    }
}
