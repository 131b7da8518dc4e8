//! Sixteen virtual lanes of `f32`, the only vector width that numerics know.
//!
//! Every vectorised loop of this backend is written once over [`Simd`] and instantiated for each
//! [`InstructionSet`](super::InstructionSet): one AVX-512 register, two AVX2 registers or a plain
//! array. All three do the same operations in the same order with explicit fused multiply-adds and
//! one tree for sums, so their bits are equal.
//!
//! A value of a type that implements [`Simd`] is the proof that the processor has the instructions:
//! it is only made by [`Dispatch`](super::dispatch::Dispatch) after detection. That makes arithmetic
//! safe to call, and loads and stores go through slices. Everything is `#[inline(always)]`, because an
//! intrinsic is only inlined into a function that enables its feature: the entry points in
//! [`dispatch`](super::dispatch). Only the portable arithmetic of x86-64 is called instead, as it runs where
//! AVX2 or FMA are missing, and inlined it would take a sixth of the time that this crate is built in.
//!
//! A loop's tail loads and stores part of a vector ([`load_row`](Simd::load_row)), with the operations
//! of the loop's body in between: an element's bits do not depend on its place in a row.

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;
pub(crate) mod portable;

/// The virtual width.
pub(crate) const LANES: usize = 16;

/// One vector in memory, aligned to a cache line.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C, align(64))]
pub(crate) struct Lanes(pub(crate) [f32; LANES]);

/// Sixteen vectors, such as the sixteen states of sixteen channels.
pub(crate) type Tile = [Lanes; LANES];

impl Lanes {
    pub(crate) const ZERO: Self = Self([0.0; LANES]);
}

/// The operations that an instruction set provides on sixteen lanes.
pub(crate) trait Simd: Copy {
    /// Sixteen `f32`.
    type Vector: Copy;
    /// Sixteen `f64`.
    type Doubles: Copy;
    /// Whether the processor holds about thirty vectors in registers, or about eight.
    const HOLDS_MANY: bool;

    fn splat(self, x: f32) -> Self::Vector;
    fn load(self, from: &[f32; LANES]) -> Self::Vector;
    fn store(self, to: &mut [f32; LANES], v: Self::Vector);
    fn add(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    fn sub(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    fn mul(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    fn div(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// `a * b + c`, rounded once.
    fn mul_add(self, a: Self::Vector, b: Self::Vector, c: Self::Vector) -> Self::Vector;
    /// `c - a * b`, rounded once.
    fn neg_mul_add(self, a: Self::Vector, b: Self::Vector, c: Self::Vector) -> Self::Vector;
    /// `a` where `a > b`, else `b`: `b` where either is NaN.
    fn max(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// `a` where `a < b`, else `b`: `b` where either is NaN.
    fn min(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    fn abs(self, a: Self::Vector) -> Self::Vector;
    fn sqrt(self, a: Self::Vector) -> Self::Vector;
    /// `negative` where the sign bit of `x` is set, else `positive`.
    fn select_by_sign(
        self,
        x: Self::Vector,
        positive: Self::Vector,
        negative: Self::Vector,
    ) -> Self::Vector;
    /// `p * 2^k`, where the low bits of `r` hold k: `bits(p) + (bits(r) << 23)`.
    fn scale_by_power(self, p: Self::Vector, r: Self::Vector) -> Self::Vector;
    /// The [`sum`](Self::sum) of each of the tile's vectors.
    fn sums(self, tile: &Tile) -> Self::Vector;

    /// Lane i of row j, as lane j of row i.
    #[inline(always)]
    fn transpose(self, rows: [Self::Vector; LANES]) -> [Self::Vector; LANES] {
        let mut tile: Tile = [Lanes::ZERO; LANES];
        for (lanes, row) in tile.iter_mut().zip(rows) {
            self.store(&mut lanes.0, row);
        }
        for row in 1..LANES {
            for column in 0..row {
                let [upper, lower] = [tile[column].0[row], tile[row].0[column]];
                tile[column].0[row] = lower;
                tile[row].0[column] = upper;
            }
        }
        let mut columns = rows;
        for (column, lanes) in columns.iter_mut().zip(&tile) {
            *column = self.load(&lanes.0);
        }
        columns
    }

    /// Sixteen zeros.
    fn zero_doubles(self) -> Self::Doubles;
    /// `sums + x^2` in `f64`, where the square of an `f32` is exact.
    fn add_squares(self, sums: Self::Doubles, x: Self::Vector) -> Self::Doubles;
    /// The sixteen lanes.
    fn doubles(self, sums: Self::Doubles) -> [f64; LANES];

    /// The sum of the lanes: lanes i and i + 8, then i + 4, i + 2 and i + 1.
    #[inline(always)]
    fn sum(self, v: Self::Vector) -> f32 {
        let mut lanes = [0.0; LANES];
        self.store(&mut lanes, v);
        for width in [8, 4, 2, 1] {
            for i in 0..width {
                lanes[i] += lanes[i + width];
            }
        }
        lanes[0]
    }

    /// The greatest of the lanes; NaN where one is NaN.
    #[inline(always)]
    fn greatest(self, v: Self::Vector) -> f32 {
        let mut lanes = [0.0; LANES];
        self.store(&mut lanes, v);
        let mut greatest = lanes[0];
        for &lane in &lanes[1..] {
            greatest = if greatest > lane || greatest.is_nan() { greatest } else { lane };
        }
        greatest
    }

    /// Asks for the cache line at `address`, which may be any, ahead of its use. Rows of a strided matrix lie on pages of their
    /// own, across which no hardware reads ahead.
    #[inline(always)]
    fn prefetch(self, address: *const f32) {
        let _ = address;
    }

    /// The first sixteen elements of `row`; lanes past its end are `padding`.
    #[inline(always)]
    fn load_row_or(self, row: &[f32], padding: f32) -> Self::Vector {
        match row.first_chunk() {
            Some(whole) => self.load(whole),
            None => {
                let mut lanes = [padding; LANES];
                lanes[..row.len()].copy_from_slice(row);
                self.load(&lanes)
            }
        }
    }

    /// The first sixteen elements of `row`; lanes past its end are zero.
    #[inline(always)]
    fn load_row(self, row: &[f32]) -> Self::Vector {
        self.load_row_or(row, 0.0)
    }

    /// Writes the first sixteen elements of `row`, or fewer where it ends.
    #[inline(always)]
    fn store_row(self, row: &mut [f32], v: Self::Vector) {
        match row.first_chunk_mut() {
            Some(whole) => self.store(whole, v),
            None => {
                let mut lanes = [0.0; LANES];
                self.store(&mut lanes, v);
                let elements = row.len();
                row.copy_from_slice(&lanes[..elements]);
            }
        }
    }

    /// `v`, its lanes from `count` on being zero.
    #[inline(always)]
    fn keep_first(self, v: Self::Vector, count: usize) -> Self::Vector {
        if count >= LANES {
            return v;
        }
        let mut lanes = [0.0; LANES];
        self.store(&mut lanes, v);
        lanes[count..].fill(0.0);
        self.load(&lanes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::InstructionSet;
    use crate::cpu::dispatch::{Dispatch, Kernel};

    /// Numbers whose sums depend on the order.
    fn tile() -> Tile {
        let mut bits = 0x9e37_79b9_u32;
        let mut next = || {
            bits ^= bits << 13;
            bits ^= bits >> 17;
            bits ^= bits << 5;
            (bits as f32 / u32::MAX as f32 - 0.5) * (1 << (bits % 20)) as f32
        };
        let mut tile = [Lanes::ZERO; LANES];
        tile.iter_mut().for_each(|row| row.0.fill_with(&mut next));
        tile
    }

    /// Every operation whose lanes may meet.
    struct Meetings(Tile);

    impl Kernel for Meetings {
        type Output = (Vec<u32>, Vec<u64>);

        #[inline(always)]
        fn run<S: Simd>(self, s: S) -> (Vec<u32>, Vec<u64>) {
            let mut sums = Lanes::ZERO;
            s.store(&mut sums.0, s.sums(&self.0));
            let mut floats = sums.0.to_vec();
            let mut squares = s.zero_doubles();
            for Lanes(row) in &self.0 {
                floats.push(s.sum(s.load(row)));
                floats.push(s.greatest(s.load(row)));
                squares = s.add_squares(squares, s.load(row));
            }
            for elements in 0..LANES {
                let mut row = [7.0; LANES];
                s.store_row(&mut row[..elements], s.load_row_or(&self.0[0].0[..elements], 3.0));
                floats.extend(row);
            }
            let doubles = s.doubles(squares).map(f64::to_bits).to_vec();
            (floats.into_iter().map(f32::to_bits).collect(), doubles)
        }
    }

    #[test]
    fn instruction_sets_give_the_same_bits() {
        let portable = Dispatch::new(InstructionSet::Portable).unwrap().run(Meetings(tile()));
        let tile = tile();
        for (row, &sum) in tile.iter().zip(&portable.0) {
            let tree = |i: usize| (row.0[i] + row.0[i + 8]) + (row.0[i + 4] + row.0[i + 12]);
            let expected = (tree(0) + tree(2)) + (tree(1) + tree(3));
            assert_eq!(f32::from_bits(sum), expected, "the tree of a sum");
        }
        for set in InstructionSet::ALL {
            if let Ok(dispatch) = Dispatch::new(set) {
                assert_eq!(dispatch.run(Meetings(tile)), portable, "{set:?}");
            }
        }
    }
}
