//! Matrix products: `out[m, n] = a[m, k] b[k, n]`.

/// The sizes of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatmulShape {
    /// m, rows of `a` and of the product.
    pub rows: usize,
    /// k, what the sum runs over.
    pub inner: usize,
    /// n, columns of `b` and of the product.
    pub columns: usize,
}

/// The gradients of a product.
#[derive(Clone, Debug, PartialEq)]
pub struct MatmulGradients {
    /// `da[m, k] = dout b^T`.
    pub da: Vec<f64>,
    /// `db[k, n] = a^T dout`.
    pub db: Vec<f64>,
}

/// `out[m, n] = a[m, k] b[k, n]`.
pub fn forward(a: &[f64], b: &[f64], shape: MatmulShape) -> Vec<f64> {
    let MatmulShape { rows, inner, columns } = shape;
    assert_eq!((a.len(), b.len()), (rows * inner, inner * columns));
    let mut out = vec![0.0; rows * columns];
    for row in 0..rows {
        for column in 0..columns {
            for i in 0..inner {
                out[row * columns + column] += a[row * inner + i] * b[i * columns + column];
            }
        }
    }
    out
}

/// The gradients of [`forward`] towards `a` and `b`, from `dout[m, n]`.
pub fn backward(dout: &[f64], a: &[f64], b: &[f64], shape: MatmulShape) -> MatmulGradients {
    let MatmulShape { rows, inner, columns } = shape;
    assert_eq!((a.len(), b.len()), (rows * inner, inner * columns));
    assert_eq!(dout.len(), rows * columns);
    let (mut da, mut db) = (vec![0.0; a.len()], vec![0.0; b.len()]);
    for row in 0..rows {
        for column in 0..columns {
            let gradient = dout[row * columns + column];
            for i in 0..inner {
                da[row * inner + i] += gradient * b[i * columns + column];
                db[i * columns + column] += gradient * a[row * inner + i];
            }
        }
    }
    MatmulGradients { da, db }
}

#[cfg(test)]
mod tests {
    use super::super::central_difference::{check_gradient, dot, wave};
    use super::*;

    #[test]
    fn backward_agrees_with_central_differences() {
        let shape = MatmulShape { rows: 3, inner: 5, columns: 7 };
        let (a, b, dout) = (wave(1.0, 15), wave(2.0, 35), wave(3.0, 21));
        let gradients = backward(&dout, &a, &b, shape);
        check_gradient("da", &a, &gradients.da, |a| dot(&forward(a, &b, shape), &dout));
        check_gradient("db", &b, &gradients.db, |b| dot(&forward(&a, b, shape), &dout));
    }

    #[test]
    fn a_product_by_hand() {
        let shape = MatmulShape { rows: 2, inner: 2, columns: 1 };
        assert_eq!(forward(&[1.0, 2.0, 3.0, 4.0], &[10.0, 100.0], shape), [210.0, 430.0]);
    }
}
