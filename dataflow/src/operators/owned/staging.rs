//! The state of a cut in memory of the host, from which it is written while the device goes on.

use std::ops::Range;

use tidemill_collective::StatePart;
use tidemill_kernels::{Backend, KernelError, Slice};
use tidemill_model::{Device, JoinRoom, MasterPlace, Parameters};

use crate::cluster::Failure;
use crate::cluster::progress::{self, Phase};
use crate::memory::available_bytes;
use crate::operators::error::GraphError;
use crate::operators::plan::{CheckpointCuts, TrainingPlan};

const NOT_STAGED: GraphError =
    GraphError::Order { what: "a cut", missing: "the memory that it is copied to" };

/// How the state of a cut is kept until it is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::operators) enum Staging {
    /// Where it is: it waits for its snapshot before it is updated again.
    InPlace,
    /// It is copied to memory of the host at once, and updated meanwhile.
    OnHost,
}

impl Staging {
    /// How cuts of parameters and states, `elements` together, are kept: the memory of the host decides.
    pub(super) fn of(plan: &TrainingPlan, elements: usize) -> Self {
        // That of all workers, which may be of this machine.
        let bytes = size_of::<f32>().saturating_mul(elements);
        let is_room = bytes <= plan.staging_bytes.unwrap_or_else(|| available_bytes() / 2);
        match plan.checkpoints {
            CheckpointCuts::Every(_) if is_room => Self::OnHost,
            _ => Self::InPlace,
        }
    }
}

/// Parameters and states of a worker's part, in memory of the host.
pub(super) enum Staged<B: Backend> {
    /// Cuts are not copied, or the memory is not there yet.
    Nothing,
    /// In memory that the device copies to by itself.
    Pinned(StagedParts<B::Pinned<f32>>),
    /// The same where there is no such memory.
    Read(StagedParts<Vec<f32>>),
}

/// Staged memory, by part.
pub(super) struct StagedParts<T> {
    parameters: T,
    states: Vec<T>,
}

impl<T> StagedParts<T> {
    fn part(&self, part: StatePart) -> Option<&T> {
        match part {
            StatePart::Parameter => Some(&self.parameters),
            StatePart::State(state) => self.states.get(usize::from(state)),
        }
    }
}

impl<B: Backend> Staged<B> {
    /// Takes the memory for `elements` elements of the parameters, and for as many of each state as `states` says.
    pub(super) fn prepare(
        backend: &B,
        staging: Staging,
        elements: usize,
        states: &[usize],
    ) -> Self {
        if staging == Staging::InPlace {
            return Self::Nothing;
        }
        let pinned = |elements| {
            progress::moved();
            backend.pinned::<f32>(elements)
        };
        let pinned_parts = || -> Result<_, KernelError> {
            let parameters = pinned(elements)?;
            let states =
                states.iter().map(|&elements| pinned(elements)).collect::<Result<_, _>>()?;
            Ok(StagedParts { parameters, states })
        };
        match pinned_parts() {
            Ok(pinned) => Self::Pinned(pinned),
            Err(error) => {
                tracing::warn!("{error}: steps wait for checkpoints to be copied");
                Self::read(elements, states.len())
            }
        }
    }

    /// Memory that the device does not copy to by itself.
    fn read(elements: usize, states: usize) -> Self {
        let (parameters, states) = (vec![0.0; elements], vec![Vec::new(); states]);
        Self::Read(StagedParts { parameters, states })
    }

    /// Copies the masters at the places `owned`, and the owned elements of each state, each to its place among the owned elements. The
    /// pinned copies are complete once the device stream has run.
    pub(super) fn copy(
        &mut self,
        device: &mut Device<'_, B>,
        (masters, room): (&Parameters<B>, &mut JoinRoom<B>),
        owned: impl Iterator<Item = (MasterPlace, usize)>,
        states: &[B::Buffer<f32>],
    ) -> Result<(), Failure> {
        match self {
            Self::Nothing => return Err(NOT_STAGED.into()),
            Self::Pinned(StagedParts { parameters, states: outs }) => {
                for (place, start) in owned {
                    masters.read_async(device, &place, (parameters, start), room)?;
                }
                for (state, out) in states.iter().zip(outs) {
                    device.backend.read_async(device.stream, out, 0, Slice::all(state))?;
                }
            }
            Self::Read(StagedParts { parameters, states: outs }) => {
                let _waiting = progress::during(Phase::WaitingForDevice);
                for (place, start) in owned {
                    let out = &mut parameters[start..start + place.range.len()];
                    masters.read(device, &place, out, room)?;
                }
                for (state, out) in states.iter().zip(outs) {
                    *out = device.backend.to_vec(device.stream, Slice::all(state))?;
                }
            }
        }
        Ok(())
    }

    /// Elements `inside` of the copy, if cuts are. Waits for the copy.
    pub(super) fn values(
        &self,
        backend: &B,
        part: StatePart,
        inside: Range<usize>,
    ) -> Result<Option<Vec<f32>>, Failure> {
        match self {
            Self::Nothing => Ok(None),
            Self::Pinned(pinned) => {
                let _waiting = progress::during(Phase::WaitingForDevice);
                let pinned = pinned.part(part).ok_or(NOT_STAGED)?;
                Ok(Some(backend.pinned_values(pinned)?[inside].to_vec()))
            }
            Self::Read(read) => Ok(Some(read.part(part).ok_or(NOT_STAGED)?[inside].to_vec())),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use tidemill_kernels::{Cpu, Runtime, SliceMut};
    use tidemill_model::{Decay, Held, Layout};

    use super::*;

    /// The same values are read where nothing can be pinned.
    #[test]
    fn a_copy_is_the_same_in_either_memory() {
        let backend = Cpu::new(NonZeroUsize::MIN).unwrap();
        let mut stream = backend.device_stream().unwrap();
        let mut layout = Layout::new();
        layout.segment("only");
        layout.tensor("weight", &[64], Decay::Exempt, 1);
        let arena: Vec<f32> = (0..64).map(|value| value as f32).collect();
        let mut device = Device { backend: &backend, stream: &mut stream };
        let all = MasterPlace { range: 0..64, start: 0 };
        let held = Held::whole::<Cpu>(&layout);
        let masters = Parameters::with_masters(&mut device, &layout, held, &arena, &[all]).unwrap();
        let mut room = JoinRoom::default();
        let mut states = [(); 2].map(|()| backend.allocate::<f32>(device.stream, 24).unwrap());
        for (index, state) in states.iter_mut().enumerate() {
            let values: Vec<f32> = (0..24).map(|value| (value + 100 * index) as f32).collect();
            backend.write(device.stream, SliceMut::all(state), &values).unwrap();
        }
        let place = |range: Range<usize>| MasterPlace { start: range.start, range };
        let owned = [(place(40..56), 0), (place(8..16), 16)];
        let pinned = Staged::prepare(&backend, Staging::OnHost, 24, &[24; 2]);
        assert!(matches!(pinned, Staged::Pinned(_)));
        for mut staged in [pinned, Staged::read(24, 2)] {
            let owned = owned.clone().into_iter();
            staged.copy(&mut device, (&masters, &mut room), owned, &states).unwrap();
            let values = |part, inside| staged.values(&backend, part, inside).unwrap().unwrap();
            assert_eq!(values(StatePart::Parameter, 14..18), [54.0, 55.0, 8.0, 9.0]);
            assert_eq!(values(StatePart::State(0), 22..24), [22.0, 23.0]);
            assert_eq!(values(StatePart::State(1), 0..2), [100.0, 101.0]);
            assert!(staged.values(&backend, StatePart::State(2), 0..2).is_err());
        }
        let mut nothing = Staged::<Cpu>::prepare(&backend, Staging::InPlace, 24, &[24; 2]);
        assert!(nothing.values(&backend, StatePart::State(0), 0..2).unwrap().is_none());
        assert!(
            nothing.copy(&mut device, (&masters, &mut room), owned.into_iter(), &states).is_err()
        );
    }
}
