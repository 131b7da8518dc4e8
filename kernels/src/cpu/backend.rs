//! The [backend](crate::backend)'s traits for [`Cpu`]: they check shapes, divide rows among the compute threads, call kernels.

mod attention;
mod causal_conv1d;
mod head_scan;
mod runtime;
mod selective_scan;
