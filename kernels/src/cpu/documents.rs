//! Where the documents of a sample begin, in the form that the kernels over sequences use: computed
//! once for each row, outside of their loops over channels.

use super::Cpu;
use super::rows::exactly;
use crate::error::Result;
use crate::view::Slice;

/// `starts[b t]`, or one document a sample.
#[derive(Clone, Copy)]
pub(crate) struct Documents<'a> {
    starts: Option<&'a [u32]>,
}

impl<'a> Documents<'a> {
    pub(crate) fn new(
        kernel: &'static str,
        starts: Option<Slice<'a, Cpu, u32>>,
        rows: usize,
    ) -> Result<Self> {
        let starts = starts.map(|starts| exactly(kernel, "starts", starts, rows)).transpose()?;
        Ok(Self { starts })
    }

    /// The position of the first token of the document that `row` belongs to, which stands at `position`.
    #[inline(always)]
    pub(crate) fn start(&self, row: usize, position: usize) -> usize {
        self.starts.map_or(0, |starts| (starts[row] as usize).min(position))
    }

    /// Whether a document begins with `row`, at `position`, and another ends before it.
    #[inline(always)]
    pub(crate) fn begins(&self, row: usize, position: usize) -> bool {
        position > 0 && self.start(row, position) == position
    }

    /// A bit for each of the `count` positions of a sample from `position`, whose rows begin at `first_row`: set where the position
    /// [`begins`](Self::begins) a document.
    pub(crate) fn start_bits(&self, first_row: usize, position: usize, count: usize) -> u8 {
        (0..count).fold(0, |bits, q| bits | u8::from(self.begins(first_row + q, position + q)) << q)
    }
}
