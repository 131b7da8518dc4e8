//! RMSNorm (Zhang and Sennrich, 2019, equation 4, with `eps` inside the root).

use crate::shape::NormShape;

/// The outputs of the forward norm.
#[derive(Clone, Debug, PartialEq)]
pub struct NormOutputs {
    /// `y[rows, h d]`.
    pub y: Vec<f64>,
    /// `reciprocal_rms[rows, h]`.
    pub reciprocal_rms: Vec<f64>,
}

/// The gradients of the norm.
#[derive(Clone, Debug, PartialEq)]
pub struct NormGradients {
    /// `dx[rows, h d]`, without what the residual stream adds.
    pub dx: Vec<f64>,
    /// `dweight[grains, d]`.
    pub dweight: Vec<f64>,
}

/// `y = x r weight` with `r = (mean(x^2) + eps)^-1/2`, for each of the h heads of each row of `x[rows, h d]`, `weight[d]`.
pub fn forward(x: &[f64], weight: &[f64], shape: NormShape) -> NormOutputs {
    let width = shape.width();
    assert_eq!((x.len(), weight.len()), (shape.normed().rows() * width, width));
    let mut outputs = NormOutputs { y: Vec::new(), reciprocal_rms: Vec::new() };
    for row in x.chunks(width) {
        let mean_square = row.iter().map(|x| x * x).sum::<f64>() / width as f64;
        let reciprocal_rms = 1.0 / (mean_square + f64::from(shape.eps())).sqrt();
        outputs.reciprocal_rms.push(reciprocal_rms);
        outputs.y.extend(row.iter().zip(weight).map(|(x, weight)| x * reciprocal_rms * weight));
    }
    outputs
}

/// The gradients of [`forward`], from `dy[rows, h d]`. With `g = dy weight` and r as above:
///
/// ```text
/// dx = r g - r^3 x mean(g x)
/// dweight = sum over the heads of the grain's rows of dy x r
/// ```
pub fn backward(dy: &[f64], x: &[f64], weight: &[f64], shape: NormShape) -> NormGradients {
    let width = shape.width();
    assert_eq!(dy.len(), x.len());
    let reciprocal_rms = forward(x, weight, shape).reciprocal_rms;
    let mut dx = vec![0.0; x.len()];
    let mut dweight = vec![0.0; shape.grains().grains() * width];
    for grain in 0..shape.grains().grains() {
        for row in shape.normed().range(grain) {
            let r = reciprocal_rms[row];
            let at = |i: usize| row * width + i;
            let mean_of_products =
                (0..width).map(|i| dy[at(i)] * weight[i] * x[at(i)]).sum::<f64>() / width as f64;
            for i in 0..width {
                dx[at(i)] = r * dy[at(i)] * weight[i] - r * r * r * x[at(i)] * mean_of_products;
                dweight[grain * width + i] += dy[at(i)] * x[at(i)] * r;
            }
        }
    }
    NormGradients { dx, dweight }
}

#[cfg(test)]
mod tests {
    use super::super::central_difference::{check_gradient, dot, wave};
    use super::*;
    use crate::shape::GrainRows;

    #[test]
    fn backward_agrees_with_central_differences() {
        for (rows, rows_per_grain, heads, width) in
            [(1, 1, 1, 1), (5, 2, 1, 7), (3, 3, 1, 3), (5, 2, 3, 4)]
        {
            let grains = GrainRows::new(rows, rows_per_grain).unwrap();
            let shape = NormShape::rms_of_heads(grains, heads, width, 1e-3).unwrap();
            let (x, weight) = (wave(1.0, rows * shape.columns()), wave(2.0, width));
            let dy = wave(3.0, rows * shape.columns());
            let gradients = backward(&dy, &x, &weight, shape);
            check_gradient("dx", &x, &gradients.dx, |x| dot(&forward(x, &weight, shape).y, &dy));
            for grain in 0..grains.grains() {
                let inside = grains.range(grain);
                let inside = inside.start * shape.columns()..inside.end * shape.columns();
                let dweight = &gradients.dweight[grain * width..(grain + 1) * width];
                check_gradient("dweight", &weight, dweight, |weight| {
                    dot(&forward(&x, weight, shape).y[inside.clone()], &dy[inside.clone()])
                });
            }
        }
    }

    #[test]
    fn a_row_of_equal_elements_becomes_its_signs() {
        let shape = NormShape::rms(GrainRows::new(1, 1).unwrap(), 2, 0.0).unwrap();
        let outputs = forward(&[3.0, -3.0], &[1.0, 2.0], shape);
        assert_eq!(outputs.y, [1.0, -2.0]);
    }
}
