//! A digest of the library's choices.
//!
//! The algorithm of a product is chosen when the product is first needed, but peers compare their
//! kinds of device earlier, and a checkpoint names its kind. So when a device is opened, the
//! library is asked for the algorithms of typical products of models, which needs no work on the
//! device. The digest differs if the library chooses differently though its version is the same,
//! such as in another build, with another table of heuristics, or under an environment variable
//! that makes it emulate a precision.

use xxhash_rust::xxh3::Xxh3Default;

use super::Digest;
use crate::backend::Output;
use crate::error::{KernelError, Result};
use crate::gpu::driver::{Address, Batch, ElementKind, MatrixProduct, Operand, Rows};

/// The role in a model of a product that the library is asked about.
#[derive(Clone, Copy)]
enum Use {
    /// A layer's output.
    Forward,
    /// The same, added to the residual stream.
    Residual,
    /// The gradient of a layer's input.
    Gradient,
    /// The gradient of a weight from one grain, added to its lane.
    Weight,
    /// The gradients of a small weight from several grains, each by itself.
    SmallWeight,
}

/// Rows of the grains of weights.
const GRAIN_ROWS: usize = 4096;

/// Products like those of models, by n, k and use: wide, narrow, and over a vocabulary. For a weight, k is its rows.
const PRODUCTS: [(usize, usize, Use); 13] = [
    (4096, 1024, Use::Forward),
    (8192, 2048, Use::Forward),
    (96, 4096, Use::Forward),
    (50_304, 1024, Use::Forward),
    (1024, 4096, Use::Residual),
    (2048, 8192, Use::Residual),
    (1024, 4096, Use::Gradient),
    (2048, 8192, Use::Gradient),
    (4096, 1024, Use::Weight),
    (1024, 4096, Use::Weight),
    (768, 3072, Use::SmallWeight),
    (4096, 160, Use::SmallWeight),
    (128, 4096, Use::SmallWeight),
];

/// The digest of a library's choices: `choose` gives the numbers that define the algorithm of a product, `None` for those that an
/// older library does not know; and `None` as a whole where the product has no algorithm.
///
/// # Errors
/// An error of `choose`, except [`KernelError::Unsupported`]: a product without an algorithm is part of the digest.
pub fn of(
    mut choose: impl FnMut(&MatrixProduct) -> Result<Option<Vec<Option<u32>>>>,
) -> Result<Digest> {
    let mut hasher = Xxh3Default::new();
    let mut products = 0;
    for activation in [ElementKind::F32, ElementKind::Bf16] {
        for (n, k, used) in PRODUCTS {
            let chosen = match choose(&product(activation, n, k, used)) {
                Ok(chosen) => chosen,
                Err(KernelError::Unsupported { .. }) => None,
                Err(error) => return Err(error),
            };
            products += usize::from(chosen.is_some());
            hasher.update(&[u8::from(chosen.is_some())]);
            for value in chosen.unwrap_or_default() {
                hasher.update(&[u8::from(value.is_some())]);
                hasher.update(&value.unwrap_or(0).to_le_bytes());
            }
        }
    }
    Ok(Digest { value: hasher.digest(), products })
}

/// A product without addresses, whose operands are matrices by themselves.
fn product(activation: ElementKind, n: usize, k: usize, used: Use) -> MatrixProduct {
    let operand = |stride, transposed, element| Operand {
        address: Address::NULL,
        stride,
        transposed,
        element,
        alignment: 16,
    };
    let (sum, output, rows) = match used {
        Use::Forward | Use::Gradient => (activation, Output::Overwrite, Rows::Free),
        Use::Residual => (ElementKind::F32, Output::Add, Rows::Free),
        Use::Weight => (ElementKind::F32, Output::Add, Rows::Fixed),
        Use::SmallWeight => (ElementKind::F32, Output::Overwrite, Rows::Fixed),
    };
    // A weight is stored as `[outputs, inputs]`.
    let (m, terms, a, b) = match used {
        Use::Forward | Use::Residual => {
            (1, k, operand(k, false, activation), operand(k, true, activation))
        }
        Use::Gradient => (1, k, operand(k, false, activation), operand(n, false, activation)),
        Use::Weight | Use::SmallWeight => {
            (k, GRAIN_ROWS, operand(k, true, activation), operand(n, false, activation))
        }
    };
    let batch = match used {
        Use::SmallWeight => {
            Some(Batch { entries: 1, out: k * n, a: GRAIN_ROWS * k, b: GRAIN_ROWS * n })
        }
        _ => None,
    };
    let out = operand(n, false, sum);
    MatrixProduct { out, a, b, m, n, k: terms, output, base: out.address, bias: None, rows, batch }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_library_is_asked_for_are_products() {
        for (n, k, used) in PRODUCTS {
            let MatrixProduct { out, a, b, m, n, k, .. } = product(ElementKind::Bf16, n, k, used);
            for (operand, rows, columns) in [(out, m, n), (a, m, k), (b, k, n)] {
                let run = if operand.transposed { rows } else { columns };
                assert_eq!(operand.stride, run, "m = {m}, n = {n}, k = {k}");
            }
        }
    }
}
