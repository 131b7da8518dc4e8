//! GPUs behind a vendor's own interface: one [`Driver`] for all vendors.
//!
//! Memory, pool, streams, events, graphs, pinned memory, peers, modules and launches are written
//! once, over a [`Table`] of functions that is found in the vendor's library at run time: building
//! needs no library, and a program runs on machines without it. A [`Vendor`] supplies the rest: the
//! library and its minimum version, the name and target of a device, the compiler, and the matrix
//! library.
//! matrix library.
//!
//! To add a vendor whose interface is like these, implement [`Vendor`], and name its functions in `table.rs`.

pub mod compiler;
pub mod context;
mod driver;
mod event;
mod failure;
mod graph;
mod host_memory;
pub mod library;
mod memory;
mod module;
mod peer;
mod pool;
pub mod product;
pub mod queue;
pub mod table;

use std::sync::Arc;

use self::compiler::Compiler;
use self::context::Context;
use self::pool::Pool;
pub use self::queue::Queue;
use self::table::{Code, Device, Table};
use crate::error::{KernelError, Result};
use crate::gpu::collectives::CollectiveLibrary;
use crate::gpu::driver::{DeviceProperties, Installed, MatrixProduct};
use crate::gpu::inventory::{FoundDevice, FoundLibrary, Inventory};
use crate::gpu::source::{Source, SourceOptions};

/// The parts in which vendors differ.
pub trait Vendor: Send + Sync + Sized + 'static {
    /// The name of the backend.
    const BACKEND: &'static str;
    /// The driver's name in messages, such as "the NVIDIA driver".
    const DRIVER: &'static str;
    /// The name of the library of collectives.
    const COLLECTIVES: &'static str;
    /// Memory that the matrix library needs beside its operands, for each queue.
    const WORKSPACE_BYTES: usize;
    /// The matrix library on one device.
    type MatrixLibrary: Send + Sync;

    /// The functions of the interface.
    ///
    /// # Errors
    /// A library that is not there, or is of a version that does not fit.
    fn table() -> Result<&'static Table>;

    /// Whether an answer says that there is nothing to use, rather than that it failed.
    fn is_missing(code: Code) -> bool;

    /// The kind of a device: its architecture and its number of multiprocessors or compute units. Devices that work together are of
    /// one kind.
    ///
    /// # Errors
    /// An error of the driver.
    fn kind(table: &Table, device: Device) -> Result<String>;

    /// The architecture that kernels are compiled for on the device, whose name is `name`.
    ///
    /// # Errors
    /// A device that is too old, or an error of the driver.
    fn architecture(context: &Context, name: &str) -> Result<String>;

    /// The library that lists devices.
    ///
    /// # Errors
    /// As for [`table`](Self::table).
    fn driver() -> Result<FoundLibrary>;

    /// The compiler.
    ///
    /// # Errors
    /// A compiler that is not there, or lacks a function.
    fn compiler() -> Result<&'static Compiler>;

    /// The matrix library, without a device.
    ///
    /// # Errors
    /// A library that is not there, or lacks a function.
    fn matrix_library() -> Result<FoundLibrary>;

    /// Opens the matrix library on the device.
    ///
    /// # Errors
    /// A library that is not there, or what made it fail.
    fn open_matrix_library(context: &Arc<Context>, name: &str) -> Result<Self::MatrixLibrary>;

    /// The properties of the device, whose matrix library is open.
    ///
    /// # Errors
    /// An error of the driver or the library.
    fn properties(
        context: &Context,
        name: String,
        architecture: String,
        library: &Self::MatrixLibrary,
    ) -> Result<DeviceProperties>;

    /// The machine code of `source` for the device.
    ///
    /// # Errors
    /// A source that does not compile, or an architecture that the compiler does not know.
    fn compile(
        source: &'static Source,
        options: SourceOptions,
        properties: &DeviceProperties,
    ) -> Result<Vec<u8>>;

    /// Whether the library forms `product` with its bias: see [`Driver::adds_bias`](crate::gpu::Driver::adds_bias).
    ///
    /// # Errors
    /// An error of the library.
    fn adds_bias(
        library: &Self::MatrixLibrary,
        driver: &VendorDriver<Self>,
        queue: &mut Queue,
        product: &MatrixProduct,
    ) -> Result<bool>;

    /// Enqueues a matrix product.
    ///
    /// # Errors
    /// A product that the library refuses.
    ///
    /// # Safety
    /// As for [`Driver::matmul`](crate::gpu::Driver::matmul).
    unsafe fn multiply(
        library: &Self::MatrixLibrary,
        driver: &VendorDriver<Self>,
        queue: &mut Queue,
        product: MatrixProduct,
    ) -> Result<()>;
}

/// A GPU of a vendor.
pub struct VendorDriver<V: Vendor> {
    // Dropped before the pool, which keeps its context alive.
    matrices: V::MatrixLibrary,
    pool: Arc<Pool>,
    properties: DeviceProperties,
}

fn unavailable<V: Vendor>(reason: String) -> KernelError {
    KernelError::Unavailable { backend: V::BACKEND, reason }
}

/// The devices, each with its name, architecture and memory.
fn found_devices<V: Vendor>() -> Result<Vec<FoundDevice>> {
    let table = V::table()?;
    let found = |ordinal| {
        let place = format!("GPU {ordinal}");
        let context = table.on(&place, "opening a device", Context::open(table, ordinal))?;
        let name = table.on(&place, "asking for a device's name", context.name())?;
        let memory_bytes = table.on(&name, "asking for free memory", context.memory_bytes())?;
        Ok(FoundDevice { architecture: V::architecture(&context, &name), name, memory_bytes })
    };
    (0..VendorDriver::<V>::device_count()?).map(found).collect()
}

impl<V: Vendor> Installed for VendorDriver<V> {
    fn device_count() -> Result<usize> {
        let table = V::table()?;
        match context::device_count(table) {
            Ok(0) => Err(unavailable::<V>(format!("{} sees no GPU", V::DRIVER))),
            Ok(devices) => Ok(devices),
            Err(code) if V::is_missing(code) => {
                Err(unavailable::<V>(format!("{} answers: {}", V::DRIVER, table.words(code))))
            }
            Err(code) => table.on(V::BACKEND, "starting the driver", Err(code)),
        }
    }

    fn together() -> Result<usize> {
        peer::together(V::table()?, Self::device_count()?, V::kind)
    }

    fn inventory() -> Inventory {
        let collectives = CollectiveLibrary::open(V::COLLECTIVES);
        Inventory {
            driver: V::driver(),
            devices: found_devices::<V>(),
            compiler: V::compiler().and_then(Compiler::found),
            matrix_library: V::matrix_library(),
            collective_library: collectives.map(|library| library.found()),
        }
    }

    fn open(ordinal: usize) -> Result<Self> {
        let devices = Self::device_count()?;
        if ordinal >= devices {
            let reason = format!("GPU {ordinal} was asked for, but there are {devices}");
            return Err(unavailable::<V>(reason));
        }
        let table = V::table()?;
        let place = format!("GPU {ordinal}");
        let context = table.on(&place, "opening a device", Context::open(table, ordinal))?;
        let name = table.on(&place, "asking for a device's name", context.name())?;
        let architecture = V::architecture(&context, &name)?;
        V::compiler()?.version()?;
        let matrices = V::open_matrix_library(&context, &name)?;
        let properties = V::properties(&context, name, architecture, &matrices)?;
        let pool = Pool::new(context, &properties.name)?;
        Ok(Self { matrices, pool, properties })
    }
}

pub use self::peer::ALL as ALL_DEVICES;
