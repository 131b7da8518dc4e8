//! Which ranks hold the parameters.

use std::num::NonZeroUsize;
use std::ops::Range;

/// Ranks that hold the parameters together: as many neighbours as there are in a process, or each by itself.
///
/// What a rank has updated is read by its *counterparts* in the other groups of holders, those at its place among them; where each
/// rank holds all parameters, these are all ranks. A group of m ranks of r so gathers what r/m ranks have updated each, and every
/// parameter comes to it once.
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

    /// Of `ranks` ranks those that hold what `rank` holds, itself among them, in order.
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

    /// Whatever the holders, each rank is its own counterpart, and counterparts and groups cross in one rank.
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
