//! Several sources interleaved in exact shares, with random access.
//!
//! Of every `total` positions, source i gets `counts[i]`, spread as evenly as whole numbers allow.
//! Two sources of a and b samples are interleaved by rounding: of the first x positions the first
//! source has had `floor((x a + h) / (a + b))`, with `h = floor((a + b) / 2)`, which grows by 0 or
//! 1 from a position to the next (a Sturmian or "balanced" word: any two stretches of equal length
//! differ by at most one). More sources are interleaved two by two, along the binary tree that D.
//! Huffman's algorithm ("A Method for the Construction of Minimum-Redundancy Codes", 1952) makes of
//! their counts, so that a frequent source is found in a step or two.
//!
//! Contract, for every stretch of W consecutive positions, wherever it begins:
//! - where W times every count is divisible by the total, each source has exactly its share;
//! - of two sources, each has its share rounded down or up;
//! - of any number of sources, each differs from its share by less than 4 (the error of a node is
//!   less than one and is halved at least every second step down the tree). Less than 2 was seen.
//!
//! The numbers never change: a saved cursor means the same sample for ever.

use std::{cmp::Reverse, collections::BinaryHeap, num::NonZeroU64};

/// The function from positions to sources: several sources interleaved in exact shares, computed for any
/// position at once. Any stretch of positions whose shares are whole numbers holds exactly these.
#[derive(Debug, Clone)]
pub struct Shares {
    counts: Vec<u64>,
    total: NonZeroU64,
    /// The inner nodes; the last is the root.
    nodes: Vec<Node>,
}

#[derive(Debug, Clone, Copy)]
struct Node {
    first: Child,
    second: Child,
    first_count: u64,
    count: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Child {
    Source(usize),
    Node(usize),
}

impl Shares {
    /// The interleaving of sources of these counts; `None` when their sum is 0 or above 2^64 - 1.
    pub fn new(counts: &[u64]) -> Option<Shares> {
        let total = counts.iter().try_fold(0_u64, |sum, &count| sum.checked_add(count))?;
        let total = NonZeroU64::new(total)?;
        // Equal counts are taken in the order of the sources, and before nodes: a pure function.
        let sources = counts.iter().enumerate().filter(|&(_, &count)| count > 0);
        let mut heap: BinaryHeap<Reverse<(u64, Child)>> =
            sources.map(|(source, &count)| Reverse((count, Child::Source(source)))).collect();
        let mut nodes = Vec::new();
        while let (Some(Reverse(one)), Some(Reverse(other))) = (heap.pop(), heap.pop()) {
            let (first, second) = if one.1 < other.1 { (one, other) } else { (other, one) };
            let count = first.0 + second.0;
            nodes.push(Node { first: first.1, second: second.1, first_count: first.0, count });
            if heap.is_empty() {
                break;
            }
            heap.push(Reverse((count, Child::Node(nodes.len() - 1))));
        }
        Some(Shares { counts: counts.to_vec(), total, nodes })
    }

    /// Positions after which the pattern repeats; within that many positions each source has exactly its count.
    pub fn total(&self) -> u64 {
        self.total.get()
    }

    /// Samples of each source among [`total`](Shares::total) positions.
    pub fn counts(&self) -> &[u64] {
        &self.counts
    }

    /// The source whose turn it is at a position, and how many turns it has had before.
    pub fn locate(&self, position: u64) -> (usize, u64) {
        let (round, mut place) = (position / self.total, position % self.total);
        let mut child = self.root();
        let source = loop {
            let at = match child {
                Child::Source(source) => break source,
                Child::Node(at) => at,
            };
            let node = &self.nodes[at];
            let (before, is_first) = node.split(place);
            (child, place) =
                if is_first { (node.first, before) } else { (node.second, place - before) };
        };
        // At most the position itself, which fits.
        (source, round * self.counts[source] + place)
    }

    /// How many of the positions before this one are each source's.
    pub fn before(&self, position: u64) -> Vec<u64> {
        let (round, place) = (position / self.total, position % self.total);
        let mut before: Vec<u64> = self.counts.iter().map(|count| round * count).collect();
        let mut open = vec![(self.root(), place)];
        while let Some((child, place)) = open.pop() {
            match child {
                Child::Source(source) => before[source] += place,
                Child::Node(at) => {
                    let node = &self.nodes[at];
                    let (first, _) = node.split(place);
                    open.push((node.first, first));
                    open.push((node.second, place - first));
                }
            }
        }
        before
    }

    fn root(&self) -> Child {
        match self.nodes.len() {
            0 => Child::Source(self.counts.iter().position(|&count| count > 0).unwrap_or(0)),
            nodes => Child::Node(nodes - 1),
        }
    }
}

impl Node {
    /// How many of the places before this one are the first child's, and whether this one is.
    fn split(&self, place: u64) -> (u64, bool) {
        let (first, count) = (u128::from(self.first_count), u128::from(self.count));
        // Below 2^64 times 2^64, less the carry of the sum: a place is below the count.
        let scaled = u128::from(place) * first + count / 2;
        ((scaled / count) as u64, scaled % count + first >= count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How far any source is from its share in any stretch of any length.
    fn worst(counts: &[u64]) -> f64 {
        let shares = Shares::new(counts).unwrap();
        let total = shares.total();
        let mut before = vec![vec![0_u64; counts.len()]];
        for position in 0..2 * total {
            let (source, turn) = shares.locate(position);
            let mut next = before.last().unwrap().clone();
            assert_eq!(turn, next[source], "turns are counted");
            next[source] += 1;
            assert_eq!(shares.before(position + 1), next);
            before.push(next);
        }
        let mut worst: f64 = 0.0;
        for length in 1..=total {
            for start in 0..total {
                for (source, &count) in counts.iter().enumerate() {
                    let found =
                        before[(start + length) as usize][source] - before[start as usize][source];
                    let share = (length * count) as f64 / total as f64;
                    if counts.iter().all(|count| length * count % total == 0) {
                        assert_eq!(found as f64, share, "{counts:?}, {length} from {start}");
                    }
                    worst = worst.max((found as f64 - share).abs());
                }
            }
        }
        worst
    }

    #[test]
    fn every_stretch_has_its_shares() {
        for counts in [[7, 3], [1, 99], [50, 50], [1, 1], [0, 4], [64, 27]] {
            let worst = worst(&counts);
            assert!(worst < 1.0, "{counts:?}: off by {worst}");
        }
        let mut most: f64 = 0.0;
        for counts in [
            &[70, 20, 10][..],
            &[1, 1, 1, 97],
            &[5, 4, 3, 2, 1],
            &[13; 9],
            &[40, 30, 20, 5, 3, 1, 1],
            &[0, 3, 0, 2, 1],
            &[1; 40],
            &[64, 32, 16, 8, 4, 2, 1],
            &[34, 21, 13, 8, 5, 3, 2, 1],
        ] {
            most = most.max(worst(counts));
        }
        assert!(most < 2.0, "off by {most}");
        // An order by runs would be off by much more.
        assert!(most > 0.5);
    }

    #[test]
    fn the_largest_positions_and_counts_are_located() {
        let shares = Shares::new(&[u64::MAX - 3, 1, 2]).unwrap();
        let (source, turn) = shares.locate(u64::MAX - 1);
        assert!(source < 3 && turn < u64::MAX);
        assert_eq!(shares.before(u64::MAX).iter().sum::<u64>(), u64::MAX);
        let one = Shares::new(&[5]).unwrap();
        assert_eq!(one.locate(u64::MAX), (0, u64::MAX));
        assert!(Shares::new(&[]).is_none() && Shares::new(&[0, 0]).is_none());
        assert!(Shares::new(&[u64::MAX, 1]).is_none());
    }

    #[test]
    fn the_pattern_is_pinned() {
        let shares = Shares::new(&[3, 2, 1]).unwrap();
        let pattern: Vec<usize> = (0..12).map(|position| shares.locate(position).0).collect();
        assert_eq!(pattern[..6], pattern[6..]);
        assert_eq!(pattern[..6], [0, 1, 0, 2, 0, 1]);
    }
}
