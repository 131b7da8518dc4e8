//! An update rule: the states that it keeps for the parameters, and its update for a gradient.
//!
//! Checkpoints, messages between workers and the memory plan know states only by their
//! [`StateSpec`], so a rule with other states needs no change in them. [`AdamW`](super::AdamW) is a
//! good first example, and [`Adafactor`](super::Adafactor) one with states of rows and columns.
//!
//! A rule updates either [element by element](UpdateUnit::Element), so that no bit depends on which
//! worker updates which elements or on how many there are in one call, or [tensor by
//! tensor](UpdateUnit::Tensor), in which case every tensor has one owner.

use tidemill_kernels::{Backend, Cpu, MasterMut, Slice, SliceMut};

use super::terms::{UpdateTerms, WeightDecay};
use crate::error::{ModelError, Result};
use crate::layout::{Layout, Tensor};
use crate::trainable::Device;

/// A state that an optimizer keeps for the parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StateSpec {
    /// Its name in checkpoints: the state of the tensor `T` is the tensor `<name>.T` of
    /// `optimizer.safetensors`.
    pub name: &'static str,
    /// The part of a tensor that each of its numbers belongs to.
    pub extent: StateExtent,
    /// The tensors that have it.
    pub tensors: StateTensors,
}

/// The part of a tensor that each number of a state belongs to. Tensors of more than two dimensions
/// count as [matrices](Tensor::matrix) with as many rows as their first dimension.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum StateExtent {
    /// One number for each element of the parameters.
    Element,
    /// One for each row of a tensor: the state has the shape of the first dimension.
    Row,
    /// One for each column: the state has the shape of the other dimensions.
    Column,
    /// One for the whole tensor: the state has no dimensions.
    Tensor,
}

/// The tensors that have a state, by a name and a rule: two of one name are the same.
#[derive(Clone, Copy)]
pub struct StateTensors {
    name: &'static str,
    has: fn(&Tensor) -> bool,
}

impl StateTensors {
    /// All tensors.
    pub const ALL: Self = Self::new("all tensors", |_| true);
    /// Tensors of two or more dimensions.
    pub const MATRICES: Self = Self::new("matrices", |tensor| tensor.shape.len() > 1);
    /// Tensors of one dimension or none.
    pub const VECTORS: Self = Self::new("vectors", |tensor| tensor.shape.len() <= 1);
    /// [Matrices of hidden layers](Tensor::is_hidden_matrix).
    pub const HIDDEN_MATRICES: Self = Self::new("hidden matrices", Tensor::is_hidden_matrix);
    /// All others: tables, vectors, filters.
    pub const ALL_BUT_HIDDEN_MATRICES: Self =
        Self::new("all but hidden matrices", |tensor| !tensor.is_hidden_matrix());

    /// The tensors that `has` is true of, of which errors speak by `name`. It must depend on the tensor alone: every process asks it.
    pub const fn new(name: &'static str, has: fn(&Tensor) -> bool) -> Self {
        Self { name, has }
    }

    /// Whether `tensor` has the state.
    pub fn has(&self, tensor: &Tensor) -> bool {
        (self.has)(tensor)
    }
}

impl PartialEq for StateTensors {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl Eq for StateTensors {}

impl std::hash::Hash for StateTensors {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.name.hash(state);
    }
}

impl std::fmt::Debug for StateTensors {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str(self.name)
    }
}

/// The smallest unit that one worker updates by itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum UpdateUnit {
    /// An element: workers own any elements, and a call of the rule gets any consecutive ones.
    #[default]
    Element,
    /// A tensor: each has one owner, and a call of the rule gets exactly one of them, without
    /// padding.
    Tensor,
}

impl StateSpec {
    /// The state `name` with one number for each element of every tensor.
    pub const fn of_elements(name: &'static str) -> Self {
        Self { name, extent: StateExtent::Element, tensors: StateTensors::ALL }
    }

    /// The beginning of its tensors' names in a checkpoint.
    pub fn prefix(&self) -> String {
        format!("{}.", self.name)
    }
}

/// The most states that a rule may have.
pub const MOST_STATES: usize = u8::MAX as usize;

/// Checks that files can tell `states` apart, and that a rule with this `unit` can keep them.
///
/// # Errors
/// More than 255 states, two with one name, or a name that is empty or has a dot: the text after
/// the first dot is the tensor's name. With the unit of an element, a state other than one number
/// for each element of every tensor.
pub fn check_states(states: &[StateSpec], unit: UpdateUnit) -> Result<()> {
    let wrong = |expected: &str, found: String| {
        Err(ModelError::config("the states of the update rule", expected, found))
    };
    if states.len() > MOST_STATES {
        return wrong("255 at most", states.len().to_string());
    }
    for (index, state) in states.iter().enumerate() {
        let name = state.name;
        if name.is_empty() || name.contains('.') {
            return wrong("names that are not empty and have no dot", format!("{name:?}"));
        }
        if states[..index].iter().any(|before| before.name == name) {
            return wrong("a name for each", format!("two of the name {name:?}"));
        }
        if unit == UpdateUnit::Element && *state != StateSpec::of_elements(name) {
            let found = format!("{name:?} of {:?}, {:?}", state.extent, state.tensors);
            return wrong("of a rule whose unit is no tensor, states of all elements", found);
        }
    }
    Ok(())
}

/// The arguments of one call of a rule: consecutive elements of the parameters with equal
/// [terms](UpdateTerms), or one tensor.
pub struct UpdateViews<'a, B: Backend> {
    /// The tensor of these elements, if the rule's [unit](UpdateUnit::Tensor) is a tensor.
    pub tensor: Option<&'a Tensor>,
    /// The parameters.
    pub parameters: MasterMut<'a, B>,
    /// The states of the same elements, in the order of [`UpdateRule::states`]; zeros before the
    /// first update. For a tensor, all numbers of each state, which may be none.
    pub states: Vec<SliceMut<'a, B, f32>>,
    /// The mean gradient of the same elements, before clipping.
    pub gradient: Slice<'a, B, f32>,
}

impl<'a, B: Backend> UpdateViews<'a, B> {
    /// The parameters, the `N` states and the gradient.
    ///
    /// # Errors
    /// A number of states other than `N`.
    #[expect(clippy::type_complexity, reason = "three views side by side")]
    pub fn split<const N: usize>(
        self,
    ) -> Result<(MasterMut<'a, B>, [SliceMut<'a, B, f32>; N], Slice<'a, B, f32>)> {
        let Self { parameters, states, gradient, .. } = self;
        let found = states.len();
        let states =
            states.try_into().map_err(|_| ModelError::UpdateStates { expected: N, found })?;
        Ok((parameters, states, gradient))
    }
}

/// [`UpdateViews`] in memory of the host.
pub struct HostViews<'a> {
    /// The tensor of these elements, if the rule's [unit](UpdateUnit::Tensor) is a tensor.
    pub tensor: Option<&'a Tensor>,
    /// The parameters.
    pub parameters: &'a mut [f32],
    /// The states of the same elements.
    pub states: Vec<&'a mut [f32]>,
    /// The mean gradient of the same elements.
    pub gradient: &'a [f32],
}

impl<'a> UpdateViews<'a, Cpu> {
    /// The elements in host memory, for a rule on the CPU. [`on_host`](super::on_host()) serves any
    /// device.
    pub fn on_host(self) -> HostViews<'a> {
        HostViews {
            tensor: self.tensor,
            parameters: self.parameters.into_rounded().values(),
            states: self.states.into_iter().map(SliceMut::values).collect(),
            gradient: self.gradient.values(),
        }
    }
}

/// The scalars of one update, the same on every worker.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct UpdateScalars {
    /// The number of the update, from 1.
    pub update: u64,
    /// The learning rate of these elements: the schedule's, times the factor of their group.
    pub learning_rate: f64,
    /// The learning rate of the schedule for this update, for a decay that follows the schedule
    /// alone.
    pub scheduled_rate: f64,
    /// The factor on the gradient, applied first: the clipping coefficient.
    pub gradient_scale: f32,
    /// The weight decay of these elements.
    pub weight_decay: WeightDecay,
}

impl UpdateScalars {
    /// The scalars of `update` for elements with `terms`, where the schedule has `scheduled_rate`.
    pub fn new(update: u64, scheduled_rate: f64, gradient_scale: f32, terms: UpdateTerms) -> Self {
        let UpdateTerms { learning_rate_factor, weight_decay } = terms;
        // A factor of 1 keeps every bit of the rate.
        let learning_rate = scheduled_rate * learning_rate_factor;
        Self { update, learning_rate, scheduled_rate, gradient_scale, weight_decay }
    }
}

/// The update of an optimizer. An embedder's own rule implements it for the backends that it
/// supports.
///
/// # Contract
/// - With the unit of an [element](UpdateUnit::Element), a new parameter and its new states are
///   functions of the parameter, its states and its gradient alone, and of the scalars: not of the
///   element's place, nor of the other elements in the same call.
/// - With the unit of a [tensor](UpdateUnit::Tensor), they are functions of those of the tensor,
///   and any sum over it has a fixed order.
/// - It is a pure function: the same on every worker, and after a kill too.
pub trait UpdateRule<B: Backend>: Send + Sync + 'static {
    /// The states of every parameter, the same for the whole run and for every run that continues
    /// it.
    fn states(&self) -> &[StateSpec];

    /// The smallest unit that one call gets and one worker owns whole; by default an element.
    fn unit(&self) -> UpdateUnit {
        UpdateUnit::Element
    }

    /// The most bytes of device memory that an update of a tensor of `layout` needs beside its
    /// arguments, for the memory plan of a run; by default none.
    fn scratch_bytes(&self, _layout: &Layout) -> usize {
        0
    }

    /// One update, enqueued on the stream of `device`.
    ///
    /// # Errors
    /// A device that fails.
    fn update(
        &self,
        device: &mut Device<'_, B>,
        views: UpdateViews<'_, B>,
        scalars: UpdateScalars,
    ) -> Result<()>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_that_files_cannot_tell_apart_are_refused() {
        let refused = |names: &[&'static str]| {
            let states: Vec<_> = names.iter().map(|name| StateSpec::of_elements(name)).collect();
            check_states(&states, UpdateUnit::Element).err().map(|error| error.to_string())
        };
        assert_eq!(refused(&[]), None);
        assert_eq!(refused(&["exp_avg", "exp_avg_sq"]), None);
        let said = |names| refused(names).expect("refused");
        assert!(said(&["a", "b", "a"]).contains("two of the name \"a\""));
        assert!(said(&["a.b"]).contains("no dot"));
        assert!(said(&[""]).contains("not empty"));
        assert!(said(&["a"; 256]).contains("255 at most"));
        assert_eq!(StateSpec::of_elements("exp_avg").prefix(), "exp_avg.");
        let (extent, tensors) = (StateExtent::Row, StateTensors::ALL);
        let of_rows = [StateSpec { name: "row", extent, tensors }];
        check_states(&of_rows, UpdateUnit::Tensor).expect("allowed");
        let error = check_states(&of_rows, UpdateUnit::Element).expect_err("rows are cut");
        assert!(
            error.to_string().contains("states of all elements, found \"row\" of Row"),
            "{error}"
        );
    }
}
