//! The summary of a text: everything that a verdict needs of it.

use serde::{Deserialize, Serialize};

use crate::prepare::{Dedup, FilterReport, FilterSettings, Signature, Signer, judge};

/// The summary of a text that is kept once the text is gone: a pure function of the text and the settings of a [`Judge`].
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Summary {
    /// The first rule of the filters that it breaks, as `table.key`.
    Rejected(Box<str>),
    /// It is kept if there is no other like it.
    Chosen {
        /// The hash of the text, or of its words; none where no duplicates are looked for.
        copies: Option<u128>,
        /// Where near copies are looked for: a document is one of another that has a number in common with it.
        near: Box<[u64]>,
    },
}

/// Makes summaries.
#[derive(Debug)]
pub struct Judge {
    filters: FilterSettings,
    dedup: Dedup,
    signer: Signer,
}

impl Judge {
    /// A judge with these filters and this search for duplicates; with [`Dedup::None`] it finds none.
    pub fn new(filters: FilterSettings, dedup: Dedup) -> Self {
        Self { filters, dedup, signer: Signer::default() }
    }

    /// The summary of a text. Duplicates are looked for in the text that filters leave, as `prepare` does.
    pub fn summary(&mut self, text: &str) -> Summary {
        let mut report = FilterReport::default();
        let Some(left) = judge(self.filters.sets(), text, &mut report) else {
            let rule = report.rejected.keys().next().map(ToString::to_string);
            return Summary::Rejected(rule.unwrap_or_default().into());
        };
        let Signature { copies, near } = self.signer.sign(&left, self.dedup);
        let copies = (self.dedup != Dedup::None).then_some(copies);
        Summary::Chosen { copies, near: near.iter().flatten().copied().collect() }
    }

    /// The way of looking for duplicates.
    pub fn dedup(&self) -> Dedup {
        self.dedup
    }
}
