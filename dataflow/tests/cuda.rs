//! The training graph on an NVIDIA GPU: the bits of a small Mamba in both precisions.

#[path = "../../tests/support/device_program.rs"]
mod device_program;
#[path = "graph/harness.rs"]
mod harness;
#[path = "graph/lookup.rs"]
mod lookup;
#[path = "graph/on_device.rs"]
mod on_device;

use std::process::ExitCode;

use device_program::{Program, Test};
use on_device::{Arm, every_body};
use tidemill::kernels::gpu::Precision;
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

fn main() -> ExitCode {
    let mut program = Program::new("cuda");
    run::<Fp32>(&mut program, "fp32");
    run::<Bf16>(&mut program, "bf16");
    program.finish()
}
