//! Masters and the parameters that they are of.

use super::Runtime;
use crate::error::Result;
use crate::master::{Master, MasterMut, Run};
use crate::view::{Slice, SliceMut};

/// Parameters split into [masters](crate::master), and joined. See the [module](super) for what every kernel promises.
pub trait Masters: Runtime {
    /// `out` is the [master](crate::master) of `from`: a copy of it where activations are fp32.
    fn split_master(
        &self,
        stream: &mut Self::DeviceStream,
        out: MasterMut<'_, Self>,
        from: Slice<'_, Self, f32>,
    ) -> Result<()>;

    /// For each of `runs`, in the order of their places in `out`: `out[to + i]` becomes the fp32 parameter whose
    /// [master](crate::master) is `from[from + i]`, which is the parameter that was split, to the bit, unless it is NaN. The rest
    /// of `out` stays as it is.
    fn join_master(
        &self,
        stream: &mut Self::DeviceStream,
        out: SliceMut<'_, Self, f32>,
        from: Master<'_, Self>,
        runs: &[Run],
    ) -> Result<()>;
}
