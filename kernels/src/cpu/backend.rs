//! [`Backend`] for [`Cpu`]: checks shapes, divides rows among the compute threads, calls kernels.

use std::convert::Infallible;

use super::attention::{
    self, append_to_cache, attention_backward, attention_cached, attention_forward,
};
use super::bias::{Biased, Clamp, ClampGradient, bias_backward};
use super::conv::{self, ConvStep, Taps, causal_conv1d_silu_forward, tap_lanes};
use super::conv_backward::{self, causal_conv1d_silu_backward};
use super::cross_entropy::cross_entropy;
use super::elementwise::{accumulate, mean_gradient, sums_of_squares};
use super::embedding::{embedding_backward_add, embedding_forward};
use super::gelu::{Erf, Gradient, Tanh, Value};
use super::layer_norm::{
    LayerNormInputs, LayerNormSaved, ParameterGradients, layer_norm_backward, layer_norm_forward,
};
use super::matmul::matmul;
use super::norm::{NormBackward, NormForward};
use super::optimizer::adamw;
use super::row_map::{MapInputs, map_output, map_rows};
use super::rows::{
    Rows, RowsMut, elements, elements_mut, exactly, exactly_mut, no_documents, one_position,
};
use super::scan::{Inputs, PrepareDecay, ScanLayout};
use super::scan_backward::{self, selective_scan_backward};
use super::scan_forward::selective_scan_forward;
use super::scan_step::ScanStep;
use super::weight_gradient::weight_gradient_add;
use super::{Buffer, Cpu, DeviceStream, Event, InstructionSet, MATRIX_LIBRARY};
use crate::backend::{
    AdamWStep, AttentionInputs, Backend, ConvInputs, DeviceKind, Element, Gelu, KeyValueCache,
    LogitGradient, MemoryPlace, NUMERICS_VERSION, NormGradient, NormInput, Output, ScanGradients,
    ScanInputs,
};
use crate::error::{KernelError, Result};
use crate::shape::{
    AttentionShape, ConvShape, CrossEntropyShape, GrainRows, NormShape, ScanShape, check_limit,
};
use crate::view::{Matrix, MatrixMut, Slice, SliceMut};

impl Backend for Cpu {
    type Activation = f32;
    type Buffer<T: Element> = Buffer<T>;
    type DeviceStream = DeviceStream;
    type Event = Event;
    type Graph = Infallible;
    type ComputeWeights = ();

    /// Processors with AVX2 and FMA are one kind, as the instruction set is not numerics; without,
    /// the matrix library's products are not fused and differ.
    fn device_kind(&self) -> DeviceKind {
        let fused = InstructionSet::Avx2.is_available();
        let architecture = match std::env::consts::ARCH {
            "x86_64" if fused => "x86-64-fma",
            "x86_64" => "x86-64",
            other => other,
        };
        DeviceKind {
            backend: "cpu".to_owned(),
            architecture: architecture.to_owned(),
            numerics_version: NUMERICS_VERSION,
            matrix_library: MATRIX_LIBRARY.to_owned(),
        }
    }

    fn memory(&self) -> MemoryPlace {
        MemoryPlace::Host
    }

    fn logit_chunk_rows(&self) -> usize {
        128
    }

    fn free_memory_bytes(&self) -> Result<Option<usize>> {
        Ok(None)
    }

    fn device_stream(&self) -> Result<DeviceStream> {
        Ok(DeviceStream::new(self.threads.clone()))
    }

    fn allocate<T: Element>(&self, _: &mut DeviceStream, elements: usize) -> Result<Buffer<T>> {
        Buffer::zeroed(elements)
    }

    fn elements<T: Element>(buffer: &Buffer<T>) -> usize {
        buffer.len()
    }

    fn compute_weights(&self, _: &mut DeviceStream, _elements: usize) -> Result<()> {
        Ok(())
    }

    fn refresh_compute_weights(
        &self,
        _: &mut DeviceStream,
        (): &mut (),
        _master: &Buffer<f32>,
        _start: usize,
        _elements: usize,
    ) -> Result<()> {
        Ok(())
    }

    fn compute_buffer<'a>(master: &'a Buffer<f32>, (): &'a ()) -> &'a Buffer<f32> {
        master
    }

    fn write<T: Element>(
        &self,
        _: &mut DeviceStream,
        out: SliceMut<'_, Self, T>,
        host: &[T],
    ) -> Result<()> {
        exactly_mut("write", "out", out, host.len())?.copy_from_slice(host);
        Ok(())
    }

    fn read<T: Element>(
        &self,
        _: &mut DeviceStream,
        host: &mut [T],
        from: Slice<'_, Self, T>,
    ) -> Result<()> {
        host.copy_from_slice(exactly("read", "from", from, host.len())?);
        Ok(())
    }

    fn copy<T: Element>(
        &self,
        _: &mut DeviceStream,
        out: SliceMut<'_, Self, T>,
        from: Slice<'_, Self, T>,
    ) -> Result<()> {
        let out = elements_mut(out);
        out.copy_from_slice(exactly("copy", "from", from, out.len())?);
        Ok(())
    }

    fn fill_zero<T: Element>(
        &self,
        _: &mut DeviceStream,
        out: SliceMut<'_, Self, T>,
    ) -> Result<()> {
        elements_mut(out).fill(T::zeroed());
        Ok(())
    }

    fn record(&self, _: &mut DeviceStream) -> Result<Event> {
        Ok(Event::now())
    }

    fn is_complete(&self, _: &Event) -> Result<bool> {
        Ok(true)
    }

    fn wait(&self, _: &Event) -> Result<()> {
        Ok(())
    }

    fn elapsed_milliseconds(&self, from: &Event, to: &Event) -> Result<f64> {
        Ok(from.milliseconds_to(to))
    }

    /// A call is a kernel's end here: there is nothing to save.
    fn record_graph(
        &self,
        _: &mut DeviceStream,
        _enqueue: &mut dyn FnMut(&mut DeviceStream) -> Result<()>,
    ) -> Result<Option<Infallible>> {
        Ok(None)
    }

    fn replay(&self, _: &mut DeviceStream, graph: &Infallible) -> Result<()> {
        match *graph {}
    }

    fn matmul(
        &self,
        stream: &mut DeviceStream,
        out: MatrixMut<'_, Self, f32>,
        a: Matrix<'_, Self, f32>,
        b: Matrix<'_, Self, f32>,
        output: Output,
    ) -> Result<()> {
        matmul(stream.threads(), self.dispatch, out, a, b, output)
    }

    fn matmul_f32(
        &self,
        stream: &mut DeviceStream,
        out: MatrixMut<'_, Self, f32>,
        a: Matrix<'_, Self, f32>,
        b: Matrix<'_, Self, f32>,
        output: Output,
    ) -> Result<()> {
        matmul(stream.threads(), self.dispatch, out, a, b, output)
    }

    fn weight_gradient_add(
        &self,
        stream: &mut DeviceStream,
        lane: MatrixMut<'_, Self, f32>,
        grad_out: Matrix<'_, Self, f32>,
        input: Matrix<'_, Self, f32>,
        grains: GrainRows,
    ) -> Result<()> {
        weight_gradient_add(stream, self.dispatch, lane, grad_out, input, grains)
    }

    fn embedding_forward(
        &self,
        _: &mut DeviceStream,
        out: MatrixMut<'_, Self, f32>,
        table: Matrix<'_, Self, f32>,
        tokens: Slice<'_, Self, u32>,
        output: Output,
    ) -> Result<()> {
        embedding_forward(out, table, tokens, output)
    }

    fn embedding_backward_add(
        &self,
        stream: &mut DeviceStream,
        lane_table: MatrixMut<'_, Self, f32>,
        dout: Matrix<'_, Self, f32>,
        tokens: Slice<'_, Self, u32>,
        grains: GrainRows,
    ) -> Result<()> {
        embedding_backward_add(stream, self.dispatch, lane_table, dout, tokens, grains)
    }

    fn rms_norm_forward(
        &self,
        stream: &mut DeviceStream,
        y: MatrixMut<'_, Self, f32>,
        reciprocal_rms: SliceMut<'_, Self, f32>,
        x: Matrix<'_, Self, f32>,
        weight: Slice<'_, Self, f32>,
        shape: NormShape,
    ) -> Result<()> {
        const KERNEL: &str = "rms_norm_forward";
        let (rows, width) = (shape.grains().rows(), shape.width());
        let y = RowsMut::new(KERNEL, "y", y, rows, width)?;
        let reciprocal_rms = exactly_mut(KERNEL, "reciprocal_rms", reciprocal_rms, rows)?;
        let x = Rows::new(KERNEL, "x", x, rows, width)?;
        let weight = exactly(KERNEL, "weight", weight, width)?;
        let share = stream.threads().share(rows);
        let parts = y.parts(share).zip(reciprocal_rms.chunks_mut(share)).enumerate();
        let parts = parts.map(|(part, (y, reciprocal_rms))| NormForward {
            y,
            reciprocal_rms,
            x,
            weight,
            first_row: part * share,
            eps: shape.eps(),
        });
        stream.threads().for_each(parts, |part| self.dispatch.run(part));
        Ok(())
    }

    fn rms_norm_backward(
        &self,
        stream: &mut DeviceStream,
        dx: MatrixMut<'_, Self, f32>,
        dweight: SliceMut<'_, Self, f32>,
        dy: Matrix<'_, Self, f32>,
        x: Matrix<'_, Self, f32>,
        reciprocal_rms: Slice<'_, Self, f32>,
        weight: Slice<'_, Self, f32>,
        shape: NormShape,
    ) -> Result<()> {
        const KERNEL: &str = "rms_norm_backward";
        let (grains, width) = (shape.grains(), shape.width());
        let rows = grains.rows();
        let dx = RowsMut::new(KERNEL, "dx", dx, rows, width)?;
        let dweight = exactly_mut(KERNEL, "dweight", dweight, grains.grains() * width)?;
        let dy = Rows::new(KERNEL, "dy", dy, rows, width)?;
        let x = Rows::new(KERNEL, "x", x, rows, width)?;
        let reciprocal_rms = exactly(KERNEL, "reciprocal_rms", reciprocal_rms, rows)?;
        let weight = exactly(KERNEL, "weight", weight, width)?;
        let parts = dx.parts(grains.rows_per_grain()).zip(dweight.chunks_exact_mut(width));
        let parts = parts.enumerate().map(|(grain, (dx, dweight))| NormBackward {
            dx,
            dweight,
            dy,
            x,
            reciprocal_rms: &reciprocal_rms[grains.range(grain)],
            weight,
            first_row: grains.range(grain).start,
        });
        stream.threads().for_each(parts, |part| self.dispatch.run(part));
        Ok(())
    }

    fn layer_norm_forward(
        &self,
        stream: &mut DeviceStream,
        y: MatrixMut<'_, Self, f32>,
        statistics: SliceMut<'_, Self, f32>,
        x: NormInput<'_, Self>,
        weight: Slice<'_, Self, f32>,
        bias: Option<Slice<'_, Self, f32>>,
        shape: NormShape,
    ) -> Result<()> {
        let inputs = LayerNormInputs { x, weight, bias };
        layer_norm_forward(stream.threads(), self.dispatch, y, statistics, inputs, shape)
    }

    fn layer_norm_backward(
        &self,
        stream: &mut DeviceStream,
        gradient: NormGradient<'_, Self>,
        dweight: SliceMut<'_, Self, f32>,
        dbias: Option<SliceMut<'_, Self, f32>>,
        x: NormInput<'_, Self>,
        statistics: Slice<'_, Self, f32>,
        weight: Slice<'_, Self, f32>,
        shape: NormShape,
    ) -> Result<()> {
        let parameters = ParameterGradients { dweight, dbias };
        let saved = LayerNormSaved { x, statistics, weight };
        layer_norm_backward(stream.threads(), self.dispatch, gradient, parameters, saved, shape)
    }

    fn gelu_forward(
        &self,
        stream: &mut DeviceStream,
        out: MatrixMut<'_, Self, f32>,
        x: Matrix<'_, Self, f32>,
        bias: Option<Slice<'_, Self, f32>>,
        gelu: Gelu,
    ) -> Result<()> {
        const KERNEL: &str = "gelu_forward";
        let inputs = MapInputs::new(KERNEL, &out, [Some(x), None], bias)?;
        let out = map_output(KERNEL, out)?;
        match gelu {
            Gelu::Erf => map_rows(stream.threads(), self.dispatch, out, inputs, Value(Erf)),
            Gelu::Tanh => map_rows(stream.threads(), self.dispatch, out, inputs, Value(Tanh)),
        }
        Ok(())
    }

    fn gelu_backward(
        &self,
        stream: &mut DeviceStream,
        dx: MatrixMut<'_, Self, f32>,
        dout: Matrix<'_, Self, f32>,
        x: Matrix<'_, Self, f32>,
        bias: Option<Slice<'_, Self, f32>>,
        gelu: Gelu,
    ) -> Result<()> {
        const KERNEL: &str = "gelu_backward";
        let inputs = MapInputs::new(KERNEL, &dx, [Some(x), Some(dout)], bias)?;
        let dx = map_output(KERNEL, dx)?;
        match gelu {
            Gelu::Erf => map_rows(stream.threads(), self.dispatch, dx, inputs, Gradient(Erf)),
            Gelu::Tanh => map_rows(stream.threads(), self.dispatch, dx, inputs, Gradient(Tanh)),
        }
        Ok(())
    }

    fn add_bias(
        &self,
        stream: &mut DeviceStream,
        out: MatrixMut<'_, Self, f32>,
        bias: Slice<'_, Self, f32>,
    ) -> Result<()> {
        self.add_bias_f32(stream, out, bias)
    }

    fn add_bias_f32(
        &self,
        stream: &mut DeviceStream,
        out: MatrixMut<'_, Self, f32>,
        bias: Slice<'_, Self, f32>,
    ) -> Result<()> {
        const KERNEL: &str = "add_bias";
        let inputs = MapInputs::new(KERNEL, &out, [None, None], Some(bias))?;
        let out = map_output(KERNEL, out)?;
        map_rows(stream.threads(), self.dispatch, out, inputs, Biased);
        Ok(())
    }

    fn bias_backward(
        &self,
        stream: &mut DeviceStream,
        dbias: SliceMut<'_, Self, f32>,
        dout: Matrix<'_, Self, f32>,
        grains: GrainRows,
    ) -> Result<()> {
        bias_backward(stream.threads(), self.dispatch, dbias, dout, grains)
    }

    fn clamp(
        &self,
        stream: &mut DeviceStream,
        out: MatrixMut<'_, Self, f32>,
        x: Matrix<'_, Self, f32>,
        limit: f32,
    ) -> Result<()> {
        const KERNEL: &str = "clamp";
        check_limit(KERNEL, limit)?;
        let inputs = MapInputs::new(KERNEL, &out, [Some(x), None], None)?;
        let out = map_output(KERNEL, out)?;
        map_rows(stream.threads(), self.dispatch, out, inputs, Clamp(limit));
        Ok(())
    }

    fn clamp_backward(
        &self,
        stream: &mut DeviceStream,
        dx: MatrixMut<'_, Self, f32>,
        x: Matrix<'_, Self, f32>,
        limit: f32,
    ) -> Result<()> {
        const KERNEL: &str = "clamp_backward";
        check_limit(KERNEL, limit)?;
        let inputs = MapInputs::new(KERNEL, &dx, [Some(x), None], None)?;
        let dx = map_output(KERNEL, dx)?;
        map_rows(stream.threads(), self.dispatch, dx, inputs, ClampGradient(limit));
        Ok(())
    }

    fn causal_conv1d_silu_forward(
        &self,
        stream: &mut DeviceStream,
        out: MatrixMut<'_, Self, f32>,
        inputs: ConvInputs<'_, Self>,
        shape: ConvShape,
    ) -> Result<()> {
        const KERNEL: &str = "causal_conv1d_silu_forward";
        let (rows, channels) = (shape.sequences().rows(), shape.channels());
        let out = RowsMut::new(KERNEL, "out", out, rows, channels)?;
        let inputs = conv::Inputs::new(KERNEL, inputs, &shape)?;
        causal_conv1d_silu_forward(stream, self.dispatch, out, inputs, shape)
    }

    fn causal_conv1d_silu_backward(
        &self,
        stream: &mut DeviceStream,
        dx: MatrixMut<'_, Self, f32>,
        dweight: SliceMut<'_, Self, f32>,
        dbias: Option<SliceMut<'_, Self, f32>>,
        dout: Matrix<'_, Self, f32>,
        inputs: ConvInputs<'_, Self>,
        shape: ConvShape,
    ) -> Result<()> {
        const KERNEL: &str = "causal_conv1d_silu_backward";
        let (rows, channels) = (shape.sequences().rows(), shape.channels());
        let grains = shape.grains().grains();
        if dbias.is_some() != inputs.bias.is_some() {
            let presence = |present| if present { "present" } else { "absent" };
            let (expected, found) = (presence(inputs.bias.is_some()), presence(dbias.is_some()));
            return Err(KernelError::shape(KERNEL, "dbias", expected, found));
        }
        let dx = RowsMut::new(KERNEL, "dx", dx, rows, channels)?;
        let dweight = exactly_mut(KERNEL, "dweight", dweight, grains * channels * shape.width())?;
        let dbias = match dbias {
            Some(dbias) => Some(exactly_mut(KERNEL, "dbias", dbias, grains * channels)?),
            None => None,
        };
        let read = conv_backward::BackwardInputs {
            dout: Rows::new(KERNEL, "dout", dout, rows, channels)?,
            inputs: conv::Inputs::new(KERNEL, inputs, &shape)?,
        };
        let parameters = conv_backward::ParameterGradients { dweight, dbias };
        causal_conv1d_silu_backward(stream, self.dispatch, dx, parameters, read, shape)
    }

    fn selective_scan_saved_elements(&self, shape: ScanShape) -> usize {
        ScanLayout::new(shape).saved_elements() * shape.sequences().samples()
    }

    fn selective_scan_forward(
        &self,
        stream: &mut DeviceStream,
        out: MatrixMut<'_, Self, f32>,
        saved: SliceMut<'_, Self, f32>,
        inputs: ScanInputs<'_, Self>,
        shape: ScanShape,
    ) -> Result<()> {
        const KERNEL: &str = "selective_scan_forward";
        let out = RowsMut::new(KERNEL, "out", out, shape.sequences().rows(), shape.channels())?;
        let expected = self.selective_scan_saved_elements(shape);
        let saved = exactly_mut(KERNEL, "saved", saved, expected)?;
        let inputs = Inputs::new(KERNEL, inputs, shape)?;
        let layout = ScanLayout::new(shape);
        selective_scan_forward(stream, self.dispatch, out, saved, inputs, layout)
    }

    fn selective_scan_backward(
        &self,
        stream: &mut DeviceStream,
        gradients: ScanGradients<'_, Self>,
        regated: Option<MatrixMut<'_, Self, f32>>,
        dout: Matrix<'_, Self, f32>,
        inputs: ScanInputs<'_, Self>,
        saved: Slice<'_, Self, f32>,
        shape: ScanShape,
    ) -> Result<()> {
        const KERNEL: &str = "selective_scan_backward";
        let ScanGradients { ddelta_raw, dx, dbc, dz, da_log, dd, ddelta_bias } = gradients;
        let (rows, grains) = (shape.sequences().rows(), shape.grains().grains());
        let (channels, states) = (shape.channels(), shape.states());
        let row_gradients = scan_backward::RowGradients {
            ddelta_raw: RowsMut::new(KERNEL, "ddelta_raw", ddelta_raw, rows, channels)?,
            dx: RowsMut::new(KERNEL, "dx", dx, rows, channels)?,
            dbc: RowsMut::new(KERNEL, "dbc", dbc, rows, 2 * states)?,
            dz: RowsMut::new(KERNEL, "dz", dz, rows, channels)?,
            regated: match regated {
                Some(regated) => Some(RowsMut::new(KERNEL, "regated", regated, rows, channels)?),
                None => None,
            },
        };
        let parameters = scan_backward::ParameterGradients {
            da_log: exactly_mut(KERNEL, "da_log", da_log, grains * channels * states)?,
            dd: exactly_mut(KERNEL, "dd", dd, grains * channels)?,
            ddelta_bias: exactly_mut(KERNEL, "ddelta_bias", ddelta_bias, grains * channels)?,
        };
        let read = scan_backward::BackwardInputs {
            dout: Rows::new(KERNEL, "dout", dout, rows, channels)?,
            inputs: Inputs::new(KERNEL, inputs, shape)?,
            saved: exactly(KERNEL, "saved", saved, self.selective_scan_saved_elements(shape))?,
        };
        let layout = ScanLayout::new(shape);
        selective_scan_backward(stream, self.dispatch, row_gradients, parameters, read, layout)
    }

    fn causal_conv1d_silu_step(
        &self,
        stream: &mut DeviceStream,
        out: MatrixMut<'_, Self, f32>,
        state: SliceMut<'_, Self, f32>,
        x: Matrix<'_, Self, f32>,
        weight: Slice<'_, Self, f32>,
        bias: Option<Slice<'_, Self, f32>>,
        shape: ConvShape,
    ) -> Result<()> {
        const KERNEL: &str = "causal_conv1d_silu_step";
        one_position(KERNEL, shape.sequences().positions())?;
        let (rows, channels) = (shape.sequences().rows(), shape.channels());
        let out = RowsMut::new(KERNEL, "out", out, rows, channels)?;
        let held = rows * channels * (shape.width() - 1);
        let state = exactly_mut(KERNEL, "state", state, held)?;
        let x = Rows::new(KERNEL, "x", x, rows, channels)?;
        let taps = Taps::new(KERNEL, weight, bias, &shape)?;
        let (_, arranged) = stream.with_scratch(tap_lanes(&shape))?;
        taps.arrange(arranged, &shape);
        self.dispatch.run(ConvStep { out, state, x, taps: arranged, shape });
        Ok(())
    }

    fn selective_scan_step(
        &self,
        stream: &mut DeviceStream,
        out: MatrixMut<'_, Self, f32>,
        state: SliceMut<'_, Self, f32>,
        inputs: ScanInputs<'_, Self>,
        shape: ScanShape,
    ) -> Result<()> {
        const KERNEL: &str = "selective_scan_step";
        one_position(KERNEL, shape.sequences().positions())?;
        no_documents(KERNEL, inputs.starts.is_some())?;
        let rows = shape.sequences().rows();
        let out = RowsMut::new(KERNEL, "out", out, rows, shape.channels())?;
        let held = rows * shape.channels() * shape.states();
        let state = exactly_mut(KERNEL, "state", state, held)?;
        let inputs = Inputs::new(KERNEL, inputs, shape)?;
        let layout = ScanLayout::new(shape);
        let lanes = layout.state_lanes() + layout.coefficient_lanes();
        let (_, scratch) = stream.with_scratch(lanes)?;
        let (decay_rates, coefficients) = scratch.split_at_mut(layout.state_lanes());
        self.dispatch.run(PrepareDecay { out: &mut *decay_rates, a_log: inputs.a_log, layout });
        self.dispatch.run(ScanStep { out, state, inputs, decay_rates, coefficients, layout });
        Ok(())
    }

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

    fn attention_backward(
        &self,
        stream: &mut DeviceStream,
        dqkv: MatrixMut<'_, Self, f32>,
        dout: Matrix<'_, Self, f32>,
        out: Matrix<'_, Self, f32>,
        log_sum_exp: Slice<'_, Self, f32>,
        inputs: AttentionInputs<'_, Self>,
        shape: AttentionShape,
    ) -> Result<()> {
        let results = attention::ForwardResults { dout, out, log_sum_exp };
        attention_backward(stream, self.dispatch, dqkv, results, inputs, shape)
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

    fn cross_entropy(
        &self,
        stream: &mut DeviceStream,
        losses: SliceMut<'_, Self, f32>,
        logits: SliceMut<'_, Self, f32>,
        targets: Slice<'_, Self, u32>,
        gradient: LogitGradient,
        shape: CrossEntropyShape,
    ) -> Result<()> {
        let threads = stream.threads();
        cross_entropy(threads, self.dispatch, losses, logits, targets, gradient, shape)
    }

    fn accumulate(
        &self,
        stream: &mut DeviceStream,
        lane: SliceMut<'_, Self, f32>,
        gradients: Slice<'_, Self, f32>,
    ) -> Result<()> {
        accumulate(stream.threads(), self.dispatch, elements_mut(lane), elements(gradients))
    }

    fn mean_gradient(
        &self,
        _: &mut DeviceStream,
        out: SliceMut<'_, Self, f32>,
        uses: &[Slice<'_, Self, f32>],
        count: f32,
    ) -> Result<()> {
        mean_gradient(self.dispatch, out, uses, count)
    }

    fn sums_of_squares(
        &self,
        stream: &mut DeviceStream,
        x: Slice<'_, Self, f32>,
        ends: &[usize],
    ) -> Result<Vec<f64>> {
        sums_of_squares(stream.threads(), self.dispatch, elements(x), ends)
    }

    fn adamw(
        &self,
        stream: &mut DeviceStream,
        parameters: SliceMut<'_, Self, f32>,
        exp_avg: SliceMut<'_, Self, f32>,
        exp_avg_sq: SliceMut<'_, Self, f32>,
        gradient: Slice<'_, Self, f32>,
        step: AdamWStep,
    ) -> Result<()> {
        let moments = [exp_avg, exp_avg_sq];
        adamw(stream.threads(), self.dispatch, parameters, moments, gradient, step)
    }
}
