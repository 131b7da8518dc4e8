//! Where samples come from, in words: the names of positions in errors.
//!
//! Operators know a sample by its position in the canonical order; only its source knows the row and the file.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// As many samples are named; of more, how many there are.
const MOST_NAMED: usize = 8;

/// The name of a sample to its user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SampleName {
    /// The file or object that holds it.
    pub file: String,
    /// Its row there, from 0.
    pub row: u64,
}

/// Names the samples at positions of the canonical order. By default they have no names but their positions.
#[derive(Clone, Default)]
pub struct SampleNames(Option<Arc<dyn Fn(u64) -> SampleName + Send + Sync>>);

impl SampleNames {
    /// The names that `name` gives.
    pub fn new(name: impl Fn(u64) -> SampleName + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(name)))
    }

    /// Such as `positions 5 to 7 (rows 9, 3 of a.parquet; row 2 of b.parquet)`.
    pub fn in_words(&self, positions: &Range<u64>) -> String {
        let mut words = match positions.end - positions.start {
            1 => format!("position {}", positions.start),
            _ => format!("positions {} to {}", positions.start, positions.end - 1),
        };
        let Some(name) = &self.0 else { return words };
        let mut files: Vec<(String, Vec<String>)> = Vec::new();
        for SampleName { file, row } in positions.clone().take(MOST_NAMED).map(|at| name(at)) {
            match files.iter_mut().find(|(other, _)| *other == file) {
                Some((_, rows)) => rows.push(row.to_string()),
                None => files.push((file, vec![row.to_string()])),
            }
        }
        let of_file = |(file, rows): &(String, Vec<String>)| match rows.as_slice() {
            [row] => format!("row {row} of {file}"),
            rows => format!("rows {} of {file}", rows.join(", ")),
        };
        let named: Vec<String> = files.iter().map(of_file).collect();
        let more = (positions.end - positions.start).saturating_sub(MOST_NAMED as u64);
        let and_more = if more == 0 { String::new() } else { format!("; and {more} more") };
        words.push_str(&format!(" ({}{and_more})", named.join("; ")));
        words
    }
}

impl fmt::Debug for SampleNames {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "SampleNames(by source)" } else { "SampleNames" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_named_by_file_and_no_more_than_can_be_read() {
        let by_pairs = SampleNames::new(|position| SampleName {
            file: format!("{}.parquet", position / 2 % 2),
            row: 100 - position,
        });
        assert_eq!(by_pairs.in_words(&(3..4)), "position 3 (row 97 of 1.parquet)");
        let several = "positions 1 to 3 (row 99 of 0.parquet; rows 98, 97 of 1.parquet)";
        assert_eq!(by_pairs.in_words(&(1..4)), several);
        let many = by_pairs.in_words(&(0..100));
        assert!(many.ends_with("rows 98, 97, 94, 93 of 1.parquet; and 92 more)"), "{many}");
        assert_eq!(SampleNames::default().in_words(&(3..5)), "positions 3 to 4");
    }
}
