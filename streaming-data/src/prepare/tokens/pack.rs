//! The stream of tokens cut into rows, and rows into row groups and shards.
//!
//! Row `r` holds tokens `[r * seq_len, (r + 1) * seq_len]` of the stream, both ends included: it
//! begins with the last token of the row before, so that every token but the very first is
//! predicted exactly once. Here the stream is still without that overlap; the rows are laid out
//! where they are encoded.
//!
//! A stream of rows that were cut before ([`Rows::Apart`]) keeps them: row `r` is tokens
//! `[r * (seq_len + 1), (r + 1) * (seq_len + 1))`.

use std::mem;

/// How the stream is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Cut {
    /// Predicted tokens in a row.
    pub seq_len: usize,
    /// Rows in a row group; the last of a shard may have fewer.
    pub row_group_samples: usize,
    /// Rows in a shard; the last may have fewer.
    pub shard_samples: usize,
    /// How rows lie in the stream.
    pub rows: Rows,
}

/// How rows lie in the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rows {
    /// Each begins with the last token of the one before.
    Overlapping,
    /// One after the other.
    Apart,
}

impl Cut {
    /// Tokens from the beginning of a row to the beginning of the next.
    pub(crate) fn stride(&self) -> usize {
        match self.rows {
            Rows::Overlapping => self.seq_len,
            Rows::Apart => self.seq_len + 1,
        }
    }

    /// Tokens of the stream in this many rows, at least one.
    pub(crate) fn tokens_of(&self, samples: usize) -> usize {
        samples * self.stride() + self.overlap()
    }

    /// Tokens that a row shares with the next.
    fn overlap(&self) -> usize {
        self.seq_len + 1 - self.stride()
    }
}

/// Consecutive rows that are encoded together.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct RowGroup {
    /// Which shard they belong to, from 0.
    pub shard: usize,
    /// Number of rows.
    pub samples: usize,
    /// [`Cut::tokens_of`] these rows: their part of the stream, without overlap.
    pub tokens: Vec<u32>,
}

/// Cuts the stream as it comes.
#[derive(Debug)]
pub(crate) struct Packer {
    cut: Cut,
    /// Tokens that are in no row group yet; the first is the last of the row group before, where
    /// rows overlap.
    tokens: Vec<u32>,
    shard: usize,
    /// Rows of the shard that were cut.
    shard_samples: usize,
    stream_tokens: u64,
}

/// The rest when the stream ends.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct StreamEnd {
    /// The last row group, if rows are left for one.
    pub row_group: Option<RowGroup>,
    /// Tokens of the whole stream.
    pub tokens: u64,
    /// Tokens at its end that are in no row.
    pub dropped_tokens: u64,
}

impl Packer {
    pub(crate) fn new(cut: Cut) -> Packer {
        Packer { cut, tokens: Vec::new(), shard: 0, shard_samples: 0, stream_tokens: 0 }
    }

    /// Appends tokens to the stream and returns the row groups that they complete.
    pub(crate) fn push(&mut self, mut tokens: &[u32]) -> Vec<RowGroup> {
        self.stream_tokens += tokens.len() as u64;
        let mut row_groups = Vec::new();
        loop {
            let samples =
                self.cut.row_group_samples.min(self.cut.shard_samples - self.shard_samples);
            let needed = self.cut.tokens_of(samples);
            let (now, later) = tokens.split_at(tokens.len().min(needed - self.tokens.len()));
            self.tokens.extend_from_slice(now);
            tokens = later;
            if self.tokens.len() < needed {
                return row_groups;
            }
            row_groups.push(self.cut_off(samples));
        }
    }

    /// Ends the shard: the last row group, if rows are left for one, and the tokens that are in no row. The
    /// next begins with rows of its own, without tokens of this one.
    pub(crate) fn end_shard(&mut self) -> (Option<RowGroup>, Vec<u32>) {
        let row_group = self.cut_off_rest();
        let has_rows = self.shard_samples > 0;
        let tail = self.tokens.split_off(if has_rows { self.cut.overlap() } else { 0 });
        self.tokens.clear();
        self.shard += usize::from(has_rows);
        self.shard_samples = 0;
        (row_group, tail)
    }

    /// Skips a shard that exists already, when no shard has begun.
    pub(crate) fn skip_shard(&mut self) {
        assert!(self.tokens.is_empty() && self.shard_samples == 0, "a shard began");
        self.shard += 1;
    }

    /// Ends the stream.
    pub(crate) fn finish(mut self) -> StreamEnd {
        let row_group = self.cut_off_rest();
        let rows_began = self.shard > 0 || self.shard_samples > 0;
        let in_rows = if rows_began { self.cut.overlap() } else { 0 };
        StreamEnd {
            row_group,
            tokens: self.stream_tokens,
            dropped_tokens: (self.tokens.len() - in_rows) as u64,
        }
    }

    /// Makes a row group of the remaining tokens, if there are enough for one.
    fn cut_off_rest(&mut self) -> Option<RowGroup> {
        let samples = self.tokens.len().saturating_sub(self.cut.overlap()) / self.cut.stride();
        (samples > 0).then(|| {
            let rest = self.tokens.split_off(self.cut.tokens_of(samples));
            let row_group = self.cut_off(samples);
            self.tokens.extend(rest);
            row_group
        })
    }

    /// Makes a row group of all tokens so far, and keeps the tokens that the next row shares with it.
    fn cut_off(&mut self, samples: usize) -> RowGroup {
        let shared = self.tokens[self.tokens.len() - self.cut.overlap()..].to_vec();
        let tokens = mem::replace(&mut self.tokens, shared);
        let row_group = RowGroup { shard: self.shard, samples, tokens };
        self.shard_samples += samples;
        if self.shard_samples == self.cut.shard_samples {
            self.shard += 1;
            self.shard_samples = 0;
        }
        row_group
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Row groups of a stream 0, 1, 2 ... that comes `at_once` tokens at a time.
    fn cut(cut: Cut, tokens: u32, at_once: usize) -> (Vec<RowGroup>, u64) {
        let stream: Vec<u32> = (0..tokens).collect();
        let mut packer = Packer::new(cut);
        let mut row_groups: Vec<_> =
            stream.chunks(at_once).flat_map(|tokens| packer.push(tokens)).collect();
        let end = packer.finish();
        assert_eq!(end.tokens, u64::from(tokens));
        row_groups.extend(end.row_group);
        (row_groups, end.dropped_tokens)
    }

    #[test]
    fn every_token_but_the_first_is_predicted_once_whatever_comes_at_once() {
        for seq_len in [1, 3, 7] {
            let rows = Rows::Overlapping;
            let how = Cut { seq_len, row_group_samples: 2, shard_samples: 5, rows };
            for tokens in 0..120 {
                let expected = cut(how, tokens, 1);
                for at_once in [2, 5, 13, 1000] {
                    assert_eq!(cut(how, tokens, at_once), expected, "{tokens} by {at_once}");
                }
                let (row_groups, dropped) = expected;
                let mut predicted = Vec::new();
                let mut shards: Vec<Vec<usize>> = Vec::new();
                for row_group in &row_groups {
                    assert_eq!(row_group.tokens.len(), row_group.samples * seq_len + 1);
                    let first = predicted.last().copied().unwrap_or(0);
                    assert_eq!(row_group.tokens[0], first, "rows overlap by one token");
                    predicted.extend_from_slice(&row_group.tokens[1..]);
                    shards.resize(row_group.shard + 1, Vec::new());
                    shards[row_group.shard].push(row_group.samples);
                }
                let samples = tokens.saturating_sub(1) as usize / seq_len;
                assert!(predicted.iter().copied().eq(1..=(samples * seq_len) as u32));
                let in_rows = if samples == 0 { 0 } else { samples * seq_len + 1 };
                assert_eq!(dropped as usize, tokens as usize - in_rows);
                if let Some((last, full)) = shards.split_last() {
                    assert!(full.iter().all(|shard| *shard == [2, 2, 1]), "{shards:?}");
                    assert!(last.iter().sum::<usize>() <= 5);
                }
            }
        }
    }

    #[test]
    fn a_shard_that_ends_early_keeps_its_rows_and_gives_back_what_is_in_none() {
        let how = Cut {
            seq_len: 3,
            row_group_samples: 2,
            shard_samples: usize::MAX,
            rows: Rows::Overlapping,
        };
        for tokens in 0..40_u32 {
            let stream: Vec<u32> = (0..tokens).collect();
            let mut packer = Packer::new(how);
            for shard in 0..3 {
                let mut row_groups = packer.push(&stream);
                let (last, tail) = packer.end_shard();
                row_groups.extend(last);
                let samples = (tokens.saturating_sub(1) / 3) as usize;
                let in_rows = if samples == 0 { 0 } else { samples * 3 + 1 };
                assert_eq!(tail, stream[in_rows..], "{tokens}");
                assert_eq!(row_groups.iter().map(|group| group.samples).sum::<usize>(), samples);
                let mut found = Vec::new();
                for group in row_groups {
                    assert_eq!(group.shard, if samples == 0 { 0 } else { shard });
                    found.extend_from_slice(&group.tokens[usize::from(!found.is_empty())..]);
                }
                assert_eq!(found, stream[..in_rows]);
            }
        }
    }

    #[test]
    fn rows_that_lie_apart_stay_as_they_are() {
        let how = Cut { seq_len: 3, row_group_samples: 2, shard_samples: 3, rows: Rows::Apart };
        for rows in 0..9_u32 {
            for at_once in [4, 8, 20] {
                let (row_groups, dropped) = cut(how, rows * 4, at_once);
                assert_eq!(dropped, 0);
                let stream: Vec<u32> = row_groups.iter().flat_map(|g| g.tokens.clone()).collect();
                assert_eq!(stream, (0..rows * 4).collect::<Vec<_>>());
                for group in &row_groups {
                    assert_eq!(group.tokens.len(), group.samples * 4);
                }
                let sizes: Vec<_> = row_groups.iter().map(|g| (g.shard, g.samples)).collect();
                let full = [(0, 2), (0, 1), (1, 2), (1, 1), (2, 2)];
                let expected = match rows {
                    0 => vec![],
                    1 => vec![(0, 1)],
                    4 => vec![(0, 2), (0, 1), (1, 1)],
                    7 => vec![(0, 2), (0, 1), (1, 2), (1, 1), (2, 1)],
                    2 => full[..1].to_vec(),
                    3 => full[..2].to_vec(),
                    5 => full[..3].to_vec(),
                    6 => full[..4].to_vec(),
                    _ => full.to_vec(),
                };
                assert_eq!(sizes, expected, "{rows} rows");
            }
        }
    }
}
