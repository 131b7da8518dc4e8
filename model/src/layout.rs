//! Where parameters and their gradients live: tensors, segments, blocks and uses.
//!
//! All parameters of a model lie in one flat fp32 *arena*. A [`Segment`] is a contiguous range of it that is always reduced, leased
//! and shared out together: one block, or an embedding table. A [`Tensor`] is a named view inside a segment. A *block* is one entry of
//! the model's ordered list; it *uses* one or more segments, and each [`Use`] has a gradient slot of its own: a tied embedding has
//! two. The gradients of all uses lie in a second arena, in block order.
//!
//! A layout also declares in which precision blocks read each tensor ([`Reading`]), so that a
//! source that holds the parameters of a block only while the block runs holds them in that
//! precision alone. A tied table is read in fp32 by the block that looks up its rows and in
//! activation precision by the block that multiplies by it: there each use declares its own
//! reading. A use also declares whether its block reads it in the forward pass alone ([`Passes`]).
//!
//! Padding (to 16 elements between tensors, and of a vocabulary to a multiple of 8 rows) exists in
//! memory only: it is zero, its gradient is zero, and files leave it out.

use std::ops::Range;

/// The direction in which a model runs through its blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the first to the last.
    Forward,
    /// From the last to the first. A block that recomputes its forward pass before its backward
    /// pass does so in this direction.
    Backward,
}

/// Tensors start at multiples of this many elements: 64 bytes of fp32.
pub const TENSOR_ALIGNMENT_ELEMENTS: usize = 16;

/// Whether weight decay applies to a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decay {
    /// Multiplied by the decay factor before each update.
    Decayed,
    /// No decay: vectors, and Mamba's `A_log`.
    Exempt,
}

/// In which precision blocks read a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reading {
    /// In fp32, by [`Lease::vector`](crate::Lease::vector): vectors, and tables for lookup.
    Fp32,
    /// In activation precision, by [`Lease::weight`](crate::Lease::weight): the operands of matrix
    /// products.
    Activation,
    /// In both.
    Both,
}

impl Reading {
    /// Whether blocks read it in fp32.
    pub fn is_fp32(self) -> bool {
        matches!(self, Self::Fp32 | Self::Both)
    }

    /// Whether blocks read it in activation precision.
    pub fn is_activation(self) -> bool {
        matches!(self, Self::Activation | Self::Both)
    }
}

/// In which passes a block reads a use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Passes {
    /// Forward and backward.
    Both,
    /// Forward alone: tables for lookup, whose values enter no gradient.
    Forward,
}

/// A named view in the parameter arena.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// The name in Hugging Face files, such as `backbone.layers.0.mixer.in_proj.weight`.
    pub name: String,
    /// The logical shape, as files hold it.
    pub shape: Vec<usize>,
    /// The first element in the arena.
    pub offset: usize,
    /// Elements in the arena: those of `shape`, then padding rows.
    pub stored_elements: usize,
    /// The number that the rows in the arena are a multiple of: more than 1 for tables.
    pub row_multiple: usize,
    /// Whether weight decay applies.
    pub decay: Decay,
    /// In which precisions blocks read it, over all uses.
    pub reading: Reading,
}

impl Tensor {
    /// The number of logical elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Rows and columns of the tensor as a matrix: its first dimension, and the product of all
    /// others. A vector has one column.
    pub fn matrix(&self) -> [usize; 2] {
        [self.shape.first().copied().unwrap_or(1), self.shape.iter().skip(1).product()]
    }

    /// Whether it is a matrix of a hidden layer: two dimensions, read by products, and not a table.
    pub fn is_hidden_matrix(&self) -> bool {
        self.shape.len() == 2 && self.row_multiple == 1 && self.reading != Reading::Fp32
    }

    /// The logical elements' range in the arena.
    pub fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.elements()
    }

    /// The range of all its elements in the arena, padding rows included: the range that blocks
    /// read.
    pub fn stored_range(&self) -> Range<usize> {
        self.offset..self.offset + self.stored_elements
    }
}

/// A contiguous range of the parameter arena that is reduced, leased and shared out together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// A name for reports, such as `blocks.0`.
    pub name: String,
    /// Elements of the parameter arena.
    pub range: Range<usize>,
    /// Indices of its tensors.
    pub tensors: Range<usize>,
}

/// One block's use of one segment, with a gradient slot of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Use {
    /// The block, in forward order.
    pub block: usize,
    /// The segment it uses.
    pub segment: usize,
    /// The first element in the gradient arena; the slot is as long as the segment.
    pub gradient_offset: usize,
    /// In which precision this block reads the segment's tensors; `None` for the reading that each
    /// tensor declares.
    pub reading: Option<Reading>,
    /// In which passes this block reads the segment.
    pub passes: Passes,
}

/// The parameters of a model: an arena, cut into segments, used by blocks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Layout {
    tensors: Vec<Tensor>,
    segments: Vec<Segment>,
    blocks: Vec<String>,
    uses: Vec<Use>,
    parameter_elements: usize,
    gradient_elements: usize,
}

impl Layout {
    /// An empty layout; add segments with their tensors, then blocks.
    pub fn new() -> Self {
        Self::default()
    }

    /// Opens a new segment; the tensors added next belong to it. Returns its index.
    pub fn segment(&mut self, name: impl Into<String>) -> usize {
        let (start, tensor) = (self.parameter_elements, self.tensors.len());
        self.segments.push(Segment {
            name: name.into(),
            range: start..start,
            tensors: tensor..tensor,
        });
        self.segments.len() - 1
    }

    /// Adds a tensor to the newest segment, its rows (first dimension) padded to a multiple of
    /// `row_multiple` in memory. Returns its index. Blocks may read it in [both](Reading::Both) precisions until
    /// [`set_reading`](Self::set_reading) says otherwise.
    ///
    /// # Panics
    /// When no segment is open. Input cannot cause this: layouts are built by models.
    pub fn tensor(
        &mut self,
        name: impl Into<String>,
        shape: &[usize],
        decay: Decay,
        row_multiple: usize,
    ) -> usize {
        let rows = shape.first().copied().unwrap_or(1);
        let row_elements: usize = shape.iter().skip(1).product();
        let row_multiple = row_multiple.max(1);
        let stored_elements = rows.next_multiple_of(row_multiple) * row_elements;
        let offset = self.parameter_elements;
        self.tensors.push(Tensor {
            name: name.into(),
            shape: shape.to_vec(),
            offset,
            stored_elements,
            row_multiple,
            decay,
            reading: Reading::Both,
        });
        self.parameter_elements =
            (offset + stored_elements).next_multiple_of(TENSOR_ALIGNMENT_ELEMENTS);
        let segment = self.segments.last_mut().expect("a segment is opened before its tensors");
        segment.range.end = self.parameter_elements;
        segment.tensors.end = self.tensors.len();
        self.tensors.len() - 1
    }

    /// Declares in which precision blocks read a tensor. Where parameters are shared out, the tensor
    /// is gathered in this precision before a block runs, and a block that reads another precision
    /// gets an error.
    ///
    /// # Panics
    /// When the layout has no such tensor.
    pub fn set_reading(&mut self, tensor: usize, reading: Reading) {
        self.tensors[tensor].reading = reading;
    }

    /// Declares in which precision one block reads the tensors of one segment: for a segment that
    /// blocks read in different precisions. The other uses of the segment keep the reading that its
    /// tensors declare.
    ///
    /// # Panics
    /// When the layout has no such use.
    pub fn set_use_reading(&mut self, use_index: usize, reading: Reading) {
        self.uses[use_index].reading = Some(reading);
    }

    /// Declares in which passes one block reads one segment; without a declaration, in
    /// [both](Passes::Both).
    ///
    /// # Panics
    /// When the layout has no such use.
    pub fn set_use_passes(&mut self, use_index: usize, passes: Passes) {
        self.uses[use_index].passes = passes;
    }

    /// Appends a block that uses `segments`, in forward order. Returns the index of its first use.
    pub fn block(&mut self, name: impl Into<String>, segments: &[usize]) -> usize {
        let (block, first) = (self.blocks.len(), self.uses.len());
        self.blocks.push(name.into());
        for &segment in segments {
            let gradient_offset = self.gradient_elements;
            let (reading, passes) = (None, Passes::Both);
            self.uses.push(Use { block, segment, gradient_offset, reading, passes });
            self.gradient_elements += self.segments[segment].range.len();
        }
        first
    }

    /// The tensors, in arena order.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// The segments, in arena order.
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// The names of the blocks, in forward order.
    pub fn blocks(&self) -> &[String] {
        &self.blocks
    }

    /// The uses, in block order and therefore in gradient-arena order.
    pub fn uses(&self) -> &[Use] {
        &self.uses
    }

    /// The uses of `block` that the block reads once it is entered in `direction`, in order. For
    /// the last block these are all of its uses, as one entry may run both its passes.
    pub fn read_uses(&self, block: usize, direction: Direction) -> impl Iterator<Item = usize> {
        let first = self.uses.partition_point(|of| of.block < block);
        let of_block = self.uses[first..].iter().take_while(move |of| of.block == block);
        let read = (first..).zip(of_block).filter(move |(_, of)| self.is_read(of, direction));
        read.map(|(use_index, _)| use_index)
    }

    /// Whether a block entered in `direction` reads the use.
    pub(crate) fn is_read(&self, of_block: &Use, direction: Direction) -> bool {
        let is_last = of_block.block + 1 == self.blocks.len();
        is_last || direction == Direction::Forward || of_block.passes == Passes::Both
    }

    /// The tensors of a use's segment, in arena order, each as the block of the use reads it.
    pub fn reads(&self, use_index: usize) -> impl Iterator<Item = (&Tensor, Reading)> {
        let Use { segment, reading, .. } = self.uses[use_index];
        let tensors = &self.tensors[self.segments[segment].tensors.clone()];
        tensors.iter().map(move |tensor| (tensor, reading.unwrap_or(tensor.reading)))
    }

    /// The range of a use's slot in the gradient arena.
    pub fn gradient_range(&self, use_index: usize) -> Range<usize> {
        let slot = self.uses[use_index];
        slot.gradient_offset..slot.gradient_offset + self.segments[slot.segment].range.len()
    }

    /// Elements of the parameter arena, padding included.
    pub fn parameter_elements(&self) -> usize {
        self.parameter_elements
    }

    /// Elements of the gradient arena: one lane accumulator.
    pub fn gradient_elements(&self) -> usize {
        self.gradient_elements
    }

    /// The number of parameters as the literature counts them: no padding, tied tensors once.
    pub fn parameters(&self) -> usize {
        self.tensors.iter().map(Tensor::elements).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tied_segments_have_one_range_and_two_slots() {
        let mut layout = Layout::new();
        let table = layout.segment("embedding");
        layout.tensor("table", &[5, 3], Decay::Decayed, 8);
        let norm = layout.segment("norm");
        layout.tensor("weight", &[3], Decay::Exempt, 1);
        layout.block("embedding", &[table]);
        layout.block("head", &[norm, table]);
        assert_eq!(layout.parameters(), 18);
        assert_eq!(layout.segments()[table].range, 0..32);
        assert_eq!(layout.segments()[norm].range, 32..48);
        assert_eq!(layout.gradient_elements(), 32 + 16 + 32);
        assert_eq!(layout.gradient_range(2), 48..80);
        assert_eq!(layout.tensors()[0].range(), 0..15);
    }

    #[test]
    fn a_use_may_read_less_than_others_of_its_segment() {
        let mut layout = Layout::new();
        let table = layout.segment("embedding");
        layout.tensor("table", &[5, 3], Decay::Decayed, 8);
        let norm = layout.segment("norm");
        let weight = layout.tensor("weight", &[3], Decay::Exempt, 1);
        layout.set_reading(weight, Reading::Fp32);
        let embedding = layout.block("embedding", &[table]);
        let head = layout.block("head", &[norm, table]);
        layout.set_use_reading(embedding, Reading::Fp32);
        layout.set_use_reading(head + 1, Reading::Activation);
        let reads = |use_index| -> Vec<_> {
            layout.reads(use_index).map(|(tensor, reading)| (&tensor.name[..], reading)).collect()
        };
        assert_eq!(reads(embedding), [("table", Reading::Fp32)]);
        assert_eq!(reads(head), [("weight", Reading::Fp32)]);
        assert_eq!(reads(head + 1), [("table", Reading::Activation)]);
        assert_eq!(layout.tensors()[0].reading, Reading::Both);
        assert_eq!(layout.tensors()[0].stored_range(), 0..24);
    }

    #[test]
    fn what_is_read_forward_alone_is_not_read_backward() {
        let mut layout = Layout::new();
        let [table, scale] = ["table", "scale"].map(|name| {
            let segment = layout.segment(name);
            layout.tensor(name, &[3], Decay::Exempt, 1);
            segment
        });
        for block in 0..3 {
            let first = layout.block(format!("{block}"), &[table, scale]);
            layout.set_use_passes(first, Passes::Forward);
        }
        let reads = |block, direction| layout.read_uses(block, direction).collect::<Vec<_>>();
        let (forward, backward) = (Direction::Forward, Direction::Backward);
        assert_eq!([reads(0, forward), reads(0, backward)], [vec![0, 1], vec![1]]);
        assert_eq!([reads(1, forward), reads(1, backward)], [vec![2, 3], vec![3]]);
        // Both passes of the last block run in one entry.
        assert_eq!([reads(2, forward), reads(2, backward)], [vec![4, 5], vec![4, 5]]);
        assert!(reads(3, forward).is_empty());
    }
}
