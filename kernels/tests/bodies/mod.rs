//! The kernels' test bodies, one module a kernel, generic over the backend.
//!
//! A body checks a backend against the definitions in `tidemill_kernels::reference` and against the
//! promises of `tidemill_kernels::backend`, and returns a [`Transcript`](agreement::Transcript) of
//! the bits that it saw. The test file of a backend (`cpu.rs`) names the arms and runs every body on
//! each of them.

pub mod adamw;
pub mod agreement;
pub mod causal_conv1d;
pub mod causal_conv1d_step;
pub mod cross_entropy;
pub mod device;
pub mod embedding;
pub mod gradient_sums;
pub mod inputs;
pub mod matmul;
pub mod memory;
pub mod refusals;
pub mod rms_norm;
pub mod scan_case;
pub mod selective_scan;
pub mod selective_scan_step;
pub mod views;
pub mod weight_gradient;
