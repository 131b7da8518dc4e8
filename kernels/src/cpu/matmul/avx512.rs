//! Matrix products for AVX-512, to the bit those of `matrixmultiply`.
//!
//! An element is a chain of fused multiply-adds from +0.0 over each block of [`BLOCK`] along k, and the blocks are added in
//! order. What this module does better is everything around the chain: operands are packed by transposing 16 x 16 tiles in
//! registers, and a few rows (generation) read the other operand where it lies instead of packing it at all.
//!
//! A product goes block by block along k: the block's part of b is packed into slivers of [`COLUMNS`] columns that stay in the
//! second-level cache, a's into slivers of [`ROWS`] rows, and [`tile`] holds the sums of one sliver by another in registers.

use std::arch::x86_64::*;
use std::cell::RefCell;

use super::{Operand, Part};
use crate::cpu::Buffer;
use crate::cpu::simd::avx512::transpose;
use crate::error::Result;

/// Elements along k that one chain takes, as `matrixmultiply` cuts them. Numerics.
pub(super) const BLOCK: usize = 256;
/// Lanes of a register.
const LANES: usize = 16;
/// Rows and columns of a tile of sums: 24 registers of 32, with two for b; a's elements are broadcast from memory.
const ROWS: usize = 12;
const COLUMNS: usize = 2 * LANES;
/// Rows and columns that are packed at once: half a megabyte of a, one of b.
const PANEL_ROWS: usize = 43 * ROWS;
const PANEL_COLUMNS: usize = 1024;
/// Products of at most as many rows do not pack.
const FEW_ROWS: usize = 8;

/// A thread's packed operands.
struct Packed {
    a: Buffer<f32>,
    b: Buffer<f32>,
}

impl Packed {
    fn new() -> Result<Self> {
        Ok(Self {
            // Whole registers are stored where only twelve lanes count: the last one ends past the last sliver.
            a: Buffer::zeroed(PANEL_ROWS * BLOCK + LANES)?,
            b: Buffer::zeroed(PANEL_COLUMNS * BLOCK)?,
        })
    }
}

thread_local! {
    static PACKED: RefCell<Option<Packed>> = const { RefCell::new(None) };
}

/// Whether [`product`] did the part; it does not where there is no memory for packing.
///
/// # Safety
/// The processor has AVX-512 F, and all elements that the part's sizes and strides reach may be read, and those of its output
/// written, by this thread alone.
pub(super) unsafe fn product(part: &Part) -> bool {
    if part.rows <= FEW_ROWS && part.b.has_unit_stride() {
        // SAFETY: the caller's promise.
        unsafe { few_rows(part) };
        return true;
    }
    PACKED.with_borrow_mut(|packed| {
        if packed.is_none() {
            *packed = Packed::new().ok();
        }
        let Some(packed) = packed else { return false };
        // SAFETY: the caller's promise.
        unsafe { packed_product(part, packed) };
        true
    })
}

impl Operand {
    /// The same operand from element (row, column) on.
    ///
    /// # Safety
    /// The element lies in the operand, or one past its end.
    #[inline(always)]
    unsafe fn from(self, row: usize, column: usize) -> Self {
        let offset = row as isize * self.row_stride + column as isize * self.column_stride;
        // SAFETY: the caller's promise.
        Self { start: unsafe { self.start.offset(offset) }, ..self }
    }

    /// Element (row, column).
    ///
    /// # Safety
    /// It lies in the operand.
    #[inline(always)]
    unsafe fn at(self, row: usize, column: usize) -> *const f32 {
        // SAFETY: the caller's promise.
        unsafe { self.from(row, column).start }
    }

    fn has_unit_stride(self) -> bool {
        self.row_stride == 1 || self.column_stride == 1
    }
}

/// The first `count` lanes.
#[inline(always)]
fn first(count: usize) -> __mmask16 {
    if count >= LANES { !0 } else { (1 << count) - 1 }
}

/// # Safety
/// As [`product`].
#[target_feature(enable = "avx512f")]
unsafe fn packed_product(part: &Part, packed: &mut Packed) {
    for first_column in (0..part.columns).step_by(PANEL_COLUMNS) {
        let columns = PANEL_COLUMNS.min(part.columns - first_column);
        let mut adds = part.beta != 0.0;
        // A product over nothing is zero.
        for first_k in (0..part.k.max(1)).step_by(BLOCK) {
            let k = BLOCK.min(part.k - first_k);
            // SAFETY: offsets below the part's sizes; slivers lie one after the other in a panel's memory.
            unsafe {
                let b = part.b.from(first_k, first_column);
                for column in (0..columns).step_by(COLUMNS) {
                    let to = packed.b.as_mut_ptr().add(column * k);
                    let width = COLUMNS.min(columns - column);
                    pack_columns(to, b.from(0, column), k, width);
                }
                for first_row in (0..part.rows).step_by(PANEL_ROWS) {
                    let rows = PANEL_ROWS.min(part.rows - first_row);
                    let a = part.a.from(first_row, first_k);
                    for row in (0..rows).step_by(ROWS) {
                        let to = packed.a.as_mut_ptr().add(row * k);
                        pack_rows(to, a.from(row, 0), k, ROWS.min(rows - row));
                    }
                    let out = part.out.offset(first_row as isize * part.out_row_stride);
                    let out = out.add(first_column);
                    let panel = Panel { k, rows, columns, adds };
                    panel.multiply(out, part.out_row_stride, packed);
                }
            }
            adds = true;
        }
    }
}

/// One block of k of packed rows and columns.
struct Panel {
    k: usize,
    rows: usize,
    columns: usize,
    /// Whether sums are added to the output, or replace it.
    adds: bool,
}

impl Panel {
    /// # Safety
    /// As [`product`]; `packed` holds the panel.
    #[target_feature(enable = "avx512f")]
    unsafe fn multiply(&self, out: *mut f32, out_row_stride: isize, packed: &Packed) {
        let Self { k, rows, columns, adds } = *self;
        for column in (0..columns).step_by(COLUMNS) {
            for row in (0..rows).step_by(ROWS) {
                // SAFETY: slivers of the panel, and the output's elements that belong to them.
                unsafe {
                    let out = out.offset(row as isize * out_row_stride).add(column);
                    let out = Tile {
                        out,
                        row_stride: out_row_stride,
                        rows: ROWS.min(rows - row),
                        columns: columns - column,
                        adds,
                    };
                    let a = packed.a.as_ptr().add(row * k);
                    let b = packed.b.as_ptr().add(column * k);
                    if columns - column > LANES {
                        tile::<2>(out, a, b, k);
                    } else {
                        tile::<1>(out, a, b, k);
                    }
                }
            }
        }
    }
}

/// Where a tile of sums goes.
struct Tile {
    out: *mut f32,
    row_stride: isize,
    rows: usize,
    columns: usize,
    adds: bool,
}

/// `out[rows, columns] (+)= a b` for a sliver of each.
///
/// # Safety
/// `a` holds k times [`ROWS`] elements, `b` k times V registers, and `out` is writable.
#[target_feature(enable = "avx512f")]
unsafe fn tile<const V: usize>(to: Tile, mut a: *const f32, mut b: *const f32, k: usize) {
    let mut sums = [[_mm512_setzero_ps(); V]; ROWS];
    for _ in 0..k {
        // SAFETY: the caller's promise.
        unsafe {
            let columns: [__m512; V] = std::array::from_fn(|v| _mm512_loadu_ps(b.add(v * LANES)));
            for (row, sums) in sums.iter_mut().enumerate() {
                let x = _mm512_set1_ps(*a.add(row));
                for (sum, &column) in sums.iter_mut().zip(&columns) {
                    *sum = _mm512_fmadd_ps(x, column, *sum);
                }
            }
            a = a.add(ROWS);
            b = b.add(V * LANES);
        }
    }
    for (row, sums) in sums.iter().enumerate() {
        if row < to.rows {
            for (v, &sum) in sums.iter().enumerate() {
                let mask = first(to.columns.saturating_sub(v * LANES));
                // SAFETY: the caller's promise; lanes past the last column are masked.
                unsafe {
                    let out = to.out.offset(row as isize * to.row_stride).add(v * LANES);
                    store(out, mask, sum, to.adds);
                }
            }
        }
    }
}

/// # Safety
/// The lanes of `mask` may be written, and read where `adds`.
#[target_feature(enable = "avx512f")]
unsafe fn store(out: *mut f32, mask: __mmask16, sum: __m512, adds: bool) {
    // SAFETY: the caller's promise.
    unsafe {
        let sum = if adds { _mm512_add_ps(_mm512_maskz_loadu_ps(mask, out), sum) } else { sum };
        _mm512_mask_storeu_ps(out, mask, sum);
    }
}

/// Packs `width` columns of `b[k, width]`: k by k, [`COLUMNS`] elements each, or [`LANES`] where no more are there; the rest
/// zeros.
///
/// # Safety
/// The operand may be read, and `to` holds the sliver.
#[target_feature(enable = "avx512f")]
unsafe fn pack_columns(to: *mut f32, b: Operand, k: usize, width: usize) {
    let registers = width.div_ceil(LANES);
    for register in 0..registers {
        let lanes = LANES.min(width - register * LANES);
        let stride = registers * LANES;
        // SAFETY: as the caller's; these are columns of the sliver.
        unsafe {
            let to = to.add(register * LANES);
            let b = b.from(0, register * LANES);
            pack_lanes(to, stride, Lines::columns(b), k, lanes);
        }
    }
}

/// Packs `rows` rows of `a[rows, k]`: k by k, [`ROWS`] elements each, the rest zeros.
///
/// # Safety
/// The operand may be read, and `to` holds the sliver and [`LANES`] elements more.
#[target_feature(enable = "avx512f")]
unsafe fn pack_rows(to: *mut f32, a: Operand, k: usize, rows: usize) {
    // SAFETY: the caller's promise. A register has more lanes than a sliver has rows: each is written over the end of the
    // one before it.
    unsafe { pack_lanes(to, ROWS, Lines::rows(a), k, rows) }
}

/// Lines along k: columns of b, or rows of a.
#[derive(Clone, Copy)]
struct Lines {
    start: *const f32,
    /// Elements from line to line.
    line_stride: isize,
    /// Elements from k to k + 1.
    k_stride: isize,
}

impl Lines {
    fn columns(b: Operand) -> Self {
        Self { start: b.start, line_stride: b.column_stride, k_stride: b.row_stride }
    }

    fn rows(a: Operand) -> Self {
        Self { start: a.start, line_stride: a.row_stride, k_stride: a.column_stride }
    }

    /// # Safety
    /// The element may be read.
    #[inline(always)]
    unsafe fn at(self, line: usize, k: usize) -> *const f32 {
        let offset = line as isize * self.line_stride + k as isize * self.k_stride;
        // SAFETY: the caller's promise.
        unsafe { self.start.offset(offset) }
    }
}

/// For each k, the `lanes` lines' elements as one register at `to + stride k`, in order of k; lanes past the last are zero.
///
/// # Safety
/// The lines may be read, and whole registers written.
#[target_feature(enable = "avx512f")]
unsafe fn pack_lanes(to: *mut f32, stride: usize, lines: Lines, k: usize, lanes: usize) {
    // SAFETY: the caller's promise; loads are masked to the lines, and to k, that there are.
    unsafe {
        if lines.line_stride == 1 {
            for k in 0..k {
                let x = _mm512_maskz_loadu_ps(first(lanes), lines.at(0, k));
                _mm512_storeu_ps(to.add(k * stride), x);
            }
        } else if lines.k_stride == 1 {
            for first_k in (0..k).step_by(LANES) {
                let count = LANES.min(k - first_k);
                let tile = transposed(lines, first_k, count, lanes);
                for (k, &x) in tile[..count].iter().enumerate() {
                    _mm512_storeu_ps(to.add((first_k + k) * stride), x);
                }
            }
        } else {
            for k in 0..k {
                let mut x = [0.0; LANES];
                for (line, x) in x[..lanes].iter_mut().enumerate() {
                    *x = *lines.at(line, k);
                }
                _mm512_storeu_ps(to.add(k * stride), _mm512_loadu_ps(x.as_ptr()));
            }
        }
    }
}

/// The elements `first_k .. first_k + count` of `lanes` lines whose k is contiguous: register k holds the lines' elements
/// there, zeros past the last line; registers past `count` hold zeros.
///
/// # Safety
/// The lines may be read.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn transposed(lines: Lines, first_k: usize, count: usize, lanes: usize) -> [__m512; LANES] {
    let mask = first(count);
    let mut rows = [_mm512_setzero_ps(); LANES];
    if lanes == LANES && count == LANES {
        for (line, row) in rows.iter_mut().enumerate() {
            // SAFETY: the caller's promise.
            *row = unsafe { _mm512_loadu_ps(lines.at(line, first_k)) };
        }
    } else {
        for (line, row) in rows[..lanes].iter_mut().enumerate() {
            // SAFETY: the caller's promise.
            *row = unsafe { _mm512_maskz_loadu_ps(mask, lines.at(line, first_k)) };
        }
    }
    transpose(rows)
}

/// # Safety
/// As [`product`]; b has a unit stride, and there are 1 to [`FEW_ROWS`] rows.
unsafe fn few_rows(part: &Part) {
    // SAFETY: the caller's promise.
    unsafe {
        match part.rows {
            1 => rows::<1>(part),
            2 => rows::<2>(part),
            3 => rows::<3>(part),
            4 => rows::<4>(part),
            5 => rows::<5>(part),
            6 => rows::<6>(part),
            7 => rows::<7>(part),
            _ => rows::<8>(part),
        }
    }
}

/// A product of R rows: sixteen columns at a time, b read where it lies.
///
/// # Safety
/// As [`few_rows`].
#[target_feature(enable = "avx512f")]
unsafe fn rows<const R: usize>(part: &Part) {
    for column in (0..part.columns).step_by(LANES) {
        let lanes = LANES.min(part.columns - column);
        let mut total = [_mm512_setzero_ps(); R];
        let mut adds = part.beta != 0.0;
        // SAFETY: as the caller's; lanes past the last column are masked, and these are columns and blocks of k of the part.
        unsafe {
            let out = |row: usize| part.out.offset(row as isize * part.out_row_stride).add(column);
            if adds {
                for (row, total) in total.iter_mut().enumerate() {
                    *total = _mm512_maskz_loadu_ps(first(lanes), out(row));
                }
            }
            for first_k in (0..part.k).step_by(BLOCK) {
                let k = BLOCK.min(part.k - first_k);
                let lines = Lines::columns(part.b.from(first_k, column));
                let sums = row_sums::<R>(part.a.from(0, first_k), lines, k, lanes);
                for (total, sum) in total.iter_mut().zip(sums) {
                    *total = if adds { _mm512_add_ps(*total, sum) } else { sum };
                }
                adds = true;
            }
            for (row, &total) in total.iter().enumerate() {
                _mm512_mask_storeu_ps(out(row), first(lanes), total);
            }
        }
    }
}

/// The sums of one block of k.
///
/// # Safety
/// As [`rows`].
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn row_sums<const R: usize>(
    a: Operand,
    lines: Lines,
    k: usize,
    lanes: usize,
) -> [__m512; R] {
    let mut sums = [_mm512_setzero_ps(); R];
    // SAFETY: the caller's promise; loads are masked to the columns, and to k, that there are.
    unsafe {
        let add = |sums: &mut [__m512; R], k: usize, x: __m512| {
            for (row, sum) in sums.iter_mut().enumerate() {
                *sum = _mm512_fmadd_ps(_mm512_set1_ps(*a.at(row, k)), x, *sum);
            }
        };
        if lines.line_stride == 1 {
            for k in 0..k {
                add(&mut sums, k, _mm512_maskz_loadu_ps(first(lanes), lines.at(0, k)));
            }
        } else {
            for first_k in (0..k).step_by(LANES) {
                let count = LANES.min(k - first_k);
                let tile = transposed(lines, first_k, count, lanes);
                for (k, &x) in tile[..count].iter().enumerate() {
                    add(&mut sums, first_k + k, x);
                }
            }
        }
    }
    sums
}
