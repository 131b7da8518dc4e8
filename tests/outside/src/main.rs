//! A crate that uses Tidemill as a dependency: it adds a kind of block, an optimizer and a kind of
//! sample, and trains them together.
//!
//! One worker and two must give the same bits.

use std::collections::VecDeque;
use std::error::Error;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use tidemill::batch::{BatchSettings, MicrobatchMemory};
use tidemill::cluster::{ClusterSettings, Failure, execute};
use tidemill::device::Communicators;
use tidemill::kernels::cpu::Buffer;
use tidemill::kernels::{Cpu, SliceMut};
use tidemill::model::block::{AnyBlock, Block, BlockPass, ResidualGradient, SampleBytes};
use tidemill::model::generation::{Incremental, PiecePass, Room};
use tidemill::model::initialization::Initializer;
use tidemill::model::language_model::{Stem, Workspace};
use tidemill::model::mamba::MambaBlock;
use tidemill::model::norm::{NewNorm, NormKind};
use tidemill::model::optimizer::*;
use tidemill::model::parameter_list::{Bias, NewTensor, ParameterList};
use tidemill::model::schedule::ScheduleSettings;
use tidemill::model::*;
use tidemill::operators::{
    InitialState, SampleSource, ScheduledRule, Training, TrainingPlan, Wake,
};
use tidemill::streaming_data::DataSet;
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

impl Block<Cpu> for Bend {
    type Saved = ();
    type Scratch = ();

    fn plan_saved(&self, _: &mut Device<'_, Cpu>, _: MicrobatchShape) -> Result<()> {
        Ok(())
    }

    fn plan_scratch(&self, _: &mut Device<'_, Cpu>, _: MicrobatchShape) -> Result<()> {
        Ok(())
    }

    fn sample_bytes(&self, _: &Cpu, _: usize) -> Result<SampleBytes> {
        Ok(SampleBytes::default())
    }

    fn forward(
        &self,
        _: &mut Device<'_, Cpu>,
        out: &mut Buffer<f32>,
        pass: BlockPass<'_, Cpu>,
        (): &mut (),
        (): &mut (),
    ) -> Result<()> {
        let elements = pass.shape.sequences()?.rows() * WIDTH;
        let weight = pass.parameters.vector(&self.weight)?.values();
        for (at, (out, x)) in out.iter_mut().zip(&pass.input[..elements]).enumerate() {
            *out = x + weight[at % WIDTH] * x.tanh();
        }
        Ok(())
    }

    fn backward(
        &self,
        _: &mut Device<'_, Cpu>,
        grad: &mut ResidualGradient<Cpu>,
        lane: SliceMut<'_, Cpu, f32>,
        pass: BlockPass<'_, Cpu>,
        (): &mut (),
        (): &mut (),
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

/// The block has no state.
impl Incremental<Cpu> for Bend {
    type State = ();
    type Workspace = ();

    fn plan_state(&self, _: &mut Device<'_, Cpu>, _: Room) -> Result<()> {
        Ok(())
    }

    fn plan_workspace(&self, _: &mut Device<'_, Cpu>, _: Room) -> Result<()> {
        Ok(())
    }

    fn state_bytes(&self, _: Room) -> usize {
        0
    }

    fn forget(&self, _: &mut Device<'_, Cpu>, (): &mut ()) -> Result<()> {
        Ok(())
    }

    fn keep(&self, _: &mut Device<'_, Cpu>, (): &mut (), _: &[usize]) -> Result<()> {
        Ok(())
    }

    fn adopt(
        &self,
        _: &mut Device<'_, Cpu>,
        (): &mut (),
        _: usize,
        (): &(),
        _: usize,
    ) -> Result<()> {
        Ok(())
    }

    fn advance(
        &self,
        _: &mut Device<'_, Cpu>,
        residual: &mut Buffer<f32>,
        pass: PiecePass<'_, Cpu>,
        (): &mut (),
        (): &mut (),
    ) -> Result<()> {
        let weight = pass.parameters.vector(&self.weight)?.values();
        for (at, x) in residual[..pass.piece.rows() * WIDTH].iter_mut().enumerate() {
            *x += weight[at % WIDTH] * x.tanh();
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

/// The model: a Mamba whose blocks alternate with [`Bend`].
struct Lines(LanguageModel<Cpu>);

impl Lines {
    fn new() -> Result<Self> {
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
                _ => Box::new(Bend::add(parameters, index)),
            }
        };
        Ok(Self(LanguageModel::assemble(stem, 4, config, blocks)))
    }
}

/// Calls `work` with the letters of a microbatch.
fn with_tokens<R>(
    microbatch: Microbatch<'_, Line>,
    work: impl FnOnce(Microbatch<'_, Tokens>) -> R,
) -> R {
    let tokens = |line: &Line| line.0.bytes().map(u32::from).collect();
    let samples: Vec<Tokens> = microbatch.samples.iter().map(tokens).collect();
    let Microbatch { positions, samples_per_grain, document_end, .. } = microbatch;
    work(Microbatch { samples: &samples, positions, samples_per_grain, document_end })
}

impl Trainable<Cpu> for Lines {
    type Sample = Line;
    type Workspace = Workspace<Cpu>;

    fn layout(&self) -> &Layout {
        self.0.layout()
    }

    fn initialize(&self, seed: u64) -> Vec<f32> {
        self.0.initialize(seed)
    }

    fn config_json(&self) -> serde_json::Value {
        self.0.config_json().clone()
    }

    fn plan(&self, device: &mut Device<'_, Cpu>, shape: MicrobatchShape) -> Result<Workspace<Cpu>> {
        self.0.plan(device, shape)
    }

    fn forward(
        &self,
        device: &mut Device<'_, Cpu>,
        workspace: &mut Workspace<Cpu>,
        parameters: &mut dyn ParameterSource<Cpu>,
        microbatch: Microbatch<'_, Line>,
    ) -> Result<Vec<GrainLoss>> {
        with_tokens(microbatch, |tokens| self.0.forward(device, workspace, parameters, tokens))
    }

    fn forward_backward(
        &self,
        device: &mut Device<'_, Cpu>,
        workspace: &mut Workspace<Cpu>,
        parameters: &mut dyn ParameterSource<Cpu>,
        microbatch: Microbatch<'_, Line>,
        sink: &mut dyn GradientSink<Cpu>,
    ) -> Result<Vec<GrainLoss>> {
        with_tokens(microbatch, |tokens| {
            self.0.forward_backward(device, workspace, parameters, tokens, sink)
        })
    }
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

fn main() -> std::result::Result<(), Box<dyn Error>> {
    let (one, two) = (train(1)?, train(2)?);
    assert_eq!(one, two, "the losses must not depend on the number of workers");
    let (first, last) = (one[0], one[STEPS as usize - 1]);
    println!("loss {first:.3} -> {last:.3}: the same bits with 1 and with 2 workers");
    assert!(last < 0.7 * first, "the model learns the text");
    what_is_left_out_is_refused_in_words();
    Ok(())
}

/// The features that this crate leaves off.
fn what_is_left_out_is_refused_in_words() {
    let processes = ClusterSettings::process(1, 0, vec!["127.0.0.1:0".to_owned(); 2]);
    let refused = execute(processes, |_| Ok(())).err().expect("several processes").to_string();
    assert!(refused.contains("feature `processes` of tidemill"), "{refused}");
    let refused = DataSet::open("s3://bucket/set").err().expect("a store").to_string();
    assert!(refused.contains("feature `remote` of tidemill-streaming-data"), "{refused}");
}

fn train(workers: usize) -> std::result::Result<Vec<f64>, Box<dyn Error>> {
    let cluster = ClusterSettings::threads(workers);
    let cpu = Arc::new(Cpu::new(NonZeroUsize::MIN)?);
    let batch = BatchSettings { samples_per_step: Some(8), lanes: Some(4), ..Default::default() };
    let batch = batch.plan(MicrobatchMemory { sample_bytes: 0, workspace_bytes: 0 })?;
    let ends = Communicators::of_cluster(&vec![&*cpu; workers], &cluster, &batch)?;
    let settings = OptimizerSettings { learning_rate: 2e-2, ..Default::default() };
    let told = execute(cluster, move |context| {
        let (model, schedule) = (Arc::new(Lines::new()?), ScheduleSettings::default());
        let training = Training {
            plan: Arc::new(TrainingPlan::new(batch.clone(), model.layout(), POSITIONS, STEPS)),
            backend: Arc::clone(&cpu),
            state: InitialState { parameters: Arc::new(model.initialize(17)), states: None },
            model,
            rule: ScheduledRule::with_rule(Arc::new(Bounded), &settings, schedule, STEPS),
            connection: ends.take(context, &cpu)?,
            stop: Arc::new(AtomicBool::new(false)),
            checkpoints: None,
            abort: context.abort().clone(),
        };
        let (sender, losses) = std::sync::mpsc::channel();
        context.dataflow::<u64, _, _>(|scope| {
            let reports = training.build(scope, Text::default(), None).reports;
            reports.inspect(move |report| sender.send(report.loss).unwrap_or_default());
        });
        context.run_until_done()?;
        Ok(losses.iter().collect::<Vec<_>>())
    })?;
    Ok(told.into_iter().next().unwrap_or_default())
}
