//! The state in generation is sufficient: the results for a text are those of the forward pass, for
//! any cut of the text and any other texts in the batch.

use tidemill_kernels::Backend;
use tidemill_kernels::backend::{DrawSettings, NO_TOKEN};
use tidemill_model::generation::{
    GenerationSettings, PIECE_POSITIONS, Prompt, Sampler, SamplingSettings, Sequences, Written,
    generate, generate_batch,
};
use tidemill_model::score::Scorer;
use tidemill_model::{Device, LanguageModel, MambaConfig, ModelConfig, ModelError, Parameters};

use super::arm::Arm;
use super::families::models_beside_mamba;
use super::lane::bits;

/// Positions of a piece: the most possible, or fewer for a test that cuts pieces itself.
pub(super) fn piece<B>(arm: &Arm<B>) -> usize {
    arm.sizes.choose(PIECE_POSITIONS, 256)
}

/// Longer than a piece, and not a whole number of them.
pub(super) fn positions<B>(arm: &Arm<B>) -> usize {
    piece(arm) + 7
}

/// Small models of odd sizes, with `count` positions if they learn them; their initial weights are
/// enlarged so that the state matters.
fn models<B: Backend>(
    arm: &Arm<B>,
    count: usize,
) -> impl Iterator<Item = (LanguageModel<B>, Vec<f32>)> {
    let odd = MambaConfig { d_state: 5, d_conv: 3, dt_rank: 2, ..MambaConfig::new(61, 13, 2) };
    let untied = MambaConfig { tie_embeddings: false, ..MambaConfig::new(40, 24, 1) };
    // A convolution of one tap has no state; there is no bias.
    let one_tap = MambaConfig { d_conv: 1, conv_bias: false, ..MambaConfig::new(33, 17, 1) };
    let build = |config: ModelConfig| -> (LanguageModel<B>, Vec<f32>) {
        let model = LanguageModel::new(&config).expect("sizes");
        let mut arena = model.initialize(7);
        for tensor in model.layout().tensors().iter().filter(|tensor| tensor.shape.len() == 2) {
            if !tensor.name.ends_with("A_log") {
                arena[tensor.range()].iter_mut().for_each(|weight| *weight *= 3.0);
            }
        }
        (model, arena)
    };
    let configs = arm.sizes.choose(vec![odd.clone(), untied, one_tap.clone()], vec![odd, one_tap]);
    let configs = configs.into_iter().map(ModelConfig::from);
    // The hybrid of all kinds has the blocks of these.
    let left_out = arm.sizes.choose(&[][..], &["llama", "hybrid"]);
    let others = models_beside_mamba().into_iter().filter(|(name, _)| !left_out.contains(name));
    let mut others: Vec<_> = others.map(|(_, config)| config).collect();
    for config in &mut others {
        match config {
            ModelConfig::Mpt(config) => config.max_seq_len = count,
            ModelConfig::GptNeo(config) => config.max_seq_len = count,
            _ => {}
        }
    }
    configs.chain(others).map(build)
}

/// Positions that there is room for.
pub(super) const ROOM: usize = 2 * PIECE_POSITIONS;

pub(super) fn text(length: usize, vocab_size: usize) -> Vec<u32> {
    (0..length).map(|i| ((i * i * 31 + i * 17 + 3) % vocab_size) as u32).collect()
}

/// Runs `body` for every model.
pub(super) fn for_each_model<B: Backend>(
    arm: &Arm<B>,
    body: impl Fn(&mut Device<'_, B>, &LanguageModel<B>, &Parameters<B>),
) {
    for_each_model_of(arm, ROOM, body);
}

/// Runs `body` for every model, or for two where that would take long: what a draw does depends on the logits alone.
fn for_models_that_draw<B: Backend>(
    arm: &Arm<B>,
    body: impl Fn(&mut Device<'_, B>, &LanguageModel<B>, &Parameters<B>),
) {
    for (model, arena) in models(arm, ROOM).take(arm.sizes.choose(usize::MAX, 2)) {
        arm.with_parameters(&model, &arena, |device, parameters| body(device, &model, parameters));
    }
}

/// Runs `body` for every model, those with learned positions having `count` of them.
fn for_each_model_of<B: Backend>(
    arm: &Arm<B>,
    count: usize,
    body: impl Fn(&mut Device<'_, B>, &LanguageModel<B>, &Parameters<B>),
) {
    for (model, arena) in models(arm, count) {
        arm.with_parameters(&model, &arena, |device, parameters| body(device, &model, parameters));
    }
}

pub fn cuts_change_no_bit<B: Backend>(arm: &Arm<B>) {
    for_each_model(arm, |device, model, parameters| {
        let vocab_size = model.vocab_size();
        let tokens = text(positions(arm), vocab_size);
        let mut one = Sequences::new(device, model, parameters, 1, ROOM).expect("fits");
        one.begin(device, 1).expect("begins");
        one.advance(device, &[&tokens]).expect("advances");
        let whole = one.logits(device).expect("logits").to_vec();
        assert_eq!(whole.len(), vocab_size);
        for piece in arm.sizes.choose(vec![1, 7, 256, PIECE_POSITIONS], vec![1, 7, 256]) {
            one.begin(device, 1).expect("begins");
            for tokens in tokens.chunks(piece) {
                one.advance(device, &[tokens]).expect("advances");
            }
            let logits = one.logits(device).expect("logits");
            assert_eq!(bits(logits), bits(&whole), "{piece} tokens at a time");
        }
        // The second of three different sequences.
        let other: Vec<u32> = tokens.iter().map(|token| (token + 1) % vocab_size as u32).collect();
        let mut three = Sequences::new(device, model, parameters, 3, ROOM).expect("fits");
        three.begin(device, 3).expect("begins");
        three.advance(device, &[&other, &tokens, &other]).expect("advances");
        let logits = three.logits(device).expect("logits");
        assert_eq!(logits.len(), 3 * vocab_size);
        assert_eq!(bits(&logits[vocab_size..2 * vocab_size]), bits(&whole));
        assert_eq!(bits(&logits[..vocab_size]), bits(&logits[2 * vocab_size..]));
        assert_ne!(bits(&logits[..vocab_size]), bits(&whole));
    });
}

/// Prompts of several lengths, shorter and longer than a piece.
pub(super) fn prompts<B>(arm: &Arm<B>, vocab_size: usize) -> Vec<Vec<u32>> {
    let lengths = [3, positions(arm), 1, arm.sizes.choose(256, 60), 40];
    let prompt =
        |(seed, &length): (usize, &usize)| text(length + seed, vocab_size)[seed..].to_vec();
    lengths.iter().enumerate().map(prompt).collect()
}

pub fn batches_change_no_bit<B: Backend>(arm: &Arm<B>) {
    for_each_model(arm, |device, model, parameters| {
        let vocab_size = model.vocab_size();
        let mut prompts = prompts(arm, vocab_size);
        prompts.sort_by_key(|prompt| std::cmp::Reverse(prompt.len()));
        let mut one = Sequences::new(device, model, parameters, 1, ROOM).expect("fits");
        // After the prompt, and after each of some tokens more.
        let mut alone = |prompt: &[u32]| {
            one.begin(device, 1).expect("begins");
            one.advance(device, &[prompt]).expect("advances");
            let mut seen = vec![bits(one.logits(device).expect("logits"))];
            for token in text(5, vocab_size) {
                one.write(device, &[token]).expect("writes");
                seen.push(bits(one.logits(device).expect("logits")));
            }
            seen
        };
        let expected: Vec<_> = prompts.iter().map(|prompt| alone(prompt)).collect();
        for count in [3, 5] {
            let mut many = Sequences::new(device, model, parameters, 5, ROOM).expect("fits");
            many.begin(device, count).expect("begins");
            let tokens: Vec<&[u32]> = prompts[..count].iter().map(Vec::as_slice).collect();
            many.advance(device, &tokens).expect("advances");
            let mut left: Vec<usize> = (0..count).collect();
            let agree = |many: &mut Sequences<'_, B>, device: &mut _, left: &[usize], step| {
                let logits = many.logits(device).expect("logits");
                assert_eq!(logits.len(), left.len() * vocab_size);
                for (logits, &which) in logits.chunks_exact(vocab_size).zip(left) {
                    assert!(bits(logits) == expected[which][step], "{count}, {which}, {step}");
                }
            };
            agree(&mut many, device, &left, 0);
            for (step, token) in text(5, vocab_size).chunks(1).enumerate() {
                if step == 3 {
                    // Some sequences are dropped, and the others move together.
                    let kept: Vec<usize> = (0..count).filter(|place| place % 2 == 1).collect();
                    many.keep(device, &kept).expect("keeps");
                    left = kept;
                }
                many.write(device, &vec![token[0]; left.len()]).expect("writes");
                agree(&mut many, device, &left, step + 1);
            }
        }
    });
}

pub fn answers_depend_on_nothing_else<B: Backend>(arm: &Arm<B>) {
    let check = |device: &mut Device<'_, B>, model: &_, parameters: &_, temperature| {
        let sampling = SamplingSettings { seed: 3, temperature, ..Default::default() };
        answers_are_those_alone(arm, device, model, parameters, &sampling);
    };
    for_each_model(arm, |device, model, parameters| check(device, model, parameters, 0.0));
    for_models_that_draw(arm, |device, model, parameters| check(device, model, parameters, 1.3));
}

/// Asserts that prompts get the same tokens alone and with others, wherever their answers end.
#[track_caller]
fn answers_are_those_alone<B: Backend>(
    arm: &Arm<B>,
    device: &mut Device<'_, B>,
    model: &LanguageModel<B>,
    parameters: &Parameters<B>,
    sampling: &SamplingSettings,
) {
    let prompts = prompts(arm, model.vocab_size());
    let settings = |stop_token| GenerationSettings {
        max_new_tokens: 9,
        stop_token,
        sampling: sampling.clone(),
    };
    let mut write = |at_once: usize, places: &[usize], stop_token| {
        let sequences = Sequences::new(device, model, parameters, at_once, ROOM);
        let mut sequences = sequences.expect("fits");
        let prompt = |&place: &usize| Prompt { tokens: &prompts[place], index: place as u64 };
        let asked: Vec<Prompt<'_>> = places.iter().map(prompt).collect();
        let mut seen = vec![Vec::new(); places.len()];
        let mut ended = vec![0; places.len()];
        let on_written = |place: usize, written: Written<'_>| match written {
            Written::Token(token) => seen[place].push(token),
            Written::Answer(tokens) => {
                assert_eq!(tokens, seen[place]);
                ended[place] += 1;
            }
        };
        let settings = settings(stop_token);
        let written = generate_batch(device, &mut sequences, &asked, &settings, on_written);
        let written = written.expect("writes");
        assert_eq!(written, seen);
        assert_eq!(ended, vec![1; places.len()]);
        written
    };
    let alone: Vec<Vec<u32>> = (0..5).map(|place| write(1, &[place], None).remove(0)).collect();
    assert_eq!(write(5, &[0, 1, 2, 3, 4], None), alone);
    assert_eq!(write(5, &[4, 2], None), [alone[4].clone(), alone[2].clone()]);
    assert!(write(5, &[], None).is_empty());
    // Each ends separately, and the others move together.
    for (stop, at_once) in [(alone[1][1], &[5, 1][..]), (alone[2][4], &[5, 3])] {
        let until = |tokens: &Vec<u32>| {
            let end = tokens.iter().position(|token| *token == stop).unwrap_or(tokens.len() - 1);
            tokens[..=end].to_vec()
        };
        let expected: Vec<_> = alone.iter().map(until).collect();
        // With less room, others take the places of those that have ended.
        for &at_once in at_once {
            assert_eq!(write(at_once, &[0, 1, 2, 3, 4], Some(stop)), expected, "{at_once}");
        }
    }
}

/// Asserts that three prompts, written together and two at a time, get the tokens that the host
/// draws from the logits of each alone.
#[track_caller]
fn assert_drawn_as_by_host<B: Backend>(
    device: &mut Device<'_, B>,
    model: &LanguageModel<B>,
    parameters: &Parameters<B>,
    sampling: &SamplingSettings,
) {
    const NEW_TOKENS: usize = 7;
    let prompts = [9, 4, 6].map(|length| text(length, model.vocab_size()));
    let mut one = Sequences::new(device, model, parameters, 1, ROOM).expect("fits");
    let mut by_host = |place: usize| {
        let sampler = Sampler::new(sampling.clone(), place as u64, model.vocab_size());
        let mut sampler = sampler.expect("settings");
        sampler.saw(&prompts[place]);
        one.begin(device, 1).expect("begins");
        one.advance(device, &[&prompts[place]]).expect("advances");
        let mut tokens = Vec::new();
        for _ in 0..NEW_TOKENS {
            let token = sampler.next(one.logits(device).expect("logits")).expect("finite");
            one.write(device, &[token]).expect("writes");
            tokens.push(token);
        }
        tokens
    };
    let expected: Vec<_> = (0..prompts.len()).map(&mut by_host).collect();
    let sampling = sampling.clone();
    let settings = GenerationSettings { max_new_tokens: NEW_TOKENS, stop_token: None, sampling };
    for at_once in [3, 2] {
        let asked = prompts.iter().zip(0..).map(|(tokens, index)| Prompt { tokens, index });
        let asked: Vec<_> = asked.collect();
        let sampling = &settings.sampling;
        let sequences = Sequences::for_sampling(device, model, parameters, at_once, ROOM, sampling);
        let mut sequences = sequences.expect("fits");
        let found = generate_batch(device, &mut sequences, &asked, &settings, |_, _| ());
        assert_eq!(found.expect("writes"), expected, "{at_once} at once, {sampling:?}");
    }
}

/// Devices draw the tokens that the host draws, for all settings and any other prompts in the
/// batch.
pub fn drawn_tokens_are_the_hosts<B: Backend>(arm: &Arm<B>) {
    let plain = SamplingSettings { seed: 11, ..Default::default() };
    let every_sampling = [
        plain.clone(),
        SamplingSettings { temperature: 0.7, top_k: 5, ..plain.clone() },
        SamplingSettings { temperature: 1.6, top_p: 0.8, ..plain.clone() },
        SamplingSettings { min_p: 0.1, ..plain.clone() },
        SamplingSettings { temperature: 2.0, top_k: 20, top_p: 0.9, min_p: 0.02, ..plain.clone() },
        SamplingSettings { top_k: 30, repetition_penalty: 1.2, ..plain.clone() },
        SamplingSettings { temperature: 0.0, ..plain },
    ];
    for_models_that_draw(arm, |device, model, parameters| {
        for sampling in &every_sampling {
            assert_drawn_as_by_host(device, model, parameters, sampling);
        }
    });
}

/// Equal logits, of which top-p keeps exactly as many as reach its sum: GPUs leave such draws to
/// the host, which uses the same numbers.
pub fn draws_in_doubt_are_the_hosts<B: Backend>(arm: &Arm<B>) {
    let (model, arena) = models(arm, ROOM).next().expect("a model");
    arm.with_parameters(&model, &vec![0.0; arena.len()], |device, parameters| {
        let top_p = 20.0 / model.vocab_size() as f64;
        let sampling = SamplingSettings { top_p, seed: 12, ..Default::default() };
        assert_drawn_as_by_host(device, &model, parameters, &sampling);
        let mut one = Sequences::new(device, &model, parameters, 1, ROOM).expect("fits");
        one.begin(device, 1).expect("begins");
        one.advance(device, &[&[1, 2]]).expect("advances");
        let settings = DrawSettings { temperature: 1.0, top_k: 0, top_p, min_p: 0.0 };
        let found = one.draw(device, &[0.3], &settings).expect("draws");
        let is_cpu = arm.backend.device_kind().backend == "cpu";
        assert_eq!(found[0] == NO_TOKEN, !is_cpu, "{found:?}");
        assert!(one.draw(device, &[0.3; 2], &settings).is_err(), "two numbers for one sequence");
    });
}

pub fn writing_stops_and_repeats<B: Backend>(arm: &Arm<B>) {
    for_each_model(arm, |device, model, parameters| {
        let mut sequences = Sequences::new(device, model, parameters, 1, ROOM).expect("fits");
        let prompt = text(9, model.vocab_size());
        let settings = |seed, stop_token| GenerationSettings {
            max_new_tokens: 24,
            stop_token,
            sampling: SamplingSettings { seed, ..SamplingSettings::default() },
        };
        let mut write = |settings: &GenerationSettings| {
            let mut seen = Vec::new();
            let on_token = |token| seen.push(token);
            let written = generate(device, &mut sequences, &prompt, settings, on_token);
            let written = written.expect("writes");
            assert_eq!(written, seen);
            written
        };
        let written = write(&settings(5, None));
        assert_eq!(written.len(), 24);
        assert_eq!(write(&settings(5, None)), written);
        assert_ne!(write(&settings(6, None)), written);
        let stop = written[10];
        let end = written.iter().position(|token| *token == stop).expect("it is there");
        assert_eq!(write(&settings(5, Some(stop))), written[..=end]);
        let none = GenerationSettings { max_new_tokens: 0, ..settings(5, None) };
        assert!(write(&none).is_empty());
    });
}

/// A sequence ends where learned positions do, and others of its batch continue; without such
/// positions none ends.
pub fn answers_end_with_the_positions<B: Backend>(arm: &Arm<B>) {
    const COUNT: usize = 12;
    for_each_model_of(arm, COUNT, |device, model, parameters| {
        let prompt = |length| text(length, model.vocab_size());
        let prompts = [5, COUNT, 1, COUNT - 2, 3].map(prompt);
        let learned = model.positions().is_some();
        let settings = |temperature| GenerationSettings {
            max_new_tokens: 9,
            stop_token: None,
            sampling: SamplingSettings { seed: 3, temperature, ..Default::default() },
        };
        let mut sequences = Sequences::new(device, model, parameters, 5, 3 * COUNT).expect("fits");
        for settings in [1.0, 0.0].map(settings) {
            let mut write = |places: &[usize]| {
                let prompt =
                    |&place: &usize| Prompt { tokens: &prompts[place], index: place as u64 };
                let asked: Vec<Prompt<'_>> = places.iter().map(prompt).collect();
                let written = generate_batch(device, &mut sequences, &asked, &settings, |_, _| ());
                written.expect("writes")
            };
            let together = write(&[0, 1, 2, 3, 4]);
            let lengths: Vec<usize> = together.iter().map(Vec::len).collect();
            assert_eq!(lengths, if learned { [8, 1, 9, 3, 9] } else { [9; 5] });
            let alone: Vec<Vec<u32>> = (0..5).map(|place| write(&[place]).remove(0)).collect();
            assert_eq!(together, alone);
        }
        let settings = settings(1.0);

        let long = text(COUNT + 2, model.vocab_size());
        let mut scorer = Scorer::new(device, model, parameters, 1, 3 * COUNT).expect("fits");
        scorer.log_probabilities(device, &long[..COUNT + 1]).expect("the last has no position");
        let score = scorer.log_probabilities(device, &long).map(|_| ());
        let mut generate =
            |prompt| generate(device, &mut sequences, prompt, &settings, |_| ()).map(|_| ());
        let answer = generate(&long[..COUNT + 1]);
        for (result, expected) in [
            (score, "tokens: expected at most 13 tokens, as the model has 12 positions, found 14"),
            (answer, "prompt: expected at most 12 tokens, as the model has 12 positions, found 13"),
        ] {
            match result {
                Ok(()) => assert!(!learned, "{expected}"),
                Err(error) => assert!(learned && error.to_string() == expected, "{error}"),
            }
        }
    });
}

pub fn wrong_text_is_an_error<B: Backend>(arm: &Arm<B>) {
    for_each_model(arm, |device, model, parameters| {
        let vocab_size = model.vocab_size();
        // The first row of padding, or just past the table.
        let outside = vocab_size as u32;
        let mut scorer = Scorer::new(device, model, parameters, 1, ROOM).expect("fits");
        let error = scorer.log_probabilities(device, &[0, outside, 1]).expect_err("outside");
        assert_eq!(
            error.to_string(),
            format!("position 1: token {outside} is outside the vocabulary of {vocab_size}")
        );
        let error = scorer.log_probabilities(device, &[0]).expect_err("one token");
        assert_eq!(error.to_string(), "text: expected at least 2 tokens, found 1");
        let mut two = Sequences::new(device, model, parameters, 2, 4).expect("fits");
        two.write(device, &[]).expect("nothing to write, in no sequence");
        two.begin(device, 2).expect("begins");
        assert!(two.logits(device).is_err(), "nothing seen");
        two.advance(device, &[&[0]]).expect("advances");
        assert!(two.logits(device).is_err(), "one has seen nothing");
        assert!(two.advance(device, &[&[0], &[1, 2]]).is_err(), "the longest come first");
        assert!(two.advance(device, &[&[0], &[1], &[2]]).is_err(), "three of two");
        assert!(two.advance(device, &[&[1, 2, 3, 1]]).is_err(), "five positions");
        assert!(two.write(device, &[0]).is_err(), "one token for two");
        assert!(two.begin(device, 3).is_err() && two.begin(device, 0).is_err());
        for kept in [&[][..], &[2], &[1, 0], &[0, 0]] {
            assert!(two.keep(device, kept).is_err(), "{kept:?}");
        }
        assert!(Sequences::new(device, model, parameters, 0, 4).is_err(), "no sequences");
        let mut one = Sequences::new(device, model, parameters, 1, 8).expect("fits");
        let settings = GenerationSettings::default();
        let error = generate(device, &mut one, &[], &settings, |_| ()).expect_err("no prompt");
        assert_eq!(error.to_string(), "prompt: expected at least 1 token, found none");
        let error = generate(device, &mut one, &[outside], &settings, |_| ()).expect_err("outside");
        assert!(matches!(error, ModelError::Token { .. }), "{error}");
        let error = generate(device, &mut one, &[1], &settings, |_| ()).expect_err("128 tokens");
        let expected = "tokens of prompt and answer: expected at most 8, found 128";
        assert_eq!(error.to_string(), expected);
    });
}
