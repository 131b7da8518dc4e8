//! Checks that the kernels of a device agree with their [definitions](crate::reference), for
//! machines that have never run them.
//!
//! Every kernel runs at a few odd sizes, with outputs that hold NaN before, and is compared with
//! its definition in `f64`. The tests of this crate compare many more sizes within tighter bounds,
//! and further promises of kernels; these checks show a broken compiler, library or device, in a
//! second or two once kernels are compiled.

mod attention;
mod checker;
mod head_scan;
mod parameters;
mod products;
mod rows;
mod sequences;

use self::checker::Checker;
use crate::backend::{Backend, KernelGroup};
use crate::error::{KernelError, Result};

/// The outcome of a check, by the names of the kernels that it covers.
#[derive(Debug)]
pub struct Checked {
    /// The kernels.
    pub kernels: &'static str,
    /// Whether their results agree with the definitions.
    pub outcome: Outcome,
}

/// The outcome of a check.
#[derive(Debug)]
pub enum Outcome {
    /// All results are those of the definitions.
    Agrees {
        /// The largest error of a result, as a fraction of what is allowed.
        worst: f64,
    },
    /// A result is not that of its definition.
    Differs {
        /// Which, where and by how much.
        what: String,
    },
    /// A kernel did not run.
    Refused(KernelError),
}

type Check<B> = fn(&mut Checker<'_, B>) -> Result<()>;

/// The checks by the names of their kernels.
fn checks<B: Backend>() -> [(&'static str, Check<B>); 22] {
    [
        ("matmul and weight_gradient", products::matmul),
        ("rows of matmul", products::rows_are_independent),
        ("ordered_matmul", products::ordered_matmul),
        ("likeliest", products::likeliest),
        ("draw", products::draw),
        ("embedding", rows::embedding),
        ("rms_norm", rows::rms_norm),
        ("rms_norm of heads", rows::rms_norm_of_heads),
        ("layer_norm", rows::layer_norm),
        ("gelu", rows::gelu),
        ("gated_silu", rows::gated_silu),
        ("bias and clamp", rows::bias_and_clamp),
        ("cross_entropy", rows::cross_entropy),
        ("sums of gradients", parameters::sums),
        ("adamw", parameters::adamw),
        ("lion", parameters::lion),
        ("masters", parameters::masters),
        ("causal_conv1d", sequences::causal_conv1d),
        ("selective_scan", sequences::selective_scan),
        ("head_scan", head_scan::head_scan),
        ("attention", attention::attention),
        ("rotary", attention::rotary),
    ]
}

/// The kernels that are compiled in parallel before the checks: most of those that the checks
/// launch.
const KERNELS: [KernelGroup; 28] = [
    KernelGroup::Embedding,
    KernelGroup::CrossEntropy,
    KernelGroup::RmsNorm,
    KernelGroup::RmsNormOfActivations,
    KernelGroup::LayerNorm,
    KernelGroup::LayerNormOfActivations,
    KernelGroup::Bias,
    KernelGroup::Likeliest,
    KernelGroup::Draw,
    KernelGroup::Gelu,
    KernelGroup::GatedSilu,
    KernelGroup::Rotary,
    KernelGroup::CausalConv1d,
    KernelGroup::SelectiveScan { channels: 64, states: 16 },
    KernelGroup::SelectiveScan { channels: 1, states: 1 },
    KernelGroup::SelectiveScanPiece { channels: 64, states: 16 },
    KernelGroup::HeadScan { states: 5 },
    KernelGroup::HeadScan { states: 128 },
    KernelGroup::HeadScanPiece { states: 128 },
    KernelGroup::Attention { head_width: 5, has_slopes: true },
    KernelGroup::Attention { head_width: 64, has_slopes: false },
    KernelGroup::Attention { head_width: 64, has_slopes: true },
    KernelGroup::AttentionCached { head_width: 5, has_slopes: true },
    KernelGroup::AttentionCached { head_width: 64, has_slopes: true },
    KernelGroup::GradientSums,
    KernelGroup::Optimizer,
    KernelGroup::OrderedProduct,
    KernelGroup::TreeSum,
];

/// Checks every kernel of `backend`, one after the other; a failed check does not stop the others.
pub fn run<B: Backend>(backend: &B) -> Vec<Checked> {
    // A kernel that does not compile is reported by the check that launches it.
    let _ = backend.prepare(&KERNELS);
    let check = |(kernels, check): (&'static str, Check<B>)| {
        let outcome = Checker::new(backend).and_then(|mut checker| {
            check(&mut checker)?;
            Ok(checker.outcome())
        });
        Checked { kernels, outcome: outcome.unwrap_or_else(Outcome::Refused) }
    };
    checks::<B>().into_iter().map(check).collect()
}
