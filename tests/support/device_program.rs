//! A test program for one device, which may be missing.
//!
//! A `#[test]` cannot report that it did not run. A program with `harness = false` can: without its
//! device it reports each of its tests as not run, and if the environment asks for the device, that
//! is a failure. Arguments select the tests whose names contain one of them.

#[path = "tested_backend.rs"]
mod tested_backend;

use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;

use tested_backend::BACKEND_VARIABLE;

/// A test: its name, and what it runs on the device.
pub type Test<A> = (&'static str, fn(&A));

/// The results of the tests so far.
pub struct Program {
    backend: &'static str,
    parts: Vec<String>,
    passed: usize,
    failed: Vec<String>,
    /// The reasons of the tests that did not run.
    not_run: Vec<String>,
}

impl Program {
    /// The tests of `backend` that the arguments of this process select.
    pub fn new(backend: &'static str) -> Self {
        let parts = std::env::args().skip(1).filter(|part| !part.starts_with('-')).collect();
        Self { backend, parts, passed: 0, failed: Vec::new(), not_run: Vec::new() }
    }

    /// Runs the selected tests of a group on `arm`, if that exists.
    pub fn run<A>(&mut self, group: &str, arm: Result<&A, impl Display>, tests: &[Test<A>]) {
        for (test, body) in tests {
            let name = format!("{group}::{test}");
            let is_selected = |part: &String| name.contains(part.as_str());
            if !self.parts.is_empty() && !self.parts.iter().any(is_selected) {
                continue;
            }
            match &arm {
                Err(reason) => {
                    println!("NOT RUN: {name}");
                    self.not_run.push(reason.to_string());
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

    /// Reports the results of all tests.
    pub fn finish(self) -> ExitCode {
        let Self { backend, passed, failed, not_run, .. } = self;
        println!("{passed} passed, {} failed {failed:?}, {} not run", failed.len(), not_run.len());
        if let Some(reason) = not_run.first() {
            println!("these tests did not run: {reason}");
        }
        let asked_for = std::env::var(BACKEND_VARIABLE).is_ok_and(|name| name == backend);
        if !failed.is_empty() || (asked_for && !not_run.is_empty()) {
            return ExitCode::FAILURE;
        }
        ExitCode::SUCCESS
    }
}
