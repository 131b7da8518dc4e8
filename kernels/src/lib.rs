//! Numbers on devices: the kernels that train sequence models, and what runs them.
//!
//! - [`Backend`] is the contract between a model and a device: opaque buffers, device streams and
//!   events, explicit host reads and writes, and one method per kernel. Dispatch is static.
//! - [`shape`] holds the checked shapes: constructing one is the validation, and a launch takes it.
//! - [`Cpu`] is the backend that needs nothing installed: `matrixmultiply` for matrix products and
//!   vectorised loops with run-time dispatch, equal to the bit on AVX2 and AVX-512.
//! - [`reference`](mod@reference) defines every kernel again in plain `f64`; tests compare against
//!   it.
//!
//! Start at [`Backend`]. This crate imports nothing else of the workspace.

pub mod backend;
pub mod cpu;
pub mod error;
pub mod reference;
pub mod shape;
pub mod view;

pub use backend::{Backend, DeviceKind, Element, IGNORED_TARGET, NUMERICS_VERSION};
pub use cpu::Cpu;
pub use error::{KernelError, Result};
pub use view::{Matrix, MatrixMut, Slice, SliceMut};
