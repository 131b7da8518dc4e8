//! Matrix products for AVX-512, to the bit those of `matrixmultiply`.
//!
//! An element is a chain of fused multiply-adds from +0.0 over each block of [`BLOCK`] along k, and the blocks are added in
//! order. What this module does better is everything around the chain: operands are packed by transposing 16 x 16 tiles in
//! registers, what comes next is asked for while a tile is summed ([`ahead`]), and where packing would not pay (a few rows, as
//! in generation, or a few columns) the operand is read where it lies.
//!
//! A product goes block by block along k: the block's part of b is packed into slivers of [`COLUMNS`] columns that stay in the
//! second-level cache, a's into slivers of [`ROWS`] rows, and [`tile`] holds the sums of one sliver by another in registers.

mod ahead;
mod few_rows;
mod pack;
mod tile;

use std::arch::x86_64::__mmask16;
use std::cell::RefCell;

use self::ahead::Ahead;
use self::few_rows::few_rows;
use self::pack::{Lines, pack_columns, pack_rows};
use self::tile::{Tile, TileRows, Upcoming, tile};
use super::{Operand, Part};
use crate::cpu::Buffer;
use crate::error::Result;

/// Elements along k that one chain takes, as `matrixmultiply` cuts them. Numerics.
pub(super) const BLOCK: usize = 256;
/// Lanes of a register.
const LANES: usize = 16;
/// Rows and columns of a tile of sums: 24 registers of 32, with two for b; a's elements are broadcast from memory.
const ROWS: usize = 12;
const COLUMNS: usize = 2 * LANES;
/// Rows and columns that are packed at once: a quarter of a megabyte of a, one of b.
const PANEL_ROWS: usize = 22 * ROWS;
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
            for first_row in (0..part.rows).step_by(PANEL_ROWS) {
                // SAFETY: offsets below the part's sizes.
                unsafe {
                    let out = part.out.offset(first_row as isize * part.out_row_stride);
                    let panel = Panel {
                        out: out.add(first_column),
                        out_row_stride: part.out_row_stride,
                        a: part.a.from(first_row, first_k),
                        b: part.b.from(first_k, first_column),
                        k: BLOCK.min(part.k - first_k),
                        rows: PANEL_ROWS.min(part.rows - first_row),
                        columns,
                        adds,
                        packs_b: first_row == 0,
                    };
                    panel.multiply(packed);
                }
            }
            adds = true;
        }
    }
}

/// A panel of rows by a panel of columns, over one block of k.
struct Panel {
    out: *mut f32,
    out_row_stride: isize,
    a: Operand,
    b: Operand,
    k: usize,
    rows: usize,
    columns: usize,
    /// Whether sums are added to the output, or replace it.
    adds: bool,
    /// Whether these are the first rows to meet the columns.
    packs_b: bool,
}

impl Panel {
    /// # Safety
    /// As [`product`]; `packed` holds the columns unless they are packed here.
    #[target_feature(enable = "avx512f")]
    unsafe fn multiply(&self, packed: &mut Packed) {
        let Self { k, rows, columns, .. } = *self;
        let tiles = rows.div_ceil(ROWS);
        // Rows that are read once need not be packed.
        let reads_a = self.a.column_stride == 1 && columns <= COLUMNS;
        let mut upcoming = Upcoming { a: Ahead::nothing(), b: Ahead::nothing(), b_share: 0 };
        for column in (0..columns).step_by(COLUMNS) {
            // SAFETY: slivers lie one after the other in a panel's memory, and offsets are below the panel's sizes.
            unsafe {
                let b = packed.b.as_mut_ptr().add(column * k);
                if self.packs_b {
                    pack_columns(b, self.b.from(0, column), k, COLUMNS.min(columns - column));
                    upcoming.b = self.columns_ahead(column + COLUMNS);
                    upcoming.b_share = upcoming.b.share(tiles);
                }
                for row in (0..rows).step_by(ROWS) {
                    let count = ROWS.min(rows - row);
                    let from = self.a.from(row, 0);
                    let a = packed.a.as_mut_ptr().add(row * k);
                    if column == 0 {
                        if !reads_a {
                            pack_rows(a, from, k, count);
                        }
                        upcoming.a = self.rows_ahead(row + ROWS);
                    }
                    let a = if reads_a {
                        TileRows::Unpacked(from.start, from.row_stride)
                    } else {
                        TileRows::Packed(a)
                    };
                    let to = Tile {
                        out: self.out.offset(row as isize * self.out_row_stride).add(column),
                        row_stride: self.out_row_stride,
                        rows: count,
                        columns: columns - column,
                        adds: self.adds,
                    };
                    if columns - column > LANES {
                        tile::<2>(to, a, b, k, &mut upcoming);
                    } else {
                        tile::<1>(to, a, b, k, &mut upcoming);
                    }
                }
            }
        }
    }

    /// The columns from `column` on that are packed next.
    fn columns_ahead(&self, column: usize) -> Ahead {
        if column >= self.columns {
            return Ahead::nothing();
        }
        // SAFETY: the column is the panel's.
        let lines = Lines::columns(unsafe { self.b.from(0, column) });
        Ahead::lines(lines, COLUMNS.min(self.columns - column), self.k)
    }

    /// The rows from `row` on that are packed or read next.
    fn rows_ahead(&self, row: usize) -> Ahead {
        if row >= self.rows {
            return Ahead::nothing();
        }
        // SAFETY: the row is the panel's.
        let lines = Lines::rows(unsafe { self.a.from(row, 0) });
        Ahead::lines(lines, ROWS.min(self.rows - row), self.k)
    }
}
