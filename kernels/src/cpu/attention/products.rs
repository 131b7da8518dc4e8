//! The products of attention, in blocks that stay in registers.
//!
//! Lanes are sixteen queries, or sixteen columns where rows of keys are what is summed. An element is a chain of fused
//! multiply-adds in the order of the definition, so neither the block nor the instruction set is numerics.

use std::ops::Range;

use super::queries::{QueryLanes, QueryTile, VECTORS};
use crate::cpu::rows::Rows;
use crate::cpu::simd::{LANES, Lanes, Simd};

/// Rows of a block where a processor holds many vectors; half as many elsewhere.
pub(super) const BLOCK: usize = 8;
const HALF: usize = BLOCK / 2;

/// `out[key][query] = rows[key] . queries[query]` of a block of keys and some vectors of queries; `columns` are the
/// queries, transposed.
#[inline(always)]
pub(super) fn dots<S: Simd>(
    s: S,
    out: &mut [QueryLanes],
    rows: [&[f32]; BLOCK],
    columns: &[QueryLanes],
    vectors: Range<usize>,
) {
    let first = vectors.start;
    match vectors.len() {
        3 if S::HOLDS_MANY => dots_block::<S, BLOCK, 3>(s, out, rows, columns, 0),
        2 if S::HOLDS_MANY => dots_block::<S, BLOCK, 2>(s, out, rows, columns, first),
        1 if S::HOLDS_MANY => dots_block::<S, BLOCK, 1>(s, out, rows, columns, first),
        _ => {
            let [a, b, c, d, e, f, g, h] = rows;
            let (low, high) = out.split_at_mut(HALF);
            for vector in vectors {
                dots_block::<S, HALF, 1>(s, low, [a, b, c, d], columns, vector);
                dots_block::<S, HALF, 1>(s, high, [e, f, g, h], columns, vector);
            }
        }
    }
}

#[inline(always)]
fn dots_block<S: Simd, const R: usize, const C: usize>(
    s: S,
    out: &mut [QueryLanes],
    rows: [&[f32]; R],
    columns: &[QueryLanes],
    first: usize,
) {
    let rows = rows.map(|row| &row[..columns.len()]);
    let mut sums = [[s.splat(0.0); C]; R];
    for (d, column) in columns.iter().enumerate() {
        let column = &column[first..first + C];
        for (row, sums) in rows.iter().zip(&mut sums) {
            let x = s.splat(row[d]);
            for (column, sum) in column.iter().zip(sums) {
                *sum = s.mul_add(x, s.load(&column.0), *sum);
            }
        }
    }
    for (out, sums) in out.iter_mut().zip(sums) {
        for (out, sum) in out[first..first + C].iter_mut().zip(sums) {
            s.store(&mut out.0, sum);
        }
    }
}

/// What a tile of queries sums: `rows[key]`, weighted by `weights[key - first_key][query]`.
#[derive(Clone, Copy)]
pub(super) struct Weighted<'a> {
    pub(super) rows: Rows<'a>,
    pub(super) weights: &'a [QueryLanes],
    pub(super) first_key: usize,
    pub(super) tile: &'a QueryTile,
}

impl Weighted<'_> {
    /// `sums[column][query] += sum over the keys of this tile that the query sees of rows[key][column] weights[key][query]`.
    #[inline(always)]
    pub(super) fn add_to<S: Simd>(self, s: S, sums: &mut [QueryLanes]) {
        let mut first = 0;
        for block in sums.chunks_mut(BLOCK) {
            if block.len() == BLOCK {
                self.add_columns::<S, BLOCK>(s, block, first);
            } else {
                for (i, column) in block.chunks_mut(1).enumerate() {
                    self.add_columns::<S, 1>(s, column, first + i);
                }
            }
            first += BLOCK;
        }
    }

    #[inline(always)]
    fn add_columns<S: Simd, const R: usize>(self, s: S, sums: &mut [QueryLanes], column: usize) {
        let keys = self.first_key..self.first_key + self.weights.len();
        let seen = self.tile.seen.each_ref().map(|seen| seen.within(keys.clone()));
        // What every query of the tile sees.
        let all = &seen[..self.tile.vectors];
        let from = all.iter().map(|seen| seen.full.start).max().unwrap_or(keys.end);
        let until = all.iter().map(|seen| seen.full.end).min().unwrap_or(keys.start);
        let together = S::HOLDS_MANY && self.tile.vectors == VECTORS && from < until;
        for (vector, seen) in all.iter().enumerate() {
            self.add_seen::<S, R>(s, sums, column, vector, seen.from..seen.full.start);
            if together {
                self.add::<S, R, 1>(s, sums, column, vector, seen.full.start..from);
            } else {
                self.add_narrow::<S, R>(s, sums, column, vector, seen.full.clone());
            }
        }
        if together {
            self.add::<S, R, VECTORS>(s, sums, column, 0, from..until);
        }
        for (vector, seen) in all.iter().enumerate() {
            if together {
                self.add::<S, R, 1>(s, sums, column, vector, until..seen.full.end);
            }
            self.add_seen::<S, R>(s, sums, column, vector, seen.full.end..seen.until);
        }
    }

    /// [`add`](Self::add) of one vector, in blocks that any processor holds.
    #[inline(always)]
    fn add_narrow<S: Simd, const R: usize>(
        self,
        s: S,
        sums: &mut [QueryLanes],
        column: usize,
        vector: usize,
        keys: Range<usize>,
    ) {
        if R > HALF && !S::HOLDS_MANY {
            let (low, high) = sums.split_at_mut(HALF);
            self.add::<S, HALF, 1>(s, low, column, vector, keys.clone());
            self.add::<S, HALF, 1>(s, high, column + HALF, vector, keys);
        } else {
            self.add::<S, R, 1>(s, sums, column, vector, keys);
        }
    }

    /// The keys that every query of C vectors sees.
    #[inline(always)]
    fn add<S: Simd, const R: usize, const C: usize>(
        self,
        s: S,
        sums: &mut [QueryLanes],
        column: usize,
        first: usize,
        keys: Range<usize>,
    ) {
        if keys.is_empty() {
            return;
        }
        let mut held = [[s.splat(0.0); C]; R];
        for (held, sums) in held.iter_mut().zip(&*sums) {
            for (held, sum) in held.iter_mut().zip(&sums[first..first + C]) {
                *held = s.load(&sum.0);
            }
        }
        let weights = &self.weights[keys.start - self.first_key..keys.end - self.first_key];
        for (key, weights) in keys.zip(weights) {
            let row = &self.rows.row(key)[column..column + R];
            let weights = &weights[first..first + C];
            for (x, held) in row.iter().zip(&mut held) {
                let x = s.splat(*x);
                for (weight, held) in weights.iter().zip(held) {
                    *held = s.mul_add(x, s.load(&weight.0), *held);
                }
            }
        }
        for (held, sums) in held.into_iter().zip(sums) {
            for (held, sum) in held.into_iter().zip(&mut sums[first..first + C]) {
                s.store(&mut sum.0, held);
            }
        }
    }

    /// The keys that only some queries of a vector see: the sums of the others stay, whatever the row holds.
    #[inline(always)]
    fn add_seen<S: Simd, const R: usize>(
        self,
        s: S,
        sums: &mut [QueryLanes],
        column: usize,
        vector: usize,
        keys: Range<usize>,
    ) {
        for key in keys {
            let row = &self.rows.row(key)[column..column + R];
            let weight = s.load(&self.weights[key - self.first_key][vector].0);
            let unseen = self.tile.unseen(s, vector, key);
            for (x, sums) in row.iter().zip(&mut *sums) {
                let sum = s.load(&sums[vector].0);
                let added = s.mul_add(s.splat(*x), weight, sum);
                s.store(&mut sums[vector].0, s.select_by_sign(unseen, added, sum));
            }
        }
    }
}

/// What a block of keys sums: `rows[query]`, each of `vectors` vectors, weighted by `weights[key][query]`.
#[derive(Clone, Copy)]
pub(super) struct WeightedQueries<'a> {
    pub(super) rows: &'a [Lanes],
    pub(super) vectors: usize,
    /// Those of the block, from `first_key` on.
    pub(super) weights: &'a [QueryLanes],
    pub(super) first_key: usize,
    pub(super) tile: &'a QueryTile,
}

impl WeightedQueries<'_> {
    /// `sums[key] += sum over the queries of this tile that see the key of weights[key][query] rows[query]`.
    #[inline(always)]
    pub(super) fn add_to<S: Simd>(self, s: S, sums: &mut [Lanes]) {
        if S::HOLDS_MANY {
            let mut first = 0;
            while first + 2 <= self.vectors {
                self.add::<S, BLOCK, 2>(s, sums, first, 0);
                first += 2;
            }
            if first < self.vectors {
                self.add::<S, BLOCK, 1>(s, sums, first, 0);
            }
        } else {
            for first in 0..self.vectors {
                self.add::<S, HALF, 1>(s, sums, first, 0);
                self.add::<S, HALF, 1>(s, sums, first, HALF);
            }
        }
    }

    /// Keys `block .. block + R` of the block, vectors `first .. first + C`.
    #[inline(always)]
    fn add<S: Simd, const R: usize, const C: usize>(
        self,
        s: S,
        sums: &mut [Lanes],
        first: usize,
        block: usize,
    ) {
        let mut held = [[s.splat(0.0); C]; R];
        for (r, held) in held.iter_mut().enumerate() {
            let sums = &sums[(block + r) * self.vectors + first..][..C];
            for (held, sum) in held.iter_mut().zip(sums) {
                *held = s.load(&sum.0);
            }
        }
        let first_key = self.first_key + block;
        let weights: [&QueryLanes; R] = std::array::from_fn(|r| &self.weights[block + r]);
        for vector in 0..self.tile.vectors {
            if self.tile.seen[vector].until <= first_key {
                continue;
            }
            let weights = weights.map(|weights| &weights[vector].0);
            let rows = self.rows[vector * LANES * self.vectors..].chunks_exact(self.vectors);
            for (lane, row) in rows.take(LANES).enumerate() {
                let [from, until] = self.tile.keys_of(vector * LANES + lane);
                let row = &row[first..first + C];
                let whole = from <= first_key && first_key + R <= until;
                for (r, held) in held.iter_mut().enumerate() {
                    if whole || (from..until).contains(&(first_key + r)) {
                        let weight = s.splat(weights[r][lane]);
                        for (row, held) in row.iter().zip(held) {
                            *held = s.mul_add(weight, s.load(&row.0), *held);
                        }
                    }
                }
            }
        }
        for (r, held) in held.into_iter().enumerate() {
            let sums = &mut sums[(block + r) * self.vectors + first..][..C];
            for (held, sum) in held.into_iter().zip(sums) {
                s.store(&mut sum.0, held);
            }
        }
    }
}
