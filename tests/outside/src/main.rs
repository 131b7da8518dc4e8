//! A crate that uses Tidemill as a dependency: it adds a kind of block, an optimizer and a kind of
//! sample, and trains them together.
//!
//! One worker and two must give the same bits.

mod left_out;

use std::collections::VecDeque;
use std::error::Error;
use std::num::{NonZeroU64, NonZeroUsize};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use tidemill::batch::{BatchSettings, MicrobatchMemory};
use tidemill::cluster::{ClusterSettings, Failure, execute};
use tidemill::communicators::Communicators;
use tidemill::kernels::{Cpu, SliceMut};
use tidemill::model::block::{AnyBlock, BlockPass, ResidualGradient, RowBlock, RowMap};
use tidemill::model::initialization::Initializer;
use tidemill::model::language_model::Stem;
use tidemill::model::linear::Products;
use tidemill::model::mamba::MambaBlock;
use tidemill::model::norm::{NewNorm, NormKind};
use tidemill::model::optimizer::*;
use tidemill::model::parameter_list::{Bias, NewTensor, ParameterList};
use tidemill::model::schedule::ScheduleSettings;
use tidemill::model::*;
use tidemill::operators::{
    CheckpointCuts, InitialState, NewestParameters, SampleSource, ScheduledRule, Training,
    TrainingPlan, Wake,
};
use timely::dataflow::operators::Inspect;

/// ASCII.
const VOCABULARY: usize = 128;
const WIDTH: usize = 16;
const POSITIONS: usize = 23;
const STEPS: u64 = 30;

/// The block: `out = x + weight * tanh(x)`, `weight[d]`.
#[derive(Debug)]
struct Bend {
    weight: Range<usize>,
}

impl Bend {
    fn add(parameters: &mut ParameterList, index: usize) -> Self {
        let weight = parameters.tensor(NewTensor {
            name: format!("blocks.{index}.weight"),
            shape: &[WIDTH],
            decay: Decay::Exempt,
            reading: Reading::Fp32,
            initializer: Initializer::Constant(0.1),
        });
        Self { weight }
    }
}

impl RowMap<Cpu> for Bend {
    fn width(&self) -> usize {
        WIDTH
    }

    fn apply(
        &self,
        _: &mut Device<'_, Cpu>,
        residual: SliceMut<'_, Cpu, f32>,
        parameters: Lease<'_, Cpu>,
        _: Products,
    ) -> Result<()> {
        let weight = parameters.vector(&self.weight)?.values();
        for (at, x) in residual.values().iter_mut().enumerate() {
            *x += weight[at % WIDTH] * x.tanh();
        }
        Ok(())
    }

    fn backward(
        &self,
        _: &mut Device<'_, Cpu>,
        grad: &mut ResidualGradient<Cpu>,
        lane: SliceMut<'_, Cpu, f32>,
        pass: BlockPass<'_, Cpu>,
    ) -> Result<()> {
        let (grains, grad) = (pass.shape.grain_rows()?, grad.gradient_mut());
        let weight = pass.parameters.vector(&self.weight)?.values();
        let lane = &mut lane.values()[self.weight.clone()];
        for grain in 0..grains.grains() {
            // From zero for every grain, and added whole.
            let mut of_grain = [0.0; WIDTH];
            let rows = grains.range(grain);
            for at in rows.start * WIDTH..rows.end * WIDTH {
                let (column, bent) = (at % WIDTH, pass.input[at].tanh());
                of_grain[column] += grad[at] * bent;
                grad[at] *= 1.0 + weight[column] * (1.0 - bent * bent);
            }
            lane.iter_mut().zip(of_grain).for_each(|(lane, gradient)| *lane += gradient);
        }
        Ok(())
    }
}

/// The optimizer: `m = 0.9 m + 0.1 g;  p -= learning_rate m / (|m| + 1e-3)`.
struct Bounded;

impl UpdateRule<Cpu> for Bounded {
    fn states(&self) -> &[StateSpec] {
        const { &[StateSpec::of_elements("mean")] }
    }

    fn update(
        &self,
        _: &mut Device<'_, Cpu>,
        views: UpdateViews<'_, Cpu>,
        scalars: UpdateScalars,
    ) -> Result<()> {
        let HostViews { parameters, states, gradient, .. } = views.on_host();
        let means = states.into_iter().flatten();
        for ((p, m), g) in parameters.iter_mut().zip(means).zip(gradient) {
            *m = 0.9 * *m + 0.1 * g * scalars.gradient_scale;
            *p -= scalars.learning_rate as f32 * *m / (m.abs() + 1e-3);
        }
        Ok(())
    }
}

/// The sample: a text, which the model reads letter by letter.
#[derive(Clone, Debug)]
struct Line(String);

impl Sample for Line {
    fn positions(&self) -> usize {
        self.0.len().saturating_sub(1)
    }
}

impl ToTokens for Line {
    fn to_tokens(&self) -> Tokens {
        self.0.bytes().map(u32::from).collect()
    }
}

/// The model: a Mamba whose blocks alternate with [`Bend`].
fn model() -> LanguageModel<Cpu> {
    let mamba = MambaConfig { d_state: 4, ..MambaConfig::new(VOCABULARY, WIDTH, 4) };
    let kind = NormKind::RootMeanSquare;
    let norm =
        NewNorm { name: "norm".to_owned(), kind, bias: Bias::Absent, width: WIDTH, eps: 1e-5 };
    let stem = Stem {
        vocab_size: VOCABULARY,
        width: WIDTH,
        embedding_name: "embedding",
        positions: None,
        norm,
        head_name: None,
        standard_deviation: 0.1,
        logit_scale: 1.0,
    };
    let config = serde_json::json!({ "model_type": "lines" });
    let blocks = |parameters: &mut _, index: usize| -> Box<dyn AnyBlock<Cpu>> {
        match index % 2 {
            0 => Box::new(MambaBlock::add(parameters, &mamba, index)),
            _ => Box::new(RowBlock(Bend::add(parameters, index))),
        }
    };
    LanguageModel::assemble(stem, 4, config, blocks)
}

/// Parts of a text, by their position.
#[derive(Default)]
struct Text {
    requested: VecDeque<u64>,
}

impl SampleSource for Text {
    type Sample = Line;

    fn request(&mut self, positions: Range<u64>) {
        self.requested.extend(positions);
    }

    fn poll(&mut self) -> std::result::Result<Option<(u64, Line)>, Failure> {
        const TEXT: &str = "the tide turns the mill and the mill grinds the grain of the tide. ";
        let part = |position| {
            let letters = TEXT.chars().cycle().skip(position as usize % TEXT.len());
            (position, Line(letters.take(POSITIONS + 1).collect()))
        };
        Ok(self.requested.pop_front().map(part))
    }

    fn set_wake(&mut self, _: Wake) {}
}

/// What a run computes: the loss of each step, and the weights after the last.
struct Trained {
    losses: Vec<f64>,
    weights: Vec<f32>,
}

fn main() -> std::result::Result<(), Box<dyn Error>> {
    let (one, two) = (train(1)?, train(2)?);
    let bits = |run: &Trained| -> (Vec<u64>, Vec<u32>) {
        let losses = run.losses.iter().map(|loss| loss.to_bits());
        (losses.collect(), run.weights.iter().map(|weight| weight.to_bits()).collect())
    };
    assert!(bits(&one) == bits(&two), "neither losses nor weights depend on the number of workers");
    let (first, last) = (one.losses[0], one.losses[STEPS as usize - 1]);
    let weights = one.weights.len();
    println!("loss {first:.3} -> {last:.3}, {weights} weights: the same bits of 1 and 2 workers");
    assert!(last < 0.7 * first, "the model learns the text");
    left_out::is_refused_in_words();
    Ok(())
}

fn train(workers: usize) -> std::result::Result<Trained, Box<dyn Error>> {
    let cluster = ClusterSettings::workers(workers);
    let cpu = Arc::new(Cpu::new(NonZeroUsize::MIN)?);
    let batch = BatchSettings { samples_per_step: Some(8), lanes: Some(4), ..Default::default() };
    let batch = batch.plan(MicrobatchMemory { sample_bytes: 0, workspace_bytes: 0 })?;
    let ends = Communicators::of_cluster(&vec![&*cpu; workers], &cluster, &batch)?;
    let settings = OptimizerSettings { learning_rate: 2e-2, ..Default::default() };
    let told = execute(cluster, move |context| {
        let model = Arc::new(Tokenized::<Line, _>::new(model()));
        let schedule = ScheduleSettings::default();
        let plan = TrainingPlan {
            checkpoints: CheckpointCuts::Every(NonZeroU64::MAX),
            ..TrainingPlan::new(batch.clone(), model.layout(), POSITIONS, STEPS)
        };
        let newest = NewestParameters::new(model.layout());
        let training = Training {
            plan: Arc::new(plan),
            backend: Arc::clone(&cpu),
            state: InitialState { parameters: Arc::new(model.initialize(17)), states: None },
            model,
            rule: ScheduledRule::with_rule(Arc::new(Bounded), &settings, schedule, STEPS),
            connection: ends.take(context, &cpu)?,
            stop: Arc::new(AtomicBool::new(false)),
            checkpoints: (context.index() == 0).then(|| Box::new(newest.clone()) as _),
            abort: context.abort().clone(),
        };
        let (sender, losses) = std::sync::mpsc::channel();
        context.dataflow::<u64, _, _>(|scope| {
            let reports = training.build(scope, Text::default(), None).reports;
            reports.inspect(move |report| sender.send(report.loss).unwrap_or_default());
        });
        context.run_until_done()?;
        Ok((losses.iter().collect::<Vec<_>>(), newest.take()))
    })?;
    // Every worker reports each step; the checkpoint after the last comes to the first worker.
    let (losses, newest) = told.into_iter().next().ok_or("no worker")?;
    let (_, weights) = newest.ok_or("no checkpoint")?;
    Ok(Trained { losses, weights })
}
