//! Few-shot examples, and the text before an answer.
//!
//! With [`Tokenization::Joint`], as lm-eval: `description`, then `context answer_delimiter answer example_delimiter` for each
//! example, then the context; `answer_delimiter` begins the continuation. With [`Tokenization::Separate`], as LLM Foundry:
//! `description` and the examples `context answer_delimiter answer` with `example_delimiter`
//! between them are one part; that delimiter, the context and `answer_delimiter` are the next,
//! without white space at its end. The contexts of a schema keep their white space at the end: only
//! the delimiter behind them loses its own, and without examples there is no delimiter.

use std::collections::BTreeMap;

use crate::document::Document;
use crate::filter::is_space;
use crate::task::{Kind, Task, Tokenization};

/// The text before an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompt {
    /// The description and the examples.
    pub preamble: String,
    /// The question's own part.
    pub context: String,
}

/// The rows that a question's examples are drawn from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pool {
    /// Other rows than the questions' rows.
    Other,
    /// The rows of the questions: a question is never its own example.
    Same,
}

/// The rows of a pool of `count` that serve as examples of question `question`: a function of the
/// seed and the question alone.
///
/// # Errors
/// Fewer rows than examples.
pub fn examples(
    shots: usize,
    count: usize,
    pool: Pool,
    question: usize,
    seed: u64,
) -> std::result::Result<Vec<usize>, String> {
    let others = match pool {
        Pool::Other => count,
        Pool::Same => count.saturating_sub(1),
    };
    if shots > others {
        return Err(format!(
            "expected at most {others} few-shot examples, as many as there are rows, found {shots}"
        ));
    }
    // The first places of a shuffle (Fisher and Yates); the map holds only the places that changed.
    let (mut moved, mut state) = (BTreeMap::new(), mix(seed ^ mix(question as u64)));
    let drawn = (0..shots).map(|place| {
        state = state.wrapping_add(GOLDEN);
        let left = (others - place) as u128;
        let other = place + ((u128::from(mix(state)) * left) >> 64) as usize;
        let taken = moved.get(&other).copied().unwrap_or(other);
        let displaced = moved.get(&place).copied().unwrap_or(place);
        moved.insert(other, displaced);
        match pool {
            Pool::Same if taken >= question => taken + 1,
            _ => taken,
        }
    });
    Ok(drawn.collect())
}

/// The increment of splitmix64.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// The output function of splitmix64 (Steele, Lea and Flood, 2014).
fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

impl Prompt {
    /// The prompt for an option of `document`, after `examples`.
    pub fn new(task: &Task, examples: &[&Document], document: &Document, option: usize) -> Self {
        let delimiters = &task.delimiters;
        let mut preamble = task.description.clone();
        for example in examples {
            if task.tokenization == Tokenization::Separate && !preamble.is_empty() {
                preamble.push_str(&delimiters.examples);
            }
            preamble.push_str(example.context(example.gold));
            preamble.push_str(&delimiters.answer);
            preamble.push_str(example.continuation(example.gold));
            if task.tokenization == Tokenization::Joint {
                preamble.push_str(&delimiters.examples);
            }
        }
        let asked = document.context(option);
        let context = match task.tokenization {
            Tokenization::Joint => asked.to_owned(),
            Tokenization::Separate => {
                let (before, behind) = match (preamble.is_empty(), task.kind) {
                    (true, Kind::Schema) => ("", ""),
                    (true, _) => ("", delimiters.answer.as_str()),
                    (false, Kind::Schema) => {
                        (delimiters.examples.as_str(), trimmed_end(&delimiters.answer))
                    }
                    (false, _) => (delimiters.examples.as_str(), delimiters.answer.as_str()),
                };
                let context = format!("{before}{asked}{behind}");
                match task.kind {
                    Kind::Schema => context,
                    _ => trimmed_end(&context).to_owned(),
                }
            }
        };
        Self { preamble, context }
    }
}

fn trimmed_end(text: &str) -> &str {
    text.trim_end_matches(is_space)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn examples_follow_from_the_seed_and_the_question() {
        let drawn = |question, seed| examples(3, 20, Pool::Same, question, seed).expect("enough");
        assert_eq!(drawn(4, 1), drawn(4, 1));
        assert!((0..20).any(|question| drawn(question, 1) != drawn(question, 2)));
        assert!((1..20).any(|question| drawn(question, 1) != drawn(0, 1)));
    }

    #[test]
    fn examples_are_distinct_and_no_question_is_its_own() {
        let mut seen = [0; 6];
        for question in 0..6 {
            for seed in 0..50 {
                let mut drawn = examples(3, 6, Pool::Same, question, seed).expect("enough");
                drawn.iter().for_each(|&row| seen[row] += 1);
                drawn.sort_unstable();
                drawn.dedup();
                assert!(drawn.len() == 3 && !drawn.contains(&question), "{question} {seed}");
            }
        }
        // 900 draws of 6 rows: every row is drawn, and none much more often than others.
        assert!(seen.iter().all(|count| (100..200).contains(count)), "{seen:?}");
        let mut all = examples(6, 6, Pool::Other, 2, 0).expect("enough");
        all.sort_unstable();
        assert_eq!(all, [0, 1, 2, 3, 4, 5]);
        assert!(examples(6, 6, Pool::Same, 2, 0).unwrap_err().contains("at most 5"));
        assert!(examples(1, 0, Pool::Same, 0, 0).unwrap_err().contains("at most 0"));
    }
}
