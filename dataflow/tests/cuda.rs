//! The training graph on an NVIDIA GPU: the bits of a small Mamba in both precisions, and runs that move between the GPU
//! and the CPU.

#[path = "../../tests/support/device_program.rs"]
mod device_program;
#[path = "graph/harness.rs"]
mod harness;
#[path = "graph/lookup.rs"]
mod lookup;
#[path = "device/moves.rs"]
mod moves;
#[path = "graph/on_device.rs"]
mod on_device;

use std::process::ExitCode;

use device_program::{Program, Test};
use moves::Other;
use on_device::{Arm, every_body};
use tidemill::kernels::gpu::{Installed, Precision};
use tidemill::kernels::{Backend, Bf16, Cuda, Fp32, Gpu};

macro_rules! tests {
    ($($test:ident: $body:path;)*) => {
        fn tests<B: Backend>() -> Vec<Test<Arm<B>>> {
            vec![$((stringify!($test), $body),)*]
        }
    };
}

every_body!(tests);

fn run<P: Precision>(program: &mut Program, precision: &str) {
    let arm =
        Cuda::open(0).map(|cuda| Arm::new(format!("cuda, {precision}"), Gpu::<Cuda, P>::new(cuda)));
    program.run(precision, arm.as_ref(), &tests());
}

const MOVES: [Test<Other>; 2] = [
    (
        "a_run_may_move_and_move_back_at_a_checkpoint",
        moves::a_run_may_move_and_move_back_at_a_checkpoint,
    ),
    (
        "peers_on_another_kind_of_device_are_refused",
        moves::peers_on_another_kind_of_device_are_refused,
    ),
];

fn main() -> ExitCode {
    let mut program = Program::new("cuda");
    run::<Fp32>(&mut program, "fp32");
    run::<Bf16>(&mut program, "bf16");
    let other = Cuda::open(0).map(|_| Other { backend: "cuda" });
    program.run("moves", other.as_ref(), &MOVES);
    program.finish()
}
