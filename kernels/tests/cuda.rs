//! Every test body on an NVIDIA GPU, in both precisions.
//!
//! A program of its own instead of `#[test]`s, which cannot report that they did not run: without a
//! device each test is reported as not run, and if `TIDEMILL_TEST_BACKEND=cuda` asks for one, the
//! program fails. Arguments select the tests whose names contain one of them.

#[path = "bodies/algorithms.rs"]
mod algorithms;
mod bodies;
#[path = "../../tests/support/device_program.rs"]
mod device_program;
#[path = "bodies/opening.rs"]
mod opening;

use std::process::ExitCode;
use std::time::Instant;

use bodies::arm::{Arm, Sizes, agree};
use bodies::every_body;
use bodies::memory::handed_on;
use bodies::number::Number;
use device_program::{Program, Test};
use tidemill_kernels::gpu::{Installed, Precision};
use tidemill_kernels::{Bf16, Cuda, Fp32, Gpu, Runtime};

/// The variable that asks for few combinations of sizes, such as under a sanitizer: `small`.
const SIZES_VARIABLE: &str = "TIDEMILL_TEST_SIZES";

macro_rules! tests {
    (
        of_all_arms { $($of_all:ident: $every:path;)* }
        of_one_arm { $($of_one:ident: $one:path;)* }
        of_groups { $($of_groups:ident: $by_groups:path;)* }
        of_one_in_groups { $($of_one_in_groups:ident: $one_by_groups:path;)* }
    ) => {
        /// A body runs twice where it must find the same bits again.
        fn tests<P: Precision<Activation: Number>>() -> Vec<Test<Arm<Gpu<Cuda, P>>>> {
            let mut all: Vec<Test<Arm<Gpu<Cuda, P>>>> = vec![
                ("every_source_compiles", |arm| arm.backend.compile_all().unwrap()),
                ("a_device_that_is_opened_again_is_of_the_same_kind", is_of_the_same_kind),
                ("devices_wait_for_each_other", devices_wait_for_each_other),
                ("opening_a_device_again_spoils_no_recording", opening_again_spoils_no_recording),
                $((stringify!($of_all), |arm| agree(&[arm, arm], $every)),)*
                $((stringify!($of_one), $one),)*
                $((stringify!($of_groups), |arm| agree(&[arm, arm], $by_groups)),)*
                $((stringify!($of_one_in_groups), $one_by_groups),)*
            ];
            all.extend(rules());
            all
        }
    };
}

every_body!(tests);

macro_rules! rules {
    ($($rule:ident)*) => {
        /// Algorithms that must not be chosen for a product are passed over.
        fn rules<P: Precision>() -> Vec<Test<Arm<Gpu<Cuda, P>>>> {
            vec![$((stringify!($rule), algorithms::$rule),)*]
        }
    };
}

algorithms::every_rule!(rules);

/// The digest of the library's choices is the same every time, and includes the library's version.
fn is_of_the_same_kind<P: Precision>(arm: &Arm<Gpu<Cuda, P>>) {
    let kind = arm.backend.device_kind();
    assert!(kind.matrix_library.contains(", algorithms "), "{kind:?}");
    for _ in 0..2 {
        let start = Instant::now();
        let again = Gpu::<Cuda, P>::new(Cuda::open(0).unwrap());
        println!("opened again in {:?}", start.elapsed());
        assert_eq!(again.device_kind(), kind);
    }
}

fn opening_again_spoils_no_recording<P: Precision<Activation: Number>>(arm: &Arm<Gpu<Cuda, P>>) {
    opening::spoils_no_recording(arm, || drop(Cuda::open(0).unwrap()));
}

/// Kernels of one device read memory of another, ordered by events alone.
fn devices_wait_for_each_other<P: Precision>(arm: &Arm<Gpu<Cuda, P>>) {
    let devices = Cuda::device_count().unwrap();
    if devices == 1 {
        println!("NOT RUN: devices_wait_for_each_other: there is one device");
        return;
    }
    let peer = Gpu::<Cuda, P>::new(Cuda::open(1).unwrap());
    for devices in [[&arm.backend, &peer], [&peer, &arm.backend]] {
        for _ in 0..5 {
            let [found, expected] =
                handed_on(devices, |stream, event| devices[0].wait_for(stream, event).unwrap());
            assert_eq!(found, expected);
        }
    }
}

/// Runs the tests of one precision on the first device, if there is one.
fn run<P: Precision<Activation: Number>>(program: &mut Program, precision: &str) {
    let start = Instant::now();
    let cuda = Cuda::open(0);
    println!("opened in {:?}", start.elapsed());
    let arm = cuda.map(|cuda| {
        let mut arm = Arm::new(format!("cuda, {precision}"), Gpu::<Cuda, P>::new(cuda));
        if std::env::var(SIZES_VARIABLE).is_ok_and(|sizes| sizes == "small") {
            arm.sizes = Sizes::Small;
        }
        arm
    });
    if let Ok(arm) = &arm {
        println!("{}: {:?}", arm.name, arm.backend.device_kind());
    }
    program.run(precision, arm.as_ref(), &tests::<P>());
}

fn main() -> ExitCode {
    let mut program = Program::new("cuda");
    run::<Fp32>(&mut program, "fp32");
    run::<Bf16>(&mut program, "bf16");
    program.finish()
}
