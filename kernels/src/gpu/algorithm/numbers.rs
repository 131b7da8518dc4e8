//! The operands of a trial: numbers that repeat, so that a small product gives every row of a
//! larger one.

use std::ops::Range;

use crate::gpu::driver::{ElementKind, MatrixProduct, Operand};

/// Rows of the left factor that repeat: row r of every operand is row r modulo this. Odd, so that they meet every place within a tile.
pub(super) const PERIOD: usize = 129;

/// Elements of any other operand that repeat, in whole runs: it may be as large as a table of a vocabulary.
const REPEATED_ELEMENTS: usize = 1 << 18;

/// The sign of an `f32`.
const SIGN: u32 = 1 << 31;

/// A factor of the product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Left,
    Right,
}

/// The contents of a run of contiguous elements of a factor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Run {
    /// All terms of one row or column of the product.
    Terms,
    /// One term of all rows or columns.
    OneTerm,
}

/// How a factor lies in memory: in runs, which repeat.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    side: Side,
    element: ElementKind,
    run: Run,
    /// Elements from run to run.
    stride: usize,
    runs: usize,
    /// Runs until they repeat.
    period: usize,
    /// Terms of a sum.
    terms: usize,
}

/// Runs, and the numbers that they repeat from the first of them on.
pub(super) type Segment = (Range<usize>, Vec<u8>);

impl Layout {
    /// The layout of a factor of `product`, for its first `rows` rows.
    pub(super) fn of(side: Side, product: &MatrixProduct, rows: usize) -> Self {
        let (operand, run, outer) = match side {
            Side::Left if product.a.transposed => (product.a, Run::OneTerm, rows),
            Side::Left => (product.a, Run::Terms, rows),
            Side::Right if product.b.transposed => (product.b, Run::Terms, product.n),
            Side::Right => (product.b, Run::OneTerm, product.n),
        };
        let Operand { element, stride, .. } = operand;
        let terms = product.k;
        let (runs, most) = match run {
            Run::Terms => (outer, outer),
            // The second half repeats the first.
            Run::OneTerm => (terms, terms / 2),
        };
        let period = match (side, run) {
            (Side::Left, Run::Terms) => PERIOD,
            _ => (REPEATED_ELEMENTS / stride.max(1)).clamp(1, most.max(1)),
        };
        Self { side, element, run, stride, runs, period, terms }
    }

    /// Bytes of a run.
    pub(super) fn run_bytes(&self) -> usize {
        self.stride.saturating_mul(self.element.bytes())
    }

    /// Bytes of all runs.
    pub(super) fn bytes(&self) -> usize {
        self.run_bytes().saturating_mul(self.runs)
    }

    /// Elements of all runs.
    pub(super) fn elements(&self) -> usize {
        self.stride.saturating_mul(self.runs)
    }

    /// Random numbers such that the second half of the terms of a sum cancels the first: the sum consists of rounding errors, of
    /// which every bit depends on the order. In a sum rounded to bf16 no other difference of orders would show.
    pub(super) fn cancelling(&self) -> Vec<Segment> {
        let half = self.terms / 2;
        let negative = if self.side == Side::Left { SIGN } else { 0 };
        let mut numbers = random_numbers(self.seed(), self.period * self.stride, 3);
        match self.run {
            Run::Terms => {
                for run in numbers.chunks_exact_mut(self.stride) {
                    for term in 0..half {
                        run[half + term] = run[term] ^ negative;
                    }
                    if self.side == Side::Left {
                        // With an odd number, the last would have no partner to cancel it.
                        run[2 * half..self.terms].fill(0);
                    }
                }
                vec![(0..self.runs, self.encoded(&numbers))]
            }
            Run::OneTerm => {
                let first = self.encoded(&numbers);
                numbers.iter_mut().for_each(|number| *number ^= negative);
                let last = self.encoded(&vec![0; self.stride]);
                vec![
                    (0..half, first),
                    (half..2 * half, self.encoded(&numbers)),
                    (2 * half..self.runs, last),
                ]
            }
        }
    }

    /// One period of random whole numbers, of which any sum of products is exact in fp32.
    pub(super) fn whole(&self) -> Vec<f32> {
        let most = largest_whole(self.terms);
        let mut random = Random::new(self.seed() + 16);
        (0..self.period * self.stride).map(|_| random.whole(most) as f32).collect()
    }

    /// The place, in a period of [`whole`](Self::whole), of a term's factor for row `outer` of the left matrix, or column `outer`
    /// of the right.
    pub(super) fn place(&self, outer: usize, term: usize) -> usize {
        match self.run {
            Run::Terms => outer % self.period * self.stride + term,
            Run::OneTerm => term % self.period * self.stride + outer,
        }
    }

    /// As they lie in memory.
    pub(super) fn segments(&self, whole: &[f32]) -> Vec<Segment> {
        vec![(0..self.runs, encoded_numbers(self.element, whole))]
    }

    fn seed(&self) -> u64 {
        if self.side == Side::Left { 1 } else { 2 }
    }

    fn encoded(&self, bits: &[u32]) -> Vec<u8> {
        encoded(self.element, bits)
    }
}

/// [`PERIOD`] rows for an output that a product is added to: as small as the errors that cancelling sums leave.
pub(super) fn small_before(out: &Operand) -> Vec<u8> {
    encoded(out.element, &random_numbers(3, PERIOD * out.stride, -16))
}

/// [`PERIOD`] rows of whole numbers to which sums of whole numbers are added with a rounding: in fp32 they lie between 2^25 and 2^26,
/// where every fourth is a number.
pub(super) fn whole_before(out: &Operand) -> Vec<f32> {
    let mut random = Random::new(19);
    let number = |_| match out.element {
        ElementKind::F32 => ((1 << 25) + 4 * (random.next() % (1 << 20)) as i64) as f32,
        ElementKind::Bf16 => (16 * random.whole(255)) as f32,
    };
    (0..PERIOD * out.stride).map(number).collect()
}

/// Whole numbers that are added to columns: added before a sum is rounded they leave another number than added after it.
pub(super) fn whole_bias(columns: usize) -> Vec<f32> {
    let mut random = Random::new(23);
    (0..columns).map(|_| random.whole(255) as f32).collect()
}

/// The largest whole number in a factor whose sums have `terms` terms. Sums stay below 2^22, which fp32 and matrix units of every
/// kind hold exactly in any order; sums of few terms are still large enough for bf16 to round them, and the factors are numbers of
/// bf16.
fn largest_whole(terms: usize) -> u64 {
    let most = ((1_u64 << 22) as f64 / terms.max(1) as f64).sqrt();
    (most as u64).clamp(1, 255)
}

/// Random numbers by splitmix64.
struct Random(u64);

impl Random {
    fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    /// From `-most` to `most`.
    fn whole(&mut self, most: u64) -> i64 {
        (self.next() % (2 * most + 1)) as i64 - most as i64
    }
}

/// The bits of `f32`s of random signs and mantissas and of sixteen magnitudes up to `2^exponent`: products of bf16 numbers of a few
/// magnitudes are summed exactly in fp32, and then no order shows.
fn random_numbers(seed: u64, count: usize, exponent: i32) -> Vec<u32> {
    let mut random = Random::new(seed);
    let largest = (127 + exponent) as u32;
    let number = |random: u64| {
        let exponent = largest - (random >> 32) as u32 % 16;
        random as u32 & 0x807f_ffff | exponent << 23
    };
    (0..count).map(|_| number(random.next())).collect()
}

/// The bytes of numbers, of each as many bits as the element has.
pub(super) fn encoded_numbers(element: ElementKind, numbers: &[f32]) -> Vec<u8> {
    let bits: Vec<u32> = numbers.iter().map(|number| number.to_bits()).collect();
    encoded(element, &bits)
}

/// The bytes of numbers of which `bits` are those of an `f32`.
fn encoded(element: ElementKind, bits: &[u32]) -> Vec<u8> {
    match element {
        ElementKind::F32 => bits.iter().flat_map(|bits| bits.to_ne_bytes()).collect(),
        ElementKind::Bf16 => {
            bits.iter().flat_map(|bits| ((bits >> 16) as u16).to_ne_bytes()).collect()
        }
    }
}

/// The number at `place` of what lies in memory.
pub(super) fn decoded(element: ElementKind, bytes: &[u8], place: usize) -> f32 {
    let at = place * element.bytes();
    match element {
        ElementKind::F32 => {
            f32::from_bits(u32::from_ne_bytes(std::array::from_fn(|i| bytes[at + i])))
        }
        ElementKind::Bf16 => {
            half::bf16::from_bits(u16::from_ne_bytes(std::array::from_fn(|i| bytes[at + i])))
                .to_f32()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::Output;
    use crate::gpu::driver::{Address, Rows};

    fn product(element: ElementKind, left: bool, right: bool, n: usize, k: usize) -> MatrixProduct {
        let operand = |stride, transposed| Operand {
            address: Address::NULL,
            stride,
            transposed,
            element,
            alignment: element.bytes(),
        };
        MatrixProduct {
            out: operand(n, false),
            a: operand(if left { PERIOD } else { k } + 5, left),
            b: operand(if right { k } else { n } + 3, right),
            m: 1,
            n,
            k,
            output: Output::Overwrite,
            base: Address::NULL,
            bias: None,
            rows: Rows::Free,
            batch: None,
        }
    }

    /// All numbers of a factor, as they come to lie in memory.
    fn laid_out(layout: &Layout, segments: Vec<Segment>) -> Vec<f32> {
        let mut bytes = vec![0; layout.bytes()];
        for (runs, period) in segments {
            let range = runs.start * layout.run_bytes()..runs.end * layout.run_bytes();
            for part in bytes[range].chunks_mut(period.len()) {
                part.copy_from_slice(&period[..part.len()]);
            }
        }
        (0..layout.runs * layout.stride).map(|at| decoded(layout.element, &bytes, at)).collect()
    }

    fn at(layout: &Layout, outer: usize, term: usize) -> usize {
        match layout.run {
            Run::Terms => outer * layout.stride + term,
            Run::OneTerm => term * layout.stride + outer,
        }
    }

    #[test]
    fn all_sums_cancel_but_for_what_is_rounded_away() {
        let (n, k) = (40, 37);
        for element in [ElementKind::F32, ElementKind::Bf16] {
            for (left, right) in [(false, false), (false, true), (true, false), (true, true)] {
                let product = product(element, left, right, n, k);
                let [a, b] =
                    [Side::Left, Side::Right].map(|side| Layout::of(side, &product, PERIOD));
                let [lefts, rights] = [&a, &b].map(|lay| laid_out(lay, lay.cancelling()));
                let (mut chains, mut differing) = (0, 0);
                for (row, column) in (0..PERIOD).flat_map(|row| (0..n).map(move |c| (row, c))) {
                    let term = |term: usize| {
                        f64::from(lefts[at(&a, row, term)])
                            * f64::from(rights[at(&b, column, term)])
                    };
                    assert_eq!((0..k / 2).map(|at| term(at) + term(k / 2 + at)).sum::<f64>(), 0.0);
                    let chain = |sum: f32, at| (f64::from(sum) + term(at)) as f32;
                    let (forwards, backwards) =
                        ((0..k).fold(0.0, chain), (0..k).rev().fold(0.0, chain));
                    chains += 1;
                    differing += usize::from(
                        half::bf16::from_f32(forwards) != half::bf16::from_f32(backwards),
                    );
                }
                assert!(
                    differing > chains / 2,
                    "{differing} of {chains}: {element:?} {left} {right}"
                );
            }
        }
    }

    /// So that what a product should be is known without it.
    #[test]
    fn whole_numbers_stand_where_they_are_looked_for() {
        for (left, right) in [(false, false), (false, true), (true, false), (true, true)] {
            let product = product(ElementKind::Bf16, left, right, 3000, 150);
            for (side, outers) in [(Side::Left, PERIOD), (Side::Right, 3000)] {
                let layout = Layout::of(side, &product, PERIOD);
                let whole = layout.whole();
                let numbers = laid_out(&layout, layout.segments(&whole));
                for (outer, term) in (0..outers).flat_map(|o| (0..150).map(move |t| (o, t))) {
                    let expected = whole[layout.place(outer, term)];
                    assert_eq!(numbers[at(&layout, outer, term)], expected, "{outer} {term}");
                }
            }
        }
    }

    #[test]
    fn sums_of_whole_numbers_are_exact_and_too_long_for_bf16() {
        for terms in [1, 2, 37, 1024, 100_000, 5_000_000] {
            let most = largest_whole(terms);
            assert!(most * most * terms as u64 <= 1 << 23, "{terms}");
            let root = (most * most) as f64 / 3.0 * (terms as f64).sqrt();
            assert!(root > 512.0, "{terms}: {root}");
        }
    }
}
