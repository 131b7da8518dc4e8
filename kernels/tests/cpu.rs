//! Every test body on the CPU: with one thread and three, and with every instruction set.
//!
//! All arms are one device kind, so besides agreeing with the definitions they must agree with each
//! other to the bit, and an arm with itself when it runs again.

mod bodies;

use std::io::Write;
use std::num::NonZeroUsize;
use std::sync::Once;

use bodies::agreement::Transcript;
use tidemill_kernels::cpu::InstructionSet;
use tidemill_kernels::{Backend, Cpu};

/// One way to run the CPU's kernels.
struct Arm {
    name: String,
    cpu: Cpu,
}

/// The arms that this machine can run; says, once and past the capture of test output, which not.
fn arms() -> Vec<Arm> {
    static SAID: Once = Once::new();
    let threads = |count| NonZeroUsize::new(count).unwrap();
    let mut arms = vec![
        Arm { name: "cpu, 1 thread".to_owned(), cpu: Cpu::new(threads(1)).unwrap() },
        Arm { name: "cpu, 3 threads".to_owned(), cpu: Cpu::new(threads(3)).unwrap() },
    ];
    let (available, missing): (Vec<_>, Vec<_>) =
        InstructionSet::ALL.into_iter().partition(|set| set.is_available());
    for set in available {
        let cpu = Cpu::with_instruction_set(threads(1), set).unwrap();
        arms.push(Arm { name: format!("cpu, {}", set.name()), cpu });
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

/// Runs a body on every arm, and again on the first; all must see the same bits.
fn on_every_arm(body: fn(&Cpu) -> Transcript) {
    let arms = arms();
    let run = |arm: &Arm| {
        eprintln!("arm: {}", arm.name);
        body(&arm.cpu)
    };
    let first = run(&arms[0]);
    assert!(!first.is_empty(), "a body that records nothing compares nothing");
    run(&arms[0]).assert_same("a second run", &first, "the first");
    for arm in &arms[1..] {
        run(arm).assert_same(&arm.name, &first, &arms[0].name);
    }
}

/// Tests that run one body on every arm.
macro_rules! on_every_arm {
    ($($test:ident: $body:path;)*) => {
        $(
            #[test]
            fn $test() {
                on_every_arm($body);
            }
        )*
    };
}

on_every_arm! {
    matmul_agrees: bodies::matmul::agrees;
    matmul_backward_agrees: bodies::matmul::backward_agrees;
    matmul_elements_are_independent: bodies::matmul::elements_are_independent;
    weight_gradient_agrees: bodies::weight_gradient::agrees;
    embedding_agrees: bodies::embedding::agrees;
    rms_norm_agrees: bodies::rms_norm::agrees;
    rms_norm_rows_are_independent: bodies::rms_norm::rows_are_independent;
    causal_conv1d_agrees: bodies::causal_conv1d::agrees;
    silu_agrees: bodies::causal_conv1d::silu_agrees;
    causal_conv1d_samples_are_independent: bodies::causal_conv1d::samples_are_independent;
    causal_conv1d_step_agrees: bodies::causal_conv1d_step::agrees;
    selective_scan_agrees: bodies::selective_scan::agrees;
    selective_scan_samples_are_independent: bodies::selective_scan::samples_are_independent;
    selective_scan_step_agrees: bodies::selective_scan_step::agrees;
    softplus_agrees: bodies::selective_scan_step::softplus_agrees;
    cross_entropy_agrees: bodies::cross_entropy::agrees;
    cross_entropy_rows_are_independent: bodies::cross_entropy::rows_are_independent;
    accumulate_agrees: bodies::gradient_sums::accumulate_agrees;
    mean_gradient_agrees: bodies::gradient_sums::mean_gradient_agrees;
    sums_of_squares_agree: bodies::gradient_sums::sums_of_squares_agree;
    adamw_agrees: bodies::adamw::agrees;
}

/// Tests that need one arm: what they check is decided before a kernel's loops.
macro_rules! on_one_arm {
    ($($test:ident: $body:path;)*) => {
        $(
            #[test]
            fn $test() {
                $body(&arms()[1].cpu);
            }
        )*
    };
}

on_one_arm! {
    buffers_hold_what_is_written: bodies::memory::buffers_hold_what_is_written;
    views_stay_inside: bodies::views::views_stay_inside;
    parts_of_views_name_their_elements: bodies::views::parts_name_their_elements;
    compute_weights_follow_their_masters: bodies::memory::compute_weights_follow_their_masters;
    events_complete: bodies::memory::events_complete;
    adamw_moves_by_the_learning_rate: bodies::adamw::moves_by_the_learning_rate;
    embedding_refuses_tokens_out_of_range: bodies::embedding::refuses_tokens_out_of_range;
    cross_entropy_refuses_targets_out_of_range: bodies::cross_entropy::refuses_targets_out_of_range;
    weight_gradient_is_a_product_then_a_sum: bodies::weight_gradient::is_a_product_then_a_sum;
    matmul_refuses_shapes: bodies::refusals::matmul;
    weight_gradient_refuses_shapes: bodies::refusals::weight_gradient;
    embedding_refuses_shapes: bodies::refusals::embedding;
    rms_norm_refuses_shapes: bodies::refusals::rms_norm;
    causal_conv1d_refuses_shapes: bodies::refusals::causal_conv1d;
    causal_conv1d_step_refuses_shapes: bodies::refusals::causal_conv1d_step;
    selective_scan_refuses_shapes: bodies::refusals::selective_scan;
    selective_scan_step_refuses_shapes: bodies::refusals::selective_scan_step;
    cross_entropy_refuses_shapes: bodies::refusals::cross_entropy;
    updates_refuse_shapes: bodies::refusals::updates;
}

#[test]
fn all_arms_are_one_device_kind() {
    let arms = arms();
    for arm in &arms {
        assert_eq!(arm.cpu.device_kind(), arms[0].cpu.device_kind(), "{}", arm.name);
    }
}
