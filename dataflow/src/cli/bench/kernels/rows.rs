//! Kernels over rows and over the arena of parameters: bound by bytes, all of them.

use tidemill_kernels::backend::{
    AdamWStep, LionStep, LogitGradient, NormGradient, NormGradients, NormInput, NormInputs,
    NormSaved, Output,
};
use tidemill_kernels::master::remainder_elements;
use tidemill_kernels::shape::{CrossEntropyShape, GrainRows, NormShape};
use tidemill_kernels::{Backend, MasterMut, MemoryPlace, Slice, SliceMut};

use super::SequenceSize;
use super::measure::{Bench, Measured, Measurement, Work};

/// The first step of an optimizer's common settings.
const FIRST_STEP: AdamWStep = AdamWStep {
    learning_rate: 1e-3,
    beta1: 0.9,
    beta2: 0.95,
    eps: 1e-8,
    decay_factor: 0.999,
    bias_correction1: 0.1,
    bias_correction2: 0.05,
    gradient_scale: 1.0,
};

/// Elements of a piece of the arena that fills the device.
fn arena_elements<B: Backend>(bench: &Bench<'_, B>) -> usize {
    match bench.backend.memory() {
        MemoryPlace::Device => 1 << 27,
        MemoryPlace::Host => 1 << 22,
    }
}

/// Tokens of a vocabulary of common size.
fn vocab_size<B: Backend>(bench: &Bench<'_, B>) -> usize {
    match bench.backend.memory() {
        MemoryPlace::Device => 50_280,
        MemoryPlace::Host => 4096,
    }
}

pub(super) fn rms_norm<B: Backend>(bench: &mut Bench<'_, B>, size: SequenceSize) -> Measured {
    let (rows, d) = (size.rows(), size.width());
    let grains = GrainRows::new(rows, size.positions)?;
    let shape = NormShape::rms(grains, d, 1e-5)?;
    let (x, weight) = (bench.floats(rows * d, [-1.0, 1.0])?, bench.floats(d, [0.5, 1.5])?);
    let dy = bench.activations(rows * d)?;
    let mut y = bench.room::<B::Activation>(rows * d)?;
    let mut reciprocal_rms = bench.room::<f32>(rows)?;
    let mut dx = bench.room::<f32>(rows * d)?;
    let mut rounded = bench.room::<B::Activation>(rows * d)?;
    let mut dweight = bench.room::<f32>(grains.grains() * d)?;
    let forward = bench.milliseconds(|backend, stream| {
        let y = SliceMut::all(&mut y).matrix(rows, d)?;
        let x = NormInput::Residual(Slice::all(&x).matrix(rows, d)?);
        let reciprocal_rms = SliceMut::all(&mut reciprocal_rms);
        let inputs = NormInputs { x, weight: Slice::all(&weight), bias: None };
        backend.norm_forward(stream, y, reciprocal_rms, inputs, shape)
    })?;
    let backward = bench.milliseconds(|backend, stream| {
        let gradients = NormGradients {
            x: NormGradient::Residual {
                dx: SliceMut::all(&mut dx).matrix(rows, d)?,
                rounded: Some(SliceMut::all(&mut rounded).matrix(rows, d)?),
                dy: Slice::all(&dy).matrix(rows, d)?,
            },
            dweight: SliceMut::all(&mut dweight),
            dbias: None,
        };
        let x = NormInput::Residual(Slice::all(&x).matrix(rows, d)?);
        let (statistics, weight) = (Slice::all(&reciprocal_rms), Slice::all(&weight));
        backend.norm_backward(stream, gradients, NormSaved { x, statistics, weight }, shape)
    })?;
    Ok(norm_lines("rms_norm", [rows, d], bench.activation_bytes(), [forward, backward]))
}

pub(super) fn layer_norm<B: Backend>(bench: &mut Bench<'_, B>, size: SequenceSize) -> Measured {
    let (rows, d) = (size.rows(), size.width());
    let grains = GrainRows::new(rows, size.positions)?;
    let shape = NormShape::layer(grains, d, 1e-5)?;
    let residual = bench.floats(rows * d, [-1.0, 1.0])?;
    let (weight, bias) = (bench.floats(d, [0.5, 1.5])?, bench.floats(d, [-0.5, 0.5])?);
    let grad_out = bench.activations(rows * d)?;
    let mut out = bench.room::<B::Activation>(rows * d)?;
    let mut statistics = bench.room::<f32>(2 * rows)?;
    let mut grad_residual = bench.room::<f32>(rows * d)?;
    let mut rounded = bench.room::<B::Activation>(rows * d)?;
    let mut dweight = bench.room::<f32>(grains.grains() * d)?;
    let mut dbias = bench.room::<f32>(grains.grains() * d)?;
    let forward = bench.milliseconds(|backend, stream| {
        let y = SliceMut::all(&mut out).matrix(rows, d)?;
        let x = NormInput::Residual(Slice::all(&residual).matrix(rows, d)?);
        let (weight, bias) = (Slice::all(&weight), Some(Slice::all(&bias)));
        let statistics = SliceMut::all(&mut statistics);
        backend.norm_forward(stream, y, statistics, NormInputs { x, weight, bias }, shape)
    })?;
    let backward = bench.milliseconds(|backend, stream| {
        let dx = SliceMut::all(&mut grad_residual).matrix(rows, d)?;
        let dy = Slice::all(&grad_out).matrix(rows, d)?;
        let x = NormInput::Residual(Slice::all(&residual).matrix(rows, d)?);
        let rounded = Some(SliceMut::all(&mut rounded).matrix(rows, d)?);
        let gradient = NormGradient::Residual { dx, rounded, dy };
        let (dweight, dbias) = (SliceMut::all(&mut dweight), Some(SliceMut::all(&mut dbias)));
        let (statistics, weight) = (Slice::all(&statistics), Slice::all(&weight));
        let gradients = NormGradients { x: gradient, dweight, dbias };
        backend.norm_backward(stream, gradients, NormSaved { x, statistics, weight }, shape)
    })?;
    Ok(norm_lines("layer_norm", [rows, d], bench.activation_bytes(), [forward, backward]))
}

/// Forward reads the fp32 residual stream; backward does too, and adds to its gradient, which it leaves rounded as well.
fn norm_lines(
    kernel: &'static str,
    [rows, d]: [usize; 2],
    activation: f64,
    [forward, backward]: [f64; 2],
) -> Vec<Measurement> {
    let elements = (rows * d) as f64;
    let line = |direction, bytes_each, milliseconds| Measurement {
        kernel,
        direction,
        shape: format!("({rows}, {d})"),
        work: Work::bytes(elements * bytes_each),
        milliseconds,
    };
    vec![
        line("forward", 4.0 + activation, forward),
        line("backward", 12.0 + 2.0 * activation, backward),
    ]
}

pub(super) fn embedding<B: Backend>(bench: &mut Bench<'_, B>, size: SequenceSize) -> Measured {
    let (rows, d, v) = (size.rows(), size.width(), vocab_size(bench));
    let grains = GrainRows::new(rows, size.positions)?;
    let table = bench.floats(v * d, [-1.0, 1.0])?;
    let tokens = bench.tokens(rows, v)?;
    let mut out = bench.room::<f32>(rows * d)?;
    let forward = bench.milliseconds(|backend, stream| {
        let out = SliceMut::all(&mut out).matrix(rows, d)?;
        let table = Slice::all(&table).matrix(v, d)?;
        backend.embedding_forward(stream, out, table, Slice::all(&tokens), Output::Overwrite)
    })?;
    let mut lane = table;
    let backward = bench.milliseconds(|backend, stream| {
        let lane = SliceMut::all(&mut lane).matrix(v, d)?;
        let dout = Slice::all(&out).matrix(rows, d)?;
        backend.embedding_backward_add(stream, lane, dout, Slice::all(&tokens), grains)
    })?;
    let elements = (rows * d) as f64;
    let line = |direction, work, milliseconds| Measurement {
        kernel: "embedding",
        direction,
        shape: format!("({rows}, {d}, vocabulary {v})"),
        work,
        milliseconds,
    };
    // Random tokens hardly repeat within a grain: nearly every row meets a row of the lane.
    Ok(vec![
        line("forward", Work::bytes(8.0 * elements), forward),
        line("backward", Work::bytes(12.0 * elements), backward),
    ])
}

pub(super) fn cross_entropy<B: Backend>(bench: &mut Bench<'_, B>, size: SequenceSize) -> Measured {
    let v = vocab_size(bench);
    let rows = bench.backend.logit_chunk_rows().min(size.rows());
    let shape = CrossEntropyShape::new(rows, v, v)?;
    let mut logits = bench.activations(rows * v)?;
    let targets = bench.tokens(rows, v)?;
    let mut losses = bench.room::<f32>(rows)?;
    let milliseconds = bench.milliseconds(|backend, stream| {
        let (losses, logits) = (SliceMut::all(&mut losses), SliceMut::all(&mut logits));
        let gradient = LogitGradient::InPlace;
        backend.cross_entropy(stream, losses, logits, Slice::all(&targets), gradient, shape)
    })?;
    Ok(vec![Measurement {
        kernel: "cross_entropy",
        direction: "both",
        shape: format!("({rows}, {v})"),
        work: Work::bytes(2.0 * bench.activation_bytes() * (rows * v) as f64),
        milliseconds,
    }])
}

pub(super) fn adamw<B: Backend>(bench: &mut Bench<'_, B>, _: SequenceSize) -> Measured {
    let elements = arena_elements(bench);
    let gradient = bench.floats(elements, [-1.0, 1.0])?;
    let mut parameters = bench.room::<f32>(elements)?;
    let mut exp_avg = bench.room::<f32>(elements)?;
    let mut exp_avg_sq = bench.room::<f32>(elements)?;
    let milliseconds = bench.milliseconds(|backend, stream| {
        backend.adamw(
            stream,
            SliceMut::all(&mut parameters),
            [SliceMut::all(&mut exp_avg), SliceMut::all(&mut exp_avg_sq)],
            Slice::all(&gradient),
            FIRST_STEP,
        )
    })?;
    let work = Work::bytes(28.0 * elements as f64);
    Ok(vec![arena_line("adamw", "update", elements, work, milliseconds)])
}

/// The copy that products read is part of the master: no rounding follows.
pub(super) fn adamw_master<B: Backend>(bench: &mut Bench<'_, B>, _: SequenceSize) -> Measured {
    let elements = arena_elements(bench);
    let gradient = bench.floats(elements, [-1.0, 1.0])?;
    let mut rounded = bench.room::<B::Activation>(elements)?;
    let mut remainder = bench.room::<u16>(remainder_elements::<B>(elements))?;
    let mut exp_avg = bench.room::<f32>(elements)?;
    let mut exp_avg_sq = bench.room::<f32>(elements)?;
    let milliseconds = bench.milliseconds(|backend, stream| {
        backend.adamw_master(
            stream,
            MasterMut::new(SliceMut::all(&mut rounded), SliceMut::all(&mut remainder))?,
            [SliceMut::all(&mut exp_avg), SliceMut::all(&mut exp_avg_sq)],
            Slice::all(&gradient),
            FIRST_STEP,
        )
    })?;
    let work = Work::bytes(28.0 * elements as f64);
    Ok(vec![arena_line("adamw_master", "update", elements, work, milliseconds)])
}

/// The update of Lion, with masters as a run has them.
pub(super) fn lion<B: Backend>(bench: &mut Bench<'_, B>, _: SequenceSize) -> Measured {
    let elements = arena_elements(bench);
    let gradient = bench.floats(elements, [-1.0, 1.0])?;
    let mut rounded = bench.room::<B::Activation>(elements)?;
    let mut remainder = bench.room::<u16>(remainder_elements::<B>(elements))?;
    let mut exp_avg = bench.room::<f32>(elements)?;
    let step = LionStep {
        learning_rate: 1e-4,
        beta1: 0.9,
        beta2: 0.99,
        decay_factor: 0.999,
        gradient_scale: 1.0,
    };
    let milliseconds = bench.milliseconds(|backend, stream| {
        let master = MasterMut::new(SliceMut::all(&mut rounded), SliceMut::all(&mut remainder))?;
        backend.lion(stream, master, SliceMut::all(&mut exp_avg), Slice::all(&gradient), step)
    })?;
    let work = Work::bytes(20.0 * elements as f64);
    Ok(vec![arena_line("lion", "update", elements, work, milliseconds)])
}

pub(super) fn accumulate<B: Backend>(bench: &mut Bench<'_, B>, _: SequenceSize) -> Measured {
    let elements = arena_elements(bench);
    let gradient = bench.floats(elements, [-1.0, 1.0])?;
    let mut lane = bench.room::<f32>(elements)?;
    let milliseconds = bench.milliseconds(|backend, stream| {
        backend.accumulate(stream, SliceMut::all(&mut lane), Slice::all(&gradient))
    })?;
    let work = Work::bytes(12.0 * elements as f64);
    Ok(vec![arena_line("accumulate", "backward", elements, work, milliseconds)])
}

pub(super) fn sums_of_squares<B: Backend>(bench: &mut Bench<'_, B>, _: SequenceSize) -> Measured {
    let elements = arena_elements(bench);
    let gradient = bench.floats(elements, [-1.0, 1.0])?;
    let ends: Vec<usize> = (1..=elements >> 16).map(|chunk| chunk << 16).collect();
    let mut sums = bench.backend.allocate::<f64>(bench.stream, ends.len())?;
    let milliseconds = bench.milliseconds(|backend, stream| {
        let out = SliceMut::all(&mut sums);
        backend.sums_of_squares(stream, out, Slice::all(&gradient), &ends)
    })?;
    let work = Work::bytes(4.0 * elements as f64);
    Ok(vec![arena_line("sums_of_squares", "update", elements, work, milliseconds)])
}

fn arena_line(
    kernel: &'static str,
    direction: &'static str,
    elements: usize,
    work: Work,
    milliseconds: f64,
) -> Measurement {
    Measurement { kernel, direction, shape: format!("({elements})"), work, milliseconds }
}
