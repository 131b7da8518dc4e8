//! The matrix library of an AMD GPU: hipBLASLt if it is present and works, else rocBLAS.

use std::sync::Arc;

use super::hipblaslt::HipBlasLt;
use super::rocblas::{self, RocBlas};
use super::{Amd, BACKEND, Hip, Rocm};
use crate::error::{KernelError, Result};
use crate::gpu::driver::MatrixProduct;
use crate::gpu::inventory::FoundLibrary;
use crate::gpu::vendor::context::{self, Context};
use crate::gpu::vendor::product::Products;
use crate::gpu::vendor::{ALL_DEVICES, Queue, Vendor};

/// The library in use on one device.
enum Library {
    HipBlasLt(Products<HipBlasLt>),
    RocBlas(Products<RocBlas>),
}

/// The products of one device.
pub struct Matrices {
    library: Library,
    /// The library and its version, and the digest of its choices.
    name: String,
    found: FoundLibrary,
}

impl Matrices {
    /// Opens the library for the device, which is the calling thread's own. Where that is rocBLAS, a line of the log says why.
    ///
    /// # Errors
    /// No library that is present and works: the message says why not rocBLAS, and why not hipBLASLt if that is present.
    pub(super) fn open(context: &Arc<Context>, device: &str) -> Result<Self> {
        let why = match Self::open_hipblaslt(context, device) {
            Ok(opened) => return Ok(opened),
            Err(KernelError::Unavailable { reason, .. }) => reason,
            Err(other) => return Err(other),
        };
        let is_absent = why.ends_with("was not found");
        let library = RocBlas::open(context, device).map_err(|error| match error {
            KernelError::Unavailable { backend, reason } if !is_absent => {
                let reason = format!("{reason}; and hipBLASLt is not used: {why}");
                KernelError::Unavailable { backend, reason }
            }
            other => other,
        })?;
        if is_absent {
            tracing::info!(device, "rocBLAS forms matrix products: {why}");
        } else {
            tracing::warn!(device, "rocBLAS forms matrix products, as hipBLASLt cannot: {why}");
        }
        let FoundLibrary { version, file } = library.found();
        let found =
            FoundLibrary { version: format!("{version} (hipBLASLt is not used: {why})"), file };
        let version = library.version();
        let library = Products::new(library, device);
        let name = format!("{version}, solutions {:016x}", library.digest()?.value);
        Ok(Self { library: Library::RocBlas(library), name, found })
    }

    /// # Errors
    /// [`KernelError::Unavailable`] where the library is not there, does not fit, makes no handle, or has nothing for the device.
    fn open_hipblaslt(context: &Arc<Context>, device: &str) -> Result<Self> {
        let library = HipBlasLt::open(context)?;
        let (version, found) = (library.version(), library.found());
        let library = Products::new(library, device);
        let unavailable = |reason| KernelError::Unavailable { backend: BACKEND, reason };
        let digest = library.digest().map_err(|error| unavailable(error.to_string()))?;
        if digest.products == 0 {
            return Err(unavailable(format!("{version} proposes no algorithm for {device}")));
        }
        let name = format!("{version}, solutions {:016x}", digest.value);
        Ok(Self { library: Library::HipBlasLt(library), name, found })
    }

    /// The library, its version, and the digest of its choices.
    pub(super) fn name(&self) -> String {
        self.name.clone()
    }

    /// The library of each device that the kernels support, for the inventory. Without such a device it is rocBLAS, whose version
    /// is then asked for without a device.
    ///
    /// # Errors
    /// As for [`open`](Self::open), and what made the driver fail.
    pub(super) fn found() -> Result<FoundLibrary> {
        let table = &Hip::get()?.table;
        let mut found: Vec<(FoundLibrary, Vec<String>)> = Vec::new();
        for ordinal in 0..context::device_count(table).unwrap_or(0) {
            let context = Context::open(table, ordinal);
            let context = table.on(ALL_DEVICES, "opening a device", context)?;
            let device = format!("GPU {ordinal}");
            // On other architectures AMD's libraries may end the process.
            if Amd::architecture(&context, &device).is_err() {
                continue;
            }
            let library = Self::open(&context, &device)?.found;
            match found.iter_mut().find(|(known, _)| *known == library) {
                Some((_, devices)) => devices.push(ordinal.to_string()),
                None => found.push((library, vec![ordinal.to_string()])),
            }
        }
        if found.is_empty() {
            return Ok(rocblas::Functions::get()?.found());
        }
        let file = found.first().and_then(|(library, _)| library.file.clone());
        let version = match &found[..] {
            [(library, _)] => library.version.clone(),
            several => {
                let of = |(library, devices): &(FoundLibrary, Vec<String>)| {
                    format!("on GPU {} {}", devices.join(", "), library.version)
                };
                several.iter().map(of).collect::<Vec<_>>().join("; ")
            }
        };
        Ok(FoundLibrary { version, file })
    }

    /// Enqueues a product.
    ///
    /// # Errors
    /// As for [`Products::matmul`].
    ///
    /// # Safety
    /// As for [`Products::matmul`].
    pub(super) unsafe fn matmul(
        &self,
        driver: &Rocm,
        queue: &mut Queue,
        product: MatrixProduct,
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe {
            match &self.library {
                Library::HipBlasLt(products) => products.matmul(driver, queue, product),
                Library::RocBlas(products) => products.matmul(driver, queue, product),
            }
        }
    }
}
