//! A tile of queries of one head: their places, the keys that they attend to, and their rows
//! transposed.

use std::ops::Range;

use super::products::{BLOCK, dots};
use crate::cpu::exponential::exp2_each;
use crate::cpu::rows::Rows;
use crate::cpu::simd::{LANES, Lanes, Simd};

/// Vectors of a tile of queries.
pub(super) const VECTORS: usize = 3;
/// Queries of a tile: how many is not numerics.
pub(super) const QUERIES: usize = VECTORS * LANES;
/// Keys of a tile. A query's running greatest score moves at these tiles, which are counted from a sample's first position:
/// numerics.
pub(super) const KEYS: usize = 64;

/// Something for each query of a tile.
pub(super) type QueryLanes = [Lanes; VECTORS];

pub(super) const NO_LANES: QueryLanes = [Lanes::ZERO; VECTORS];

/// The score of a masked key, and the initial greatest score of a query.
pub(super) const LEAST_SCORE: f32 = f32::MIN;

/// The keys that queries of a vector attend to.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seen {
    /// The first key that any query attends to.
    pub(super) from: usize,
    /// The first key that all attend to, and one past the last.
    pub(super) full_from: usize,
    pub(super) full_until: usize,
    /// One past the last key that any query attends to.
    pub(super) until: usize,
}

impl Seen {
    pub(super) const NOTHING: Self = Self { from: 0, full_from: 0, full_until: 0, until: 0 };

    /// The part of this within `keys`.
    #[inline(always)]
    pub(super) fn within(&self, keys: &Range<usize>) -> Self {
        let (first, last) = (keys.start, keys.end);
        Self {
            from: self.from.clamp(first, last),
            full_from: self.full_from.clamp(first, last),
            full_until: self.full_until.clamp(first, last),
            until: self.until.clamp(first, last),
        }
    }

    /// The keys in order, and whether they need a mask.
    #[inline(always)]
    pub(super) fn parts(&self) -> [(Range<usize>, Visible); 3] {
        [
            (self.from..self.full_from, Visible::Some),
            (self.full_from..self.full_until, Visible::All),
            (self.full_until..self.until, Visible::Some),
        ]
    }
}

/// Whether all queries of a vector attend to a key, or some, so that scores need a mask.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Visible {
    All,
    Some,
}

/// Up to [`QUERIES`] queries of one head that follow each other.
#[derive(Clone, Debug)]
pub(super) struct QueryTile {
    /// The position of the first query.
    pub(super) first: usize,
    /// The number of queries; the lanes after them repeat the last query's keys, and their results are not read.
    pub(super) count: usize,
    /// Vectors that hold the queries.
    pub(super) vectors: usize,
    pub(super) seen: [Seen; VECTORS],
    /// The first key that each query attends to.
    first_seen: [u32; QUERIES],
    /// The positions and `first_seen` as floating-point numbers.
    positions: QueryLanes,
    first_keys: QueryLanes,
}

impl QueryTile {
    /// `count` queries from position `first`; `first_seen` is the first key that a query at a position attends to.
    pub(super) fn new(first: usize, count: usize, first_seen: impl Fn(usize) -> usize) -> Self {
        let vectors = count.div_ceil(LANES);
        let mut seen = [Seen::NOTHING; VECTORS];
        let mut first_keys = [0; QUERIES];
        let mut lanes = [NO_LANES; 2];
        for (vector, seen) in seen.iter_mut().enumerate().take(vectors) {
            let base = first + vector * LANES;
            let last = (base + LANES - 1).min(first + count - 1);
            let (mut least, mut greatest) = (usize::MAX, 0);
            for lane in 0..LANES {
                let key = first_seen((base + lane).min(last));
                (least, greatest) = (least.min(key), greatest.max(key));
                first_keys[vector * LANES + lane] = key as u32;
                lanes[0][vector].0[lane] = (base + lane) as f32;
                lanes[1][vector].0[lane] = key as f32;
            }
            let until = last + 1;
            let [full_from, full_until] =
                if greatest <= base { [greatest, base + 1] } else { [until, until] };
            *seen = Seen { from: least, full_from, full_until, until };
        }
        let [positions, first_key_lanes] = lanes;
        Self {
            first,
            count,
            vectors,
            seen,
            first_seen: first_keys,
            positions,
            first_keys: first_key_lanes,
        }
    }

    /// The keys that any of the queries sees.
    pub(super) fn keys(&self) -> Range<usize> {
        let seen = &self.seen[..self.vectors];
        let from = seen.iter().map(|seen| seen.from).min().unwrap_or(0);
        from..self.first + self.count
    }

    /// The tiles of keys that any of the queries sees something of.
    pub(super) fn key_tiles(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let keys = self.keys();
        (keys.start / KEYS..keys.end.div_ceil(KEYS))
            .map(move |tile| tile * KEYS..((tile + 1) * KEYS).min(keys.end))
    }

    /// The keys that a query sees.
    #[inline(always)]
    pub(super) fn keys_of(&self, query: usize) -> Range<usize> {
        self.first_seen[query] as usize..self.first + query + 1
    }

    /// Negative lanes for the queries of a vector that do not see `key`.
    #[inline(always)]
    pub(super) fn unseen<S: Simd>(&self, s: S, vector: usize, key: usize) -> S::Vector {
        let key = s.splat(key as f32);
        let older = s.sub(s.load(&self.positions[vector].0), key);
        s.min(older, s.sub(key, s.load(&self.first_keys[vector].0)))
    }

    /// Adds the linear bias of `key` to a vector of scores.
    #[inline(always)]
    pub(super) fn biased<S: Simd>(
        &self,
        s: S,
        score: S::Vector,
        slope: f32,
        vector: usize,
        key: usize,
    ) -> S::Vector {
        let distance = s.sub(s.splat(key as f32), s.load(&self.positions[vector].0));
        s.mul_add(s.splat(slope), distance, score)
    }

    /// `out[key - keys.start][query] = rows[key] . queries[query]` of every key of a tile that is seen.
    #[inline(always)]
    pub(super) fn dots<S: Simd>(
        &self,
        s: S,
        out: &mut [QueryLanes],
        rows: Rows<'_>,
        columns: &[QueryLanes],
        keys: Range<usize>,
    ) {
        for (block, out) in out.chunks_exact_mut(BLOCK).enumerate() {
            let first = keys.start + block * BLOCK;
            let sees = |seen: &Seen| seen.from < first + BLOCK && first < seen.until;
            let seen = &self.seen[..self.vectors];
            let Some(from) = seen.iter().position(sees) else { continue };
            let until = seen.iter().rposition(sees).map_or(from, |last| last + 1);
            let mut block = [rows.row(first); BLOCK];
            for (r, row) in block.iter_mut().enumerate() {
                *row = rows.row((first + r).min(keys.end - 1));
            }
            dots(s, out, block, columns, from..until);
        }
    }
}

/// `columns[column][query] = factor * rows[first + query][column]`; the lanes after the last query are zero.
#[inline(always)]
pub(super) fn transpose_rows<S: Simd>(
    s: S,
    columns: &mut [QueryLanes],
    rows: Rows<'_>,
    first: usize,
    tile: &QueryTile,
    factor: f32,
) {
    let factor = s.splat(factor);
    for vector in 0..tile.vectors {
        let count = (tile.count - vector * LANES).min(LANES);
        for (block, columns) in columns.chunks_mut(LANES).enumerate() {
            let mut square = [s.splat(0.0); LANES];
            for (lane, out) in square.iter_mut().enumerate() {
                if lane < count {
                    let row = rows.row(first + vector * LANES + lane);
                    *out = s.mul(s.load_row(&row[block * LANES..]), factor);
                }
            }
            for (column, lanes) in columns.iter_mut().zip(s.transpose(square)) {
                s.store(&mut column[vector].0, lanes);
            }
        }
    }
}

/// Asks for rows ahead of their use: each lies on a page of its own.
#[inline(always)]
pub(super) fn prefetch_rows<S: Simd>(s: S, rows: Rows<'_>, range: Range<usize>) {
    for row in range {
        for line in rows.row(row).chunks(LANES) {
            s.prefetch(line.as_ptr());
        }
    }
}

/// Hands the rows of a transposed tile to `write`: of each query, sixteen columns from a first one.
#[inline(always)]
pub(super) fn for_each_row<S: Simd>(
    s: S,
    columns: &[QueryLanes],
    tile: &QueryTile,
    mut write: impl FnMut(usize, usize, S::Vector),
) {
    for vector in 0..tile.vectors {
        let count = (tile.count - vector * LANES).min(LANES);
        for (block, columns) in columns.chunks(LANES).enumerate() {
            let mut square = [s.splat(0.0); LANES];
            for (square, column) in square.iter_mut().zip(columns) {
                *square = s.load(&column[vector].0);
            }
            for (lane, row) in s.transpose(square).into_iter().enumerate() {
                if lane < count {
                    write(vector * LANES + lane, block * LANES, row);
                }
            }
        }
    }
}

/// The online softmax of a tile of queries, in powers of two.
pub(super) struct Softmax {
    /// The greatest score so far.
    pub(super) greatest: QueryLanes,
    /// The sum so far of `2^(score - greatest)`.
    pub(super) sum: QueryLanes,
}

impl Softmax {
    pub(super) fn new() -> Self {
        Self { greatest: [Lanes([LEAST_SCORE; LANES]); VECTORS], sum: NO_LANES }
    }

    /// Turns the scores of a tile of keys into `2^(score - greatest)`, and scales the earlier sums to the new greatest scores.
    #[inline(always)]
    pub(super) fn weights<S: Simd>(
        &mut self,
        s: S,
        scores: &mut [QueryLanes],
        sums: &mut [QueryLanes],
        tile: &QueryTile,
        keys: &Range<usize>,
        slope: f32,
    ) {
        for vector in 0..tile.vectors {
            let seen = tile.seen[vector].within(keys);
            if seen.from == seen.until {
                continue;
            }
            let before = s.load(&self.greatest[vector].0);
            let mut greatest = before;
            for (part, visible) in seen.parts() {
                for key in part {
                    let score = &mut scores[key - keys.start][vector].0;
                    let mut biased = tile.biased(s, s.load(score), slope, vector, key);
                    if visible == Visible::Some {
                        let unseen = tile.unseen(s, vector, key);
                        biased = s.select_by_sign(unseen, biased, s.splat(LEAST_SCORE));
                    }
                    s.store(score, biased);
                    greatest = s.max(greatest, biased);
                }
            }
            let [shrink] = exp2_each(s, [s.sub(before, greatest)]);
            let mut sum = s.mul(s.load(&self.sum[vector].0), shrink);
            for (part, visible) in seen.parts() {
                let scores = &mut scores[part.start - keys.start..part.end - keys.start];
                match visible {
                    Visible::All => {
                        for group in scores.chunks_mut(GROUP) {
                            if group.len() == GROUP {
                                sum = add_powers::<S, GROUP>(s, group, vector, greatest, sum);
                            } else {
                                for one in group.chunks_mut(1) {
                                    sum = add_powers::<S, 1>(s, one, vector, greatest, sum);
                                }
                            }
                        }
                    }
                    Visible::Some => {
                        for (key, score) in part.zip(scores) {
                            let [power] = exp2_each(s, [s.sub(s.load(&score[vector].0), greatest)]);
                            let unseen = tile.unseen(s, vector, key);
                            let power = s.select_by_sign(unseen, power, s.splat(0.0));
                            s.store(&mut score[vector].0, power);
                            sum = s.add(sum, power);
                        }
                    }
                }
            }
            s.store(&mut self.sum[vector].0, sum);
            s.store(&mut self.greatest[vector].0, greatest);
            for sums in &mut *sums {
                let sum = &mut sums[vector].0;
                s.store(sum, s.mul(s.load(sum), shrink));
            }
        }
    }
}

/// Exponentials that are formed side by side.
const GROUP: usize = 8;

/// `2^(score - greatest)` of a vector's K scores, which are added to `sum` in order.
#[inline(always)]
fn add_powers<S: Simd, const K: usize>(
    s: S,
    scores: &mut [QueryLanes],
    vector: usize,
    greatest: S::Vector,
    mut sum: S::Vector,
) -> S::Vector {
    let mut powers = [sum; K];
    for (power, score) in powers.iter_mut().zip(&*scores) {
        *power = s.sub(s.load(&score[vector].0), greatest);
    }
    for (power, score) in exp2_each(s, powers).into_iter().zip(scores) {
        s.store(&mut score[vector].0, power);
        sum = s.add(sum, power);
    }
    sum
}
