//! The arenas of parameters and of the states of an optimizer, by part of the state.
//!
//! Chunks, owners and files are cut by elements of the parameters; which elements of a state those are, this says.

use std::ops::Range;

use tidemill_collective::StatePart;
use tidemill_model::Layout;
use tidemill_model::optimizer::{StateArena, StateSpec};

/// The arenas of a model whose optimizer has some states.
#[derive(Clone, Debug)]
pub(crate) struct StateArenas {
    /// In the order of [`StatePart::all`].
    parts: Vec<StateArena>,
}

impl StateArenas {
    /// The arenas of the parameters of `layout` and of `states`.
    pub(crate) fn new(layout: &Layout, states: &[StateSpec]) -> Self {
        let states = states.iter().map(|spec| StateArena::new(layout, spec));
        Self { parts: std::iter::once(StateArena::of_parameters(layout)).chain(states).collect() }
    }

    /// How many states there are.
    pub(crate) fn states(&self) -> usize {
        self.parts.len() - 1
    }

    /// Every part.
    pub(crate) fn parts(&self) -> impl Iterator<Item = StatePart> + Clone + use<> {
        StatePart::all(self.states())
    }

    /// The arena of a part; none where there is no such state.
    pub(crate) fn of(&self, part: StatePart) -> Option<&StateArena> {
        self.parts.get(part.index())
    }

    /// The layout of a part's arena; the layout of the parameters where there is no such state.
    pub(crate) fn layout(&self, part: StatePart) -> &Layout {
        self.of(part).unwrap_or(&self.parts[0]).layout()
    }

    /// The elements of a part that elements `range` of the parameters have; none of no such state.
    pub(crate) fn range(&self, part: StatePart, range: &Range<usize>) -> Range<usize> {
        self.of(part).map(|arena| arena.range(range)).unwrap_or_default()
    }

    /// Elements of all parts together.
    pub(crate) fn elements(&self) -> usize {
        self.parts.iter().map(StateArena::elements).sum()
    }
}
