//! From the state that process 0 has to the state that every worker needs.
//!
//! Worker 0 reads the checkpoint (or the initial parameters) piece by piece and sends each piece where it belongs:
//! parameters to every worker, moments to their owners. A probe keeps a few pieces in flight, so no
//! process ever holds more than its own share. Only process 0 needs the run folder.

use std::cell::RefCell;
use std::path::Path;
use std::rc::Rc;

use serde::{Deserialize, Serialize};
use tidemill_collective::{BUCKET_ELEMENTS, CHUNK_ELEMENTS};
use tidemill_model::Layout;
use tidemill_model::hugging_face::TensorFiles;
use timely::container::CapacityContainerBuilder;
use timely::dataflow::channels::pact::Exchange;
use timely::dataflow::operators::{Operator, Probe};
use timely::dataflow::{InputHandle, ProbeHandle};

use crate::checkpoint::{StateArena, optimizer_file};
use crate::cluster::progress::{self, Phase};
use crate::cluster::{Failure, WorkerContext};
use crate::error::Result;
use crate::operators::GraphError;
use crate::operators::plan::cut;

/// Pieces that may be on their way while the next is read.
const PIECES_IN_FLIGHT: u64 = 8;

/// Where worker 0 has the state from.
pub enum StateOrigin {
    /// Initial parameters; the moments are zero.
    Parameters(Vec<f32>),
    /// The tensors of a verified checkpoint.
    Checkpoint {
        /// Its `model.safetensors`.
        model: TensorFiles,
        /// Its `optimizer.safetensors`.
        optimizer: TensorFiles,
    },
}

/// Where a run starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartPoint {
    /// Updates done.
    pub step: u64,
    /// Counted tokens so far.
    pub tokens: u64,
    /// The horizon of the schedule.
    pub horizon: u64,
}

/// The state of one worker.
pub struct WorkerState {
    /// Where the run starts.
    pub start: StartPoint,
    /// The whole parameter arena.
    pub parameters: Vec<f32>,
    /// The first and second moments of the chunks that this worker owns, in the order of the arena; `None` where all
    /// are zero. Pages of chunks that others own are never touched, so they cost no memory.
    pub moments: Option<[Vec<f32>; 2]>,
}

const NO_STATE: GraphError =
    GraphError::Order { what: "the end of the state from worker 0", missing: "its beginning" };

#[derive(Clone, Serialize, Deserialize)]
enum Piece {
    Start(StartPoint),
    Values { arena: StateArena, chunk: usize, values: Vec<f32> },
}

const ARENAS: [StateArena; 3] = [StateArena::Parameters, StateArena::ExpAvg, StateArena::ExpAvgSq];

impl StateOrigin {
    /// The checkpoint in `folder`, whose checksums were verified.
    ///
    /// # Errors
    /// Tensors that are missing or of another shape.
    pub fn checkpoint(folder: &Path, layout: &Layout) -> Result<Self> {
        let model = TensorFiles::open_folder(folder)?;
        model.check(layout, "")?;
        let optimizer = TensorFiles::open(&optimizer_file(folder))?;
        for arena in &ARENAS[1..] {
            optimizer.check(layout, arena.prefix())?;
        }
        Ok(Self::Checkpoint { model, optimizer })
    }

    /// Elements `range` of an arena; `None` where all of it is zero.
    fn read(
        &mut self,
        arena: StateArena,
        range: std::ops::Range<usize>,
        layout: &Layout,
    ) -> Result<Option<Vec<f32>>> {
        match (self, arena) {
            (Self::Parameters(parameters), StateArena::Parameters) => {
                Ok(Some(parameters[range].to_vec()))
            }
            (Self::Parameters(_), _) => Ok(None),
            (Self::Checkpoint { model, optimizer }, arena) => {
                let files = if arena == StateArena::Parameters { model } else { optimizer };
                let mut values = vec![0.0; range.len()];
                files.read_arena(layout, arena.prefix(), range.start, &mut values)?;
                Ok(Some(values))
            }
        }
    }
}

/// Sends the state from worker 0, which alone gives an `origin`, to every worker.
///
/// # Errors
/// Files that cannot be read, or a run that was aborted.
pub fn distribute(
    context: &mut WorkerContext<'_>,
    origin: Option<(StartPoint, StateOrigin)>,
    layout: &Layout,
) -> std::result::Result<WorkerState, Failure> {
    let (chunks, buckets) = cut(layout, CHUNK_ELEMENTS, BUCKET_ELEMENTS);
    let workers = context.peers();
    let phase = match &origin {
        Some(_) => Phase::Restoring,
        None => Phase::WaitingForState,
    };
    progress::enter(phase, 0);
    let received = Rc::new(RefCell::new(Received {
        start: None,
        parameters: vec![0.0; layout.parameter_elements()],
        moments: None,
        starts: chunks.chunks().iter().map(|chunk| chunk.range.start).collect(),
    }));
    let mut input = InputHandle::<u64, CapacityContainerBuilder<Vec<(u64, Piece)>>>::new();
    let probe = ProbeHandle::new();
    context.dataflow::<u64, _, _>(|scope| {
        let received = Rc::clone(&received);
        let by_worker = Exchange::new(|(worker, _): &(u64, Piece)| *worker);
        input
            .to_stream(scope)
            .unary::<CapacityContainerBuilder<Vec<()>>, _, _, _>(by_worker, "Restore", |_, _| {
                move |input, _output| {
                    input.for_each(|_time, pieces| {
                        let mut received = received.borrow_mut();
                        progress::moved();
                        pieces.drain(..).for_each(|(_, piece)| received.take(piece));
                    });
                }
            })
            .probe_with(&probe);
    });
    if let Some((start, mut origin)) = origin {
        let owners = buckets.chunk_owners(&chunks, workers);
        for worker in 0..workers as u64 {
            input.send((worker, Piece::Start(start)));
        }
        let mut sent = 0;
        for arena in ARENAS {
            for (chunk, planned) in chunks.chunks().iter().enumerate() {
                let Some(values) = origin.read(arena, planned.range.clone(), layout)? else {
                    continue;
                };
                let to = match arena {
                    StateArena::Parameters => 0..workers as u64,
                    _ => owners[chunk] as u64..owners[chunk] as u64 + 1,
                };
                for worker in to {
                    let values = values.clone();
                    input.send((worker, Piece::Values { arena, chunk, values }));
                }
                sent += 1;
                input.advance_to(sent);
                let oldest = sent.saturating_sub(PIECES_IN_FLIGHT);
                progress::moved();
                let _waiting = progress::during(Phase::WaitingForWorkers);
                context.step_while(|| probe.less_than(&oldest))?;
            }
        }
    }
    input.close();
    progress::enter(Phase::WaitingForWorkers, 0);
    context.run_until_done()?;
    progress::enter(Phase::Starting, 0);
    let mut received = received.borrow_mut();
    let start = received.start.ok_or(NO_STATE)?;
    Ok(WorkerState {
        start,
        parameters: std::mem::take(&mut received.parameters),
        moments: received.moments.take(),
    })
}

struct Received {
    start: Option<StartPoint>,
    parameters: Vec<f32>,
    moments: Option<[Vec<f32>; 2]>,
    /// The first element of each chunk.
    starts: Vec<usize>,
}

impl Received {
    fn take(&mut self, piece: Piece) {
        match piece {
            Piece::Start(start) => self.start = Some(start),
            Piece::Values { arena, chunk, values } => {
                let elements = self.parameters.len();
                let arena = match arena {
                    StateArena::Parameters => &mut self.parameters,
                    StateArena::ExpAvg => &mut moments(&mut self.moments, elements)[0],
                    StateArena::ExpAvgSq => &mut moments(&mut self.moments, elements)[1],
                };
                let start = self.starts[chunk];
                arena[start..start + values.len()].copy_from_slice(&values);
            }
        }
    }
}

/// The arenas of the moments, zero where nothing has arrived.
fn moments(arenas: &mut Option<[Vec<f32>; 2]>, elements: usize) -> &mut [Vec<f32>; 2] {
    arenas.get_or_insert_with(|| [vec![0.0; elements], vec![0.0; elements]])
}
