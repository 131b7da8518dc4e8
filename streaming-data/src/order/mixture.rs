//! A mixture: one data set in its canonical order, or several mixed in exact shares.
//!
//! A mixture is an endless order of its own, as random-access as that of one data set: a position
//! belongs to one of the parts, in the interleaving of [`Shares`], and is there the next position of
//! that part's own canonical order, which goes through its epochs at its own pace. No sample of a
//! part is left out or repeated before its data set has been gone through once.
//!
//! | [`Amount`] | in an epoch of the mixture |
//! |---|---|
//! | `Proportion(p)` | the share p / (sum of all p); an epoch is as long as all data sets together |
//! | `Repeat(r)` | r times the samples of the data set (rounded): 2.0 twice, 0.5 every second epoch |
//! | `Samples(n)` | n samples |
//!
//! Proportions stand alone; the other two may be mixed. Shares are exact: of every
//! stretch of positions whose shares are whole numbers, wherever it begins, each part has exactly
//! its share (0.7, 0.2 and 0.1: of any 10 positions 7, 2 and 1), and of any other within a sample
//! or two ([`Shares`] says how near).
//!
//! Contract: position -> sample is a pure function of the data sets, their order in the list, the
//! amounts and the shuffle settings; never of names, workers or paths.

use std::{fmt, ops::Range, sync::Arc};

use crate::{
    data_set::DataSet,
    error::DataError,
    hash::{ContentHash, ContentHasher},
    order::{
        CanonicalOrder, Key, SampleId, Shares, ShuffleSettings,
        cursor::{PartIdentity, StreamIdentity},
    },
};

/// How much of a data set a mixture has.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Amount {
    /// A share of all positions, relative to the proportions of the other parts.
    Proportion(f64),
    /// This many times its samples in an epoch of the mixture.
    Repeat(f64),
    /// This many samples in an epoch of the mixture.
    Samples(u64),
}

impl fmt::Display for Amount {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Amount::Proportion(proportion) => write!(formatter, "proportion = {proportion}"),
            Amount::Repeat(times) => write!(formatter, "repeat = {times}"),
            Amount::Samples(samples) => write!(formatter, "samples = {samples}"),
        }
    }
}

/// A data set of a mixture.
#[derive(Debug, Clone)]
pub struct Part {
    /// Its name in errors, different from the other parts' names.
    pub name: String,
    /// The data set.
    pub data_set: DataSet,
    /// How much of it is read.
    pub amount: Amount,
}

/// One data set, or several mixed; see the [module](self). Clones share everything.
#[derive(Clone)]
pub struct Mixture {
    content: Arc<Content>,
}

struct Content {
    parts: Vec<Part>,
    orders: Vec<CanonicalOrder>,
    shares: Shares,
    samples: u64,
    shuffle: ShuffleSettings,
}

/// The sample at a position of a mixture.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MixedSample {
    /// Which part, from 0.
    pub part: usize,
    /// Its position in the order of the part.
    pub position: u64,
    /// Which sample of the part.
    pub sample: SampleId,
}

/// Separates the permutations of a part from the other permutations.
const PART_KEY: u64 = 4;

impl Mixture {
    /// One data set alone.
    ///
    /// # Errors
    /// As [`DataSet::order`].
    pub fn of(data_set: DataSet, shuffle: ShuffleSettings) -> Result<Mixture, DataError> {
        let amount = Amount::Repeat(1.0);
        Mixture::new(vec![Part { name: "dataset".to_owned(), data_set, amount }], shuffle)
    }

    /// Several data sets.
    ///
    /// # Errors
    /// [`DataError::Mixture`], naming the part, for parts without a name of their own, of different
    /// seq_len or eos token, or whose amounts cannot be.
    pub fn new(parts: Vec<Part>, shuffle: ShuffleSettings) -> Result<Mixture, DataError> {
        check_parts(&parts)?;
        let (counts, samples) = counts(&parts)?;
        let shares = Shares::new(&counts).ok_or_else(|| DataError::Mixture {
            part: parts.last().map_or_else(String::new, |part| part.name.clone()),
            found: "more than 2^64 - 1 samples in an epoch".to_owned(),
            expected: "fewer".to_owned(),
        })?;
        let is_alone = parts.len() == 1;
        let orders = parts
            .iter()
            .enumerate()
            .map(|(at, part)| {
                let key = Key::new(shuffle.seed).refine(PART_KEY).refine(at as u64);
                let seed = if is_alone { shuffle.seed } else { key.seed() };
                part.data_set.order(ShuffleSettings { seed, ..shuffle })
            })
            .collect::<Result<_, _>>()?;
        Ok(Mixture { content: Arc::new(Content { parts, orders, shares, samples, shuffle }) })
    }

    /// The parts, in the order of the list.
    pub fn parts(&self) -> &[Part] {
        &self.content.parts
    }

    /// The data set of a part.
    ///
    /// # Panics
    /// If there is no such part.
    pub fn data_set(&self, part: usize) -> &DataSet {
        &self.content.parts[part].data_set
    }

    /// The order of a part's own samples.
    ///
    /// # Panics
    /// If there is no such part.
    pub fn order(&self, part: usize) -> &CanonicalOrder {
        &self.content.orders[part]
    }

    /// How the parts are interleaved.
    pub fn shares(&self) -> &Shares {
        &self.content.shares
    }

    /// Samples in an epoch.
    pub fn samples(&self) -> u64 {
        self.content.samples
    }

    /// Predicted tokens per sample.
    pub fn seq_len(&self) -> usize {
        self.data_set(0).seq_len()
    }

    /// Size of the vocabulary: the largest of the parts, if all state one.
    pub fn vocab_size(&self) -> Option<u32> {
        let sizes: Option<Vec<u32>> =
            self.parts().iter().map(|part| part.data_set.vocab_size()).collect();
        sizes?.into_iter().max()
    }

    /// Token that begins a document, where the parts agree on one.
    pub fn bos_token_id(&self) -> Option<u32> {
        self.agreed(DataSet::bos_token_id)
    }

    /// Token that ends a document, where there is one.
    pub fn eos_token_id(&self) -> Option<u32> {
        self.agreed(DataSet::eos_token_id)
    }

    /// Token that fills, where the parts agree on one.
    pub fn pad_token_id(&self) -> Option<u32> {
        self.agreed(DataSet::pad_token_id)
    }

    fn agreed(&self, of: impl Fn(&DataSet) -> Option<u32>) -> Option<u32> {
        let first = of(self.data_set(0));
        first.filter(|_| self.parts().iter().all(|part| of(&part.data_set) == first))
    }

    /// The identity of the data: of one data set, its fingerprint; of several, a hash of theirs
    /// and of their shares, in the order of the list.
    pub fn fingerprint(&self) -> ContentHash {
        let content = &self.content;
        if let [part] = &content.parts[..] {
            return part.data_set.fingerprint();
        }
        let mut hasher = ContentHasher::new();
        for (part, count) in content.parts.iter().zip(content.shares.counts()) {
            hasher.update(&count.to_be_bytes());
            hasher.update(&part.data_set.fingerprint().to_be_bytes());
        }
        hasher.finish()
    }

    /// The identity of the stream, on which its samples depend: for a [`Cursor`](crate::order::cursor::Cursor).
    pub fn identity(&self) -> StreamIdentity {
        let content = &self.content;
        let parts = match content.parts.len() {
            1 => Vec::new(),
            _ => content
                .parts
                .iter()
                .zip(content.shares.counts())
                .map(|(part, &share)| PartIdentity {
                    name: part.name.clone(),
                    amount: part.amount.to_string(),
                    share,
                    samples: part.data_set.samples(),
                    fingerprint: part.data_set.fingerprint(),
                })
                .collect(),
        };
        StreamIdentity {
            fingerprint: self.fingerprint(),
            samples: self.samples(),
            seq_len: self.seq_len(),
            shuffle: content.shuffle,
            parts,
        }
    }

    /// The positions of a part that belong to given positions of the mixture.
    ///
    /// # Panics
    /// If there is no such part.
    pub fn positions_of(&self, part: usize, positions: &Range<u64>) -> Range<u64> {
        let shares = &self.content.shares;
        match self.parts().len() {
            1 => positions.clone(),
            _ => shares.before(positions.start)[part]..shares.before(positions.end)[part],
        }
    }

    /// The sample at a position of the endless order.
    pub fn sample_at(&self, position: u64) -> MixedSample {
        let (part, position) = self.content.shares.locate(position);
        MixedSample { part, position, sample: self.content.orders[part].sample_at(position) }
    }
}

impl fmt::Debug for Mixture {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Mixture")
            .field("parts", &self.content.parts)
            .field("shares", &self.content.shares.counts())
            .field("samples", &self.content.samples)
            .finish_non_exhaustive()
    }
}

fn wrong(part: &Part, found: impl ToString, expected: impl ToString) -> DataError {
    let (found, expected) = (found.to_string(), expected.to_string());
    DataError::Mixture { part: part.name.clone(), found, expected }
}

/// The properties that parts must share, and the names that they must not.
fn check_parts(parts: &[Part]) -> Result<(), DataError> {
    let Some(first) = parts.first() else {
        let found = "a mixture without parts".to_owned();
        return Err(DataError::Mixture {
            part: String::new(),
            found,
            expected: "a part".to_owned(),
        });
    };
    let in_words = |token: Option<u32>| token.map_or("none".to_owned(), |id| id.to_string());
    for (at, part) in parts.iter().enumerate() {
        if parts[..at].iter().any(|other| other.name == part.name) {
            return Err(wrong(part, "a second part of this name", "names unlike each other"));
        }
        let (found, expected) = (part.data_set.seq_len(), first.data_set.seq_len());
        if found != expected {
            let expected = format!("seq_len {expected}, as {} has", first.name);
            return Err(wrong(part, format!("seq_len {found}"), expected));
        }
        let (found, expected) = (part.data_set.eos_token_id(), first.data_set.eos_token_id());
        if found != expected {
            let expected = format!("eos_token_id {}, as {} has", in_words(expected), first.name);
            return Err(wrong(part, format!("eos_token_id {}", in_words(found)), expected));
        }
    }
    Ok(())
}

/// How many turns the parts have in a round of the mixture, and the samples of its epoch.
fn counts(parts: &[Part]) -> Result<(Vec<u64>, u64), DataError> {
    let is_proportion = |part: &&Part| matches!(part.amount, Amount::Proportion(_));
    let proportions = parts.iter().filter(is_proportion).count();
    if proportions == parts.len() {
        let counts = whole_numbers(parts)?;
        let samples = parts.iter().try_fold(0_u64, |sum, p| sum.checked_add(p.data_set.samples()));
        let too_many = || wrong(&parts[0], "more than 2^64 - 1 samples", "fewer");
        return Ok((counts, samples.ok_or_else(too_many)?));
    }
    let mut counts = Vec::with_capacity(parts.len());
    for part in parts {
        counts.push(match part.amount {
            Amount::Proportion(_) => {
                let expected = "a proportion for every part or for none";
                return Err(wrong(part, "a proportion beside other amounts", expected));
            }
            Amount::Samples(0) => return Err(wrong(part, part.amount, "1 or more")),
            Amount::Samples(samples) => samples,
            Amount::Repeat(times) => {
                let samples = part.data_set.samples();
                let expected = "a number of samples from 1 to 2^53";
                let count = (times * samples as f64).round();
                // Reading once is exact for any number.
                match count {
                    _ if times == 1.0 => samples,
                    count if (1.0..=9e15).contains(&count) => count as u64,
                    _ => return Err(wrong(part, part.amount, expected)),
                }
            }
        });
    }
    let samples = counts.iter().try_fold(0_u64, |sum, &count| sum.checked_add(count));
    let too_many = || wrong(&parts[0], "more than 2^64 - 1 samples in an epoch", "fewer");
    Ok((counts, samples.ok_or_else(too_many)?))
}

/// The most decimal digits of a proportion.
const MAX_DIGITS: usize = 15;

/// The proportions as the smallest whole numbers with the same ratios: 0.7, 0.2 and 0.1 are 7, 2
/// and 1. They are taken as decimals, as they are written, so that the shares which a user means
/// are kept.
fn whole_numbers(parts: &[Part]) -> Result<Vec<u64>, DataError> {
    let mut decimals = Vec::with_capacity(parts.len());
    for part in parts {
        let Amount::Proportion(value) = part.amount else { unreachable!("all are proportions") };
        if !(value.is_finite() && value > 0.0 && value < 1e12) {
            return Err(wrong(part, part.amount, "a number above 0 and below 10^12"));
        }
        // The shortest decimal that is this number.
        let text = value.to_string();
        let (whole, fraction) = text.split_once('.').unwrap_or((&text, ""));
        if fraction.len() > MAX_DIGITS {
            let expected = format!("at most {MAX_DIGITS} digits behind the point");
            return Err(wrong(part, part.amount, expected));
        }
        decimals.push((whole.to_owned(), fraction.to_owned()));
    }
    let digits = decimals.iter().map(|(_, fraction)| fraction.len()).max().unwrap_or(0);
    let mut numbers = Vec::with_capacity(parts.len());
    for ((whole, fraction), part) in decimals.iter().zip(parts) {
        let padded = format!("{whole}{fraction:0<digits$}");
        let number: u64 = padded.parse().map_err(|_| {
            let expected = "proportions of at most 19 digits between the largest and the smallest";
            wrong(part, part.amount, expected)
        })?;
        numbers.push(number);
    }
    let divisor = numbers.iter().copied().fold(0, greatest_common_divisor).max(1);
    Ok(numbers.into_iter().map(|number| number / divisor).collect())
}

fn greatest_common_divisor(mut a: u64, mut b: u64) -> u64 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}
