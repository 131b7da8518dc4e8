//! [`Elementwise`] for [`Cpu`].

use crate::backend::{Elementwise, Values, ValuesMut, check_axpby};
use crate::cpu::axpby::axpby;
use crate::cpu::rows::{elements, elements_mut};
use crate::cpu::{Cpu, DeviceStream};
use crate::error::Result;

impl Elementwise for Cpu {
    fn axpby(
        &self,
        stream: &mut DeviceStream,
        out: ValuesMut<'_, Self>,
        keep: f32,
        factor: f32,
        x: Values<'_, Self>,
    ) -> Result<()> {
        check_axpby(&out, &x)?;
        let (ValuesMut::Fp32(out) | ValuesMut::Activations(out)) = out;
        let (Values::Fp32(x) | Values::Activations(x)) = x;
        axpby(stream.threads(), self.dispatch, elements_mut(out), keep, factor, elements(x));
        Ok(())
    }
}
