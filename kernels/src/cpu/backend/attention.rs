//! [`Attention`] for [`Cpu`].

use crate::backend::{Attention, AttentionInputs, AttentionSaved, KeyValueCache};
use crate::cpu::attention::{
    append_to_cache, attention_backward, attention_cached, attention_forward,
    backward_scratch_bytes,
};
use crate::cpu::{Cpu, DeviceStream};
use crate::error::Result;
use crate::shape::AttentionShape;
use crate::view::{Matrix, MatrixMut, Slice, SliceMut};

impl Attention for Cpu {
    fn attention_forward(
        &self,
        stream: &mut DeviceStream,
        out: MatrixMut<'_, Self, f32>,
        log_sum_exp: SliceMut<'_, Self, f32>,
        inputs: AttentionInputs<'_, Self>,
        shape: AttentionShape,
    ) -> Result<()> {
        attention_forward(stream, self.dispatch, out, log_sum_exp, inputs, shape)
    }

    fn attention_scratch_bytes(&self, shape: AttentionShape) -> usize {
        backward_scratch_bytes(shape)
    }

    fn attention_backward(
        &self,
        stream: &mut DeviceStream,
        dqkv: MatrixMut<'_, Self, f32>,
        saved: AttentionSaved<'_, Self>,
        shape: AttentionShape,
    ) -> Result<()> {
        attention_backward(stream, self.dispatch, dqkv, saved, shape)
    }

    fn append_to_cache(
        &self,
        _: &mut DeviceStream,
        cache: SliceMut<'_, Self, f32>,
        rows: Matrix<'_, Self, f32>,
        past: Slice<'_, Self, u32>,
        capacity: usize,
    ) -> Result<()> {
        append_to_cache(cache, rows, past, capacity)
    }

    fn attention_cached(
        &self,
        stream: &mut DeviceStream,
        out: MatrixMut<'_, Self, f32>,
        q: Matrix<'_, Self, f32>,
        cache: KeyValueCache<'_, Self>,
        shape: AttentionShape,
    ) -> Result<()> {
        attention_cached(stream, self.dispatch, out, q, cache, shape)
    }
}
