//! LLM Foundry's rules of in-context learning, written down a second time, plainly, from its
//! sources (mosaicml/llm-foundry, `llmfoundry/eval/datasets`, `scripts/eval/yamls/tasks_v0.3.yaml`;
//! the metrics are Composer's). This module uses nothing of the crate.

use serde_json::Value;

/// The kind of question of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asks {
    /// `query`, `choices`, `gold`.
    Choice,
    /// `context_options`, `continuation`, `gold`.
    Schema,
    /// `context`, `continuation`.
    Words,
}

/// A benchmark of the gauntlet.
pub struct Benchmark {
    pub name: &'static str,
    pub category: &'static str,
    pub asks: Asks,
    pub delimiter: &'static str,
    pub shots: usize,
    pub random_baseline: f64,
}

const fn of(
    category: &'static str,
    name: &'static str,
    (asks, delimiter): (Asks, &'static str),
    (shots, random_baseline): (usize, f64),
) -> Benchmark {
    Benchmark { name, category, asks, delimiter, shots, random_baseline }
}

const ANSWER: (Asks, &str) = (Asks::Choice, "\nAnswer: ");
const SPACE: (Asks, &str) = (Asks::Choice, " ");
const SCHEMA: (Asks, &str) = (Asks::Schema, " ");
const WORDS: (Asks, &str) = (Asks::Words, " ");

/// The benchmarks of the gauntlet's v0.3 that are built in.
pub const BENCHMARKS: [Benchmark; 11] = [
    of("world_knowledge", "arc_easy", ANSWER, (3, 0.25)),
    of("world_knowledge", "arc_challenge", ANSWER, (3, 0.25)),
    of("commonsense_reasoning", "copa", SPACE, (0, 0.5)),
    of("commonsense_reasoning", "piqa", ANSWER, (0, 0.5)),
    of("commonsense_reasoning", "openbook_qa", SPACE, (10, 0.25)),
    of("language_understanding", "lambada_openai", WORDS, (0, 0.0)),
    of("language_understanding", "hellaswag", SPACE, (0, 0.25)),
    of("language_understanding", "winograd", SCHEMA, (3, 0.5)),
    of("language_understanding", "winogrande", SCHEMA, (5, 0.5)),
    of("symbolic_problem_solving", "simple_arithmetic_nospaces", WORDS, (5, 0.0)),
    of("reading_comprehension", "boolq", ANSWER, (0, 0.5)),
];

/// Between few-shot examples.
const BETWEEN: &str = "\n";

/// The properties of a tokenizer that the rules depend on.
pub trait Tokenizer {
    fn tokens(&self, text: &str, with_special: bool) -> Vec<u32>;
    fn end(&self) -> u32;
}

/// The tokens that the model reads; those behind the first `context` tokens are scored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Asked {
    pub tokens: Vec<u32>,
    pub context: usize,
}

fn text<'a>(row: &'a Value, key: &str) -> &'a str {
    row[key].as_str().expect("a text").trim()
}

/// Texts in lists are not stripped.
fn texts<'a>(row: &'a Value, key: &str) -> Vec<&'a str> {
    row[key].as_array().expect("a list").iter().map(|text| text.as_str().expect("texts")).collect()
}

fn gold(row: &Value) -> usize {
    row["gold"].as_u64().expect("a number") as usize
}

impl Benchmark {
    /// The requests for `rows[question]`, behind the examples `shots`, with at most `longest`
    /// tokens.
    pub fn asked(
        &self,
        rows: &[Value],
        (question, shots): (usize, &[usize]),
        (tokenizer, longest): (&dyn Tokenizer, usize),
    ) -> Vec<Asked> {
        let mut few_shot = String::new();
        for &shot in shots {
            let row = &rows[shot];
            let (context, answer) = match self.asks {
                Asks::Choice => (text(row, "query"), texts(row, "choices")[gold(row)]),
                Asks::Schema => {
                    (texts(row, "context_options")[gold(row)], text(row, "continuation"))
                }
                Asks::Words => (text(row, "context"), text(row, "continuation")),
            };
            if !few_shot.is_empty() {
                few_shot += BETWEEN;
            }
            few_shot += &format!("{context}{}{answer}", self.delimiter);
        }
        let between = if few_shot.is_empty() { "" } else { BETWEEN };
        let row = &rows[question];
        let one =
            |context: &str| format!("{between}{context}{}", self.delimiter).trim_end().to_owned();
        let (contexts, answers): (Vec<String>, Vec<&str>) = match self.asks {
            Asks::Choice => (vec![one(text(row, "query"))], texts(row, "choices")),
            Asks::Words => (vec![one(text(row, "context"))], vec![text(row, "continuation")]),
            Asks::Schema => {
                let behind = if few_shot.is_empty() { "" } else { self.delimiter.trim_end() };
                let contexts = texts(row, "context_options");
                let contexts = contexts.iter().map(|option| format!("{between}{option}{behind}"));
                (contexts.collect(), vec![text(row, "continuation")])
            }
        };
        let mut preamble = tokenizer.tokens(&few_shot, true);
        if preamble.len() > 1 && preamble.last() == Some(&tokenizer.end()) {
            preamble.pop();
        }
        let space = tokenizer.tokens(" a", false).len() == 1;
        let mut asked = Vec::new();
        for context in &contexts {
            for answer in &answers {
                let lead = if space && !answer.starts_with(' ') { " " } else { "" };
                let answer = tokenizer.tokens(&format!("{lead}{answer}"), false);
                let mut tokens = preamble.clone();
                tokens.extend(tokenizer.tokens(context, false));
                let too_many = (tokens.len() + answer.len()).saturating_sub(longest);
                tokens.drain(..too_many);
                let context = tokens.len();
                tokens.extend(answer);
                asked.push(Asked { tokens, context });
            }
        }
        asked
    }

    /// Whether the answer is right: `logits[i]` are the logits behind token i of each request, over
    /// the vocabulary.
    pub fn is_right(&self, row: &Value, asked: &[Asked], logits: &[Vec<Vec<f64>>]) -> bool {
        let spans = asked.iter().zip(logits).map(|(Asked { tokens, context }, logits)| {
            (*context..tokens.len()).map(|place| (tokens[place] as usize, &logits[place - 1]))
        });
        if self.asks == Asks::Words {
            let mut spans = spans;
            let mut span = spans.next().expect("one");
            return span.all(|(token, logits)| {
                (0..logits.len()).all(|other| logits[other] <= logits[token])
            });
        }
        let perplexities: Vec<f64> = spans
            .map(|span| {
                let losses: Vec<f64> = span
                    .map(|(token, logits)| {
                        let sum: f64 = logits.iter().map(|logit| logit.exp()).sum();
                        -(logits[token].exp() / sum).ln()
                    })
                    .collect();
                (losses.iter().sum::<f64>() / losses.len() as f64).exp()
            })
            .collect();
        let least = perplexities.iter().copied().fold(f64::INFINITY, f64::min);
        perplexities.iter().position(|of| *of == least) == Some(gold(row))
    }
}

/// The averages of categories and of all, from the accuracy of each benchmark: with equal weights, the baseline
/// subtracted and the rest rescaled.
pub fn averages(accuracies: &[f64]) -> Vec<(&'static str, f64)> {
    let mut averages: Vec<(&str, f64)> = Vec::new();
    for Benchmark { category, .. } in &BENCHMARKS {
        if averages.iter().any(|(name, _)| name == category) {
            continue;
        }
        let (mut sum, mut count) = (0.0, 0.0);
        for (benchmark, accuracy) in BENCHMARKS.iter().zip(accuracies) {
            if benchmark.category == *category {
                let above = accuracy - benchmark.random_baseline;
                sum += above / (1.0 - benchmark.random_baseline);
                count += 1.0;
            }
        }
        averages.push((category, sum / count));
    }
    let core = averages.iter().map(|(_, value)| value).sum::<f64>() / averages.len() as f64;
    averages.push(("core_average", core));
    averages
}
