//! The incremental form of a block: how generation continues from the state of earlier tokens.

use tidemill_kernels::backend::KernelGroup;
use tidemill_kernels::{Backend, Element, Slice, SliceMut};

use crate::error::Result;
use crate::lease::Lease;
use crate::linear::Products;
use crate::trainable::Device;

/// The most positions of a sequence that are computed at once: with few sequences, this many give
/// products enough rows.
pub const PIECE_POSITIONS: usize = 1 << 10;

/// The rows that are computed at once where a piece has more than one row for each sequence: enough
/// to fill any device.
const MOST_ROWS: usize = 1 << 12;

/// The sizes that memory is planned for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capacity {
    /// b, sequences.
    pub sequences: usize,
    /// Positions that each sequence may grow to.
    pub positions: usize,
    /// b t, rows of the largest piece: the most tokens that enter at once.
    pub rows: usize,
}

impl Capacity {
    /// Room for `sequences` sequences of up to `positions` positions, neither of them 0.
    pub fn new(sequences: usize, positions: usize) -> Self {
        let piece = (MOST_ROWS / sequences).clamp(1, PIECE_POSITIONS.min(positions));
        Self { sequences, positions, rows: sequences.saturating_mul(piece) }
    }

    /// Positions of the largest piece of all sequences.
    pub fn piece_positions(&self) -> usize {
        self.rows / self.sequences
    }
}

/// New tokens of several sequences, packed as `[b, t]`. Sequences with fewer than t tokens are
/// padded at their end with rows of no meaning: no row of a sequence reads a later one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    sequences: usize,
    positions: usize,
    is_even: bool,
}

impl Piece {
    /// The piece of sequences with `lengths` new tokens, the longest first and none of them 0.
    pub(crate) fn new(lengths: impl Iterator<Item = usize> + Clone) -> Self {
        let positions = lengths.clone().next().unwrap_or(0);
        let is_even = lengths.clone().all(|length| length == positions);
        Self { sequences: lengths.count(), positions, is_even }
    }

    /// b
    pub fn sequences(&self) -> usize {
        self.sequences
    }

    /// t
    pub fn positions(&self) -> usize {
        self.positions
    }

    /// b t
    pub fn rows(&self) -> usize {
        self.sequences * self.positions
    }

    /// Whether all sequences have the same number of new tokens.
    pub fn is_even(&self) -> bool {
        self.is_even
    }
}

/// The arguments of [`Incremental::advance`].
pub struct PiecePass<'a, B: Backend> {
    /// The parameters of the block's segment.
    pub parameters: Lease<'a, B>,
    /// The new tokens.
    pub piece: &'a Piece,
    /// `past[b]`: the tokens that each sequence had before this piece.
    pub past: Slice<'a, B, u32>,
    /// The products that compute these tokens.
    pub products: Products,
    /// `lengths[b]`: the new tokens of each sequence, where these numbers differ.
    pub lengths: Option<Slice<'a, B, u32>>,
}

/// A block that keeps a state of each sequence, and so reads each of its tokens only once.
///
/// The result for a token must depend, to the bit, on the sequence's tokens up to it and their
/// [`Products`] alone: neither on the other sequences nor on how the sequence was cut into pieces.
pub trait Incremental<B: Backend>: Send + Sync + 'static {
    /// The state of the sequences of a batch in one block: what the block keeps of their earlier
    /// tokens.
    type State: Send + 'static;
    /// Memory that [alike](crate::block::Block::is_alike) blocks use one after the other.
    type Workspace: Send + 'static;

    /// The kernels that the block launches, besides matrix products: they are compiled in parallel
    /// beforehand.
    fn generation_kernels(&self) -> Vec<KernelGroup> {
        Vec::new()
    }

    /// Memory for the state.
    ///
    /// # Errors
    /// A device without room.
    fn plan_state(&self, device: &mut Device<'_, B>, capacity: Capacity) -> Result<Self::State>;

    /// Memory that alike blocks use one after the other.
    ///
    /// # Errors
    /// A device without room.
    fn plan_workspace(
        &self,
        device: &mut Device<'_, B>,
        capacity: Capacity,
    ) -> Result<Self::Workspace>;

    /// Bytes of [`plan_state`](Self::plan_state) for these sizes.
    fn state_bytes(&self, capacity: Capacity) -> usize;

    /// Clears the state of all sequences.
    ///
    /// # Errors
    /// A device that fails.
    fn forget(&self, device: &mut Device<'_, B>, state: &mut Self::State) -> Result<()>;

    /// Keeps some sequences and drops the others: `kept[i]`, ascending, becomes sequence i.
    ///
    /// # Errors
    /// A device that fails.
    fn keep(
        &self,
        device: &mut Device<'_, B>,
        state: &mut Self::State,
        kept: &[usize],
    ) -> Result<()>;

    /// Copies the state of the first sequence of `from`, which has `positions` positions, to
    /// sequence `place`.
    ///
    /// # Errors
    /// A device that fails.
    fn adopt(
        &self,
        device: &mut Device<'_, B>,
        state: &mut Self::State,
        place: usize,
        from: &Self::State,
        positions: usize,
    ) -> Result<()>;

    /// Turns `residual[b t, d]` from the block's input into its output, and advances the state.
    ///
    /// With one position for every sequence, the same kernels run on the same buffers every time, so that they can be
    /// recorded.
    ///
    /// # Errors
    /// A device that fails.
    fn advance(
        &self,
        device: &mut Device<'_, B>,
        residual: &mut B::Buffer<f32>,
        pass: PiecePass<'_, B>,
        state: &mut Self::State,
        workspace: &mut Self::Workspace,
    ) -> Result<()>;
}

/// Copies the first `count` elements of `from` to row `place` of `rows[b, elements]`: the form of
/// [`adopt`](Incremental::adopt) for a state of one row for each sequence.
///
/// # Errors
/// Rows out of range, or a device that fails.
pub fn adopt_row<B: Backend, T: Element>(
    device: &mut Device<'_, B>,
    (rows, elements): (&mut B::Buffer<T>, usize),
    place: usize,
    (from, count): (&B::Buffer<T>, usize),
) -> Result<()> {
    if count == 0 {
        return Ok(());
    }
    let to = SliceMut::new(rows, place * elements, count)?;
    Ok(device.backend.copy(device.stream, to, Slice::new(from, 0, count)?)?)
}

/// Moves the rows `kept`, ascending, of `rows[b, elements]` to the front: the form of
/// [`keep`](Incremental::keep) for a state of one row for each sequence.
///
/// # Errors
/// Rows out of range, or a device that fails.
pub fn keep_rows<B: Backend, T: Element>(
    device: &mut Device<'_, B>,
    rows: &mut B::Buffer<T>,
    elements: usize,
    kept: &[usize],
) -> Result<()> {
    let moved = kept.iter().enumerate().filter(|(to, from)| *to != **from);
    if elements == 0 || moved.clone().next().is_none() {
        return Ok(());
    }
    let Device { backend, stream } = device;
    // No call may read and write the same buffer, so each row goes through a buffer of its own.
    let mut between = backend.allocate::<T>(stream, elements)?;
    for (to, &from) in moved {
        let from = Slice::new(rows, from * elements, elements)?;
        backend.copy(stream, SliceMut::all(&mut between), from)?;
        let to = SliceMut::new(rows, to * elements, elements)?;
        backend.copy(stream, to, Slice::all(&between))?;
    }
    Ok(())
}
