//! What the optimizer does next: a decision of losses, sums, squares and credit that have arrived.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
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
use crate::operators::ticket::Ticket;

/// What the optimizer thread is told. A *unit* is what is updated at once: a chunk where values pass through the host, a bucket
/// where they stay on the device.
#[derive(Debug, PartialEq)]
pub(super) enum ShardJob {
    /// Sum what this worker owns of a bucket over all workers.
    Sum { step: u64, bucket: usize },
    /// Form the mean gradient of a unit, from the sums of its uses where they come from the host.
    Mean { unit: usize, uses: Vec<Vec<f32>>, tokens: u64 },
    /// Update a unit.
    Update { unit: usize, update: u64, coefficient: f32 },
    /// Bring what other workers have updated of a bucket to this worker.
    Gather { step: u64, bucket: usize },
    /// Begin to copy all state that this worker owns to memory of the host.
    Stage,
    /// Copy a part of a chunk's state, from there where it was copied there.
    Snapshot { chunk: usize, part: StatePart },
}

/// What has arrived for one step.
#[derive(Debug)]
struct Gathered {
    losses: Vec<Option<LaneLoss>>,
    /// By unit of which this worker owns something: the sums of its uses, in the order of uses; nothing where they are on the
    /// device.
    sums: BTreeMap<usize, Vec<Option<Vec<f32>>>>,
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
    /// By unit: its chunks that this worker owns.
    owned: Vec<Range<usize>>,
    /// The units of a step, in the order in which they are updated.
    units: Vec<usize>,
    /// Sums that were not handed out.
    reductions: VecDeque<(u64, usize)>,
    /// Units whose update was not handed out.
    updates: VecDeque<usize>,
    /// Buckets whose gathering was not handed out.
    gathers: VecDeque<usize>,
    /// Units of the step that are not done.
    outstanding: usize,
    cut: bool,
    /// Where state is: on the device parameters are read where they are, which takes no credit.
    place: MemoryPlace,
    parameter_window: CreditWindow,
    state_window: CreditWindow,
    /// Snapshots that were not handed out.
    snapshots: VecDeque<(usize, StatePart)>,
    /// By chunk: how many of these are of it. It is not updated before.
    snapshots_due: Vec<u8>,
    staging: Staging,
    /// Whether the state of a cut is updated and not staged: nothing is updated before it is, and it waits for the snapshots of the
    /// last cut.
    stage_due: bool,
    /// Whether a cut is being staged, whose snapshots follow.
    is_staging: bool,
}

/// How the state of a cut is kept until it is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Staging {
    /// Where it is: it waits for its snapshot before it is updated again.
    InPlace,
    /// It is copied to memory of the host at once, and updated meanwhile.
    OnHost,
}

impl OptimizerSchedule {
    pub(super) fn new(
        plan: &Arc<TrainingPlan>,
        layout: &Layout,
        rule: UpdateRule,
        (worker, workers): (usize, usize),
        (place, staging): (MemoryPlace, Staging),
    ) -> Self {
        let mut segment_uses = vec![Vec::new(); layout.segments().len()];
        for (index, use_) in layout.uses().iter().enumerate() {
            segment_uses[use_.segment].push(index as u32);
        }
        let chunks = plan.chunks.chunks().len();
        let (owned, units): (Vec<Range<usize>>, Vec<usize>) = match place {
            MemoryPlace::Host => {
                let owners = plan.owners(workers);
                let owned = (0..chunks).filter(|&chunk| owners[chunk] == worker).collect();
                ((0..chunks).map(|chunk| chunk..chunk + 1).collect(), owned)
            }
            MemoryPlace::Device => {
                let owners = plan.buckets.owners(&plan.chunks, workers);
                let units = (0..owners.len()).rev().collect();
                (owners.iter().map(|owners| owners.chunks(worker)).collect(), units)
            }
        };
        let mut owns = vec![false; chunks];
        units.iter().for_each(|&unit| owns[owned[unit].clone()].fill(true));
        Self {
            rule,
            worker,
            workers,
            owns,
            owned,
            units,
            reductions: VecDeque::new(),
            gathers: VecDeque::new(),
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
            snapshots_due: vec![0; chunks],
            staging,
            stage_due: false,
            is_staging: false,
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
        fill(slot, chunk.into_values()?, header.step, || format!("the sum {header:?}"))
    }

    /// This worker's sums of a bucket are final.
    pub(super) fn summed(&mut self, ticket: Ticket) -> Result<(), Failure> {
        let Ticket { step, bucket } = ticket;
        let bucket = bucket as usize;
        let on_device = self.place == MemoryPlace::Device && bucket < self.units.len();
        let sums = &mut self.gathered(step)?.sums;
        let what = || format!("the sums of bucket {bucket}");
        if !on_device {
            return Err(GraphError::Unplanned { step: step + 1, what: what() }.into());
        }
        if sums.insert(bucket, Vec::new()).is_some() {
            return Err(GraphError::Twice { step: step + 1, what: what() }.into());
        }
        self.reductions.push_back((step, bucket));
        Ok(())
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

    /// What this worker owns of a unit is updated.
    pub(super) fn updated(&mut self, unit: usize) {
        if !self.cut || self.staging == Staging::OnHost {
            return;
        }
        for chunk in self.owned[unit].clone() {
            self.snapshots.extend(StatePart::ALL.map(|part| (chunk, part)));
            self.snapshots_due[chunk] += StatePart::ALL.len() as u8;
        }
    }

    /// All that this worker owns is on its way to the host.
    pub(super) fn staged(&mut self) {
        self.is_staging = false;
        let owned = self.owned().into_iter();
        self.snapshots.extend(owned.flat_map(|chunk| StatePart::ALL.map(|part| (chunk, part))));
    }

    /// A unit is done: sent to all workers, or gathered from all.
    pub(super) fn done(&mut self) {
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
        self.updates = self.units.iter().copied().collect();
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
    /// owns nothing is done with its report, unless it has buckets to gather.
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

    /// The next job of the optimizer thread. Sums come first, as others wait for them, then snapshots, where credit allows them; a
    /// chunk that waits for its snapshot is not updated, and neither are those behind it.
    pub(super) fn next(&mut self) -> Option<ShardJob> {
        if let Some((step, bucket)) = self.reductions.pop_front() {
            return Some(ShardJob::Sum { step, bucket });
        }
        if let Some(&(chunk, part)) = self.snapshots.front()
            && self.state_window.take(self.chunk_bytes(chunk))
        {
            self.snapshots.pop_front();
            if self.staging == Staging::InPlace {
                self.snapshots_due[chunk] -= 1;
            }
            return Some(ShardJob::Snapshot { chunk, part });
        }
        if self.stage_due && !self.is_staging && self.snapshots.is_empty() {
            (self.stage_due, self.is_staging) = (false, true);
            return Some(ShardJob::Stage);
        }
        if let Some(coefficient) = self.coefficient {
            let Some(&unit) = self.updates.front() else {
                let (step, bucket) = (self.step, self.gathers.pop_front()?);
                return Some(ShardJob::Gather { step, bucket });
            };
            if self.stage_due {
                return None;
            }
            let bytes = match self.place {
                MemoryPlace::Host => self.chunk_bytes(unit) * self.workers,
                MemoryPlace::Device => 0,
            };
            let is_due = self.snapshots_due[self.owned[unit].clone()].iter().any(|&due| due > 0);
            if is_due || !self.parameter_window.take(bytes) {
                return None;
            }
            self.updates.pop_front();
            if self.place == MemoryPlace::Device {
                self.gathers.push_back(unit);
            }
            self.stage_due = self.updates.is_empty() && self.cut && self.staging == Staging::OnHost;
            return Some(ShardJob::Update { unit, update: self.step + 1, coefficient });
        }
        let tokens = self.loss?.tokens;
        let sums = &mut self.gathered.get_mut(&self.step)?.sums;
        let complete = |uses: &Vec<Option<Vec<f32>>>| uses.iter().all(Option::is_some);
        let unit = sums.iter().find_map(|(&unit, uses)| complete(uses).then_some(unit))?;
        let uses = sums.remove(&unit)?.into_iter().flatten().collect();
        Some(ShardJob::Mean { unit, uses, tokens })
    }

    fn chunk_bytes(&self, chunk: usize) -> usize {
        4 * self.plan.chunks.chunks()[chunk].range.len()
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
