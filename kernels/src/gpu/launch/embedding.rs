//! Embedding: rows of a table, and the sums of their gradients.

use bytemuck::{Pod, Zeroable};

use super::sizes::{Access, WIDE_BYTES, blocks, size32, stride_bytes};
use super::{exactly, row_stride, row_stride_mut};
use crate::backend::{Embedding, Output};
use crate::error::{KernelError, Result};
use crate::gpu::buffer::Place;
use crate::gpu::driver::{Address, Driver};
use crate::gpu::precision::Precision;
use crate::gpu::source::EMBEDDING;
use crate::gpu::stream::TokenLookup;
use crate::gpu::{Gpu, GpuStream, ScratchSlot};
use crate::shape::GrainRows;
use crate::view::{Matrix, MatrixMut, Slice};

const COPY_THREADS: u32 = 128;
/// Columns that a thread copies, or sums, at once.
const COLUMNS: usize = 4;
const GROUP_THREADS: u32 = 256;
/// The most tokens of the vocabulary that a block groups the rows of.
const GROUP_TOKENS: usize = 1024;
/// The blocks that share a vocabulary, where that makes fewer tokens a block: every block reads all tokens of the
/// microbatch, so that more of them than run at once would only read more.
const GROUP_BLOCKS: usize = 128;
const SUM_THREADS: u32 = 64;
/// Places in the order of tokens that a block sums.
const SUM_PLACES: usize = 8;
/// Bytes of a token and its row.
const TOKEN_ROW_BYTES: usize = 8;

/// `EmbeddingForward` of embedding.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct EmbeddingForward {
    out: Address,
    table: Address,
    tokens: Address,
    fault: Address,
    out_stride: u64,
    table_stride: u64,
    vocab_size: u32,
    width: u32,
    adds: u32,
    padding: u32,
}

/// `EmbeddingGroup` of embedding.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct EmbeddingGroup {
    grouped: Address,
    tokens: Address,
    fault: Address,
    rows: u32,
    vocab_size: u32,
    tokens_per_block: u32,
    padding: u32,
}

/// `EmbeddingBackwardAdd` of embedding.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct EmbeddingBackwardAdd {
    lane_table: Address,
    dout: Address,
    grouped: Address,
    lane_stride: u64,
    dout_stride: u64,
    rows: u32,
    rows_per_grain: u32,
    width: u32,
    column_tiles: u32,
}

/// A kernel replaces a token outside the vocabulary by the first token, so there must be one.
fn check_vocabulary(kernel: &'static str, vocab_size: usize) -> Result<()> {
    if vocab_size > 0 {
        return Ok(());
    }
    Err(KernelError::shape(kernel, "vocab size", "at least 1", vocab_size))
}

/// How packs of [`COLUMNS`] columns are reached.
fn access_of(width: usize, operands: &[(Address, u64)]) -> Access {
    if width.is_multiple_of(COLUMNS) { Access::of(WIDE_BYTES, operands) } else { Access::Single }
}

impl<D: Driver, P: Precision> Embedding for Gpu<D, P> {
    fn embedding_forward(
        &self,
        stream: &mut GpuStream<D>,
        out: MatrixMut<'_, Self, f32>,
        table: Matrix<'_, Self, f32>,
        tokens: Slice<'_, Self, u32>,
        output: Output,
    ) -> Result<()> {
        const KERNEL: &str = "embedding_forward";
        let (rows, vocab_size, width) = (tokens.elements, table.rows, table.columns);
        check_vocabulary(KERNEL, vocab_size)?;
        let arguments = EmbeddingForward {
            out_stride: row_stride_mut(KERNEL, "out", &out, rows, width)?,
            table_stride: row_stride(KERNEL, "table", &table, vocab_size, width)?,
            out: out.address(),
            table: table.address(),
            tokens: tokens.address(),
            fault: stream.fault(TokenLookup::EmbeddingForward, vocab_size),
            vocab_size: size32(KERNEL, "vocab size", vocab_size)?,
            width: size32(KERNEL, "width", width)?,
            adds: u32::from(output == Output::Add),
            padding: 0,
        };
        let operands = [
            (arguments.out, stride_bytes::<f32>(arguments.out_stride)),
            (arguments.table, stride_bytes::<f32>(arguments.table_stride)),
        ];
        let name = access_of(width, &operands)
            .choose("embedding_forward_wide", "embedding_forward_single");
        let launch = blocks(KERNEL, rows, COPY_THREADS)?.early(rows);
        // SAFETY: out and table were checked, with a row for each token; a token past the table is replaced by the first.
        unsafe { self.launch(stream, &EMBEDDING, name, launch, arguments) }
    }

    fn embedding_backward_add(
        &self,
        stream: &mut GpuStream<D>,
        lane_table: MatrixMut<'_, Self, f32>,
        dout: Matrix<'_, Self, f32>,
        tokens: Slice<'_, Self, u32>,
        grains: GrainRows,
    ) -> Result<()> {
        const KERNEL: &str = "embedding_backward_add";
        let (vocab_size, width) = (lane_table.rows, lane_table.columns);
        let rows = grains.rows();
        check_vocabulary(KERNEL, vocab_size)?;
        exactly(KERNEL, "tokens", &tokens, rows)?;
        let dout_stride = row_stride(KERNEL, "dout", &dout, rows, width)?;
        let rows32 = size32(KERNEL, "rows", rows)?;
        let grouped = stream.scratch(&self.driver, ScratchSlot::First, rows * TOKEN_ROW_BYTES)?;

        let tokens_per_block = vocab_size.div_ceil(GROUP_BLOCKS).clamp(1, GROUP_TOKENS);
        let group = EmbeddingGroup {
            grouped,
            tokens: tokens.address(),
            fault: stream.fault(TokenLookup::EmbeddingBackward, vocab_size),
            rows: rows32,
            vocab_size: size32(KERNEL, "vocab size", vocab_size)?,
            tokens_per_block: tokens_per_block as u32,
            padding: 0,
        };
        let launch = blocks(KERNEL, vocab_size.div_ceil(tokens_per_block), GROUP_THREADS)?;
        // SAFETY: tokens have `rows` elements, as the scratch memory has places.
        unsafe { self.launch(stream, &EMBEDDING, "embedding_group", launch, group) }?;

        let column_tiles = width.div_ceil(SUM_THREADS as usize * COLUMNS);
        let add = EmbeddingBackwardAdd {
            lane_table: lane_table.address(),
            dout: dout.address(),
            grouped,
            lane_stride: lane_table.row_stride as u64,
            dout_stride,
            rows: rows32,
            // A grain of more rows than exist is one grain.
            rows_per_grain: grains.rows_per_grain().min(rows) as u32,
            width: size32(KERNEL, "width", width)?,
            column_tiles: column_tiles as u32,
        };
        let operands = [
            (add.lane_table, stride_bytes::<f32>(add.lane_stride)),
            (add.dout, stride_bytes::<f32>(add.dout_stride)),
        ];
        let name = access_of(width, &operands)
            .choose("embedding_backward_add_wide", "embedding_backward_add_single");
        let launch = blocks(KERNEL, rows.div_ceil(SUM_PLACES) * column_tiles, SUM_THREADS)?;
        // SAFETY: dout was checked; `grouped` names each of its rows once, with a token inside the lane's table.
        unsafe { self.launch(stream, &EMBEDDING, name, launch, add) }
    }
}
