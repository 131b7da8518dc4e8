//! Which documents are kept.

use std::hash::Hash;

use differential_dataflow::{ExchangeData, VecCollection};
use serde::{Deserialize, Serialize};

use super::{Moment, Summary};

/// The verdict on a document.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Verdict {
    /// It is the first in each of its buckets.
    Kept,
    /// A smaller key has nearly the same text.
    NearCopy,
    /// A smaller key has the same text, or the same words.
    Copy,
    /// It breaks this rule of the filters, `table.key`.
    Rejected(Box<str>),
}

/// The verdict of each document, by its key: the one that [`prepare`](crate::prepare::prepare) gives it in the order of keys.
///
/// A document is kept if its key is the smallest in each of its buckets. Two documents share a bucket if they are copies or near copies.
/// A bucket is on the worker that its hash chooses, a verdict on the worker that the key's hash chooses.
///
/// # Contract
/// A key has one document at a time: one that changes is withdrawn with its old summary and comes with its new one.
pub fn verdicts<'scope, T, K>(
    summaries: VecCollection<'scope, T, (K, Summary)>,
) -> VecCollection<'scope, T, (K, Verdict)>
where
    T: Moment,
    K: ExchangeData + Hash,
{
    let rejected = summaries.clone().flat_map(|(key, summary)| match summary {
        Summary::Rejected(rule) => Some((key, Verdict::Rejected(rule))),
        Summary::Chosen { .. } => None,
    });
    let chosen = summaries.clone().flat_map(|(key, summary)| match summary {
        Summary::Rejected(_) => None,
        Summary::Chosen { .. } => Some((key, Verdict::Kept)),
    });
    let copies = summaries.clone().flat_map(|(key, summary)| match summary {
        Summary::Rejected(_) => None,
        Summary::Chosen { copies, .. } => Some((copies?, key)),
    });
    let near = summaries.flat_map(|(key, summary)| {
        let near = match summary {
            Summary::Rejected(_) => Box::default(),
            Summary::Chosen { near, .. } => near,
        };
        near.into_iter().map(move |bucket| (bucket, key.clone())).collect::<Vec<_>>()
    });
    let copies = not_first("Copies", copies).map(|key| (key, Verdict::Copy));
    let near = not_first("NearCopies", near).map(|key| (key, Verdict::NearCopy));
    // The last in the order of verdicts is the one that says most.
    let of_chosen =
        chosen.concat(copies).concat(near).reduce_named("Verdicts", |_key, all, out| {
            out.extend(all.last().map(|(verdict, _)| ((*verdict).clone(), 1)));
        });
    rejected.concat(of_chosen)
}

/// The keys that are not the smallest of their buckets, once for each.
fn not_first<'scope, T, B, K>(
    name: &str,
    keys: VecCollection<'scope, T, (B, K)>,
) -> VecCollection<'scope, T, K>
where
    T: Moment,
    B: ExchangeData + Hash,
    K: ExchangeData,
{
    let behind = keys.reduce_named(name, |_bucket, keys, out| {
        out.extend(keys.iter().skip(1).map(|(key, _)| ((*key).clone(), 1_isize)));
    });
    behind.map(|(_bucket, key)| key)
}
