//! Attention divided into heads of samples, which compute threads share.

use std::marker::PhantomData;
use std::ops::Range;

use crate::backend::AttentionInputs;
use crate::cpu::Cpu;
use crate::cpu::rows::{Rows, RowsMut, exactly};
use crate::cpu::simd::{LANES, Simd};
use crate::error::Result;
use crate::shape::AttentionShape;

/// The causal mask of a sample: the positions of its queries, and the keys that they attend to.
#[derive(Clone, Copy)]
pub(super) struct CausalMask<'a> {
    /// The position of the first query.
    pub(super) past: usize,
    /// The most positions that a query attends to; `usize::MAX` without a window.
    window: usize,
    /// The first position of the document of each query.
    starts: Option<&'a [u32]>,
}

impl<'a> CausalMask<'a> {
    /// The mask of a sample whose first `past` positions have no queries.
    pub(super) fn new(past: usize, shape: AttentionShape, starts: Option<&'a [u32]>) -> Self {
        let window = shape.window().map_or(usize::MAX, std::num::NonZeroUsize::get);
        Self { past, window, starts }
    }

    /// The first key that the query at a position attends to: its own at the latest, for any `starts`.
    pub(super) fn first_seen(&self, position: usize) -> usize {
        let start = self.starts.map_or(0, |starts| starts[position - self.past] as usize);
        start.max((position + 1).saturating_sub(self.window)).min(position)
    }
}

/// The inputs of a head of a sample: its rows of queries, and of the keys and values from the sample's first position on.
#[derive(Clone, Copy)]
pub(super) struct Head<'a> {
    pub(super) q: Rows<'a>,
    pub(super) k: Rows<'a>,
    pub(super) v: Rows<'a>,
    pub(super) mask: CausalMask<'a>,
    /// The factor of `q . k`.
    pub(super) scale: f32,
    /// The amount by which a score falls with every position of distance.
    pub(super) slope: f32,
}

/// The checked inputs of attention over whole sequences.
#[derive(Clone, Copy)]
pub(super) struct Inputs<'a> {
    q: Rows<'a>,
    k: Rows<'a>,
    v: Rows<'a>,
    slopes: Option<&'a [f32]>,
    starts: Option<&'a [u32]>,
    shape: AttentionShape,
}

impl<'a> Inputs<'a> {
    /// # Errors
    /// Inputs of another shape.
    pub(super) fn new(
        kernel: &'static str,
        inputs: AttentionInputs<'a, Cpu>,
        shape: AttentionShape,
    ) -> Result<Self> {
        let (rows, width) = (shape.sequences().rows(), shape.width());
        Ok(Self {
            q: Rows::new(kernel, "q", inputs.q, rows, width)?,
            k: Rows::new(kernel, "k", inputs.k, rows, shape.key_value_width())?,
            v: Rows::new(kernel, "v", inputs.v, rows, shape.key_value_width())?,
            slopes: match inputs.slopes {
                Some(slopes) => Some(exactly(kernel, "slopes", slopes, shape.heads())?),
                None => None,
            },
            starts: match inputs.starts {
                Some(starts) => Some(exactly(kernel, "starts", starts, rows)?),
                None => None,
            },
            shape,
        })
    }

    /// The inputs of one head.
    pub(super) fn head(&self, place: HeadPlace) -> Head<'a> {
        let positions = self.shape.sequences().positions();
        let first = place.sample * positions;
        let shared = |rows: Rows<'a>| place.shared_columns_of(rows, first, self.shape);
        let starts = self.starts.map(|starts| &starts[first..first + positions]);
        Head {
            q: place.columns_of(self.q, first, self.shape),
            k: shared(self.k),
            v: shared(self.v),
            mask: CausalMask::new(0, self.shape, starts),
            scale: self.shape.scale(),
            slope: self.slopes.map_or(0.0, |slopes| slopes[place.head]),
        }
    }
}

/// A head of a sample.
#[derive(Clone, Copy, Debug)]
pub(super) struct HeadPlace {
    pub(super) sample: usize,
    pub(super) head: usize,
}

impl HeadPlace {
    /// The `index`-th, by sample, then by head.
    pub(super) fn new(index: usize, shape: AttentionShape) -> Self {
        Self { sample: index / shape.heads(), head: index % shape.heads() }
    }

    /// The head's columns of the rows from `first` on.
    pub(super) fn columns_of<'a>(
        self,
        rows: Rows<'a>,
        first: usize,
        shape: AttentionShape,
    ) -> Rows<'a> {
        rows.part(first, self.head * shape.head_width(), shape.head_width())
    }

    /// The columns of keys or of values that the head reads, of the rows from `first` on.
    pub(super) fn shared_columns_of<'a>(
        self,
        rows: Rows<'a>,
        first: usize,
        shape: AttentionShape,
    ) -> Rows<'a> {
        let head = self.head / shape.group();
        rows.part(first, head * shape.head_width(), shape.head_width())
    }
}

/// Rows that heads write side by side, each its own columns.
#[derive(Clone, Copy)]
pub(super) struct SharedRows<'a> {
    start: *mut f32,
    elements: usize,
    stride: usize,
    lifetime: PhantomData<&'a mut [f32]>,
}

// SAFETY: it borrows its slice exclusively, and its copies in several threads write disjoint elements by the contract of `write`.
unsafe impl Send for SharedRows<'_> {}
// SAFETY: as above.
unsafe impl Sync for SharedRows<'_> {}

impl<'a> SharedRows<'a> {
    pub(super) fn new(rows: RowsMut<'a>) -> Self {
        let (elements, stride) = rows.into_elements();
        let (start, elements) = (elements.as_mut_ptr(), elements.len());
        Self { start, elements, stride, lifetime: PhantomData }
    }

    /// Writes up to sixteen elements of a row.
    ///
    /// # Safety
    /// Nothing else reads or writes these columns of this row meanwhile.
    #[inline(always)]
    pub(super) unsafe fn write<S: Simd>(
        &mut self,
        s: S,
        row: usize,
        columns: Range<usize>,
        v: S::Vector,
    ) {
        let first = row * self.stride + columns.start;
        assert!(first + columns.len() <= self.elements);
        // SAFETY: the range lies inside the slice that `new` was given, and the caller sees to it that it is not aliased.
        let out = unsafe { std::slice::from_raw_parts_mut(self.start.add(first), columns.len()) };
        s.store_row(out, v);
    }
}

/// The columns of a sample's rows that a head writes, from `first_column` on.
pub(super) struct HeadWriter<'a> {
    pub(super) out: SharedRows<'a>,
    pub(super) first_row: usize,
    pub(super) first_column: usize,
    pub(super) width: usize,
}

impl<'a> HeadWriter<'a> {
    /// A writer of this head's columns, behind `skipped` columns.
    ///
    /// # Safety
    /// While the writer lives, nothing else reads or writes this head's columns of the sample's rows.
    pub(super) unsafe fn new(
        out: SharedRows<'a>,
        place: HeadPlace,
        skipped: usize,
        shape: AttentionShape,
    ) -> Self {
        Self {
            out,
            first_row: place.sample * shape.sequences().positions(),
            first_column: skipped + place.head * shape.head_width(),
            width: shape.head_width(),
        }
    }

    /// Writes columns `column .. column + 16`, or those that there are, of a position of the sample.
    #[inline(always)]
    pub(super) fn write<S: Simd>(&mut self, s: S, position: usize, column: usize, v: S::Vector) {
        let columns =
            self.first_column + column..self.first_column + self.width.min(column + LANES);
        // SAFETY: the promise that `new` was given.
        unsafe { self.out.write(s, self.first_row + position, columns, v) };
    }
}
