//! A number for what the library chooses.
//!
//! The algorithm of a product is chosen when the product is first needed, but peers compare their kinds of device before, and a
//! checkpoint names its kind. So the library is asked, when a device is opened, for products like those of models. That takes
//! no work of the device. What would make a library of the same version choose differently, such as another build, another
//! table of heuristics or a variable of the environment that makes it emulate a precision, shows there.

use cudarc::cublaslt::sys::cublasLtMatmulAlgoConfigAttributes_t as Attribute;
use xxhash_rust::xxh3::Xxh3Default;

use super::MatrixLibrary;
use super::plan::attribute;
use crate::backend::Output;
use crate::error::{KernelError, Result};
use crate::gpu::driver::{Address, ElementKind, MatrixProduct, Operand, Rows};

/// What an algorithm is made of, and the bytes of each. The library's opaque copy of it would serve too if it were said that
/// all of its bytes mean something.
const ATTRIBUTES: [(Attribute, usize); 9] = [
    (Attribute::CUBLASLT_ALGO_CONFIG_ID, 4),
    (Attribute::CUBLASLT_ALGO_CONFIG_TILE_ID, 4),
    (Attribute::CUBLASLT_ALGO_CONFIG_SPLITK_NUM, 4),
    (Attribute::CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, 4),
    (Attribute::CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING, 4),
    (Attribute::CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION, 4),
    (Attribute::CUBLASLT_ALGO_CONFIG_STAGES_ID, 4),
    (Attribute::CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID, 2),
    (Attribute::CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID, 2),
];

/// What a product that the library is asked for forms.
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
}

/// Rows of the grain of [`Use::Weight`].
const GRAIN_ROWS: usize = 4096;

/// Products like those of models, by n, k and use: wide, narrow, and over a vocabulary. For a weight, k is its rows.
const PRODUCTS: [(usize, usize, Use); 10] = [
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
];

/// The digest of what `library` chooses.
pub(super) fn of(library: &MatrixLibrary) -> Result<u64> {
    let mut hasher = Xxh3Default::new();
    for activation in [ElementKind::F32, ElementKind::Bf16] {
        for (n, k, used) in PRODUCTS {
            let chosen = match library.accepted(&product(activation, n, k, used)) {
                Ok(mut accepted) => accepted.next(),
                // That a product has no algorithm is an answer too.
                Err(KernelError::Unsupported { .. }) => None,
                Err(error) => return Err(error),
            };
            hasher.update(&[u8::from(chosen.is_some())]);
            if let Some(algorithm) = chosen {
                for (name, bytes) in ATTRIBUTES {
                    // An older library does not know every one.
                    let value = attribute(&algorithm, name, bytes);
                    hasher.update(&[u8::from(value.is_some())]);
                    hasher.update(&value.unwrap_or(0).to_le_bytes());
                }
            }
        }
    }
    Ok(hasher.digest())
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
    };
    // A weight is stored as `[outputs, inputs]`.
    let (m, terms, a, b) = match used {
        Use::Forward | Use::Residual => {
            (1, k, operand(k, false, activation), operand(k, true, activation))
        }
        Use::Gradient => (1, k, operand(k, false, activation), operand(n, false, activation)),
        Use::Weight => (k, GRAIN_ROWS, operand(k, true, activation), operand(n, false, activation)),
    };
    MatrixProduct { out: operand(n, false, sum), a, b, m, n, k: terms, output, rows }
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
