//! Cross-entropy of rows of logits.

use bytemuck::{Pod, Zeroable};

use super::sizes::{Access, WIDE_BYTES, blocks, size32, stride_bytes};
use super::{exactly, exactly_mut};
use crate::backend::{self, LogitGradient};
use crate::error::Result;
use crate::gpu::buffer::Place;
use crate::gpu::driver::{Address, Driver};
use crate::gpu::precision::Precision;
use crate::gpu::source::CROSS_ENTROPY;
use crate::gpu::stream::TokenLookup;
use crate::gpu::{Gpu, GpuStream};
use crate::shape::CrossEntropyShape;
use crate::view::{Slice, SliceMut};

/// Vocabularies up to this size take blocks of few threads.
const SHORT_VOCABULARY: usize = 2048;
const SHORT_THREADS: u32 = 64;
const THREADS: u32 = 512;

/// Bytes of a column of the logits that are formed at a time. Each chunk reads and writes the gradient of the head's table once more, so it has
/// as many rows as leave the logits of a vocabulary of 50,000 below a gigabyte: 8,192 of bf16, 4,096 of fp32. (152,000 tokens take 2.5 GB.)
const LOGIT_CHUNK_COLUMN_BYTES: usize = 16 << 10;

/// `CrossEntropy` of cross_entropy.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct CrossEntropy {
    losses: Address,
    logits: Address,
    targets: Address,
    fault: Address,
    row_stride: u64,
    vocab_size: u32,
    with_gradient: u32,
    scale: f32,
    padding: u32,
}

impl<D: Driver, P: Precision> backend::CrossEntropy for Gpu<D, P> {
    fn logit_chunk_rows(&self) -> usize {
        LOGIT_CHUNK_COLUMN_BYTES / size_of::<P::Activation>()
    }

    fn cross_entropy(
        &self,
        stream: &mut GpuStream<D>,
        losses: SliceMut<'_, Self, f32>,
        logits: SliceMut<'_, Self, P::Activation>,
        targets: Slice<'_, Self, u32>,
        gradient: LogitGradient,
        shape: CrossEntropyShape,
    ) -> Result<()> {
        const KERNEL: &str = "cross_entropy";
        let (rows, vocab_size, row_stride) = (shape.rows(), shape.vocab_size(), shape.row_stride());
        exactly_mut(KERNEL, "losses", &losses, rows)?;
        exactly_mut(KERNEL, "logits", &logits, rows * row_stride)?;
        exactly(KERNEL, "targets", &targets, rows)?;
        let arguments = CrossEntropy {
            losses: losses.address(),
            logits: logits.address(),
            targets: targets.address(),
            fault: stream.fault(TokenLookup::CrossEntropy, vocab_size),
            row_stride: row_stride as u64,
            vocab_size: size32(KERNEL, "vocab size", vocab_size)?,
            with_gradient: u32::from(gradient == LogitGradient::InPlace),
            scale: shape.logit_scale(),
            padding: 0,
        };
        let stride = stride_bytes::<P::Activation>(arguments.row_stride);
        let access = Access::of(WIDE_BYTES, &[(arguments.logits, stride)]);
        let (name, threads) = if vocab_size <= SHORT_VOCABULARY {
            let name = access.choose("cross_entropy_short_wide", "cross_entropy_short_single");
            (name, SHORT_THREADS)
        } else {
            (access.choose("cross_entropy_wide", "cross_entropy_single"), THREADS)
        };
        let launch = blocks(KERNEL, rows, threads)?;
        // SAFETY: losses, targets and logits were checked against the shape, whose rows hold the vocabulary.
        unsafe { self.launch(stream, &CROSS_ENTROPY, name, launch, arguments) }
    }
}
