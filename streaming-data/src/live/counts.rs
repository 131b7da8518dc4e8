//! Numbers across documents: how often something occurs in all of them together.

use std::hash::Hash;

use differential_dataflow::{ExchangeData, VecCollection};

use super::Moment;

/// How often each item occurs: lines, words for a [tokenizer](crate::tokenizer), sources.
pub fn counts<'scope, T, D>(
    items: VecCollection<'scope, T, D>,
) -> VecCollection<'scope, T, (D, isize)>
where
    T: Moment,
    D: ExchangeData + Hash,
{
    items.count()
}

/// The sum of the numbers of each item: tokens of each source, or words that were counted text by text, which is cheaper
/// than each by itself. Sums that are 0 are left out.
pub fn sums<'scope, T, D>(
    numbers: VecCollection<'scope, T, (D, i64)>,
) -> VecCollection<'scope, T, (D, isize)>
where
    T: Moment,
    D: ExchangeData + Hash,
{
    numbers.explode(|(item, number)| Some((item, number as isize))).count()
}

/// The items that occur more than `most` times, for instance lines that are in too many documents to be content.
pub fn more_than<'scope, T, D>(
    items: VecCollection<'scope, T, D>,
    most: isize,
) -> VecCollection<'scope, T, D>
where
    T: Moment,
    D: ExchangeData + Hash,
{
    items.threshold(move |_item, count| isize::from(*count > most))
}
