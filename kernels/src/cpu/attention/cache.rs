//! A cache of the keys and values of earlier positions, and attention over it.

use super::forward::{Scratch, forward_head};
use super::heads::{CausalMask, Head, HeadPlace, HeadWriter, SharedRows};
use crate::backend::{AttentionStep, CachedAttention, KeyValueCache};
use crate::cpu::dispatch::Kernel;
use crate::cpu::rows::{Rows, RowsMut, elements, exactly, exactly_mut};
use crate::cpu::{Cpu, DeviceStream};
use crate::error::{KernelError, Result};
use crate::shape::AttentionShape;
use crate::view::{Matrix, MatrixMut, Slice, SliceMut};

/// Asks `count` new positions after those of `past` to fit into a cache.
fn check_capacity(kernel: &'static str, past: &[u32], count: usize, capacity: usize) -> Result<()> {
    let most =
        past.iter().map(|&past| (past as usize).saturating_add(count)).max().unwrap_or(count);
    if most <= capacity {
        return Ok(());
    }
    let expected = format!("at most the capacity of {capacity}");
    Err(KernelError::shape(kernel, "positions of a sequence", expected, most))
}

impl CachedAttention for Cpu {
    fn append_to_cache(
        &self,
        _: &mut DeviceStream,
        cache: SliceMut<'_, Self, f32>,
        rows: Matrix<'_, Self, f32>,
        past: Slice<'_, Self, u32>,
        capacity: usize,
    ) -> Result<()> {
        const KERNEL: &str = "append_to_cache";
        let past = elements(past);
        let [row_count, width] = rows.shape();
        let samples = past.len();
        if samples == 0 || row_count % samples != 0 {
            let expected = format!("a multiple of the {samples} sequences");
            return Err(KernelError::shape(KERNEL, "rows", expected, row_count));
        }
        let count = row_count / samples;
        let overflow =
            || KernelError::shape(KERNEL, "cache", "a size that does not overflow", capacity);
        let of_sample = capacity.checked_mul(width).ok_or_else(overflow)?;
        let all = of_sample.checked_mul(samples).ok_or_else(overflow)?;
        let cache = exactly_mut(KERNEL, "cache", cache, all)?;
        let rows = Rows::new(KERNEL, "rows", rows, row_count, width)?;
        check_capacity(KERNEL, past, count, capacity)?;
        if all == 0 {
            return Ok(());
        }
        for (sample, (cache, &past)) in cache.chunks_exact_mut(of_sample).zip(past).enumerate() {
            let new = cache[past as usize * width..].chunks_exact_mut(width).take(count);
            for (i, new) in new.enumerate() {
                new.copy_from_slice(rows.row(sample * count + i));
            }
        }
        Ok(())
    }

    fn attention_cached(
        &self,
        stream: &mut DeviceStream,
        out: MatrixMut<'_, Self, f32>,
        q: Matrix<'_, Self, f32>,
        cache: KeyValueCache<'_, Self>,
        shape: AttentionShape,
    ) -> Result<()> {
        const KERNEL: &str = "attention_cached";
        let (samples, rows, width) =
            (shape.sequences().samples(), shape.sequences().rows(), shape.width());
        let out = SharedRows::new(RowsMut::new(KERNEL, "out", out, rows, width)?);
        let shared = shape.key_value_width();
        let held = cache.capacity.checked_mul(samples).and_then(|held| held.checked_mul(shared));
        let held = held.ok_or_else(|| {
            KernelError::shape(KERNEL, "capacity", "a size that does not overflow", cache.capacity)
        })?;
        let inputs = Cached {
            q: Rows::new(KERNEL, "q", q, rows, width)?,
            keys: Rows::packed(exactly(KERNEL, "keys", cache.keys, held)?, shared),
            values: Rows::packed(exactly(KERNEL, "values", cache.values, held)?, shared),
            capacity: cache.capacity,
            past: exactly(KERNEL, "past", cache.past, samples)?,
            slopes: match cache.slopes {
                Some(slopes) => Some(exactly(KERNEL, "slopes", slopes, shape.heads())?),
                None => None,
            },
            shape,
        };
        check_capacity(KERNEL, inputs.past, shape.sequences().positions(), cache.capacity)?;
        let heads = samples * shape.heads();
        let share = stream.threads().share(heads);
        let held = Scratch::lanes(shape);
        let (threads, scratch) = stream.with_scratch(heads.div_ceil(share) * held)?;
        let parts = scratch.chunks_exact_mut(held).enumerate().map(|(part, scratch)| Heads {
            out,
            inputs,
            scratch: Scratch::new(scratch, shape),
            heads: part * share..((part + 1) * share).min(heads),
        });
        threads.for_each(parts, |part| self.dispatch.run(part));
        Ok(())
    }
}

impl AttentionStep for Cpu {}

/// The checked inputs of attention over a cache.
#[derive(Clone, Copy)]
struct Cached<'a> {
    q: Rows<'a>,
    keys: Rows<'a>,
    values: Rows<'a>,
    capacity: usize,
    past: &'a [u32],
    slopes: Option<&'a [f32]>,
    shape: AttentionShape,
}

impl<'a> Cached<'a> {
    fn head(&self, place: HeadPlace) -> Head<'a> {
        let shape = self.shape;
        let first = place.sample * self.capacity;
        let past = self.past[place.sample] as usize;
        Head {
            q: place.columns_of(self.q, place.sample * shape.sequences().positions(), shape),
            k: place.shared_columns_of(self.keys, first, shape),
            v: place.shared_columns_of(self.values, first, shape),
            mask: CausalMask::new(past, shape, None),
            scale: shape.scale(),
            slope: self.slopes.map_or(0.0, |slopes| slopes[place.head]),
        }
    }
}

/// The heads of a compute thread.
struct Heads<'a> {
    out: SharedRows<'a>,
    inputs: Cached<'a>,
    scratch: Scratch<'a>,
    heads: std::ops::Range<usize>,
}

impl Kernel for Heads<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: crate::cpu::simd::Simd>(mut self, s: S) {
        let shape = self.inputs.shape;
        for head in self.heads {
            let place = HeadPlace::new(head, shape);
            // SAFETY: every head of every sample belongs to one part of the work alone.
            let writer = unsafe { HeadWriter::new(self.out, place, 0, shape) };
            let head = self.inputs.head(place);
            let count = shape.sequences().positions();
            forward_head(s, &mut self.scratch, head, writer, count, None);
        }
    }
}
