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
    pub(super) arrived: BTreeMap<StatePart, Vec<bool>>,
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
