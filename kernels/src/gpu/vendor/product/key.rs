//! The key of an algorithm's choice, and the sizes that it is chosen for.

use crate::backend::Output;
use crate::gpu::algorithm::CANONICAL_TERMS;
use crate::gpu::driver::{Address, Batch, Bias, ElementKind, MatrixProduct, Operand, Rows};

/// The rows that an algorithm is chosen for where their number may change: enough to fill a GPU.
pub const CANONICAL_ROWS: usize = 4096;

/// Numbers of rows that an algorithm must accept to be chosen, where the library can say whether it does.
pub const PROBED_ROWS: [usize; 3] = [1, 129, 1 << 17];

/// The number of entries of a batch that an algorithm is chosen for: usual for the gradient of a weight, from a few grains in a few
/// parts.
pub const CANONICAL_ENTRIES: usize = 4;

/// Numbers of entries that an algorithm must accept to be chosen: all that there can be, as it is kept for any.
#[cfg(feature = "cuda")]
pub const PROBED_ENTRIES: std::ops::RangeInclusive<usize> =
    1..=crate::gpu::weight_gradient::MOST_ENTRIES;

/// The matrix that a product is added to. Where that is the output, an algorithm may add in another order: cuBLASLt 13.1 then adds
/// a bias before the matrix.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Base {
    Nothing,
    Output,
    Another,
}

/// The key of pinned algorithms and of plans: a product without the addresses of its matrices.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Key {
    m: usize,
    n: usize,
    k: usize,
    operands: [(usize, bool, ElementKind, usize); 3],
    base: Base,
    /// The bias with its address, which a plan contains.
    bias: Option<(Address, ElementKind)>,
    rows: Rows,
    batch: Option<Batch>,
}

impl Key {
    pub fn of(product: &MatrixProduct, m: usize) -> Self {
        let shape = |operand: &Operand| {
            (operand.stride, operand.transposed, operand.element, operand.alignment)
        };
        Self {
            m,
            n: product.n,
            k: product.k,
            operands: [shape(&product.out), shape(&product.a), shape(&product.b)],
            base: match product.output {
                Output::Overwrite => Base::Nothing,
                Output::Add if product.base == product.out.address => Base::Output,
                Output::Add => Base::Another,
            },
            bias: product.bias.map(|Bias { address, element }| (address, element)),
            rows: product.rows,
            batch: product.batch,
        }
    }

    /// The key of a pinned algorithm: without the rows where they are free, the bias's address and the sizes of the batch.
    pub fn pinned(product: &MatrixProduct) -> Self {
        let key = Self::of(product, pinned_rows(product));
        Self {
            bias: key.bias.map(|(_, element)| (Address::NULL, element)),
            batch: key.batch.map(|_| Batch { entries: CANONICAL_ENTRIES, out: 0, a: 0, b: 0 }),
            ..key
        }
    }
}

/// The rows that a product's algorithm is chosen for.
pub fn pinned_rows(product: &MatrixProduct) -> usize {
    match product.rows {
        Rows::Free => CANONICAL_ROWS,
        Rows::Fixed => product.m,
    }
}

/// The product that a library is asked for algorithms for.
pub fn canonical(product: &MatrixProduct) -> MatrixProduct {
    let k = match product.rows {
        Rows::Free => product.k,
        Rows::Fixed => product.k.min(CANONICAL_TERMS),
    };
    let (m, n) = (pinned_rows(product), product.n);
    // The distance between entries changes from batch to batch, so the library is asked for entries
    // side by side.
    let apart = |operand: &Operand, rows: usize, columns: usize| {
        operand.stride.saturating_mul(if operand.transposed { columns } else { rows })
    };
    let batch = product.batch.map(|_| Batch {
        entries: CANONICAL_ENTRIES,
        out: apart(&product.out, m, n),
        a: apart(&product.a, m, k),
        b: apart(&product.b, k, n),
    });
    MatrixProduct { m, k, batch, ..*product }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_asked_for_a_batch_follows_from_its_pin() {
        let operand = |stride, transposed, element| Operand {
            address: Address::NULL,
            stride,
            transposed,
            element,
            alignment: 256,
        };
        let of = |batch| MatrixProduct {
            out: operand(160, false, ElementKind::F32),
            base: Address::NULL,
            a: operand(8192, true, ElementKind::Bf16),
            b: operand(160, false, ElementKind::Bf16),
            m: 4096,
            n: 160,
            k: 2048,
            output: Output::Overwrite,
            bias: None,
            rows: Rows::Fixed,
            batch: Some(batch),
        };
        let even = of(Batch { entries: 7, out: 4096 * 160, a: 2048 * 8192, b: 2048 * 160 });
        let short = of(Batch { entries: 2, out: 3 * 4096 * 160, a: 5000 * 8192, b: 5000 * 160 });
        assert!(Key::pinned(&even) == Key::pinned(&short));
        let asked = |product| canonical(&product).batch.unwrap();
        assert_eq!(asked(even), asked(short));
        let terms = CANONICAL_TERMS.min(2048);
        let expected =
            Batch { entries: CANONICAL_ENTRIES, out: 4096 * 160, a: terms * 8192, b: terms * 160 };
        assert_eq!(asked(even), expected);
    }
}
