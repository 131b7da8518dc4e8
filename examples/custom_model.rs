//! A model of your own, trained by the same graph: implement `Trainable`.
//!
//! ```text
//! cargo run --release --example custom_model
//! ```
//!
//! The model is the smallest that learns something: a table of scores for each pair of neighbouring
//! tokens (a bigram model). It shows what a model must do so that the weights are the same to the
//! bit: losses depend on one sample alone, and gradients are formed grain by grain. And it shows
//! how a model gets its parameters: block by block, each leased for as long as the block runs.

use std::num::NonZeroUsize;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Result, ensure};
use tidemill::batch::{BatchPlan, BatchSettings, MicrobatchMemory};
use tidemill::cluster::{ClusterSettings, Failure, WorkerContext, execute};
use tidemill::communicators::Communicators;
use tidemill::kernels::Cpu;
use tidemill::model::optimizer::OptimizerSettings;
use tidemill::model::schedule::ScheduleSettings;
use tidemill::model::{
    Decay, Device, Direction, GradientSink, GrainLoss, Layout, Microbatch, MicrobatchShape,
    ModelError, ParameterSource, Reading, Tokens, Trainable,
};
use tidemill::operators::{
    InitialState, SampleSource, ScheduledRule, Training, TrainingPlan, Wake,
};
use timely::dataflow::operators::Inspect;

const TEXT: &str = "the tide turns the mill and the mill turns the stone and the stone grinds. ";
const POSITIONS: usize = 32;
/// Lanes of a step: as many workers are possible.
const LANES: usize = 8;
const STEPS: u64 = 100;

/// `score[v, v]`: how well token `column` follows token `row`.
struct Bigram {
    layout: Layout,
    vocab_size: usize,
}

impl Bigram {
    fn new(vocab_size: usize) -> Self {
        let mut layout = Layout::new();
        let segment = layout.segment("scores");
        let score = layout.tensor("score", &[vocab_size, vocab_size], Decay::Exempt, 1);
        // So that workers that share out parameters make no copy in another precision for this model.
        layout.set_reading(score, Reading::Fp32);
        layout.block("scores", &[segment]);
        Self { layout, vocab_size }
    }

    /// Losses grain by grain; `gradient`, where given, receives each grain's own gradient of the sum of its losses.
    fn run(
        &self,
        scores: &[f32],
        microbatch: Microbatch<'_>,
        mut gradient: impl FnMut(&[f32]),
    ) -> Result<Vec<GrainLoss>, ModelError> {
        let v = self.vocab_size;
        let mut losses = Vec::new();
        for grain in microbatch.grains() {
            // From zero for every grain: this makes the result independent of the microbatch.
            let mut grain_gradient = vec![0.0_f32; v * v];
            let mut loss = GrainLoss::default();
            for pair in grain.iter().flat_map(|tokens| tokens.windows(2)) {
                let (from, to) = (pair[0] as usize, pair[1] as usize);
                if let Some(&token) = pair.iter().find(|&&token| token as usize >= v) {
                    let what = "a sample".to_owned();
                    return Err(ModelError::Token { what, token, vocab_size: v });
                }
                let row = &scores[from * v..(from + 1) * v];
                let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let sum: f32 = row.iter().map(|score| (score - most).exp()).sum();
                loss.loss_sum += f64::from(sum.ln() + most - row[to]);
                loss.tokens += 1;
                for (column, score) in row.iter().enumerate() {
                    let probability = (score - most).exp() / sum;
                    let target = if column == to { 1.0 } else { 0.0 };
                    grain_gradient[from * v + column] += probability - target;
                }
            }
            gradient(&grain_gradient);
            losses.push(loss);
        }
        Ok(losses)
    }

    /// The parameters of the only block, in the CPU's memory. A model of several blocks enters them
    /// in order, forward and then backward, and leases the parameters of each.
    fn scores<'a>(
        &self,
        device: &mut Device<'_, Cpu>,
        parameters: &'a mut dyn ParameterSource<Cpu>,
        direction: Direction,
    ) -> Result<&'a [f32], ModelError> {
        parameters.enter(device, 0, direction)?;
        let scores = parameters.lease(0)?.vector(&(0..self.vocab_size * self.vocab_size))?;
        Ok(scores.values())
    }
}

impl Trainable<Cpu> for Bigram {
    type Sample = Tokens;

    /// This model needs no activations.
    type Workspace = ();

    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn initialize(&self, _seed: u64) -> Vec<f32> {
        vec![0.0; self.layout.parameter_elements()]
    }

    fn config_json(&self) -> serde_json::Value {
        serde_json::json!({ "model_type": "bigram", "vocab_size": self.vocab_size })
    }

    fn plan(&self, _: &mut Device<'_, Cpu>, _: MicrobatchShape) -> Result<(), ModelError> {
        Ok(())
    }

    fn forward(
        &self,
        device: &mut Device<'_, Cpu>,
        _workspace: &mut (),
        parameters: &mut dyn ParameterSource<Cpu>,
        microbatch: Microbatch<'_>,
    ) -> Result<Vec<GrainLoss>, ModelError> {
        self.run(self.scores(device, parameters, Direction::Forward)?, microbatch, |_| ())
    }

    fn forward_backward(
        &self,
        device: &mut Device<'_, Cpu>,
        _workspace: &mut (),
        parameters: &mut dyn ParameterSource<Cpu>,
        microbatch: Microbatch<'_>,
        sink: &mut dyn GradientSink<Cpu>,
    ) -> Result<Vec<GrainLoss>, ModelError> {
        let scores = self.scores(device, parameters, Direction::Backward)?;
        let losses = self.run(scores, microbatch, |gradient| {
            // Added to the lane grain by grain, in order.
            for (sum, value) in sink.accumulator(0).values().iter_mut().zip(gradient) {
                *sum += value;
            }
        })?;
        // The block's gradients are final for this microbatch: they may be sent while earlier
        // blocks are still computed.
        sink.block_done(device, 0)?;
        Ok(losses)
    }
}

fn main() -> Result<()> {
    let (one, three) = (train(1)?, train(3)?);
    ensure!(one == three, "the losses must not depend on the number of workers");
    let (first, last) = (one[0], one[one.len() - 1]);
    println!("loss {first:.3} -> {last:.3}: the same bits with 1 and with 3 workers");
    ensure!(last < 0.5 * first, "the model learns the text");
    Ok(())
}

fn train(workers: usize) -> Result<Vec<f64>> {
    let cluster = ClusterSettings::workers(workers);
    let cpu = Arc::new(Cpu::new(NonZeroUsize::MIN)?);
    let batch =
        BatchSettings { samples_per_step: Some(8), lanes: Some(LANES), ..Default::default() };
    let batch = batch.plan(MicrobatchMemory { sample_bytes: 0, workspace_bytes: 0 })?;
    // How workers sum their gradients.
    let communicators = Communicators::of_cluster(&vec![&*cpu; workers], &cluster, &batch)?;
    let program =
        move |context: &mut WorkerContext<'_>| worker(context, &cpu, &batch, &communicators);
    let per_worker = execute(cluster, program)?;
    Ok(per_worker.into_iter().next().unwrap_or_default())
}

fn worker(
    context: &mut WorkerContext<'_>,
    cpu: &Arc<Cpu>,
    batch: &BatchPlan,
    communicators: &Communicators<Cpu>,
) -> Result<Vec<f64>, Failure> {
    let alphabet = alphabet();
    let model = Arc::new(Bigram::new(alphabet.len()));
    let optimizer = OptimizerSettings { learning_rate: 0.1, ..Default::default() };
    let training = Training {
        plan: Arc::new(TrainingPlan::new(batch.clone(), &model.layout, POSITIONS, STEPS)),
        backend: Arc::clone(cpu),
        state: InitialState { parameters: Arc::new(model.initialize(0)), states: None },
        model,
        rule: ScheduledRule::new(&optimizer, ScheduleSettings::default(), STEPS),
        connection: communicators.take(context, cpu)?,
        stop: Arc::new(AtomicBool::new(false)),
        checkpoints: None,
        abort: context.abort().clone(),
    };
    let losses = Arc::new(Mutex::new(Vec::new()));
    let kept = Arc::clone(&losses);
    context.dataflow::<u64, _, _>(|scope| {
        let source = Text { tokens: tokens(&alphabet), requested: Vec::new() };
        training.build(scope, source, None).reports.inspect(move |report| {
            kept.lock().unwrap_or_else(PoisonError::into_inner).push(report.loss);
        });
    });
    context.run_until_done()?;
    let mut losses = losses.lock().unwrap_or_else(PoisonError::into_inner);
    Ok(std::mem::take(&mut *losses))
}

fn alphabet() -> Vec<char> {
    let mut letters: Vec<char> = TEXT.chars().collect();
    letters.sort_unstable();
    letters.dedup();
    letters
}

fn tokens(alphabet: &[char]) -> Vec<u32> {
    let token = |letter| alphabet.iter().position(|&other| other == letter).unwrap_or(0) as u32;
    TEXT.chars().map(token).collect()
}

/// The text over and over; sample `position` begins at its `position`-th letter.
struct Text {
    tokens: Vec<u32>,
    requested: Vec<u64>,
}

impl SampleSource for Text {
    type Sample = Tokens;

    fn request(&mut self, positions: std::ops::Range<u64>) {
        self.requested.extend(positions);
    }

    fn poll(&mut self) -> Result<Option<(u64, Tokens)>, Failure> {
        if self.requested.is_empty() {
            return Ok(None);
        }
        let position = self.requested.remove(0);
        let letter = |index| self.tokens[(position as usize + index) % self.tokens.len()];
        Ok(Some((position, (0..=POSITIONS).map(letter).collect())))
    }

    fn set_wake(&mut self, _wake: Wake) {}
}
