//! The exchange of workers whose devices do not read each other's memory: chunks in the host's memory, through timely.
//!
//! Sums are formed by the graph's own operator, [`Reduce`]. What is gathered is sent as the optimizer sends parameters: a
//! pointer for each worker of the process, and a message for each of another, as credit allows.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

use tidemill_collective::{
    Chunk, ChunkHeader, Credit, CreditLedger, Pace, Part, StatePart, by_destination,
};
use timely::container::CapacityContainerBuilder;
use timely::dataflow::channels::pact::Pipeline;
use timely::dataflow::operators::generic::OutputBuilder;
use timely::dataflow::operators::generic::builder_rc::OperatorBuilder;
use timely::dataflow::operators::{ConnectLoop, Feedback, Input, Operator, Probe};
use timely::dataflow::{InputHandle, ProbeHandle, Stream, StreamVec};

use super::Way;
use super::measure::{Exchange, Exchanged, Plan};
use super::values::in_periods;
use crate::cluster::{Abort, Actor, Failure, WorkerContext};
use crate::operators::{GraphError, Reduce};

type Arena = Rc<RefCell<Vec<f32>>>;
/// The sums of the chunks that a worker owns.
type Owned = Rc<RefCell<BTreeMap<u32, Arc<Vec<f32>>>>>;

/// Where chunks go in, and whether all of a round have arrived.
struct Flow {
    input: InputHandle<u64, CapacityContainerBuilder<Chunk>>,
    probe: ProbeHandle<u64>,
}

/// A worker whose arena is in the host's memory.
pub(super) struct Worker {
    index: usize,
    arena: Arena,
    owned: Owned,
    current: Option<Current>,
}

/// What is exchanged now.
struct Current {
    plan: Arc<Plan>,
    owners: Vec<usize>,
    sums: Flow,
    gathered: Flow,
}

impl Worker {
    /// The worker of `context`, with an arena of so many elements.
    pub(super) fn new(context: &WorkerContext<'_>, elements: usize) -> Self {
        let arena = Rc::new(RefCell::new(vec![0.0; elements]));
        Self { index: context.index(), arena, owned: Owned::default(), current: None }
    }
}

impl Exchange for Worker {
    fn way(&self) -> Way {
        Way::Host
    }

    fn begin(&mut self, context: &mut WorkerContext<'_>, plan: &Arc<Plan>) -> Result<(), Failure> {
        let values = plan.values.of_worker(self.index);
        let mut arena = self.arena.borrow_mut();
        let elements = arena.len();
        in_periods(&values, elements, |start, values| {
            arena[start..start + values.len()].copy_from_slice(values);
            Ok::<_, Failure>(())
        })?;
        self.owned.borrow_mut().clear();
        self.current = Some(Current {
            owners: plan.training.owners(plan.values.workers()),
            sums: sums(context, plan, &self.owned),
            gathered: gathered(context, plan, &self.arena),
            plan: Arc::clone(plan),
        });
        Ok(())
    }

    fn run(
        &mut self,
        context: &mut WorkerContext<'_>,
        what: Exchanged,
        rounds: u64,
    ) -> Result<(), Failure> {
        for _ in 0..rounds {
            match what {
                Exchanged::Sums => self.sum(context)?,
                Exchanged::Gathered => self.gather(context)?,
            }
        }
        Ok(())
    }

    fn clear(&mut self, what: Exchanged) -> Result<(), Failure> {
        match what {
            Exchanged::Sums => self.owned.borrow_mut().clear(),
            Exchanged::Gathered => self.arena.borrow_mut().fill(0.0),
        }
        Ok(())
    }

    fn check(&mut self, what: Exchanged) -> Result<(), Failure> {
        let Some(Current { plan, owners, .. }) = &self.current else { return Ok(()) };
        let (values, worker) = (&plan.values, self.index);
        let wrong = |difference| plan.wrong(what, worker, difference);
        let difference = match what {
            Exchanged::Gathered => values.difference(0, &self.arena.borrow()),
            Exchanged::Sums => {
                let owned = self.owned.borrow();
                let of_worker = |&(chunk, _): &(usize, _)| owners[chunk] == worker;
                let chunks = plan.training.chunks.chunks().iter().enumerate().filter(of_worker);
                let mut differences = chunks.filter_map(|(chunk, planned)| {
                    let start = planned.range.start;
                    match owned.get(&(chunk as u32)) {
                        Some(sum) => values.difference(start, sum),
                        None => values.difference(start, &[0.0]),
                    }
                });
                differences.next()
            }
        };
        difference.map_or(Ok(()), |difference| Err(wrong(difference).into()))
    }
}

impl Worker {
    /// Sends what this worker adds to each chunk to its owner, in the order in which training has them.
    fn sum(&mut self, context: &mut WorkerContext<'_>) -> Result<(), Failure> {
        let Some(Current { plan, owners, sums, .. }) = &mut self.current else { return Ok(()) };
        let step = *sums.input.time();
        for bucket in plan.training.buckets.buckets() {
            for chunk in bucket.chunks.clone() {
                let planned = &plan.training.chunks.chunks()[chunk];
                for &node in plan.values.nodes(self.index) {
                    let header = ChunkHeader {
                        destination: owners[chunk] as u32,
                        source: self.index as u32,
                        // Every segment has one use.
                        part: Part::Gradient { use_index: planned.segment as u32 },
                        chunk: chunk as u32,
                        node,
                        step,
                    };
                    let values = self.arena.borrow()[planned.range.clone()].to_vec();
                    sums.input.send_batch(&mut Chunk::new(header, values));
                    context.step()?;
                }
            }
        }
        sums.finish(context)
    }

    /// Sends the sums that this worker owns to all.
    fn gather(&mut self, context: &mut WorkerContext<'_>) -> Result<(), Failure> {
        let Some(Current { plan, gathered, .. }) = &mut self.current else { return Ok(()) };
        let step = *gathered.input.time();
        for owners in &plan.owners {
            for chunk in owners.chunks(self.index) {
                let Some(values) = self.owned.borrow().get(&(chunk as u32)).cloned() else {
                    return Err(GraphError::ForeignChunk { chunk }.into());
                };
                for destination in 0..plan.values.workers() as u32 {
                    let header = ChunkHeader {
                        destination,
                        source: self.index as u32,
                        part: Part::State(StatePart::Parameter),
                        chunk: chunk as u32,
                        node: plan.values.tree().root(),
                        step,
                    };
                    gathered.input.send_batch(&mut Chunk::shared(header, Arc::clone(&values)));
                }
                context.step()?;
            }
        }
        gathered.finish(context)
    }
}

impl Flow {
    fn new() -> Self {
        Self { input: InputHandle::new(), probe: ProbeHandle::new() }
    }

    /// Ends the round; returns when every worker has all of it.
    fn finish(&mut self, context: &mut WorkerContext<'_>) -> Result<(), Failure> {
        let next = *self.input.time() + 1;
        self.input.advance_to(next);
        Ok(context.step_while(|| self.probe.less_than(&next))?)
    }
}

/// Sums chunks at their owners, who keep them in `owned`.
fn sums(context: &mut WorkerContext<'_>, plan: &Plan, owned: &Owned) -> Flow {
    let (mut flow, abort, owned) = (Flow::new(), context.abort().clone(), Rc::clone(owned));
    let who = Actor::Worker(context.index());
    let keep = move |chunk: Chunk| -> Result<(), Failure> {
        let index = chunk.header()?.chunk;
        owned.borrow_mut().insert(index, Arc::new(chunk.into_values()?));
        Ok(())
    };
    context.dataflow::<u64, _, _>(|scope| {
        let sums = scope.input_from(&mut flow.input).reduce(&plan.training, &plan.layout, &abort);
        sums.unary::<CapacityContainerBuilder<Vec<()>>, _, _, _>(Pipeline, "Keep", |_, _| {
            move |input, _output| {
                input.for_each(|_time, chunk| {
                    keep(std::mem::take(chunk))
                        .unwrap_or_else(|error| abort.fail(who.clone(), error));
                });
            }
        })
        .probe_with(&flow.probe);
    });
    flow
}

/// Brings chunks to the worker that each is for, which copies them into its arena.
fn gathered(context: &mut WorkerContext<'_>, plan: &Arc<Plan>, arena: &Arena) -> Flow {
    let (mut flow, abort) = (Flow::new(), context.abort().clone());
    let (plan, arena) = (Arc::clone(plan), Rc::clone(arena));
    context.dataflow::<u64, _, _>(|scope| {
        let chunks = scope.input_from(&mut flow.input);
        take(chunks, plan, arena, abort, &flow.probe);
    });
    flow
}

fn take<'scope>(
    chunks: Stream<'scope, u64, Chunk>,
    plan: Arc<Plan>,
    arena: Arena,
    abort: Abort,
    probe: &ProbeHandle<u64>,
) {
    let scope = chunks.scope();
    let (worker, who) = (scope.index(), Actor::Worker(scope.index()));
    let (credit_loop, credits) = scope.feedback::<Vec<Credit>>(1);
    let paced = chunks.pace(credits, plan.training.window_bytes);
    let mut builder = OperatorBuilder::new("Take".to_owned(), scope);
    let (output, consumed) = builder.new_output::<Vec<Credit>>();
    let mut output = OutputBuilder::<_, CapacityContainerBuilder<Vec<Credit>>>::from(output);
    let mut input = builder.new_input(paced, by_destination());
    let copy = move |chunk: &Chunk| -> Result<(), Failure> {
        let index = chunk.header_for(worker)?.chunk as usize;
        let planned = plan.training.chunks.chunks().get(index);
        let planned = planned.filter(|planned| planned.range.len() == chunk.elements());
        let range = planned.ok_or(GraphError::ForeignChunk { chunk: index })?.range.clone();
        arena.borrow_mut()[range].copy_from_slice(&chunk.values()?);
        Ok(())
    };
    builder.build(move |capabilities| {
        drop(capabilities);
        move |_frontiers| {
            let mut output = output.activate();
            input.for_each_time(|time, arrived| {
                let mut ledger = CreditLedger::default();
                for chunk in arrived {
                    let chunk = std::mem::take(chunk);
                    copy(&chunk).unwrap_or_else(|failure| abort.fail(who.clone(), failure));
                    let source = chunk.header().map_or(0, |header| header.source);
                    ledger.consumed(source, chunk.payload_bytes());
                }
                output.session(&time).give_iterator(ledger.settle());
            });
        }
    });
    let consumed: StreamVec<'scope, u64, Credit> = consumed;
    consumed.probe_with(probe).connect_loop(credit_loop);
}
