//! Every test body on the CPU: with one thread and three, and with every instruction set.
//!
//! All arms are one device kind, so besides agreeing with the definitions they must agree with each
//! other to the bit, and an arm with itself when it runs again.

mod bodies;

use std::io::Write;
use std::num::NonZeroUsize;
use std::sync::Once;

use bodies::agreement::Transcript;
use bodies::arm::{Arm, agree};
use bodies::every_body;
use tidemill_kernels::cpu::InstructionSet;
use tidemill_kernels::{Cpu, Runtime};

/// The arms that this machine can run; reports the others once, past the capture of test output.
fn arms() -> Vec<Arm<Cpu>> {
    static SAID: Once = Once::new();
    let threads = |count| NonZeroUsize::new(count).unwrap();
    let mut arms = vec![
        Arm::new("cpu, 1 thread", Cpu::new(threads(1)).unwrap()),
        Arm::new("cpu, 3 threads", Cpu::new(threads(3)).unwrap()),
    ];
    let (available, missing): (Vec<_>, Vec<_>) =
        InstructionSet::ALL.into_iter().partition(|set| set.is_available());
    for set in available {
        let cpu = Cpu::with_instruction_set(threads(1), set).unwrap();
        arms.push(Arm::new(format!("cpu, {}", set.name()), cpu));
    }
    SAID.call_once(|| {
        for set in missing {
            let name = set.name();
            let line = format!("not run: cpu, {name}: this processor lacks it\n");
            std::io::stderr().write_all(line.as_bytes()).unwrap();
        }
    });
    arms
}

/// Runs a body on every arm, and again on the first.
fn on_every_arm(body: fn(&Arm<Cpu>) -> Transcript) {
    let arms = arms();
    let arms: Vec<_> = arms.iter().chain(&arms[..1]).collect();
    agree(&arms, body);
}

macro_rules! tests {
    (
        of_all_arms { $($of_all:ident: $every:path;)* }
        of_one_arm { $($of_one:ident: $one:path;)* }
        of_groups { $($of_groups:ident: $by_groups:path;)* }
        of_one_in_groups { $($of_one_in_groups:ident: $one_by_groups:path;)* }
    ) => {
        $(
            #[test]
            fn $of_groups() {
                on_every_arm($by_groups);
            }
        )*
        $(
            #[test]
            fn $of_one_in_groups() {
                $one_by_groups(&arms()[1]);
            }
        )*
        $(
            #[test]
            fn $of_all() {
                on_every_arm($every);
            }
        )*
        $(
            #[test]
            fn $of_one() {
                $one(&arms()[1]);
            }
        )*
    };
}

every_body!(tests);

#[test]
fn all_arms_are_one_device_kind() {
    let arms = arms();
    for arm in &arms {
        assert_eq!(arm.backend.device_kind(), arms[0].backend.device_kind(), "{}", arm.name);
    }
}
