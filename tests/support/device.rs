//! The device of these tests: the CPU, unless the environment names another.
//!
//! If the named device is missing, every test that trains fails: nothing is skipped.

use super::tested_backend::BACKEND_VARIABLE;

/// The variable with the precision: `fp32` (the default) or `bf16`.
const PRECISION_VARIABLE: &str = "TIDEMILL_TEST_PRECISION";

/// `device.backend` of every run: `cpu` by default.
pub fn backend() -> String {
    std::env::var(BACKEND_VARIABLE).unwrap_or_else(|_| "cpu".to_owned())
}

/// `device.precision` of every run.
pub fn precision() -> String {
    std::env::var(PRECISION_VARIABLE).unwrap_or_else(|_| "fp32".to_owned())
}

/// The arguments of the program, with flags for the device where the subcommand has no config that
/// names it.
pub fn with_device(arguments: &[&str]) -> Vec<String> {
    let mut all: Vec<String> = arguments.iter().map(|&argument| argument.to_owned()).collect();
    if let ["generate" | "score", ..] | ["bench", "train", ..] = arguments
        && !arguments.contains(&"--backend")
    {
        all.extend(["--backend".to_owned(), backend(), "--precision".to_owned(), precision()]);
    }
    all
}
