//! The [backend](crate::backend)'s traits for [`Gpu`]: memory and order from the driver, kernels from the launchers.

mod attention;
mod causal_conv1d;
mod head_scan;
mod runtime;
mod selective_scan;
