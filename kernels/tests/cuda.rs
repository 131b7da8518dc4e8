//! Every test body on an NVIDIA GPU, in both precisions.
//!
//! A program of its own instead of `#[test]`s, which cannot say that they did not run: without a device each test is told
//! as not run, and if `TIDEMILL_TEST_BACKEND=cuda` asks for one, the program fails. Arguments select the tests whose names
//! hold one of them.

mod bodies;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;

use bodies::arm::{Arm, Sizes, agree};
use bodies::every_body;
use bodies::number::Number;
use tidemill_kernels::gpu::Precision;
use tidemill_kernels::{Backend, Bf16, Cuda, Fp32, Gpu};

/// The variable that says which backend must be tested.
const BACKEND_VARIABLE: &str = "TIDEMILL_TEST_BACKEND";

/// The variable that asks for few combinations of sizes, such as under a sanitizer: `small`.
const SIZES_VARIABLE: &str = "TIDEMILL_TEST_SIZES";

/// A test: its name, and what it runs on the device.
type Test<P> = (&'static str, fn(&Arm<Gpu<Cuda, P>>));

macro_rules! tests {
    (
        of_all_arms { $($of_all:ident: $every:path;)* }
        of_one_arm { $($of_one:ident: $one:path;)* }
    ) => {
        /// A body runs twice where it must find the same bits again.
        fn tests<P: Precision<Activation: Number>>() -> Vec<Test<P>> {
            vec![
                ("every_source_compiles", |arm| arm.backend.compile_all().unwrap()),
                $((stringify!($of_all), |arm| agree(&[arm, arm], $every)),)*
                $((stringify!($of_one), $one),)*
            ]
        }
    };
}

every_body!(tests);

/// What became of tests.
#[derive(Default)]
struct Outcome {
    passed: usize,
    failed: Vec<String>,
    /// Why each of the others did not run.
    not_run: Vec<String>,
}

impl Outcome {
    /// Runs the tests of one precision whose names hold one of `parts`, on the first device if there is one.
    fn run<P: Precision<Activation: Number>>(&mut self, precision: &str, parts: &[String]) {
        let arm = Cuda::open(0).map(|cuda| {
            let mut arm = Arm::new(format!("cuda, {precision}"), Gpu::<Cuda, P>::new(cuda));
            if std::env::var(SIZES_VARIABLE).is_ok_and(|sizes| sizes == "small") {
                arm.sizes = Sizes::Small;
            }
            arm
        });
        if let Ok(arm) = &arm {
            println!("{}: {:?}", arm.name, arm.backend.device_kind());
        }
        for (test, body) in tests::<P>() {
            let name = format!("{precision}::{test}");
            if !parts.is_empty() && !parts.iter().any(|part| name.contains(part.as_str())) {
                continue;
            }
            match &arm {
                Err(error) => {
                    println!("NOT RUN: {name}");
                    self.not_run.push(error.to_string());
                }
                Ok(arm) if catch_unwind(AssertUnwindSafe(|| body(arm))).is_ok() => {
                    println!("test {name} ... ok");
                    self.passed += 1;
                }
                Ok(_) => {
                    println!("test {name} ... FAILED");
                    self.failed.push(name);
                }
            }
        }
    }
}

fn main() -> ExitCode {
    let parts: Vec<String> =
        std::env::args().skip(1).filter(|part| !part.starts_with('-')).collect();
    let mut outcome = Outcome::default();
    outcome.run::<Fp32>("fp32", &parts);
    outcome.run::<Bf16>("bf16", &parts);
    let Outcome { passed, failed, not_run } = outcome;
    println!("{passed} passed, {} failed {failed:?}, {} not run", failed.len(), not_run.len());
    if let Some(reason) = not_run.first() {
        println!("no CUDA device: these tests did not run ({reason})");
    }
    let asked_for = std::env::var(BACKEND_VARIABLE).is_ok_and(|backend| backend == "cuda");
    if failed.is_empty() && (not_run.is_empty() || !asked_for) {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}
