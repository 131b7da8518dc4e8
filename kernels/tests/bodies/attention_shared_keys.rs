//! Grouped-query attention has the bits of attention whose keys and values are repeated for each head of queries.

use tidemill_kernels::Backend;
use tidemill_kernels::backend::{AttentionInputs, AttentionSaved, GrowingCache, KeyValueCache};
use tidemill_kernels::shape::AttentionShape;
use tidemill_kernels::{Matrix, Slice, SliceMut};

use super::agreement::{Transcript, assert_same_bits};
use super::arm::Arm;
use super::attention_case::{AttentionCase, attention_shape};
use super::device::{Device, Layout, MARGINS, Placed};
use super::inputs::Inputs;
use super::number::Number;

/// The rows of `values[rows, g p]` with each head repeated for every head of queries that shares it.
fn repeated(values: &[f32], shape: AttentionShape) -> Vec<f32> {
    let heads = values.chunks(shape.head_width());
    heads.flat_map(|head| head.repeat(shape.group())).collect()
}

/// The same case with separate keys and values for every head of queries.
fn with_own_keys(case: &AttentionCase, shape: AttentionShape) -> AttentionCase {
    let (k, v) = (repeated(&case.k, shape), repeated(&case.v, shape));
    AttentionCase { k, v, ..case.clone() }
}

/// All results of training: outputs, sums, and gradients `[b t, 3 h p]`.
fn train<B: Backend<Activation: Number>>(
    device: &mut Device<'_, B>,
    case: &AttentionCase,
    shape: AttentionShape,
) -> [Vec<f32>; 3] {
    let (rows, width, shared) = (shape.sequences().rows(), shape.width(), shape.key_value_width());
    let all = width + 2 * shared;
    let mut part = |first, columns, values: &[f32]| {
        let layout = Layout::columns_of(rows, all, first, columns);
        Placed::<B, B::Activation>::new(device, layout, values)
    };
    let q = part(0, width, &case.q);
    let k = part(width, shared, &case.k);
    let v = part(width + shared, shared, &case.v);
    let slopes = case.slopes.as_ref();
    let slopes = slopes.map(|slopes| Placed::<B>::new(device, Layout::range(slopes.len()), slopes));
    let starts = case.starts.as_ref().map(|starts| device.upload(starts));
    let dout = Placed::<B, B::Activation>::new(device, Layout::packed(rows, width), &case.dout);
    let mut out = Placed::<B, B::Activation>::poisoned(device, Layout::packed(rows, width));
    let mut sums = Placed::<B>::poisoned(device, Layout::range(rows * shape.heads()));
    let mut dqkv =
        Placed::<B, B::Activation>::poisoned(device, Layout::inside_wider(rows, 3 * width));
    let inputs = AttentionInputs {
        q: q.matrix(),
        k: k.matrix(),
        v: v.matrix(),
        slopes: slopes.as_ref().map(Placed::slice),
        starts: starts.as_ref().map(Slice::all),
    };
    let (backend, stream) = (device.backend, &mut device.stream);
    let (y, lse) = (out.matrix_mut(), sums.slice_mut());
    backend.attention_forward(stream, y, lse, inputs, shape).unwrap();
    let (dout, out_of) = (dout.matrix(), out.matrix());
    let saved = AttentionSaved { dout, inputs, out: out_of, log_sum_exp: sums.slice() };
    backend.attention_backward(stream, dqkv.matrix_mut(), saved, shape).unwrap();
    [out.read(device), sums.read(device), dqkv.read(device)]
}

/// Samples and positions, heads of queries and the width of a head, heads of keys and values, window.
type Sizes = ([usize; 2], [usize; 2], usize, Option<usize>);

fn shapes(device: &Device<'_, impl Backend>) -> Vec<(AttentionShape, AttentionShape)> {
    let full: Vec<Sizes> = vec![
        ([2, 130], [4, 64], 2, None),
        ([1, 70], [6, 5], 2, Some(9)),
        ([2, 65], [3, 40], 1, None),
        ([1, 200], [8, 128], 2, None),
        ([1, 40], [2, 256], 1, None),
    ];
    let small = vec![
        ([2, 70], [4, 16], 2, None),
        ([1, 9], [6, 5], 2, Some(4)),
        ([1, 66], [3, 40], 1, None),
        ([1, 33], [4, 128], 2, None),
        ([1, 3], [2, 256], 1, None),
    ];
    let shape = |(rows, heads, shared, window): Sizes| {
        let own = attention_shape(rows, heads, 0.3, window);
        (own.with_key_value_heads(shared).unwrap(), own)
    };
    device.sizes.choose(full, small).into_iter().map(shape).collect()
}

fn case_of<T: Number>(seed: usize, shape: AttentionShape) -> AttentionCase {
    let inputs = &mut Inputs::new(seed as u64);
    let mut case = AttentionCase::new::<T>(inputs, shape);
    let shared = shape.sequences().rows() * shape.key_value_width();
    case.k.truncate(shared);
    case.v.truncate(shared);
    if seed.is_multiple_of(2) {
        case.with_slopes(shape)
    } else {
        case.with_documents(inputs, shape, 20)
    }
}

/// Forward and backward; every head of queries writes its own part of the gradients of keys and values.
pub fn are_repeated_keys<B: Backend<Activation: Number>>(arm: &Arm<B>) -> Transcript {
    let mut device = Device::new(arm);
    let mut transcript = Transcript::default();
    for (seed, (shape, own)) in shapes(&device).into_iter().enumerate() {
        device.margin = MARGINS[seed % 2];
        let case = case_of::<B::Activation>(seed, shape);
        let found = train(&mut device, &case, shape);
        let expected = train(&mut device, &with_own_keys(&case, shape), own);
        for (what, (found, expected)) in
            ["out", "log_sum_exp", "dqkv"].into_iter().zip(found.iter().zip(&expected))
        {
            let label = format!("{shape:?} seed {seed} {what}");
            assert_same_bits(&label, found, expected);
            transcript.record(&label, found);
        }
    }
    transcript
}

/// All positions but the last from a cache at once, and the last as a step: both outputs, and the final cache of keys.
fn generate<B: Backend<Activation: Number>>(
    device: &mut Device<'_, B>,
    case: &AttentionCase,
    shape: AttentionShape,
) -> [Vec<f32>; 3] {
    let (samples, t) = (shape.sequences().samples(), shape.sequences().positions());
    let (width, shared, capacity) = (shape.width(), shape.key_value_width(), t + 3);
    let mut cache = || {
        Placed::<B, B::Activation>::new(
            device,
            Layout::range(samples * capacity * shared),
            &vec![0.0; samples * capacity * shared],
        )
    };
    let (mut keys, mut values) = (cache(), cache());
    let q = device.upload(&narrowed::<B>(&case.q));
    let k = device.upload(&narrowed::<B>(&case.k));
    let v = device.upload(&narrowed::<B>(&case.v));
    let slopes = case.slopes.as_ref();
    let slopes = slopes.map(|slopes| Placed::<B>::new(device, Layout::range(slopes.len()), slopes));
    let mut outs = Vec::new();
    for (first, count) in [(0, t - 1), (t - 1, 1)] {
        let new = attention_shape(
            [samples, count],
            [shape.heads(), shape.head_width()],
            shape.scale(),
            shape.window().map(std::num::NonZeroUsize::get),
        );
        let new = new.with_key_value_heads(shape.key_value_heads()).unwrap();
        // Sample by sample: the rows of a piece are contiguous.
        let piece = |device: &mut Device<'_, B>, buffer: &B::Buffer<B::Activation>, columns| {
            let all: Vec<B::Activation> = device.download(buffer);
            let rows = (0..samples)
                .flat_map(|b| all[(b * t + first) * columns..][..count * columns].to_vec());
            let rows: Vec<_> = rows.collect();
            device.upload(&rows)
        };
        let [q, k, v] = [(&q, width), (&k, shared), (&v, shared)]
            .map(|(buffer, columns)| piece(device, buffer, columns));
        let past = device.upload(&vec![first as u32; samples]);
        let layout = Layout::packed(samples * count, width);
        let mut out = Placed::<B, B::Activation>::poisoned(device, layout);
        let (backend, stream) = (device.backend, &mut device.stream);
        fn rows<B: Backend>(
            buffer: &B::Buffer<B::Activation>,
            rows: usize,
            columns: usize,
        ) -> Matrix<'_, B, B::Activation> {
            Matrix::new(buffer, 0, rows, columns, columns, 1).unwrap()
        }
        let [q, k, v] = [(&q, width), (&k, shared), (&v, shared)]
            .map(|(buffer, columns)| rows::<B>(buffer, samples * count, columns));
        let slopes = slopes.as_ref().map(Placed::slice);
        let past = Slice::all(&past);
        if first == 0 {
            for (cache, rows) in [(&mut keys, k), (&mut values, v)] {
                let cache: SliceMut<'_, B, _> = cache.slice_mut();
                backend.append_to_cache(stream, cache, rows, past, capacity).unwrap();
            }
            let cache = KeyValueCache {
                keys: keys.slice(),
                values: values.slice(),
                capacity,
                past,
                slopes,
            };
            backend.attention_cached(stream, out.matrix_mut(), q, cache, new).unwrap();
        } else {
            let cache = GrowingCache {
                keys: keys.slice_mut(),
                values: values.slice_mut(),
                capacity,
                past,
                slopes,
            };
            backend.attention_step(stream, out.matrix_mut(), [q, k, v], cache, new).unwrap();
        }
        outs.push(out.read(device));
    }
    let [cached, step] = outs.try_into().unwrap();
    [cached, step, keys.read(device)]
}

fn narrowed<B: Backend<Activation: Number>>(values: &[f32]) -> Vec<B::Activation> {
    values.iter().map(|&x| B::Activation::rounded(x)).collect()
}

/// From a cache, and step by step; the cache holds only the shared heads.
pub fn are_repeated_in_caches<B: Backend<Activation: Number>>(arm: &Arm<B>) -> Transcript {
    let mut device = Device::new(arm);
    let mut transcript = Transcript::default();
    for (seed, (shape, own)) in shapes(&device).into_iter().enumerate() {
        device.margin = MARGINS[seed % 2];
        let case = AttentionCase { starts: None, ..case_of::<B::Activation>(seed, shape) };
        let [cached, step, keys] = generate(&mut device, &case, shape);
        let repeated_case = with_own_keys(&case, shape);
        let [own_cached, own_step, own_keys] = generate(&mut device, &repeated_case, own);
        let label = format!("{shape:?} seed {seed}");
        assert_same_bits(&format!("{label} cached"), &cached, &own_cached);
        assert_same_bits(&format!("{label} step"), &step, &own_step);
        assert_same_bits(&format!("{label} keys"), &repeated(&keys, shape), &own_keys);
        transcript.record(&label, &cached);
        transcript.record(&label, &step);
    }
    transcript
}
