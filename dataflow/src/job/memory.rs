//! How many grains fit: what `batch.microbatch_grains = "auto"` goes by.
//!
//! An estimate from sizes, made before anything is allocated. It leaves room, and a run that does not fit all the same
//! ends with an error that says what to lower.

use tidemill_kernels::Backend;
use tidemill_kernels::shape::{ScanShape, SequenceShape};
use tidemill_model::{Layout, MambaConfig, ModelError};

use crate::batch::{BatchSettings, MicrobatchMemory};
use crate::device::{Devices, WithBackend};
use crate::error::Result;

/// Of a device's free memory, what is planned with: allocators round up, and libraries take some.
const PLANNED_TENTHS: usize = 9;

/// Plans the memory of a worker.
pub(super) struct PlanMemory<'a> {
    pub model: &'a MambaConfig,
    pub layout: &'a Layout,
    pub batch: &'a BatchSettings,
    /// t
    pub positions: usize,
    /// Workers of this process.
    pub workers: usize,
    /// Of them, the most that one device computes for.
    pub workers_per_device: usize,
}

impl WithBackend for PlanMemory<'_> {
    type Output = Result<MicrobatchMemory>;

    fn run<B: Backend>(self, devices: Devices<B>) -> Self::Output {
        let backend = devices.first().as_ref();
        let workspace_bytes = match backend.free_memory_bytes().map_err(ModelError::from)? {
            None => available_bytes() / 2 / self.workers.max(1),
            Some(free) => {
                let share = free / 10 * PLANNED_TENTHS / self.workers_per_device.max(1);
                share.saturating_sub(self.state_bytes(backend))
            }
        };
        Ok(MicrobatchMemory { sample_bytes: self.sample_bytes(backend)?, workspace_bytes })
    }
}

impl PlanMemory<'_> {
    /// About what one sample needs in a workspace: what each layer keeps for its backward pass, and the scratch of
    /// one layer.
    fn sample_bytes<B: Backend>(&self, backend: &B) -> Result<usize> {
        let Self { model, positions, .. } = *self;
        let (d, e) = (model.d_model, model.d_inner());
        let narrow = model.dt_rank + 2 * model.d_state;
        let one = SequenceShape::new(1, positions).map_err(ModelError::from)?;
        let scan = ScanShape::new(one, 1, e, model.d_state).map_err(ModelError::from)?;
        let saved_by_scan = backend.selective_scan_saved_elements(scan);
        let activation = size_of::<B::Activation>();
        let kept = activation * positions * (3 * e + narrow) + 4 * (positions * d + saved_by_scan);
        let forward = activation * (d + 2 * e);
        let backward = activation * (d + 5 * e + narrow) + 3 * 4 * d;
        let of_parameters = 4 * (3 * e + e * model.d_state + e * model.d_conv + d);
        Ok(model.n_layers * kept + positions * (forward + backward) + of_parameters)
    }

    /// About what a worker holds beside its workspace, where it has a memory of its own: parameters, their
    /// copies in activation precision, moments, the mean gradient, sums of lanes, and a chunk of logits.
    fn state_bytes<B: Backend>(&self, backend: &B) -> usize {
        let lanes = self.batch.resolved_lanes().div_ceil(self.workers.max(1));
        let accumulators = 1 + lanes.max(1).ilog2() as usize;
        let activation = size_of::<B::Activation>();
        let copies = if activation == size_of::<f32>() { 0 } else { activation };
        let logits = backend.logit_chunk_rows() * self.model.vocab_size * activation;
        let parameters = self.layout.parameter_elements() * (4 + copies + 8 + 4);
        parameters + 4 * accumulators * self.layout.gradient_elements() + logits
    }
}

/// Memory that the system could give now; 2 GiB where it does not say.
fn available_bytes() -> usize {
    const UNKNOWN: usize = 2 << 30;
    let Ok(text) = std::fs::read_to_string("/proc/meminfo") else { return UNKNOWN };
    text.lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))
        .and_then(|rest| rest.trim().strip_suffix("kB")?.trim().parse::<usize>().ok())
        .map_or(UNKNOWN, |kib| kib << 10)
}
