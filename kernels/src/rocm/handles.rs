//! The handles of AMD's matrix libraries, one for each queue.

use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::sync::{Arc, Mutex, PoisonError};

use crate::gpu::vendor::Queue;
use crate::gpu::vendor::context::Context;
use crate::gpu::vendor::product::{Answer, Answered};

/// A handle of a library.
pub(super) type RawHandle = *mut c_void;

/// A handle that is there.
struct Handle(RawHandle);

// SAFETY: a handle may be used by any thread, one at a time.
unsafe impl Send for Handle {}

/// The handles of a library on one device: one for each queue, as a handle serves one stream at a time, and one without a queue,
/// for calls that only query the library.
///
/// Handles live as long as the library: that of a dropped queue serves a new queue of the same stream and workspace.
pub(super) struct Handles {
    context: Arc<Context>,
    destroy: unsafe extern "C" fn(RawHandle) -> c_int,
    /// The handles by stream and workspace.
    made: Mutex<HashMap<(usize, u64), Handle>>,
}

impl Handles {
    /// Handles that `destroy` ends, which is theirs alone.
    pub(super) fn new(
        context: &Arc<Context>,
        destroy: unsafe extern "C" fn(RawHandle) -> c_int,
    ) -> Self {
        Self { context: Arc::clone(context), destroy, made: Mutex::default() }
    }

    /// The handle of a queue, or the one without a queue; `make` makes it when it is first needed.
    ///
    /// # Errors
    /// An error of `make`; or a queue that is being recorded, where the allocations of a new handle would spoil the recording.
    pub(super) fn get(
        &self,
        queue: Option<&Queue>,
        make: impl FnOnce() -> Answered<RawHandle>,
    ) -> Answered<RawHandle> {
        let place = queue.map_or((0, 0), |queue| (queue.stream() as usize, queue.workspace().0));
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(handle) = made.get(&place) {
            return Ok(handle.0);
        }
        if queue.is_some_and(Queue::is_recording) {
            return Err(Answer::NotRecordable("opening a matrix library"));
        }
        let handle = make()?;
        made.insert(place, Handle(handle));
        Ok(handle)
    }
}

impl Drop for Handles {
    fn drop(&mut self) {
        if self.context.bind().is_err() {
            return;
        }
        let made = self.made.get_mut().unwrap_or_else(PoisonError::into_inner);
        for (_, Handle(handle)) in made.drain() {
            // SAFETY: the handle is alive and not used again, and so is the device that it was made for.
            unsafe { (self.destroy)(handle) };
        }
    }
}
