//! Masters, which in fp32 are the parameters themselves.

use super::rows::{elements, elements_mut, exactly};
use super::{Cpu, DeviceStream};
use crate::backend::Masters;
use crate::error::Result;
use crate::master::{Master, MasterMut, Run, check_runs};
use crate::view::{Slice, SliceMut};

impl Masters for Cpu {
    fn split_master(
        &self,
        _: &mut DeviceStream,
        out: MasterMut<'_, Cpu>,
        from: Slice<'_, Cpu, f32>,
    ) -> Result<()> {
        let out = elements_mut(out.rounded);
        out.copy_from_slice(exactly("split_master", "from", from, out.len())?);
        Ok(())
    }

    fn join_master(
        &self,
        _: &mut DeviceStream,
        out: SliceMut<'_, Cpu, f32>,
        from: Master<'_, Cpu>,
        runs: &[Run],
    ) -> Result<()> {
        check_runs(runs, from.elements(), out.elements)?;
        let (from, out) = (elements(from.rounded), elements_mut(out));
        for Run { from: run, to } in runs {
            out[*to..][..run.len()].copy_from_slice(&from[run.clone()]);
        }
        Ok(())
    }
}
