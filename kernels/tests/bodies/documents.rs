//! Documents inside samples: where they begin, and poison for their neighbours.

use std::ops::Range;

use tidemill_kernels::shape::SequenceShape;

use super::inputs::Inputs;
use super::number::{Number, rounded};

/// Samples of [`Documents::new`].
pub const SAMPLES: usize = 4;

/// The documents of a few samples.
pub struct Documents {
    /// The rows of each document, in order.
    pub rows: Vec<Range<usize>>,
    positions: usize,
}

impl Documents {
    /// Four samples: one document; a document for each row; documents cut around the edges of chunks and tiles; documents cut anywhere.
    pub fn new(inputs: &mut Inputs, positions: usize) -> Self {
        let edges = |position: &usize| {
            [8, 16, 32, 64, 128, 256].iter().any(|edge| position.abs_diff(*edge) <= 1)
        };
        let anywhere: Vec<usize> = (0..1 + positions / 7).map(|_| inputs.pick(positions)).collect();
        let begins = |sample: usize, position: &usize| match sample {
            0 => false,
            1 => true,
            2 => *position == 1 || edges(position),
            _ => anywhere.contains(position),
        };
        let mut rows = Vec::new();
        for sample in 0..SAMPLES {
            let mut first = 0;
            for next in (1..=positions).filter(|next| *next == positions || begins(sample, next)) {
                rows.push(sample * positions + first..sample * positions + next);
                first = next;
            }
        }
        Self { rows, positions }
    }

    pub fn sequences(&self) -> SequenceShape {
        SequenceShape::new(SAMPLES, self.positions).unwrap()
    }

    /// `starts[b t]`
    pub fn starts(&self) -> Vec<u32> {
        let of = |rows: &Range<usize>| vec![(rows.start % self.positions) as u32; rows.len()];
        self.rows.iter().flat_map(of).collect()
    }

    /// The rows of every second document, beginning with document `first`, and the rows of all other documents.
    pub fn every_second(&self, first: usize) -> (Vec<Range<usize>>, Vec<Range<usize>>) {
        let (mut taken, mut others) = (Vec::new(), Vec::new());
        for (document, rows) in self.rows.iter().enumerate() {
            if document % 2 == first { &mut taken } else { &mut others }.push(rows.clone());
        }
        (taken, others)
    }
}

/// Rows `rows` of `values[rows, columns]`.
pub fn rows_of(values: &[f32], rows: &Range<usize>, columns: usize) -> Vec<f32> {
    values[rows.start * columns..rows.end * columns].to_vec()
}

/// Fills `rows` of `values[rows, columns]` with values that must not leak: NaN, infinities, and numbers close to overflow.
pub fn poison<T: Number>(values: &mut [f32], rows: &[Range<usize>], columns: usize) {
    let huge = rounded::<T>(&[f32::MAX / 2.0])[0];
    let poisons = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, huge, -huge];
    for (document, rows) in rows.iter().enumerate() {
        for row in rows.clone() {
            values[row * columns..(row + 1) * columns].fill(poisons[(document + row) % 5]);
        }
    }
}
