//! Matrix products.

use super::checker::Checker;
use crate::backend::{Backend, Output};
use crate::error::Result;
use crate::reference::matmul::{MatmulShape, backward, forward};
use crate::shape::GrainRows;

/// Columns by rows of what is `rows` by `columns`.
fn transposed(matrix: &[f64], rows: usize, columns: usize) -> Vec<f64> {
    (0..columns)
        .flat_map(|column| (0..rows).map(move |row| matrix[row * columns + column]))
        .collect()
}

fn plus(left: &[f64], right: &[f64]) -> Vec<f64> {
    left.iter().zip(right).map(|(left, right)| left + right).collect()
}

/// A layer's output, the same added to the residual, and the gradient of its weight, which is stored by outputs.
pub(super) fn matmul<B: Backend>(checker: &mut Checker<'_, B>) -> Result<()> {
    for [rows, inner, columns] in [[1, 16, 8], [7, 33, 5], [70, 96, 40]] {
        let shape = MatmulShape { rows, inner, columns };
        let a = checker.activations(rows * inner)?;
        let weight = checker.activations(columns * inner)?;
        let b = transposed(&weight.wide, columns, inner);
        let expected = forward(&a.wide, &b, shape);
        let mut out = checker.room::<B::Activation>(rows * columns)?;
        let mut residual = checker.numbers::<f32>(rows * columns, [-1.0, 1.0])?;
        let sum = plus(&residual.wide, &expected);
        let (backend, stream) = (checker.backend, &mut checker.stream);
        let (left, right) = (a.matrix(inner)?, weight.matrix(inner)?.transposed());
        backend.matmul(stream, out.matrix_mut(columns)?, left, right, Output::Overwrite)?;
        let (left, right) = (a.matrix(inner)?, weight.matrix(inner)?.transposed());
        backend.matmul_f32(stream, residual.matrix_mut(columns)?, left, right, Output::Add)?;
        checker.compare("matmul", &out, &expected)?;
        checker.compare("matmul_f32", &residual, &sum)?;

        let dout = checker.activations(rows * columns)?;
        let mut lane = checker.numbers::<f32>(columns * inner, [-1.0, 1.0])?;
        let gradient = transposed(&backward(&dout.wide, &a.wide, &b, shape).db, inner, columns);
        let expected = plus(&lane.wide, &gradient);
        let (grad_out, input) = (dout.matrix(columns)?, a.matrix(inner)?);
        let grains = GrainRows::new(rows, 32)?;
        let (backend, stream) = (checker.backend, &mut checker.stream);
        backend.weight_gradient_add(stream, lane.matrix_mut(inner)?, grad_out, input, grains)?;
        checker.compare("weight_gradient_add", &lane, &expected)?;
    }
    Ok(())
}

/// A row of a product has the same bits by itself, and first and last among others.
pub(super) fn rows_are_independent<B: Backend>(checker: &mut Checker<'_, B>) -> Result<()> {
    const ROWS: usize = 129;
    let (inner, columns) = (96, 40);
    let weight = checker.activations(columns * inner)?;
    let row = checker.activations(inner)?;
    let values: Vec<f32> = row.wide.iter().map(|&value| value as f32).collect();
    let mut found: Vec<Vec<u8>> = Vec::new();
    for rows in [1, ROWS] {
        let a = checker.put::<B::Activation>(&values.repeat(rows))?;
        let mut out = checker.room::<B::Activation>(rows * columns)?;
        let (left, right) = (a.matrix(inner)?, weight.matrix(inner)?.transposed());
        let (backend, stream) = (checker.backend, &mut checker.stream);
        backend.matmul(stream, out.matrix_mut(columns)?, left, right, Output::Overwrite)?;
        let out = checker.read(&out.buffer)?;
        found.extend(out.chunks(columns).map(|row| bytemuck::cast_slice(row).to_vec()));
    }
    if let Some(other) = found.iter().position(|row| *row != found[0]) {
        checker.differs(format!("row {} of {ROWS} has other bits than alone", other - 1));
    }
    Ok(())
}
