//! The arms of a test: ways to run a backend.

use tidemill_kernels::Backend;

use super::agreement::Transcript;

/// One way to run a backend.
pub struct Arm<B> {
    /// Its name in reports.
    pub name: String,
    pub backend: B,
    pub sizes: Sizes,
    pub sums: Sums,
}

impl<B: Backend> Arm<B> {
    pub fn new(name: impl Into<String>, backend: B) -> Self {
        let (sizes, sums) = match backend.device_kind().backend.as_str() {
            "cpu" => (Sizes::Host, Sums::OneByOne),
            "emulator" => (Sizes::Small, Sums::Ordered),
            _ => (Sizes::Full, Sums::Ordered),
        };
        Self { name: name.into(), backend, sizes, sums }
    }
}

/// How much work an arm gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sizes {
    /// Every combination of sizes.
    Full,
    /// Every combination, except sizes whose code path needs many blocks at once.
    Host,
    /// Every size, but few combinations: for an emulator that takes microseconds a thread.
    Small,
}

impl Sizes {
    /// Chooses one of two lists for this arm.
    pub fn choose<T>(self, full: Vec<T>, small: Vec<T>) -> Vec<T> {
        match self {
            Self::Full | Self::Host => full,
            Self::Small => small,
        }
    }

    /// Chooses one of two lists; the full one is for the many blocks of a GPU.
    pub fn choose_for_gpu<T>(self, full: Vec<T>, small: Vec<T>) -> Vec<T> {
        match self {
            Self::Full => full,
            Self::Host | Self::Small => small,
        }
    }
}

/// The promise of an arm about the sums inside its kernels, beyond a fixed order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sums {
    /// Terms are added one after the other, in the order of the definitions.
    OneByOne,
    /// The order is the kernels' own, and may depend on how a matrix is stored.
    Ordered,
}

/// Runs `body` on every arm; the results must have the same bits on all.
pub fn agree<B>(arms: &[&Arm<B>], body: fn(&Arm<B>) -> Transcript) {
    let run = |arm: &Arm<B>| {
        eprintln!("arm: {}", arm.name);
        body(arm)
    };
    let first = run(arms[0]);
    assert!(!first.is_empty(), "a body that records nothing compares nothing");
    for arm in &arms[1..] {
        run(arm).assert_same(&arm.name, &first, &arms[0].name);
    }
}
