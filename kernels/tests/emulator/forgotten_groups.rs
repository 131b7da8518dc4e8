//! Kernels of groups of warps that multiply together, with something forgotten or changed: each must fail a body.

use super::forgotten::fails;
use super::*;

/// Whether a body fails in groups of warps that multiply together, where a kernel is changed or is not.
fn fails_in_groups(
    change: Option<SourceChange>,
    seed: u64,
    body: impl Fn(&Arm<Gpu<Emulator, Bf16>>) -> Transcript,
) -> bool {
    let emulator = Emulator::new(EmulatorSettings { warp: 32, seed }).unwrap();
    let mut emulator = emulator.with_group_products().unwrap();
    if let Some(change) = change {
        emulator = emulator.with_change(change);
    }
    fails(emulator, "found", body)
}

/// In kernels that compute-sanitizer checks, every thread arrives at a gate; they compute the same.
#[test]
fn kernels_in_which_every_thread_arrives_agree() {
    let source = "group_product.h";
    let [from, to] = ["#define EVERY_THREAD_ARRIVES 0", "#define EVERY_THREAD_ARRIVES 1"];
    let emulator = Emulator::new(EmulatorSettings { warp: 32, seed: SEEDS[1] }).unwrap();
    let emulator = emulator.with_group_products().unwrap();
    let changed = emulator.with_change(SourceChange { source, from, to });
    let changed = Arm::new("every thread arrives".to_owned(), Gpu::new(changed));
    let arms = [&groups(SEEDS[1]), &changed];
    for body in [
        bodies::attention::agrees,
        bodies::attention::long_walks_agree,
        bodies::ordered_product::rows_of_any_number_agree,
    ] {
        agree(&arms, body);
    }
}

/// Products have one order over their terms; and where warps have their own rings, a block waits for all of them.
#[test]
fn products_of_groups_that_differ_fail_the_body() {
    let changes = [
        (
            "#include \"ordered_groups.h\"",
            "#define SEGMENT 256\n#include \"ordered_groups.h\"\n#undef SEGMENT",
        ),
        (
            "#include \"ordered_staged.h\"",
            "#define __syncthreads()\n#include \"ordered_staged.h\"\n#undef __syncthreads",
        ),
        ("total.at[j] += sum[i].at[j];", ";"),
    ];
    for (from, to) in changes {
        let change = SourceChange { source: "ordered_product.cu", from, to };
        let body = bodies::ordered_product::rows_of_any_number_agree;
        assert!(fails_in_groups(Some(change), SEEDS[1], body), "no check saw \"{to}\" for {from}");
    }
}

/// Biases are as exact as a slope in three parts, begin at each tile's first key, and are those of the item's head.
#[test]
fn biases_of_groups_that_differ_fail_the_body() {
    let factors = "attention_groups.h";
    let kernel = "attention_forward_groups.h";
    let changes = [
        (factors, "term < 3; term++", "term < 1; term++"),
        (
            factors,
            "const activation* const left = slope.start",
            "const activation* const left = slope.start + 1",
        ),
        (kernel, "static_cast<int>(first - origin)", "static_cast<int>(0 * (first - origin))"),
        (kernel, "slope = inputs.slopes[item.head]", "slope = inputs.slopes[0]"),
        (kernel, "memory.slope(group).clear(THREADS);", ";"),
    ];
    let body = |arm: &Arm<Gpu<Emulator, Bf16>>| {
        bodies::attention::agrees(arm);
        bodies::attention::long_walks_agree(arm)
    };
    for (source, from, to) in changes {
        let change = SourceChange { source, from, to };
        let seen = fails_in_groups(Some(change), SEEDS[1], body);
        assert!(seen, "{source}: no check saw \"{to}\" for {from}");
    }
}

/// A group waits for its slope before it multiplies, and writes the next one after all of its warps have.
#[test]
fn a_slope_that_is_not_waited_for_fails_the_body() {
    let source = "attention_forward_groups.h";
    let changes = [
        ("if (BIASES == Biases::SLOPES) meet(SLOPE + group, GROUP_THREADS);", ""),
        ("            meet(SLOPE + group, GROUP_THREADS);\n            if", "            if"),
    ];
    let body = bodies::attention::rows_are_independent;
    for (from, to) in changes {
        let change = SourceChange { source, from, to };
        // Which warp is held back, and so is missed, is a matter of the seed.
        let seed = (1..=20).find(|&seed| fails_in_groups(Some(change), seed, body));
        let seed = seed.unwrap_or_else(|| panic!("no check saw \"{to}\" for {from}"));
        assert!(!fails_in_groups(None, seed, body), "seed {seed} fails without a change");
    }
}
