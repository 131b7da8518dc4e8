//! Sequences that are cut into pieces; some sequences end before others.

use std::ops::Range;

use tidemill_kernels::{Backend, Slice};

use super::device::Device;
use super::number::Number;

/// The tokens of each sequence, the longest first.
pub const LENGTHS: [usize; 3] = [41, 23, 5];

/// Cuts of the longest sequence: position by position, in one piece, and before, at and after the lengths that kernels process at once.
pub fn cuts() -> Vec<Vec<usize>> {
    vec![vec![1; 41], vec![41], vec![16, 25], vec![5, 32, 4], vec![1, 2, 17, 21]]
}

/// A piece of all sequences.
pub struct Cut {
    /// The positions of the longest sequence in this piece.
    pub positions: Range<usize>,
    /// The number of positions of each sequence that reaches into this piece.
    pub lengths: Vec<u32>,
}

impl Cut {
    /// The pieces of sequences of [`LENGTHS`] tokens; the longest sequence has `pieces` tokens in each.
    pub fn all(pieces: &[usize]) -> impl Iterator<Item = Self> {
        pieces.iter().scan(0, |first, &count| {
            let positions = *first..*first + count;
            *first += count;
            let of_sequence =
                |length: usize| length.min(positions.end).saturating_sub(positions.start);
            let lengths = LENGTHS.map(of_sequence).into_iter().filter(|&length| length > 0);
            Some(Self { lengths: lengths.map(|length| length as u32).collect(), positions })
        })
    }

    /// The lengths for a kernel: `None` where all sequences have equally many new positions.
    pub fn told<B: Backend>(&self, device: &mut Device<'_, B>) -> Option<B::Buffer<u32>> {
        let positions = self.positions.len() as u32;
        let is_even = self.lengths.iter().all(|&length| length == positions);
        (!is_even).then(|| device.upload(&self.lengths))
    }

    /// The rows of this piece in `values[b t, columns]`, where t is the longest sequence's: `[b, t of the piece, columns]`.
    pub fn rows(&self, values: &[f32], columns: usize) -> Vec<f32> {
        let of_sequence = |sequence: usize| {
            let first = sequence * LENGTHS[0];
            (first + self.positions.start) * columns..(first + self.positions.end) * columns
        };
        (0..self.lengths.len())
            .flat_map(|sequence| values[of_sequence(sequence)].iter().copied())
            .collect()
    }

    /// Copies the existing rows of the piece to their places in `all[b t, columns]`; the others
    /// must hold poison.
    pub fn place<T: Number>(&self, found: &[f32], columns: usize, all: &mut [f32]) {
        let positions = self.positions.len();
        for (row, found) in found.chunks_exact(columns).enumerate() {
            let (sequence, position) = (row / positions, row % positions);
            if position >= self.lengths[sequence] as usize {
                assert!(
                    found.iter().all(|x| x.to_bits() == T::POISON.widened().to_bits()),
                    "row {row} was written"
                );
                continue;
            }
            let to = sequence * LENGTHS[0] + self.positions.start + position;
            all[to * columns..][..columns].copy_from_slice(found);
        }
    }
}

/// The whole buffer of lengths, if there is one.
pub fn slice<B: Backend>(lengths: &Option<B::Buffer<u32>>) -> Option<Slice<'_, B, u32>> {
    lengths.as_ref().map(Slice::all)
}

/// The existing rows of `all[b t, columns]`, one sequence after the other.
pub fn rows_there(all: &[f32], columns: usize) -> Vec<f32> {
    let of_sequences = all.chunks_exact(LENGTHS[0] * columns).zip(LENGTHS);
    of_sequences.flat_map(|(rows, length)| &rows[..length * columns]).copied().collect()
}
