//! Where device time goes: every launch between two events, summed by kernel.
//!
//! Off unless asked for, because an event before and after each launch keeps kernels from overlapping at their edges.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use crate::backend::KernelTime;
use crate::error::Result;
use crate::gpu::GpuStream;
use crate::gpu::driver::{Driver, Timing};

/// Launches since the profile was started.
type Launches<E> = Vec<(&'static str, E, E)>;

/// A profile that may be running.
pub(super) struct Profile<D: Driver>(Mutex<Option<Launches<D::Event>>>);

impl<D: Driver> Profile<D> {
    pub(super) fn off() -> Self {
        Self(Mutex::new(None))
    }

    /// Starts, or starts again.
    pub(super) fn start(&self) {
        *self.launches() = Some(Vec::new());
    }

    /// Ends the profile: the kernels by device time, the longest first.
    pub(super) fn finish(&self, driver: &D) -> Result<Vec<KernelTime>> {
        let launches = self.launches().take().unwrap_or_default();
        let mut times: BTreeMap<&'static str, KernelTime> = BTreeMap::new();
        for (kernel, from, to) in launches {
            driver.wait(&to)?;
            let milliseconds = f64::from(driver.elapsed_milliseconds(&from, &to)?);
            let none = KernelTime { kernel, launches: 0, milliseconds: 0.0 };
            let time = times.entry(kernel).or_insert(none);
            time.launches += 1;
            time.milliseconds += milliseconds;
        }
        let mut times: Vec<KernelTime> = times.into_values().collect();
        times.sort_by(|a, b| b.milliseconds.total_cmp(&a.milliseconds));
        Ok(times)
    }

    /// Calls `enqueue`, and while a profile is running notes the device time of its work.
    pub(super) fn note<R>(
        &self,
        driver: &D,
        stream: &mut GpuStream<D>,
        kernel: &'static str,
        enqueue: impl FnOnce(&mut GpuStream<D>) -> Result<R>,
    ) -> Result<R> {
        // Launches that are recorded into a graph do not run now.
        if stream.is_recording() || self.launches().is_none() {
            return enqueue(stream);
        }
        let from = driver.record(stream.queue_mut(), Timing::Noted)?;
        let result = enqueue(stream)?;
        let to = driver.record(stream.queue_mut(), Timing::Noted)?;
        if let Some(launches) = self.launches().as_mut() {
            launches.push((kernel, from, to));
        }
        Ok(result)
    }

    fn launches(&self) -> std::sync::MutexGuard<'_, Option<Launches<D::Event>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
