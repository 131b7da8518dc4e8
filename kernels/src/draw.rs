//! Tokens drawn from logits.
//!
//! The order and the meaning of the filters are those of transformers: temperature, top-k (Fan et al., 2018), top-p (Holtzman et al.,
//! 2020), min-p (Nguyen et al., 2024). Ties go to the lowest token. Sums are formed one term after the other, and a token is drawn by inverting
//! the cumulative distribution over candidates in the order of their tokens.
//!
//! Unlike the definitions of [`reference`](mod@crate::reference), programs run this one too: the
//! CPU backend, and the host for rows that another device leaves to it.

use crate::backend::DrawSettings;

/// A token that may be drawn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Candidate {
    /// The token.
    pub token: u32,
    /// Its logit, divided by the temperature.
    pub logit: f64,
    /// `exp(logit - greatest)`
    pub weight: f64,
}

/// Leaves in `candidates` what may be drawn after finite `logits[v]`, by token.
pub fn keep_candidates(
    candidates: &mut Vec<Candidate>,
    logits: impl Iterator<Item = f64>,
    settings: &DrawSettings,
) {
    let DrawSettings { temperature, top_k, top_p, min_p } = *settings;
    candidates.clear();
    candidates.extend((0..).zip(logits).map(|(token, logit)| {
        let logit = logit / temperature;
        Candidate { token, logit, weight: 0.0 }
    }));
    let greatest = candidates.iter().map(|candidate| candidate.logit).fold(f64::MIN, f64::max);
    for candidate in candidates.iter_mut() {
        candidate.weight = libm::exp(candidate.logit - greatest);
    }
    if (1..candidates.len()).contains(&top_k) {
        let (_, last, _) =
            candidates.select_nth_unstable_by(top_k - 1, |a, b| b.logit.total_cmp(&a.logit));
        let least = last.logit;
        candidates.retain(|candidate| candidate.logit >= least);
    }
    if top_p < 1.0 {
        // A total order, so that the choice between two equal tokens depends on their ids alone.
        candidates.sort_unstable_by(|a, b| b.logit.total_cmp(&a.logit).then(a.token.cmp(&b.token)));
        let reached = top_p * sum_of_weights(candidates);
        let mut kept = 0.0;
        let last = candidates.iter().position(|candidate| {
            kept += candidate.weight;
            kept >= reached
        });
        candidates.truncate(last.map_or(candidates.len(), |last| last + 1));
    }
    if min_p > 0.0 {
        // The most likely token is kept by every filter, and its weight is 1.
        candidates.retain(|candidate| candidate.weight >= min_p);
    }
    candidates.sort_unstable_by_key(|candidate| candidate.token);
}

/// The first token whose weight, added to those before it, exceeds the share `uniform` of all, which is in [0, 1).
pub fn draw(candidates: &[Candidate], uniform: f64) -> u32 {
    let mut left = uniform * sum_of_weights(candidates);
    for candidate in candidates {
        left -= candidate.weight;
        if left < 0.0 {
            return candidate.token;
        }
    }
    // Because of rounding, the share may lie past the last weight.
    candidates.last().map_or(0, |last| last.token)
}

/// The sum of the weights, one after the other.
pub fn sum_of_weights(candidates: &[Candidate]) -> f64 {
    candidates.iter().map(|candidate| candidate.weight).sum()
}
