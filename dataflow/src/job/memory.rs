//! How many grains fit: what `batch.microbatch_grains = "auto"` goes by.
//!
//! An estimate from sizes, made before anything is allocated. It leaves room, and a run that does not fit all the same
//! ends with an error that says what to lower.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use tidemill_collective::{BUCKET_ELEMENTS, CHUNK_ELEMENTS, Tree, lane_cut};
use tidemill_kernels::Backend;
use tidemill_model::{Model, ModelError};

use crate::batch::{BatchSettings, MicrobatchMemory};
use crate::device::{Devices, WithBackend};
use crate::error::Result;
use crate::memory::available_bytes;
use crate::operators::plan::cut;

/// Of a device's free memory, what is planned with: allocators round up, and libraries take some.
const PLANNED_TENTHS: usize = 9;

/// Plans the memory of a worker.
pub(crate) struct PlanMemory<'a> {
    pub model: &'a Model,
    pub batch: &'a BatchSettings,
    /// t
    pub positions: usize,
    /// Workers of all processes, or of those on this machine.
    pub workers: usize,
    /// Of them, those of this process.
    pub workers_of_process: usize,
    /// Of them, the most that one device computes for.
    pub workers_per_device: usize,
}

impl WithBackend for PlanMemory<'_> {
    type Output = Result<MicrobatchMemory>;

    fn run<B: Backend>(self, devices: Devices<B>) -> Self::Output {
        let backend = devices.first().as_ref();
        let workspace_bytes = match least_free(&devices)? {
            None => available_bytes() / 2 / self.workers.max(1),
            Some(free) => self.share(free).saturating_sub(self.state_bytes(backend, self.workers)),
        };
        Ok(MicrobatchMemory {
            sample_bytes: self.model.sample_bytes(backend, self.positions)?,
            workspace_bytes,
        })
    }
}

impl PlanMemory<'_> {
    /// What of a device's `free` bytes one worker may plan with. All processes on this machine plan before any of them
    /// allocates, so each finds the same free.
    fn share(&self, free: usize) -> usize {
        free / 10 * PLANNED_TENTHS / self.workers_per_device.max(1)
    }

    /// About what a worker holds beside its workspace, where it has a memory of its own: parameters and their copies in
    /// activation precision; of what it owns moments, the mean gradient and, of several workers, sums; sums of lanes, and a
    /// chunk of logits.
    fn state_bytes<B: Backend>(&self, backend: &B, workers: usize) -> usize {
        const FP32: usize = size_of::<f32>();
        let layout = self.model.layout();
        let (parameters, gradients) = (layout.parameter_elements(), layout.gradient_elements());
        let activation = size_of::<B::Activation>();
        let copies = if activation == FP32 { 0 } else { activation };
        let logits = backend.logit_chunk_rows() * self.model.vocab_size() * activation;
        let workers = workers.max(1);
        let sums = if workers == 1 { 0 } else { FP32 * gradients };
        let owned = (3 * FP32 * parameters + sums).div_ceil(workers);
        let accumulators = FP32 * self.accumulators(workers) * gradients;
        // A run of one process has all its workers in that one, however many.
        let has_others = self.workers > self.workers_of_process;
        let exchanged = if has_others { self.exchanged_bytes() } else { 0 };
        parameters * (FP32 + copies) + owned + accumulators + exchanged + logits
    }

    /// About what it takes to exchange gradients with other processes: what is received of a bucket, and what the library keeps.
    fn exchanged_bytes(&self) -> usize {
        const LIBRARY_BYTES: usize = 512 << 20;
        let (_, buckets) = cut(self.model.layout(), CHUNK_ELEMENTS, BUCKET_ELEMENTS);
        let gradients = buckets.buckets().iter().map(|b| b.slots.len() * b.range.len());
        size_of::<f32>() * gradients.max().unwrap_or(0) + LIBRARY_BYTES
    }

    /// The fewest devices like these on which microbatches of `samples` samples fit, each with one worker; `None` where that is not
    /// known, or no number of them would do.
    ///
    /// # Errors
    /// A device that does not say how much memory it has, or a model that does not take such samples.
    fn fitting_devices<B: Backend>(
        &self,
        devices: &Devices<B>,
        samples: usize,
    ) -> Result<Option<usize>> {
        let Some(free) = least_free(devices)? else { return Ok(None) };
        let backend = devices.first().as_ref();
        let workspace = self.model.sample_bytes(backend, self.positions)?.saturating_mul(samples);
        let most = self.batch.resolved_lanes();
        let fits = |&workers: &usize| {
            self.state_bytes(backend, workers).saturating_add(workspace)
                <= free / 10 * PLANNED_TENTHS
        };
        Ok((1..=most).find(fits))
    }

    /// The most sums of lanes that a worker holds at once: those that wait for their right siblings, those that are finished
    /// before its last lane is, and the one at hand.
    fn accumulators(&self, workers: usize) -> usize {
        let lanes = self.batch.resolved_lanes();
        let (Ok(tree), Ok(cut)) = (Tree::new(lanes), lane_cut(lanes, workers)) else { return 1 };
        let held = |lanes: &Range<usize>| {
            let at_once = |lane: usize| tree.cover(&(lanes.start..lane + 1)).len();
            let before_joining = |lane: usize| tree.cover(&(lanes.start..lane)).len() + 1;
            lanes.clone().map(|lane| at_once(lane).max(before_joining(lane))).max().unwrap_or(1)
        };
        cut.iter().map(held).max().unwrap_or(1)
    }
}

/// On how many devices a run would fit, which is known once its devices are open.
#[derive(Clone, Debug, Default)]
pub(crate) struct FittingDevices(Arc<OnceLock<usize>>);

impl FittingDevices {
    /// Finds it out for the run of `plan`, whose microbatches have `samples` samples at most.
    ///
    /// # Errors
    /// A device that does not say how much memory it has, or a model that does not take such samples.
    pub(crate) fn find<B: Backend>(
        &self,
        plan: &PlanMemory<'_>,
        devices: &Devices<B>,
        samples: usize,
    ) -> Result<()> {
        if let Some(fitting) = plan.fitting_devices(devices, samples)? {
            let _ = self.0.set(fitting);
        }
        Ok(())
    }

    /// What to do about a run that did not fit on `devices` devices, where more would do.
    pub(crate) fn way(&self, devices: usize) -> Option<String> {
        let fitting = self.0.get().filter(|&&fitting| fitting > devices)?;
        Some(format!("train on {fitting} such GPUs, which share the optimizer's state"))
    }
}

/// What the fullest of these devices has left; `None` where buffers lie in host memory.
fn least_free<B: Backend>(devices: &Devices<B>) -> Result<Option<usize>> {
    let mut least = None;
    for worker in devices.workers() {
        let free = worker.backend.free_memory_bytes().map_err(ModelError::from)?;
        least = free.min(least.or(free));
    }
    Ok(least)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tidemill_kernels::emulator::{Emulator, EmulatorSettings};
    use tidemill_kernels::{Fp32, Gpu};
    use tidemill_model::{ModelSettings, ResolvedModel};

    use super::*;
    use crate::device::{Precision, WorkerDevice};

    fn model() -> Model {
        let settings = ModelSettings {
            preset: Some("mamba-10m".to_owned()),
            vocab_size: Some(97),
            ..ModelSettings::default()
        };
        let ResolvedModel::New(config) = settings.resolve(None).unwrap() else { unreachable!() };
        Model::new(&config).unwrap()
    }

    /// A device with so many bytes of memory.
    fn device((ordinal, &bytes): (usize, &usize)) -> WorkerDevice<Gpu<Emulator, Fp32>> {
        let emulator = Emulator::new(EmulatorSettings { warp: 32, seed: 1 }).unwrap();
        let backend = Arc::new(Gpu::<Emulator, Fp32>::new(emulator.with_memory_bytes(bytes)));
        WorkerDevice { backend, name: "emulator".to_owned(), ordinal }
    }

    #[test]
    fn what_does_not_fit_on_one_device_says_how_many_would_do() {
        let model = model();
        let batch = BatchSettings { lanes: Some(8), ..BatchSettings::default() };
        let fitting = |bytes: usize| {
            let devices = Devices::new(vec![device((0, &bytes))], Precision::Fp32).unwrap();
            let (model, batch) = (&model, &batch);
            let plan = PlanMemory {
                model,
                batch,
                positions: 33,
                workers: 1,
                workers_of_process: 8,
                workers_per_device: 1,
            };
            plan.fitting_devices(&devices, 1).unwrap()
        };
        let state = |parameters: usize| parameters * model.layout().parameter_elements();
        // On one: parameters, moments, the mean and, of eight lanes, four sums at once. On eight: of all but the parameters and
        // one sum an eighth, and an eighth of the sum of all.
        assert_eq!(fitting(state(4 + 8 + 4 + 16 + 12)), Some(1));
        assert!((2..=8).contains(&fitting(state(20)).unwrap()));
        assert_eq!(fitting(state(4 + 4 + 2)), None);
    }

    #[test]
    fn workers_of_a_device_share_its_memory_and_each_process_goes_by_its_fullest_device() {
        let model = model();
        let batch = BatchSettings { lanes: Some(1), ..BatchSettings::default() };
        let planned = |device_bytes: &[usize], workers, workers_per_device| {
            let devices = device_bytes.iter().enumerate().map(device).collect();
            let (model, batch) = (&model, &batch);
            let plan = PlanMemory {
                model,
                batch,
                positions: 33,
                workers,
                workers_of_process: workers,
                workers_per_device,
            };
            plan.run(Devices::new(devices, Precision::Fp32).unwrap()).unwrap().workspace_bytes
        };
        let bytes = 10 << 30;
        let [alone, shared] = [1, 4].map(|sharers| planned(&[bytes], 4, sharers));
        assert_eq!(alone - shared, (9 << 30) / 4 * 3, "{alone} {shared}");
        assert_eq!(planned(&[bytes, bytes / 2], 2, 1), planned(&[bytes / 2], 2, 1));
    }
}
