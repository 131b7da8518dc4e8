//! Masters of parameters: the fp32 values that an optimizer updates. Matrix products read the upper
//! part of a master in place.
//!
//! Where activations are fp32, products read the master itself. In bf16 they read a rounded copy. A
//! copy beside an fp32 master takes six bytes a parameter; here a master *is* the copy, with the
//! sixteen bits that rounding removed beside it: four bytes. Megatron-LM's precision-aware
//! optimizer stores the same (`store_param_remainders` of Transformer Engine's `FusedAdam`).
//!
//! ```text
//! split: rounded = (bits + 0x8000) >> 16;  remainder = bits & 0xffff
//! join:  bits = (rounded << 16 | remainder) - (remainder >= 0x8000 ? 0x10000 : 0)
//! ```
//!
//! So the copy is the nearest bf16, and of two equally near ones that of the larger magnitude:
//! sixteen bits could not record whether a tie to even went up or down. Joining restores the bits
//! that were split, also of negative zero, subnormals, infinities and finite numbers whose copy is
//! infinite.
//!
//! A NaN stays a NaN, in the copy and joined, but loses the lower half of its payload: its copy is
//! its upper half, made quiet, and its remainder is zero. If it were rounded as a number,
//! `0x7fffffff`, which is the NaN of NVIDIA's arithmetic, would become a copy of -0.0, and products
//! would not show that training has failed.
//!
//! [`Masters::split_master`](crate::backend::Masters::split_master) and [`join_master`](crate::backend::Masters::join_master) go from one form to
//! the other, [`adamw_master`](crate::backend::AdamW::adamw_master) updates a master; [`reference::master`](crate::reference::master)
//! is the definition.

use std::ops::Range;

use crate::backend::{ActivationElement, Runtime};
use crate::error::{KernelError, Result};
use crate::view::{Slice, SliceMut};

/// The elements of the remainder of `elements` parameters: as many, or none where activations are fp32.
pub fn remainder_elements<B: Runtime>(elements: usize) -> usize {
    elements * B::Activation::REMAINDERS
}

fn check_remainder<B: Runtime>(rounded: usize, remainder: usize) -> Result<()> {
    let expected = remainder_elements::<B>(rounded);
    if remainder == expected {
        return Ok(());
    }
    let expected = format!("{expected} elements beside {rounded} that are rounded");
    Err(KernelError::shape("view", "remainder of a master", expected, remainder))
}

/// Consecutive masters that are joined, and their place in the output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Run {
    /// The masters.
    pub from: Range<usize>,
    /// The place of the first in the output.
    pub to: usize,
}

impl Run {
    /// All of `elements` masters, to the same places.
    pub fn all(elements: usize) -> [Self; 1] {
        [Self { from: 0..elements, to: 0 }]
    }
}

/// Checks that `runs` lie inside `masters` masters and `out` elements, and that their places in the output are in ascending order
/// without overlap.
pub(crate) fn check_runs(runs: &[Run], masters: usize, out: usize) -> Result<()> {
    const KERNEL: &str = "join_master";
    let mut written = 0;
    for Run { from, to } in runs {
        if from.start > from.end || from.end > masters {
            let expected = format!("a range of {masters} masters");
            return Err(KernelError::shape(KERNEL, "run", expected, format!("{from:?}")));
        }
        if *to < written || *to > out || from.len() > out - to {
            let expected = format!("a place from {written} to {out} for {} elements", from.len());
            return Err(KernelError::shape(KERNEL, "out of a run", expected, to));
        }
        written = to + from.len();
    }
    Ok(())
}

/// Masters of consecutive parameters, read by a kernel.
pub struct Master<'a, B: Runtime> {
    /// The parameters as matrix products read them: rounded to activation precision.
    pub(crate) rounded: Slice<'a, B, B::Activation>,
    /// The lower 16 bits of each parameter, which rounding removed; empty where activations are fp32.
    pub(crate) remainder: Slice<'a, B, u16>,
}

/// Masters of consecutive parameters, written by a kernel.
pub struct MasterMut<'a, B: Runtime> {
    /// The parameters as matrix products read them: rounded to activation precision.
    pub(crate) rounded: SliceMut<'a, B, B::Activation>,
    /// The lower 16 bits of each parameter, which rounding removed; empty where activations are fp32.
    pub(crate) remainder: SliceMut<'a, B, u16>,
}

impl<B: Runtime> Clone for Master<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<B: Runtime> Copy for Master<'_, B> {}

impl<'a, B: Runtime> Master<'a, B> {
    /// The master of which `rounded` is the copy that products read, and `remainder` the rest.
    ///
    /// # Errors
    /// A remainder without the [elements](remainder_elements) that belong to the copy.
    pub fn new(rounded: Slice<'a, B, B::Activation>, remainder: Slice<'a, B, u16>) -> Result<Self> {
        check_remainder::<B>(rounded.elements, remainder.elements)?;
        Ok(Self { rounded, remainder })
    }

    /// The number of parameters.
    pub fn elements(&self) -> usize {
        self.rounded.elements
    }

    /// The parameters as matrix products read them: rounded to activation precision.
    pub fn rounded(self) -> Slice<'a, B, B::Activation> {
        self.rounded
    }

    /// The lower 16 bits of each parameter, which rounding removed; empty where activations are fp32.
    pub fn remainder(self) -> Slice<'a, B, u16> {
        self.remainder
    }

    /// `elements` parameters from `start`, counted inside this master.
    ///
    /// # Errors
    /// A range that leaves the master.
    pub fn sub(self, start: usize, elements: usize) -> Result<Self> {
        let rounded = self.rounded.sub(start, elements)?;
        let [start, elements] = [start, elements].map(remainder_elements::<B>);
        Ok(Self { rounded, remainder: self.remainder.sub(start, elements)? })
    }
}

impl<'a, B: Runtime> MasterMut<'a, B> {
    /// The master of which `rounded` is the copy that products read, and `remainder` the rest.
    ///
    /// # Errors
    /// A remainder without the [elements](remainder_elements) that belong to the copy.
    pub fn new(
        rounded: SliceMut<'a, B, B::Activation>,
        remainder: SliceMut<'a, B, u16>,
    ) -> Result<Self> {
        check_remainder::<B>(rounded.elements, remainder.elements)?;
        Ok(Self { rounded, remainder })
    }

    /// The number of parameters.
    pub fn elements(&self) -> usize {
        self.rounded.elements
    }

    /// `elements` parameters from `start`, counted inside this master; the master itself is given up.
    ///
    /// # Errors
    /// A range that leaves the master.
    pub fn sub(self, start: usize, elements: usize) -> Result<Self> {
        let rounded = self.rounded.sub(start, elements)?;
        let [start, elements] = [start, elements].map(remainder_elements::<B>);
        Ok(Self { rounded, remainder: self.remainder.sub(start, elements)? })
    }

    /// The parameters as matrix products read them, the parameters themselves where activations are fp32; the remainder is given
    /// up.
    pub fn into_rounded(self) -> SliceMut<'a, B, B::Activation> {
        self.rounded
    }

    /// The same master for a shorter time.
    pub fn reborrow(&mut self) -> MasterMut<'_, B> {
        MasterMut { rounded: self.rounded.reborrow(), remainder: self.remainder.reborrow() }
    }

    /// The same master, read only.
    pub fn as_master(&self) -> Master<'_, B> {
        Master { rounded: self.rounded.as_slice(), remainder: self.remainder.as_slice() }
    }
}
