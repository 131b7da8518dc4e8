//! A model reads, from the block that it is in, exactly the tensors that its layout declares.

use tidemill_kernels::Backend;
use tidemill_model::{Device, Direction, LanguageModel, ParameterSource, Recompute};

use super::arm::Arm;
use super::families::tied_and_untied;
use super::lane::{
    Walk, bits, forward_from, forward_onto_from, loss_bits, moved_parameters, run_lane_from, tokens,
};
use super::strict_source::{StrictSource, Withheld};

/// Two microbatches forward and backward.
pub const WALK: Walk =
    Walk { samples: 2, positions: 5, samples_per_grain: 1, grains_per_microbatch: 1 };

/// The results of a model with a source in all its passes, bit by bit.
#[derive(PartialEq)]
pub struct Passes {
    /// The losses of `forward`, `forward_onto` and `forward_backward`.
    losses: [Vec<(u64, u64)>; 3],
    gradients: Vec<u32>,
}

impl Passes {
    pub fn are_finite(&self) -> bool {
        let losses = self.losses.iter().flatten().map(|&(loss, _)| f64::from_bits(loss));
        let gradients = self.gradients.iter().map(|&x| f32::from_bits(x).into());
        losses.chain(gradients).all(f64::is_finite)
    }
}

/// Every pass of `model`, one after the other from the same source: [`WALK`] forward at once, its samples onto each other,
/// and each of its microbatches forward and backward.
pub fn every_pass<B: Backend>(
    device: &mut Device<'_, B>,
    model: &LanguageModel<B>,
    source: &mut dyn ParameterSource<B>,
) -> Passes {
    let tokens = tokens(11, WALK.samples, WALK.positions, model.vocab_size());
    let forward = forward_from(device, model, source, &tokens, WALK);
    let onto = forward_onto_from(device, model, source, &tokens, WALK.positions);
    let (losses, gradients) = run_lane_from(device, model, source, &tokens, WALK, None);
    let losses = [loss_bits(&forward), loss_bits(&[onto]), loss_bits(&losses)];
    Passes { losses, gradients: bits(&gradients) }
}

/// [`every_pass`] from a source that holds what the layout declares except `withheld`; and the
/// blocks entered.
pub fn strict_passes<B: Backend>(
    arm: &Arm<B>,
    model: &LanguageModel<B>,
    withheld: Withheld,
) -> (Passes, Vec<(usize, Direction)>) {
    arm.with_parameters(model, &moved_parameters(model, 0.3), |device, parameters| {
        let mut source =
            StrictSource::new(device, parameters, model.layout(), withheld).expect("fits");
        let passes = every_pass(device, model, &mut source);
        (passes, source.entered)
    })
}

pub fn a_strict_source_changes_no_bit<B: Backend>(arm: &Arm<B>) {
    for (name, mut model) in tied_and_untied() {
        let arena = moved_parameters(&model, 0.3);
        let whole = arm.with_parameters(&model, &arena, |device, parameters| {
            every_pass(device, &model, &mut parameters.source(model.layout()))
        });
        assert!(whole.are_finite(), "{}: {name}", arm.name);
        // A recomputing block reads everything that a block with saved values reads.
        let both = vec![Recompute::None, Recompute::Block];
        for recompute in arm.sizes.choose(both, vec![Recompute::Block]) {
            model = model.with_recompute(recompute);
            let (strict, _) = strict_passes(arm, &model, Withheld::Nothing);
            assert!(strict == whole, "{}: {name}, {recompute:?}: other bits", arm.name);
        }
    }
}
