//! The `tidemill` program; see [`tidemill::cli`].

use std::process::ExitCode;

fn main() -> ExitCode {
    tidemill::cli::main()
}
