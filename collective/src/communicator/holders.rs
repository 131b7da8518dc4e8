//! Which ranks hold the parameters.

use std::num::NonZeroUsize;
use std::ops::Range;

/// Ranks that hold the parameters together: as many neighbours as there are in a process, or each by itself.
///
/// The updates of a rank are read by its *counterparts*: the ranks at its place in the other groups of holders; where each rank
/// holds all parameters, these are all ranks. So each of the m ranks of a group gathers the updates of r/m ranks of r, and every
/// parameter comes to the group once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holders(NonZeroUsize);

impl Holders {
    /// Each rank holds all parameters.
    pub const EACH: Self = Self(NonZeroUsize::MIN);

    /// Every `members` neighbours hold them together, each a part: as many as the ranks divide by.
    pub fn together(members: NonZeroUsize) -> Self {
        Self(members)
    }

    /// How many ranks hold the parameters together.
    pub fn members(self) -> usize {
        self.0.get()
    }

    /// The ranks of `ranks` that hold the same parameters as `rank`, itself among them, in order.
    pub fn counterparts(self, rank: usize, ranks: usize) -> impl Iterator<Item = usize> + use<> {
        (rank % self.members()..ranks).step_by(self.members())
    }

    /// The place of `rank` among its counterparts.
    pub fn place(self, rank: usize) -> usize {
        rank / self.members()
    }

    /// The ranks that hold the parameters together with `rank`.
    pub fn group(self, rank: usize) -> Range<usize> {
        let first = self.place(rank) * self.members();
        first..first + self.members()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// For any holders each rank is its own counterpart, and counterparts and groups cross in one rank.
    #[test]
    fn every_rank_is_a_counterpart_once() {
        for (members, ranks) in [(1, 1), (1, 5), (2, 2), (2, 6), (3, 6), (6, 6)] {
            let holders = Holders::together(NonZeroUsize::new(members).unwrap());
            for rank in 0..ranks {
                let counterparts: Vec<_> = holders.counterparts(rank, ranks).collect();
                assert_eq!(counterparts.len() * members, ranks);
                assert_eq!(counterparts[holders.place(rank)], rank);
                let shared = counterparts.iter().filter(|rank| holders.group(0).contains(rank));
                assert_eq!(shared.count(), 1);
                let of = |peer: &usize| holders.counterparts(*peer, ranks).eq(counterparts.clone());
                assert!(counterparts.iter().all(of));
            }
        }
        assert!(Holders::EACH.counterparts(3, 5).eq(0..5));
    }
}
