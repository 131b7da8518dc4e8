//! The products that an algorithm is tried on.

use super::numbers::{
    Layout, PERIOD, Segment, Side, decoded, encoded_numbers, small_before, whole_before, whole_bias,
};
use super::{CANONICAL_TERMS, Flaw};
use crate::backend::Output;
use crate::error::{KernelError, Result};
use crate::gpu::driver::{Batch, Bias, Driver, ElementKind, MatrixProduct, Operand, Rows};

/// Rows of the largest product of free rows, enough to fill a GPU.
const MOST_ROWS: usize = 4096;

/// Bytes that the left factor and the output may take where rows are free; the right factor, as large as a weight, comes on top.
const MOST_BYTES: usize = 256 << 20;

/// Bytes that the output may take where rows are fixed: it is the gradient of a weight, and is formed while a model's activations
/// are in memory.
const MOST_FIXED_BYTES: usize = 64 << 20;

/// Entries of the batches that are formed: one by itself, few, and enough to fill a GPU with weights that are narrow.
const ENTRIES: [usize; 4] = [1, 2, 3, 8];

/// The terms at least of the sums of a batch, however far its operands reach.
const LEAST_TERMS: usize = 64;

/// The number of rows and of columns whose sums are compared with the exact ones.
const COMPARED: [usize; 2] = [16, 32];

/// Memory with an operand at a place in it.
struct Placed<D: Driver> {
    memory: D::Memory,
    /// Where the operand begins: at an address that is a multiple of no more than the operand's are. So an algorithm that needs more
    /// is refused here.
    start: usize,
}

impl<D: Driver> Placed<D> {
    fn new(driver: &D, queue: &mut D::Queue, operand: &Operand, bytes: usize) -> Result<Self> {
        let start = operand.alignment;
        let memory = driver.allocate(queue, bytes.saturating_add(start))?;
        Ok(Self { memory, start })
    }

    fn of(&self, operand: Operand) -> Operand {
        Operand { address: D::address(&self.memory).offset(self.start), ..operand }
    }

    /// Fills the runs of each of `entries` operands of `layout`, from the first of each segment on, with its numbers again and again.
    fn fill(
        &self,
        driver: &D,
        queue: &mut D::Queue,
        layout: &Layout,
        entries: usize,
        segments: &[Segment],
    ) -> Result<()> {
        for (runs, period) in segments {
            let source = driver.allocate(queue, period.len())?;
            driver.upload(queue, &source, 0, period)?;
            for entry in 0..entries {
                let range = [runs.start, runs.end]
                    .map(|run| entry * layout.bytes() + run * layout.run_bytes());
                self.repeat(driver, queue, range, (&source, period.len()))?;
            }
        }
        Ok(())
    }

    /// Fills a range with one period after the other, from the beginning of one.
    fn repeat(
        &self,
        driver: &D,
        queue: &mut D::Queue,
        [from, to]: [usize; 2],
        (period, period_bytes): (&D::Memory, usize),
    ) -> Result<()> {
        for offset in (from..to).step_by(period_bytes.max(1)) {
            let part = period_bytes.min(to - offset);
            driver.copy(queue, (&self.memory, self.start + offset), (period, 0), part)?;
        }
        Ok(())
    }
}

/// The kind of numbers in the operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Numbers {
    Cancelling,
    Whole,
}

/// Operands of one product, in rows that repeat; of a batch, of several products that are the same.
pub(super) struct Trial<D: Driver> {
    /// With its operands in memory of the trial.
    product: MatrixProduct,
    /// Rows of the largest product.
    rows: usize,
    /// Entries of the largest batch; 1 of a product by itself.
    entries: usize,
    layouts: [Layout; 2],
    factors: [Placed<D>; 2],
    out: Placed<D>,
    /// The matrix that a product is added to, where that is not its output.
    base: Option<Placed<D>>,
    /// The contents of the matrix that a product is added to, before the addition: [`PERIOD`] rows.
    before: Option<D::Memory>,
    /// The bias of a product that has one, on the device and on the host: the same for both kinds of numbers.
    bias: Option<(D::Memory, Vec<f32>)>,
    /// From row to row of `out`.
    row_bytes: usize,
    held: Option<Numbers>,
}

/// Rows that were read, after the number of the first.
type Window = (usize, Vec<u8>);

/// Forms a product by the algorithm at hand.
type Multiply<'a, D> = dyn FnMut(&mut <D as Driver>::Queue, MatrixProduct) -> Result<()> + 'a;

impl<D: Driver> Trial<D> {
    pub(super) fn new(driver: &D, queue: &mut D::Queue, product: &MatrixProduct) -> Result<Self> {
        let bytes_of = |operand: Operand| operand.stride.saturating_mul(operand.element.bytes());
        let [a_bytes, b_bytes, row_bytes] = [product.a, product.b, product.out].map(bytes_of);
        let entries = match product.batch {
            None => 1,
            Some(_) => {
                let fitting = MOST_FIXED_BYTES / product.m.saturating_mul(row_bytes).max(1);
                fitting.clamp(1, ENTRIES[ENTRIES.len() - 1])
            }
        };
        let (rows, k) = match product.rows {
            // At least two periods, so that equal rows lie at different places.
            Rows::Free => {
                let fitting = MOST_BYTES / a_bytes.saturating_add(row_bytes).max(1);
                (fitting.clamp(2 * PERIOD, MOST_ROWS), product.k)
            }
            Rows::Fixed => {
                let fitting = MOST_FIXED_BYTES / row_bytes.max(1);
                let term_bytes = a_bytes.saturating_add(b_bytes).saturating_mul(entries).max(1);
                let terms = match product.batch {
                    None => CANONICAL_TERMS,
                    Some(_) => (MOST_FIXED_BYTES / term_bytes).clamp(LEAST_TERMS, CANONICAL_TERMS),
                };
                (product.m.min(fitting.max(PERIOD)), product.k.min(terms))
            }
        };
        let shorter = MatrixProduct { k, ..*product };
        let layouts = [Side::Left, Side::Right].map(|side| Layout::of(side, &shorter, rows));
        let mut place = |operand: &Operand, bytes: usize| {
            Placed::new(driver, queue, operand, bytes.saturating_mul(entries))
        };
        let left = place(&product.a, layouts[0].bytes())?;
        let right = place(&product.b, layouts[1].bytes())?;
        let out_bytes = rows.saturating_mul(row_bytes);
        let out = place(&product.out, out_bytes)?;
        let is_onto = product.output == Output::Add && product.base != product.out.address;
        let base = is_onto.then(|| place(&product.out, out_bytes)).transpose()?;
        let before = match product.output {
            Output::Overwrite => None,
            Output::Add => Some(driver.allocate(queue, PERIOD * row_bytes)?),
        };
        let bias = match product.bias {
            Some(Bias { element, .. }) => {
                let bias = whole_bias(product.n);
                let bytes = encoded_numbers(element, &bias);
                let memory = driver.allocate(queue, bytes.len())?;
                driver.upload(queue, &memory, 0, &bytes)?;
                Some((memory, bias))
            }
            None => None,
        };
        let product = MatrixProduct {
            bias: product
                .bias
                .zip(bias.as_ref())
                .map(|(given, (memory, _))| Bias { address: D::address(memory), ..given }),
            out: out.of(product.out),
            base: base.as_ref().unwrap_or(&out).of(product.out).address,
            a: left.of(product.a),
            b: right.of(product.b),
            batch: product.batch.map(|_| Batch {
                entries: 1,
                out: rows * product.out.stride,
                a: layouts[0].elements(),
                b: layouts[1].elements(),
            }),
            ..shorter
        };
        let factors = [left, right];
        let held = None;
        Ok(Self {
            product,
            rows,
            entries,
            layouts,
            factors,
            out,
            base,
            before,
            bias,
            row_bytes,
            held,
        })
    }

    /// The flaw of the algorithm by which `multiply` forms a product; `None` where it has none.
    ///
    /// # Errors
    /// An error of the driver, and one of `multiply`, except that the library refuses the product, which is a flaw.
    pub(super) fn flaw(
        &mut self,
        driver: &D,
        queue: &mut D::Queue,
        multiply: &mut Multiply<'_, D>,
    ) -> Result<Option<Flaw>> {
        match self.try_all(driver, queue, multiply) {
            Ok(flaw) => Ok(flaw),
            Err(KernelError::Unsupported { answer, .. }) => Ok(Some(Flaw::Refused(answer))),
            Err(error) => Err(error),
        }
    }

    fn try_all(
        &mut self,
        driver: &D,
        queue: &mut D::Queue,
        multiply: &mut Multiply<'_, D>,
    ) -> Result<Option<Flaw>> {
        self.hold(driver, queue, Numbers::Cancelling)?;
        let flaw = match self.product.rows {
            Rows::Free => self.try_free_rows(driver, queue, multiply)?,
            Rows::Fixed => {
                let rows = self.rows;
                let first = self.windows(driver, queue, rows, multiply)?;
                let again = self.windows(driver, queue, rows, multiply)?;
                if first == again {
                    self.try_entries(driver, queue, &first, multiply)?
                } else {
                    Some(Flaw::Unrepeatable)
                }
            }
        };
        if flaw.is_some() {
            return Ok(flaw);
        }
        self.hold(driver, queue, Numbers::Whole)?;
        let is_rounded_once = self.try_rounding(driver, queue, multiply)?;
        Ok((!is_rounded_once).then_some(Flaw::RoundsOften))
    }

    /// Forms products of 1, [`PERIOD`] and many rows, which must have the same rows in common, and forms them again.
    fn try_free_rows(
        &self,
        driver: &D,
        queue: &mut D::Queue,
        multiply: &mut Multiply<'_, D>,
    ) -> Result<Option<Flaw>> {
        let expected = self.windows(driver, queue, PERIOD, multiply)?;
        if self.windows(driver, queue, PERIOD, multiply)? != expected {
            return Ok(Some(Flaw::Unrepeatable));
        }
        let [(_, expected)] = &expected[..] else { return Ok(Some(Flaw::DependsOnRows)) };
        let known = |row: usize| &expected[row % PERIOD * self.row_bytes..][..self.row_bytes];
        let one = self.windows(driver, queue, 1, multiply)?;
        if one.iter().any(|(_, found)| found != known(0)) {
            return Ok(Some(Flaw::DependsOnRows));
        }
        let rows = self.rows;
        let many = self.windows(driver, queue, rows, multiply)?;
        for (first, found) in &many {
            let rows = found.chunks_exact(self.row_bytes).enumerate();
            if rows.into_iter().any(|(row, found)| found != known(first + row)) {
                return Ok(Some(Flaw::DependsOnRows));
            }
        }
        let again = self.windows(driver, queue, rows, multiply)?;
        Ok((again != many).then_some(Flaw::Unrepeatable))
    }

    /// Forms batches of several numbers of entries, of which each must be what an entry by itself is, and the largest again.
    fn try_entries(
        &self,
        driver: &D,
        queue: &mut D::Queue,
        alone: &[Window],
        multiply: &mut Multiply<'_, D>,
    ) -> Result<Option<Flaw>> {
        let several = ENTRIES.into_iter().filter(|&entries| 1 < entries && entries < self.entries);
        let largest = (self.entries > 1).then_some(self.entries);
        for entries in several.chain(largest).chain(largest) {
            self.multiply(driver, queue, self.rows, entries, multiply)?;
            for entry in 0..entries {
                if self.read_windows(driver, queue, self.rows, entry)? != alone {
                    return Ok(Some(Flaw::DependsOnEntries));
                }
            }
        }
        Ok(None)
    }

    /// Whether sums of whole numbers equal the exact ones, rounded once. They are exact before that rounding, so a difference can
    /// only be a further rounding.
    ///
    /// Where a product is added to bf16, a library may round it first: see [`MatrixProduct`].
    fn try_rounding(
        &self,
        driver: &D,
        queue: &mut D::Queue,
        multiply: &mut Multiply<'_, D>,
    ) -> Result<bool> {
        let MatrixProduct { out, n, k, .. } = self.product;
        let rows = self.rows.min(PERIOD);
        self.multiply(driver, queue, rows, 1, multiply)?;
        let [left, right] = self.layouts.map(|layout| layout.whole());
        let before = self.before.is_some().then(|| whole_before(&out));
        let mut found = vec![0; self.row_bytes];
        for row in spread(rows, COMPARED[0]) {
            let start = self.out.start + row * self.row_bytes;
            driver.download(queue, &mut found, &self.out.memory, start)?;
            for column in spread(n, COMPARED[1]) {
                let term = |term| {
                    let [a, b] =
                        [self.layouts[0].place(row, term), self.layouts[1].place(column, term)];
                    f64::from(left[a]) * f64::from(right[b])
                };
                let sum: f64 = (0..k).map(term).sum();
                let before =
                    before.as_ref().map(|before| f64::from(before[row * out.stride + column]));
                let found = decoded(out.element, &found, column);
                let bias = self.bias.as_ref().map(|(_, bias)| f64::from(bias[column]));
                let is_right = match bias {
                    None => is_rounded_once(out.element, found, sum, before),
                    Some(bias) => found == biased(out.element, sum + before.unwrap_or(0.0), bias),
                };
                if !is_right {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    /// Forms a product of `rows` rows, and reads its windows.
    fn windows(
        &self,
        driver: &D,
        queue: &mut D::Queue,
        rows: usize,
        multiply: &mut Multiply<'_, D>,
    ) -> Result<Vec<Window>> {
        self.multiply(driver, queue, rows, 1, multiply)?;
        self.read_windows(driver, queue, rows, 0)
    }

    /// Reads the first rows of an entry of `rows` rows, some in the middle and the last: the last tiles are incomplete, and an algorithm
    /// may compute them in another way than whole tiles.
    fn read_windows(
        &self,
        driver: &D,
        queue: &mut D::Queue,
        rows: usize,
        entry: usize,
    ) -> Result<Vec<Window>> {
        let (first, count) = if rows > PERIOD {
            (vec![0, (rows / 2).min(rows - PERIOD), rows - PERIOD], PERIOD)
        } else {
            (vec![0], rows)
        };
        let mut read = |first| -> Result<Window> {
            let mut found = vec![0; count * self.row_bytes];
            let start = self.out.start + (entry * self.rows + first) * self.row_bytes;
            driver.download(queue, &mut found, &self.out.memory, start)?;
            Ok((first, found))
        };
        first.into_iter().map(&mut read).collect()
    }

    /// Forms the product of the first `rows` rows, for as many entries; replaces the rows of an earlier product.
    fn multiply(
        &self,
        driver: &D,
        queue: &mut D::Queue,
        rows: usize,
        entries: usize,
        multiply: &mut Multiply<'_, D>,
    ) -> Result<()> {
        for entry in 0..entries {
            let (start, bytes) = (entry * self.rows * self.row_bytes, rows * self.row_bytes);
            match &self.before {
                None => {
                    driver.fill_zero(queue, &self.out.memory, self.out.start + start, bytes)?;
                }
                Some(period) => {
                    let period = (period, PERIOD * self.row_bytes);
                    let base = self.base.as_ref().unwrap_or(&self.out);
                    base.repeat(driver, queue, [start, start + bytes], period)?;
                }
            }
        }
        let batch = self.product.batch.map(|batch| Batch { entries, ..batch });
        multiply(queue, MatrixProduct { m: rows, batch, ..self.product })
    }

    /// Gives the operands their numbers.
    fn hold(&mut self, driver: &D, queue: &mut D::Queue, numbers: Numbers) -> Result<()> {
        if self.held == Some(numbers) {
            return Ok(());
        }
        for (layout, factor) in self.layouts.iter().zip(&self.factors) {
            let segments = match numbers {
                Numbers::Cancelling => layout.cancelling(),
                Numbers::Whole => layout.segments(&layout.whole()),
            };
            factor.fill(driver, queue, layout, self.entries, &segments)?;
        }
        if let Some(memory) = &self.before {
            let out = &self.product.out;
            let period = match numbers {
                Numbers::Cancelling => small_before(out),
                Numbers::Whole => encoded_numbers(out.element, &whole_before(out)),
            };
            driver.upload(queue, memory, 0, &period)?;
        }
        self.held = Some(numbers);
        Ok(())
    }
}

/// At most `count` of the numbers below `all`, the first and the last among them.
fn spread(all: usize, count: usize) -> impl Iterator<Item = usize> {
    let steps = count.min(all);
    (0..steps).map(move |step| step * (all - 1) / (steps - 1).max(1))
}

/// Whether `found` is `sum`, plus `before` if there is one, rounded once. All are exact in `f64`.
fn is_rounded_once(element: ElementKind, found: f32, sum: f64, before: Option<f64>) -> bool {
    let rounded = |exact: f64| match element {
        ElementKind::F32 => exact as f32,
        ElementKind::Bf16 => half::bf16::from_f64(exact).to_f32(),
    };
    let expected = rounded(sum + before.unwrap_or(0.0));
    let product_first = before.map(|before| rounded(f64::from(rounded(sum)) + before));
    found == expected || element == ElementKind::Bf16 && product_first == Some(found)
}

/// `sum`, to which `bias` is added last: once it is rounded to fp32, or before it is rounded to bf16. All are exact in `f64`.
fn biased(element: ElementKind, sum: f64, bias: f64) -> f32 {
    match element {
        ElementKind::F32 => sum as f32 + bias as f32,
        ElementKind::Bf16 => half::bf16::from_f64(sum + bias).to_f32(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 2^25 + 6 lies as far from the number of fp32 below as from that above, and so does 257 of bf16.
    #[test]
    fn a_bias_is_added_last() {
        let (f32, bf16) = (ElementKind::F32, ElementKind::Bf16);
        let large = f64::from(1 << 25);
        assert_eq!(biased(f32, large + 5.0, 1.0), (1 << 25) as f32 + 4.0);
        assert_eq!(biased(bf16, 257.0, 1.0), 258.0);
    }

    #[test]
    fn what_is_compared_is_spread_over_all() {
        let spread = |all, count| spread(all, count).collect::<Vec<_>>();
        assert_eq!(spread(1, 4), [0]);
        assert_eq!(spread(3, 4), [0, 1, 2]);
        assert_eq!(spread(100, 4), [0, 33, 66, 99]);
    }

    /// 257 lies between two numbers of bf16, and 2^25 + 5 between two of fp32.
    #[test]
    fn one_rounding_is_told_from_two() {
        let (f32, bf16) = (ElementKind::F32, ElementKind::Bf16);
        assert!(is_rounded_once(bf16, 256.0, 257.0, None));
        assert!(!is_rounded_once(bf16, 258.0, 257.0, None));
        assert!(is_rounded_once(bf16, 260.0, 259.0, None));
        let large = f64::from(1 << 25);
        assert!(is_rounded_once(f32, (1 << 25) as f32 + 4.0, 5.0, Some(large)));
        assert!(!is_rounded_once(f32, (1 << 25) as f32 + 8.0, 5.0, Some(large)));
        // For 255 + 259 both 512 and 516 are accepted: the product may be rounded to 260 first.
        for (found, is_accepted) in [(512.0, true), (516.0, true), (508.0, false), (520.0, false)] {
            assert_eq!(is_rounded_once(bf16, found, 259.0, Some(255.0)), is_accepted, "{found}");
        }
        assert!(!is_rounded_once(f32, 516.0, 259.0, Some(255.0)));
    }
}
