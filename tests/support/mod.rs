//! Common parts of the promises: a tiny run, all of its files, and the program.

pub mod device;
pub mod hip_runtime;
pub mod killed;
pub mod outcome;
pub mod processes;
pub mod program;
mod tested_backend;
pub mod web_server;
pub mod workbench;

pub use outcome::{Outcome, assert_same};
pub use program::{Finished, Running};
pub use workbench::{Job, Workbench};
