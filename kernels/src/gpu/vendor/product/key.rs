//! What an algorithm of a matrix library is pinned to, and the sizes that it is chosen for.

use crate::backend::Output;
use crate::gpu::algorithm::CANONICAL_TERMS;
use crate::gpu::driver::{Address, Batch, Bias, ElementKind, MatrixProduct, Operand, Rows};
use crate::gpu::weight_gradient::MOST_ENTRIES;

/// The rows that an algorithm is chosen for where their number may change: enough to fill a GPU.
pub const CANONICAL_ROWS: usize = 4096;

/// Numbers of rows that an algorithm must accept to be chosen, where the library can say whether it does.
pub const PROBED_ROWS: [usize; 3] = [1, 129, 1 << 17];

/// The entries of a batch that an algorithm is chosen for: what is usual for the gradient of a weight, of a few grains in a few parts.
pub const CANONICAL_ENTRIES: usize = 4;

/// Numbers of entries that an algorithm must accept to be chosen: one, what it is chosen for, and the most.
pub const PROBED_ENTRIES: [usize; 3] = [1, CANONICAL_ENTRIES, MOST_ENTRIES];

/// What an algorithm is pinned to, and what a plan is made for: a product without the addresses of matrices.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Key {
    m: usize,
    n: usize,
    k: usize,
    operands: [(usize, bool, ElementKind, usize); 3],
    output: bool,
    /// With its address: a plan names it.
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
            output: product.output == Output::Add,
            bias: product.bias.map(|Bias { address, element }| (address, element)),
            rows: product.rows,
            batch: product.batch,
        }
    }

    /// What an algorithm is pinned to: that the product is of a batch, but not of which.
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
    let batch = product.batch.map(|batch| Batch { entries: CANONICAL_ENTRIES, ..batch });
    MatrixProduct { m: pinned_rows(product), k, batch, ..*product }
}
