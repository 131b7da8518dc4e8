//! An update rule: which states it keeps of the parameters, and what it does with a gradient.
//!
//! Checkpoints, messages between workers and the plan of memory know states by what a [`StateSpec`] says only: a rule of other
//! states needs nothing of them. [`AdamW`](super::AdamW) is one to begin reading with, [`Adafactor`](super::Adafactor) one of states
//! of rows and columns.
//!
//! A rule computes [element by element](UpdateUnit::Element), so that no bit depends on which worker updates which elements, and
//! how many in one call; or [tensor by tensor](UpdateUnit::Tensor), and then every tensor has one owner.

use tidemill_kernels::{Backend, Cpu, MasterMut, Slice, SliceMut};

use super::terms::{UpdateTerms, WeightDecay};
use crate::error::{ModelError, Result};
use crate::layout::{Layout, Tensor};
use crate::trainable::Device;

/// What an optimizer keeps beside the parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StateSpec {
    /// What checkpoints call it: the state of the tensor `T` is the tensor `<name>.T` of `optimizer.safetensors`.
    pub name: &'static str,
    /// What there is one number of.
    pub extent: StateExtent,
    /// Which tensors have it.
    pub tensors: StateTensors,
}

/// What there is one number of a state of. Tensors of more than two dimensions are [matrices](Tensor::matrix) of as many rows as
/// their first dimension has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum StateExtent {
    /// Each element of the parameters.
    Element,
    /// Each row of a tensor: the state has the shape of the first dimension.
    Row,
    /// Each column: the state has the shape of the other dimensions.
    Column,
    /// Each tensor: the state is one number, of no dimensions.
    Tensor,
}

/// Which tensors have a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum StateTensors {
    /// Every one.
    All,
    /// Those of two or more dimensions.
    Matrices,
    /// Those of one dimension or none.
    Vectors,
    /// [Matrices of hidden layers](Tensor::is_hidden_matrix).
    HiddenMatrices,
    /// All others: tables, vectors, filters.
    AllButHiddenMatrices,
}

impl StateTensors {
    /// Whether `tensor` has it.
    pub fn has(self, tensor: &Tensor) -> bool {
        match self {
            Self::All => true,
            Self::Matrices => tensor.shape.len() > 1,
            Self::Vectors => tensor.shape.len() <= 1,
            Self::HiddenMatrices => tensor.is_hidden_matrix(),
            Self::AllButHiddenMatrices => !tensor.is_hidden_matrix(),
        }
    }
}

/// What one worker updates by itself, at the least.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum UpdateUnit {
    /// An element: workers own any elements, and a call of the rule has any run of them.
    #[default]
    Element,
    /// A tensor: each has one owner, and a call of the rule has exactly one of them, without padding.
    Tensor,
}

impl StateSpec {
    /// The state `name` of each element of every tensor.
    pub const fn of_elements(name: &'static str) -> Self {
        Self { name, extent: StateExtent::Element, tensors: StateTensors::All }
    }

    /// What the names of its tensors in a checkpoint begin with.
    pub fn prefix(&self) -> String {
        format!("{}.", self.name)
    }
}

/// The most states that a rule may have.
pub const MOST_STATES: usize = u8::MAX as usize;

/// Checks that files can tell `states` apart, and that a rule of this `unit` can keep them.
///
/// # Errors
/// More than 255 states, two of one name, or a name that is empty or has a dot: what follows the first dot is the tensor's. States of
/// something else than each element of every tensor where a call has any elements.
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

/// What one call of a rule updates: consecutive elements of the parameters, all of the same [terms](UpdateTerms), or one tensor.
pub struct UpdateViews<'a, B: Backend> {
    /// The tensor that these are, where that is the rule's [unit](UpdateUnit::Tensor).
    pub tensor: Option<&'a Tensor>,
    /// The parameters.
    pub parameters: MasterMut<'a, B>,
    /// The states of the same elements, in the order of [`UpdateRule::states`]; zeros before the first update. Of a tensor as many
    /// numbers as it has of each state, which may be none.
    pub states: Vec<SliceMut<'a, B, f32>>,
    /// The mean gradient of the same elements, before clipping.
    pub gradient: Slice<'a, B, f32>,
}

impl<'a, B: Backend> UpdateViews<'a, B> {
    /// The parameters, the `N` states and the gradient.
    ///
    /// # Errors
    /// Another number of states.
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
    /// The tensor that these are, where that is the rule's [unit](UpdateUnit::Tensor).
    pub tensor: Option<&'a Tensor>,
    /// The parameters.
    pub parameters: &'a mut [f32],
    /// The states of the same elements.
    pub states: Vec<&'a mut [f32]>,
    /// The mean gradient of the same elements.
    pub gradient: &'a [f32],
}

impl<'a> UpdateViews<'a, Cpu> {
    /// The elements as they lie in memory: what a rule on the CPU computes with. [`on_host`](super::on_host()) is for any device.
    pub fn on_host(self) -> HostViews<'a> {
        HostViews {
            tensor: self.tensor,
            parameters: self.parameters.into_rounded().values(),
            states: self.states.into_iter().map(SliceMut::values).collect(),
            gradient: self.gradient.values(),
        }
    }
}

/// The numbers of one update, the same on every worker.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct UpdateScalars {
    /// Which update it is, from 1.
    pub update: u64,
    /// The learning rate of these elements: the schedule's, times the factor of their group.
    pub learning_rate: f64,
    /// The learning rate as the schedule has it for this update, which a decay that follows the schedule alone goes by.
    pub scheduled_rate: f64,
    /// What the gradient is multiplied by first: the clipping coefficient.
    pub gradient_scale: f32,
    /// Which weight decay applies to these elements.
    pub weight_decay: WeightDecay,
}

impl UpdateScalars {
    /// Those of `update` for elements of `terms`, where the schedule has `scheduled_rate`.
    pub fn new(update: u64, scheduled_rate: f64, gradient_scale: f32, terms: UpdateTerms) -> Self {
        let UpdateTerms { learning_rate_factor, weight_decay } = terms;
        // A factor of 1 leaves every bit of the rate.
        let learning_rate = scheduled_rate * learning_rate_factor;
        Self { update, learning_rate, scheduled_rate, gradient_scale, weight_decay }
    }
}

/// What an optimizer does with a gradient. A user's own implements it for the backends that it knows.
///
/// # Contract
/// - Where its unit is an [element](UpdateUnit::Element), a new parameter and its new states are functions of the parameter, its
///   states and its gradient alone, and of the scalars: not of where the element stands, nor of what else is updated in the same call.
/// - Where it is a [tensor](UpdateUnit::Tensor), they are functions of those of the tensor, and any sum over it has one order.
/// - It is a pure function: the same on every worker, and after a kill too.
pub trait UpdateRule<B: Backend>: Send + Sync + 'static {
    /// The states that it keeps of every parameter, the same for the whole of a run and of those that go on from it.
    fn states(&self) -> &[StateSpec];

    /// What one call has at the least, and one worker owns whole: an element, where nothing else is said.
    fn unit(&self) -> UpdateUnit {
        UpdateUnit::Element
    }

    /// The most bytes of the device's memory that an update of a tensor of `layout` takes beside its arguments: what a run plans with.
    /// None, where nothing else is said.
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
        let (extent, tensors) = (StateExtent::Row, StateTensors::All);
        let of_rows = [StateSpec { name: "row", extent, tensors }];
        check_states(&of_rows, UpdateUnit::Tensor).expect("allowed");
        let error = check_states(&of_rows, UpdateUnit::Element).expect_err("rows are cut");
        assert!(
            error.to_string().contains("states of all elements, found \"row\" of Row"),
            "{error}"
        );
    }
}
