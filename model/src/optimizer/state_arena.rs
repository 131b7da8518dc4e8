//! The arena of a state: the order of its numbers, which can be cut wherever the arena of
//! parameters is cut.
//!
//! Every number has a *home*, the first of the parameters that it belongs to: the home of a row's
//! number is the row's first element, that of a column's the column's element in the first row,
//! that of a tensor's the tensor's first element. So any range of the parameters, such as a chunk
//! of a message or the range of a worker, has a range of each state, and ranges that cover the
//! parameters cover the states.

use std::ops::Range;

use super::rule::{StateExtent, StateSpec, StateTensors};
use crate::layout::{Layout, Tensor};

/// The arena of one state of the parameters of a layout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateArena {
    layout: Layout,
    /// The homes in each tensor of the parameters; `None` where a state has a number for each
    /// element, and so the same arena.
    homes: Option<Vec<Homes>>,
}

/// The homes of a state's numbers in one tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Homes {
    /// Where the tensor begins among the parameters.
    first: usize,
    /// The number of elements from one home to the next.
    stride: usize,
    /// The range of its numbers in the arena of the state.
    start: usize,
    count: usize,
}

impl StateArena {
    /// The arena of the parameters themselves.
    pub fn of_parameters(layout: &Layout) -> Self {
        Self { layout: layout.clone(), homes: None }
    }

    /// The arena of the state `spec` of the parameters of `layout`.
    pub fn new(layout: &Layout, spec: &StateSpec) -> Self {
        if (spec.extent, spec.tensors) == (StateExtent::Element, StateTensors::ALL) {
            return Self::of_parameters(layout);
        }
        let mut arena = Layout::new();
        let mut homes = Vec::with_capacity(layout.tensors().len());
        for segment in layout.segments() {
            arena.segment(segment.name.as_str());
            for tensor in &layout.tensors()[segment.tensors.clone()] {
                let (start, first) = (arena.parameter_elements(), tensor.offset);
                let (mut stride, mut count) = (1, 0);
                if spec.tensors.has(tensor) {
                    let [_, columns] = tensor.matrix();
                    let (shape, apart) = match spec.extent {
                        StateExtent::Element => (&tensor.shape[..], 1),
                        StateExtent::Row => (tensor.shape.get(..1).unwrap_or_default(), columns),
                        StateExtent::Column => (tensor.shape.get(1..).unwrap_or_default(), 1),
                        StateExtent::Tensor => (&[][..], 1),
                    };
                    arena.tensor(tensor.name.as_str(), shape, tensor.decay, 1);
                    (stride, count) = (apart.max(1), shape.iter().product());
                }
                homes.push(Homes { first, stride, start, count });
            }
        }
        Self { layout: arena, homes: Some(homes) }
    }

    /// The layout of the arena: the segments of the parameters, each with one tensor of the same
    /// name for each tensor that has the state.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Elements of the arena, padding included.
    pub fn elements(&self) -> usize {
        self.layout.parameter_elements()
    }

    /// The position in this arena that corresponds to `element` of the parameters.
    fn at(&self, element: usize) -> usize {
        let Some(homes) = &self.homes else { return element };
        let after = homes.partition_point(|homes| homes.first <= element);
        let Some(homes) = after.checked_sub(1).and_then(|last| homes.get(last)) else { return 0 };
        homes.start + (element - homes.first).div_ceil(homes.stride).min(homes.count)
    }

    /// The numbers whose homes are among elements `range` of the parameters, and the padding before
    /// them.
    pub fn range(&self, range: &Range<usize>) -> Range<usize> {
        self.at(range.start)..self.at(range.end)
    }

    /// The numbers of one tensor of the parameters, without padding; empty where the tensor lacks
    /// the state.
    pub fn of_tensor(&self, index: usize) -> Range<usize> {
        match self.homes.as_ref().map(|homes| homes.get(index)) {
            None => self.layout.tensors().get(index).map(Tensor::range).unwrap_or_default(),
            Some(Some(homes)) => homes.start..homes.start + homes.count,
            Some(None) => 0..0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Decay;

    /// A table with padding rows, a vector, a tensor of three dimensions, and a segment with
    /// nothing but a vector.
    fn layout() -> Layout {
        let mut layout = Layout::new();
        layout.segment("embedding");
        layout.tensor("table", &[5, 3], Decay::Decayed, 8);
        layout.segment("block");
        layout.tensor("norm", &[17], Decay::Exempt, 1);
        layout.tensor("conv", &[4, 2, 4], Decay::Decayed, 1);
        layout.segment("last");
        layout.tensor("bias", &[3], Decay::Exempt, 1);
        layout
    }

    fn arena(extent: StateExtent, tensors: StateTensors) -> StateArena {
        StateArena::new(&layout(), &StateSpec { name: "state", extent, tensors })
    }

    #[test]
    fn numbers_have_the_shapes_of_what_they_are_of() {
        let shapes = |extent, tensors| -> Vec<(String, Vec<usize>)> {
            let arena = arena(extent, tensors);
            assert_eq!(arena.layout().segments().len(), 3);
            let tensors = arena.layout().tensors().iter();
            tensors.map(|it| (it.name.clone(), it.shape.clone())).collect()
        };
        let named = |shapes: &[(&str, &[usize])]| -> Vec<(String, Vec<usize>)> {
            shapes.iter().map(|(name, shape)| ((*name).to_owned(), shape.to_vec())).collect()
        };
        use StateExtent::{Column, Element, Row, Tensor};
        let [all, matrices, vectors] =
            [StateTensors::ALL, StateTensors::MATRICES, StateTensors::VECTORS];
        let tables = StateTensors::new("tables", |tensor| tensor.row_multiple > 1);
        assert_eq!(shapes(Row, matrices), named(&[("table", &[5]), ("conv", &[4])]));
        assert_eq!(shapes(Column, matrices), named(&[("table", &[3]), ("conv", &[2, 4])]));
        assert_eq!(shapes(Element, vectors), named(&[("norm", &[17]), ("bias", &[3])]));
        assert_eq!(shapes(Row, tables), named(&[("table", &[5])]));
        let each: [(&str, &[usize]); 4] =
            [("table", &[]), ("norm", &[]), ("conv", &[]), ("bias", &[])];
        assert_eq!(shapes(Tensor, all), named(&each));
        assert_eq!(arena(Element, all), StateArena::of_parameters(&layout()));
    }

    #[test]
    fn a_number_is_where_its_first_element_is() {
        let rows = arena(StateExtent::Row, StateTensors::MATRICES);
        // The third row begins with element 6.
        assert_eq!(
            [rows.range(&(0..6)), rows.range(&(0..7)), rows.range(&(6..15))],
            [0..2, 0..3, 2..5]
        );
        assert_eq!(rows.range(&(15..24)), 5..5, "padding rows are none");
        let columns = arena(StateExtent::Column, StateTensors::MATRICES);
        assert_eq!([columns.range(&(0..2)), columns.range(&(2..24))], [0..2, 2..3]);
        let layout = layout();
        for (index, tensor) in layout.tensors().iter().enumerate() {
            let numbers = |arena: &StateArena| arena.of_tensor(index).len();
            let [count, width] = tensor.matrix();
            let is_matrix = tensor.shape.len() > 1;
            let expected = if is_matrix { [count, width] } else { [0, 0] };
            assert_eq!([numbers(&rows), numbers(&columns)], expected, "{}", tensor.name);
            let all = StateArena::of_parameters(&layout);
            assert_eq!(all.of_tensor(index), tensor.range());
        }
    }

    #[test]
    fn ranges_that_cover_the_parameters_cover_every_state() {
        let end = layout().parameter_elements();
        use StateExtent::{Column, Element, Row, Tensor};
        for extent in [Element, Row, Column, Tensor] {
            for tensors in [StateTensors::ALL, StateTensors::MATRICES, StateTensors::VECTORS] {
                let arena = arena(extent, tensors);
                for cut in 0..=end {
                    let (left, right) = (arena.range(&(0..cut)), arena.range(&(cut..end)));
                    assert_eq!((left.start, left.end), (0, right.start));
                    for (index, tensor) in layout().tensors().iter().enumerate() {
                        let of = arena.of_tensor(index);
                        let outside =
                            if tensor.offset >= cut { left.end <= of.start } else { true };
                        let inside = tensor.range().end > cut || of.end <= left.end;
                        assert!(outside && inside, "{extent:?} {tensors:?} {cut} {index}");
                        assert!(of.end <= right.end && right.end <= arena.elements());
                    }
                }
            }
        }
    }
}
