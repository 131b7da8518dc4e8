//! Runs an update rule on the host, for any device.

use tidemill_kernels::{Backend, Run, Slice, SliceMut};

use super::rule::{HostViews, UpdateViews};
use crate::error::Result;
use crate::trainable::Device;

/// Copies the contents of `views` to the host, lets `change` change them there, and copies them
/// back. The numbers are the same on every device; on a GPU the copies make it slow. Parameters are
/// the fp32 masters, also where products read them in bf16.
///
/// # Errors
/// An error of `change`, which leaves everything as it was; a device that fails, or lacks the
/// memory for one more copy of the parameters in these views.
pub fn on_host<B: Backend>(
    Device { backend, stream }: &mut Device<'_, B>,
    views: UpdateViews<'_, B>,
    change: impl FnOnce(HostViews<'_>) -> Result<()>,
) -> Result<()> {
    let UpdateViews { tensor, parameters, states, gradient } = views;
    let elements = parameters.elements();
    let mut joined = backend.allocate::<f32>(stream, elements)?;
    let all = Run::all(elements);
    backend.join_master(stream, SliceMut::all(&mut joined), parameters.as_master(), &all)?;
    let mut values = backend.to_vec(stream, Slice::all(&joined))?;
    let gradient = backend.to_vec(stream, gradient)?;
    let copies = states.iter().map(|state| backend.to_vec(stream, state.as_slice()));
    let mut copies = copies.collect::<tidemill_kernels::Result<Vec<_>>>()?;
    change(HostViews {
        tensor,
        parameters: &mut values,
        states: copies.iter_mut().map(Vec::as_mut_slice).collect(),
        gradient: &gradient,
    })?;
    backend.write(stream, SliceMut::all(&mut joined), &values)?;
    backend.split_master(stream, parameters, Slice::all(&joined))?;
    for (state, copy) in states.into_iter().zip(&copies) {
        backend.write(stream, state, copy)?;
    }
    Ok(())
}
