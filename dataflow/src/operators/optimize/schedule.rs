//! What the optimizer does next: a decision of losses, sums, squares and credit that have arrived.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use tidemill_collective::{Chunk, CreditWindow, Part, StatePart};
use tidemill_kernels::MemoryPlace;
use tidemill_model::Layout;

use super::rule::UpdateRule;
use super::tree_sum::tree_sum;
use super::{SquareSum, StepReport};
use crate::cluster::Failure;
use crate::error::JobError;
use crate::operators::error::GraphError;
use crate::operators::forward_backward::LaneLoss;
use crate::operators::plan::TrainingPlan;

/// What the optimizer thread is told.
#[derive(Debug, PartialEq)]
pub(super) enum ShardJob {
    /// Form the mean gradient of a chunk from the sums of its uses.
    Mean { chunk: usize, uses: Vec<UseSum>, tokens: u64 },
    /// Update a chunk.
    Update { chunk: usize, update: u64, coefficient: f32 },
    /// Copy a part of a chunk's state.
    Snapshot { chunk: usize, part: StatePart },
}

impl ShardJob {
    /// The chunk that it is about.
    pub(super) fn chunk(&self) -> usize {
        match *self {
            Self::Mean { chunk, .. }
            | Self::Update { chunk, .. }
            | Self::Snapshot { chunk, .. } => chunk,
        }
    }

    /// Whether `other` asks for the same of its chunk, with the same numbers.
    pub(super) fn is_alike(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Mean { tokens, .. }, Self::Mean { tokens: others, .. }) => tokens == others,
            (
                Self::Update { update, coefficient, .. },
                Self::Update { update: other_update, coefficient: other_coefficient, .. },
            ) => update == other_update && coefficient.to_bits() == other_coefficient.to_bits(),
            _ => false,
        }
    }
}

/// The sum of one use of a chunk over all lanes.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum UseSum {
    /// Here.
    Host(Vec<f32>),
    /// On the device.
    Resident,
}

/// What has arrived for one step.
#[derive(Debug)]
struct Gathered {
    losses: Vec<Option<LaneLoss>>,
    /// By owned chunk: the sums of its uses, in the order of uses.
    sums: BTreeMap<usize, Vec<Option<UseSum>>>,
    squares: Vec<Option<f64>>,
}

/// The mean loss of a step.
#[derive(Clone, Copy, Debug)]
struct StepLoss {
    loss: f64,
    tokens: u64,
    last: bool,
}

/// Where a worker's optimizer stands.
pub(super) struct OptimizerSchedule {
    plan: Arc<TrainingPlan>,
    rule: UpdateRule,
    worker: usize,
    workers: usize,
    /// By chunk: whether this worker owns it.
    owns: Vec<bool>,
    /// The uses of each segment, in order.
    segment_uses: Vec<Vec<u32>>,
    step: u64,
    /// Counted tokens of all steps so far.
    total_tokens: u64,
    gathered: BTreeMap<u64, Gathered>,
    loss: Option<StepLoss>,
    /// The clipping coefficient, once the norm is known.
    coefficient: Option<f32>,
    /// Owned chunks whose update was not handed out.
    updates: VecDeque<usize>,
    /// Owned chunks whose update is not done.
    outstanding: usize,
    cut: bool,
    /// Where updated parameters go: on the device they are read where they are, which takes no credit.
    place: MemoryPlace,
    parameter_window: CreditWindow,
    state_window: CreditWindow,
    /// Snapshots that were not handed out.
    snapshots: VecDeque<(usize, StatePart)>,
    /// By chunk: how many of these are of it.
    snapshots_due: Vec<u8>,
}

impl OptimizerSchedule {
    pub(super) fn new(
        plan: &Arc<TrainingPlan>,
        layout: &Layout,
        rule: UpdateRule,
        (worker, workers): (usize, usize),
        place: MemoryPlace,
    ) -> Self {
        let mut segment_uses = vec![Vec::new(); layout.segments().len()];
        for (index, use_) in layout.uses().iter().enumerate() {
            segment_uses[use_.segment].push(index as u32);
        }
        let owners = plan.chunks.owners(workers);
        Self {
            rule,
            worker,
            workers,
            owns: owners.iter().map(|&owner| owner == worker).collect(),
            segment_uses,
            step: plan.first_step,
            total_tokens: plan.first_tokens,
            gathered: BTreeMap::new(),
            loss: None,
            coefficient: None,
            updates: VecDeque::new(),
            outstanding: 0,
            cut: false,
            parameter_window: CreditWindow::new(plan.window_bytes * workers),
            state_window: CreditWindow::new(plan.window_bytes),
            place,
            snapshots: VecDeque::new(),
            snapshots_due: vec![0; owners.len()],
            plan: Arc::clone(plan),
        }
    }

    /// The chunks that this worker owns.
    pub(super) fn owned(&self) -> Vec<usize> {
        (0..self.owns.len()).filter(|&chunk| self.owns[chunk]).collect()
    }

    fn gathered(&mut self, step: u64) -> Result<&mut Gathered, Failure> {
        if step < self.step {
            return Err(GraphError::Late { step: self.step + 1, found: step + 1 }.into());
        }
        Ok(self.gathered.entry(step).or_insert_with(|| Gathered {
            losses: vec![None; self.plan.batch.lanes()],
            sums: BTreeMap::new(),
            squares: vec![None; self.plan.chunks.chunks().len()],
        }))
    }

    /// Takes the loss of a lane.
    pub(super) fn loss(&mut self, loss: LaneLoss) -> Result<(), Failure> {
        let slot = self.gathered(loss.step)?.losses.get_mut(loss.lane as usize);
        fill(slot, loss, loss.step, || format!("the loss of lane {}", loss.lane))
    }

    /// Takes the sum of one use of an owned chunk.
    pub(super) fn sum(&mut self, chunk: Chunk) -> Result<(), Failure> {
        let header = *chunk.header_for(self.worker)?;
        let index = header.chunk as usize;
        let planned = self.plan.chunks.chunks().get(index).filter(|_| self.owns[index]);
        let uses = planned.map_or(&[][..], |planned| &self.segment_uses[planned.segment]);
        let place = uses.iter().position(|&use_index| header.part == Part::Gradient { use_index });
        let count = uses.len();
        let sums =
            self.gathered(header.step)?.sums.entry(index).or_insert_with(|| vec![None; count]);
        let slot = place.and_then(|place| sums.get_mut(place));
        let sum = match chunk.is_resident() {
            true => UseSum::Resident,
            false => UseSum::Host(chunk.into_values()?),
        };
        fill(slot, sum, header.step, || format!("the sum {header:?}"))
    }

    /// Takes the sum of squares of any chunk.
    pub(super) fn squares(&mut self, squares: SquareSum) -> Result<(), Failure> {
        let SquareSum { step, chunk, sum } = squares;
        let slot = self.gathered(step)?.squares.get_mut(chunk as usize);
        fill(slot, sum, step, || format!("the squares of chunk {chunk}"))
    }

    /// Credit for parameters comes back.
    pub(super) fn parameter_credit(&mut self, bytes: u64) {
        self.parameter_window.give_back(bytes);
    }

    /// Credit for snapshots comes back.
    pub(super) fn state_credit(&mut self, bytes: u64) {
        self.state_window.give_back(bytes);
    }

    /// An owned chunk is updated.
    pub(super) fn updated(&mut self, chunk: usize) {
        if self.cut {
            self.snapshots.extend(StatePart::ALL.map(|part| (chunk, part)));
            self.snapshots_due[chunk] += StatePart::ALL.len() as u8;
        }
        self.outstanding -= 1;
    }

    /// The report of the current step, once its loss and norm are known. Answers it once.
    ///
    /// # Errors
    /// No counted token, or a loss or a norm that is no number.
    pub(super) fn report(&mut self) -> Result<Option<StepReport>, Failure> {
        let step = self.step;
        if self.coefficient.is_some() {
            return Ok(None);
        }
        let Some(gathered) = self.gathered.get(&step) else { return Ok(None) };
        if self.loss.is_none() {
            let losses: Option<Vec<LaneLoss>> = gathered.losses.iter().copied().collect();
            let Some(losses) = losses else { return Ok(None) };
            self.loss = Some(self.mean_loss(&losses)?);
        }
        let squares: Option<Vec<f64>> = gathered.squares.iter().copied().collect();
        let (Some(StepLoss { loss, tokens, last }), Some(squares)) = (self.loss, squares) else {
            return Ok(None);
        };
        let update = step + 1;
        let grad_norm = tree_sum(&squares).sqrt();
        if !grad_norm.is_finite() {
            let what = format!("the norm of the gradient is {grad_norm}");
            return Err(JobError::Step { step: update, what }.into());
        }
        self.coefficient = Some(self.rule.coefficient(grad_norm));
        self.updates = self.owned().into();
        self.outstanding = self.updates.len();
        self.cut = self.plan.is_cut(update, last);
        let learning_rate = (self.rule.learning_rate)(update);
        self.total_tokens += tokens;
        let total_tokens = self.total_tokens;
        Ok(Some(StepReport {
            step: update,
            loss,
            grad_norm,
            learning_rate,
            tokens,
            total_tokens,
            last,
        }))
    }

    fn mean_loss(&self, losses: &[LaneLoss]) -> Result<StepLoss, Failure> {
        let step = self.step + 1;
        let wrong = |what: String| JobError::Step { step, what };
        let tokens: u64 = losses.iter().map(|loss| loss.tokens).sum();
        if tokens == 0 {
            return Err(wrong("the batch has no counted token".to_owned()).into());
        }
        let sums: Vec<f64> = losses.iter().map(|loss| loss.loss_sum).collect();
        let loss = tree_sum(&sums) / tokens as f64;
        if !loss.is_finite() {
            return Err(self.not_finite(loss, losses).into());
        }
        let last = step >= self.plan.steps || losses.iter().any(|loss| loss.stop_requested);
        Ok(StepLoss { loss, tokens, last })
    }

    /// Says of the mean `loss` of the current step which samples it comes from.
    fn not_finite(&self, loss: f64, losses: &[LaneLoss]) -> JobError {
        let bad = || losses.iter().filter(|lane| !lane.loss_sum.is_finite());
        let (lanes, of) = (bad().count(), losses.len());
        let batch = &self.plan.batch;
        let (lane, grain) = bad().next().map_or((0, 0), |lane| {
            (lane.lane as usize, lane.first_not_finite.unwrap_or_default() as usize)
        });
        let positions = batch.positions(self.step, &batch.grain_range(lane, grain));
        let samples = self.plan.sample_names.in_words(&positions);
        JobError::Loss { step: self.step + 1, loss, lanes, of, lane, grain, positions, samples }
    }

    /// Whether every update of the current step is done; the next step then begins. A worker that
    /// owns nothing is done with its report.
    pub(super) fn advance(&mut self) -> bool {
        let done = self.coefficient.is_some() && self.outstanding == 0;
        if done {
            self.gathered.remove(&self.step);
            self.step += 1;
            self.loss = None;
            self.coefficient = None;
        }
        done
    }

    /// Whether a checkpoint follows the current step's update.
    pub(super) fn is_cut(&self) -> bool {
        self.cut
    }

    /// The current step.
    pub(super) fn step(&self) -> u64 {
        self.step
    }

    /// The next job of the optimizer thread. Snapshots come first, where credit allows them; a chunk
    /// that waits for its snapshot is not updated, and neither are those behind it.
    pub(super) fn next(&mut self) -> Option<ShardJob> {
        if let Some(&(chunk, part)) = self.snapshots.front()
            && self.state_window.take(self.chunk_bytes(chunk))
        {
            self.snapshots.pop_front();
            self.snapshots_due[chunk] -= 1;
            return Some(ShardJob::Snapshot { chunk, part });
        }
        if let Some(coefficient) = self.coefficient {
            let &chunk = self.updates.front()?;
            let bytes = match self.place {
                MemoryPlace::Host => self.chunk_bytes(chunk) * self.workers,
                MemoryPlace::Device => 0,
            };
            if self.snapshots_due[chunk] > 0 || !self.parameter_window.take(bytes) {
                return None;
            }
            self.updates.pop_front();
            return Some(ShardJob::Update { chunk, update: self.step + 1, coefficient });
        }
        let tokens = self.loss?.tokens;
        let sums = &mut self.gathered.get_mut(&self.step)?.sums;
        let complete = |uses: &Vec<Option<UseSum>>| uses.iter().all(Option::is_some);
        let chunk = sums.iter().find_map(|(&chunk, uses)| complete(uses).then_some(chunk))?;
        let uses = sums.remove(&chunk)?.into_iter().flatten().collect();
        Some(ShardJob::Mean { chunk, uses, tokens })
    }

    /// The elements of `chunk`.
    pub(super) fn elements(&self, chunk: usize) -> usize {
        self.plan.chunks.chunks()[chunk].range.len()
    }

    fn chunk_bytes(&self, chunk: usize) -> usize {
        4 * self.elements(chunk)
    }
}

/// Fills a slot of step `step` that exists and is empty.
fn fill<T>(
    slot: Option<&mut Option<T>>,
    value: T,
    step: u64,
    what: impl FnOnce() -> String,
) -> Result<(), Failure> {
    let step = step + 1;
    match slot {
        Some(slot @ None) => {
            *slot = Some(value);
            Ok(())
        }
        Some(Some(_)) => Err(GraphError::Twice { step, what: what() }.into()),
        None => Err(GraphError::Unplanned { step, what: what() }.into()),
    }
}
