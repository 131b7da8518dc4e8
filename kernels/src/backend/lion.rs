//! Lion's updates.

use super::{LionStep, Runtime};
use crate::error::Result;
use crate::master::MasterMut;
use crate::view::{Slice, SliceMut};

/// Lion (Chen et al., 2023) over chunks of masters. See the [module](super) for what every kernel promises.
pub trait Lion: Runtime {
    /// One Lion update of a chunk of [masters](crate::master): with `g = gradient * gradient_scale`,
    ///
    /// ```text
    /// p = p decay_factor - learning_rate sign(beta1 m + (1 - beta1) g)
    /// m = beta2 m + (1 - beta2) g
    /// ```
    fn lion(
        &self,
        stream: &mut Self::DeviceStream,
        master: MasterMut<'_, Self>,
        exp_avg: SliceMut<'_, Self, f32>,
        gradient: Slice<'_, Self, f32>,
        step: LionStep,
    ) -> Result<()>;
}
