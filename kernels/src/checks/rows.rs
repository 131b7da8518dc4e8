//! Kernels of single rows.

use super::checker::Checker;
use crate::backend::{
    Backend, Gelu, GeluGradients, IGNORED_TARGET, LogitGradient, NormGradient, NormGradients,
    NormInput, NormInputs, NormSaved, Output,
};
use crate::error::Result;
use crate::reference;
use crate::shape::{CrossEntropyShape, GrainRows, NormShape};
use crate::view::Slice;

/// Rows and columns: fewer than a block has threads, and more.
const SIZES: [[usize; 2]; 2] = [[5, 24], [37, 300]];
const ROWS_OF_GRAIN: usize = 16;
const EPS: f32 = 1e-5;

pub(super) fn embedding<B: Backend>(checker: &mut Checker<'_, B>) -> Result<()> {
    for [rows, width] in SIZES {
        const VOCABULARY: usize = 23;
        let tokens = checker.tokens(rows, VOCABULARY as u64);
        let table = checker.numbers::<f32>(VOCABULARY * width, [-1.0, 1.0])?;
        let dout = checker.numbers::<f32>(rows * width, [-1.0, 1.0])?;
        let mut lane = checker.put::<f32>(&vec![0.0; VOCABULARY * width])?;
        let mut out = checker.room::<f32>(rows * width)?;
        let placed = checker.write(&tokens)?;
        let (backend, stream) = (checker.backend, &mut checker.stream);
        let (rows_of, of) = (out.matrix_mut(width)?, table.matrix(width)?);
        backend.embedding_forward(stream, rows_of, of, Slice::all(&placed), Output::Overwrite)?;
        let grains = GrainRows::new(rows, ROWS_OF_GRAIN)?;
        let (gradient, of) = (lane.matrix_mut(width)?, dout.matrix(width)?);
        backend.embedding_backward_add(stream, gradient, of, Slice::all(&placed), grains)?;
        let forward = reference::embedding::forward(&table.wide, &tokens, width);
        let backward = reference::embedding::backward(&dout.wide, &tokens, VOCABULARY, width);
        checker.compare("embedding_forward", &out, &forward)?;
        checker.compare("embedding_backward_add", &lane, &backward)?;
    }
    Ok(())
}

pub(super) fn rms_norm<B: Backend>(checker: &mut Checker<'_, B>) -> Result<()> {
    for [rows, width] in SIZES {
        let shape = NormShape::rms(GrainRows::new(rows, ROWS_OF_GRAIN)?, width, EPS)?;
        let x = checker.numbers::<f32>(rows * width, [-2.0, 3.0])?;
        let weight = checker.numbers::<f32>(width, [0.5, 1.5])?;
        let dy = checker.activations(rows * width)?;
        let mut dx = checker.numbers::<f32>(rows * width, [-1.0, 1.0])?;
        let mut rounded = checker.room::<B::Activation>(rows * width)?;
        let mut y = checker.room::<B::Activation>(rows * width)?;
        let mut roots = checker.room::<f32>(rows)?;
        let mut dweight = checker.room::<f32>(shape.grains().grains() * width)?;
        let forward = reference::rms_norm::forward(&x.wide, &weight.wide, shape);
        let backward = reference::rms_norm::backward(&dy.wide, &x.wide, &weight.wide, shape);
        let expected_dx: Vec<f64> = dx.wide.iter().zip(&backward.dx).map(|(a, b)| a + b).collect();
        let (backend, stream) = (checker.backend, &mut checker.stream);
        let (out, statistics) = (y.matrix_mut(width)?, roots.slice_mut());
        let inputs = NormInputs {
            x: NormInput::Residual(x.matrix(width)?),
            weight: weight.slice(),
            bias: None,
        };
        backend.norm_forward(stream, out, statistics, inputs, shape)?;
        let gradients = NormGradients {
            x: NormGradient::Residual {
                dx: dx.matrix_mut(width)?,
                rounded: Some(rounded.matrix_mut(width)?),
                dy: dy.matrix(width)?,
            },
            dweight: dweight.slice_mut(),
            dbias: None,
        };
        let saved = NormSaved {
            x: NormInput::Residual(x.matrix(width)?),
            statistics: roots.slice(),
            weight: weight.slice(),
        };
        backend.norm_backward(stream, gradients, saved, shape)?;
        checker.compare("rms_norm_forward", &y, &forward.y)?;
        checker.compare("rms_norm_backward, dx", &dx, &expected_dx)?;
        checker.compare("rms_norm_backward, dx rounded", &rounded, &expected_dx)?;
        checker.compare("rms_norm_backward, dweight", &dweight, &backward.dweight)?;
    }
    Ok(())
}

/// The norm of each head of rows of activations, which lie inside wider ones.
pub(super) fn rms_norm_of_heads<B: Backend>(checker: &mut Checker<'_, B>) -> Result<()> {
    for [rows, width] in SIZES {
        const HEADS: usize = 3;
        let columns = HEADS * width;
        let grains = GrainRows::new(rows, ROWS_OF_GRAIN)?;
        let shape = NormShape::rms_of_heads(grains, HEADS, width, EPS)?;
        let x = checker.activations(rows * (columns + width))?;
        let weight = checker.numbers::<f32>(width, [0.5, 1.5])?;
        let mut dx = checker.activations(rows * columns)?;
        let mut y = checker.room::<B::Activation>(rows * columns)?;
        let mut roots = checker.room::<f32>(rows * HEADS)?;
        let mut dweight = checker.room::<f32>(grains.grains() * width)?;
        let of_rows = x.wide.chunks(columns + width);
        let of_heads: Vec<f64> = of_rows.flat_map(|row| row[width..].to_vec()).collect();
        let forward = reference::rms_norm::forward(&of_heads, &weight.wide, shape);
        let backward = reference::rms_norm::backward(&dx.wide, &of_heads, &weight.wide, shape);
        let (backend, stream) = (checker.backend, &mut checker.stream);
        let input =
            || x.matrix(columns + width)?.columns(width, columns).map(NormInput::Activation);
        let (out, statistics) = (y.matrix_mut(columns)?, roots.slice_mut());
        let inputs = NormInputs { x: input()?, weight: weight.slice(), bias: None };
        backend.norm_forward(stream, out, statistics, inputs, shape)?;
        let gradients = NormGradients {
            x: NormGradient::InPlace(dx.matrix_mut(columns)?),
            dweight: dweight.slice_mut(),
            dbias: None,
        };
        let saved = NormSaved { x: input()?, statistics: roots.slice(), weight: weight.slice() };
        backend.norm_backward(stream, gradients, saved, shape)?;
        checker.compare("rms_norm_forward of heads", &y, &forward.y)?;
        checker.compare("rms_norm_backward of heads, dx", &dx, &backward.dx)?;
        checker.compare("rms_norm_backward of heads, dweight", &dweight, &backward.dweight)?;
    }
    Ok(())
}

pub(super) fn layer_norm<B: Backend>(checker: &mut Checker<'_, B>) -> Result<()> {
    for [rows, width] in SIZES {
        let shape = NormShape::layer(GrainRows::new(rows, ROWS_OF_GRAIN)?, width, EPS)?;
        let x = checker.numbers::<f32>(rows * width, [-2.0, 3.0])?;
        let weight = checker.numbers::<f32>(width, [0.5, 1.5])?;
        let bias = checker.numbers::<f32>(width, [-1.0, 1.0])?;
        let dy = checker.activations(rows * width)?;
        let mut dx = checker.put::<f32>(&vec![0.0; rows * width])?;
        let mut rounded = checker.room::<B::Activation>(rows * width)?;
        let mut y = checker.room::<B::Activation>(rows * width)?;
        let mut statistics = checker.room::<f32>(2 * rows)?;
        let grains = shape.grains().grains();
        let mut dweight = checker.room::<f32>(grains * width)?;
        let mut dbias = checker.room::<f32>(grains * width)?;
        let forward =
            reference::layer_norm::forward(&x.wide, &weight.wide, Some(&bias.wide), shape);
        let backward = reference::layer_norm::backward(&dy.wide, &x.wide, &weight.wide, shape);
        let (backend, stream) = (checker.backend, &mut checker.stream);
        let inputs = NormInputs {
            x: NormInput::Residual(x.matrix(width)?),
            weight: weight.slice(),
            bias: Some(bias.slice()),
        };
        let out = y.matrix_mut(width)?;
        backend.norm_forward(stream, out, statistics.slice_mut(), inputs, shape)?;
        let gradients = NormGradients {
            x: NormGradient::Residual {
                dx: dx.matrix_mut(width)?,
                rounded: Some(rounded.matrix_mut(width)?),
                dy: dy.matrix(width)?,
            },
            dweight: dweight.slice_mut(),
            dbias: Some(dbias.slice_mut()),
        };
        let saved = NormSaved {
            x: NormInput::Residual(x.matrix(width)?),
            statistics: statistics.slice(),
            weight: weight.slice(),
        };
        backend.norm_backward(stream, gradients, saved, shape)?;
        checker.compare("layer_norm_forward", &y, &forward.y)?;
        checker.compare("layer_norm_backward, dx", &dx, &backward.dx)?;
        checker.compare("layer_norm_backward, dx rounded", &rounded, &backward.dx)?;
        checker.compare("layer_norm_backward, dweight", &dweight, &backward.dweight)?;
        checker.compare("layer_norm_backward, dbias", &dbias, &backward.dbias)?;
    }
    Ok(())
}

pub(super) fn gelu<B: Backend>(checker: &mut Checker<'_, B>) -> Result<()> {
    for ([rows, width], gelu) in SIZES.into_iter().zip([Gelu::Erf, Gelu::Tanh]) {
        let x = checker.numbers::<B::Activation>(rows * width, [-4.0, 4.0])?;
        let bias = checker.numbers::<f32>(width, [-1.0, 1.0])?;
        let mut gradient = checker.activations(rows * width)?;
        let mut out = checker.room::<B::Activation>(rows * width)?;
        let mut again = checker.room::<B::Activation>(rows * width)?;
        let grains = GrainRows::new(rows, ROWS_OF_GRAIN)?;
        let mut dbias = checker.room::<f32>(grains.grains() * width)?;
        let (backend, stream) = (checker.backend, &mut checker.stream);
        let (of, added) = (x.matrix(width)?, Some(bias.slice()));
        backend.gelu_forward(stream, out.matrix_mut(width)?, of, added, gelu)?;
        let gradients = GeluGradients {
            gradient: gradient.matrix_mut(width)?,
            out: again.matrix_mut(width)?,
            dbias: Some(dbias.slice_mut()),
        };
        let (of, added) = (x.matrix(width)?, Some(bias.slice()));
        backend.gelu_backward(stream, gradients, of, added, grains, gelu)?;
        let at = |i: usize| x.wide[i] + bias.wide[i % width];
        let places = 0..rows * width;
        let forward: Vec<f64> =
            places.clone().map(|i| reference::gelu::gelu(at(i), gelu)).collect();
        let backward: Vec<f64> = places
            .map(|i| gradient.wide[i] * reference::gelu::gelu_derivative(at(i), gelu))
            .collect();
        let of_grain = |grain| {
            backward[grains.range(grain).start * width..grains.range(grain).end * width]
                .chunks(width)
        };
        let sums = (0..grains.grains())
            .flat_map(|grain| (0..width).map(move |i| of_grain(grain).map(|row| row[i]).sum()));
        let sums: Vec<f64> = sums.collect();
        checker.compare("gelu_forward", &out, &forward)?;
        checker.compare("gelu_backward", &gradient, &backward)?;
        checker.compare("gelu_backward, values", &again, &forward)?;
        checker.compare("gelu_backward, dbias", &dbias, &sums)?;
    }
    Ok(())
}

pub(super) fn gated_silu<B: Backend>(checker: &mut Checker<'_, B>) -> Result<()> {
    for [rows, width] in SIZES {
        let x = checker.numbers::<B::Activation>(2 * rows * width, [-4.0, 4.0])?;
        let mut gradient = checker.activations(2 * rows * width)?;
        let mut out = checker.room::<B::Activation>(rows * width)?;
        let mut again = checker.room::<B::Activation>(rows * width)?;
        let of_rows = gradient.wide.chunks(2 * width);
        let dout: Vec<f64> = of_rows.flat_map(|row| row[width..].to_vec()).collect();
        let forward = reference::gated_silu::forward(&x.wide, width);
        let backward = reference::gated_silu::backward(&dout, &x.wide, width);
        let (backend, stream) = (checker.backend, &mut checker.stream);
        let of = x.matrix(2 * width)?;
        backend.gated_silu_forward(stream, out.matrix_mut(width)?, of)?;
        let (dx, values) = (gradient.matrix_mut(2 * width)?, again.matrix_mut(width)?);
        backend.gated_silu_backward(stream, dx, values, of)?;
        checker.compare("gated_silu_forward", &out, &forward)?;
        checker.compare("gated_silu_backward", &gradient, &backward)?;
        checker.compare("gated_silu_backward, values", &again, &forward)?;
    }
    Ok(())
}

pub(super) fn bias_and_clamp<B: Backend>(checker: &mut Checker<'_, B>) -> Result<()> {
    for [rows, width] in SIZES {
        const LIMIT: f32 = 0.75;
        let bias = checker.numbers::<f32>(width, [-1.0, 1.0])?;
        let x = checker.activations(rows * width)?;
        let mut out = checker.activations(rows * width)?;
        let mut dx = checker.activations(rows * width)?;
        let mut clamped = checker.room::<B::Activation>(rows * width)?;
        let grains = GrainRows::new(rows, ROWS_OF_GRAIN)?;
        let mut dbias = checker.room::<f32>(grains.grains() * width)?;
        let (backend, stream) = (checker.backend, &mut checker.stream);
        backend.add_bias(stream, out.matrix_mut(width)?, bias.slice())?;
        backend.bias_backward(stream, dbias.slice_mut(), x.matrix(width)?, grains)?;
        backend.clamp(stream, clamped.matrix_mut(width)?, x.matrix(width)?, LIMIT)?;
        backend.clamp_backward(stream, dx.matrix_mut(width)?, x.matrix(width)?, LIMIT)?;
        let limit = f64::from(LIMIT);
        let sums = out.wide.iter().enumerate().map(|(i, out)| out + bias.wide[i % width]);
        let sums: Vec<f64> = sums.collect();
        let mut of_grains = vec![0.0; grains.grains() * width];
        for (i, x) in x.wide.iter().enumerate() {
            of_grains[i / width / ROWS_OF_GRAIN * width + i % width] += x;
        }
        let within: Vec<f64> = x.wide.iter().map(|x| x.clamp(-limit, limit)).collect();
        let passed = x.wide.iter().zip(&dx.wide);
        let passed: Vec<f64> =
            passed.map(|(x, dx)| if x.abs() > limit { 0.0 } else { *dx }).collect();
        checker.compare("add_bias", &out, &sums)?;
        checker.compare("bias_backward", &dbias, &of_grains)?;
        checker.compare("clamp", &clamped, &within)?;
        checker.compare("clamp_backward", &dx, &passed)?;
    }
    Ok(())
}

pub(super) fn cross_entropy<B: Backend>(checker: &mut Checker<'_, B>) -> Result<()> {
    for [rows, vocabulary] in SIZES {
        let stride = vocabulary + 8;
        let shape = CrossEntropyShape::new(rows, vocabulary, stride)?;
        let mut logits = checker.numbers::<B::Activation>(rows * stride, [-3.0, 3.0])?;
        let mut targets = checker.tokens(rows, vocabulary as u64);
        targets[1] = IGNORED_TARGET;
        let mut losses = checker.room::<f32>(rows)?;
        let placed = checker.write(&targets)?;
        let expected = reference::cross_entropy::forward_backward(&logits.wide, &targets, shape);
        let (backend, stream) = (checker.backend, &mut checker.stream);
        backend.cross_entropy(
            stream,
            losses.slice_mut(),
            logits.slice_mut(),
            Slice::all(&placed),
            LogitGradient::InPlace,
            shape,
        )?;
        checker.compare("cross_entropy, losses", &losses, &expected.losses)?;
        checker.compare("cross_entropy, gradient", &logits, &expected.dlogits)?;
    }
    Ok(())
}
