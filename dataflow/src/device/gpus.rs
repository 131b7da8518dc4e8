//! GPUs of one maker: whether there are any, and backends on them.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::sync::Arc;

use tidemill_kernels::gpu::{self, Installed};
use tidemill_kernels::{Bf16, Fp32, Gpu, KernelError};
use tidemill_model::ModelError;

use super::choice::{Gpus, NoGpu};
use super::maker::Maker;
use super::{Devices, Precision, WithBackend, WorkerDevice};
use crate::error::{JobError, Result};

/// All GPUs; the first can be opened.
pub(super) fn usable<D: Installed>() -> std::result::Result<Gpus, NoGpu> {
    let found = D::device_count().map_err(|error| no_gpu(error, 0))?;
    let all = NonZeroUsize::new(found).ok_or_else(|| {
        let why = "the driver shows no GPU".to_owned();
        NoGpu { why, gpus: 0, failure: None }
    })?;
    D::open(0).map_err(|error| no_gpu(error, found))?;
    let together = D::together().map_err(|error| no_gpu(error, found))?;
    Ok(Gpus { all, together: NonZeroUsize::new(together).unwrap_or(NonZeroUsize::MIN) })
}

fn no_gpu(error: KernelError, gpus: usize) -> NoGpu {
    if error.may_succeed_later() {
        NoGpu { why: error.to_string(), gpus, failure: Some(error) }
    } else {
        NoGpu { why: reason(error), gpus, failure: None }
    }
}

/// Opens the GPU of each worker, each GPU once, and runs `code` on them.
pub(super) fn open<D: Installed, W: WithBackend>(
    maker: Maker,
    ordinals: &[usize],
    precision: Precision,
    code: W,
) -> Result<W::Output> {
    match precision {
        Precision::Fp32 => Ok(code.run(devices::<D, Fp32>(maker, ordinals, precision)?)),
        Precision::Bf16 => Ok(code.run(devices::<D, Bf16>(maker, ordinals, precision)?)),
    }
}

fn devices<D: Installed, P: gpu::Precision>(
    maker: Maker,
    ordinals: &[usize],
    precision: Precision,
) -> Result<Devices<Gpu<D, P>>> {
    let mut opened = BTreeMap::new();
    let mut workers = Vec::with_capacity(ordinals.len());
    for &ordinal in ordinals {
        let device: &WorkerDevice<Gpu<D, P>> = match opened.entry(ordinal) {
            std::collections::btree_map::Entry::Occupied(known) => known.into_mut(),
            std::collections::btree_map::Entry::Vacant(place) => {
                place.insert(open_one(maker, ordinal)?)
            }
        };
        workers.push(device.clone());
    }
    Devices::new(workers, precision)
}

fn open_one<D: Installed, P: gpu::Precision>(
    maker: Maker,
    ordinal: usize,
) -> Result<WorkerDevice<Gpu<D, P>>> {
    let driver = D::open(ordinal).map_err(|error| match error {
        KernelError::Unavailable { .. } | KernelError::UnsupportedArchitecture { .. } => {
            JobError::Device { key: "device.backend", backend: maker.backend(), why: reason(error) }
        }
        other => ModelError::from(other).into(),
    })?;
    let name = driver.properties().name.clone();
    Ok(WorkerDevice { backend: Arc::new(Gpu::new(driver)), name, ordinal })
}

/// Why a GPU cannot be had, without saying again that it cannot.
fn reason(error: KernelError) -> String {
    match error {
        KernelError::Unavailable { reason, .. } => reason,
        other => other.to_string(),
    }
}
