//! Questions that a run is asked while it trains, and their requests behind the samples of an evaluation.
//!
//! A request is a sample of its own: its context is read and [not counted](UNCOUNTED), its continuation is counted, and the rest of
//! the sample is filled up. So it takes the way of every other sample, and its log-likelihood has the same bits for any number of
//! workers and any microbatch.

use std::collections::VecDeque;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use tidemill_evaluation::metrics::Answer;
use tidemill_kernels::IGNORED_TARGET;
use tidemill_model::{Tokens, UNCOUNTED};

use super::source::DecodedSamples;
use crate::cluster::Failure;
use crate::error::Result;
use crate::operators::{SampleSource, Scores, Wake};

/// Tokens, with a question about the last of them: how likely are they after the others?
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// All of them; at most one more than a sample has positions.
    pub tokens: Vec<u32>,
    /// The first that is asked for; at least 1.
    pub first: usize,
}

/// The questions of each evaluation. All processes of a run ask the same.
pub trait Questions: Send + Sync + fmt::Debug {
    /// The requests.
    fn requests(&self) -> &[Request];

    /// Identity of these requests: other requests have another.
    fn fingerprint(&self) -> String;

    /// The scores that follow from the answers, which are in the order of the requests.
    ///
    /// # Errors
    /// Answers that no metric can be formed of.
    fn measure(&self, answers: &[Answer]) -> Result<Scores>;
}

/// Samples of a data set, and the requests at the positions behind them.
pub(super) struct EvaluationSource {
    decoded: DecodedSamples,
    /// Samples of the data set that are evaluated.
    samples: u64,
    questions: Option<Arc<dyn Questions>>,
    /// t, of each sample.
    positions: usize,
    /// The ranges of positions that were asked for and not given yet.
    asked: VecDeque<Range<u64>>,
}

impl EvaluationSource {
    pub(super) fn new(
        (decoded, samples): (DecodedSamples, u64),
        questions: Option<Arc<dyn Questions>>,
        positions: usize,
    ) -> Self {
        Self { decoded, samples, questions, positions, asked: VecDeque::new() }
    }

    fn request_at(&self, position: u64) -> Option<Tokens> {
        let index = usize::try_from(position.checked_sub(self.samples)?).ok()?;
        let request = self.questions.as_ref()?.requests().get(index)?;
        Some(sample(request, self.positions))
    }
}

/// A request as a sample of `positions`.
fn sample(Request { tokens, first }: &Request, positions: usize) -> Tokens {
    let mut sample = tokens.clone();
    sample[..*first].iter_mut().for_each(|token| *token |= UNCOUNTED);
    sample.resize(positions + 1, IGNORED_TARGET);
    sample
}

impl SampleSource for EvaluationSource {
    type Sample = Tokens;

    fn request(&mut self, positions: Range<u64>) {
        if positions.is_empty() {
            return;
        }
        if positions.start < self.samples {
            self.decoded.request(positions.clone());
        }
        self.asked.push_back(positions);
    }

    fn poll(&mut self) -> std::result::Result<Option<(u64, Tokens)>, Failure> {
        let Some(asked) = self.asked.front() else { return Ok(None) };
        let given = match self.request_at(asked.start) {
            Some(request) => Some((asked.start, request)),
            None => self.decoded.poll()?,
        };
        if given.is_some()
            && let Some(asked) = self.asked.front_mut()
        {
            asked.start += 1;
            if asked.is_empty() {
                self.asked.pop_front();
            }
        }
        Ok(given)
    }

    fn set_wake(&mut self, wake: Wake) {
        self.decoded.set_wake(wake);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_a_sample_of_which_its_continuation_counts() {
        let request = Request { tokens: vec![5, 6, 7], first: 2 };
        let expected = [5 | UNCOUNTED, 6 | UNCOUNTED, 7, IGNORED_TARGET, IGNORED_TARGET];
        assert_eq!(sample(&request, 4), expected);
        assert_eq!(sample(&request, 2), expected[..3]);
    }
}
