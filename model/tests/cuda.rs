//! Every test body of the model on an NVIDIA GPU, in both precisions.

mod bodies;
#[path = "../../tests/support/device_program.rs"]
mod device_program;

use std::process::ExitCode;

use bodies::arm::Arm;
use bodies::every_body;
use device_program::{Program, Test};
use tidemill_kernels::gpu::{Installed, Precision};
use tidemill_kernels::{Backend, Bf16, Cuda, Fp32, Gpu};

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
