//! The contract of a Mamba model with its callers: losses, errors, the order of blocks, and
//! learning.

use tidemill_kernels::Backend;
use tidemill_model::{
    LanguageModel, MambaConfig, Microbatch, MicrobatchShape, ModelError, Trainable,
};

use super::arm::Arm;
use super::lane::{Lane, Walk, loss, odd_config, rows, run_lane, tokens};

pub fn untrained_knows_nothing<B: Backend>(arm: &Arm<B>) {
    let config = MambaConfig::new(259, 32, 3);
    let model = LanguageModel::new(&config).expect("a model");
    let positions = arm.sizes.choose(100, 40);
    let walk = Walk { samples: 2, positions, samples_per_grain: 1, grains_per_microbatch: 2 };
    let tokens = tokens(1, walk.samples, walk.positions, config.vocab_size);
    let sum = loss(arm, &model, &model.initialize(17), &tokens, walk);
    // Logits have a standard deviation of about sqrt(32) * 0.02.
    let mean = sum / (2 * positions) as f64;
    assert!((mean - 259_f64.ln()).abs() < 0.03, "{}: {mean}", arm.name);
}

pub fn forward_alone_gives_the_same_losses<B: Backend>(arm: &Arm<B>) {
    let model = LanguageModel::new(&odd_config()).expect("an odd model");
    let positions = arm.sizes.choose(130, 40);
    let walk = Walk { samples: 3, positions, samples_per_grain: 1, grains_per_microbatch: 3 };
    let (tokens, arena) = (tokens(2, 3, positions, 13), model.initialize(1));
    let (losses, _) = run_lane(arm, &model, &arena, &tokens, walk);
    let sum: f64 = losses.iter().map(|loss| loss.loss_sum).sum();
    assert_eq!(sum.to_bits(), loss(arm, &model, &arena, &tokens, walk).to_bits());
}

/// Runs one microbatch that is wrong, or whose sink is closed after a block; returns the blocks
/// that were finished too.
fn refusal<B: Backend>(
    arm: &Arm<B>,
    tokens: &[u32],
    positions: usize,
    closed_after: Option<usize>,
) -> (ModelError, Vec<usize>) {
    let model = LanguageModel::new(&odd_config()).expect("an odd model");
    arm.with_parameters(&model, &model.initialize(17), |device, parameters| {
        let mut lane = Lane::new(device, model.layout());
        lane.closed_after = closed_after;
        let shape = MicrobatchShape { samples: 2, positions: 4, samples_per_grain: 1 };
        let mut workspace = model.plan(device, shape).expect("a workspace");
        let samples = &rows(tokens, positions)[..];
        let microbatch =
            Microbatch { samples, positions, samples_per_grain: 1, document_end: None };
        let mut source = parameters.source(model.layout());
        let error = model
            .forward_backward(device, &mut workspace, &mut source, microbatch, &mut lane)
            .expect_err("a wrong microbatch");
        (error, lane.finished)
    })
}

pub fn wrong_microbatches_are_named<B: Backend>(arm: &Arm<B>) {
    let refused = |tokens: &[u32], positions| refusal(arm, tokens, positions, None).0.to_string();
    assert_eq!(
        refused(&[0, 1, 2, 3, 4, 5, 6, 7, 13, 9], 4),
        "sample 1 of the microbatch, position 3: token 13 is outside the vocabulary of 13"
    );
    // The last column is only a target.
    assert!(refused(&[0, 1, 2, 3, 4, 5, 6, 7, 8, 99], 4).contains("position 4: token 99"));
    assert_eq!(refused(&[0; 9], 4), "tokens of a sample: expected positions + 1 = 5, found 4");
    assert_eq!(
        refused(&[0; 12], 5),
        "rows of a microbatch: expected at most 8, as planned, found 10"
    );
    assert_eq!(
        refused(&[0; 9], 2),
        "grains of a microbatch: expected at most 2, as planned, found 3"
    );
}

/// From the last to the first, until the sink is gone.
pub fn blocks_are_finished_backwards<B: Backend>(arm: &Arm<B>) {
    let (error, finished) = refusal(arm, &[0, 1, 2, 3, 4], 4, Some(1));
    assert!(matches!(error, ModelError::SinkClosed), "{error}");
    assert_eq!(finished, [3, 2, 1]);
}

pub fn gradient_descent_learns<B: Backend>(arm: &Arm<B>) {
    let config = MambaConfig { d_state: 4, ..MambaConfig::new(11, 16, 2) };
    let model = LanguageModel::new(&config).expect("a model");
    let layout = model.layout();
    let walk = Walk { samples: 2, positions: 24, samples_per_grain: 1, grains_per_microbatch: 2 };
    let tokens: Vec<u32> = (0..50).map(|i| [3, 1, 4, 1, 5, 9, 2][i % 25 % 7]).collect();
    let mut arena = model.initialize(17);
    let mut losses = Vec::new();
    for _ in 0..30 {
        let (run, gradients) = run_lane(arm, &model, &arena, &tokens, walk);
        losses.push(run.iter().map(|loss| loss.loss_sum).sum::<f64>() / 48.0);
        for (index, slot) in layout.uses().iter().enumerate() {
            let gradient = &gradients[layout.gradient_range(index)];
            let range = layout.segments()[slot.segment].range.clone();
            for (value, x) in arena[range].iter_mut().zip(gradient) {
                *value -= 0.3 * x / 48.0;
            }
        }
    }
    println!("{}: {losses:?}", arm.name);
    assert!((losses[0] - 11_f64.ln()).abs() < 0.1, "{}: {losses:?}", arm.name);
    assert!(losses[29] < 0.5 * losses[0], "{}: {losses:?}", arm.name);
}
