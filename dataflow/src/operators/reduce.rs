//! Gradient chunks of all workers become sums, each at the worker that owns the chunk.

use std::collections::BTreeMap;
use std::sync::Arc;

use tidemill_collective::{
    Chunk, ChunkHeader, Credit, CreditLedger, Pace, Part, Tree, TreeReducer, by_destination,
};
use tidemill_model::Layout;
use timely::container::CapacityContainerBuilder;
use timely::dataflow::Stream;
use timely::dataflow::operators::generic::OutputBuilder;
use timely::dataflow::operators::generic::builder_rc::OperatorBuilder;
use timely::dataflow::operators::{ConnectLoop, Feedback};
use timely::progress::operate::FrontierInterest;

use super::error::GraphError;
use super::plan::TrainingPlan;
use crate::cluster::progress;
use crate::cluster::{Abort, Actor, Failure};

/// The sums of the chunks that one worker owns.
struct ChunkSums {
    plan: Arc<TrainingPlan>,
    tree: Tree,
    worker: usize,
    owners: Vec<usize>,
    /// The segment of each use.
    use_segments: Vec<usize>,
    /// By step, use and chunk.
    sums: BTreeMap<(u64, u32, u32), TreeReducer>,
}

impl ChunkSums {
    fn new(
        plan: &Arc<TrainingPlan>,
        layout: &Layout,
        worker: usize,
        workers: usize,
    ) -> Result<Self, Failure> {
        Ok(Self {
            tree: Tree::new(plan.batch.lanes())?,
            worker,
            owners: plan.owners(workers),
            use_segments: layout.uses().iter().map(|use_| use_.segment).collect(),
            sums: BTreeMap::new(),
            plan: Arc::clone(plan),
        })
    }

    /// Adds a node of step `step`; answers the chunk's sum once all lanes are in it.
    fn insert(&mut self, step: u64, chunk: Chunk) -> Result<Option<Chunk>, Failure> {
        let header = *chunk.header_for(self.worker)?;
        let unplanned = |expected| GraphError::Chunk { step: step + 1, expected, found: header };
        let Part::Gradient { use_index } = header.part else {
            return Err(unplanned("a gradient").into());
        };
        let segment = self.use_segments.get(use_index as usize);
        let planned = self.plan.chunks.chunks().get(header.chunk as usize);
        let elements = match planned {
            Some(planned)
                if segment == Some(&planned.segment)
                    && self.owners[header.chunk as usize] == self.worker
                    && header.step == step =>
            {
                planned.range.len()
            }
            _ => return Err(unplanned("a gradient of this worker's chunks").into()),
        };
        let key = (step, use_index, header.chunk);
        let reducer = self.sums.entry(key).or_insert_with(|| TreeReducer::new(self.tree, elements));
        let Some(sum) = reducer.insert(chunk)? else { return Ok(None) };
        self.sums.remove(&key);
        let worker = self.worker as u32;
        let node = self.tree.root();
        let header = ChunkHeader { destination: worker, source: worker, node, ..header };
        Ok(Some(Chunk::new(header, sum)))
    }
}

/// Sums gradients over all lanes.
pub trait Reduce<'scope> {
    /// The sums of the chunks that this worker owns.
    ///
    /// # Contract
    /// - Input: this worker's gradient chunks, each the sum over a node of the canonical tree, addressed to the
    ///   chunk's owner. Exchanged here, at most `plan.window_bytes` of them on their way from each worker.
    /// - Output: for every step, one chunk for each use of each owned chunk: the sum over all lanes, in tree order,
    ///   as soon as the last node is there.
    /// - Memory: what waits for credit here, and the partial sums of owned chunks. Credit comes back when a chunk
    ///   was added or copied, which waits for nobody, so any window makes progress.
    /// - Failure: a chunk that does not belong here, or twice the same lanes, aborts the run.
    #[must_use]
    fn reduce(self, plan: &Arc<TrainingPlan>, layout: &Layout, abort: &Abort) -> Self;
}

impl<'scope> Reduce<'scope> for Stream<'scope, u64, Chunk> {
    fn reduce(self, plan: &Arc<TrainingPlan>, layout: &Layout, abort: &Abort) -> Self {
        let scope = self.scope();
        let (credit_loop, credits) = scope.feedback::<Vec<Credit>>(1);
        let paced = self.pace(credits, plan.window_bytes);
        let mut builder = OperatorBuilder::new("Reduce".to_owned(), scope);
        let (sums_output, sums) = builder.new_output::<Chunk>();
        let (credits_output, consumed) = builder.new_output::<Vec<Credit>>();
        let mut sums_output =
            OutputBuilder::<_, CapacityContainerBuilder<Chunk>>::from(sums_output);
        let mut credits_output =
            OutputBuilder::<_, CapacityContainerBuilder<Vec<Credit>>>::from(credits_output);
        let mut chunks = builder.new_input(paced, by_destination());
        builder.set_notify_for(0, FrontierInterest::Never);
        let who = Actor::Worker(scope.index());
        let abort = abort.clone();
        let mut state = match ChunkSums::new(plan, layout, scope.index(), scope.peers()) {
            Ok(state) => Some(state),
            Err(failure) => {
                abort.fail(who.clone(), failure);
                None
            }
        };
        builder.build(move |capabilities| {
            drop(capabilities);
            move |_frontiers| {
                let mut sums_output = sums_output.activate();
                let mut credits_output = credits_output.activate();
                chunks.for_each_time(|time, arrived| {
                    progress::moved();
                    let mut ledger = CreditLedger::default();
                    for chunk in arrived {
                        let Some(sums) = state.as_mut() else { return };
                        let chunk = std::mem::take(chunk);
                        let (bytes, source) =
                            (chunk.payload_bytes(), chunk.header().map_or(0, |h| h.source));
                        match sums.insert(*time.time(), chunk) {
                            Ok(Some(mut sum)) => {
                                sums_output.session(&time).give_container(&mut sum);
                            }
                            Ok(None) => {}
                            Err(failure) => {
                                abort.fail(who.clone(), failure);
                                state = None;
                            }
                        }
                        ledger.consumed(source, bytes);
                    }
                    credits_output.session(&time).give_iterator(ledger.settle());
                });
            }
        });
        consumed.connect_loop(credit_loop);
        sums
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::{BatchSettings, MicrobatchMemory};
    use tidemill_collective::Node;
    use tidemill_model::Decay;

    #[test]
    fn chunks_outside_the_plan_are_refused() {
        let mut layout = Layout::new();
        let table = layout.segment("table");
        layout.tensor("weight", &[4], Decay::Exempt, 1);
        let other = layout.segment("other");
        layout.tensor("bias", &[4], Decay::Exempt, 1);
        layout.block("first", &[table]);
        layout.block("second", &[other]);
        let settings = BatchSettings { samples_per_step: Some(2), ..Default::default() };
        let memory = MicrobatchMemory { sample_bytes: 1, workspace_bytes: 1 };
        let plan = Arc::new(TrainingPlan::new(settings.plan(memory).unwrap(), &layout, 4, 1));
        let mut sums = ChunkSums::new(&plan, &layout, 0, 1).unwrap();
        let good = ChunkHeader {
            destination: 0,
            source: 0,
            part: Part::Gradient { use_index: 0 },
            chunk: 0,
            node: Node::leaf(0),
            step: 0,
        };
        let chunk = |header| Chunk::new(header, vec![1.0; 16]);
        for wrong in [
            ChunkHeader { destination: 1, ..good },
            ChunkHeader { chunk: 1, ..good },
            ChunkHeader { chunk: 2, ..good },
            ChunkHeader { part: Part::Gradient { use_index: 2 }, ..good },
            ChunkHeader { step: 1, ..good },
            ChunkHeader { node: Node { lo: 1, hi: 3 }, ..good },
        ] {
            assert!(sums.insert(0, chunk(wrong)).is_err(), "{wrong:?}");
        }
        assert!(sums.insert(0, chunk(good)).unwrap().is_none());
        assert!(sums.insert(0, chunk(good)).is_err(), "the same lane twice");
        let right = ChunkHeader { node: Node::leaf(1), ..good };
        let sum = sums.insert(0, chunk(right)).unwrap().unwrap();
        assert_eq!(sum.values().unwrap(), [2.0_f32; 16].as_slice());
        assert!(sums.sums.is_empty());
    }
}
