//! A process's counts for a report, in a message to process 0.

use std::collections::BTreeMap;

use super::packet::{Packet, Unpacked};
use crate::prepare::{
    EXAMPLES, PrepareError, Rule, Verdict,
    data_report::{
        excerpt::{EXCERPT_BYTES, Excerpt},
        histogram::Counts,
        tally::{Example, OfInput, OfVerdict, Tally},
    },
};

const KEPT: u8 = 0;
const EXCLUDED: u8 = 1;
const REJECTED: u8 = 2;
const COPY: u8 = 3;
const NEAR_COPY: u8 = 4;

/// Binary digits of a process's count in a pass, at most: sums over all processes have more.
const DIGITS: u32 = 52;

/// The longest path of an example, in bytes.
const LONGEST_PATH: usize = 1 << 16;

/// Appends the counts.
pub(super) fn write_tally(packet: &mut Packet, tally: &Tally) {
    packet.number(tally.verdicts.len() as u64);
    for (verdict, of_verdict) in &tally.verdicts {
        match verdict {
            Verdict::Kept => packet.byte(KEPT),
            Verdict::Excluded => packet.byte(EXCLUDED),
            Verdict::Rejected(rule) => {
                packet.byte(REJECTED);
                packet.bytes(rule.as_bytes());
            }
            Verdict::Copy => packet.byte(COPY),
            Verdict::NearCopy => packet.byte(NEAR_COPY),
        }
        packet.number(of_verdict.documents);
        packet.number(of_verdict.bytes);
        packet.number(of_verdict.examples.len() as u64);
        for Example { input, path, place, source, excerpt } in &of_verdict.examples {
            packet.number(*input as u64);
            packet.number(*place);
            packet.byte(u8::from(source.is_some()));
            packet.wide(source.unwrap_or(0));
            packet.bytes(path.as_deref().unwrap_or_default().as_bytes());
            let (text, bytes) =
                excerpt.as_ref().map_or(("", 0), |it| (it.text.as_str(), it.document_bytes));
            packet.bytes(text.as_bytes());
            packet.number(bytes);
        }
    }
    for counts in [&tally.kept_tokens, &tally.kept_bytes, &tally.left_out_bytes] {
        let (buckets, total, largest) = counts.parts();
        packet.number(buckets.len() as u64);
        buckets.iter().for_each(|&count| packet.number(count));
        packet.number(total);
        packet.number(largest);
    }
    packet.number(tally.inputs.len() as u64);
    for (&input, of_input) in &tally.inputs {
        packet.number(input as u64);
        for number in [of_input.documents, of_input.kept, of_input.tokens] {
            packet.number(number);
        }
    }
}

/// A process's counts.
///
/// # Errors
/// [`PrepareError::Message`] for numbers, texts or lists that are too large, and for what counts nothing.
pub(super) fn read_tally(unpacked: &mut Unpacked<'_>) -> Result<Tally, PrepareError> {
    let mut tally = Tally::default();
    for _ in 0..unpacked.count()? {
        let verdict = match unpacked.byte()? {
            KEPT => Verdict::Kept,
            EXCLUDED => Verdict::Excluded,
            REJECTED => {
                let rule = Rule::parse(unpacked.text()?).ok_or_else(|| unpacked.wrong())?;
                Verdict::Rejected(rule.to_string())
            }
            COPY => Verdict::Copy,
            NEAR_COPY => Verdict::NearCopy,
            _ => return Err(unpacked.wrong()),
        };
        let (documents, bytes) = (unpacked.tally(DIGITS)?, unpacked.tally(DIGITS)?);
        let mut examples = Vec::new();
        for _ in 0..unpacked.count()? {
            if examples.len() == EXAMPLES {
                return Err(unpacked.wrong());
            }
            examples.push(read_example(unpacked)?);
        }
        tally.verdicts.insert(verdict, OfVerdict { documents, bytes, examples });
    }
    for counts in [&mut tally.kept_tokens, &mut tally.kept_bytes, &mut tally.left_out_bytes] {
        let mut buckets = Vec::new();
        for _ in 0..unpacked.count()? {
            buckets.push(unpacked.tally(DIGITS)?);
        }
        let (total, largest) = (unpacked.tally(DIGITS)?, unpacked.tally(DIGITS)?);
        *counts = Counts::of_parts(buckets, total, largest).ok_or_else(|| unpacked.wrong())?;
    }
    let mut inputs = BTreeMap::new();
    for _ in 0..unpacked.count()? {
        let input = unpacked.count()?;
        let of_input = OfInput {
            documents: unpacked.tally(DIGITS)?,
            kept: unpacked.tally(DIGITS)?,
            tokens: unpacked.tally(DIGITS)?,
        };
        inputs.insert(input, of_input);
    }
    tally.inputs = inputs;
    Ok(tally)
}

fn read_example(unpacked: &mut Unpacked<'_>) -> Result<Example, PrepareError> {
    let (input, place) = (unpacked.count()?, unpacked.number()?);
    let (has_source, source) = (unpacked.byte()? == 1, unpacked.wide()?);
    let path = unpacked.text()?.to_owned();
    let (text, document_bytes) = (unpacked.text()?.to_owned(), unpacked.tally(DIGITS)?);
    if path.len() > LONGEST_PATH || text.len() > EXCERPT_BYTES {
        return Err(unpacked.wrong());
    }
    Ok(Example {
        input,
        path: Some(path),
        place,
        source: has_source.then_some(source),
        excerpt: Some(Excerpt { text, document_bytes }),
    })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::prepare::{Place, data_report::tally::Counted};

    fn tally() -> Tally {
        let mut tally = Tally::default();
        let rejected = |rule: &str| Verdict::Rejected(rule.to_owned());
        for (verdict, place) in [
            (Verdict::Kept, 1),
            (Verdict::Kept, 2),
            (Verdict::Excluded, 3),
            (rejected("gopher.min_words"), 4),
            (rejected("c4.min_sentences"), 5),
            (Verdict::Copy, 6),
            (Verdict::NearCopy, 7),
        ] {
            let (path, text) = (Path::new("in/a.jsonl"), "水\0".repeat(place as usize * 99));
            let example =
                &|| Some(Example::of_text(place as usize, path, Some(Place::Line(place)), &text));
            let bytes = Some(text.len() as u64);
            let counted = Counted { input: place as usize, bytes, tokens: 1 << place, example };
            tally.count(verdict, &counted);
        }
        tally
    }

    fn packed(tally: &Tally) -> Vec<u8> {
        let mut packet = Packet::default();
        write_tally(&mut packet, tally);
        packet.take()
    }

    #[test]
    fn counts_are_read_as_they_were_written_and_what_is_cut_off_is_an_error() {
        for tally in [Tally::default(), tally()] {
            let message = packed(&tally);
            let mut unpacked = Unpacked::new(&message, 1);
            assert_eq!(read_tally(&mut unpacked).unwrap(), tally);
            assert!(unpacked.is_empty());
            for length in 0..message.len() {
                let error = read_tally(&mut Unpacked::new(&message[..length], 1)).unwrap_err();
                assert!(matches!(error, PrepareError::Message { process: 1 }), "{error}");
            }
        }
    }

    #[test]
    fn what_is_too_large_is_refused() {
        type Break = fn(&mut Tally);
        let of_kept = |tally: &mut Tally| tally.verdicts.get_mut(&Verdict::Kept).unwrap().clone();
        assert_eq!(of_kept(&mut tally()).examples.len(), 2);
        let breaks: [(&str, Break); 7] = [
            ("documents", |it| it.verdicts.get_mut(&Verdict::Kept).unwrap().documents = 1 << 52),
            ("bytes", |it| it.verdicts.get_mut(&Verdict::Copy).unwrap().bytes = u64::MAX),
            ("examples", |it| {
                let examples = &mut it.verdicts.get_mut(&Verdict::Kept).unwrap().examples;
                examples.extend(examples.clone());
            }),
            ("excerpt", |it| {
                let examples = &mut it.verdicts.get_mut(&Verdict::Kept).unwrap().examples;
                examples[0].excerpt.as_mut().unwrap().text = "a".repeat(EXCERPT_BYTES + 1);
            }),
            ("path", |it| {
                let examples = &mut it.verdicts.get_mut(&Verdict::Kept).unwrap().examples;
                examples[0].path = Some("a".repeat(LONGEST_PATH + 1));
            }),
            ("rule", |it| {
                let of = it.verdicts.remove(&Verdict::Copy).unwrap();
                it.verdicts.insert(Verdict::Rejected("no rule".to_owned()), of);
            }),
            ("tokens", |it| it.inputs.get_mut(&1).unwrap().tokens = 1 << 60),
        ];
        for (what, break_it) in breaks {
            let mut broken = tally();
            break_it(&mut broken);
            let message = packed(&broken);
            let error = read_tally(&mut Unpacked::new(&message, 1)).unwrap_err();
            assert!(matches!(error, PrepareError::Message { process: 1 }), "{what}: {error}");
        }
        let mut packet = Packet::default();
        packet.number(0);
        packet.number(65);
        (0..67).for_each(|_| packet.number(0));
        let message = packet.take();
        read_tally(&mut Unpacked::new(&message, 1)).unwrap_err();
    }
}
