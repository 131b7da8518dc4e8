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

#[test]
fn any_number_of_ranks_sums_along_the_tree() {
    group::any_number_of_ranks_sums_along_the_tree(&ARM);
}

#[test]
fn what_the_library_does_alone_is_done_to_all_ranks() {
    group::what_the_library_does_alone_is_done_to_all_ranks(&ARM);
}

#[test]
fn a_rank_whose_peer_never_comes_can_be_ended() {
    group::a_rank_whose_peer_never_comes_can_be_ended(&ARM);
}

#[test]
fn what_the_library_refuses_is_an_error_with_its_words() {
    group::what_the_library_refuses_is_an_error_with_its_words(&ARM);
}
