//! Rotary positions (RoFormer, Su et al., 2021) in the layout of transformers: the two parts of a pair lie half a head apart.

use crate::shape::AttentionShape;

/// The inputs of a rotation: the angles, and the position of each row.
#[derive(Clone, Copy, Debug)]
pub struct RotaryInputs<'a> {
    /// `table[positions, p]`: of each position the cosines of its angles, then their sines.
    pub table: &'a [f64],
    /// `starts[b t]`: the position in its sample of the first token of the row's document.
    pub starts: Option<&'a [u32]>,
    /// `past[b]`: positions of each sequence before its rows.
    pub past: Option<&'a [u32]>,
}

/// One row's cosines and sines, of its position `past + i - start`.
fn angles<'a>(
    inputs: &RotaryInputs<'a>,
    row: usize,
    shape: AttentionShape,
) -> (&'a [f64], &'a [f64]) {
    let (t, p) = (shape.sequences().positions(), shape.head_width());
    let past = inputs.past.map_or(0, |past| past[row / t] as usize);
    let start = inputs.starts.map_or(0, |starts| starts[row] as usize);
    let position = past + row % t - start;
    inputs.table[position * p..(position + 1) * p].split_at(p / 2)
}

/// Turns every pair of a head: by the angles, or back where `direction` is -1.
fn turn(head: &mut [f64], (cosines, sines): (&[f64], &[f64]), direction: f64) {
    let (first, second) = head.split_at_mut(cosines.len());
    for i in 0..cosines.len() {
        let (x, y) = (first[i], second[i]);
        let sine = direction * sines[i];
        first[i] = x * cosines[i] - y * sine;
        second[i] = y * cosines[i] + x * sine;
    }
}

/// `qk[b t, (h + g) p]`, every head turned by the angles of its row's position.
pub fn forward(qk: &[f64], inputs: &RotaryInputs<'_>, shape: AttentionShape) -> Vec<f64> {
    let columns = shape.width() + shape.key_value_width();
    let mut out = qk.to_vec();
    for (row, out) in out.chunks_exact_mut(columns).enumerate() {
        let angles = angles(inputs, row, shape);
        out.chunks_exact_mut(shape.head_width()).for_each(|head| turn(head, angles, 1.0));
    }
    out
}

/// `dqkv[b t, (h + 2 g) p]` of the projections from `[b t, 3 h p]`, where each head of queries has its own part of the gradients of
/// keys and values: those that share a head are added, and queries and keys turned back.
pub fn backward(dqkv: &[f64], inputs: &RotaryInputs<'_>, shape: AttentionShape) -> Vec<f64> {
    let (width, p) = (shape.width(), shape.head_width());
    let mut out = Vec::new();
    for (row, parts) in dqkv.chunks_exact(3 * width).enumerate() {
        let angles = angles(inputs, row, shape);
        let (q, shared) = parts.split_at(width);
        for head in q.chunks_exact(p) {
            let mut head = head.to_vec();
            turn(&mut head, angles, -1.0);
            out.extend(head);
        }
        let (k, v) = shared.split_at(width);
        for (part, is_turned) in [(k, true), (v, false)] {
            for group in part.chunks_exact(shape.group() * p) {
                let sum = |i: usize| group.iter().skip(i).step_by(p).sum::<f64>();
                let mut head: Vec<f64> = (0..p).map(sum).collect();
                if is_turned {
                    turn(&mut head, angles, -1.0);
                }
                out.extend(head);
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::super::central_difference::{check_gradient, dot, wave};
    use super::*;
    use crate::shape::SequenceShape;

    fn table(positions: usize, width: usize) -> Vec<f64> {
        let angle = |position: usize, i: usize| position as f64 * 0.3 / (i + 1) as f64;
        let row = |position: usize| {
            let of = move |of: fn(f64) -> f64| (0..width / 2).map(move |i| of(angle(position, i)));
            of(f64::cos).chain(of(f64::sin))
        };
        (0..positions).flat_map(row).collect()
    }

    /// Queries and keys are rotated, values are not. The outputs have the gradient `dout`, and each head of queries has a copy of
    /// the shared key.
    #[test]
    fn backward_agrees_with_central_differences() {
        let shape = AttentionShape::new(SequenceShape::new(2, 3).unwrap(), 4, 6, 1.0, None)
            .and_then(|shape| shape.with_key_value_heads(2))
            .unwrap();
        let table = table(9, 6);
        let (starts, past) = ([0, 0, 2, 0, 1, 1], [4, 1]);
        let inputs = RotaryInputs { table: &table, starts: Some(&starts), past: Some(&past) };
        let (rows, width, shared) = (6, shape.width(), shape.key_value_width());
        let dout = wave(3.0, rows * 3 * width);
        let x = wave(1.0, rows * (width + shared));
        let read = |x: &[f64]| -> f64 {
            let turned = forward(x, &inputs, shape);
            let rows = turned.chunks(width + shared).zip(dout.chunks(3 * width));
            let of_row = |(row, dout): (&[f64], &[f64])| {
                let keys: Vec<f64> =
                    (0..4).flat_map(|head| row[width + head / 2 * 6..][..6].to_vec()).collect();
                dot(&row[..width], &dout[..width]) + dot(&keys, &dout[width..2 * width])
            };
            rows.map(of_row).sum()
        };
        let gradient: Vec<f64> = backward(&dout, &inputs, shape)
            .chunks(width + 2 * shared)
            .flat_map(|row| row[..width + shared].to_vec())
            .collect();
        check_gradient("rotary", &x, &gradient, read);
    }

    /// Scores depend on distances alone, and documents begin at position 0.
    #[test]
    fn products_depend_on_distances() {
        let shape =
            AttentionShape::new(SequenceShape::new(1, 4).unwrap(), 1, 4, 1.0, None).unwrap();
        let table = table(20, 4);
        let row = [0.3, -0.7, 1.1, 0.2, 0.5, 0.4, -0.9, 0.8];
        let x: Vec<f64> = row.repeat(4);
        let score = |past: u32, starts: Option<&[u32]>, query: usize, key: usize| {
            let inputs = RotaryInputs { table: &table, starts, past: Some(&[past]) };
            let turned = forward(&x, &inputs, shape);
            dot(&turned[query * 8..query * 8 + 4], &turned[key * 8 + 4..key * 8 + 8])
        };
        let near = score(0, None, 1, 0);
        assert!((score(9, None, 3, 2) - near).abs() < 1e-12);
        assert!((score(0, None, 2, 0) - near).abs() > 1e-3);
        let inputs = RotaryInputs { table: &table, starts: Some(&[0, 0, 2, 2]), past: None };
        let turned = forward(&x, &inputs, shape);
        assert_eq!(turned[..16], turned[16..]);
    }
}
