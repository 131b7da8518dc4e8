//! Gradients of weights, added to a lane grain by grain.
//!
//! The gradient of a large weight is one product a grain, which the matrix library adds to the
//! lane. For a small weight one grain is too little work for a GPU: several grains are computed
//! together, as a [batch](Batch) of products in scratch memory, and a kernel adds one grain after
//! the other. For a narrow weight a grain is several entries of the batch: parts of its rows, added
//! in a stated order ([`Cut`]).
//!
//! Whether a weight is small or narrow depends on its shape alone, and the parts of a grain on its
//! rows: so no bit depends on the number of grains in one call.

use crate::backend::WeightGradient;
use crate::error::{KernelError, Result};
use crate::gpu::driver::{Batch, Driver, Rows};
use crate::gpu::launch::gradient_sums::Parts;
use crate::gpu::matmul::Written;
use crate::gpu::precision::Precision;
use crate::gpu::{Gpu, GpuStream, ScratchSlot};
use crate::shape::GrainRows;
use crate::view::{Matrix, MatrixMut};

const KERNEL: &str = "weight_gradient_add";

/// Elements of the largest weight whose grains are formed together: the tiles of a larger one are as many as an H100 has
/// multiprocessors.
const SMALL_ELEMENTS: usize = 3 << 20;

/// Elements of the largest weight whose grains are cut into parts.
const NARROW_ELEMENTS: usize = 1 << 20;

/// Rows of a part, unless the grain has more than [`MOST_PARTS`] of them.
const PART_ROWS: usize = 4096;

/// The parts of a grain at most: those of a narrow weight fit into [`MOST_BYTES`].
const MOST_PARTS: usize = 16;

/// The rows of a part are a multiple of this where a grain has too many for parts of [`PART_ROWS`].
const ROWS_STEP: usize = 64;

/// The products that are formed together at most.
pub(in crate::gpu) const MOST_ENTRIES: usize = 64;

/// Scratch memory that they take at most.
const MOST_BYTES: usize = 64 << 20;

/// How a grain of `rows` rows is cut: parts of `part_rows`, the last of which may be shorter. Numerics: a grain's gradient is the sum of
/// its parts in ascending order in fp32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cut {
    rows: usize,
    part_rows: usize,
}

impl Cut {
    /// The cut for a weight of `elements` elements.
    fn of(elements: usize, rows: usize) -> Self {
        let part_rows = if elements > NARROW_ELEMENTS {
            rows
        } else if rows <= MOST_PARTS * PART_ROWS {
            rows.min(PART_ROWS)
        } else {
            rows.div_ceil(MOST_PARTS).next_multiple_of(ROWS_STEP)
        };
        Self { rows, part_rows }
    }

    fn parts(self) -> usize {
        self.rows.div_ceil(self.part_rows)
    }

    /// Grains that are formed together at most, of a weight of `elements` elements.
    fn most_grains(self, elements: usize) -> usize {
        let grain_bytes = self.parts() * elements * size_of::<f32>();
        (MOST_BYTES / grain_bytes.max(1)).min(MOST_ENTRIES / self.parts()).max(1)
    }

    /// The parts of `grains` grains that follow each other, in batches of equal ones.
    fn batches(self, grains: usize) -> Vec<PartBatch> {
        let Self { rows, part_rows } = self;
        let parts = self.parts();
        if rows.is_multiple_of(part_rows) {
            let entries = grains * parts;
            return vec![PartBatch { first: 0, rows: part_rows, entries, apart: [part_rows, 1] }];
        }
        let of_part = |part: usize| PartBatch {
            first: part,
            rows: part_rows.min(rows - part * part_rows),
            entries: grains,
            apart: [rows, parts],
        };
        (0..parts).map(of_part).collect()
    }
}

/// Parts of the same number of rows, at equal distances.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PartBatch {
    /// The first of them, which is of the first grain.
    first: usize,
    /// Rows of each part.
    rows: usize,
    entries: usize,
    /// From one to the next: rows, and parts of all grains.
    apart: [usize; 2],
}

/// Grains of equally many rows, and the last, which may have fewer: of each the first grain, how many there are, and the rows of one.
fn alike(grains: GrainRows) -> impl Iterator<Item = [usize; 3]> {
    let last = grains.grains() - 1;
    let [rows, last_rows] = [0, last].map(|grain| grains.range(grain).len());
    let runs = if rows == last_rows {
        [[0, last + 1, rows], [last + 1, 0, rows]]
    } else {
        [[0, last, rows], [last, 1, last_rows]]
    };
    runs.into_iter().filter(|&[_, count, _]| count > 0)
}

/// The bytes of scratch memory that the gradient of a weight of `elements` elements takes.
fn scratch_bytes(elements: usize, grains: GrainRows) -> usize {
    if elements > SMALL_ELEMENTS {
        return 0;
    }
    let bytes = |[_, count, rows]: [usize; 3]| {
        let cut = Cut::of(elements, rows);
        count.min(cut.most_grains(elements)) * cut.parts() * elements * size_of::<f32>()
    };
    alike(grains).map(bytes).max().unwrap_or(0)
}

impl<D: Driver, P: Precision> WeightGradient for Gpu<D, P> {
    fn weight_gradient_scratch_bytes(&self, [m, k]: [usize; 2], grains: GrainRows) -> usize {
        scratch_bytes(m.saturating_mul(k), grains)
    }

    fn weight_gradient_add(
        &self,
        stream: &mut GpuStream<D>,
        mut lane: MatrixMut<'_, Self, f32>,
        grad_out: Matrix<'_, Self, P::Activation>,
        input: Matrix<'_, Self, P::Activation>,
        grains: GrainRows,
    ) -> Result<()> {
        for (what, found) in [("rows of grad_out", grad_out.rows), ("rows of input", input.rows)] {
            if found != grains.rows() {
                return Err(KernelError::shape(KERNEL, what, grains.rows(), found));
            }
        }
        let (expected, found) = ([grad_out.columns, input.columns], [lane.rows, lane.columns]);
        if found != expected {
            let (expected, found) = (format!("{expected:?}"), format!("{found:?}"));
            return Err(KernelError::shape(KERNEL, "lane", expected, found));
        }
        let elements = lane.rows.saturating_mul(lane.columns);
        if (1..=SMALL_ELEMENTS).contains(&elements) {
            return self.add_small_weight_gradient(stream, lane, [grad_out, input], grains);
        }
        for grain in 0..grains.grains() {
            let rows = grains.range(grain);
            let grad_out = grad_out.rows(rows.start, rows.len())?.transposed();
            let input = input.rows(rows.start, rows.len())?;
            self.product(stream, lane.reborrow(), grad_out, input, Written::AddedTo, Rows::Fixed)?;
        }
        Ok(())
    }
}

impl<D: Driver, P: Precision> Gpu<D, P> {
    /// The same of sides that were checked, and of a small weight.
    fn add_small_weight_gradient(
        &self,
        stream: &mut GpuStream<D>,
        mut lane: MatrixMut<'_, Self, f32>,
        [grad_out, input]: [Matrix<'_, Self, P::Activation>; 2],
        grains: GrainRows,
    ) -> Result<()> {
        let elements = lane.rows * lane.columns;
        let bytes = scratch_bytes(elements, grains);
        let parts = stream.scratch(&self.driver, ScratchSlot::First, bytes)?;
        for [first_grain, count, rows] in alike(grains) {
            let cut = Cut::of(elements, rows);
            let most = cut.most_grains(elements);
            for start in (0..count).step_by(most) {
                let grains_now = most.min(count - start);
                let first_row = grains.range(first_grain + start).start;
                for part_batch in cut.batches(grains_now) {
                    let PartBatch { first, rows, entries, apart: [rows_apart, parts_apart] } =
                        part_batch;
                    let row = first_row + first * cut.part_rows;
                    let batch = Batch {
                        entries,
                        out: parts_apart * elements,
                        a: rows_apart.saturating_mul(grad_out.row_stride),
                        b: rows_apart.saturating_mul(input.row_stride),
                    };
                    let sides = [grad_out.rows(row, rows)?.transposed(), input.rows(row, rows)?];
                    let out = parts.offset(first * elements * size_of::<f32>());
                    // SAFETY: the rows of all entries are rows of these grains, and there is room for a matrix of every part.
                    unsafe { self.product_batch(stream, out, sides, batch) }?;
                }
                let parts = Parts { address: parts, grains: grains_now, of_grain: cut.parts() };
                // SAFETY: every part of these grains was formed.
                unsafe { self.launch_add_parts(stream, lane.reborrow(), parts) }?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The rows of each entry, in the order in which they lie in scratch memory.
    fn entries(cut: Cut, grains: usize) -> Vec<std::ops::Range<usize>> {
        let mut all = vec![0..0; grains * cut.parts()];
        for PartBatch { first, rows, entries, apart } in cut.batches(grains) {
            for entry in 0..entries {
                let start = first * cut.part_rows + entry * apart[0];
                let place = &mut all[first + entry * apart[1]];
                assert_eq!(*place, 0..0, "two entries in one place");
                *place = start..start + rows;
            }
        }
        all
    }

    #[test]
    fn parts_are_all_rows_in_order() {
        for elements in [1, NARROW_ELEMENTS, NARROW_ELEMENTS + 1, SMALL_ELEMENTS] {
            for rows in [1, 4095, 4096, 4097, 8192, 9000, 65_536, 65_537, 1_000_001] {
                let cut = Cut::of(elements, rows);
                for grains in [1, 2, 5] {
                    let entries = entries(cut, grains);
                    let mut end = 0;
                    for part in &entries {
                        assert_eq!(part.start, end, "{elements} {rows} {grains}");
                        end = part.end;
                    }
                    assert_eq!(end, grains * rows);
                    // The cut of a grain into parts depends on the grain alone.
                    let first = |grain: usize| entries[grain * cut.parts()].start;
                    assert!((0..grains).all(|grain| first(grain) == grain * rows));
                }
            }
        }
    }

    #[test]
    fn scratch_memory_is_bounded() {
        for elements in [1, 1000, NARROW_ELEMENTS, NARROW_ELEMENTS + 1, SMALL_ELEMENTS] {
            for rows in [1, 4096, 10_000, 65_536, 1 << 20] {
                let cut = Cut::of(elements, rows);
                let entries = cut.parts() * cut.most_grains(elements);
                assert!(entries <= MOST_ENTRIES, "{elements} {rows}");
                let grains = GrainRows::new(1000 * rows + rows / 2 + 1, rows).unwrap();
                let bytes = scratch_bytes(elements, grains);
                assert!(bytes <= MOST_BYTES, "{elements} {rows}");
                assert!(bytes >= entries * elements * size_of::<f32>());
            }
        }
        let one = GrainRows::new(4096, 4096).unwrap();
        assert_eq!(scratch_bytes(1000, one), 4000);
        assert_eq!(scratch_bytes(SMALL_ELEMENTS + 1, one), 0);
    }

    #[test]
    fn grains_of_equal_rows_go_together() {
        let alike = |rows, rows_per_grain| {
            alike(GrainRows::new(rows, rows_per_grain).unwrap()).collect::<Vec<_>>()
        };
        assert_eq!(alike(12, 4), [[0, 3, 4]]);
        assert_eq!(alike(13, 4), [[0, 3, 4], [3, 1, 1]]);
        assert_eq!(alike(3, 4), [[0, 1, 3]]);
    }
}
