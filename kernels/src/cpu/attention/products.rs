//! The products of attention, in blocks that stay in registers.
//!
//! Lanes are sixteen queries, or sixteen columns in sums over rows of keys. An element is a chain
//! of fused multiply-adds in the order of the definition, so neither the block nor the instruction
//! set is numerics.

use std::ops::Range;

use super::queries::{QueryLanes, QueryTile, Seen, VECTORS, Visible};
use crate::cpu::rows::Rows;
use crate::cpu::simd::{LANES, Lanes, Simd};

/// Rows of a block where a processor holds many vectors; half as many elsewhere.
pub(super) const BLOCK: usize = 8;
const HALF: usize = BLOCK / 2;
/// Columns that a vector of queries sums by itself, where a processor holds many vectors.
const ALONE: usize = 16;

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

/// The terms of a sum over keys, for each query of `tile`: `rows[key]`, weighted by `weights[key - first_key][query]`.
#[derive(Clone, Copy)]
pub(super) struct Weighted<'a> {
    pub(super) rows: Rows<'a>,
    pub(super) weights: &'a [QueryLanes],
    pub(super) first_key: usize,
    pub(super) tile: &'a QueryTile,
}

/// The keys of a tile, as the vectors of a tile of queries see them.
struct Shares {
    seen: [Seen; VECTORS],
    /// The keys that all queries see, where it is worth while to take them together.
    together: Range<usize>,
}

impl Weighted<'_> {
    /// `sums[column][query] += sum over the keys of this tile that the query sees of rows[key][column] weights[key][query]`.
    #[inline(always)]
    pub(super) fn add_to<S: Simd>(self, s: S, sums: &mut [QueryLanes]) {
        let keys = self.first_key..self.first_key + self.weights.len();
        let mut shares = Shares { seen: [Seen::NOTHING; VECTORS], together: keys.clone() };
        for (share, seen) in shares.seen.iter_mut().zip(&self.tile.seen).take(self.tile.vectors) {
            *share = seen.within(&keys);
            let Range { start, end } = shares.together;
            shares.together = start.max(share.full_from)..end.min(share.full_until);
        }
        if !S::HOLDS_MANY || self.tile.vectors < VECTORS || shares.together.is_empty() {
            shares.together = keys.end..keys.end;
        }
        let Range { start, end } = shares.together;
        let before = shares.seen.map(|seen| Seen {
            full_until: seen.full_until.min(start),
            until: seen.full_until.min(start),
            ..seen
        });
        self.add_apart(s, sums, &before);
        if start < end {
            let mut first = 0;
            for block in sums.chunks_mut(BLOCK) {
                if block.len() == BLOCK {
                    self.add_together::<S, BLOCK>(s, block, first, start..end);
                } else {
                    for (i, column) in block.chunks_mut(1).enumerate() {
                        self.add_together::<S, 1>(s, column, first + i, start..end);
                    }
                }
                first += BLOCK;
            }
        }
        let after = shares.seen.map(|seen| {
            let from = seen.full_from.max(end).min(seen.full_until);
            Seen { from, full_from: from, ..seen }
        });
        self.add_apart(s, sums, &after);
    }

    /// The keys that each vector of queries takes by itself.
    #[inline(always)]
    fn add_apart<S: Simd>(self, s: S, sums: &mut [QueryLanes], seen: &[Seen; VECTORS]) {
        for (vector, seen) in seen.iter().enumerate() {
            if seen.from >= seen.until {
                continue;
            }
            let mut first = 0;
            for block in sums.chunks_mut(ALONE) {
                if S::HOLDS_MANY && block.len() == ALONE {
                    self.add_vector::<S, ALONE>(s, block, first, vector, seen);
                } else {
                    let mut first = first;
                    for block in block.chunks_mut(HALF) {
                        if block.len() == HALF {
                            self.add_vector::<S, HALF>(s, block, first, vector, seen);
                        } else {
                            for (i, column) in block.chunks_mut(1).enumerate() {
                                self.add_vector::<S, 1>(s, column, first + i, vector, seen);
                            }
                        }
                        first += HALF;
                    }
                }
                first += ALONE;
            }
        }
    }

    /// The keys that all queries of the tile see.
    #[inline(always)]
    fn add_together<S: Simd, const R: usize>(
        self,
        s: S,
        sums: &mut [QueryLanes],
        column: usize,
        keys: Range<usize>,
    ) {
        let mut held = [[s.splat(0.0); VECTORS]; R];
        for (held, sums) in held.iter_mut().zip(&*sums) {
            for (held, sum) in held.iter_mut().zip(sums) {
                *held = s.load(&sum.0);
            }
        }
        let weights = &self.weights[keys.start - self.first_key..keys.end - self.first_key];
        for (key, weights) in keys.zip(weights) {
            let row = &self.rows.row(key)[column..column + R];
            for (x, held) in row.iter().zip(&mut held) {
                let x = s.splat(*x);
                for (weight, held) in weights.iter().zip(held) {
                    *held = s.mul_add(x, s.load(&weight.0), *held);
                }
            }
        }
        for (held, sums) in held.into_iter().zip(sums) {
            for (held, sum) in held.into_iter().zip(sums) {
                s.store(&mut sum.0, held);
            }
        }
    }

    /// The keys that a vector's queries see: where a query does not, its sums stay, whatever the row holds.
    #[inline(always)]
    fn add_vector<S: Simd, const R: usize>(
        self,
        s: S,
        sums: &mut [QueryLanes],
        column: usize,
        vector: usize,
        seen: &Seen,
    ) {
        let mut held = [s.splat(0.0); R];
        for (held, sums) in held.iter_mut().zip(&*sums) {
            *held = s.load(&sums[vector].0);
        }
        for (keys, visible) in seen.parts() {
            for key in keys {
                let row = &self.rows.row(key)[column..column + R];
                let weight = s.load(&self.weights[key - self.first_key][vector].0);
                match visible {
                    Visible::All => {
                        for (x, held) in row.iter().zip(&mut held) {
                            *held = s.mul_add(s.splat(*x), weight, *held);
                        }
                    }
                    Visible::Some => {
                        let unseen = self.tile.unseen(s, vector, key);
                        for (x, held) in row.iter().zip(&mut held) {
                            let added = s.mul_add(s.splat(*x), weight, *held);
                            *held = s.select_by_sign(unseen, added, *held);
                        }
                    }
                }
            }
        }
        for (held, sums) in held.into_iter().zip(sums) {
            s.store(&mut sums[vector].0, held);
        }
    }
}

/// The terms of a sum over queries, for each key of a block: `rows[query]`, each of `vectors` vectors, weighted by
/// `weights[key][query]`.
#[derive(Clone, Copy)]
pub(super) struct WeightedQueries<'a> {
    pub(super) rows: &'a [Lanes],
    pub(super) vectors: usize,
    /// The weights of the block, from `first_key` on.
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
        let mut weights = [&self.weights[block]; R];
        for (r, weights) in weights.iter_mut().enumerate() {
            *weights = &self.weights[block + r];
        }
        for vector in 0..self.tile.vectors {
            let seen = self.tile.seen[vector];
            if seen.until <= first_key {
                continue;
            }
            let count = (self.tile.count - vector * LANES).min(LANES);
            let rows = self.rows[vector * LANES * self.vectors..].chunks_exact(self.vectors);
            let rows = rows.take(count).enumerate();
            if seen.full_from <= first_key && first_key + R <= seen.full_until {
                for (lane, row) in rows {
                    let row = &row[first..first + C];
                    for (weights, held) in weights.iter().zip(&mut held) {
                        let weight = s.splat(weights[vector].0[lane]);
                        for (row, held) in row.iter().zip(held) {
                            *held = s.mul_add(weight, s.load(&row.0), *held);
                        }
                    }
                }
                continue;
            }
            for (lane, row) in rows {
                let keys = self.tile.keys_of(vector * LANES + lane);
                let row = &row[first..first + C];
                if keys.start >= first_key + R || keys.end <= first_key {
                    continue;
                }
                let whole = keys.start <= first_key && first_key + R <= keys.end;
                for (r, (weights, held)) in weights.iter().zip(&mut held).enumerate() {
                    if whole || keys.contains(&(first_key + r)) {
                        let weight = s.splat(weights[vector].0[lane]);
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
