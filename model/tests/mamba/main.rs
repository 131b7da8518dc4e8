//! The promises of the Mamba model: right gradients, the same bits however a lane is walked through, and plain errors.

mod contract;
mod gradients;
mod grains;
mod lane;
