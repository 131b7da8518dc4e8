//! What a Mamba model promises its callers: names and shapes, errors, the order of blocks, and that it learns.

use crate::lane::{Lane, Walk, loss, odd_config, one_thread, run_lane, tokens};
use tidemill_kernels::Backend;
use tidemill_model::{
    Decay, Device, Mamba, MambaConfig, Microbatch, MicrobatchShape, ModelError, Parameters,
    Trainable,
};

#[test]
fn tensors_have_the_names_and_shapes_of_hugging_face_files() {
    let mut config = odd_config();
    config.tie_embeddings = false;
    let model = Mamba::new(&config).expect("an odd model");
    let layout = model.layout();
    let segments: Vec<_> = layout.segments().iter().map(|segment| &segment.name[..]).collect();
    assert_eq!(segments, ["embedding", "layers.0", "layers.1", "norm_f", "lm_head"]);
    assert_eq!(layout.blocks(), ["embedding", "layers.0", "layers.1", "head"]);
    let uses: Vec<_> = layout.uses().iter().map(|slot| (slot.block, slot.segment)).collect();
    assert_eq!(uses, [(0, 0), (1, 1), (2, 2), (3, 3), (3, 4)]);
    let mixer: [(&str, &[usize], Decay); 10] = [
        ("norm.weight", &[5], Decay::Exempt),
        ("mixer.in_proj.weight", &[30, 5], Decay::Decayed),
        ("mixer.conv1d.weight", &[15, 1, 3], Decay::Decayed),
        ("mixer.conv1d.bias", &[15], Decay::Exempt),
        ("mixer.x_proj.weight", &[8, 15], Decay::Decayed),
        ("mixer.dt_proj.weight", &[15, 2], Decay::Decayed),
        ("mixer.dt_proj.bias", &[15], Decay::Exempt),
        ("mixer.A_log", &[15, 3], Decay::Exempt),
        ("mixer.D", &[15], Decay::Exempt),
        ("mixer.out_proj.weight", &[5, 15], Decay::Decayed),
    ];
    let table: &[usize] = &[13, 5];
    let mut expected = vec![("backbone.embeddings.weight".to_owned(), table, Decay::Decayed)];
    for layer in 0..2 {
        expected.extend(
            mixer.map(|(name, shape, decay)| {
                (format!("backbone.layers.{layer}.{name}"), shape, decay)
            }),
        );
    }
    expected.push(("backbone.norm_f.weight".to_owned(), &[5], Decay::Exempt));
    expected.push(("lm_head.weight".to_owned(), table, Decay::Decayed));
    let found: Vec<_> = layout
        .tensors()
        .iter()
        .map(|tensor| (tensor.name.clone(), &tensor.shape[..], tensor.decay))
        .collect();
    assert_eq!(found, expected);
}

#[test]
fn a_tied_head_uses_the_embedding_table_once_more() {
    let model = Mamba::new(&odd_config()).expect("an odd model");
    let uses: Vec<_> =
        model.layout().uses().iter().map(|slot| (slot.block, slot.segment)).collect();
    assert_eq!(uses, [(0, 0), (1, 1), (2, 2), (3, 3), (3, 0)]);
}

#[test]
fn other_layers_do_not_change_the_initial_values_of_a_layer() {
    let [short, long] = [1, 2].map(|layers| {
        let model = Mamba::new(&MambaConfig::new(13, 8, layers)).expect("a model");
        let tensor = model.layout().tensors()[2].clone();
        assert_eq!(tensor.name, "backbone.layers.0.mixer.in_proj.weight");
        model.initialize(3)[tensor.range()].to_vec()
    });
    assert_eq!(short, long);
    assert!(short.iter().all(|x| x.abs() <= 8.0_f32.sqrt().recip()));
}

#[test]
fn an_untrained_model_knows_nothing() {
    let config = MambaConfig::new(259, 32, 3);
    let model = Mamba::new(&config).expect("a model");
    let walk = Walk { samples: 2, positions: 100, samples_per_grain: 1, grains_per_microbatch: 2 };
    let tokens = tokens(1, walk.samples, walk.positions, config.vocab_size);
    let sum = loss(&one_thread(), &model, &model.initialize(17), &tokens, walk);
    // Logits have a standard deviation of about sqrt(32) * 0.02.
    assert!((sum / 200.0 - 259_f64.ln()).abs() < 0.03, "{}", sum / 200.0);
}

#[test]
fn forward_alone_gives_the_losses_of_forward_and_backward() {
    let (backend, model) = (one_thread(), Mamba::new(&odd_config()).expect("an odd model"));
    let walk = Walk { samples: 3, positions: 130, samples_per_grain: 1, grains_per_microbatch: 3 };
    let (tokens, arena) = (tokens(2, 3, 130, 13), model.initialize(1));
    let (losses, _) = run_lane(&backend, &model, &arena, &tokens, walk);
    let sum: f64 = losses.iter().map(|loss| loss.loss_sum).sum();
    assert_eq!(sum.to_bits(), loss(&backend, &model, &arena, &tokens, walk).to_bits());
}

/// Runs one microbatch that is wrong, or whose sink is closed.
fn refusal(tokens: &[u32], samples: usize, positions: usize, lane: &mut Lane) -> ModelError {
    let (backend, model) = (one_thread(), Mamba::new(&odd_config()).expect("an odd model"));
    let stream = &mut backend.device_stream().expect("a device stream");
    let device = &mut Device { backend: &backend, stream };
    let arena = model.initialize(17);
    let parameters = Parameters::from_host(device, model.layout(), &arena).expect("parameters");
    let shape = MicrobatchShape { samples: 2, positions: 4, samples_per_grain: 1 };
    let mut workspace = model.plan(device, shape).expect("a workspace");
    let microbatch = Microbatch { tokens, samples, positions, samples_per_grain: 1 };
    model
        .forward_backward(device, &mut workspace, &parameters, microbatch, lane)
        .expect_err("a wrong microbatch")
}

fn new_lane() -> Lane {
    let (backend, model) = (one_thread(), Mamba::new(&odd_config()).expect("an odd model"));
    let stream = &mut backend.device_stream().expect("a device stream");
    Lane::new(&backend, stream, model.layout())
}

#[test]
fn wrong_microbatches_are_named() {
    let refused = |tokens: &[u32], samples, positions| {
        refusal(tokens, samples, positions, &mut new_lane()).to_string()
    };
    assert_eq!(
        refused(&[0, 1, 2, 3, 4, 5, 6, 7, 13, 9], 2, 4),
        "sample 1 of the microbatch, position 3: token 13 is outside the vocabulary of 13"
    );
    // The last column is a target alone.
    assert!(refused(&[0, 1, 2, 3, 4, 5, 6, 7, 8, 99], 2, 4).contains("position 4: token 99"));
    assert_eq!(
        refused(&[0; 9], 2, 4),
        "tokens of a microbatch: expected samples * (positions + 1) = 10, found 9"
    );
    assert_eq!(
        refused(&[0; 12], 2, 5),
        "rows of a microbatch: expected at most 8, as planned, found 10"
    );
    assert_eq!(
        refused(&[0; 9], 3, 2),
        "grains of a microbatch: expected at most 2, as planned, found 3"
    );
}

#[test]
fn blocks_are_finished_from_the_last_to_the_first_until_the_sink_is_gone() {
    let mut lane = new_lane();
    lane.closed_after = Some(1);
    let error = refusal(&[0, 1, 2, 3, 4], 1, 4, &mut lane);
    assert!(matches!(error, ModelError::SinkClosed), "{error}");
    assert_eq!(lane.finished, [3, 2, 1]);
}

#[test]
fn gradient_descent_learns_a_repeating_pattern() {
    let (backend, mut config) = (one_thread(), MambaConfig::new(11, 16, 2));
    config.d_state = 4;
    let model = Mamba::new(&config).expect("a model");
    let layout = model.layout();
    let walk = Walk { samples: 2, positions: 24, samples_per_grain: 1, grains_per_microbatch: 2 };
    let tokens: Vec<u32> = (0..50).map(|i| [3, 1, 4, 1, 5, 9, 2][i % 25 % 7]).collect();
    let mut arena = model.initialize(17);
    let mut losses = Vec::new();
    for _ in 0..30 {
        let (run, gradients) = run_lane(&backend, &model, &arena, &tokens, walk);
        losses.push(run.iter().map(|loss| loss.loss_sum).sum::<f64>() / 48.0);
        for (index, slot) in layout.uses().iter().enumerate() {
            let gradient = &gradients[layout.gradient_range(index)];
            let range = layout.segments()[slot.segment].range.clone();
            for (value, x) in arena[range].iter_mut().zip(gradient) {
                *value -= 0.3 * x / 48.0;
            }
        }
    }
    println!("{losses:?}");
    assert!((losses[0] - 11_f64.ln()).abs() < 0.1, "{losses:?}");
    assert!(losses[29] < 0.5 * losses[0], "{losses:?}");
}
