//! AdamW's updates.

use super::{AdamWStep, Runtime};
use crate::error::Result;
use crate::master::MasterMut;
use crate::view::{Slice, SliceMut};

/// AdamW (Loshchilov and Hutter, 2019) over chunks of parameters. See the [module](super) for what every kernel promises.
pub trait AdamW: Runtime {
    /// One AdamW update of a chunk, whose `moments` are `exp_avg` (m) and `exp_avg_sq` (v): with `g = gradient * gradient_scale`,
    ///
    /// ```text
    /// p *= decay_factor
    /// m  = beta1 m + (1 - beta1) g;   v = beta2 v + (1 - beta2) g^2
    /// p -= learning_rate / bias_correction1 * m / (sqrt(v) / sqrt(bias_correction2) + eps)
    /// ```
    fn adamw(
        &self,
        stream: &mut Self::DeviceStream,
        parameters: SliceMut<'_, Self, f32>,
        moments: [SliceMut<'_, Self, f32>; 2],
        gradient: Slice<'_, Self, f32>,
        step: AdamWStep,
    ) -> Result<()>;

    /// [`adamw`](Self::adamw) of a chunk of [masters](crate::master): joined, updated with the same arithmetic, split. So
    /// what [`join_master`](super::Masters::join_master) then gives, and both moments, have the bits that `adamw` gives fp32 parameters.
    fn adamw_master(
        &self,
        stream: &mut Self::DeviceStream,
        master: MasterMut<'_, Self>,
        moments: [SliceMut<'_, Self, f32>; 2],
        gradient: Slice<'_, Self, f32>,
        step: AdamWStep,
    ) -> Result<()>;
}
