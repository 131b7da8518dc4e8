//! Documents that come and go in a dataflow of one's own: which are kept, and counts over all of them, as differences.
//!
//! [`prepare`](crate::prepare) judges all documents again each time it is called. A program that takes documents while it runs and
//! withdraws some again has the same verdicts at any moment from the operators here, which are
//! [differential dataflow](https://docs.rs/differential-dataflow) (McSherry, Murray, Isaacs and Isard 2013): inputs and outputs are
//! changes, and the work follows the size of a change. A document that is withdrawn lets back in those that were left out as copies of it.
//!
//! ```text
//! documents --Summary::of--> summaries --verdicts--> which are kept, and why others are not
//!     |                                                        |
//!     +--> lines, words, tokens by source --counts, more_than--+--> any other numbers across documents
//! ```
//!
//! Texts never enter the dataflow: a [`Summary`] holds all that a verdict needs of a text, and a document is withdrawn by its key and that same
//! summary. Keys are of any type, and their order decides which of several copies is kept: the smallest. Memory, for 1 million documents
//! with keys of 8 bytes and [`Dedup::Near`](crate::prepare::Dedup::Near): 0.75 GB, all of it held.
//!
//! ```
//! use differential_dataflow::input::Input;
//! use tidemill_streaming_data::live::{Judge, Summary, Verdict, verdicts};
//! use tidemill_streaming_data::prepare::{Dedup, FilterSettings};
//!
//! timely::execute_directly(|worker| {
//!     let (mut documents, probe, changes) = worker.dataflow::<u64, _, _>(|scope| {
//!         let (documents, summaries) = scope.new_collection::<(u64, Summary), isize>();
//!         let (told, changes) = std::sync::mpsc::channel();
//!         let (probe, _) = verdicts(summaries).inspect(move |change| told.send(change.clone()).unwrap()).probe();
//!         (documents, probe, changes)
//!     });
//!     let mut judge = Judge::new(FilterSettings::default(), Dedup::Exact);
//!     let mut summary = |text: &str| judge.summary(text);
//!     documents.insert((1, summary("the tide turns")));
//!     documents.insert((2, summary("the tide turns")));
//!     documents.advance_to(1);
//!     documents.remove((1, summary("the tide turns")));
//!     documents.advance_to(2);
//!     documents.flush();
//!     worker.step_or_park_while(None, || probe.less_than(&2));
//!     let mut changes: Vec<_> = changes.try_iter().collect();
//!     changes.sort();
//!     let was = [((1, Verdict::Kept), 0, 1), ((1, Verdict::Kept), 1, -1)];
//!     let then = [((2, Verdict::Copy), 0, 1), ((2, Verdict::Copy), 1, -1), ((2, Verdict::Kept), 1, 1)];
//!     # let mut expected = [&was[..], &then[..]].concat();
//!     # expected.sort();
//!     # assert_eq!(changes, expected);
//! });
//! ```

mod counts;
mod summary;
mod verdicts;

use differential_dataflow::lattice::Lattice;
use timely::order::TotalOrder;
use timely::progress::Timestamp;

pub use counts::{counts, more_than, sums};
pub use summary::{Judge, Summary};
pub use verdicts::{Verdict, verdicts};

/// Times at which documents come and go.
pub trait Moment: Timestamp + Lattice + TotalOrder {}

impl<T: Timestamp + Lattice + TotalOrder> Moment for T {}
