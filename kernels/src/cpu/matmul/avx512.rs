//! Matrix products for AVX-512, to the bit those of `matrixmultiply`.
//!
//! An element is a chain of fused multiply-adds from +0.0 over each block of [`BLOCK`] along k, and
//! the blocks are added in order. The gain is around the chain: operands are packed by transposing
//! 16 x 16 tiles in registers, the next memory is prefetched while a tile is summed ([`ahead`]),
//! and where packing would not pay (a few rows, as in generation, or a few columns) the operand is
//! read in place.
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
use self::tile::{Tile, TileRows, Upcoming};
use super::{Operand, Part, Target};
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
const PANEL_ROWS: usize = 43 * ROWS;
/// Rows of a that are packed together where rows lie side by side: whole cache lines.
const ROWS_OF_LINES: usize = 4 * ROWS;
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
            // Whole registers are stored though only twelve lanes count, so the last store ends
            // past the last sliver.
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
                    let target = |target: Target| target.from(first_row, first_column);
                    let (out, sum) = (target(part.out), part.sum.map(target));
                    let (to, before) = match sum.filter(|_| first_k + BLOCK >= part.k) {
                        None => (out, None),
                        Some(sum) => (sum, (first_k > 0).then_some(out)),
                    };
                    let panel = Panel {
                        to,
                        adds: adds || part.sum.is_some_and(|_| first_k + BLOCK >= part.k),
                        before,
                        a: part.a.from(first_row, first_k),
                        b: part.b.from(first_k, first_column),
                        k: BLOCK.min(part.k - first_k),
                        rows: PANEL_ROWS.min(part.rows - first_row),
                        columns,
                        packs_b: first_row == 0,
                        keeps_b: part.rows > PANEL_ROWS,
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
    to: Target,
    /// Whether sums are added to the contents of `to`, or replace them.
    adds: bool,
    /// Sums of earlier blocks that lie elsewhere, which these are added to first.
    before: Option<Target>,
    a: Operand,
    b: Operand,
    k: usize,
    rows: usize,
    columns: usize,
    /// Whether these are the first rows to meet the columns.
    packs_b: bool,
    /// Whether other rows meet the columns later.
    keeps_b: bool,
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
        let together = if self.a.row_stride == 1 { ROWS_OF_LINES } else { ROWS };
        let mut upcoming = Upcoming::nothing();
        for column in (0..columns).step_by(COLUMNS) {
            // SAFETY: slivers lie one after the other in a panel's memory, and offsets are below the panel's sizes.
            unsafe {
                let kept = if self.keeps_b { column * k } else { 0 };
                let b = packed.b.as_mut_ptr().add(kept);
                if self.packs_b {
                    pack_columns(b, self.b.from(0, column), k, COLUMNS.min(columns - column));
                    upcoming.b = self.columns_ahead(column + COLUMNS);
                    upcoming.b_share = upcoming.b.share(tiles);
                }
                for row in (0..rows).step_by(ROWS) {
                    let count = ROWS.min(rows - row);
                    let from = self.a.from(row, 0);
                    let a = packed.a.as_mut_ptr().add(row * k);
                    if column == 0 && row.is_multiple_of(together) {
                        if !reads_a {
                            pack_rows(a, from, k, together.min(rows - row));
                        }
                        upcoming.a = self.rows_ahead(row + together, together);
                        upcoming.a_share = upcoming.a.share(together / ROWS);
                    }
                    let a = if reads_a {
                        TileRows::Unpacked(from.start, from.row_stride)
                    } else {
                        TileRows::Packed(a)
                    };
                    let tile = Tile {
                        to: self.to.from(row, column),
                        adds: self.adds,
                        before: self.before.map(|before| before.from(row, column)),
                        rows: count,
                        columns: columns - column,
                    };
                    tile.sum(a, b, k, &mut upcoming);
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

    /// The `count` rows from `row` on that are packed or read next.
    fn rows_ahead(&self, row: usize, count: usize) -> Ahead {
        if row >= self.rows {
            return Ahead::nothing();
        }
        // SAFETY: the row is the panel's.
        let lines = Lines::rows(unsafe { self.a.from(row, 0) });
        Ahead::lines(lines, count.min(self.rows - row), self.k)
    }
}
