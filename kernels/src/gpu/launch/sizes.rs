//! Sizes and places as kernels take them: grids, 32-bit sizes, and which loads an operand allows.

use super::KernelName;
use crate::error::{KernelError, Result};
use crate::gpu::driver::{Address, Launch};

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

/// A size that a kernel counts in 32 bits.
///
/// # Errors
/// A size that leaves them.
pub(super) fn size32(kernel: KernelName, what: &'static str, size: usize) -> Result<u32> {
    u32::try_from(size)
        .map_err(|_| KernelError::shape(kernel, what, format!("at most {}", u32::MAX), size))
}

/// `blocks` blocks of `threads` threads in one dimension, without dynamic shared memory.
///
/// # Errors
/// More blocks than a grid has room for.
pub(super) fn blocks(kernel: KernelName, blocks: usize, threads: u32) -> Result<Launch> {
    // The most that every vendor allows in a grid's first dimension.
    const MOST: usize = i32::MAX as usize;
    if blocks > MOST {
        return Err(KernelError::shape(kernel, "blocks", format!("at most {MOST}"), blocks));
    }
    Ok(Launch { grid: [blocks as u32, 1, 1], threads, shared_bytes: 0 })
}
