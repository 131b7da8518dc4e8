//! Kernels that train sequence models, and the devices that run them.
//!
//! - [`Backend`] is the contract between a model and a device: opaque buffers, device streams and
//!   events, explicit host reads and writes, and one method per kernel. Dispatch is static.
//! - [`shape`] holds the checked shapes: constructing one is the validation, and a launch takes it.
//! - [`Cpu`] is the backend that needs nothing installed: matrix products with AVX-512 or by
//!   `matrixmultiply`, and vectorised loops with run-time dispatch, equal to the bit on AVX2 and
//!   AVX-512.
//! - [`Gpu`] is the backend for GPUs: kernels in one dialect for CUDA and HIP, compiled at first use, over a small
//!   [`Driver`](gpu::Driver). [`cuda`] drives NVIDIA's and [`rocm`] AMD's, by one implementation over a table of their
//!   functions; the emulator runs the same kernels on the CPU, for tests.
//! - [`reference`](mod@reference) defines every kernel again in plain `f64`; tests compare against
//!   it, and [`checks`] compares the kernels of a device with it wherever the program runs. Both are the feature
//!   `reference`. [`draw`] is the definition that programs run as well.
//!
//! Start at [`Backend`]. This crate imports nothing else of the workspace.

pub mod backend;
#[cfg(feature = "reference")]
pub mod checks;
pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod draw;
#[cfg(feature = "emulator")]
pub mod emulator;
pub mod error;
mod float_environment;
pub mod gpu;
pub mod master;
pub mod process;
#[cfg(feature = "reference")]
pub mod reference;
#[cfg(feature = "rocm")]
pub mod rocm;
pub mod shape;
pub mod shared;
pub mod view;

pub use backend::{
    Attention, AttentionBackward, AttentionStep, Backend, CachedAttention, CausalConv1d,
    CausalConv1dBackward, CausalConv1dPiece, DeviceKind, Element, HeadScan, HeadScanBackward,
    HeadScanPiece, IGNORED_TARGET, MemoryPlace, NUMERICS_VERSION, PeerAccess, Runtime,
    SelectiveScan, SelectiveScanBackward, SelectiveScanPiece, SelectiveScanStep,
};
pub use cpu::Cpu;
#[cfg(feature = "cuda")]
pub use cuda::Cuda;
#[cfg(feature = "emulator")]
pub use emulator::Emulator;
pub use error::{KernelError, Result};
pub use float_environment::FloatEnvironment;
pub use gpu::{Bf16, Fp32, Gpu};
pub use master::{Master, MasterMut, Run, remainder_elements};
#[cfg(feature = "rocm")]
pub use rocm::Rocm;
pub use shared::{HostView, Shared};
pub use view::{Matrix, MatrixMut, Slice, SliceMut};
