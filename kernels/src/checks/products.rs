//! Matrix products, and tokens chosen from logits.

use super::checker::Checker;
use crate::backend::{Backend, DrawSettings, Output};
use crate::draw as definition;
use crate::error::Result;
use crate::reference::matmul::{MatmulShape, backward, forward};
use crate::shape::GrainRows;
use crate::view::{Slice, SliceMut};

/// `[columns, rows]`: the transpose of a matrix of `[rows, columns]`.
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
        let bias = checker.numbers::<f32>(columns, [-1.0, 1.0])?;
        let mut biased = checker.room::<B::Activation>(rows * columns)?;
        let (backend, stream) = (checker.backend, &mut checker.stream);
        let (left, right) = (a.matrix(inner)?, weight.matrix(inner)?.transposed());
        let to = biased.matrix_mut(columns)?;
        backend.matmul_biased(stream, to, left, right, bias.slice())?;
        let with_bias: Vec<f64> =
            expected.iter().enumerate().map(|(i, x)| x + bias.wide[i % columns]).collect();
        checker.compare("matmul_biased", &biased, &with_bias)?;
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

/// A product of generation, as a layer's output and added to the residual, and its rows by themselves and among others: a few
/// of them and many have kernels of their own.
pub(super) fn ordered_matmul<B: Backend>(checker: &mut Checker<'_, B>) -> Result<()> {
    let (inner, columns) = (1032, 40);
    let weight = checker.activations(columns * inner)?;
    let row = checker.activations(inner)?;
    let values: Vec<f32> = row.wide.iter().map(|&value| value as f32).collect();
    let b = transposed(&weight.wide, columns, inner);
    let product = forward(&row.wide, &b, MatmulShape { rows: 1, inner, columns });
    let mut first: Option<Vec<u8>> = None;
    for rows in [1, 9, 129] {
        let a = checker.put::<B::Activation>(&values.repeat(rows))?;
        let mut out = checker.room::<B::Activation>(rows * columns)?;
        let mut residual = checker.numbers::<f32>(rows * columns, [-1.0, 1.0])?;
        let expected = product.repeat(rows);
        let sum = plus(&residual.wide, &expected);
        let (backend, stream) = (checker.backend, &mut checker.stream);
        let (left, right) = (a.matrix(inner)?, weight.matrix(inner)?);
        backend.ordered_matmul(stream, out.matrix_mut(columns)?, left, right, Output::Overwrite)?;
        let (left, right) = (a.matrix(inner)?, weight.matrix(inner)?);
        backend.ordered_matmul_f32(
            stream,
            residual.matrix_mut(columns)?,
            left,
            right,
            Output::Add,
        )?;
        checker.compare("ordered_matmul", &out, &expected)?;
        checker.compare("ordered_matmul_f32", &residual, &sum)?;
        let out = checker.read(&out.buffer)?;
        for (place, row) in out.chunks(columns).enumerate() {
            let bits: &[u8] = bytemuck::cast_slice(row);
            if *first.get_or_insert_with(|| bits.to_vec()) != bits {
                checker.differs(format!("row {place} of {rows} has other bits than alone"));
                return Ok(());
            }
        }
    }
    Ok(())
}

/// The likeliest of logits, of which two are equal.
pub(super) fn likeliest<B: Backend>(checker: &mut Checker<'_, B>) -> Result<()> {
    let (rows, columns) = (3, 1500);
    let logits = checker.numbers::<f32>(rows * columns, [-1.0, 1.0])?;
    let mut values: Vec<f32> = logits.wide.iter().map(|&value| value as f32).collect();
    let expected = [1400, 0, 77];
    for (row, place) in values.chunks_mut(columns).zip(expected) {
        row[place] = 2.0;
        row[columns - 1] = 2.0;
    }
    let logits = checker.put::<f32>(&values)?;
    let mut tokens = checker.write(&[0_u32; 3])?;
    let (backend, stream) = (checker.backend, &mut checker.stream);
    backend.likeliest(stream, SliceMut::all(&mut tokens), logits.matrix(columns)?, 0.5)?;
    let found: Vec<f64> = checker.read(&tokens)?.into_iter().map(f64::from).collect();
    checker.compare_values("likeliest", &found, &expected.map(|place| place as f64));
    Ok(())
}

/// Tokens drawn by every filter.
pub(super) fn draw<B: Backend>(checker: &mut Checker<'_, B>) -> Result<()> {
    let (scale, columns) = (0.5, 1500);
    let settings = DrawSettings { temperature: 0.8, top_k: 400, top_p: 0.9, min_p: 0.01 };
    let uniforms = [0.1, 0.37, 0.93];
    let logits = checker.numbers::<f32>(uniforms.len() * columns, [-8.0, 8.0])?;
    let mut candidates = Vec::new();
    let rows = logits.wide.chunks(columns).zip(uniforms);
    let expected = rows.map(|(row, uniform)| {
        let logits = row.iter().map(|&logit| f64::from(logit as f32 * scale));
        definition::keep_candidates(&mut candidates, logits, &settings);
        definition::draw(&candidates, uniform)
    });
    let expected: Vec<u32> = expected.collect();
    let mut tokens = checker.write(&[0_u32; 3])?;
    let uniforms = checker.write(&uniforms)?;
    let (backend, stream) = (checker.backend, &mut checker.stream);
    let (out, uniforms) = (SliceMut::all(&mut tokens), Slice::all(&uniforms));
    backend.draw(stream, out, logits.matrix(columns)?, uniforms, scale, &settings)?;
    let found = checker.read(&tokens)?;
    if found != expected {
        checker.differs(format!("drawn: found {found:?}, expected {expected:?}"));
    }
    Ok(())
}
