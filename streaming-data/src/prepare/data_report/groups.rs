//! Groups of duplicates: documents that share a bucket, directly or by way of others.
//!
//! The first document of each bucket alone decides which documents are left out; groups are found for the report. They are the
//! same for any order of links, as long as the links connect the documents of a bucket.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use super::{
    Reporting,
    histogram::{Counts, Histogram},
};

/// Disjoint sets of documents, by numbers in the order of all documents: about 40 bytes for each document that shares a
/// bucket with another.
#[derive(Debug, Default)]
pub(crate) struct Groups {
    /// The document that a document is linked to: a smaller one, or itself.
    parents: HashMap<u64, u64>,
}

/// Groups of documents that are alike.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DuplicateGroups {
    /// Documents that were compared: all that lists and filters leave.
    pub compared: u64,
    /// Groups of two documents and more.
    pub groups: u64,
    /// Documents in these.
    pub documents: u64,
    /// All groups by their sizes, a document that is like no other being a group of 1.
    pub sizes: Histogram,
}

impl Groups {
    /// None yet, where they are to be reported.
    pub(crate) fn asked(reporting: Reporting) -> Option<Groups> {
        (reporting == Reporting::Files).then(Groups::default)
    }

    /// Links two documents.
    pub(crate) fn link(&mut self, a: u64, b: u64) {
        if a == b {
            return;
        }
        let (a, b) = (self.root(a), self.root(b));
        if a != b {
            self.parents.insert(a.max(b), a.min(b));
        }
    }

    /// The smallest document of the group.
    fn root(&mut self, document: u64) -> u64 {
        let mut at = document;
        loop {
            let parent = *self.parents.entry(at).or_insert(at);
            if parent == at {
                return at;
            }
            // Each second step is spared the next time.
            let next = self.parents.get(&parent).copied().unwrap_or(parent);
            self.parents.insert(at, next);
            at = next;
        }
    }

    /// Documents that were linked.
    pub(crate) fn documents(&self) -> u64 {
        self.parents.len() as u64
    }

    /// Links that connect the same documents, one for each document that is not the first of its group; in any order.
    pub(crate) fn into_links(self) -> impl Iterator<Item = (u64, u64)> {
        self.parents.into_iter().filter(|(document, parent)| document != parent)
    }

    /// The groups for a report, when `compared` documents were compared.
    pub(crate) fn report(mut self, compared: u64) -> DuplicateGroups {
        let documents: Vec<u64> = self.parents.keys().copied().collect();
        let mut sizes: HashMap<u64, u64> = HashMap::new();
        for document in documents {
            *sizes.entry(self.root(document)).or_default() += 1;
        }
        let (documents, groups) = (self.documents(), sizes.len() as u64);
        let mut counts = Counts::default();
        counts.add(1, compared.saturating_sub(documents));
        // Sums are the same in any order.
        sizes.into_values().for_each(|size| counts.add(size, 1));
        DuplicateGroups { compared, groups, documents, sizes: counts.histogram() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sizes of groups by painting all neighbours again and again.
    fn painted(documents: u64, links: &[(u64, u64)]) -> Vec<u64> {
        let mut colors: Vec<u64> = (0..documents).collect();
        loop {
            let before = colors.clone();
            for &(a, b) in links {
                let color = colors[a as usize].min(colors[b as usize]);
                (colors[a as usize], colors[b as usize]) = (color, color);
            }
            if colors == before {
                break;
            }
        }
        let size = |color| colors.iter().filter(|&&other| other == color).count() as u64;
        (0..documents).map(size).filter(|&size| size > 0).collect()
    }

    #[test]
    fn groups_are_what_is_connected_whatever_the_order_and_the_process() {
        let mut state = 7_u64;
        let mut below = |most: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) % most
        };
        for documents in [1, 2, 30, 300] {
            for count in [0, 1, documents / 3, documents, 4 * documents] {
                let mut links: Vec<_> =
                    (0..count).map(|_| (below(documents), below(documents))).collect();
                let sizes = painted(documents, &links);
                let mut expected = Counts::default();
                sizes.iter().for_each(|&size| expected.add(size, 1));
                for processes in [1, 3] {
                    let mut all = Groups::default();
                    for process in 0..processes {
                        let mut own = Groups::default();
                        let of_process = links.iter().skip(process).step_by(processes);
                        of_process.for_each(|&(a, b)| own.link(a, b));
                        let vertices = own.documents();
                        let links: Vec<_> = own.into_links().collect();
                        assert!(links.len() as u64 <= vertices);
                        assert!(links.iter().all(|(document, first)| first < document));
                        links.into_iter().for_each(|(a, b)| all.link(a, b));
                    }
                    let report = all.report(documents);
                    assert_eq!(report.sizes, expected.histogram());
                    let large = sizes.iter().filter(|&&size| size > 1);
                    assert_eq!(report.groups, large.clone().count() as u64);
                    assert_eq!(report.documents, large.sum::<u64>());
                    links.reverse();
                }
            }
        }
    }
}
