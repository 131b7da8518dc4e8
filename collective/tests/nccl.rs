//! Ranks of several processes on emulated devices, whose bytes a library moves that stands in for NCCL.

mod group;
mod stand_in;

use group::Arm;
use tidemill_kernels::emulator::EmulatorSettings;
use tidemill_kernels::{Emulator, Fp32, Gpu};

const ARM: Arm<Gpu<Emulator, Fp32>> = Arm {
    device: || Gpu::new(Emulator::new(EmulatorSettings { warp: 32, seed: 0 }).unwrap()),
    library: stand_in::library,
};

group::every_body!();
