//! The kinds of a hybrid's blocks in turn, which a user writes as letters.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::error::{ModelError, Result};

/// The kind of a block of a hybrid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockKind {
    /// `m`: a Mamba block.
    Mamba,
    /// `s`: a Mamba-2 block (state-space duality).
    Mamba2,
    /// `a`: attention without positions, and an MLP.
    Attention,
    /// `l`: a Llama block.
    Llama,
}

impl BlockKind {
    /// Every kind.
    pub const ALL: [Self; 4] = [Self::Mamba, Self::Mamba2, Self::Attention, Self::Llama];

    /// The letter that stands for the kind in a pattern.
    pub fn letter(self) -> char {
        match self {
            Self::Mamba => 'm',
            Self::Mamba2 => 's',
            Self::Attention => 'a',
            Self::Llama => 'l',
        }
    }
}

/// The kinds of blocks in turn, such as `mma`: repeated from the first block to the last.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct BlockPattern(Vec<BlockKind>);

impl BlockPattern {
    /// The kind of block `index`.
    pub fn kind(&self, index: usize) -> BlockKind {
        self.0[index % self.0.len()]
    }

    /// Whether a letter of the pattern stands for `kind`.
    pub fn holds(&self, kind: BlockKind) -> bool {
        self.0.contains(&kind)
    }

    /// Refuses a pattern that makes all `blocks` one kind: that is not a hybrid, and attention
    /// alone would have no positions, which blocks of every other kind carry.
    pub(super) fn check(&self, blocks: usize) -> Result<()> {
        let first = self.kind(0);
        if (1..blocks.min(self.0.len())).any(|index| self.kind(index) != first) {
            return Ok(());
        }
        let expected = format!("two kinds or more among {blocks} blocks");
        Err(ModelError::config("layer_pattern", expected, format!("only {}", first.letter())))
    }
}

impl FromStr for BlockPattern {
    type Err = String;

    fn from_str(letters: &str) -> std::result::Result<Self, String> {
        const MOST: usize = 1 << 12;
        let kind = |letter| BlockKind::ALL.into_iter().find(|kind| kind.letter() == letter);
        letters
            .chars()
            .map(kind)
            .collect::<Option<Vec<_>>>()
            .filter(|kinds| (1..=MOST).contains(&kinds.len()))
            .map(Self)
            .ok_or_else(|| {
                let shown: String = letters.chars().take(40).collect();
                format!(
                    "expected letters m (Mamba), s (Mamba-2), a (attention) and l (Llama), such as \"mma\", found \
                     \"{shown}\""
                )
            })
    }
}

impl TryFrom<String> for BlockPattern {
    type Error = String;

    fn try_from(letters: String) -> std::result::Result<Self, String> {
        letters.parse()
    }
}

impl From<BlockPattern> for String {
    fn from(pattern: BlockPattern) -> Self {
        pattern.to_string()
    }
}

impl fmt::Display for BlockPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|kind| write!(f, "{}", kind.letter()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pattern(letters: &str) -> BlockPattern {
        letters.parse().expect("a pattern")
    }

    #[test]
    fn patterns_repeat() {
        let pattern = pattern("mma");
        let kinds: Vec<_> = (0..5).map(|index| pattern.kind(index)).collect();
        let (m, a) = (BlockKind::Mamba, BlockKind::Attention);
        assert_eq!(kinds, [m, m, a, m, m]);
    }

    #[test]
    fn letters_read_back() {
        let all = pattern("lsam");
        assert_eq!(all.to_string(), "lsam");
        assert!(BlockKind::ALL.into_iter().all(|kind| all.holds(kind)));
        assert!(!pattern("lsa").holds(BlockKind::Mamba));
        for letters in ["", "mxa", "M"] {
            let error = letters.parse::<BlockPattern>().expect_err(letters);
            assert!(error.ends_with(&format!("found \"{letters}\"")), "{error}");
        }
    }

    #[test]
    fn blocks_are_of_two_kinds() {
        for (letters, blocks) in
            [("ma", 2), ("ma", 9), ("mma", 3), ("aam", 3), ("la", 2), ("ms", 2), ("sssl", 4)]
        {
            pattern(letters).check(blocks).expect(letters);
        }
        for (letters, blocks, found) in [
            ("m", 5, "m"),
            ("mma", 2, "m"),
            ("a", 1, "a"),
            ("am", 1, "a"),
            ("ll", 4, "l"),
            ("sssl", 3, "s"),
        ] {
            let error = pattern(letters).check(blocks).expect_err(letters).to_string();
            let expected = format!("two kinds or more among {blocks} blocks");
            assert_eq!(error, format!("layer_pattern: expected {expected}, found only {found}"));
        }
    }
}
