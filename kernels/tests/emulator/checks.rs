//! The checks of kernels that the program itself runs: they pass on correct kernels, and show which
//! are broken.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroUsize;

use tidemill_kernels::checks::{self, Checked, Outcome};
use tidemill_kernels::emulator::{Emulator, EmulatorSettings, SourceChange};
use tidemill_kernels::{Backend, Bf16, Cpu, Fp32, Gpu, KernelError};

const SETTINGS: EmulatorSettings = EmulatorSettings { warp: 32, seed: 1 };

/// The kernels that disagree.
fn others<B: Backend>(backend: &B) -> Vec<Checked> {
    let checked = checks::run(backend);
    assert!(checked.len() > 10, "{checked:?}");
    let differ = |checked: &Checked| !matches!(checked.outcome, Outcome::Agrees { .. });
    checked.into_iter().filter(differ).collect()
}

fn broken(changes: &[SourceChange]) -> Vec<Checked> {
    let emulator = Emulator::new(SETTINGS).unwrap();
    let emulator = changes.iter().fold(emulator, |emulator, &change| emulator.with_change(change));
    others(&Gpu::<Emulator, Fp32>::new(emulator))
}

#[test]
fn kernels_that_are_right_agree() {
    let found = others(&Cpu::new(NonZeroUsize::MIN).unwrap());
    assert!(found.is_empty(), "{found:?}");
    let found = others(&Gpu::<Emulator, Fp32>::new(Emulator::new(SETTINGS).unwrap()));
    assert!(found.is_empty(), "{found:?}");
    let settings = EmulatorSettings { warp: 32, seed: 2 };
    let found = others(&Gpu::<Emulator, Bf16>::new(Emulator::new(settings).unwrap()));
    assert!(found.is_empty(), "{found:?}");
}

#[test]
fn kernels_that_are_wrong_are_named() {
    let breaks = [
        ("gelu.cu", "fmaf(x * x, CUBIC, LINEAR)", "fmaf(x * x, LINEAR, CUBIC)", "gelu"),
        ("gelu.cu", "sum.at[j] += gradients.at[j]", "sum.at[j] += douts[i].at[j]", "gelu"),
        (
            "gated_silu.cu",
            "fmaf(gate, 1.0f - share, 1.0f)",
            "fmaf(gate, share, 1.0f)",
            "gated_silu",
        ),
        ("rotary.cu", "= -back.sines.at[i];", "= back.sines.at[i];", "rotary"),
        ("rotary.cu", "min(position, arguments.starts[row])", "0", "rotary"),
        ("rotary.cu", "sum(heads + head * group", "sum(heads + head", "rotary"),
        (
            "rms_norm_heads.cu",
            "place.in_rows(arguments.x_stride, width)",
            "place.row * arguments.x_stride",
            "rms_norm of heads",
        ),
        (
            "attention_forward.cu",
            "inputs.shared_head(block.head)",
            "(block.head % (inputs.heads / inputs.group))",
            "attention",
        ),
        ("head_scan_forward.cu", "z.at[k], sigmoid(z.at[k])", "z.at[k], z.at[k]", "head_scan"),
        ("head_scan_backward.cu", "within + to_behind", "0.0f * within + to_behind", "head_scan"),
        ("scan_sums.cu", "sums[j] += share[j];", "sums[j] = share[j];", "head_scan"),
        ("gradient_sums.cu", "sums[j] += value * value;", "sums[j] += value;", "sums of gradients"),
        (
            "causal_conv1d.cu",
            "sum = fmaf(weight[tap], window[tap], sum);",
            "sum = fmaf(weight[0], window[tap], sum);",
            "causal_conv1d",
        ),
        (
            "causal_conv1d.cu",
            "sum = fmaf(weight[own][tap], window[i][tap][own], sum);",
            "sum = fmaf(weight[own][0], window[i][tap][own], sum);",
            "causal_conv1d",
        ),
    ];
    // Breaks of different kernels are looked for together: all of these kernels differ, and no others.
    let mut rest = breaks.to_vec();
    while !rest.is_empty() {
        let mut together = BTreeMap::new();
        rest.retain(|&(source, from, to, kernels)| {
            let is_second = together.contains_key(kernels);
            if !is_second {
                together.insert(kernels, SourceChange { source, from, to });
            }
            is_second
        });
        let changes: Vec<SourceChange> = together.values().copied().collect();
        let found = broken(&changes);
        let names: BTreeSet<&str> = found.iter().map(|checked| checked.kernels).collect();
        assert_eq!(names, together.keys().copied().collect(), "{changes:?}: {found:?}");
        for Checked { outcome, .. } in &found {
            let Outcome::Differs { what } = outcome else { panic!("{changes:?}: {found:?}") };
            assert!(what.contains(", expected "), "{what}");
        }
    }
}

#[test]
fn kernels_that_do_not_compile_are_named() {
    let (from, to) = ("CUBIC, LINEAR", "CUBIC, NO_SUCH_NUMBER");
    match &broken(&[SourceChange { source: "gelu.cu", from, to }])[..] {
        [Checked { kernels: "gelu", outcome: Outcome::Refused(error) }] => {
            assert!(matches!(error, KernelError::Compile { .. }), "{error}");
            assert!(error.to_string().contains("NO_SUCH_NUMBER"), "{error}");
        }
        other => panic!("{other:?}"),
    }
}
