//! Scores of texts and of their ends.

use tidemill_kernels::Backend;
use tidemill_model::generation::Sequences;
use tidemill_model::score::{Asked, Continuation, Scorer};
use tidemill_model::{Microbatch, MicrobatchShape, Trainable, UNCOUNTED};

use super::arm::Arm;
use super::generation::{ROOM, for_each_model, piece, positions, prompts, text};
use super::lane::bits;

pub fn scores_are_losses<B: Backend>(arm: &Arm<B>) {
    let tolerance = arm.by_precision(1e-4, 5e-2);
    for_each_model(arm, |device, model, parameters| {
        let tokens = text(positions(arm) + 1, model.vocab_size());
        let shape = MicrobatchShape { samples: 1, positions: positions(arm), samples_per_grain: 1 };
        let mut workspace = Trainable::plan(model, device, shape).expect("plans");
        let microbatch = Microbatch {
            samples: std::slice::from_ref(&tokens),
            positions: positions(arm),
            samples_per_grain: 1,
            document_end: None,
        };
        let mut source = parameters.source(model.layout());
        let losses =
            model.row_losses(device, &mut workspace, &mut source, microbatch).expect("runs");
        let mut scorer = Scorer::new(device, model, parameters, 1, ROOM).expect("fits");
        let scores = scorer.log_probabilities(device, &tokens).expect("scores");
        assert_eq!(scores.len(), losses.len());
        for (position, (score, loss)) in scores.iter().zip(&losses).enumerate() {
            assert!((score + loss).abs() < tolerance, "position {position}: {score}, {loss}");
        }
    });
}

/// Given tokens have no loss, and the tokens after them have the loss that they have if all count.
pub fn given_tokens_are_read_and_not_counted<B: Backend>(arm: &Arm<B>) {
    for_each_model(arm, |device, model, parameters| {
        let tokens = text(positions(arm) + 1, model.vocab_size());
        let first = tokens.len() / 2;
        let mut given = tokens.clone();
        given[..first].iter_mut().for_each(|token| *token |= UNCOUNTED);
        let shape = MicrobatchShape { samples: 1, positions: positions(arm), samples_per_grain: 1 };
        let mut workspace = Trainable::plan(model, device, shape).expect("plans");
        let mut source = parameters.source(model.layout());
        let mut losses = |tokens: &Vec<u32>| {
            let microbatch = Microbatch {
                samples: std::slice::from_ref(tokens),
                positions: positions(arm),
                samples_per_grain: 1,
                document_end: None,
            };
            let counted = Trainable::counted_tokens(model, microbatch);
            let losses = model.row_losses(device, &mut workspace, &mut source, microbatch);
            (losses.expect("runs"), counted)
        };
        let ((whole, _), (part, counted)) = (losses(&tokens), losses(&given));
        assert_eq!(bits(&part[first - 1..]), bits(&whole[first - 1..]));
        assert!(part[..first - 1].iter().all(|&loss| loss == 0.0));
        assert_eq!(counted, Some((tokens.len() - first) as u64));
    });
}

pub fn a_score_depends_on_nothing_else<B: Backend>(arm: &Arm<B>) {
    for_each_model(arm, |device, model, parameters| {
        let tokens = text(positions(arm) + 1, model.vocab_size());
        let mut scorer = Scorer::new(device, model, parameters, 1, ROOM).expect("fits");
        let first = scorer.log_probabilities(device, &tokens).expect("scores");
        let other: Vec<u32> = tokens.iter().rev().copied().collect();
        scorer.log_probabilities(device, &other[..50]).expect("scores");
        let again = scorer.log_probabilities(device, &tokens).expect("scores");
        assert_eq!(bits(&first), bits(&again));
        // Nor on later tokens.
        for length in [2, 3, piece(arm) + 1, piece(arm) + 2] {
            let short = scorer.log_probabilities(device, &tokens[..length]).expect("scores");
            assert_eq!(bits(&short), bits(&first[..length - 1]), "{length} tokens");
        }
    });
}

pub fn scores_in_batches_change_no_bit<B: Backend>(arm: &Arm<B>) {
    for_each_model(arm, |device, model, parameters| {
        let mut texts = prompts(arm, model.vocab_size());
        texts.iter_mut().for_each(|text| text.push(1));
        let texts: Vec<&[u32]> = texts.iter().map(Vec::as_slice).collect();
        let mut one = Scorer::new(device, model, parameters, 1, ROOM).expect("fits");
        let mut many = Scorer::new(device, model, parameters, 5, ROOM).expect("fits");
        for texts in [&texts[..3], &texts] {
            let scores = many.log_probabilities_of_each(device, texts).expect("scores");
            assert_eq!(scores.len(), texts.len());
            for (scores, text) in scores.iter().zip(texts) {
                let alone = one.log_probabilities(device, text).expect("scores");
                assert_eq!(bits(scores), bits(&alone), "{} tokens", text.len());
            }
        }
    });
}

/// The end of a text gets the scores that it has in the whole text, together with others or alone,
/// and its tokens are the most likely ones exactly where the model would write them.
pub fn continuations_are_scored_as_whole_texts<B: Backend>(arm: &Arm<B>) {
    for_each_model(arm, |device, model, parameters| {
        let mut texts = prompts(arm, model.vocab_size());
        let mut writing = Sequences::new(device, model, parameters, 1, ROOM).expect("fits");
        for (index, text) in texts.iter_mut().enumerate() {
            writing.begin(device, 1).expect("begins");
            writing.advance(device, &[text]).expect("reads");
            let likeliest = writing.likeliest(device).expect("chooses")[0];
            // The last token of every other text is one that the model would not write.
            let vocab_size = model.vocab_size() as u32;
            text.push((likeliest + (index % 2) as u32) % vocab_size);
        }
        let mut one = Scorer::new(device, model, parameters, 1, ROOM).expect("fits");
        let mut many = Scorer::new(device, model, parameters, 5, ROOM).expect("fits");
        let asked = [Asked::Likeliest, Asked::LogProbability];
        let continuation = |(index, tokens): (usize, &'_ Vec<u32>)| {
            let first = [1, tokens.len() / 2, tokens.len() - 1][index % 3].max(1);
            (first, asked[index / 2 % 2])
        };
        let places: Vec<_> = texts.iter().enumerate().map(continuation).collect();
        let ends: Vec<_> = texts
            .iter()
            .zip(&places)
            .map(|(tokens, &(first, asked))| Continuation { tokens, first, asked })
            .collect();
        let scores = many.continuations(device, &ends).expect("scores");
        for (index, (end, score)) in ends.iter().zip(&scores).enumerate() {
            let whole = one.log_probabilities(device, end.tokens).expect("scores");
            assert_eq!(bits(&score.log_probabilities), bits(&whole[end.first - 1..]), "{index}");
            assert_eq!(&one.continuations(device, &[*end]).expect("scores")[0], score, "{index}");
            match end.asked {
                Asked::LogProbability => assert!(score.likeliest.is_empty()),
                Asked::Likeliest => {
                    assert_eq!(score.likeliest.len(), score.log_probabilities.len());
                    assert_eq!(*score.likeliest.last().unwrap(), index % 2 == 0, "{index}");
                }
            }
        }
        // Several batches may be in flight, and are finished in any order.
        let pending: Vec<_> =
            ends.chunks(2).map(|ends| many.enqueue(device, ends).expect("goes")).collect();
        for (pending, expected) in pending.into_iter().zip(scores.chunks(2)).rev() {
            assert_eq!(many.finish(device, pending).expect("scores"), expected);
        }
        for first in [0, ends[0].tokens.len()] {
            let wrong = Continuation { first, ..ends[0] };
            let error = one.continuations(device, &[wrong]).unwrap_err().to_string();
            assert!(error.starts_with("first token of a continuation: expected 1 to "), "{error}");
        }
    });
}
