//! Reading the texts of examples. In a data set that can be kept up to date, the records tell which documents are the
//! examples, once all verdicts are known; most documents that are left out are not read again for any other reason.
//!
//! Texts that the previous version's report shows need not be read, so an update reads an input for its report only where
//! another document has become one of the first.

use std::collections::BTreeMap;

use xxhash_rust::xxh3::xxh3_128;

use super::{
    DataReport,
    excerpt::Excerpt,
    tally::{Example, Tally},
};
use crate::{
    hash::ContentHash,
    prepare::{
        PrepareError,
        input::{
            Entry, Limits, More, ReadFailure, find::Input, format::Format, skip::Place,
            text::read_document,
        },
        pipeline::job::Work,
    },
};

/// Places and hashes of documents of an input, and the beginnings of their texts, once those are known.
type Wanted = BTreeMap<u64, (u128, Option<Excerpt>)>;

/// Gives all examples their texts, from a report if it has them, or else from the inputs, each read as far as its last
/// example. `go_on` is asked between parts.
///
/// # Errors
/// [`PrepareError::OtherText`] if a document differs from the recorded one, [`PrepareError::InputChanged`] if it
/// is gone, and the errors of reading and of `go_on`.
pub(crate) fn show(
    work: &Work<'_>,
    tally: &mut Tally,
    former: Option<DataReport>,
    go_on: &mut dyn FnMut() -> Result<(), PrepareError>,
) -> Result<(), PrepareError> {
    let known = former.map(DataReport::into_excerpts).unwrap_or_default();
    let mut examples: Vec<&mut Example> =
        tally.verdicts.values_mut().flat_map(|of| &mut of.examples).collect();
    let mut wanted: BTreeMap<usize, Wanted> = BTreeMap::new();
    for example in &mut examples {
        let Some(source) = example.source.filter(|_| example.excerpt.is_none()) else { continue };
        example.excerpt = known.get(&ContentHash::of_bits(source)).cloned();
        if example.excerpt.is_none() {
            let of_input = wanted.entry(example.input).or_default();
            of_input.insert(example.place, (source, None));
        }
    }
    for (&input, wanted) in &mut wanted {
        go_on()?;
        read(work, &work.inputs[input], wanted, go_on)?;
    }
    for example in examples.into_iter().filter(|example| example.excerpt.is_none()) {
        let of_input = wanted.get(&example.input).and_then(|wanted| wanted.get(&example.place));
        example.excerpt = of_input.and_then(|(_, excerpt)| excerpt.clone());
    }
    Ok(())
}

fn read(
    work: &Work<'_>,
    input: &Input,
    wanted: &mut Wanted,
    go_on: &mut dyn FnMut() -> Result<(), PrepareError>,
) -> Result<(), PrepareError> {
    let changed = || PrepareError::InputChanged { path: input.path.clone() };
    if input.format == Format::Text {
        let text = read_document(&input.path).map_err(|_| changed())?;
        return take(input, wanted, 0, &text);
    }
    let failed = |failure| match failure {
        ReadFailure::Skip(_) => changed(),
        ReadFailure::Fatal(error) => error,
    };
    let mut reader = work.sources.open(input).map_err(failed)?;
    let limits = Limits {
        part_bytes: usize::try_from(work.bounds.piece_bytes).unwrap_or(usize::MAX),
        document_bytes: usize::try_from(work.bounds.document_bytes).unwrap_or(usize::MAX),
    };
    loop {
        go_on()?;
        let next = reader.next_part(limits).map_err(failed)?;
        if let Some(part) = next.part {
            part.documents.visit(&mut |place: Place, entry| match entry {
                Entry::Text(text) => take(input, wanted, place.number(), text),
                Entry::Tokens(_) | Entry::Null | Entry::Broken(_) => Ok(()),
            })?;
        }
        if wanted.values().all(|(_, excerpt)| excerpt.is_some()) {
            return Ok(());
        }
        if next.more == More::No {
            return Err(changed());
        }
    }
}

fn take(input: &Input, wanted: &mut Wanted, place: u64, text: &str) -> Result<(), PrepareError> {
    let Some((source, excerpt)) = wanted.get_mut(&place) else { return Ok(()) };
    if xxh3_128(text.as_bytes()) != *source {
        return Err(PrepareError::OtherText { path: input.path.clone(), number: place });
    }
    *excerpt = Some(Excerpt::of(text));
    Ok(())
}
