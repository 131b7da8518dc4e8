//! Generation where logits are not finite numbers.

use tidemill_kernels::{Backend, Slice};
use tidemill_model::generation::{
    GenerationSettings, Prompt, SamplingSettings, Sequences, Written, generate_batch,
};
use tidemill_model::{Device, LanguageModel, MambaConfig};

use super::arm::Arm;
use super::generation::{ROOM, text};

/// Asserts that no kernel has left a fault on the stream, which the next read would answer.
#[track_caller]
fn assert_no_fault<B: Backend>(device: &mut Device<'_, B>) {
    let Device { backend, stream } = device;
    let buffer = backend.allocate::<u32>(stream, 1).expect("fits");
    assert_eq!(backend.to_vec(stream, Slice::all(&buffer)).expect("no fault"), [0]);
}

/// Logits that are not finite numbers end the writing, also where the device has begun the next step
/// by then; those of an ended sequence do not. Neither leaves a fault behind.
pub fn logits_are_an_error<B: Backend>(arm: &Arm<B>) {
    const VOCAB_SIZE: usize = 40;
    const WIDTH: usize = 24;
    let config = MambaConfig { tie_embeddings: false, ..MambaConfig::new(VOCAB_SIZE, WIDTH, 1) };
    let model = LanguageModel::new(&config).expect("sizes");
    let arena = model.initialize(7);
    let prompts: Vec<Vec<u32>> =
        (0..9).map(|first| text(first + 3, VOCAB_SIZE)[first..].to_vec()).collect();
    let write = |arena: &[f32], places: &[usize], temperature, stop_token| {
        let settings = GenerationSettings {
            max_new_tokens: 5,
            stop_token,
            sampling: SamplingSettings { temperature, ..Default::default() },
        };
        let prompt = |&place: &usize| Prompt { tokens: &prompts[place], index: 0 };
        let asked: Vec<Prompt<'_>> = places.iter().map(prompt).collect();
        let mut seen = Vec::new();
        let written = arm.with_parameters(&model, arena, |device, parameters| {
            let sequences = Sequences::new(device, &model, parameters, places.len(), ROOM);
            let mut sequences = sequences.expect("fits");
            let on_written = |_, written: Written<'_>| {
                if let Written::Token(token) = written {
                    seen.push(token);
                }
            };
            let written = generate_batch(device, &mut sequences, &asked, &settings, on_written);
            assert_no_fault(device);
            written
        });
        (written, seen)
    };
    // Only what follows a token reads its embedding.
    let broken_at = |token: u32| {
        let mut broken = arena.clone();
        let tensors = model.layout().tensors();
        let table = tensors.iter().find(|tensor| tensor.shape == [VOCAB_SIZE, WIDTH]);
        let table = &mut broken[table.expect("an embedding").range()];
        table[token as usize * WIDTH..][..WIDTH].fill(f32::NAN);
        broken
    };
    for temperature in [0.0, 1.0] {
        let (written, expected) = write(&arena, &[0], temperature, None);
        written.expect("finite");
        let first = expected[0];
        assert!(!prompts[0].contains(&first), "{expected:?}");
        let (written, seen) = write(&broken_at(first), &[0], temperature, None);
        let error = written.expect_err("NaN").to_string();
        assert!(error.contains("the logit of token 0 is NaN"), "{error}");
        assert_eq!(seen, [first]);
    }
    // One of three ends with a token that the others do not have.
    let alone = |place| write(&arena, &[place], 0.0, None).0.expect("finite").remove(0);
    let answers: Vec<Vec<u32>> = (0..prompts.len()).map(alone).collect();
    let avoids =
        |place: usize, token| !prompts[place].contains(&token) && !answers[place].contains(&token);
    let ending = (0..prompts.len()).find_map(|ending| {
        let token = answers[ending][0];
        let mut others = (0..prompts.len()).filter(|&other| avoids(other, token));
        let others = [others.next()?, others.next()?];
        (!prompts[ending].contains(&token)).then_some((ending, token, others))
    });
    let (ending, token, [one, other]) = ending.expect("a token of one alone");
    let (written, _) = write(&broken_at(token), &[one, ending, other], 0.0, Some(token));
    let expected = [answers[one].clone(), vec![token], answers[other].clone()];
    assert_eq!(written.expect("the others are finite"), expected);
}
