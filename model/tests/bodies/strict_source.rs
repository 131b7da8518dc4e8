//! A source with exactly the tensors that the layout declares for the block entered last, copied
//! when the block is entered: all other memory is NaN, also that of a block once another is
//! entered. Each precision has memory of its own, also if activations are fp32.

use tidemill_kernels::backend::ActivationElement;
use tidemill_kernels::{Backend, Slice, SliceMut};
use tidemill_model::{
    BlockWalk, Device, Direction, Layout, Lease, PackedTensor, Packing, ParameterSource,
    Parameters, Result,
};

/// The tensors that one use reads.
struct Slot<B: Backend> {
    packing: Packing,
    fp32: B::Buffer<f32>,
    activation: B::Buffer<B::Activation>,
}

/// Tensors that stay NaN although the layout declares them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Withheld {
    Nothing,
    /// A tensor of a use in fp32.
    Fp32 {
        use_index: usize,
        tensor: usize,
    },
    /// A tensor of a use in activation precision.
    Activation {
        use_index: usize,
        tensor: usize,
    },
    /// A use in the backward pass of its block.
    Backward {
        use_index: usize,
    },
}

pub struct StrictSource<'a, B: Backend> {
    parameters: &'a Parameters<B>,
    layout: &'a Layout,
    walk: BlockWalk<'a>,
    /// One for each use.
    slots: Vec<Slot<B>>,
    withheld: Withheld,
    /// The blocks entered, in order.
    pub entered: Vec<(usize, Direction)>,
}

impl<'a, B: Backend> StrictSource<'a, B> {
    pub fn new(
        device: &mut Device<'_, B>,
        parameters: &'a Parameters<B>,
        layout: &'a Layout,
        withheld: Withheld,
    ) -> Result<Self> {
        let slot = |use_index| {
            let Device { backend, stream } = &mut *device;
            let packing = Packing::new(layout, use_index);
            let mut slot = Slot {
                fp32: backend.allocate(stream, packing.fp32_elements())?,
                activation: backend.allocate(stream, packing.activation_elements())?,
                packing,
            };
            slot.poison(device)?;
            Ok(slot)
        };
        let slots = (0..layout.uses().len()).map(slot).collect::<Result<_>>()?;
        let walk = BlockWalk::new(layout);
        Ok(Self { parameters, layout, walk, slots, withheld, entered: Vec::new() })
    }
}

impl<B: Backend> Slot<B> {
    /// Fills both memories with NaN.
    fn poison(&mut self, device: &mut Device<'_, B>) -> Result<()> {
        let Device { backend, stream } = device;
        let values = vec![f32::NAN; self.packing.fp32_elements()];
        backend.write(stream, SliceMut::all(&mut self.fp32), &values)?;
        let value = <B::Activation as ActivationElement>::rounded(f32::NAN);
        let values = vec![value; self.packing.activation_elements()];
        Ok(backend.write(stream, SliceMut::all(&mut self.activation), &values)?)
    }

    /// Copies one tensor to where it begins in fp32 and in activation precision.
    fn fill(
        &mut self,
        device: &mut Device<'_, B>,
        parameters: &Parameters<B>,
        tensor: &PackedTensor,
        [fp32, activation]: [Option<usize>; 2],
    ) -> Result<()> {
        let Device { backend, stream } = device;
        let elements = tensor.range.len();
        if let Some(start) = fp32 {
            let out = SliceMut::new(&mut self.fp32, start, elements)?;
            let place = parameters.held().fp32_place(&tensor.range).expect("all of it is held");
            backend.copy(stream, out, parameters.in_fp32(place)?)?;
        }
        if let Some(start) = activation {
            let out = SliceMut::new(&mut self.activation, start, elements)?;
            backend.copy(stream, out, parameters.rounded(tensor.range.clone())?)?;
        }
        Ok(())
    }
}

impl<B: Backend> ParameterSource<B> for StrictSource<'_, B> {
    fn enter(
        &mut self,
        device: &mut Device<'_, B>,
        block: usize,
        direction: Direction,
    ) -> Result<()> {
        let before = self.walk.entered().map(|(before, _)| before);
        self.walk.enter(block, direction)?;
        self.entered.push((block, direction));
        for (of_block, slot) in self.layout.uses().iter().zip(&mut self.slots) {
            if Some(of_block.block) == before {
                slot.poison(device)?;
            }
        }
        for use_index in self.layout.read_uses(block, direction) {
            if direction == Direction::Backward
                && self.withheld == (Withheld::Backward { use_index })
            {
                continue;
            }
            let slot = &mut self.slots[use_index];
            for (index, tensor) in slot.packing.tensors().to_vec().iter().enumerate() {
                let mut starts = [tensor.fp32_start, tensor.activation_start];
                if self.withheld == (Withheld::Fp32 { use_index, tensor: index }) {
                    starts[0] = None;
                }
                if self.withheld == (Withheld::Activation { use_index, tensor: index }) {
                    starts[1] = None;
                }
                slot.fill(device, self.parameters, tensor, starts)?;
            }
        }
        Ok(())
    }

    fn lease(&self, use_index: usize) -> Result<Lease<'_, B>> {
        self.walk.of_entered(use_index)?;
        let Slot { packing, fp32, activation } = &self.slots[use_index];
        Lease::packed(packing, Slice::all(fp32), Slice::all(activation))
    }
}
