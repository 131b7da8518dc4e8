//! Embedding: rows of a table, picked by tokens.

/// `out[rows, d] = table[tokens[row]]` of `table[v, d]`.
pub fn forward(table: &[f64], tokens: &[u32], width: usize) -> Vec<f64> {
    let row = |token: u32| &table[token as usize * width..(token as usize + 1) * width];
    tokens.iter().flat_map(|&token| row(token).to_vec()).collect()
}

/// The gradient of [`forward`] towards the table: `dtable[v, d]` of a table of `vocab_size` tokens,
/// from `dout[rows, d]`.
pub fn backward(dout: &[f64], tokens: &[u32], vocab_size: usize, width: usize) -> Vec<f64> {
    assert_eq!(dout.len(), tokens.len() * width);
    let mut dtable = vec![0.0; vocab_size * width];
    for (row, &token) in tokens.iter().enumerate() {
        for i in 0..width {
            dtable[token as usize * width + i] += dout[row * width + i];
        }
    }
    dtable
}

#[cfg(test)]
mod tests {
    use super::super::central_difference::{check_gradient, dot, wave};
    use super::*;

    #[test]
    fn backward_agrees_with_central_differences() {
        let (vocab_size, width, tokens) = (5, 3, [4, 0, 4, 2, 4]);
        let (table, dout) = (wave(1.0, vocab_size * width), wave(2.0, tokens.len() * width));
        let dtable = backward(&dout, &tokens, vocab_size, width);
        check_gradient("dtable", &table, &dtable, |table| {
            dot(&forward(table, &tokens, width), &dout)
        });
    }

    #[test]
    fn rows_come_in_the_order_of_the_tokens() {
        assert_eq!(forward(&[1.0, 2.0, 3.0], &[2, 0, 0], 1), [3.0, 1.0, 1.0]);
    }
}
