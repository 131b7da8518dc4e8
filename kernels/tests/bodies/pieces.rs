//! Sequences that are cut into pieces, and of which some end before others.

use std::ops::Range;

use tidemill_kernels::{Backend, Slice};

use super::device::Device;
use super::number::Number;

/// The tokens of each sequence, the longest first.
pub const LENGTHS: [usize; 3] = [41, 23, 5];

/// How the longest is cut: position by position, at once, and at places before, at and behind what kernels walk at once.
pub fn cuts() -> Vec<Vec<usize>> {
    vec![vec![1; 41], vec![41], vec![16, 25], vec![5, 32, 4], vec![1, 2, 17, 21]]
}

/// One of them.
pub struct Cut {
    /// The positions that it has of the longest sequence.
    pub positions: Range<usize>,
    /// How many it has of each sequence that has any.
    pub lengths: Vec<u32>,
}

impl Cut {
    /// Those of sequences of [`LENGTHS`] tokens, of which the first brings `pieces` tokens at a time.
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

    /// Its rows of `values[b t, columns]`, where t is the longest sequence's: `[b, t of the piece, columns]`.
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

/// All of what there is of lengths.
pub fn slice<B: Backend>(lengths: &Option<B::Buffer<u32>>) -> Option<Slice<'_, B, u32>> {
    lengths.as_ref().map(Slice::all)
}

/// Of `all[b t, columns]` the rows that there are, one sequence after the other.
pub fn rows_there(all: &[f32], columns: usize) -> Vec<f32> {
    let of_sequences = all.chunks_exact(LENGTHS[0] * columns).zip(LENGTHS);
    of_sequences.flat_map(|(rows, length)| &rows[..length * columns]).copied().collect()
}
