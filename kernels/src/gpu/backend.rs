//! The [backend](crate::backend)'s traits for [`Gpu`]: memory and order from the driver, kernels from the launchers.

mod attention;
mod runtime;
