//! The arms of a test: ways to run a backend.

use super::agreement::Transcript;

/// One way to run a backend.
pub struct Arm<B> {
    /// What reports call it.
    pub name: String,
    pub backend: B,
    pub sizes: Sizes,
    pub sums: Sums,
}

/// How much work an arm may be given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sizes {
    /// Every combination of sizes.
    Full,
    /// Every size, but few combinations: for an emulator that takes microseconds a thread.
    Small,
}

impl Sizes {
    /// What this arm is given of two lists.
    pub fn choose<T>(self, full: Vec<T>, small: Vec<T>) -> Vec<T> {
        if self == Self::Small { small } else { full }
    }
}

/// What an arm promises of the sums inside its kernels, beyond a fixed order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sums {
    /// Their terms are added one after the other, in the order of the definitions.
    OneByOne,
    /// Their order is the kernels' own, and may follow from how a matrix is stored.
    Ordered,
}

/// Runs `body` on every arm; all must see the same bits.
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
