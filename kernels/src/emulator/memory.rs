//! Host memory in the role of device memory.
//!
//! Kernels write it by address while the memory is borrowed as shared, as on a device; so it is
//! accessed through raw pointers only.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::schedule::Schedule;
use crate::error::{KernelError, Result};
use crate::gpu::driver::Address;

/// The alignment that drivers promise.
const ALIGNMENT: usize = 256;

/// The device memory: its size, the free bytes, and the blocks that were dropped while graphs may
/// still name them.
pub(super) struct Room {
    total_bytes: usize,
    state: Mutex<State>,
    /// The schedule of steps that run later: memory stays until they have run.
    schedule: Option<Arc<Schedule>>,
}

struct State {
    free_bytes: usize,
    graphs: usize,
    aside: Vec<Storage>,
}

impl Room {
    /// The memory of an emulated GPU for which no other size was set: 1 GiB.
    pub(super) const DEFAULT_BYTES: usize = 1 << 30;

    pub(super) fn new(total_bytes: usize, schedule: Option<Arc<Schedule>>) -> Arc<Self> {
        let state = State { free_bytes: total_bytes, graphs: 0, aside: Vec::new() };
        Arc::new(Self { total_bytes, state: Mutex::new(state), schedule })
    }

    pub(super) fn schedule(&self) -> Option<&Arc<Schedule>> {
        self.schedule.as_ref()
    }

    /// Free bytes, and all there are.
    pub(super) fn bytes(&self) -> [usize; 2] {
        [self.state().free_bytes, self.total_bytes]
    }

    /// `bytes` zeroed bytes, if there is room.
    pub(super) fn allocate(self: &Arc<Self>, bytes: usize) -> Option<EmulatorMemory> {
        let whole = bytes.max(1).checked_next_multiple_of(ALIGNMENT)?;
        let layout = Layout::from_size_align(whole, ALIGNMENT).ok()?;
        let mut state = self.state();
        let left = state.free_bytes.checked_sub(whole)?;
        let storage = Storage::zeroed(layout)?;
        state.free_bytes = left;
        Some(EmulatorMemory { storage: Some(storage), room: Arc::clone(self) })
    }

    /// While the result lives, memory that is dropped keeps its place: the steps of a graph may
    /// name it.
    pub(super) fn keep(self: &Arc<Self>) -> Kept {
        self.state().graphs += 1;
        Kept(Arc::clone(self))
    }

    fn give_back(&self, storage: Storage) {
        let mut state = self.state();
        if state.graphs > 0 {
            state.aside.push(storage);
        } else {
            state.free_bytes += storage.layout.size();
            drop(state);
            self.free(storage);
        }
    }

    fn free(&self, storage: Storage) {
        drop(match &self.schedule {
            Some(schedule) => schedule.drop_later(storage),
            None => Some(storage),
        });
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// While it lives, memory that is dropped stays where it is.
pub(super) struct Kept(Arc<Room>);

impl Drop for Kept {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.graphs -= 1;
        if state.graphs == 0 {
            let aside = std::mem::take(&mut state.aside);
            state.free_bytes += aside.iter().map(|storage| storage.layout.size()).sum::<usize>();
            drop(state);
            aside.into_iter().for_each(|storage| self.0.free(storage));
        }
    }
}

pub(super) struct Storage {
    first: NonNull<u8>,
    layout: Layout,
}

impl Storage {
    /// `layout` is of at least one byte.
    fn zeroed(layout: Layout) -> Option<Self> {
        // SAFETY: as above.
        let first = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        Some(Self { first, layout })
    }

    /// The address of `bytes` bytes from `offset` on.
    fn range(&self, offset: usize, bytes: usize) -> Result<Address> {
        let all = self.layout.size();
        match offset.checked_add(bytes) {
            Some(end) if end <= all => Ok(self.address().offset(offset)),
            _ => {
                let found = format!("{bytes} bytes from byte {offset}");
                Err(KernelError::shape("copy", "range", format!("within {all}"), found))
            }
        }
    }

    fn address(&self) -> Address {
        Address(self.first.as_ptr().expose_provenance() as u64)
    }
}

// SAFETY: it owns its bytes, which no thread has a claim to.
unsafe impl Send for Storage {}
// SAFETY: only addresses are taken through a shared reference.
unsafe impl Sync for Storage {}

impl Drop for Storage {
    fn drop(&mut self) {
        // SAFETY: it was allocated with this layout, and nothing names it any more.
        unsafe { dealloc(self.first.as_ptr(), self.layout) };
    }
}

/// Device memory.
pub struct EmulatorMemory {
    storage: Option<Storage>,
    room: Arc<Room>,
}

impl EmulatorMemory {
    pub(super) fn address(&self) -> Address {
        self.storage.as_ref().map_or(Address::NULL, Storage::address)
    }

    /// The address of `bytes` bytes from `offset` on.
    pub(super) fn range(&self, offset: usize, bytes: usize) -> Result<Address> {
        match &self.storage {
            Some(storage) => storage.range(offset, bytes),
            None => Ok(Address::NULL),
        }
    }
}

impl Drop for EmulatorMemory {
    fn drop(&mut self) {
        if let Some(storage) = self.storage.take() {
            self.room.give_back(storage);
        }
    }
}

/// Host memory that an emulated device reaches by itself.
pub struct EmulatorHostMemory(Storage);

impl EmulatorHostMemory {
    pub(super) fn zeroed(bytes: usize) -> Result<Self> {
        let whole = bytes.max(1).checked_next_multiple_of(ALIGNMENT);
        let layout = whole.and_then(|whole| Layout::from_size_align(whole, ALIGNMENT).ok());
        let device = || "the host".to_owned();
        let storage = layout.and_then(Storage::zeroed);
        storage.map(Self).ok_or_else(|| KernelError::OutOfMemory { bytes, device: device() })
    }

    pub(super) fn first(&self) -> NonNull<u8> {
        self.0.first
    }

    /// The address of `bytes` bytes from `offset` on.
    pub(super) fn range(&self, offset: usize, bytes: usize) -> Result<Address> {
        self.0.range(offset, bytes)
    }
}
