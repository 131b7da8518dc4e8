//! Causal attention, as a transformer block of the size's width calls it.

use tidemill_kernels::backend::{
    AttentionInputs, AttentionSaved, NormGradient, NormGradients, NormInput, NormInputs, NormSaved,
    RotaryInputs,
};
use tidemill_kernels::shape::{AttentionShape, GrainRows, NormShape, SequenceShape};
use tidemill_kernels::{Backend, KernelError, Slice, SliceMut};

use super::SequenceSize;
use super::measure::{Bench, Measured, Measurement, Work};

/// The heads of a model of width d, and how wide they are: 64 in small models, 128 in others.
fn heads(width: usize) -> [usize; 2] {
    let head_width = if width < 1024 { 64 } else { 128 };
    [(width / head_width).max(1), head_width]
}

/// Heads of keys and values: a quarter of those of queries where they are so many.
fn shared_heads(heads: usize) -> usize {
    if heads.is_multiple_of(4) { heads / 4 } else { heads }
}

/// The kinds of attention that are measured.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    /// Every head has keys and values of its own.
    Plain,
    Alibi,
    /// Heads of queries share keys and values in fours.
    SharedKeys,
}

pub(super) fn attention<B: Backend>(bench: &mut Bench<'_, B>, size: SequenceSize) -> Measured {
    measure(bench, size, "attention", Kind::Plain)
}

pub(super) fn attention_shared_keys<B: Backend>(
    bench: &mut Bench<'_, B>,
    size: SequenceSize,
) -> Measured {
    measure(bench, size, "attention_shared_keys", Kind::SharedKeys)
}

pub(super) fn attention_alibi<B: Backend>(
    bench: &mut Bench<'_, B>,
    size: SequenceSize,
) -> Measured {
    measure(bench, size, "attention_alibi", Kind::Alibi)
}

fn measure<B: Backend>(
    bench: &mut Bench<'_, B>,
    size: SequenceSize,
    kernel: &'static str,
    kind: Kind,
) -> Measured {
    let SequenceSize { samples, positions, .. } = size;
    let rows = size.rows();
    let [heads, head_width] = heads(size.width());
    let sequences = SequenceShape::new(samples, positions)?;
    let scale = 1.0 / (head_width as f32).sqrt();
    let shared = if kind == Kind::SharedKeys { shared_heads(heads) } else { heads };
    let shape = AttentionShape::new(sequences, heads, head_width, scale, None)?;
    let shape = shape.with_key_value_heads(shared)?;
    let (width, shared_width) = (shape.width(), shape.key_value_width());
    let columns = width + 2 * shared_width;
    // Gradients of keys and values are those of each head of queries.
    let gradient_columns = 3 * width;
    let qkv = bench.activations(rows * columns)?;
    let slopes = match kind {
        Kind::Plain | Kind::SharedKeys => None,
        Kind::Alibi => Some(bench.floats(heads, [0.004, 0.5])?),
    };
    let dout = bench.activations(rows * width)?;
    let mut out = bench.room::<B::Activation>(rows * width)?;
    let mut log_sum_exp = bench.room::<f32>(rows * heads)?;
    let mut dqkv = bench.room::<B::Activation>(rows * gradient_columns)?;
    let inputs = || -> Result<AttentionInputs<'_, B>, KernelError> {
        let qkv = Slice::all(&qkv).matrix(rows, columns)?;
        Ok(AttentionInputs {
            q: qkv.columns(0, width)?,
            k: qkv.columns(width, shared_width)?,
            v: qkv.columns(width + shared_width, shared_width)?,
            slopes: slopes.as_ref().map(Slice::all),
            starts: None,
        })
    };
    let forward = bench.milliseconds(|backend, stream| {
        let out = SliceMut::all(&mut out).matrix(rows, width)?;
        backend.attention_forward(stream, out, SliceMut::all(&mut log_sum_exp), inputs()?, shape)
    })?;
    let backward = bench.milliseconds(|backend, stream| {
        backend.attention_backward(
            stream,
            SliceMut::all(&mut dqkv).matrix(rows, gradient_columns)?,
            AttentionSaved {
                dout: Slice::all(&dout).matrix(rows, width)?,
                inputs: inputs()?,
                out: Slice::all(&out).matrix(rows, width)?,
                log_sum_exp: Slice::all(&log_sum_exp),
            },
            shape,
        )
    })?;
    let bytes = |columns: usize| bench.activation_bytes() * (rows * columns) as f64;
    let shown = if shared == heads { format!("{heads}") } else { format!("{heads} of {shared}") };
    // For each pair of a query and a visible key: two products forward, five backward.
    let pairs = (samples * heads) as f64 * positions as f64 * (positions + 1) as f64 / 2.0;
    let product = 2.0 * pairs * head_width as f64;
    let line = |direction, milliseconds, bytes, products: f64| Measurement {
        kernel,
        direction,
        shape: format!("({samples}, {shown} heads, {positions}, {head_width})"),
        work: Work { bytes, operations: products * product },
        milliseconds,
    };
    Ok(vec![
        line("forward", forward, bytes(columns + width), 2.0),
        line("backward", backward, bytes(columns + 2 * width + gradient_columns), 5.0),
    ])
}

/// Rotary positions of a model whose heads of queries share keys and values in fours, where they are so many.
pub(super) fn rotary<B: Backend>(bench: &mut Bench<'_, B>, size: SequenceSize) -> Measured {
    let rows = size.rows();
    let [heads, head_width] = heads(size.width());
    let shared = shared_heads(heads);
    let sequences = SequenceShape::new(size.samples, size.positions)?;
    let shape = AttentionShape::new(sequences, heads, head_width, 1.0, None)?;
    let shape = shape.with_key_value_heads(shared)?;
    let (turned, width) = (shape.width() + shape.key_value_width(), shape.width());
    let table = bench.floats(size.positions * head_width, [-1.0, 1.0])?;
    let mut qk = bench.activations(rows * turned)?;
    let mut dqkv = bench.activations(rows * 3 * width)?;
    let inputs = || RotaryInputs { table: Slice::all(&table), starts: None, past: None };
    let forward = bench.milliseconds(|backend, stream| {
        let qk = SliceMut::all(&mut qk).matrix(rows, turned)?;
        backend.rotary_forward(stream, qk, inputs(), shape)
    })?;
    let backward = bench.milliseconds(|backend, stream| {
        let dqkv = SliceMut::all(&mut dqkv).matrix(rows, 3 * width)?;
        backend.rotary_backward(stream, dqkv, inputs(), shape)
    })?;
    let bytes = |columns: usize| bench.activation_bytes() * (rows * columns) as f64;
    let left = width + 2 * shape.key_value_width();
    let line = |direction, work, milliseconds| Measurement {
        kernel: "rotary",
        direction,
        shape: format!("({}, {}, {heads} of {shared}, {head_width})", size.samples, size.positions),
        work: Work::bytes(work),
        milliseconds,
    };
    Ok(vec![
        line("forward", bytes(2 * turned), forward),
        line("backward", bytes(3 * width + left), backward),
    ])
}

/// The norm of each head of queries.
pub(super) fn rms_norm_heads<B: Backend>(bench: &mut Bench<'_, B>, size: SequenceSize) -> Measured {
    let [heads, head_width] = heads(size.width());
    let (rows, columns) = (size.rows(), heads * head_width);
    let grains = GrainRows::new(rows, size.positions)?;
    let shape = NormShape::rms_of_heads(grains, heads, head_width, 1e-6)?;
    let (x, weight) = (bench.activations(rows * columns)?, bench.floats(head_width, [0.5, 1.5])?);
    let mut gradient = bench.activations(rows * columns)?;
    let mut y = bench.room::<B::Activation>(rows * columns)?;
    let mut reciprocal_rms = bench.room::<f32>(rows * heads)?;
    let mut dweight = bench.room::<f32>(grains.grains() * head_width)?;
    let input = || Slice::all(&x).matrix(rows, columns).map(NormInput::Activation);
    let forward = bench.milliseconds(|backend, stream| {
        let y = SliceMut::all(&mut y).matrix(rows, columns)?;
        let reciprocal_rms = SliceMut::all(&mut reciprocal_rms);
        let inputs = NormInputs { x: input()?, weight: Slice::all(&weight), bias: None };
        backend.norm_forward(stream, y, reciprocal_rms, inputs, shape)
    })?;
    let backward = bench.milliseconds(|backend, stream| {
        let gradient = SliceMut::all(&mut gradient).matrix(rows, columns)?;
        let gradients = NormGradients {
            x: NormGradient::InPlace(gradient),
            dweight: SliceMut::all(&mut dweight),
            dbias: None,
        };
        let (statistics, weight) = (Slice::all(&reciprocal_rms), Slice::all(&weight));
        let saved = NormSaved { x: input()?, statistics, weight };
        backend.norm_backward(stream, gradients, saved, shape)
    })?;
    let line = |direction, arrays: usize, milliseconds| Measurement {
        kernel: "rms_norm_heads",
        direction,
        shape: format!("({rows}, {heads}, {head_width})"),
        work: Work::bytes(bench.activation_bytes() * (arrays * rows * columns) as f64),
        milliseconds,
    };
    Ok(vec![line("forward", 2, forward), line("backward", 3, backward)])
}
