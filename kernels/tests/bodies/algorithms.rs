//! Algorithms of a matrix library that treat rows differently are not pinned.

use tidemill_kernels::KernelError;
use tidemill_kernels::backend::Output;
use tidemill_kernels::gpu::{
    Address, Driver, ElementKind, Gpu, MatrixProduct, Operand, Precision, Rows,
    first_row_independent,
};

use crate::bodies::arm::Arm;

const COLUMNS: usize = 16;
const TERMS: usize = 32;

/// What a candidate does; where it is none, the library's own product is formed.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Candidate {
    /// The sums of a single row are formed in two parts.
    SplitsOneRow,
    /// The sums of all rows are formed in two parts where there are many.
    SplitsManyRows,
    /// The sums of the last rows are formed in two parts where there are many: as algorithms do that share out the rest of the
    /// tiles.
    SplitsLastRows,
    /// Writes nothing where there are many rows.
    ForgetsManyRows,
    /// Sums of all rows, always, are formed in two parts: of another order, and none the less the same for all.
    SplitsAll,
    /// The library's.
    Whole,
}

fn multiply<D: Driver>(
    driver: &D,
    queue: &mut D::Queue,
    candidate: Candidate,
    product: MatrixProduct,
) -> Result<(), KernelError> {
    // SAFETY: the operands are given by the choice, or parts of what it gives, each in memory of its own.
    let mut form = |product| unsafe { driver.matmul(queue, product) };
    let MatrixProduct { out, a, b, m, .. } = product;
    let element = |operand: Operand, row: usize, column: usize| {
        let elements = if operand.transposed {
            column * operand.stride + row
        } else {
            row * operand.stride + column
        };
        Operand { address: operand.address.offset(elements * operand.element.bytes()), ..operand }
    };
    let mut in_two = |first: usize, rows: usize| {
        let (out, a) = (element(out, first, 0), element(a, first, 0));
        let half = TERMS / 2;
        let fixed = Rows::Fixed;
        form(MatrixProduct { out, a, m: rows, k: half, rows: fixed, ..product })?;
        let (a, b) = (element(a, 0, half), element(b, half, 0));
        let output = Output::Add;
        form(MatrixProduct { out, a, b, m: rows, k: TERMS - half, output, rows: fixed, ..product })
    };
    let is_many = m > 1000;
    match candidate {
        Candidate::SplitsOneRow if m == 1 => in_two(0, 1),
        Candidate::SplitsManyRows if is_many => in_two(0, m),
        Candidate::ForgetsManyRows if is_many => Ok(()),
        Candidate::SplitsAll => in_two(0, m),
        Candidate::SplitsLastRows if is_many => {
            let last = 16;
            in_two(m - last, last)?;
            form(MatrixProduct { m: m - last, ..product })
        }
        _ => form(product),
    }
}

/// The first candidate whose rows are all alike is taken, wherever it stands; and where there is none, none.
///
/// Seen failing: with bf16 factors of four magnitudes, whose sums are exact in any order.
pub fn row_dependent_ones_are_passed_over<D: Driver, P: Precision>(arm: &Arm<Gpu<D, P>>) {
    use Candidate::*;
    let driver = arm.backend.driver();
    let mut queue = driver.queue().unwrap();
    let operand = |stride, transposed, element| Operand {
        address: Address::NULL,
        stride,
        transposed,
        element,
        alignment: 16,
    };
    let (f32, activation) = (ElementKind::F32, P::ELEMENT);
    for (out, transposed, output) in [
        (activation, false, Output::Overwrite),
        (activation, true, Output::Overwrite),
        (f32, true, Output::Add),
    ] {
        let product = MatrixProduct {
            out: operand(COLUMNS + 8, false, out),
            a: operand(2 * TERMS, false, P::ELEMENT),
            b: operand(if transposed { TERMS } else { COLUMNS }, transposed, P::ELEMENT),
            m: 7,
            n: COLUMNS,
            k: TERMS,
            output,
            rows: Rows::Free,
        };
        let mut choose = |candidates: &[Candidate]| {
            let candidates = candidates.iter().copied();
            first_row_independent(driver, &mut queue, &product, candidates, |queue, way, tried| {
                multiply(driver, queue, *way, tried)
            })
            .unwrap()
        };
        let wrong = [SplitsOneRow, SplitsManyRows, SplitsLastRows, ForgetsManyRows];
        for candidate in wrong {
            assert_eq!(
                choose(&[candidate, Whole, SplitsAll]),
                Some(Whole),
                "{candidate:?} {output:?}"
            );
        }
        assert_eq!(choose(&wrong), None);
        assert_eq!(choose(&[SplitsAll, Whole]), Some(SplitsAll), "the order is not judged");
        assert_eq!(choose(&[]), None);
    }
}
