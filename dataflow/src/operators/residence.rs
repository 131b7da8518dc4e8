//! Training state that stays on the device.
//!
//! Where one worker owns every chunk and its device has a memory of its own, nothing of the state has to pass
//! through the host. The device thread and the optimizer thread of that worker then share one [`Residence`]: one
//! device stream, a replica whose masters are the optimizer's, the sums of the last step, the mean gradient and the moments.
//! The graph is the same graph: its chunks are resident ones, which say what is ready and carry nothing.
//!
//! # Contract
//! The two threads take turns, as the graph tells them to: a step leaves its sums here, mean gradients are formed
//! from them, parameters are updated in place, and only then does the next step begin. Each holds the lock for what it was
//! told to do, the device thread for a whole computation; all kernels are enqueued on the one device stream, so
//! the order of the locks is the order on the device. Snapshots wait while a computation is enqueued.

use std::sync::{Arc, Mutex, MutexGuard};

use tidemill_kernels::{Backend, SliceMut};
use tidemill_model::{Device, Layout, Parameters};

use super::optimize::InitialState;
use crate::cluster::Failure;
use crate::cluster::progress::{self, Phase};

/// A device stream and the parameters that are computed with on it.
pub(super) struct Replica<B: Backend> {
    pub(super) stream: B::DeviceStream,
    pub(super) parameters: Parameters<B>,
    /// The gradients of all uses over all lanes of the last step, where they stay on the device: from the end of a
    /// step to the beginning of the next.
    pub(super) sums: Option<B::Buffer<f32>>,
}

impl<B: Backend> Replica<B> {
    /// A replica of `parameters` on a device stream of its own.
    pub(super) fn new(backend: &B, layout: &Layout, parameters: &[f32]) -> Result<Self, Failure> {
        let mut stream = backend.device_stream()?;
        let mut device = Device { backend, stream: &mut stream };
        let parameters = Parameters::from_host(&mut device, layout, parameters)?;
        Ok(Self { stream, parameters, sums: None })
    }
}

/// The state itself.
pub(super) struct ResidentState<B: Backend> {
    pub(super) replica: Replica<B>,
    /// In the order of the parameter arena.
    pub(super) mean_gradient: B::Buffer<f32>,
    /// The first and the second moments, in the order of the parameter arena.
    pub(super) moments: [B::Buffer<f32>; 2],
}

/// The state of a worker that owns everything, shared by the threads that change it.
pub struct Residence<B: Backend> {
    state: Arc<Mutex<ResidentState<B>>>,
}

impl<B: Backend> Clone for Residence<B> {
    fn clone(&self) -> Self {
        Self { state: Arc::clone(&self.state) }
    }
}

impl<B: Backend> Residence<B> {
    /// Puts `initial` on the device.
    ///
    /// # Errors
    /// State of another size than `layout` has, or a device without room.
    pub fn new(backend: &B, layout: &Layout, initial: &InitialState) -> Result<Self, Failure> {
        let mut replica = Replica::new(backend, layout, &initial.parameters)?;
        let (stream, elements) = (&mut replica.stream, layout.parameter_elements());
        let mean_gradient = backend.allocate(stream, elements)?;
        let mut moments =
            [backend.allocate(stream, elements)?, backend.allocate(stream, elements)?];
        for (buffer, arena) in moments.iter_mut().zip(initial.moments.iter().flatten()) {
            backend.write(stream, SliceMut::all(buffer), arena)?;
        }
        let state = ResidentState { replica, mean_gradient, moments };
        Ok(Self { state: Arc::new(Mutex::new(state)) })
    }

    /// The state, to one thread at a time; `None` once a thread has panicked with it in its hands: that thread's
    /// panic ends the run, and whoever else finds out just stops.
    pub(super) fn lock(&self) -> Option<MutexGuard<'_, ResidentState<B>>> {
        // Another thread may compute with it for as long as a step takes.
        let _waiting = progress::during(Phase::WaitingForDevice);
        self.state.lock().ok()
    }
}
