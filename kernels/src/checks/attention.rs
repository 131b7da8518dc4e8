//! Attention, whole and from a cache.

use super::checker::Checker;
use crate::backend::{
    ActivationElement, AttentionInputs, AttentionSaved, Backend, GrowingCache, KeyValueCache,
    RotaryInputs,
};
use crate::error::Result;
use crate::reference::attention as defined;
use crate::reference::rotary as turned;
use crate::shape::{AttentionShape, SequenceShape};
use crate::view::{Matrix, Slice, SliceMut};

/// Samples, positions, heads of queries, the width of a head, and heads of keys and values.
const SIZES: [[usize; 5]; 3] = [[2, 9, 3, 5, 3], [1, 75, 2, 64, 2], [1, 20, 4, 64, 2]];

pub(super) fn attention<B: Backend>(checker: &mut Checker<'_, B>) -> Result<()> {
    // Probabilities and their gradients are rounded too, and differences of them remain.
    checker.roundings = 8.0;
    for [samples, positions, heads, head_width, shared] in SIZES {
        let sequences = SequenceShape::new(samples, positions)?;
        let scale = 1.0 / (head_width as f32).sqrt();
        let shape = AttentionShape::new(sequences, heads, head_width, scale, None)?;
        let shape = shape.with_key_value_heads(shared)?;
        let (rows, width, shared) = (samples * positions, shape.width(), shape.key_value_width());
        let [q, dout] = [(); 2].map(|()| checker.activations(rows * width));
        let [k, v] = [(); 2].map(|()| checker.activations(rows * shared));
        let (q, k, v, dout) = (q?, k?, v?, dout?);
        let slopes = checker.numbers::<f32>(heads, [0.0, 0.2])?;
        let mut out = checker.room::<B::Activation>(rows * width)?;
        let mut sums = checker.room::<f32>(rows * heads)?;
        let mut gradients = checker.room::<B::Activation>(rows * 3 * width)?;
        let (backend, stream) = (checker.backend, &mut checker.stream);
        let inputs = AttentionInputs {
            q: q.matrix(width)?,
            k: k.matrix(shared)?,
            v: v.matrix(shared)?,
            slopes: Some(slopes.slice()),
            starts: None,
        };
        let results = out.matrix_mut(width)?;
        backend.attention_forward(stream, results, sums.slice_mut(), inputs, shape)?;
        let (dout_of, out_of) = (dout.matrix(width)?, out.matrix(width)?);
        let saved =
            AttentionSaved { dout: dout_of, inputs, out: out_of, log_sum_exp: sums.slice() };
        backend.attention_backward(stream, gradients.matrix_mut(3 * width)?, saved, shape)?;
        let wide = defined::AttentionInputs {
            q: &q.wide,
            k: &k.wide,
            v: &v.wide,
            slopes: Some(&slopes.wide),
            starts: None,
        };
        let forward = defined::forward(&wide, shape);
        let backward = defined::backward(&dout.wide, &wide, shape);
        checker.compare("attention_forward", &out, &forward.out)?;
        checker.compare("attention_forward, log_sum_exp", &sums, &forward.log_sum_exp)?;
        let of_row = |row: usize| {
            let part = row * width..(row + 1) * width;
            [&backward.dq[part.clone()], &backward.dk[part.clone()], &backward.dv[part]].concat()
        };
        let expected: Vec<f64> = (0..rows).flat_map(of_row).collect();
        checker.compare("attention_backward", &gradients, &expected)?;

        let past = checker.write(&vec![0_u32; samples])?;
        let mut caches = [(); 2].map(|()| checker.room::<B::Activation>(rows * shared));
        let mut again = checker.room::<B::Activation>(rows * width)?;
        let (backend, stream) = (checker.backend, &mut checker.stream);
        for (cache, from) in caches.iter_mut().zip([&k, &v]) {
            let Ok(cache) = cache else { continue };
            let (into, from) = (SliceMut::all(&mut cache.buffer), from.matrix(shared)?);
            backend.append_to_cache(stream, into, from, Slice::all(&past), positions)?;
        }
        let [keys, values] = caches;
        let (mut keys, mut values) = (keys?, values?);
        let cache = KeyValueCache {
            keys: keys.slice(),
            values: values.slice(),
            capacity: positions,
            past: Slice::all(&past),
            slopes: Some(slopes.slice()),
        };
        let (results, queries) = (again.matrix_mut(width)?, q.matrix(width)?);
        backend.attention_cached(stream, results, queries, cache, shape)?;
        checker.compare("attention_cached", &again, &forward.out)?;

        // The last position once more.
        let past = checker.write(&vec![positions as u32 - 1; samples])?;
        let mut last = checker.room::<B::Activation>(samples * width)?;
        let (backend, stream) = (checker.backend, &mut checker.stream);
        let rows = [(&q.buffer, width), (&k.buffer, shared), (&v.buffer, shared)];
        let rows = rows.map(|(all, columns)| {
            let last = (positions - 1) * columns;
            Matrix::new(all, last, samples, columns, positions * columns, 1)
        });
        let [q, k, v] = rows;
        let rows = [q?, k?, v?];
        let cache = GrowingCache {
            keys: keys.slice_mut(),
            values: values.slice_mut(),
            capacity: positions,
            past: Slice::all(&past),
            slopes: Some(slopes.slice()),
        };
        let new = AttentionShape::new(
            SequenceShape::new(samples, 1)?,
            shape.heads(),
            shape.head_width(),
            shape.scale(),
            shape.window(),
        )?
        .with_key_value_heads(shape.key_value_heads())?;
        backend.attention_step(stream, last.matrix_mut(width)?, rows, cache, new)?;
        let of_last = |sample: usize| {
            ((sample + 1) * positions - 1) * width..(sample + 1) * positions * width
        };
        let expected: Vec<f64> =
            (0..samples).flat_map(|sample| forward.out[of_last(sample)].to_vec()).collect();
        checker.compare("attention_step", &last, &expected)?;
    }
    Ok(())
}

pub(super) fn rotary<B: Backend>(checker: &mut Checker<'_, B>) -> Result<()> {
    for [samples, positions, heads, head_width, shared] in [[2, 9, 3, 6, 3], [1, 75, 4, 64, 2]] {
        let sequences = SequenceShape::new(samples, positions)?;
        let shape = AttentionShape::new(sequences, heads, head_width, 1.0, None)?;
        let shape = shape.with_key_value_heads(shared)?;
        let (rows, width, shared) = (samples * positions, shape.width(), shape.key_value_width());
        // Any numbers are as good as cosines.
        let table = checker.numbers::<f32>((positions + 3) * head_width, [-1.0, 1.0])?;
        let starts: Vec<u32> = (0..rows).map(|row| (row % positions / 4 * 4) as u32).collect();
        let past: Vec<u32> = (0..samples).map(|sample| 3 - sample as u32).collect();
        let mut qk = checker.activations(rows * (width + shared))?;
        let mut dqkv = checker.activations(rows * 3 * width)?;
        let (of_starts, of_past) = (checker.write(&starts)?, checker.write(&past)?);
        let wide =
            turned::RotaryInputs { table: &table.wide, starts: Some(&starts), past: Some(&past) };
        let forward = turned::forward(&qk.wide, &wide, shape);
        let backward = turned::backward(&dqkv.wide, &wide, shape);
        let inputs = RotaryInputs {
            table: table.slice(),
            starts: Some(Slice::all(&of_starts)),
            past: Some(Slice::all(&of_past)),
        };
        let (backend, stream) = (checker.backend, &mut checker.stream);
        backend.rotary_forward(stream, qk.matrix_mut(width + shared)?, inputs, shape)?;
        backend.rotary_backward(stream, dqkv.matrix_mut(3 * width)?, inputs, shape)?;
        checker.compare("rotary_forward", &qk, &forward)?;
        let rows: Vec<B::Activation> = checker.read(&dqkv.buffer)?;
        let rows = rows.chunks(3 * width).flat_map(|row| &row[..width + 2 * shared]);
        let found: Vec<f64> = rows.map(|value| f64::from(value.widened())).collect();
        checker.compare_values("rotary_backward", &found, &backward);
    }
    Ok(())
}
