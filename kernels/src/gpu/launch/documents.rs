//! Where documents begin inside samples, as the kernels over sequences read it: `documents.h`.
//!
//! Those kernels exist twice. The variant that handles documents runs only where starts are given;
//! the other is as fast as if documents did not exist.

use bytemuck::{Pod, Zeroable};

use super::sizes::{blocks, sequences32, size32};
use super::{KernelName, exactly};
use crate::error::Result;
use crate::gpu::buffer::Place;
use crate::gpu::driver::{Address, Driver};
use crate::gpu::precision::Precision;
use crate::gpu::source::DOCUMENTS;
use crate::gpu::{Gpu, GpuStream, ScratchSlot};
use crate::shape::SequenceShape;
use crate::view::Slice;

/// Positions of a word.
const WORD_POSITIONS: usize = 32;
/// Threads of a block.
const THREADS: u32 = 256;

/// `DocumentStartBits` of `documents.cu`.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct DocumentStartBits {
    start_bits: Address,
    starts: Address,
    positions: u32,
    words: u32,
}

/// `start_bits[b, ceil(t / 32)]`, or one document a sample.
#[derive(Clone, Copy, Debug)]
pub(super) struct StartBits(Option<Address>);

impl StartBits {
    /// The address of the bits as a kernel reads it; null for samples of one document.
    pub(super) fn address(self) -> Address {
        self.0.unwrap_or(Address::NULL)
    }

    /// `one` for samples of one document, else `several`.
    pub(super) fn choose<T>(self, one: T, several: T) -> T {
        if self.0.is_some() { several } else { one }
    }
}

impl<D: Driver, P: Precision> Gpu<D, P> {
    /// The start bits of documents that `kernel` reads, in scratch memory of their own.
    pub(super) fn document_start_bits(
        &self,
        stream: &mut GpuStream<D>,
        kernel: KernelName,
        starts: Option<Slice<'_, Self, u32>>,
        sequences: SequenceShape,
    ) -> Result<StartBits> {
        let Some(starts) = starts else { return Ok(StartBits(None)) };
        let [_, positions, rows] = sequences32(kernel, sequences)?;
        exactly(kernel, "starts", &starts, rows as usize)?;
        let words = sequences.samples() * sequences.positions().div_ceil(WORD_POSITIONS);
        let bytes = words * size_of::<u32>();
        let start_bits = stream.scratch(self.driver(), ScratchSlot::Documents, bytes)?;
        let arguments = DocumentStartBits {
            start_bits,
            starts: starts.address(),
            positions,
            words: size32(kernel, "words", words)?,
        };
        let launch = blocks(kernel, words.div_ceil(THREADS as usize), THREADS)?;
        // SAFETY: there is a start for each row, and a word of scratch memory for each thread that writes one.
        unsafe { self.launch(stream, &DOCUMENTS, "document_start_bits", launch, arguments) }?;
        Ok(StartBits(Some(start_bits)))
    }
}
