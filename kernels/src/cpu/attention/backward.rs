//! The backward pass of attention: probabilities are recomputed, tile by tile.

use std::f32::consts::LOG2_E;
use std::ops::Range;

use super::heads::{Head, HeadPlace, HeadWriter, Inputs, SharedRows};
use super::products::{BLOCK, Weighted, WeightedQueries};
use super::queries::{
    KEYS, NO_LANES, QUERIES, QueryLanes, QueryTile, VECTORS, Visible, for_each_row, prefetch_rows,
    transpose_rows,
};
use crate::backend::{AttentionBackward, AttentionSaved};
use crate::cpu::dispatch::Kernel;
use crate::cpu::exponential::exp2_each;
use crate::cpu::rows::{Rows, RowsMut, exactly};
use crate::cpu::simd::{LANES, Lanes, Simd};
use crate::cpu::{Cpu, DeviceStream};
use crate::error::Result;
use crate::shape::AttentionShape;
use crate::view::MatrixMut;

impl AttentionBackward for Cpu {
    fn attention_scratch_bytes(&self, shape: AttentionShape) -> usize {
        Scratch::lanes(shape) * size_of::<Lanes>()
    }

    fn attention_backward(
        &self,
        stream: &mut DeviceStream,
        dqkv: MatrixMut<'_, Self, f32>,
        saved: AttentionSaved<'_, Self>,
        shape: AttentionShape,
    ) -> Result<()> {
        const KERNEL: &str = "attention_backward";
        let (rows, width) = (shape.sequences().rows(), shape.width());
        let dqkv = SharedRows::new(RowsMut::new(KERNEL, "dqkv", dqkv, rows, 3 * width)?);
        let sums = rows * shape.heads();
        let read = Read {
            dout: Rows::new(KERNEL, "dout", saved.dout, rows, width)?,
            out: Rows::new(KERNEL, "out", saved.out, rows, width)?,
            log_sum_exp: exactly(KERNEL, "log_sum_exp", saved.log_sum_exp, sums)?,
            inputs: Inputs::new(KERNEL, saved.inputs, shape)?,
        };
        let heads = shape.sequences().samples() * shape.heads();
        let share = stream.threads().share(heads);
        let held = Scratch::lanes(shape);
        let (threads, scratch) = stream.with_scratch(heads.div_ceil(share) * held)?;
        let parts = scratch.chunks_exact_mut(held).enumerate().map(|(part, scratch)| Backward {
            dqkv,
            read,
            scratch: Scratch::new(scratch, shape),
            heads: part * share..((part + 1) * share).min(heads),
            shape,
        });
        threads.for_each(parts, |part| self.dispatch.run(part));
        Ok(())
    }
}

#[derive(Clone, Copy)]
struct Read<'a> {
    dout: Rows<'a>,
    out: Rows<'a>,
    log_sum_exp: &'a [f32],
    inputs: Inputs<'a>,
}

/// A head's scratch memory.
struct Scratch<'a> {
    /// Transposed copies for a tile of queries: the scaled queries, the gradients of outputs, and those of queries.
    columns: &'a mut [QueryLanes],
    dout_columns: &'a mut [QueryLanes],
    dq: &'a mut [QueryLanes],
    /// For a tile of keys: probabilities, and the gradients of scores.
    probabilities: &'a mut [QueryLanes],
    dscores: &'a mut [QueryLanes],
    /// `[48, p]` in whole vectors: a tile's queries, and its gradients of outputs.
    q: &'a mut [Lanes],
    dout: &'a mut [Lanes],
    /// `[t, p]` in whole vectors and tiles.
    dk: &'a mut [Lanes],
    dv: &'a mut [Lanes],
}

/// Vectors of a row.
fn row_vectors(shape: AttentionShape) -> usize {
    shape.head_width().div_ceil(LANES)
}

impl<'a> Scratch<'a> {
    /// The number of vectors that the scratch memory takes.
    fn lanes(shape: AttentionShape) -> usize {
        let of_queries = (3 * shape.head_width() + 2 * KEYS) * VECTORS;
        let keys = shape.sequences().positions().next_multiple_of(KEYS);
        of_queries + 2 * (QUERIES + keys) * row_vectors(shape)
    }

    fn new(lanes: &'a mut [Lanes], shape: AttentionShape) -> Self {
        let mut lanes = lanes;
        let mut take = |count: usize| {
            let (taken, rest) = std::mem::take(&mut lanes).split_at_mut(count);
            lanes = rest;
            taken
        };
        let rows = QUERIES * row_vectors(shape);
        let (q, dout) = (take(rows), take(rows));
        let keys = shape.sequences().positions().next_multiple_of(KEYS) * row_vectors(shape);
        let (dk, dv) = (take(keys), take(keys));
        let mut take = |count: usize| take(count * VECTORS).as_chunks_mut().0;
        let width = shape.head_width();
        let (columns, dout_columns, dq) = (take(width), take(width), take(width));
        let (probabilities, dscores) = (take(KEYS), take(KEYS));
        Self { columns, dout_columns, dq, probabilities, dscores, q, dout, dk, dv }
    }
}

/// The heads of a compute thread.
struct Backward<'a> {
    dqkv: SharedRows<'a>,
    read: Read<'a>,
    scratch: Scratch<'a>,
    heads: Range<usize>,
    shape: AttentionShape,
}

impl Kernel for Backward<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        for head in self.heads.clone() {
            self.head(s, HeadPlace::new(head, self.shape));
        }
    }
}

/// The values beside scores and products that the gradients of a tile's scores depend on.
struct TileTerms {
    /// The slope, and the logarithms of sums, in powers of two.
    slope: f32,
    log_sum_exp: QueryLanes,
    /// `dout . out`
    mean: QueryLanes,
    scale: f32,
}

impl Backward<'_> {
    #[inline(always)]
    fn head<S: Simd>(&mut self, s: S, place: HeadPlace) {
        let (shape, vectors) = (self.shape, row_vectors(self.shape));
        let positions = shape.sequences().positions();
        let first_row = place.sample * positions;
        let head = self.read.inputs.head(place);
        let dout = place.columns_of(self.read.dout, first_row, shape);
        let out = place.columns_of(self.read.out, first_row, shape);
        let sums = (place.sample * shape.heads() + place.head) * positions;
        let log_sum_exp = &self.read.log_sum_exp[sums..sums + positions];
        // SAFETY: every head of every sample belongs to one part of the work alone, and its columns of the thirds are disjoint.
        let writer =
            |third| unsafe { HeadWriter::new(self.dqkv, place, third * shape.width(), shape) };
        let (mut dq, dk, dv) = (writer(0), writer(1), writer(2));
        self.scratch.dk.fill(Lanes::ZERO);
        self.scratch.dv.fill(Lanes::ZERO);
        for first in (0..positions).step_by(QUERIES) {
            let queries = QUERIES.min(positions - first);
            let tile = QueryTile::new(first, queries, |i| head.mask.first_seen(i));
            let mut terms = TileTerms {
                slope: head.slope * LOG2_E,
                log_sum_exp: NO_LANES,
                mean: NO_LANES,
                scale: head.scale,
            };
            for query in 0..queries {
                let (vector, lane) = (query / LANES, query % LANES);
                terms.log_sum_exp[vector].0[lane] = log_sum_exp[first + query] * LOG2_E;
                terms.mean[vector].0[lane] =
                    dot_row(s, dout.row(first + query), out.row(first + query));
            }
            let next = first + queries..positions.min(first + 2 * QUERIES);
            for rows in [head.q, head.k, head.v, dout, out] {
                prefetch_rows(s, rows, next.clone());
            }
            self.tile(s, head, dout, &tile, &terms);
            for_each_row(s, self.scratch.dq, &tile, |query, column, values| {
                dq.write(s, first + query, column, values);
            });
        }
        for (mut writer, rows) in [(dk, &*self.scratch.dk), (dv, &*self.scratch.dv)] {
            for (position, row) in rows.chunks_exact(vectors).enumerate().take(positions) {
                for (vector, lanes) in row.iter().enumerate() {
                    writer.write(s, position, vector * LANES, s.load(&lanes.0));
                }
            }
        }
    }

    /// Adds the gradients of keys and values from one tile of queries to `dk` and `dv`, and leaves the gradients of the queries in
    /// `dq`.
    #[inline(always)]
    fn tile<S: Simd>(
        &mut self,
        s: S,
        head: Head<'_>,
        dout: Rows<'_>,
        tile: &QueryTile,
        terms: &TileTerms,
    ) {
        let vectors = row_vectors(self.shape);
        let scratch = &mut self.scratch;
        let first = tile.first - head.mask.past;
        transpose_rows(s, scratch.columns, head.q, first, tile, head.scale * LOG2_E);
        transpose_rows(s, scratch.dout_columns, dout, first, tile, 1.0);
        pack_rows(s, scratch.q, head.q, tile, vectors);
        pack_rows(s, scratch.dout, dout, tile, vectors);
        scratch.dq.fill(NO_LANES);
        for keys in tile.key_tiles() {
            let blocks = keys.len().next_multiple_of(BLOCK);
            let probabilities = &mut scratch.probabilities[..blocks];
            let dscores = &mut scratch.dscores[..blocks];
            tile.dots(s, probabilities, head.k, scratch.columns, keys.clone());
            tile.dots(s, dscores, head.v, scratch.dout_columns, keys.clone());
            terms.gradients(s, probabilities, dscores, tile, &keys);
            let weights = &dscores[..keys.len()];
            let weighted = Weighted { rows: head.k, weights, first_key: keys.start, tile };
            weighted.add_to(s, scratch.dq);
            for (sums, rows, weights) in [
                (&mut *scratch.dk, &*scratch.q, &*dscores),
                (&mut *scratch.dv, &*scratch.dout, &*probabilities),
            ] {
                let sums = sums[keys.start * vectors..].chunks_exact_mut(BLOCK * vectors);
                let blocks = weights.chunks_exact(BLOCK).zip(sums);
                for (block, (weights, sums)) in blocks.enumerate() {
                    let first_key = keys.start + block * BLOCK;
                    let weighted = WeightedQueries { rows, vectors, weights, first_key, tile };
                    weighted.add_to(s, sums);
                }
            }
        }
    }
}

impl TileTerms {
    /// Turns a tile's scores into probabilities, and `dout . v` into the gradients of `q . k`.
    #[inline(always)]
    fn gradients<S: Simd>(
        &self,
        s: S,
        scores: &mut [QueryLanes],
        products: &mut [QueryLanes],
        tile: &QueryTile,
        keys: &Range<usize>,
    ) {
        for vector in 0..tile.vectors {
            for (part, visible) in tile.seen[vector].within(keys).parts() {
                let range = part.start - keys.start..part.end - keys.start;
                let (scores, products) = (&mut scores[range.clone()], &mut products[range]);
                let mut first = part.start;
                for (scores, products) in scores.chunks_mut(GROUP).zip(products.chunks_mut(GROUP)) {
                    if scores.len() == GROUP {
                        let group = Group { first, vector, visible, tile };
                        self.group::<S, GROUP>(s, scores, products, group);
                    } else {
                        for (i, (score, product)) in
                            scores.chunks_mut(1).zip(products.chunks_mut(1)).enumerate()
                        {
                            let group = Group { first: first + i, vector, visible, tile };
                            self.group::<S, 1>(s, score, product, group);
                        }
                    }
                    first += GROUP;
                }
            }
        }
    }

    #[inline(always)]
    fn group<S: Simd, const K: usize>(
        &self,
        s: S,
        scores: &mut [QueryLanes],
        products: &mut [QueryLanes],
        group: Group<'_>,
    ) {
        let Group { first, vector, visible, tile } = group;
        let zero = s.splat(0.0);
        let sum = s.load(&self.log_sum_exp[vector].0);
        let (mean, scale) = (s.load(&self.mean[vector].0), s.splat(self.scale));
        let mut powers = [zero; K];
        for (i, (power, score)) in powers.iter_mut().zip(&*scores).enumerate() {
            let score = s.load(&score[vector].0);
            let exponent = s.sub(tile.biased(s, score, self.slope, vector, first + i), sum);
            *power = s.max(s.splat(LEAST_EXPONENT), exponent);
        }
        let [least] = exp2_each(s, [s.splat(LEAST_EXPONENT)]);
        let powers = exp2_each(s, powers);
        for (i, probability) in powers.into_iter().enumerate() {
            let probability = s.sub(probability, least);
            let product = s.sub(s.load(&products[i][vector].0), mean);
            let dscore = s.mul(s.mul(probability, scale), product);
            let [probability, dscore] = match visible {
                Visible::All => [probability, dscore],
                Visible::Some => {
                    let unseen = tile.unseen(s, vector, first + i);
                    [probability, dscore].map(|x| s.select_by_sign(unseen, x, zero))
                }
            };
            s.store(&mut scores[i][vector].0, probability);
            s.store(&mut products[i][vector].0, dscore);
        }
    }
}

/// Exponentials that are formed side by side.
const GROUP: usize = 4;

/// Probabilities begin above 2^-100, and are zero below: products of smaller ones would be denormal, which is slow.
const LEAST_EXPONENT: f32 = -100.0;

/// Keys from `first` on, and the vector of queries that they meet.
struct Group<'a> {
    first: usize,
    vector: usize,
    visible: Visible,
    tile: &'a QueryTile,
}

/// The rows of a tile's queries, in whole vectors.
#[inline(always)]
fn pack_rows<S: Simd>(s: S, out: &mut [Lanes], rows: Rows<'_>, tile: &QueryTile, vectors: usize) {
    for (query, out) in out.chunks_exact_mut(vectors).enumerate().take(tile.count) {
        let row = rows.row(tile.first + query);
        for (out, row) in out.iter_mut().zip(row.chunks(LANES)) {
            s.store(&mut out.0, s.load_row(row));
        }
    }
}

/// The product of two rows: sixteen chains, then their sum.
#[inline(always)]
fn dot_row<S: Simd>(s: S, left: &[f32], right: &[f32]) -> f32 {
    let mut sum = s.splat(0.0);
    for (left, right) in left.chunks(LANES).zip(right.chunks(LANES)) {
        sum = s.mul_add(s.load_row(left), s.load_row(right), sum);
    }
    s.sum(sum)
}
