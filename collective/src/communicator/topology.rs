//! Which ranks read each other's memory, and which are on one host.

use std::ops::Range;

use crate::error::{CollectiveError, Result};

/// Ranks in groups, whose members read each other's memory, and groups in hosts.
///
/// The ranks of a group follow each other, and so do the groups of a host: its lanes then do too, and are few nodes of the tree.
/// Bytes between hosts cross a network and bytes between groups of one host do not, so that bytes which several ranks of a host need
/// cross once. For them each rank of another host exchanges bytes with one rank here, its *relay*: the rank at its own place. So where
/// hosts have as many ranks, every rank is the relay of one rank of each other host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topology {
    /// The ranks of each group.
    groups: Vec<Range<usize>>,
    /// The groups of each host.
    hosts: Vec<Range<usize>>,
}

/// Whether `ranges` are not empty and follow each other from 0 on.
fn follow(ranges: &[Range<usize>]) -> bool {
    let ends = std::iter::once(0).chain(ranges.iter().map(|range| range.end));
    !ranges.is_empty()
        && ranges.iter().zip(ends).all(|(range, before)| range.start == before && !range.is_empty())
}

/// Which of `ranges`, which follow each other, holds `index`.
fn position(ranges: &[Range<usize>], index: usize) -> usize {
    ranges.partition_point(|range| range.end <= index)
}

impl Topology {
    /// The groups with the ranks `groups`; `hosts` are the ranges of groups that share a host.
    ///
    /// # Errors
    /// Groups that are not all ranks once, in order, or hosts that are not all groups once, in order.
    pub fn new(groups: Vec<Range<usize>>, hosts: Vec<Range<usize>>) -> Result<Self> {
        let what = match () {
            () if !follow(&groups) => "the ranks of groups",
            () if !follow(&hosts) => "the groups of hosts",
            () if hosts.last().is_none_or(|last| last.end != groups.len()) => "the groups of hosts",
            () => return Ok(Self { groups, hosts }),
        };
        Err(CollectiveError::Topology { what })
    }

    /// The groups whose ranks are `groups`, each on a host of its own.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn of_groups(groups: Vec<Range<usize>>) -> Result<Self> {
        let hosts = (0..groups.len()).map(|group| group..group + 1).collect();
        Self::new(groups, hosts)
    }

    /// The number of ranks.
    pub fn ranks(&self) -> usize {
        self.groups.last().map_or(0, |last| last.end)
    }

    /// The ranks of each group.
    pub fn groups(&self) -> &[Range<usize>] {
        &self.groups
    }

    /// Whether a rank passes on chunks of others: there is more than one host, and one of them has several groups.
    pub fn has_relays(&self) -> bool {
        self.hosts.len() > 1 && self.hosts.len() < self.groups.len()
    }

    /// The number of hosts.
    pub(super) fn hosts(&self) -> usize {
        self.hosts.len()
    }

    /// The groups of a host.
    pub(super) fn groups_of(&self, host: usize) -> Range<usize> {
        self.hosts[host].clone()
    }

    /// The ranks of a host.
    pub(super) fn ranks_of(&self, host: usize) -> Range<usize> {
        let groups = &self.hosts[host];
        self.groups[groups.start].start..self.groups[groups.end - 1].end
    }

    /// The ranks of a group.
    pub(super) fn ranks_in(&self, group: usize) -> Range<usize> {
        self.groups[group].clone()
    }

    /// The group of a rank.
    pub(super) fn group_of(&self, rank: usize) -> usize {
        position(&self.groups, rank)
    }

    /// The host of a rank.
    pub(super) fn host_of(&self, rank: usize) -> usize {
        position(&self.hosts, self.group_of(rank))
    }

    /// The rank of `group` that exchanges bytes with `rank` of another group of its host: the one at the same place, as far as there
    /// are as many.
    pub(super) fn counterpart(&self, group: usize, rank: usize) -> usize {
        let (group, of_rank) = (&self.groups[group], &self.groups[self.group_of(rank)]);
        group.start + (rank - of_rank.start) % group.len()
    }

    /// The rank of `host` that exchanges bytes with `rank` of another host.
    pub(super) fn relay(&self, host: usize, rank: usize) -> usize {
        let (ranks, of_rank) = (self.ranks_of(host), self.ranks_of(self.host_of(rank)));
        ranks.start + (rank - of_rank.start) % ranks.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_found_by_group_and_host() {
        let topology = Topology::new(vec![0..2, 2..3, 3..6], vec![0..2, 2..3]).unwrap();
        assert_eq!((topology.ranks(), topology.hosts()), (6, 2));
        assert!(topology.has_relays());
        assert_eq!([0, 1, 2, 3, 5].map(|rank| topology.group_of(rank)), [0, 0, 1, 2, 2]);
        assert_eq!([0, 2, 3, 5].map(|rank| topology.host_of(rank)), [0, 0, 1, 1]);
        assert_eq!((topology.ranks_of(0), topology.groups_of(1)), (0..3, 2..3));
        assert_eq!([0, 1].map(|rank| topology.counterpart(1, rank)), [2, 2]);
        assert_eq!([3, 4, 5].map(|rank| topology.relay(0, rank)), [0, 1, 2]);
        assert_eq!([0, 1, 2].map(|rank| topology.relay(1, rank)), [3, 4, 5]);
    }

    #[test]
    fn one_host_and_hosts_of_one_group_need_no_relays() {
        let groups = vec![0..2, 2..4];
        assert!(!Topology::of_groups(groups.clone()).unwrap().has_relays());
        assert!(!Topology::new(groups, std::iter::once(0..2).collect()).unwrap().has_relays());
    }

    #[test]
    fn what_is_not_all_ranks_and_groups_in_order_is_refused() {
        let ranks = Err(CollectiveError::Topology { what: "the ranks of groups" });
        for groups in [vec![], vec![0..1, 2..3], vec![0..2, 1..3], vec![0..1, 1..1]] {
            assert_eq!(Topology::of_groups(groups), ranks);
        }
        let groups = Err(CollectiveError::Topology { what: "the groups of hosts" });
        for hosts in [vec![], vec![0..1, 1..2], vec![0..2, 2..4], vec![0..2, 2..2, 2..3]] {
            assert_eq!(Topology::new(vec![0..1, 1..2, 2..3], hosts), groups);
        }
    }
}
