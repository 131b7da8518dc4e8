//! Whether a matrix library's algorithm treats all rows alike, and the first that does.
//!
//! A library's algorithms are closed, and none says in which order it adds. A product whose rows are [free](Rows::Free) is pinned to
//! one algorithm on the assumption that an element's sum over k has the same order however many rows there are and wherever
//! its row stands. Here the assumption is checked on random numbers before an algorithm is pinned: a few products of a key,
//! once. The numbers and the rows follow from the product alone, so that peers of one kind choose alike.

use std::ops::Range;
use std::time::Instant;

use crate::backend::Output;
use crate::error::{KernelError, Result};
use crate::gpu::driver::{Driver, ElementKind, MatrixProduct, Operand, Rows};

/// Rows that repeat: row r of every operand is row r modulo this, so that every row of a larger product is known from this
/// one. Odd, so that they meet every place within a tile.
const PERIOD: usize = 129;

/// Rows of the largest product, enough to fill a GPU.
const MOST_ROWS: usize = 4096;

/// What its rows may take in memory: beside them stands the right factor, which is as large as a weight.
const MOST_BYTES: usize = 256 << 20;

/// Elements of the right factor that repeat, in whole rows: it may be as large as a table of a vocabulary.
const REPEATED_ELEMENTS: usize = 1 << 18;

/// The first of `candidates` by which an element's bits depend neither on the number of rows nor on where its row stands;
/// `None` where there is none. `multiply` enqueues a product by a candidate.
///
/// The product's rows must be [free](Rows::Free); its addresses and m do not matter. Products of 1, 129 and up to 4,096 rows are
/// formed of seeded random numbers in memory of their own, and waited for. Products of fixed rows need no such choice.
///
/// # Errors
/// What the driver or `multiply` answers, and a device without room: for the right factor, and about 256 MiB.
pub fn first_row_independent<D: Driver, A>(
    driver: &D,
    queue: &mut D::Queue,
    product: &MatrixProduct,
    candidates: impl IntoIterator<Item = A>,
    mut multiply: impl FnMut(&mut D::Queue, &A, MatrixProduct) -> Result<()>,
) -> Result<Option<A>> {
    let mut candidates = candidates.into_iter().peekable();
    if candidates.peek().is_none() {
        return Ok(None);
    }
    let (start, MatrixProduct { n, k, .. }) = (Instant::now(), *product);
    let mut trial = Trial::new(driver, queue, product)?;
    for (place, candidate) in candidates.enumerate() {
        let multiply = &mut |queue: &mut D::Queue, product| multiply(queue, &candidate, product);
        if trial.rows_agree(driver, queue, multiply)? {
            let milliseconds = start.elapsed().as_millis();
            tracing::debug!(
                place,
                n,
                k,
                milliseconds,
                "an algorithm of the matrix library is pinned"
            );
            return Ok(Some(candidate));
        }
        tracing::warn!(
            place,
            n,
            k,
            library = driver.properties().matrix_library,
            "an algorithm of the matrix library treats rows differently; another is looked for"
        );
    }
    Ok(None)
}

/// Operands of one product, in rows that repeat.
struct Trial<D: Driver> {
    product: MatrixProduct,
    /// Rows of the largest product.
    rows: usize,
    /// The memory of the factors, which `product` names.
    _factors: [D::Memory; 2],
    out: D::Memory,
    /// What `out` holds before a product that adds: [`PERIOD`] rows.
    added_to: Option<D::Memory>,
    /// From row to row of `out`.
    row_bytes: usize,
}

type Multiply<'a, D> = dyn FnMut(&mut <D as Driver>::Queue, MatrixProduct) -> Result<()> + 'a;

impl<D: Driver> Trial<D> {
    fn new(driver: &D, queue: &mut D::Queue, product: &MatrixProduct) -> Result<Self> {
        let row_bytes = |operand: Operand| operand.stride.saturating_mul(operand.element.bytes());
        let [a_bytes, out_bytes] = [product.a, product.out].map(row_bytes);
        // At least two periods, so that some rows stand in another place.
        let fitting = MOST_BYTES / a_bytes.saturating_add(out_bytes).max(1);
        let rows = fitting.clamp(2 * PERIOD, MOST_ROWS);
        let runs = if product.b.transposed { product.n } else { product.k };
        let b_bytes = row_bytes(product.b).saturating_mul(runs);

        // Memory that holds the period again and again, once from its beginning and once from where `anew` says.
        let repeated = |queue: &mut D::Queue, bytes: usize, anew: usize, period: &[u8]| {
            let mut memory = driver.allocate(queue, bytes)?;
            let source = driver.allocate(queue, period.len())?;
            driver.upload(queue, &source, 0, period)?;
            for part in [0..anew, anew..bytes] {
                repeat(driver, queue, (&mut memory, part), (&source, period.len()))?;
            }
            Ok::<_, KernelError>(memory)
        };
        let a_rows = rows.saturating_mul(a_bytes);
        let a = repeated(queue, a_rows, 0, &left_rows(product))?;
        // The second half of the terms is as the first: of each column, or of all rows.
        let anew = if product.b.transposed { 0 } else { product.k / 2 * row_bytes(product.b) };
        let b = repeated(queue, b_bytes, anew, &right_rows(product))?;
        let added_to = match product.output {
            Output::Overwrite => None,
            Output::Add => {
                // As small as what is left of sums that cancel.
                let numbers = random_numbers(3, PERIOD * product.out.stride, -16);
                let numbers = encoded(product.out.element, &numbers);
                Some(repeated(queue, numbers.len(), 0, &numbers)?)
            }
        };
        let out = driver.allocate(queue, rows.saturating_mul(out_bytes))?;
        let at = |operand: Operand, memory| Operand { address: D::address(memory), ..operand };
        let product = MatrixProduct {
            out: at(product.out, &out),
            a: at(product.a, &a),
            b: at(product.b, &b),
            rows: Rows::Free,
            ..*product
        };
        Ok(Self { product, rows, _factors: [a, b], out, added_to, row_bytes: out_bytes })
    }

    /// Whether products of 1, [`PERIOD`] and many rows have the same rows in common.
    fn rows_agree(
        &mut self,
        driver: &D,
        queue: &mut D::Queue,
        multiply: &mut Multiply<'_, D>,
    ) -> Result<bool> {
        self.multiply(driver, queue, PERIOD, multiply)?;
        let mut expected = vec![0; PERIOD * self.row_bytes];
        driver.download(queue, &mut expected, &self.out, 0)?;

        self.multiply(driver, queue, 1, multiply)?;
        let mut found = vec![0; self.row_bytes];
        driver.download(queue, &mut found, &self.out, 0)?;
        if found != expected[..self.row_bytes] {
            return Ok(false);
        }

        self.multiply(driver, queue, self.rows, multiply)?;
        let mut found = vec![0; expected.len()];
        // The first rows, some in the middle and the last: where an algorithm would do with a rest of tiles what it does not
        // with the others.
        for first in [0, self.rows / 2, self.rows - PERIOD] {
            driver.download(queue, &mut found, &self.out, first * self.row_bytes)?;
            let rows = found.chunks_exact(self.row_bytes).enumerate();
            let known = |row: usize| &expected[(first + row) % PERIOD * self.row_bytes..];
            if rows.into_iter().any(|(row, found)| found != &known(row)[..self.row_bytes]) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Forms the product of the first `rows` rows; what was in their place before is gone.
    fn multiply(
        &mut self,
        driver: &D,
        queue: &mut D::Queue,
        rows: usize,
        multiply: &mut Multiply<'_, D>,
    ) -> Result<()> {
        let bytes = rows * self.row_bytes;
        match &self.added_to {
            None => driver.fill_zero(queue, &self.out, 0, bytes)?,
            Some(period) => {
                let period = (period, PERIOD * self.row_bytes);
                repeat(driver, queue, (&mut self.out, 0..bytes), period)?;
            }
        }
        multiply(queue, MatrixProduct { m: rows, ..self.product })
    }
}

/// Fills a range of memory with one period after the other, from the beginning of one.
fn repeat<D: Driver>(
    driver: &D,
    queue: &mut D::Queue,
    (to, range): (&mut D::Memory, Range<usize>),
    (period, period_bytes): (&D::Memory, usize),
) -> Result<()> {
    for offset in range.clone().step_by(period_bytes.max(1)) {
        let part = period_bytes.min(range.end - offset);
        driver.copy(queue, (to, offset), (period, 0), part)?;
    }
    Ok(())
}

/// [`PERIOD`] rows of the left factor. The second half of the terms of a sum cancels the first: what is left is what was rounded
/// away, of which every bit depends on the order. Of a sum that is rounded to bf16 nothing else would show.
fn left_rows(product: &MatrixProduct) -> Vec<u8> {
    let (stride, half) = (product.a.stride, product.k / 2);
    let mut numbers = random_numbers(1, PERIOD * stride, 3);
    for row in numbers.chunks_exact_mut(stride) {
        for term in 0..half {
            row[half + term] = row[term] ^ SIGN;
        }
        // The last of an odd number would have nothing to cancel it.
        row[2 * half..product.k].fill(0);
    }
    encoded(product.a.element, &numbers)
}

/// Some rows of the right factor as it lies in memory, of which the second half of the terms is as the first: whole columns where
/// it is transposed, else rows of the first half.
fn right_rows(product: &MatrixProduct) -> Vec<u8> {
    let MatrixProduct { b, n, k, .. } = *product;
    let half = k / 2;
    let most = if b.transposed { n } else { half };
    let rows = (REPEATED_ELEMENTS / b.stride.max(1)).clamp(1, most.max(1));
    let mut numbers = random_numbers(2, rows * b.stride, 3);
    if b.transposed {
        numbers.chunks_exact_mut(b.stride).for_each(|column| column.copy_within(..half, half));
    }
    encoded(b.element, &numbers)
}

/// The sign of an `f32`.
const SIGN: u32 = 1 << 31;

/// The bits of `f32`s of random signs and mantissas and of sixteen magnitudes up to `2^exponent`: products of bf16 numbers of a few
/// magnitudes are summed exactly in fp32, and then no order shows.
fn random_numbers(seed: u64, count: usize, exponent: i32) -> Vec<u32> {
    // splitmix64
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut next = || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = state;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    };
    let largest = (127 + exponent) as u32;
    let number = |random: u64| {
        let exponent = largest - (random >> 32) as u32 % 16;
        random as u32 & 0x807f_ffff | exponent << 23
    };
    (0..count).map(|_| number(next())).collect()
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::driver::Address;

    fn numbers(element: ElementKind, bytes: &[u8]) -> Vec<f32> {
        let number = |bytes: &[u8]| match element {
            ElementKind::F32 => f32::from_ne_bytes(bytes.try_into().unwrap()),
            ElementKind::Bf16 => {
                half::bf16::from_bits(u16::from_ne_bytes(bytes.try_into().unwrap())).to_f32()
            }
        };
        bytes.chunks(element.bytes()).map(number).collect()
    }

    #[test]
    fn all_sums_cancel_but_for_what_is_rounded_away() {
        let (n, k) = (40, 37);
        for element in [ElementKind::F32, ElementKind::Bf16] {
            for transposed in [false, true] {
                let address = Address::NULL;
                let operand = |stride, transposed| Operand {
                    address,
                    stride,
                    transposed,
                    element,
                    alignment: element.bytes(),
                };
                let product = MatrixProduct {
                    out: operand(n, false),
                    a: operand(k + 5, false),
                    b: operand(if transposed { k } else { n } + 3, transposed),
                    m: 1,
                    n,
                    k,
                    output: Output::Overwrite,
                    rows: Rows::Free,
                };
                let a = numbers(element, &left_rows(&product));
                let b = numbers(element, &right_rows(&product));
                let (mut chains, mut differing) = (0, 0);
                for (row, column) in (0..PERIOD).flat_map(|row| (0..n).map(move |c| (row, c))) {
                    let term = |term: usize| {
                        let stride = product.b.stride;
                        let place = match transposed {
                            true => column * stride + term,
                            // The second half of the memory begins anew.
                            false => term % (k / 2) * stride + column,
                        };
                        f64::from(a[row * product.a.stride + term]) * f64::from(b[place])
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
                    "{differing} of {chains}: {element:?} {transposed}"
                );
            }
        }
    }
}
