//! Sizes and places in the form of kernels: grids, 32-bit sizes, and the loads that an operand's
//! alignment allows.

use super::KernelName;
use crate::error::{KernelError, Result};
use crate::gpu::driver::{Address, Launch, Start};
use crate::shape::SequenceShape;

/// Bytes of the widest load.
pub(super) const WIDE_BYTES: u64 = 16;

/// Which loads and stores a kernel may use. Both variants of a kernel give the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Access {
    /// Several elements at once.
    Wide,
    /// One by one.
    Single,
}

impl Access {
    /// Wide loads of `bytes` bytes where every operand, given by its first byte and the bytes between
    /// its rows, keeps them aligned.
    pub(super) fn of(bytes: u64, operands: &[(Address, u64)]) -> Self {
        let aligned = |&(Address(address), stride): &(Address, u64)| {
            address.is_multiple_of(bytes) && stride.is_multiple_of(bytes)
        };
        if operands.iter().all(aligned) { Self::Wide } else { Self::Single }
    }

    /// Wide where both are: of operands whose packs have different bytes.
    pub(super) fn and(self, other: Self) -> Self {
        match self {
            Self::Wide => other,
            Self::Single => self,
        }
    }

    /// The name of the variant.
    pub(super) fn choose(self, wide: KernelName, single: KernelName) -> KernelName {
        match self {
            Self::Wide => wide,
            Self::Single => single,
        }
    }
}

/// The bytes between rows `row_stride` elements of type `T` apart.
pub(super) fn stride_bytes<T>(row_stride: u64) -> u64 {
    row_stride * size_of::<T>() as u64
}

/// The most that a kernel counts in 32 bits: what it adds to round such a number up, or to look ahead of it, does not wrap. It
/// is also the most blocks that every vendor allows in a grid's first dimension.
const MOST: usize = i32::MAX as usize;
/// The most positions of a sample, so that neither do small multiples of them.
const MOST_POSITIONS: usize = 1 << 26;

fn at_most(most: usize, kernel: KernelName, what: &'static str, size: usize) -> Result<u32> {
    if size > most {
        return Err(KernelError::shape(kernel, what, format!("at most {most}"), size));
    }
    Ok(size as u32)
}

/// A size that a kernel counts in 32 bits.
///
/// # Errors
/// A size of more than 31 bits.
pub(super) fn size32(kernel: KernelName, what: &'static str, size: usize) -> Result<u32> {
    at_most(MOST, kernel, what, size)
}

/// b, t and b t of `sequences`, as kernels count them.
///
/// # Errors
/// More than 31 bits of rows, or more than 2^26 positions.
pub(super) fn sequences32(kernel: KernelName, sequences: SequenceShape) -> Result<[u32; 3]> {
    Ok([
        at_most(MOST, kernel, "samples", sequences.samples())?,
        at_most(MOST_POSITIONS, kernel, "positions", sequences.positions())?,
        at_most(MOST, kernel, "rows", sequences.rows())?,
    ])
}

/// `blocks` blocks of `threads` threads in one dimension, without dynamic shared memory.
///
/// # Errors
/// More blocks than a grid has room for.
pub(super) fn blocks(kernel: KernelName, blocks: usize, threads: u32) -> Result<Launch> {
    let blocks = at_most(MOST, kernel, "blocks", blocks)?;
    Ok(Launch { grid: [blocks, 1, 1], threads, shared_bytes: 0, start: Start::Ordered })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_would_wrap_is_refused() {
        assert_eq!(size32("a test", "rows", MOST).unwrap(), 0x7fff_ffff);
        assert!(size32("a test", "rows", MOST + 1).is_err());
        assert_eq!(blocks("a test", MOST, 32).unwrap().grid, [0x7fff_ffff, 1, 1]);
        assert!(blocks("a test", MOST + 1, 32).is_err());
        let sequences = |samples, positions| {
            sequences32("a test", SequenceShape::new(samples, positions).unwrap())
        };
        assert_eq!(sequences(31, 1 << 26).unwrap(), [31, 1 << 26, 31 << 26]);
        assert!(sequences(32, 1 << 26).is_err());
        assert!(sequences(1, (1 << 26) + 1).is_err());
        assert!(sequences(MOST + 1, 1).is_err());
    }
}
