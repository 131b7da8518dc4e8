//! A checkpoint that is being written: what has arrived of it on a writer.

use std::collections::BTreeMap;

use tidemill_collective::{Chunk, CollectiveError, Part, StatePart};
use timely::dataflow::operators::{Capability, InputCapability};

use super::sink::WrittenFiles;
use super::writers::StateWriters;
use crate::cluster::Failure;
use crate::operators::error::GraphError;
use crate::operators::optimize::StepReport;
use crate::operators::plan::TrainingPlan;
use crate::state_arenas::StateArenas;

/// The capabilities of a cut.
pub(super) struct Held {
    pub(super) done: Capability<u64>,
    pub(super) credits: Capability<u64>,
    pub(super) messages: Capability<u64>,
}

/// How far a cut is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Stage {
    /// Another worker begins it first.
    #[default]
    Waiting,
    /// It may be begun here.
    Allowed,
    /// The writer has begun it.
    Open,
    /// The writer has all of it, and is to complete its part.
    Ending,
}

/// One cut on a writer.
#[derive(Default)]
pub(super) struct Cut {
    pub(super) report: Option<StepReport>,
    pub(super) held: Option<Held>,
    pub(super) stage: Stage,
    /// Chunks that arrived and were not handed to the writer yet.
    pub(super) waiting: Vec<Chunk>,
    /// For each part, whether each of its chunks was handed over.
    arrived: BTreeMap<StatePart, Vec<bool>>,
    pub(super) handed: usize,
    pub(super) written: usize,
    /// On worker 0: the files that the other writers have written.
    pub(super) finished: Vec<WrittenFiles>,
}

impl Cut {
    pub(super) fn hold(&mut self, time: &InputCapability<u64>) {
        self.held.get_or_insert_with(|| Held {
            done: time.retain(0),
            credits: time.retain(1),
            messages: time.retain(2),
        });
    }

    /// Takes note of a chunk of the cut after step `step`, of the parameters and states in `arenas`, which `worker` writes; returns
    /// its part, and its place in the part's arena.
    pub(super) fn admit(
        &mut self,
        plan: &TrainingPlan,
        (worker, writers): (usize, &StateWriters),
        arenas: &StateArenas,
        step: u64,
        chunk: &Chunk,
    ) -> Result<(StatePart, usize), Failure> {
        let header = *chunk.header()?;
        let destination = writers.of(&header);
        if destination != worker {
            return Err(CollectiveError::Misrouted { destination, worker }.into());
        }
        let (chunks, index, step) = (plan.chunks.chunks(), header.chunk as usize, step + 1);
        let found = match (header.part, chunks.get(index)) {
            (Part::State(part), Some(planned)) if arenas.of(part).is_some() => {
                Some((part, arenas.range(part, &planned.range)))
            }
            _ => None,
        };
        let (part, range) = match found {
            Some((part, range))
                if header.step == step && chunk.payload_bytes() == 4 * range.len() =>
            {
                (part, range)
            }
            _ => {
                let expected = "a part of the optimizer's state";
                return Err(GraphError::Chunk { step, expected, found: header }.into());
            }
        };
        let arrived = self.arrived.entry(part).or_default();
        arrived.resize(chunks.len(), false);
        if std::mem::replace(&mut arrived[index], true) {
            let what = format!("{part:?} of chunk {index}");
            return Err(GraphError::Twice { step, what }.into());
        }
        self.handed += 1;
        Ok((part, range.start))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::ExitClass;
    use crate::operators::plan::tests::two_buckets;
    use tidemill_collective::{ChunkHeader, Node, Part, StatePart};
    use tidemill_model::optimizer::StateSpec;

    /// One chunk that comes twice and one that is missing are as many as a whole checkpoint has.
    #[test]
    fn a_chunk_that_comes_twice_is_refused() {
        let (plan, layout) = two_buckets();
        let arenas = StateArenas::new(&layout, &["first", "second"].map(StateSpec::of_elements));
        let state = |part, chunk, step| {
            let node = Node { lo: 0, hi: 2 };
            let part = Part::State(part);
            let header = ChunkHeader { destination: 0, source: 1, part, chunk, node, step };
            Chunk::new(header, vec![1.0; 16])
        };
        let mut cut = Cut::default();
        let writers = StateWriters::default();
        let mut admit = |chunk: &Chunk| cut.admit(&plan, (0, &writers), &arenas, 4, chunk);
        assert!(admit(&state(StatePart::State(0), 0, 4)).is_err(), "of another step");
        assert!(admit(&state(StatePart::State(0), 2, 5)).is_err(), "no such chunk");
        assert!(admit(&state(StatePart::State(2), 0, 5)).is_err(), "no such state");
        for part in StatePart::all(2) {
            for chunk in [1, 0] {
                admit(&state(part, chunk, 5)).unwrap();
                let failure = admit(&state(part, chunk, 5)).unwrap_err();
                assert_eq!(failure.exit_class(), ExitClass::Restart);
                let said = failure.cause().to_string();
                assert_eq!(said, format!("step 5: {part:?} of chunk {chunk} came twice"));
            }
        }
        assert_eq!(cut.handed, 6);
        // The second of two workers writes the states.
        let writers = StateWriters::new(vec![vec![0, 0], vec![2, 2], vec![2, 2]]);
        let routed = |worker, part| {
            let (mut cut, chunk) = (Cut::default(), state(part, 1, 5));
            cut.admit(&plan, (worker, &writers), &arenas, 4, &chunk).is_ok()
        };
        assert!(routed(0, StatePart::Parameter) && routed(2, StatePart::State(1)));
        assert!(!routed(2, StatePart::Parameter) && !routed(0, StatePart::State(1)));
        let expected = [0, 1, 2].map(|worker| writers.expected(worker, 2, 2));
        assert_eq!((expected, writers.others().into_iter().collect()), ([2, 0, 4], vec![2]));
    }
}
