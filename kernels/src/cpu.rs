//! The CPU backend, which needs nothing installed.
//!
//! Matrix products are our own with AVX-512 and those of `matrixmultiply` without, everything else is loops
//! written once over sixteen virtual lanes (`simd`) and compiled for AVX-512, AVX2 and plain code
//! (`dispatch`): the bits are the same on all of them, and for any number of compute threads.
//!
//! | kernel | file |
//! |---|---|
//! | matrix products | `matmul`, `weight_gradient` |
//! | selective scan | `scan`, `scan_forward`, `scan_backward`, `scan_piece` |
//! | scan of heads | `head_scan`, `head_scan_forward`, `head_scan_backward` |
//! | attention, rotary positions | `attention`, `rotary` |
//! | causal convolution | `conv`, `conv_backward`, `conv_piece` |
//! | RMSNorm, layer norm | `norm`, `rms_norm`, `layer_norm` |
//! | embedding, cross-entropy | `embedding`, `cross_entropy` |
//! | biases, clamps, GELU, the gate of SwiGLU | `row_map`, `bias`, `gelu`, `gated_silu` |
//! | sums of gradients, AdamW, Lion, scaled sums | `gradient_sums`, `optimizer`, `lion`, `axpby` |
//!
//! A kernel's file implements its trait of the [backend](crate::backend): it checks shapes, divides rows among the compute threads
//! and has their loop.
//!
//! Kernels run inside the call: when a method returns, its work is done. Memory is host memory, so a
//! [`Buffer`] derefs to a slice.

#[cfg(feature = "ndarray")]
pub mod arrays;
mod attention;
mod axpby;
mod bias;
mod buffer;
mod conv;
mod conv_backward;
mod conv_piece;
mod cross_entropy;
mod device_stream;
mod dispatch;
mod documents;
mod draw;
mod embedding;
mod exponential;
mod gated_silu;
mod gelu;
mod gradient_sums;
mod head_scan;
mod head_scan_backward;
mod head_scan_forward;
mod layer_norm;
mod likeliest;
mod lion;
mod master;
mod matmul;
mod norm;
mod optimizer;
mod rms_norm;
mod rotary;
mod row_map;
mod rows;
mod runtime;
mod scan;
mod scan_backward;
mod scan_forward;
mod scan_piece;
mod simd;
mod tree_sum;
mod weight_gradient;

use std::num::NonZeroUsize;

pub use buffer::{Buffer, return_freed_memory};
pub use device_stream::{DeviceStream, Event};
pub use dispatch::InstructionSet;
pub use gradient_sums::add_assign;

use crate::error::Result;
use device_stream::ComputeThreads;
use dispatch::Dispatch;

/// The version of `matrixmultiply`, whose bits are ours too: part of the kind of device. The manifest asks for it and no other,
/// because an embedder's Cargo.lock is not this workspace's.
const MATRIX_LIBRARY: &str = "matrixmultiply 0.3.11";

/// A processor and its compute threads; clones share the threads.
#[derive(Clone, Debug)]
pub struct Cpu {
    dispatch: Dispatch,
    threads: ComputeThreads,
}

impl Cpu {
    /// A backend of `threads` compute threads; one is the caller's own.
    ///
    /// # Errors
    /// Threads that the operating system refuses.
    pub fn new(threads: NonZeroUsize) -> Result<Self> {
        Ok(Self { dispatch: Dispatch::best(), threads: ComputeThreads::new(threads)? })
    }

    /// [`new`](Self::new) with the loops of `set`; without AVX-512, `matrixmultiply` chooses its own.
    ///
    /// # Errors
    /// An instruction set that this processor lacks, or threads that the operating system refuses.
    pub fn with_instruction_set(threads: NonZeroUsize, set: InstructionSet) -> Result<Self> {
        Ok(Self { dispatch: Dispatch::new(set)?, threads: ComputeThreads::new(threads)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_matrix_library_is_the_one_that_the_manifest_and_the_lock_name() {
        let lock = include_str!("../../Cargo.lock");
        let (_, package) = lock.split_once("name = \"matrixmultiply\"\nversion = \"").unwrap();
        let (locked, _) = package.split_once('"').unwrap();
        assert_eq!(MATRIX_LIBRARY, format!("matrixmultiply {locked}"));
        let manifest = include_str!("../../Cargo.toml");
        let asked = manifest.lines().find_map(|line| line.strip_prefix("matrixmultiply = "));
        assert_eq!(asked, Some(format!("\"={locked}\"").as_str()), "another lock may hold another");
        assert!(
            include_str!("../Cargo.toml").contains("\nmatrixmultiply.workspace = true\n"),
            "the kernels' manifest takes the version from the workspace's"
        );
    }
}
