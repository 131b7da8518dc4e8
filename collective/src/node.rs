//! Nodes of the canonical tree, which name the lanes of a sum.
//!
//! A node is a name: whether a tree has it is what [`Tree::contains`](crate::tree::Tree::contains) says. It stands apart from
//! [`tree`](crate::tree), so that errors can name nodes and the tree can return errors.

use std::fmt;

/// A node of a canonical tree: the lanes `lo .. hi`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Node {
    /// The first lane.
    pub lo: u32,
    /// One past the last lane.
    pub hi: u32,
}

impl Node {
    /// The node of one lane.
    pub fn leaf(lane: u32) -> Self {
        Self { lo: lane, hi: lane + 1 }
    }

    /// The number of lanes.
    pub fn lanes(self) -> u32 {
        self.hi - self.lo
    }

    /// Whether all lanes of `other` are lanes of this node.
    pub(crate) fn holds(self, other: Self) -> bool {
        self.lo <= other.lo && other.hi <= self.hi
    }

    /// Whether a lane of `other` is one of this node.
    pub(crate) fn overlaps(self, other: Self) -> bool {
        self.lo < other.hi && other.lo < self.hi
    }
}

impl fmt::Display for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "lanes {}..{}", self.lo, self.hi)
    }
}
