//! Numbers across documents: how often something occurs in all of them together.

use std::hash::Hash;

use differential_dataflow::{ExchangeData, VecCollection};

use super::Moment;

/// How often each item occurs: lines, words for a [tokenizer](crate::tokenizer), sources.
///
/// ```
/// use differential_dataflow::input::Input;
/// use tidemill_streaming_data::live::counts;
///
/// timely::execute_directly(|worker| {
///     let (mut words, changes) = worker.dataflow::<u64, _, _>(|scope| {
///         let (words, collection) = scope.new_collection::<String, isize>();
///         let (told, changes) = std::sync::mpsc::channel();
///         counts(collection).inspect(move |change| told.send(change.clone()).unwrap());
///         (words, changes)
///     });
///     ["tide", "mill", "tide"].map(|word| words.insert(word.to_owned()));
///     words.advance_to(1);
///     words.remove("tide".to_owned());
///     words.close();
///     while worker.step_or_park(None) {}
///     let mut changes: Vec<_> = changes.iter().collect();
///     changes.sort();
///     // A word and how often it occurs; when that changes; and 1 where it begins to be so, or -1 where it ends.
///     let count = |word: &str, count| (word.to_owned(), count);
///     let of_tide = [(count("tide", 1), 1, 1), (count("tide", 2), 0, 1), (count("tide", 2), 1, -1)];
///     assert_eq!(changes[0], (count("mill", 1), 0, 1));
///     assert_eq!(changes[1..], of_tide);
/// });
/// ```
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
///
/// ```
/// use differential_dataflow::input::Input;
/// use tidemill_streaming_data::live::sums;
///
/// timely::execute_directly(|worker| {
///     let (mut tokens, changes) = worker.dataflow::<u64, _, _>(|scope| {
///         let (tokens, collection) = scope.new_collection::<(String, i64), isize>();
///         let (told, changes) = std::sync::mpsc::channel();
///         sums(collection).inspect(move |change| told.send(change.clone()).unwrap());
///         (tokens, changes)
///     });
///     // Tokens of texts, by source. Then a text is withdrawn.
///     [("books", 500), ("web", 20), ("books", 70)].map(|(source, n)| tokens.insert((source.to_owned(), n)));
///     tokens.advance_to(1);
///     tokens.remove(("web".to_owned(), 20));
///     tokens.close();
///     while worker.step_or_park(None) {}
///     let mut changes: Vec<_> = changes.iter().collect();
///     changes.sort();
///     let sum = |source: &str, sum| (source.to_owned(), sum);
///     assert_eq!(changes, [(sum("books", 570), 0, 1), (sum("web", 20), 0, 1), (sum("web", 20), 1, -1)]);
/// });
/// ```
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
///
/// ```
/// use differential_dataflow::input::Input;
/// use tidemill_streaming_data::live::more_than;
///
/// timely::execute_directly(|worker| {
///     let (mut lines, changes) = worker.dataflow::<u64, _, _>(|scope| {
///         let (lines, collection) = scope.new_collection::<String, isize>();
///         let (told, changes) = std::sync::mpsc::channel();
///         more_than(collection, 2).inspect(move |change| told.send(change.clone()).unwrap());
///         (lines, changes)
///     });
///     ["Log in", "The tide turns.", "Log in"].map(|line| lines.insert(line.to_owned()));
///     lines.advance_to(1);
///     lines.insert("Log in".to_owned());
///     lines.close();
///     while worker.step_or_park(None) {}
///     // With the third document that has it, the line is in too many.
///     assert_eq!(changes.iter().collect::<Vec<_>>(), [("Log in".to_owned(), 1, 1)]);
/// });
/// ```
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
