//! Algorithms of a matrix library that break a promise about products are rejected.
//!
//! The library is a fake: each candidate computes products by the driver's own, with a deviation.
//! The test of each rule has a candidate that breaks only this rule.

use std::cell::RefCell;
use std::collections::HashMap;

use tidemill_kernels::KernelError;
use tidemill_kernels::backend::Output;
use tidemill_kernels::gpu::{
    Address, Batch, Candidate, Driver, ElementKind, Gpu, MatrixProduct, Operand, Precision, Rows,
    Terms, choose_algorithm,
};

use crate::bodies::arm::Arm;

const COLUMNS: usize = 16;
const TERMS: usize = 32;
const WORKSPACE_BYTES: usize = 1024;

/// The deviation of a candidate; without one, it computes the library's own product.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    /// The sums of a single row are formed in two parts.
    SplitsOneRow,
    /// If there are many rows, the sums of all rows are formed in two parts.
    SplitsManyRows,
    /// The sums of the last rows are formed in two parts if there are many rows, as in algorithms
    /// that divide the remainder of the tiles.
    SplitsLastRows,
    /// The sums of the last of several entries of a batch are formed in two parts.
    SplitsLastEntry,
    /// Writes nothing if there are many rows.
    ForgetsManyRows,
    /// The sums of all rows are always formed in two parts, each added to the output, which rounds the output twice unless it is fp32 and
    /// held zeros.
    SplitsAll,
    /// Only the second product of this many rows is formed in two parts.
    SplitsSecondRun,
    /// Is refused if there are many rows.
    IsRefused,
    /// Fails if there are many rows.
    Fails,
    /// The library's own product.
    Whole,
}

use Way::*;

fn element(operand: Operand, row: usize, column: usize) -> Operand {
    let elements = match operand.transposed {
        true => column * operand.stride + row,
        false => row * operand.stride + column,
    };
    Operand { address: operand.address.offset(elements * operand.element.bytes()), ..operand }
}

fn multiply<D: Driver>(
    driver: &D,
    queue: &mut D::Queue,
    way: Way,
    runs: &RefCell<HashMap<usize, usize>>,
    product: MatrixProduct,
) -> Result<(), KernelError> {
    // SAFETY: the operands are given by the choice, or parts of what it gives, each in memory of its own.
    let mut form = |product| unsafe { driver.matmul(queue, product) };
    let MatrixProduct { m, .. } = product;
    let mut in_two = |first: usize, rows: usize, product: MatrixProduct| {
        let MatrixProduct { out, a, b, k, .. } = product;
        let (out, a) = (element(out, first, 0), element(a, first, 0));
        // All sums are split together, so that only one rule is broken.
        let rows_are = if way == SplitsAll { product.rows } else { Rows::Fixed };
        let half = k / 2;
        form(MatrixProduct { out, a, m: rows, k: half, rows: rows_are, ..product })?;
        let (a, b) = (element(a, 0, half), element(b, half, 0));
        let output = Output::Add;
        form(MatrixProduct { out, a, b, m: rows, k: k - half, output, rows: rows_are, ..product })
    };
    let is_many = m > 1000;
    let entries = product.batch.map_or(1, |batch| batch.entries);
    let run = {
        let mut runs = runs.borrow_mut();
        let run = runs.entry(m).or_insert(0);
        *run += 1;
        *run
    };
    let (device, what) = ("a device".to_owned(), "multiply".to_owned());
    match way {
        SplitsOneRow if m == 1 => in_two(0, 1, product),
        SplitsManyRows if is_many => in_two(0, m, product),
        ForgetsManyRows if is_many => Ok(()),
        SplitsAll => in_two(0, m, product),
        SplitsSecondRun if run == 2 => in_two(0, m, product),
        SplitsLastRows if is_many => {
            let last = 16;
            in_two(m - last, last, product)?;
            form(MatrixProduct { m: m - last, ..product })
        }
        SplitsLastEntry if entries > 1 => {
            let batch = product.batch.unwrap();
            let last = entries - 1;
            let [out, a, b] =
                [(product.out, batch.out), (product.a, batch.a), (product.b, batch.b)].map(
                    |(operand, apart)| {
                        let bytes = last * apart * operand.element.bytes();
                        Operand { address: operand.address.offset(bytes), ..operand }
                    },
                );
            in_two(0, m, MatrixProduct { out, a, b, base: out.address, batch: None, ..product })?;
            let batch = Some(Batch { entries: last, ..batch });
            form(MatrixProduct { batch, ..product })
        }
        IsRefused if is_many => {
            Err(KernelError::Unsupported { what, device, answer: "not so many rows".to_owned() })
        }
        Fails if is_many => {
            let attempted = "a matrix product";
            Err(KernelError::Device { attempted, device, answer: "lost".to_owned() })
        }
        _ => form(product),
    }
}

/// The candidates, in an order.
fn choose<D: Driver>(
    driver: &D,
    product: &MatrixProduct,
    candidates: &[Candidate<Way>],
) -> Result<Way, KernelError> {
    let mut queue = driver.queue().unwrap();
    let runs: HashMap<usize, RefCell<HashMap<usize, usize>>> =
        (0..candidates.len()).map(|place| (place, RefCell::default())).collect();
    let named = candidates.iter().enumerate().map(|(place, candidate)| Candidate {
        algorithm: (place, candidate.algorithm),
        workspace_bytes: candidate.workspace_bytes,
        terms: candidate.terms,
    });
    let form = |queue: &mut D::Queue, (place, way): &(usize, Way), tried| {
        multiply(driver, queue, *way, &runs[place], tried)
    };
    choose_algorithm(driver, &mut queue, product, WORKSPACE_BYTES, named, form).map(|(_, way)| way)
}

/// Candidates that only a trial can reject.
fn eligible(ways: &[Way]) -> Vec<Candidate<Way>> {
    let candidate =
        |&algorithm: &Way| Candidate { algorithm, workspace_bytes: 0, terms: Terms::Whole };
    ways.iter().map(candidate).collect()
}

/// The message of the error.
fn refusal(chosen: Result<Way, KernelError>) -> String {
    match chosen {
        Err(error @ KernelError::Unsupported { .. }) => error.to_string(),
        other => panic!("expected that none is left, found {other:?}"),
    }
}

/// A product that forms `out` from activations of the arm; the right operand may be transposed.
fn product<P: Precision>(out: ElementKind, transposed: bool, output: Output) -> MatrixProduct {
    let operand = |stride, transposed, element: ElementKind| Operand {
        address: Address::NULL,
        stride,
        transposed,
        element,
        alignment: 2 * element.bytes(),
    };
    MatrixProduct {
        out: operand(COLUMNS + 8, false, out),
        a: operand(2 * TERMS, false, P::ELEMENT),
        b: operand(if transposed { TERMS } else { COLUMNS }, transposed, P::ELEMENT),
        m: 7,
        n: COLUMNS,
        k: TERMS,
        output,
        base: Address::NULL,
        bias: None,
        rows: Rows::Free,
        batch: None,
    }
}

fn products<P: Precision>() -> [MatrixProduct; 3] {
    [
        product::<P>(P::ELEMENT, false, Output::Overwrite),
        product::<P>(P::ELEMENT, true, Output::Overwrite),
        product::<P>(ElementKind::F32, true, Output::Add),
    ]
}

/// The gradient of a weight from one grain.
fn gradient<P: Precision>() -> MatrixProduct {
    let product = product::<P>(ElementKind::F32, false, Output::Add);
    let a = Operand { stride: 150, transposed: true, ..product.a };
    MatrixProduct { a, m: 150, rows: Rows::Fixed, ..product }
}

/// The gradients of a small weight from several grains.
fn gradients<P: Precision>() -> MatrixProduct {
    let product = MatrixProduct { output: Output::Overwrite, ..gradient::<P>() };
    let batch = Batch { entries: 2, out: 150 * (COLUMNS + 8), a: TERMS * 150, b: TERMS * COLUMNS };
    MatrixProduct { batch: Some(batch), ..product }
}

/// The first candidate whose rows do not depend on other rows is chosen, wherever it stands; without one, the choice is an error.
///
/// Seen failing: with bf16 factors of four magnitudes, whose sums are exact in any order; without each of the comparisons of rows.
pub fn row_dependent_ones_are_passed_over<D: Driver, P: Precision>(arm: &Arm<Gpu<D, P>>) {
    let driver = arm.backend.driver();
    let wrong = [SplitsOneRow, SplitsManyRows, SplitsLastRows, ForgetsManyRows];
    for product in products::<P>() {
        for way in wrong {
            let chosen = choose(driver, &product, &eligible(&[way, Whole])).unwrap();
            assert_eq!(chosen, Whole, "{way:?} {:?}", product.output);
        }
        let said = refusal(choose(driver, &product, &eligible(&wrong)));
        assert!(said.contains("4x treats rows differently"), "{said}");
        let said = refusal(choose(driver, &product, &[]));
        assert!(said.contains("it proposes no algorithm"), "{said}");
    }
}

/// A candidate whose bits for an entry of a batch differ from those of the entry alone is passed over.
///
/// Seen failing: without the batches.
pub fn entry_dependent_ones_are_passed_over<D: Driver, P: Precision>(arm: &Arm<Gpu<D, P>>) {
    let driver = arm.backend.driver();
    let product = gradients::<P>();
    let chosen = choose(driver, &product, &eligible(&[SplitsLastEntry, Whole])).unwrap();
    assert_eq!(chosen, Whole);
    let said = refusal(choose(driver, &product, &eligible(&[SplitsLastEntry])));
    assert!(said.contains("1x treats entries of a batch differently"), "{said}");
}

/// A candidate that gives other bits when it runs again is passed over, for free rows and for fixed rows.
///
/// Seen failing: without the second runs.
pub fn unrepeatable_ones_are_passed_over<D: Driver, P: Precision>(arm: &Arm<Gpu<D, P>>) {
    let driver = arm.backend.driver();
    for product in products::<P>().into_iter().chain([gradient::<P>(), gradients::<P>()]) {
        let chosen = choose(driver, &product, &eligible(&[SplitsSecondRun, Whole])).unwrap();
        assert_eq!(chosen, Whole, "{product:?}");
        let said = refusal(choose(driver, &product, &eligible(&[SplitsSecondRun])));
        assert!(said.contains("1x gives other bits when it runs again"), "{said}");
    }
}

/// A candidate that adds parts of sums to the output is passed over where that rounds them; into an
/// fp32 output that held zeros it is an order of addition like any other, and the order is free.
///
/// Seen failing: without the sums of whole numbers; and, for additions to fp32, with numbers there
/// that need no rounding.
pub fn those_that_round_often_are_passed_over<D: Driver, P: Precision>(arm: &Arm<Gpu<D, P>>) {
    let driver = arm.backend.driver();
    for product in products::<P>().into_iter().chain([gradient::<P>(), gradients::<P>()]) {
        let chosen = choose(driver, &product, &eligible(&[SplitsAll, Whole])).unwrap();
        let is_an_order =
            product.out.element == ElementKind::F32 && product.output == Output::Overwrite;
        assert_eq!(chosen, if is_an_order { SplitsAll } else { Whole }, "{product:?}");
        if !is_an_order {
            let said = refusal(choose(driver, &product, &eligible(&[SplitsAll])));
            assert!(said.contains("1x rounds a sum more than once"), "{said}");
        }
    }
}

/// A candidate that splits sums or needs more workspace than allowed is passed over without a run, however well it computes.
///
/// Seen failing: without either rule.
pub fn ineligible_ones_are_passed_over<D: Driver, P: Precision>(arm: &Arm<Gpu<D, P>>) {
    let driver = arm.backend.driver();
    let candidate =
        |algorithm, workspace_bytes, terms| Candidate { algorithm, workspace_bytes, terms };
    let wrong =
        [candidate(Fails, WORKSPACE_BYTES + 1, Terms::Whole), candidate(Fails, 0, Terms::Split)];
    let right = candidate(Whole, WORKSPACE_BYTES, Terms::Whole);
    for product in products::<P>().into_iter().chain([gradient::<P>(), gradients::<P>()]) {
        for wrong in wrong {
            assert_eq!(choose(driver, &product, &[wrong, right]).unwrap(), Whole, "{wrong:?}");
        }
        let said = refusal(choose(driver, &product, &wrong));
        for part in ["1x needs more workspace than there is", "1x splits the sum over k"] {
            assert!(said.contains(part), "{said}");
        }
    }
}

/// A candidate that the library refuses at run time is passed over, and named if no candidate is left; a
/// failure is an error.
///
/// Seen failing: with a refusal that is returned, and with a failure that is passed over.
pub fn refused_ones_are_passed_over<D: Driver, P: Precision>(arm: &Arm<Gpu<D, P>>) {
    let driver = arm.backend.driver();
    let product = product::<P>(P::ELEMENT, true, Output::Overwrite);
    assert_eq!(choose(driver, &product, &eligible(&[IsRefused, Whole])).unwrap(), Whole);
    let said = refusal(choose(driver, &product, &eligible(&[IsRefused, IsRefused])));
    assert!(said.contains("2x was refused at its launch (not so many rows)"), "{said}");
    let failed = choose(driver, &product, &eligible(&[Fails, Whole])).unwrap_err();
    assert!(matches!(failed, KernelError::Device { .. }), "{failed}");
}

/// The rules by name: hands them to the macro `$to`.
macro_rules! every_rule {
    ($to:ident) => {
        $to! {
            row_dependent_ones_are_passed_over
            entry_dependent_ones_are_passed_over
            unrepeatable_ones_are_passed_over
            those_that_round_often_are_passed_over
            ineligible_ones_are_passed_over
            refused_ones_are_passed_over
        }
    };
}
pub(crate) use every_rule;
