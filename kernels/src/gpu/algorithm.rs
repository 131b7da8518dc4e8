//! The choice of an algorithm of a matrix library for a product: one procedure for every vendor.
//!
//! A library's algorithms are closed, and their order of addition is undocumented. The program
//! promises of a product that an element's bits depend neither on the number of rows nor on the
//! place of its row, and that it is rounded once; this holds if the algorithm has these properties.
//! So the library lists its algorithms in its own order, and the first is taken that
//!
//! - needs no more workspace than it gets, and does not split k,
//! - gives the bits of 1, 129 and up to 4,096 rows alike, where the product's rows are [free](Rows::Free),
//! - gives the bits of 1, 2, 3 and up to 8 entries of a [batch](crate::gpu::Batch) alike,
//! - gives the same bits when it runs again,
//! - rounds each sum once: sums of whole numbers, exact in fp32 in any order, come out correctly rounded, a bias added last,
//! - and runs without a refusal by the library.
//!
//! All but the first are tested on made-up numbers before an algorithm is chosen: a few products
//! for each key, once. The numbers and the rows depend on the product alone, so that peers of one
//! kind choose alike.

mod numbers;
mod trial;

use std::fmt;
use std::time::Instant;

use self::trial::Trial;
use crate::error::{KernelError, Result};
use crate::gpu::driver::{Driver, MatrixProduct};

/// The most terms of a [fixed](crate::gpu::Rows::Fixed) product that an algorithm is chosen for: of longer sums a library offers
/// mostly algorithms that split them, and its others are slow. Enough terms to hide the time in which a block begins and ends.
pub(crate) const CANONICAL_TERMS: usize = 1024;

/// Whether an algorithm forms the sum over k in one pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Terms {
    /// It forms each sum in one pass.
    Whole,
    /// It splits k and adds the parts afterwards, or does not say whether it does.
    Split,
}

/// An algorithm as its library proposes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidate<A> {
    /// The library's own name of it.
    pub algorithm: A,
    /// Bytes that it needs beside its operands.
    pub workspace_bytes: usize,
    /// How it treats the terms of a sum.
    pub terms: Terms,
}

impl<A> Candidate<A> {
    /// The reason to reject it that is known before it has run, if any.
    fn flaw(&self, workspace_bytes: usize) -> Option<Flaw> {
        if self.workspace_bytes > workspace_bytes {
            return Some(Flaw::Workspace);
        }
        (self.terms == Terms::Split).then_some(Flaw::Splits)
    }

    /// Whether there is no reason to reject it before it has run, where it is given `workspace_bytes`.
    pub fn is_eligible(&self, workspace_bytes: usize) -> bool {
        self.flaw(workspace_bytes).is_none()
    }
}

/// Why a candidate is not taken.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Flaw {
    Workspace,
    Splits,
    /// The library's answer when it was to run.
    Refused(String),
    DependsOnRows,
    DependsOnEntries,
    Unrepeatable,
    RoundsOften,
}

impl fmt::Display for Flaw {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Workspace => out.write_str("needs more workspace than there is"),
            Self::Splits => out.write_str("splits the sum over k"),
            Self::Refused(answer) => write!(out, "was refused at its launch ({answer})"),
            Self::DependsOnRows => out.write_str("treats rows differently"),
            Self::DependsOnEntries => out.write_str("treats entries of a batch differently"),
            Self::Unrepeatable => out.write_str("gives other bits when it runs again"),
            Self::RoundsOften => out.write_str("rounds a sum more than once"),
        }
    }
}

/// Takes the first of `candidates` that keeps to what the program promises of a product (see the module). `multiply` enqueues
/// a product by a candidate, and is given `workspace_bytes` beside the operands.
///
/// The product's addresses do not matter, nor does m where its rows are [free](crate::gpu::Rows::Free), nor how many entries a batch has
/// and how far apart. Products are formed in memory of their own and waited for.
///
/// # Errors
/// [`KernelError::Unsupported`] where no candidate is left, with the flaw of each. An error of the driver, and one of `multiply`,
/// except [`KernelError::Unsupported`], by which `multiply` says that the library refuses a candidate. A device without room: for
/// the right factor, and about 256 MiB.
pub fn choose_algorithm<D: Driver, A>(
    driver: &D,
    queue: &mut D::Queue,
    product: &MatrixProduct,
    workspace_bytes: usize,
    candidates: impl IntoIterator<Item = Candidate<A>>,
    mut multiply: impl FnMut(&mut D::Queue, &A, MatrixProduct) -> Result<()>,
) -> Result<A> {
    let start = Instant::now();
    let MatrixProduct { n, k, .. } = *product;
    let mut trial = None;
    let mut flaws = Vec::new();
    for (place, candidate) in candidates.into_iter().enumerate() {
        let flaw = match candidate.flaw(workspace_bytes) {
            Some(flaw) => Some(flaw),
            None => {
                let trial = match &mut trial {
                    Some(trial) => trial,
                    None => trial.insert(Trial::new(driver, queue, product)?),
                };
                trial.flaw(driver, queue, &mut |queue: &mut D::Queue, product| {
                    multiply(queue, &candidate.algorithm, product)
                })?
            }
        };
        let Some(flaw) = flaw else {
            let milliseconds = start.elapsed().as_millis();
            tracing::debug!(place, n, k, milliseconds, "a matrix product's algorithm is pinned");
            return Ok(candidate.algorithm);
        };
        let library = &driver.properties().matrix_library;
        match flaw {
            // An error that the library itself reports is not held against the algorithm.
            Flaw::Workspace | Flaw::Splits | Flaw::Refused(_) => {
                tracing::debug!(place, n, k, library, "an algorithm of the matrix library {flaw}");
            }
            Flaw::DependsOnRows
            | Flaw::DependsOnEntries
            | Flaw::Unrepeatable
            | Flaw::RoundsOften => {
                tracing::warn!(place, n, k, library, "an algorithm of the matrix library {flaw}");
            }
        }
        flaws.push(flaw);
    }
    let properties = driver.properties();
    Err(KernelError::Unsupported {
        what: format!("form a matrix product of {}", sizes(product)),
        device: properties.name.clone(),
        answer: format!("{}: {}", properties.matrix_library, none_left(&flaws)),
    })
}

/// Why no algorithm is left.
fn none_left(flaws: &[Flaw]) -> String {
    if flaws.is_empty() {
        return "it proposes no algorithm that serves every number of rows or entries".to_owned();
    }
    let mut kinds: Vec<(String, usize)> = Vec::new();
    for flaw in flaws.iter().map(ToString::to_string) {
        match kinds.iter_mut().find(|(known, _)| *known == flaw) {
            Some((_, count)) => *count += 1,
            None => kinds.push((flaw, 1)),
        }
    }
    let kinds: Vec<String> = kinds.iter().map(|(flaw, count)| format!("{count}x {flaw}")).collect();
    format!("none of its {} algorithms will do: {}", flaws.len(), kinds.join(", "))
}

/// The sizes of a product, for people.
pub(crate) fn sizes(product: &MatrixProduct) -> String {
    let MatrixProduct { m, n, k, batch, .. } = product;
    let entries = batch.map(|batch| format!(", {} entries", batch.entries));
    format!("m = {m}, n = {n}, k = {k}{}", entries.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_wrong_with_all_candidates_is_counted() {
        let refused = || Flaw::Refused("not supported".to_owned());
        let flaws = [Flaw::Splits, refused(), Flaw::Splits, Flaw::RoundsOften, refused()];
        assert_eq!(
            none_left(&flaws),
            "none of its 5 algorithms will do: 2x splits the sum over k, 2x was refused at its launch (not \
             supported), 1x rounds a sum more than once"
        );
        assert_eq!(
            none_left(&[]),
            "it proposes no algorithm that serves every number of rows or entries"
        );
    }

    #[test]
    fn a_candidate_is_judged_by_what_its_library_says() {
        let candidate =
            |workspace_bytes, terms| Candidate { algorithm: (), workspace_bytes, terms };
        assert!(candidate(32, Terms::Whole).is_eligible(32));
        assert!(!candidate(33, Terms::Whole).is_eligible(32));
        assert!(!candidate(0, Terms::Split).is_eligible(32));
    }
}
