//! The forward pass of attention.

use std::f32::consts::LOG2_E;
use std::f64::consts::LN_2;

use super::heads::{Head, HeadPlace, HeadWriter, Inputs, SharedRows};
use super::products::{BLOCK, Weighted};
use super::queries::{
    KEYS, NO_LANES, QUERIES, QueryLanes, QueryTile, Softmax, for_each_row, prefetch_rows,
    transpose_rows,
};
use crate::backend::{Attention, AttentionInputs};
use crate::cpu::dispatch::Kernel;
use crate::cpu::rows::{RowsMut, exactly_mut};
use crate::cpu::simd::{LANES, Lanes, Simd};
use crate::cpu::{Cpu, DeviceStream};
use crate::error::Result;
use crate::shape::AttentionShape;
use crate::view::{MatrixMut, SliceMut};

impl Attention for Cpu {
    fn attention_forward(
        &self,
        stream: &mut DeviceStream,
        out: MatrixMut<'_, Self, f32>,
        log_sum_exp: SliceMut<'_, Self, f32>,
        inputs: AttentionInputs<'_, Self>,
        shape: AttentionShape,
    ) -> Result<()> {
        const KERNEL: &str = "attention_forward";
        let (rows, positions) = (shape.sequences().rows(), shape.sequences().positions());
        let out = SharedRows::new(RowsMut::new(KERNEL, "out", out, rows, shape.width())?);
        let sums = exactly_mut(KERNEL, "log_sum_exp", log_sum_exp, rows * shape.heads())?;
        let inputs = Inputs::new(KERNEL, inputs, shape)?;
        let heads = shape.sequences().samples() * shape.heads();
        let share = stream.threads().share(heads);
        let held = Scratch::lanes(shape);
        let (threads, scratch) = stream.with_scratch(heads.div_ceil(share) * held)?;
        let parts =
            sums.chunks_mut(share * positions).zip(scratch.chunks_exact_mut(held)).enumerate();
        let parts = parts.map(|(part, (sums, scratch))| Forward {
            out,
            sums,
            inputs,
            scratch: Scratch::new(scratch, shape),
            first_head: part * share,
            shape,
        });
        threads.for_each(parts, |part| self.dispatch.run(part));
        Ok(())
    }
}

/// The heads of a compute thread.
struct Forward<'a> {
    out: SharedRows<'a>,
    sums: &'a mut [f32],
    inputs: Inputs<'a>,
    scratch: Scratch<'a>,
    first_head: usize,
    shape: AttentionShape,
}

impl Kernel for Forward<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let positions = self.shape.sequences().positions();
        for (index, sums) in self.sums.chunks_exact_mut(positions).enumerate() {
            let place = HeadPlace::new(self.first_head + index, self.shape);
            let head = self.inputs.head(place);
            // SAFETY: every head of every sample belongs to one part of the work alone.
            let writer = unsafe { HeadWriter::new(self.out, place, 0, self.shape) };
            forward_head(s, &mut self.scratch, head, writer, positions, Some(sums));
        }
    }
}

/// A head's scratch memory for a tile of queries.
pub(super) struct Scratch<'a> {
    /// The queries, transposed and scaled.
    columns: &'a mut [QueryLanes],
    /// The scores of a tile of keys, and then their weights.
    scores: &'a mut [QueryLanes],
    /// The outputs, transposed and not yet divided.
    sums: &'a mut [QueryLanes],
}

impl<'a> Scratch<'a> {
    /// The number of vectors that the scratch memory takes.
    pub(super) fn lanes(shape: AttentionShape) -> usize {
        (2 * shape.head_width() + KEYS) * NO_LANES.len()
    }

    pub(super) fn new(lanes: &'a mut [Lanes], shape: AttentionShape) -> Self {
        let (all, _) = lanes.as_chunks_mut();
        let (columns, all) = all.split_at_mut(shape.head_width());
        let (sums, scores) = all.split_at_mut(shape.head_width());
        Self { columns, scores, sums }
    }
}

/// One head of one sample: `count` queries from the first on.
#[inline(always)]
pub(super) fn forward_head<S: Simd>(
    s: S,
    scratch: &mut Scratch<'_>,
    head: Head<'_>,
    mut writer: HeadWriter<'_>,
    count: usize,
    mut log_sum_exp: Option<&mut [f32]>,
) {
    let Scratch { columns, scores, sums } = scratch;
    let slope = head.slope * LOG2_E;
    for first in (0..count).step_by(QUERIES) {
        let mask = head.mask;
        let queries = QUERIES.min(count - first);
        let tile = QueryTile::new(mask.past + first, queries, |i| mask.first_seen(i));
        transpose_rows(s, columns, head.q, first, &tile, head.scale * LOG2_E);
        let next = first + queries..count.min(first + 2 * QUERIES);
        prefetch_rows(s, head.q, next.clone());
        for rows in [head.k, head.v] {
            prefetch_rows(s, rows, mask.past + next.start..mask.past + next.end);
        }
        sums.fill(NO_LANES);
        let mut softmax = Softmax::new();
        for keys in tile.key_tiles() {
            let scores = &mut scores[..keys.len().next_multiple_of(BLOCK)];
            tile.dots(s, scores, head.k, columns, keys.clone());
            softmax.weights(s, scores, sums, &tile, &keys, slope);
            let weights = &scores[..keys.len()];
            let weighted = Weighted { rows: head.v, weights, first_key: keys.start, tile: &tile };
            weighted.add_to(s, sums);
        }
        for vector in 0..tile.vectors {
            let reciprocal = s.div(s.splat(1.0), s.load(&softmax.sum[vector].0));
            for sums in &mut **sums {
                let sum = &mut sums[vector].0;
                s.store(sum, s.mul(s.load(sum), reciprocal));
            }
        }
        for_each_row(s, sums, &tile, |query, column, values| {
            writer.write(s, first + query, column, values);
        });
        if let Some(log_sum_exp) = &mut log_sum_exp {
            let log_sum_exp = &mut log_sum_exp[first..first + queries];
            for (query, log_sum_exp) in log_sum_exp.iter_mut().enumerate() {
                let of_query =
                    |lanes: &QueryLanes| f64::from(lanes[query / LANES].0[query % LANES]);
                let (greatest, sum) = (of_query(&softmax.greatest), of_query(&softmax.sum));
                *log_sum_exp = (greatest * LN_2 + libm::log(sum)) as f32;
            }
        }
    }
}
