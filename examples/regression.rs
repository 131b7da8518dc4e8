//! A model of your own over data of your own: samples of features and a number to predict, without
//! tokens.
//!
//! ```text
//! cargo run --release --example regression
//! ```
//!
//! The samples are rows of Parquet files with four columns of floats. `TableSamples` streams them in a shuffled order, the graph
//! carries them to the model, and the model (two layers, backward by hand) works on plain slices. One worker and two train it to
//! the same bits, and it is evaluated on rows that it was not trained on.

use std::cell::RefCell;
use std::fs::File;
use std::num::{NonZeroU64, NonZeroUsize};
use std::ops::Range;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::{Result, ensure};
use arrow_array::cast::AsArray;
use arrow_array::types::Float32Type;
use arrow_array::{Array, ArrayRef, Float32Array, RecordBatch};
use parquet::arrow::ArrowWriter;
use tidemill::batch::{BatchPlan, BatchSettings, MicrobatchMemory};
use tidemill::cluster::{ClusterSettings, Failure, WorkerContext, execute};
use tidemill::communicators::Communicators;
use tidemill::kernels::Cpu;
use tidemill::model::optimizer::OptimizerSettings;
use tidemill::model::schedule::ScheduleSettings;
use tidemill::model::{
    Decay, Device, Direction, GradientSink, GrainLoss, Layout, Microbatch, MicrobatchShape,
    ModelError, ParameterSource, Reading, Sample, Trainable,
};
use tidemill::operators::{
    Evaluation, EvaluationPlan, InitialState, ScheduledRule, TableSamples, Training, TrainingPlan,
};
use tidemill::parallel::Sharding;
use tidemill::streaming_data::DataSettings;
use tidemill::streaming_data::data_set::table::{
    Columns, RowBatch, Table, TableDecoder, TableSettings,
};
use tidemill::streaming_data::order::{ShuffleOrder, ShuffleSettings};
use timely::dataflow::operators::Inspect;

const COLUMNS: [&str; 4] = ["wind", "moon", "slope", "height"];
/// The first columns: features. The last is the target.
const FEATURES: usize = COLUMNS.len() - 1;
const HIDDEN: usize = 24;
const STEPS: u64 = 400;

/// A row.
#[derive(Clone, Debug)]
pub struct Measurement {
    /// The first columns.
    pub features: [f32; FEATURES],
    /// The last.
    pub target: f32,
}

/// It is not a sequence: it has one position.
impl Sample for Measurement {}

/// The rows of a batch of these columns.
pub fn measurements(batch: &RowBatch) -> Result<Vec<Measurement>, Failure> {
    let mut columns = Vec::new();
    for (name, column) in COLUMNS.iter().zip(batch.rows.columns()) {
        let floats = column.as_primitive_opt::<Float32Type>();
        let Some(floats) = floats.filter(|floats| floats.null_count() == 0) else {
            let found = column.data_type();
            let what =
                format!("column {name}: expected 32-bit floats without nulls, found {found}");
            return Err(Failure::fix_input(what));
        };
        columns.push(floats.values());
    }
    let row = |row| Measurement {
        features: std::array::from_fn(|feature| columns[feature][row]),
        target: columns[FEATURES][row],
    };
    Ok((0..batch.rows.num_rows()).map(row).collect())
}

/// `y = out_weight tanh(in_weight x + in_bias) + out_bias`. A use is one tensor here: they are in this order.
const SHAPES: [(&str, &[usize]); 4] = [
    ("in_weight", &[HIDDEN, FEATURES]),
    ("in_bias", &[HIDDEN]),
    ("out_weight", &[HIDDEN]),
    ("out_bias", &[1]),
];

struct TwoLayers {
    layout: Layout,
}

impl TwoLayers {
    fn new() -> Self {
        let mut layout = Layout::new();
        let segments = SHAPES.map(|(name, shape)| {
            let segment = layout.segment(name);
            let tensor = layout.tensor(name, shape, Decay::Exempt, 1);
            layout.set_reading(tensor, Reading::Fp32);
            segment
        });
        layout.block("in", &segments[..2]);
        layout.block("out", &segments[2..]);
        Self { layout }
    }

    /// `hidden[b, HIDDEN]`, the first block.
    fn hidden(
        &self,
        device: &mut Device<'_, Cpu>,
        parameters: &mut dyn ParameterSource<Cpu>,
        samples: &[Measurement],
        hidden: &mut [f32],
    ) -> Result<(), ModelError> {
        parameters.enter(device, 0, Direction::Forward)?;
        let (weight, bias) = (values(parameters, 0)?, values(parameters, 1)?);
        for (sample, hidden) in samples.iter().zip(hidden.chunks_exact_mut(HIDDEN)) {
            for (unit, out) in hidden.iter_mut().enumerate() {
                let row = &weight[unit * FEATURES..(unit + 1) * FEATURES];
                *out = (dot(row, &sample.features) + bias[unit]).tanh();
            }
        }
        Ok(())
    }

    /// The error of each sample, in the second block, which was entered before.
    fn errors(
        &self,
        parameters: &dyn ParameterSource<Cpu>,
        samples: &[Measurement],
        hidden: &[f32],
    ) -> Result<Vec<f32>, ModelError> {
        let (weight, bias) = (values(parameters, 2)?, values(parameters, 3)?);
        let error = |(sample, hidden): (&Measurement, &[f32])| {
            dot(weight, hidden) + bias[0] - sample.target
        };
        Ok(samples.iter().zip(hidden.chunks_exact(HIDDEN)).map(error).collect())
    }
}

/// A tensor of the block that was entered.
fn values(parameters: &dyn ParameterSource<Cpu>, use_index: usize) -> Result<&[f32], ModelError> {
    let elements = SHAPES[use_index].1.iter().product();
    Ok(parameters.lease(use_index)?.vector(&(0..elements))?.values())
}

fn dot(left: &[f32], right: &[f32]) -> f32 {
    left.iter().zip(right).map(|(left, right)| left * right).sum()
}

/// Half the squared errors of each grain, and the number of its samples.
fn losses(microbatch: Microbatch<'_, Measurement>, errors: &[f32]) -> Vec<GrainLoss> {
    let loss = |errors: &[f32]| GrainLoss {
        loss_sum: errors.iter().map(|&error| 0.5 * f64::from(error) * f64::from(error)).sum(),
        tokens: errors.len() as u64,
    };
    errors.chunks(microbatch.samples_per_grain).map(loss).collect()
}

/// Forms the gradient of each grain from zero, and adds it to the earlier ones: this makes the
/// result independent of the microbatch. `add` adds the contribution of one sample.
fn add_gradients(
    sink: &mut dyn GradientSink<Cpu>,
    use_index: usize,
    microbatch: Microbatch<'_, Measurement>,
    add: impl Fn(usize, &mut [f32]),
) {
    let lane = sink.accumulator(use_index).values();
    let elements = SHAPES[use_index].1.iter().product();
    let samples: Vec<usize> = (0..microbatch.samples.len()).collect();
    for grain in samples.chunks(microbatch.samples_per_grain) {
        let mut gradient = vec![0.0; elements];
        grain.iter().for_each(|&sample| add(sample, &mut gradient));
        lane.iter_mut().zip(&gradient).for_each(|(lane, gradient)| *lane += gradient);
    }
}

impl Trainable<Cpu> for TwoLayers {
    type Sample = Measurement;
    /// `hidden[b, HIDDEN]`
    type Workspace = Vec<f32>;

    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn initialize(&self, seed: u64) -> Vec<f32> {
        let mut arena = vec![0.0; self.layout.parameter_elements()];
        for tensor in self.layout.tensors().iter().filter(|tensor| tensor.name.contains("weight")) {
            for index in tensor.range() {
                arena[index] = uniform(seed + index as u64);
            }
        }
        arena
    }

    fn config_json(&self) -> serde_json::Value {
        serde_json::json!({ "model_type": "two_layers", "hidden": HIDDEN })
    }

    fn plan(
        &self,
        _: &mut Device<'_, Cpu>,
        shape: MicrobatchShape,
    ) -> Result<Vec<f32>, ModelError> {
        Ok(vec![0.0; shape.samples * HIDDEN])
    }

    /// Known before anything is computed.
    fn counted_tokens(&self, microbatch: Microbatch<'_, Measurement>) -> Option<u64> {
        Some(microbatch.samples.len() as u64)
    }

    fn forward(
        &self,
        device: &mut Device<'_, Cpu>,
        hidden: &mut Vec<f32>,
        parameters: &mut dyn ParameterSource<Cpu>,
        microbatch: Microbatch<'_, Measurement>,
    ) -> Result<Vec<GrainLoss>, ModelError> {
        self.hidden(device, parameters, microbatch.samples, hidden)?;
        parameters.enter(device, 1, Direction::Forward)?;
        Ok(losses(microbatch, &self.errors(parameters, microbatch.samples, hidden)?))
    }

    fn forward_backward(
        &self,
        device: &mut Device<'_, Cpu>,
        hidden: &mut Vec<f32>,
        parameters: &mut dyn ParameterSource<Cpu>,
        microbatch: Microbatch<'_, Measurement>,
        sink: &mut dyn GradientSink<Cpu>,
    ) -> Result<Vec<GrainLoss>, ModelError> {
        let samples = microbatch.samples;
        self.hidden(device, parameters, samples, hidden)?;
        // The last block runs forward and backward at once.
        parameters.enter(device, 1, Direction::Backward)?;
        let errors = self.errors(parameters, samples, hidden)?;
        let of = |sample: usize| &hidden[sample * HIDDEN..(sample + 1) * HIDDEN];
        add_gradients(sink, 2, microbatch, |sample, gradient| {
            let out = gradient.iter_mut().zip(of(sample));
            out.for_each(|(gradient, hidden)| *gradient += errors[sample] * hidden);
        });
        add_gradients(sink, 3, microbatch, |sample, gradient| gradient[0] += errors[sample]);
        // `slopes[b, HIDDEN]`, by the derivative of tanh.
        let weight = values(parameters, 2)?;
        let slope = |(index, hidden): (usize, &f32)| {
            errors[index / HIDDEN] * weight[index % HIDDEN] * (1.0 - hidden * hidden)
        };
        let hidden = &hidden[..samples.len() * HIDDEN];
        let slopes: Vec<f32> = hidden.iter().enumerate().map(slope).collect();
        // These gradients are final for this microbatch: they may be sent while earlier blocks are
        // still computed.
        sink.block_done(device, 1)?;

        parameters.enter(device, 0, Direction::Backward)?;
        let of = |sample: usize| &slopes[sample * HIDDEN..(sample + 1) * HIDDEN];
        add_gradients(sink, 0, microbatch, |sample, gradient| {
            for (row, slope) in gradient.chunks_exact_mut(FEATURES).zip(of(sample)) {
                let out = row.iter_mut().zip(samples[sample].features);
                out.for_each(|(gradient, feature)| *gradient += slope * feature);
            }
        });
        add_gradients(sink, 1, microbatch, |sample, gradient| {
            gradient.iter_mut().zip(of(sample)).for_each(|(gradient, slope)| *gradient += slope);
        });
        sink.block_done(device, 0)?;
        Ok(losses(microbatch, &errors))
    }
}

/// The results of a run: the bits of the losses of all steps and evaluations.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Losses {
    /// The loss of each step, in bits.
    pub training: Vec<u64>,
    /// The loss of each evaluation, in bits; on worker 0.
    pub evaluation: Vec<u64>,
}

/// Trains with one worker and with two.
pub fn main() -> Result<()> {
    let folder = tempfile::tempdir()?;
    // The first files are for training, the last one for evaluation.
    for (part, files) in [("train", 0..4), ("test", 4..5)] {
        write(&folder.path().join(part), files)?;
    }
    let run = |workers| train(folder.path(), workers, &batch_settings(), Sharding::Optimizer);
    let (one, two) = (run(1)?, run(2)?);
    ensure!(one == two, "the losses must not depend on the number of workers");
    let (first, last) = (one.training[0], one.training[STEPS as usize - 1]);
    let (first, last) = (f64::from_bits(first), f64::from_bits(last));
    println!("loss {first:.4} -> {last:.4}: the same bits with 1 and with 2 workers");
    let evaluated: Vec<_> = one.evaluation.iter().map(|&loss| f64::from_bits(loss)).collect();
    println!("of rows that it was not trained on: {evaluated:.4?}");
    ensure!(evaluated.last().is_some_and(|&loss| loss < 0.1 * first), "the model learns");
    Ok(())
}

/// How a step is cut.
pub fn batch_settings() -> BatchSettings {
    BatchSettings {
        samples_per_step: Some(64),
        lanes: Some(8),
        grain_samples: 4,
        ..Default::default()
    }
}

/// Trains on the rows in `folder`. Neither sharding nor the number of workers changes the numbers.
pub fn train(
    folder: &Path,
    workers: usize,
    settings: &BatchSettings,
    sharding: Sharding,
) -> Result<Losses> {
    let cluster = ClusterSettings::workers(workers);
    let cpu = Arc::new(Cpu::new(NonZeroUsize::MIN)?);
    let batch = settings.plan(MicrobatchMemory { sample_bytes: 0, workspace_bytes: 0 })?;
    let batch = batch.sharded(sharding);
    let communicators = Communicators::of_cluster(&vec![&*cpu; workers], &cluster, &batch)?;
    // The workers of a process share the threads that decode.
    let columns = Columns::Named(COLUMNS.map(str::to_owned).to_vec());
    let open = |part: &str| -> Result<(u64, TableDecoder)> {
        let table = Table::open(folder.join(part), &columns, &DataSettings::default())?;
        let window_samples = NonZeroU64::MIN.saturating_add(1023);
        let shuffle = ShuffleSettings { order: ShuffleOrder::Window, window_samples, seed: 17 };
        Ok((table.rows(), TableDecoder::new(&table, shuffle, TableSettings::default())?))
    };
    let (samples, evaluation) = (open("train")?.1, open("test")?);
    let per_worker = execute(cluster, move |context| {
        worker(context, &cpu, &batch, &communicators, (samples.clone(), evaluation.clone()))
    })?;
    // Every worker reports each step; evaluations come to the first.
    per_worker.into_iter().next().ok_or_else(|| anyhow::anyhow!("no worker"))
}

fn worker(
    context: &mut WorkerContext<'_>,
    cpu: &Arc<Cpu>,
    batch: &BatchPlan,
    communicators: &Communicators<Cpu>,
    (samples, (test_rows, test)): (TableDecoder, (u64, TableDecoder)),
) -> Result<Losses, Failure> {
    let model = Arc::new(TwoLayers::new());
    let optimizer = OptimizerSettings { learning_rate: 2e-2, ..Default::default() };
    let training = Training {
        // One position, as a measurement is not a sequence.
        plan: Arc::new(TrainingPlan::new(batch.clone(), &model.layout, 1, STEPS)),
        backend: Arc::clone(cpu),
        state: InitialState { parameters: Arc::new(model.initialize(3)), states: None },
        model,
        rule: ScheduledRule::new(&optimizer, ScheduleSettings::default(), STEPS),
        connection: communicators.take(context, cpu)?,
        stop: Arc::new(AtomicBool::new(false)),
        checkpoints: None,
        abort: context.abort().clone(),
    };
    let plan = EvaluationPlan {
        samples: NonZeroU64::new(test_rows).ok_or_else(|| Failure::fix_input("no test rows"))?,
        requests: 0,
        every_steps: NonZeroU64::MIN.saturating_add(STEPS / 4 - 1),
    };
    let evaluation = Evaluation::new(plan, TableSamples::new(test, measurements));
    let losses = Rc::new(RefCell::new(Losses::default()));
    let (of_steps, of_evaluations) = (Rc::clone(&losses), Rc::clone(&losses));
    context.dataflow::<u64, _, _>(|scope| {
        let source = TableSamples::new(samples, measurements);
        let streams = training.build(scope, source, Some(evaluation));
        let keep = move |loss: f64| of_steps.borrow_mut().training.push(loss.to_bits());
        streams.reports.inspect(move |report| keep(report.loss));
        let keep = move |loss: f64| of_evaluations.borrow_mut().evaluation.push(loss.to_bits());
        streams.evaluations.inspect(move |report| keep(report.loss));
    });
    context.run_until_done()?;
    Ok(losses.take())
}

/// Files of 1,500 rows each.
pub fn write(folder: &Path, files: Range<u64>) -> Result<()> {
    std::fs::create_dir(folder)?;
    for file in files {
        let rows = file * 1500..(file + 1) * 1500;
        let of = |column: u64| rows.clone().map(move |row| uniform(row * FEATURES as u64 + column));
        let features: [Vec<f32>; FEATURES] = std::array::from_fn(|at| of(at as u64).collect());
        let [wind, moon, slope] = &features;
        let height = |row: usize| (2.0 * moon[row]).sin() + wind[row] * slope[row];
        let height: Vec<f32> = (0..wind.len()).map(height).collect();
        let columns = features.into_iter().chain([height]);
        let arrays = columns.map(|column| Arc::new(Float32Array::from(column)) as ArrayRef);
        let batch = RecordBatch::try_from_iter(COLUMNS.into_iter().zip(arrays))?;
        let file = File::create(folder.join(format!("{file}.parquet")))?;
        let mut writer = ArrowWriter::try_new(file, batch.schema(), None)?;
        writer.write(&batch)?;
        writer.close()?;
    }
    Ok(())
}

/// A number in [-1, 1) that depends on `seed` alone.
fn uniform(seed: u64) -> f32 {
    let mut x = seed.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    ((x ^ (x >> 31)) >> 40) as f32 / (1 << 23) as f32 - 1.0
}
