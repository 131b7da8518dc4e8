//! The vendor's library that moves bytes between the GPUs of several processes: NCCL, or RCCL, whose table is the same.
//!
//! Training uses the library only to move bytes. Its own sums have an order that depends on the
//! number of GPUs, so our kernels add the parts that it moves. [`LibraryCollective`] has the
//! library's own reductions, for comparison in measurements. The library is opened at its first
//! use.
//! The declarations are our own, after NCCL's documentation of its C interface (version 2.18 and later), which AMD's
//! names too.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::error::{KernelError, Result, loader_answer};
use crate::gpu::inventory::{FoundLibrary, file_of};

/// NVIDIA's library, by the name that its toolkit installs.
pub const NCCL: &str = "libnccl.so.2";

/// AMD's library, by the name that ROCm installs.
pub const RCCL: &str = "librccl.so.1";

/// The oldest version of either library, in its own numbering, that knows every call and struct here: 2.18, which is that of ROCm
/// 6.
const OLDEST: c_int = 21_800;

/// The identifier of a group, which all its processes need to join it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct GroupId([u8; Self::BYTES]);

impl GroupId {
    /// The size of an identifier in bytes.
    pub const BYTES: usize = 128;

    /// The identifier that another process sent.
    pub fn from_bytes(bytes: [u8; Self::BYTES]) -> Self {
        Self(bytes)
    }

    /// The identifier as bytes, to be sent to another process.
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        self.0
    }
}

/// The identifier as it is passed to the library: by value.
#[repr(C)]
#[derive(Clone, Copy)]
struct RawId([c_char; GroupId::BYTES]);

type Answer = c_int;
type RawMember = *mut c_void;

const SUCCESS: Answer = 0;
const IN_PROGRESS: Answer = 7;
/// `ncclUint8`: bytes of any meaning are moved.
const BYTES: c_int = 1;

/// `ncclFloat32`.
const FLOATS: c_int = 7;
/// `ncclSum`.
const SUM: c_int = 0;

/// A collective that the library carries out alone, over the memory of all ranks of a group. No weight may come of it: the order of
/// its additions is the library's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LibraryCollective {
    /// Each rank gets its share of the sums over all ranks. The bits depend on the number of ranks and on the library.
    ReduceScatter,
    /// Each rank gets the elements of all ranks, in the order of the ranks.
    AllGather,
}

/// The settings with which a member is made, as NCCL 2.18 knows them; later versions' further fields have their defaults.
#[repr(C)]
struct Config {
    bytes: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
    cluster_size: c_int,
    least_blocks: c_int,
    most_blocks: c_int,
    network: *const c_char,
    shares_when_split: c_int,
}

impl Config {
    /// Calls that would wait answer that they are in progress: so what waits for a peer can be aborted.
    fn not_blocking() -> Self {
        const UNDEFINED: c_int = c_int::MIN;
        Self {
            bytes: size_of::<Self>(),
            magic: 0xcafe_beef,
            version: 21_800,
            blocking: 0,
            cluster_size: UNDEFINED,
            least_blocks: UNDEFINED,
            most_blocks: UNDEFINED,
            network: std::ptr::null(),
            shares_when_split: UNDEFINED,
        }
    }
}

/// The functions of the library.
#[derive(Clone, Copy)]
struct Table {
    get_unique_id: unsafe extern "C" fn(*mut RawId) -> Answer,
    init_rank: unsafe extern "C" fn(*mut RawMember, c_int, RawId, c_int, *mut Config) -> Answer,
    state: unsafe extern "C" fn(RawMember, *mut Answer) -> Answer,
    destroy: unsafe extern "C" fn(RawMember) -> Answer,
    abort: unsafe extern "C" fn(RawMember) -> Answer,
    group_start: unsafe extern "C" fn() -> Answer,
    group_end: unsafe extern "C" fn() -> Answer,
    send:
        unsafe extern "C" fn(*const c_void, usize, c_int, c_int, RawMember, *mut c_void) -> Answer,
    receive:
        unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, RawMember, *mut c_void) -> Answer,
    reduce_scatter: unsafe extern "C" fn(
        *const c_void,
        *mut c_void,
        usize,
        c_int,
        c_int,
        RawMember,
        *mut c_void,
    ) -> Answer,
    all_gather: unsafe extern "C" fn(
        *const c_void,
        *mut c_void,
        usize,
        c_int,
        RawMember,
        *mut c_void,
    ) -> Answer,
    error_text: unsafe extern "C" fn(Answer) -> *const c_char,
}

/// The library, open.
#[derive(Clone)]
pub struct CollectiveLibrary(Arc<Opened>);

struct Opened {
    table: Table,
    name: String,
    version: c_int,
    /// Keeps what the table names.
    _library: libloading::Library,
}

impl CollectiveLibrary {
    /// Opens the library of this name or path.
    ///
    /// # Errors
    /// A library that is not there, or lacks a function.
    pub fn open(name: impl AsRef<Path>) -> Result<Self> {
        let path = name.as_ref();
        let name = path.display().to_string();
        let missing = |error: libloading::Error| {
            failure(&name, "opening the library of collectives", loader_answer(&error))
        };
        // SAFETY: the library's own code runs when it is loaded, as that of any library that a program names.
        let library = unsafe { libloading::Library::new(path) }.map_err(missing)?;
        // SAFETY: the library documents the function with this type; it writes one number.
        let version = unsafe {
            let get = library.get::<unsafe extern "C" fn(*mut c_int) -> Answer>("ncclGetVersion");
            let mut version = 0;
            get.map_err(missing)?(&raw mut version);
            version
        };
        check_version(&name, version)?;
        macro_rules! function {
            ($symbol:literal) => {
                // SAFETY: the library documents the function with the type of the field that it goes to.
                *unsafe { library.get($symbol) }.map_err(missing)?
            };
        }
        let table = Table {
            get_unique_id: function!(b"ncclGetUniqueId\0"),
            init_rank: function!(b"ncclCommInitRankConfig\0"),
            state: function!(b"ncclCommGetAsyncError\0"),
            destroy: function!(b"ncclCommDestroy\0"),
            abort: function!(b"ncclCommAbort\0"),
            group_start: function!(b"ncclGroupStart\0"),
            group_end: function!(b"ncclGroupEnd\0"),
            send: function!(b"ncclSend\0"),
            receive: function!(b"ncclRecv\0"),
            reduce_scatter: function!(b"ncclReduceScatter\0"),
            all_gather: function!(b"ncclAllGather\0"),
            error_text: function!(b"ncclGetErrorString\0"),
        };
        Ok(Self(Arc::new(Opened { table, name, version, _library: library })))
    }

    /// The library's name, version and file, for the inventory.
    pub fn found(&self) -> FoundLibrary {
        let Opened { name, version, table, .. } = &*self.0;
        let name = name.rsplit('/').next().unwrap_or(name).split('.').next().unwrap_or(name);
        let file = file_of(table.error_text as *const c_void);
        FoundLibrary { version: format!("{name} {}", release(*version)), file }
    }

    /// A new group's identifier: one of its processes makes it and sends it to the others.
    ///
    /// # Errors
    /// A library that cannot use the network interfaces of this machine.
    pub fn group_id(&self) -> Result<GroupId> {
        let mut id = RawId([0; GroupId::BYTES]);
        // SAFETY: the function writes one id.
        let answer = unsafe { (self.0.table.get_unique_id)(&raw mut id) };
        self.check("making a group", answer)?;
        Ok(GroupId(id.0.map(|byte| byte as u8)))
    }

    fn check(&self, attempted: &'static str, answer: Answer) -> Result<()> {
        if answer == SUCCESS || answer == IN_PROGRESS {
            return Ok(());
        }
        // SAFETY: the function answers a text that stays, for any number.
        let text = unsafe { CStr::from_ptr((self.0.table.error_text)(answer)) };
        Err(failure(&self.0.name, attempted, text.to_string_lossy().into_owned()))
    }
}

/// The version that a library numbers so.
fn release(version: c_int) -> String {
    match version {
        // Before 2.9 the minor version had one digit.
        ..=9999 => format!("{}.{}", version / 1000, version % 1000 / 100),
        _ => format!("{}.{}", version / 10_000, version % 10_000 / 100),
    }
}

/// Asks the library `name` not to be too old.
fn check_version(name: &str, version: c_int) -> Result<()> {
    if version >= OLDEST {
        return Ok(());
    }
    let (found, oldest) = (release(version), release(OLDEST));
    let answer = format!("it is of version {found}, {oldest} or newer is needed");
    Err(failure(name, "opening the library of collectives", answer))
}

fn failure(library: &str, attempted: &'static str, answer: String) -> KernelError {
    KernelError::Device { attempted, device: library.to_owned(), answer }
}

/// One rank of a group. It may be aborted from another thread than the one that exchanges.
pub struct GroupMember {
    library: CollectiveLibrary,
    /// `None` once it is aborted. Locked for the length of a call: no call waits for others, except those that end the member.
    raw: Mutex<Option<Raw>>,
    has_joined: AtomicBool,
    rank: usize,
    ranks: usize,
}

struct Raw(RawMember);

// SAFETY: the library lets any thread use a member, one at a time.
unsafe impl Send for Raw {}

/// Bytes that another rank is sent, or that it sends: its rank, the address and the number.
pub(crate) type Transfer = (usize, u64, usize);

impl GroupMember {
    /// Begins to join the group `id` of `ranks` ranks as `rank`, with the device that is current on this thread. The first
    /// exchange waits until all have joined.
    ///
    /// # Errors
    /// An error of the library.
    pub(crate) fn join(
        library: &CollectiveLibrary,
        id: GroupId,
        (rank, ranks): (usize, usize),
    ) -> Result<Self> {
        let mut raw: RawMember = std::ptr::null_mut();
        let id = RawId(id.0.map(|byte| byte as c_char));
        let mut config = Config::not_blocking();
        // SAFETY: the function writes one member, and reads as much of the config as it says it is long.
        let answer = unsafe {
            let (raw, config) = (&raw mut raw, &raw mut config);
            (library.0.table.init_rank)(raw, ranks as c_int, id, rank as c_int, config)
        };
        library.check("joining a group", answer)?;
        let (library, raw) = (library.clone(), Mutex::new(Some(Raw(raw))));
        Ok(Self { library, raw, has_joined: AtomicBool::new(false), rank, ranks })
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The number of ranks.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// Enqueues all of `sends` and `receives` as one, on a queue of the device that the group was joined with: each waits for its
    /// other end, and the order of arrivals does not matter.
    ///
    /// # Safety
    /// The ranges lie inside memory of that device, and a received range overlaps no other range here. `queue` is one of that
    /// device's, and stays alive until the exchange has run.
    pub(crate) unsafe fn exchange(
        &self,
        queue: *mut c_void,
        sends: &[Transfer],
        receives: &[Transfer],
    ) -> Result<()> {
        self.settle_before("exchanging")?;
        self.call("exchanging", |table, raw| {
            // SAFETY: the member is alive, and the caller guarantees the validity of the ranges.
            unsafe {
                self.library.check("exchanging", (table.group_start)())?;
                let check = |answer| self.library.check("exchanging", answer);
                let sent = sends.iter().try_for_each(|&(peer, address, bytes)| {
                    let address = address as *const c_void;
                    check((table.send)(address, bytes, BYTES, peer as c_int, raw, queue))
                });
                let received = receives.iter().try_for_each(|&(peer, address, bytes)| {
                    let address = address as *mut c_void;
                    check((table.receive)(address, bytes, BYTES, peer as c_int, raw, queue))
                });
                // The group must be ended even if one of its parts was refused.
                let ended = check((table.group_end)());
                sent.and(received).and(ended)
            }
        })?;
        self.settle("exchanging")
    }

    /// Enqueues `what`, by the library alone, on a queue of the device that the group was joined with: it reads fp32 elements
    /// `from` and writes them to `into`, both in this rank's memory. A share is of `share_elements`: a reduce-scatter writes one,
    /// an all-gather reads one.
    ///
    /// # Safety
    /// One side has a share and the other as many as there are ranks, inside memory of that device, and they do not overlap.
    /// `queue` is one of that device's, and stays alive until the collective has run.
    pub(crate) unsafe fn collective(
        &self,
        queue: *mut c_void,
        what: LibraryCollective,
        (from, into): (u64, u64),
        share_elements: usize,
    ) -> Result<()> {
        let attempted = match what {
            LibraryCollective::ReduceScatter => "reducing and scattering",
            LibraryCollective::AllGather => "gathering",
        };
        self.settle_before(attempted)?;
        let (from, into) = (from as *const c_void, into as *mut c_void);
        self.call(attempted, |table, raw| {
            // SAFETY: the member is alive, and the caller guarantees the validity of the ranges.
            let answer = unsafe {
                match what {
                    LibraryCollective::ReduceScatter => {
                        (table.reduce_scatter)(from, into, share_elements, FLOATS, SUM, raw, queue)
                    }
                    LibraryCollective::AllGather => {
                        (table.all_gather)(from, into, share_elements, FLOATS, raw, queue)
                    }
                }
            };
            self.library.check(attempted, answer)
        })?;
        self.settle(attempted)
    }

    /// A closure by which any thread [aborts](Self::abort) `member`, if that is still in use; the thread does not wait for the
    /// abort.
    pub fn abort_handle(member: &Arc<Self>) -> impl FnOnce() + Send + use<> {
        // The communicator is destroyed by the thread that uses it, not by the last one that might
        // abort it.
        let member = Arc::downgrade(member);
        move || {
            // If a device hangs, the library's abort may never return; it must not block the
            // aborting thread.
            let abort = move || member.upgrade().iter().for_each(|member| member.abort());
            let _ = std::thread::Builder::new().name("abort".to_owned()).spawn(abort);
        }
    }

    /// Aborts the collectives that this rank waits for, on the device and on the host, where another thread may be waiting. Takes
    /// as long as the other work of the device does: for ever, where a kernel hangs.
    pub fn abort(&self) {
        if let Some(Raw(raw)) = self.lock().take() {
            // SAFETY: the member is alive, and nothing else names it from now on.
            unsafe { (self.library.0.table.abort)(raw) };
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Raw>> {
        self.raw.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn call<R>(
        &self,
        attempted: &'static str,
        call: impl FnOnce(&Table, RawMember) -> Result<R>,
    ) -> Result<R> {
        match &*self.lock() {
            Some(Raw(raw)) => call(&self.library.0.table, *raw),
            None => {
                Err(failure(&self.library.0.name, attempted, "the group was aborted".to_owned()))
            }
        }
    }

    /// Waits until the library takes another call; before the first, until all ranks have joined.
    fn settle_before(&self, attempted: &'static str) -> Result<()> {
        if !self.has_joined.load(Ordering::Acquire) {
            self.settle("joining a group")?;
            self.has_joined.store(true, Ordering::Release);
        }
        self.settle(attempted)
    }

    /// Waits until the library has completed its last call.
    fn settle(&self, attempted: &'static str) -> Result<()> {
        loop {
            let mut state = SUCCESS;
            let answer = self.call(attempted, |table, raw| {
                // SAFETY: the member is alive, and the function writes one state.
                Ok(unsafe { (table.state)(raw, &raw mut state) })
            })?;
            self.library.check(attempted, answer)?;
            if state != IN_PROGRESS {
                return self.library.check(attempted, state);
            }
            // The library works on threads of its own, and reports their progress only when asked.
            std::thread::yield_now();
        }
    }
}

impl Drop for GroupMember {
    fn drop(&mut self) {
        if let Some(Raw(raw)) = self.lock().take() {
            let mut state = SUCCESS;
            // SAFETY: the member is alive, and nothing else names it. One that is in progress or has failed cannot be
            // destroyed.
            unsafe {
                let table = &self.library.0.table;
                let answer = (table.state)(raw, &raw mut state);
                match (answer, state) {
                    (SUCCESS, SUCCESS) => (table.destroy)(raw),
                    _ => (table.abort)(raw),
                };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_whose_structs_are_others_is_refused() {
        check_version("librccl.so.1", 21_803).unwrap();
        check_version("libnccl.so.2", 22_703).unwrap();
        let said = |version| check_version("librccl.so.1", version).unwrap_err().to_string();
        let refused = "opening the library of collectives on librccl.so.1 failed: it is of version";
        assert_eq!(said(21_304), format!("{refused} 2.13, 2.18 or newer is needed"));
        assert_eq!(said(2_804), format!("{refused} 2.8, 2.18 or newer is needed"));
    }
}
