//! Attention over a cache of keys and values.

use tidemill_kernels::backend::{GrowingCache, KeyValueCache};
use tidemill_kernels::reference::attention::forward;
use tidemill_kernels::shape::AttentionShape;
use tidemill_kernels::{Backend, Slice};

use super::agreement::{Transcript, assert_close_to_sums, assert_same_bits, tolerance};
use super::arm::Arm;
use super::attention_case::{AttentionCase, attention_shape, run};
use super::device::{Device, Layout, MARGINS, Placed};
use super::inputs::Inputs;
use super::number::Number;

/// The keys and values of sequences, and the number of cached positions of each.
struct Cache<B: Backend<Activation: Number>> {
    keys: Placed<B, B::Activation>,
    values: Placed<B, B::Activation>,
    past: Vec<u32>,
    slopes: Option<Placed<B>>,
    capacity: usize,
}

/// `[b, capacity, w]` with the first `past[b]` positions of `values[b t, w]`, the rest poison.
fn first_positions<T: Number>(
    values: &[f32],
    past: &[u32],
    [positions, capacity, width]: [usize; 3],
) -> Vec<f32> {
    let mut cache = vec![T::POISON.widened(); past.len() * capacity * width];
    for (sample, &past) in past.iter().enumerate() {
        let elements = past as usize * width;
        cache[sample * capacity * width..][..elements]
            .copy_from_slice(&values[sample * positions * width..][..elements]);
    }
    cache
}

impl<B: Backend<Activation: Number>> Cache<B> {
    /// A cache with the initial contents of a case.
    fn new(
        device: &mut Device<'_, B>,
        case: &AttentionCase,
        shape: AttentionShape,
        past: Vec<u32>,
        capacity: usize,
    ) -> Self {
        let sizes = [shape.sequences().positions(), capacity, shape.width()];
        let mut place = |values: &[f32]| {
            let held = first_positions::<B::Activation>(values, &past, sizes);
            Placed::new(device, Layout::range(held.len()), &held)
        };
        let (keys, values) = (place(&case.k), place(&case.v));
        let slopes = case.slopes.as_ref();
        let slopes = slopes.map(|slopes| Placed::new(device, Layout::range(slopes.len()), slopes));
        Self { keys, values, past, slopes, capacity }
    }

    /// Attends from the next `count` positions of every sequence of `case`; returns `out[b count, h
    /// p]`.
    fn advance(
        &mut self,
        device: &mut Device<'_, B>,
        label: &str,
        case: &AttentionCase,
        shape: AttentionShape,
        count: usize,
    ) -> Vec<f32> {
        let (samples, t, width) =
            (shape.sequences().samples(), shape.sequences().positions(), shape.width());
        let next = |values: &[f32]| -> Vec<f32> {
            let row = |sample: usize| sample * t + self.past[sample] as usize;
            let rows = (0..samples).flat_map(|b| row(b)..row(b) + count);
            rows.flat_map(|row| &values[row * width..(row + 1) * width]).copied().collect()
        };
        let mut third = |i: usize, values: &[f32]| -> Placed<B, B::Activation> {
            let layout = Layout::columns_of(samples * count, 3 * width, i * width, width);
            Placed::new(device, layout, values)
        };
        let [q, k, v] =
            [third(0, &next(&case.q)), third(1, &next(&case.k)), third(2, &next(&case.v))];
        let past = device.upload(&self.past);
        let past = Slice::all(&past);
        let mut out = Placed::poisoned(device, Layout::inside_wider(samples * count, width));
        let (backend, stream, capacity) = (device.backend, &mut device.stream, self.capacity);
        let keys = self.keys.slice_mut();
        backend.append_to_cache(stream, keys, k.matrix(), past, capacity).expect(label);
        let values = self.values.slice_mut();
        backend.append_to_cache(stream, values, v.matrix(), past, capacity).expect(label);
        let cache = KeyValueCache {
            keys: self.keys.slice(),
            values: self.values.slice(),
            capacity,
            past,
            slopes: self.slopes.as_ref().map(Placed::slice),
        };
        let window = shape.window().map(std::num::NonZeroUsize::get);
        let heads = [shape.heads(), shape.head_width()];
        let new = attention_shape([samples, count], heads, shape.scale(), window);
        backend.attention_cached(stream, out.matrix_mut(), q.matrix(), cache, new).expect(label);
        self.past.iter_mut().for_each(|past| *past += count as u32);
        out.read(device)
    }

    /// Attends from the next position alone, as in generation.
    fn step(
        &mut self,
        device: &mut Device<'_, B>,
        label: &str,
        case: &AttentionCase,
        shape: AttentionShape,
    ) -> Vec<f32> {
        let (samples, width) = (shape.sequences().samples(), shape.width());
        let mut third = |i: usize, values: &[f32]| -> Placed<B, B::Activation> {
            let layout = Layout::columns_of(samples, 3 * width, i * width, width);
            Placed::new(device, layout, &rows_of(values, &self.past, 1, shape))
        };
        let [q, k, v] = [third(0, &case.q), third(1, &case.k), third(2, &case.v)];
        let past = device.upload(&self.past);
        let mut out = Placed::poisoned(device, Layout::inside_wider(samples, width));
        let cache = GrowingCache {
            keys: self.keys.slice_mut(),
            values: self.values.slice_mut(),
            capacity: self.capacity,
            past: Slice::all(&past),
            slopes: self.slopes.as_ref().map(Placed::slice),
        };
        let window = shape.window().map(std::num::NonZeroUsize::get);
        let heads = [shape.heads(), shape.head_width()];
        let new = attention_shape([samples, 1], heads, shape.scale(), window);
        let rows = [q.matrix(), k.matrix(), v.matrix()];
        let (backend, stream) = (device.backend, &mut device.stream);
        backend.attention_step(stream, out.matrix_mut(), rows, cache, new).expect(label);
        self.past.iter_mut().for_each(|past| *past += 1);
        out.read(device)
    }

    /// Asserts that the cache holds exactly the earlier positions of each sequence.
    #[track_caller]
    fn assert_holds(
        &self,
        device: &mut Device<'_, B>,
        case: &AttentionCase,
        shape: AttentionShape,
    ) {
        let sizes = [shape.sequences().positions(), self.capacity, shape.width()];
        for (what, placed, values) in
            [("keys", &self.keys, &case.k), ("values", &self.values, &case.v)]
        {
            let expected = first_positions::<B::Activation>(values, &self.past, sizes);
            assert_same_bits(what, &placed.read(device), &expected);
        }
    }
}

/// `values[b t, w]` of `count` positions from each sequence's `past`.
fn rows_of(values: &[f32], past: &[u32], count: usize, shape: AttentionShape) -> Vec<f32> {
    let (t, width) = (shape.sequences().positions(), shape.width());
    let row = |sample: usize| sample * t + past[sample] as usize;
    let rows = (0..past.len()).flat_map(|sample| row(sample)..row(sample) + count);
    rows.flat_map(|row| &values[row * width..(row + 1) * width]).copied().collect()
}

/// For any cut of prompts, and any earlier positions of the sequences of a batch, a cache gives
/// the bits of one pass over the whole sequence; and memory past a sequence's end has no effect.
pub fn cuts_change_nothing<B: Backend<Activation: Number>>(arm: &Arm<B>) -> Transcript {
    let mut device = Device::new(arm);
    let mut transcript = Transcript::default();
    let full = vec![
        ([1, 200], [3, 64], None),
        ([3, 150], [2, 40], Some(70)),
        ([2, 133], [1, 128], None),
        ([2, 90], [3, 5], Some(3)),
        ([1, 70], [1, 256], Some(1)),
    ];
    let small = vec![([1, 70], [2, 16], None), ([2, 73], [1, 5], Some(3))];
    for (seed, (rows, heads, window)) in device.sizes.choose(full, small).into_iter().enumerate() {
        device.margin = MARGINS[seed % 2];
        let shape = attention_shape(rows, heads, 1.0 / (heads[1] as f32).sqrt(), window);
        let mut case = AttentionCase::new::<B::Activation>(&mut Inputs::new(seed as u64), shape);
        if seed % 2 == 0 {
            case = case.with_slopes(shape);
        }
        let label = format!("{shape:?} seed {seed}");
        let whole = run(&mut device, &label, &case, shape).out;
        transcript.record(&label, &whole);
        let [samples, t] = rows;
        // The sequences of a batch have different numbers of earlier positions.
        let apart = |first: usize| -> Vec<u32> {
            (0..samples).map(|sample| (first + 7 * sample) as u32).collect()
        };
        let room = t - 7 * (samples - 1);
        let one_by_one = device.sizes.choose(vec![1; 20], vec![1; 4]);
        let cuts = [
            (0, vec![room]),
            (0, vec![1, 2, 13, 17, 31, 1]),
            (40, one_by_one),
            (room - 1, vec![1]),
            (3, vec![16, 32, 1, 5]),
        ];
        for (first, counts) in cuts {
            let label = format!("{label} from {first} by {counts:?}");
            let capacity = t + [0, 3][counts.len() % 2];
            let mut cache = Cache::new(&mut device, &case, shape, apart(first), capacity);
            for count in counts {
                let past = cache.past.clone();
                let out = cache.advance(&mut device, &label, &case, shape, count);
                assert_same_bits(&label, &out, &rows_of(&whole, &past, count, shape));
            }
            cache.assert_holds(&mut device, &case, shape);
        }
    }
    transcript
}

/// One new position, and a few, agree with the definition.
pub fn agrees<B: Backend<Activation: Number>>(arm: &Arm<B>) -> Transcript {
    let mut device = Device::new(arm);
    let mut transcript = Transcript::default();
    let mut seed = 0;
    for width in device.sizes.choose(vec![1, 5, 16, 40, 64, 80, 128, 256], vec![5, 16, 64]) {
        for count in [1, 3] {
            seed += 1;
            let window = [None, Some(50)][seed % 2];
            let rows = [2, 99];
            let shape = attention_shape(rows, [3, width], -2.0 / (width as f32).sqrt(), window);
            let mut inputs = Inputs::new(seed as u64);
            let case = AttentionCase::new::<B::Activation>(&mut inputs, shape).with_slopes(shape);
            let label = format!("{shape:?} {count} new, seed {seed}");
            let expected = forward(&case.wide().view(), shape).out;
            let past = vec![17, 99 - count as u32];
            let mut cache = Cache::new(&mut device, &case, shape, past.clone(), 101);
            let out = cache.advance(&mut device, &label, &case, shape, count);
            let sizes = forward(&case.of_sizes().wide().view(), shape).out;
            let new_rows = |whole: &[f64]| -> Vec<f64> {
                let of_sample = |(sample, &past): (usize, &u32)| {
                    let first = (sample * rows[1] + past as usize) * shape.width();
                    whole[first..first + count * shape.width()].to_vec()
                };
                past.iter().enumerate().flat_map(of_sample).collect()
            };
            let of_out = tolerance::<B::Activation>(width.max(rows[1]));
            let of_out = of_out.rounded_twice().beside(B::Activation::ROUNDING);
            assert_close_to_sums(&label, &out, &new_rows(&expected), of_out, &new_rows(&sizes));
            transcript.record(&label, &out);
        }
    }
    transcript
}

/// Single positions before, at and after the places where kernels cut the keys agree with the
/// definition; neither the rest of the batch nor the capacity of the cache changes a bit of
/// their results.
pub fn steps_agree<B: Backend<Activation: Number>>(arm: &Arm<B>) -> Transcript {
    let mut device = Device::new(arm);
    let mut transcript = Transcript::default();
    let full = vec![
        (1, None),
        (5, Some(50)),
        (16, Some(1)),
        (40, None),
        (64, Some(129)),
        (80, Some(130)),
        (128, None),
        (256, Some(300)),
    ];
    let small = vec![(5, Some(130)), (64, None), (128, Some(1)), (256, Some(50))];
    let pasts = device.sizes.choose(
        vec![[0, 126], [127, 128], [255, 1], [256, 383], [384, 129], [398, 300]],
        vec![[0, 127], [128, 1], [270, 129]],
    );
    let t = device.sizes.choose(vec![400], vec![272])[0];
    for (seed, (width, window)) in device.sizes.choose(full, small).into_iter().enumerate() {
        device.margin = MARGINS[seed % 2];
        let shape = attention_shape([2, t], [3, width], -2.0 / (width as f32).sqrt(), window);
        let mut case = AttentionCase::new::<B::Activation>(&mut Inputs::new(seed as u64), shape);
        if seed % 2 == 0 {
            case = case.with_slopes(shape);
        }
        let [expected, sizes] =
            [&case, &case.of_sizes()].map(|case| forward(&case.wide().view(), shape).out);
        for past in &pasts {
            let label = format!("step of {shape:?} behind {past:?}, seed {seed}");
            let mut cache = Cache::new(&mut device, &case, shape, past.to_vec(), t);
            let out = cache.step(&mut device, &label, &case, shape);
            cache.assert_holds(&mut device, &case, shape);
            let of_rows = |whole: &[f64]| -> Vec<f64> {
                let of_sample = |(sample, &past): (usize, &u32)| {
                    let first = (sample * t + past as usize) * shape.width();
                    whole[first..first + shape.width()].to_vec()
                };
                past.iter().enumerate().flat_map(of_sample).collect()
            };
            let of_out = tolerance::<B::Activation>(width.max(t)).rounded_twice();
            let of_out = of_out.beside(B::Activation::ROUNDING);
            assert_close_to_sums(&label, &out, &of_rows(&expected), of_out, &of_rows(&sizes));
            transcript.record(&label, &out);
            for (sample, room) in [(0, 3), (1, 130)] {
                let (one, alone) = case.part(sample..sample + 1, 0..t, 0..3, shape);
                let past = vec![past[sample]];
                let mut cache = Cache::new(&mut device, &one, alone, past, t + room);
                let row = cache.step(&mut device, &label, &one, alone);
                let label = format!("{label}, sample {sample} alone");
                assert_same_bits(&label, &row, &out[sample * shape.width()..][..shape.width()]);
            }
        }
    }
    transcript
}
