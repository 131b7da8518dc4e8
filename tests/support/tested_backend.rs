//! Which backend the environment asks tests to run on.

/// The variable that names it: such as `cpu` or `cuda`.
pub const BACKEND_VARIABLE: &str = "TIDEMILL_TEST_BACKEND";
