//! The gate of SwiGLU (Shazeer, 2020): `silu(gate) up`, silu(g) being `g / (1 + e^-g)`.

use super::{silu, silu_derivative};

/// `out[rows, n]` of `x[rows, 2 n] = [gate | up]`.
pub fn forward(x: &[f64], width: usize) -> Vec<f64> {
    let of_row = |row: &[f64]| -> Vec<f64> {
        let (gate, up) = row.split_at(width);
        gate.iter().zip(up).map(|(&gate, up)| silu(gate) * up).collect()
    };
    x.chunks_exact(2 * width).flat_map(of_row).collect()
}

/// `dx[rows, 2 n]` of [`forward`], from `dout[rows, n]`: `dout up silu'(gate)`, then `dout silu(gate)`.
pub fn backward(dout: &[f64], x: &[f64], width: usize) -> Vec<f64> {
    let rows = x.chunks_exact(2 * width).zip(dout.chunks_exact(width));
    let of_row = |(row, dout): (&[f64], &[f64])| -> Vec<f64> {
        let (gate, up) = row.split_at(width);
        let of_gate = (0..width).map(|i| dout[i] * up[i] * silu_derivative(gate[i]));
        let of_up = (0..width).map(|i| dout[i] * silu(gate[i]));
        of_gate.chain(of_up).collect()
    };
    rows.flat_map(of_row).collect()
}

#[cfg(test)]
mod tests {
    use super::super::central_difference::{check_gradient, dot, wave};
    use super::*;

    #[test]
    fn backward_agrees_with_central_differences() {
        let (rows, width) = (3, 5);
        let x: Vec<f64> = wave(1.0, 2 * rows * width).into_iter().map(|x| 3.0 * x).collect();
        let dout = wave(4.0, rows * width);
        let gradient = backward(&dout, &x, width);
        check_gradient("gated_silu", &x, &gradient, |x| dot(&forward(x, width), &dout));
    }

    #[test]
    fn values_by_hand() {
        let out = forward(&[1.0, -2.0, 3.0, 0.5], 2);
        assert!((out[0] - 3.0 / (1.0 + (-1.0_f64).exp())).abs() < 1e-15);
        assert!((out[1] + 1.0 / (1.0 + 2.0_f64.exp())).abs() < 1e-15);
    }
}
