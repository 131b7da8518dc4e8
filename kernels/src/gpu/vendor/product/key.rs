//! What an algorithm of a matrix library is pinned to, and the sizes that it is chosen for.

use crate::backend::Output;
use crate::gpu::algorithm::CANONICAL_TERMS;
use crate::gpu::driver::{Address, Bias, ElementKind, MatrixProduct, Operand, Rows};

/// The rows that an algorithm is chosen for where their number may change: enough to fill a GPU.
pub const CANONICAL_ROWS: usize = 4096;

/// Numbers of rows that an algorithm must accept to be chosen, where the library can say whether it does.
pub const PROBED_ROWS: [usize; 3] = [1, 129, 1 << 17];

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
        }
    }

    /// What an algorithm is pinned to.
    pub fn pinned(product: &MatrixProduct) -> Self {
        let key = Self::of(product, pinned_rows(product));
        Self { bias: key.bias.map(|(_, element)| (Address::NULL, element)), ..key }
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
    MatrixProduct { m: pinned_rows(product), k, ..*product }
}
