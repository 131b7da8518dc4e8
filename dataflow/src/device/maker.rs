//! Makers of GPUs, as far as this build knows their backends: the one place where their drivers are named.

#[cfg(feature = "cuda")]
use tidemill_kernels::Cuda;
#[cfg(feature = "rocm")]
use tidemill_kernels::Rocm;

#[cfg(all(feature = "cli", any(feature = "cuda", feature = "rocm")))]
use tidemill_kernels::gpu::Installed;
#[cfg(feature = "cli")]
use tidemill_kernels::gpu::Inventory;

use super::choice::{Gpus, NoGpu};
#[cfg(any(feature = "cuda", feature = "rocm"))]
use super::gpus;
use super::{Precision, WithBackend};
#[cfg(not(all(feature = "cuda", feature = "rocm")))]
use crate::error::JobError;
use crate::error::Result;

/// A maker of GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Maker {
    Nvidia,
    Amd,
}

impl Maker {
    /// In the order in which `auto` looks for their GPUs.
    pub(super) const ALL: [Self; 2] = [Self::Nvidia, Self::Amd];

    /// `device.backend` for its GPUs; the feature that has the backend is called the same.
    pub(super) fn backend(self) -> &'static str {
        match self {
            Self::Nvidia => "cuda",
            Self::Amd => "rocm",
        }
    }

    /// All GPUs; the first can be opened.
    pub(super) fn usable_gpus(self) -> std::result::Result<Gpus, NoGpu> {
        match self {
            #[cfg(feature = "cuda")]
            Self::Nvidia => gpus::usable::<Cuda>(),
            #[cfg(feature = "rocm")]
            Self::Amd => gpus::usable::<Rocm>(),
            #[cfg(not(all(feature = "cuda", feature = "rocm")))]
            left_out => Err(NoGpu { why: left_out.is_left_out(), gpus: 0, failure: None }),
        }
    }

    /// The hardware and libraries of the maker, part by part, or why this build cannot tell.
    #[cfg(feature = "cli")]
    pub(super) fn inventory(self) -> std::result::Result<Box<Inventory>, String> {
        match self {
            #[cfg(feature = "cuda")]
            Self::Nvidia => Ok(Box::new(Cuda::inventory())),
            #[cfg(feature = "rocm")]
            Self::Amd => Ok(Box::new(Rocm::inventory())),
            #[cfg(not(all(feature = "cuda", feature = "rocm")))]
            left_out => Err(left_out.is_left_out()),
        }
    }

    /// Opens the GPU of each worker, each GPU once, and runs `code` on them.
    pub(super) fn open<W: WithBackend>(
        self,
        ordinals: &[usize],
        precision: Precision,
        code: W,
    ) -> Result<W::Output> {
        match self {
            #[cfg(feature = "cuda")]
            Self::Nvidia => gpus::open::<Cuda, W>(self, ordinals, precision, code),
            #[cfg(feature = "rocm")]
            Self::Amd => gpus::open::<Rocm, W>(self, ordinals, precision, code),
            #[cfg(not(all(feature = "cuda", feature = "rocm")))]
            left_out => {
                let _ = (ordinals, precision, code);
                let (key, why) = ("device.backend", left_out.is_left_out());
                Err(JobError::Device { key, backend: left_out.backend(), why })
            }
        }
    }

    #[cfg(not(all(feature = "cuda", feature = "rocm")))]
    fn is_left_out(self) -> String {
        format!("this program was built without the feature {}", self.backend())
    }
}
