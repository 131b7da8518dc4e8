//! Layer norm (Ba, Kiros and Hinton, 2016, equation 3), with the biased variance and `eps` inside the root.

use crate::shape::NormShape;

/// The outputs of the forward norm.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerNormOutputs {
    /// `y[rows, d]`.
    pub y: Vec<f64>,
    /// `means[rows]`.
    pub means: Vec<f64>,
    /// `reciprocal_deviations[rows]`.
    pub reciprocal_deviations: Vec<f64>,
}

/// The gradients of the norm.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerNormGradients {
    /// `dx[rows, d]`, without what the residual stream adds.
    pub dx: Vec<f64>,
    /// `dweight[grains, d]`.
    pub dweight: Vec<f64>,
    /// `dbias[grains, d]`.
    pub dbias: Vec<f64>,
}

/// `y = (x - mean(x)) r weight + bias` with `r = (mean((x - mean(x))^2) + eps)^-1/2`, for each row of `x[rows, d]`;
/// `weight[d]`, and `bias[d]`, zero where absent.
pub fn forward(
    x: &[f64],
    weight: &[f64],
    bias: Option<&[f64]>,
    shape: NormShape,
) -> LayerNormOutputs {
    let width = shape.width();
    assert_eq!((x.len(), weight.len()), (shape.grains().rows() * width, width));
    let mut outputs =
        LayerNormOutputs { y: Vec::new(), means: Vec::new(), reciprocal_deviations: Vec::new() };
    for row in x.chunks(width) {
        let mean = row.iter().sum::<f64>() / width as f64;
        let variance = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / width as f64;
        let reciprocal = 1.0 / (variance + f64::from(shape.eps())).sqrt();
        outputs.means.push(mean);
        outputs.reciprocal_deviations.push(reciprocal);
        for (i, (x, weight)) in row.iter().zip(weight).enumerate() {
            outputs.y.push((x - mean) * reciprocal * weight + bias.map_or(0.0, |bias| bias[i]));
        }
    }
    outputs
}

/// The gradients of [`forward`], from `dy[rows, d]`. With `n = (x - mean(x)) r` and `g = dy weight`:
///
/// ```text
/// dx = r (g - mean(g) - n mean(g n))
/// dweight = sum over the grain's rows of dy n;   dbias = sum over the grain's rows of dy
/// ```
pub fn backward(dy: &[f64], x: &[f64], weight: &[f64], shape: NormShape) -> LayerNormGradients {
    let width = shape.width();
    assert_eq!(dy.len(), x.len());
    let LayerNormOutputs { means, reciprocal_deviations, .. } = forward(x, weight, None, shape);
    let parameters = vec![0.0; shape.grains().grains() * width];
    let mut gradients = LayerNormGradients {
        dx: vec![0.0; x.len()],
        dweight: parameters.clone(),
        dbias: parameters,
    };
    for grain in 0..shape.grains().grains() {
        for row in shape.grains().range(grain) {
            let r = reciprocal_deviations[row];
            let at = |i: usize| row * width + i;
            let normed = |i: usize| (x[at(i)] - means[row]) * r;
            let g = |i: usize| dy[at(i)] * weight[i];
            let mean = (0..width).map(g).sum::<f64>() / width as f64;
            let mean_of_products = (0..width).map(|i| g(i) * normed(i)).sum::<f64>() / width as f64;
            for i in 0..width {
                gradients.dx[at(i)] = r * (g(i) - mean - normed(i) * mean_of_products);
                gradients.dweight[grain * width + i] += dy[at(i)] * normed(i);
                gradients.dbias[grain * width + i] += dy[at(i)];
            }
        }
    }
    gradients
}

#[cfg(test)]
mod tests {
    use super::super::central_difference::{check_gradient, dot, wave};
    use super::*;
    use crate::shape::GrainRows;

    #[test]
    fn backward_agrees_with_central_differences() {
        for (rows, rows_per_grain, width) in [(1, 1, 1), (5, 2, 7), (3, 3, 3)] {
            let grains = GrainRows::new(rows, rows_per_grain).unwrap();
            let shape = NormShape::layer(grains, width, 1e-3).unwrap();
            let (x, weight, bias) = (wave(1.0, rows * width), wave(2.0, width), wave(4.0, width));
            let dy = wave(3.0, rows * width);
            let gradients = backward(&dy, &x, &weight, shape);
            check_gradient("dx", &x, &gradients.dx, |x| {
                dot(&forward(x, &weight, Some(&bias), shape).y, &dy)
            });
            for grain in 0..grains.grains() {
                let inside = grains.range(grain).start * width..grains.range(grain).end * width;
                let of_grain = grain * width..(grain + 1) * width;
                let loss = |weight: &[f64], bias: &[f64]| {
                    let y = forward(&x, weight, Some(bias), shape).y;
                    dot(&y[inside.clone()], &dy[inside.clone()])
                };
                let dweight = &gradients.dweight[of_grain.clone()];
                check_gradient("dweight", &weight, dweight, |weight| loss(weight, &bias));
                let dbias = &gradients.dbias[of_grain];
                check_gradient("dbias", &bias, dbias, |bias| loss(&weight, bias));
            }
        }
    }

    #[test]
    fn a_row_becomes_its_deviations() {
        let shape = NormShape::layer(GrainRows::new(1, 1).unwrap(), 2, 0.0).unwrap();
        let outputs = forward(&[5.0, -1.0], &[1.0, 2.0], Some(&[0.5, 0.25]), shape);
        assert_eq!(outputs.y, [1.5, -1.75]);
        assert_eq!((outputs.means, outputs.reciprocal_deviations), (vec![2.0], vec![1.0 / 3.0]));
    }
}
