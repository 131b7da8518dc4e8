//! [`Backend`] for [`Gpu`]: memory and order from the driver, kernels from the launchers.

use crate::backend::{
    AdamWStep, AttentionInputs, Backend, ConvInputs, DeviceKind, Element, Gelu, KernelTime,
    KeyValueCache, LogitGradient, MemoryPlace, NUMERICS_VERSION, NormGradient, NormInput, Output,
    ScanGradients, ScanInputs,
};
use crate::error::{KernelError, Result};
use crate::gpu::driver::{Driver, Rows};
use crate::gpu::launch::layer_norm::{LayerNormInputs, LayerNormSaved, ParameterGradients};
use crate::gpu::launch::row_map::{self, MapInputs};
use crate::gpu::precision::{Copies, Precision};
use crate::gpu::recording::{GpuGraph, Recording};
use crate::gpu::{Gpu, GpuBuffer, GpuStream};
use crate::shape::{
    AttentionShape, ConvShape, CrossEntropyShape, GrainRows, NormShape, ScanShape, check_limit,
};
use crate::view::{Matrix, MatrixMut, Slice, SliceMut};

/// Rows of logits that are formed at a time: enough to fill a GPU, few enough that the logits of a large vocabulary stay
/// below a gigabyte.
const LOGIT_CHUNK_ROWS: usize = 4096;

fn same_elements(kernel: &'static str, expected: usize, found: usize) -> Result<()> {
    if expected == found {
        return Ok(());
    }
    Err(KernelError::shape(kernel, "from", format!("{expected} elements"), found))
}

impl<D: Driver, P: Precision> Backend for Gpu<D, P> {
    type Activation = P::Activation;
    type Buffer<T: Element> = GpuBuffer<D, T>;
    type DeviceStream = GpuStream<D>;
    type Event = D::Event;
    type Graph = GpuGraph<D>;
    type ComputeWeights = Copies<D, P::Activation>;

    /// The matrix library chooses by the number of multiprocessors too, so that stands beside its version.
    fn device_kind(&self) -> DeviceKind {
        let device = self.driver.properties();
        let (library, multiprocessors) = (&device.matrix_library, device.multiprocessors);
        DeviceKind {
            backend: device.backend.to_owned(),
            architecture: device.architecture.clone(),
            numerics_version: NUMERICS_VERSION,
            matrix_library: format!("{library}, {multiprocessors} multiprocessors"),
        }
    }

    fn free_memory_bytes(&self) -> Result<Option<usize>> {
        Ok(Some(self.driver.memory_bytes()?[0]))
    }

    fn memory(&self) -> MemoryPlace {
        MemoryPlace::Device
    }

    fn logit_chunk_rows(&self) -> usize {
        LOGIT_CHUNK_ROWS
    }

    fn device_stream(&self) -> Result<GpuStream<D>> {
        GpuStream::new(&self.driver)
    }

    fn allocate<T: Element>(
        &self,
        stream: &mut GpuStream<D>,
        elements: usize,
    ) -> Result<GpuBuffer<D, T>> {
        GpuBuffer::zeroed(&self.driver, stream, elements)
    }

    fn elements<T: Element>(buffer: &GpuBuffer<D, T>) -> usize {
        buffer.elements()
    }

    fn compute_weights(
        &self,
        stream: &mut GpuStream<D>,
        elements: usize,
    ) -> Result<Copies<D, P::Activation>> {
        if size_of::<P::Activation>() == size_of::<f32>() {
            return Ok(Copies(None));
        }
        Ok(Copies(Some(GpuBuffer::zeroed(&self.driver, stream, elements)?)))
    }

    fn refresh_compute_weights(
        &self,
        stream: &mut GpuStream<D>,
        weights: &mut Copies<D, P::Activation>,
        master: &GpuBuffer<D, f32>,
        start: usize,
        elements: usize,
    ) -> Result<()> {
        let Some(copies) = &mut weights.0 else { return Ok(()) };
        let out = SliceMut::new(copies, start, elements)?;
        self.launch_round(stream, out, Slice::new(master, start, elements)?)
    }

    fn compute_buffer<'a>(
        master: &'a GpuBuffer<D, f32>,
        weights: &'a Copies<D, P::Activation>,
    ) -> &'a GpuBuffer<D, P::Activation> {
        P::compute(master, weights)
    }

    fn write<T: Element>(
        &self,
        stream: &mut GpuStream<D>,
        out: SliceMut<'_, Self, T>,
        host: &[T],
    ) -> Result<()> {
        if out.elements != host.len() {
            let expected = format!("{} elements", host.len());
            return Err(KernelError::shape("write", "out", expected, out.elements));
        }
        let offset = out.start * size_of::<T>();
        let queue = stream.queue_outside_recordings("writing from the host")?;
        self.driver.upload(queue, out.buffer.memory_mut(), offset, bytemuck::cast_slice(host))
    }

    fn read<T: Element>(
        &self,
        stream: &mut GpuStream<D>,
        host: &mut [T],
        from: Slice<'_, Self, T>,
    ) -> Result<()> {
        same_elements("read", host.len(), from.elements)?;
        let offset = from.start * size_of::<T>();
        let queue = stream.queue_outside_recordings("reading to the host")?;
        let host = bytemuck::cast_slice_mut(host);
        self.driver.download(queue, host, from.buffer.memory(), offset)?;
        stream.check(&self.driver)
    }

    fn copy<T: Element>(
        &self,
        stream: &mut GpuStream<D>,
        out: SliceMut<'_, Self, T>,
        from: Slice<'_, Self, T>,
    ) -> Result<()> {
        same_elements("copy", out.elements, from.elements)?;
        let bytes = out.elements * size_of::<T>();
        let to = (out.buffer.memory_mut(), out.start * size_of::<T>());
        let from = (from.buffer.memory(), from.start * size_of::<T>());
        self.profile.note(&self.driver, stream, "copy", |stream| {
            self.driver.copy(stream.queue_mut(), to, from, bytes)
        })
    }

    fn fill_zero<T: Element>(
        &self,
        stream: &mut GpuStream<D>,
        out: SliceMut<'_, Self, T>,
    ) -> Result<()> {
        let (offset, bytes) = (out.start * size_of::<T>(), out.elements * size_of::<T>());
        let memory = out.buffer.memory_mut();
        self.profile.note(&self.driver, stream, "fill_zero", |stream| {
            self.driver.fill_zero(stream.queue_mut(), memory, offset, bytes)
        })
    }

    fn record(&self, stream: &mut GpuStream<D>) -> Result<D::Event> {
        self.driver.record(stream.queue_outside_recordings("an event")?)
    }

    fn is_complete(&self, event: &D::Event) -> Result<bool> {
        self.driver.is_complete(event)
    }

    fn wait(&self, event: &D::Event) -> Result<()> {
        self.driver.wait(event)
    }

    fn elapsed_milliseconds(&self, from: &D::Event, to: &D::Event) -> Result<f64> {
        self.driver.elapsed_milliseconds(from, to).map(f64::from)
    }

    fn record_graph(
        &self,
        stream: &mut GpuStream<D>,
        enqueue: &mut dyn FnMut(&mut GpuStream<D>) -> Result<()>,
    ) -> Result<Option<GpuGraph<D>>> {
        if !self.driver.has_graphs() {
            return Ok(None);
        }
        let mut recording = Recording::begin(&self.driver, stream)?;
        enqueue(recording.stream())?;
        recording.end().map(Some)
    }

    fn replay(&self, stream: &mut GpuStream<D>, graph: &GpuGraph<D>) -> Result<()> {
        self.profile
            .note(&self.driver, stream, "graph", |stream| graph.replay(&self.driver, stream))
    }

    fn start_profile(&self) {
        self.profile.start();
    }

    fn finish_profile(&self) -> Result<Vec<KernelTime>> {
        self.profile.finish(&self.driver)
    }

    fn matmul(
        &self,
        stream: &mut GpuStream<D>,
        out: MatrixMut<'_, Self, P::Activation>,
        a: Matrix<'_, Self, P::Activation>,
        b: Matrix<'_, Self, P::Activation>,
        output: Output,
    ) -> Result<()> {
        self.product(stream, out, a, b, output, Rows::Free)
    }

    fn matmul_f32(
        &self,
        stream: &mut GpuStream<D>,
        out: MatrixMut<'_, Self, f32>,
        a: Matrix<'_, Self, P::Activation>,
        b: Matrix<'_, Self, P::Activation>,
        output: Output,
    ) -> Result<()> {
        self.product(stream, out, a, b, output, Rows::Free)
    }

    fn weight_gradient_add(
        &self,
        stream: &mut GpuStream<D>,
        lane: MatrixMut<'_, Self, f32>,
        grad_out: Matrix<'_, Self, P::Activation>,
        input: Matrix<'_, Self, P::Activation>,
        grains: GrainRows,
    ) -> Result<()> {
        self.add_weight_gradient(stream, lane, grad_out, input, grains)
    }

    fn embedding_forward(
        &self,
        stream: &mut GpuStream<D>,
        out: MatrixMut<'_, Self, f32>,
        table: Matrix<'_, Self, f32>,
        tokens: Slice<'_, Self, u32>,
        output: Output,
    ) -> Result<()> {
        self.launch_embedding_forward(stream, out, table, tokens, output)
    }

    fn embedding_backward_add(
        &self,
        stream: &mut GpuStream<D>,
        lane_table: MatrixMut<'_, Self, f32>,
        dout: Matrix<'_, Self, f32>,
        tokens: Slice<'_, Self, u32>,
        grains: GrainRows,
    ) -> Result<()> {
        self.launch_embedding_backward_add(stream, lane_table, dout, tokens, grains)
    }

    fn rms_norm_forward(
        &self,
        stream: &mut GpuStream<D>,
        y: MatrixMut<'_, Self, P::Activation>,
        reciprocal_rms: SliceMut<'_, Self, f32>,
        x: Matrix<'_, Self, f32>,
        weight: Slice<'_, Self, f32>,
        shape: NormShape,
    ) -> Result<()> {
        self.launch_rms_norm_forward(stream, y, reciprocal_rms, x, weight, shape)
    }

    fn rms_norm_backward(
        &self,
        stream: &mut GpuStream<D>,
        dx: MatrixMut<'_, Self, f32>,
        dweight: SliceMut<'_, Self, f32>,
        dy: Matrix<'_, Self, P::Activation>,
        x: Matrix<'_, Self, f32>,
        reciprocal_rms: Slice<'_, Self, f32>,
        weight: Slice<'_, Self, f32>,
        shape: NormShape,
    ) -> Result<()> {
        self.launch_rms_norm_backward(stream, dx, dweight, dy, x, reciprocal_rms, weight, shape)
    }

    fn layer_norm_forward(
        &self,
        stream: &mut GpuStream<D>,
        y: MatrixMut<'_, Self, P::Activation>,
        statistics: SliceMut<'_, Self, f32>,
        x: NormInput<'_, Self>,
        weight: Slice<'_, Self, f32>,
        bias: Option<Slice<'_, Self, f32>>,
        shape: NormShape,
    ) -> Result<()> {
        let inputs = LayerNormInputs { x, weight, bias };
        self.launch_layer_norm_forward(stream, y, statistics, inputs, shape)
    }

    fn layer_norm_backward(
        &self,
        stream: &mut GpuStream<D>,
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
        self.launch_layer_norm_backward(stream, gradient, parameters, saved, shape)
    }

    fn gelu_forward(
        &self,
        stream: &mut GpuStream<D>,
        out: MatrixMut<'_, Self, P::Activation>,
        x: Matrix<'_, Self, P::Activation>,
        bias: Option<Slice<'_, Self, f32>>,
        gelu: Gelu,
    ) -> Result<()> {
        let inputs = MapInputs { x: Some(x), dout: None, bias, limit: 0.0 };
        self.launch_row_map(stream, &row_map::gelu_forward(gelu), out, inputs)
    }

    fn gelu_backward(
        &self,
        stream: &mut GpuStream<D>,
        dx: MatrixMut<'_, Self, P::Activation>,
        dout: Matrix<'_, Self, P::Activation>,
        x: Matrix<'_, Self, P::Activation>,
        bias: Option<Slice<'_, Self, f32>>,
        gelu: Gelu,
    ) -> Result<()> {
        let inputs = MapInputs { x: Some(x), dout: Some(dout), bias, limit: 0.0 };
        self.launch_row_map(stream, &row_map::gelu_backward(gelu), dx, inputs)
    }

    fn add_bias(
        &self,
        stream: &mut GpuStream<D>,
        out: MatrixMut<'_, Self, P::Activation>,
        bias: Slice<'_, Self, f32>,
    ) -> Result<()> {
        let inputs = MapInputs { x: None, dout: None, bias: Some(bias), limit: 0.0 };
        self.launch_row_map(stream, &row_map::ADD_BIAS, out, inputs)
    }

    fn add_bias_f32(
        &self,
        stream: &mut GpuStream<D>,
        out: MatrixMut<'_, Self, f32>,
        bias: Slice<'_, Self, f32>,
    ) -> Result<()> {
        let inputs = MapInputs { x: None, dout: None, bias: Some(bias), limit: 0.0 };
        self.launch_row_map(stream, &row_map::ADD_BIAS_F32, out, inputs)
    }

    fn bias_backward(
        &self,
        stream: &mut GpuStream<D>,
        dbias: SliceMut<'_, Self, f32>,
        dout: Matrix<'_, Self, P::Activation>,
        grains: GrainRows,
    ) -> Result<()> {
        self.launch_bias_backward(stream, dbias, dout, grains)
    }

    fn clamp(
        &self,
        stream: &mut GpuStream<D>,
        out: MatrixMut<'_, Self, P::Activation>,
        x: Matrix<'_, Self, P::Activation>,
        limit: f32,
    ) -> Result<()> {
        check_limit(row_map::CLAMP.kernel, limit)?;
        let inputs = MapInputs { x: Some(x), dout: None, bias: None, limit };
        self.launch_row_map(stream, &row_map::CLAMP, out, inputs)
    }

    fn clamp_backward(
        &self,
        stream: &mut GpuStream<D>,
        dx: MatrixMut<'_, Self, P::Activation>,
        x: Matrix<'_, Self, P::Activation>,
        limit: f32,
    ) -> Result<()> {
        check_limit(row_map::CLAMP_BACKWARD.kernel, limit)?;
        let inputs = MapInputs { x: Some(x), dout: None, bias: None, limit };
        self.launch_row_map(stream, &row_map::CLAMP_BACKWARD, dx, inputs)
    }

    fn causal_conv1d_silu_forward(
        &self,
        stream: &mut GpuStream<D>,
        out: MatrixMut<'_, Self, P::Activation>,
        inputs: ConvInputs<'_, Self>,
        shape: ConvShape,
    ) -> Result<()> {
        self.launch_causal_conv1d_silu_forward(stream, out, inputs, shape)
    }

    fn causal_conv1d_silu_backward(
        &self,
        stream: &mut GpuStream<D>,
        dx: MatrixMut<'_, Self, P::Activation>,
        dweight: SliceMut<'_, Self, f32>,
        dbias: Option<SliceMut<'_, Self, f32>>,
        dout: Matrix<'_, Self, P::Activation>,
        inputs: ConvInputs<'_, Self>,
        shape: ConvShape,
    ) -> Result<()> {
        self.launch_causal_conv1d_silu_backward(stream, dx, dweight, dbias, dout, inputs, shape)
    }

    fn selective_scan_saved_elements(&self, shape: ScanShape) -> usize {
        self.scan_saved_elements(shape)
    }

    fn selective_scan_forward(
        &self,
        stream: &mut GpuStream<D>,
        out: MatrixMut<'_, Self, P::Activation>,
        saved: SliceMut<'_, Self, f32>,
        inputs: ScanInputs<'_, Self>,
        shape: ScanShape,
    ) -> Result<()> {
        self.launch_selective_scan_forward(stream, out, saved, inputs, shape)
    }

    fn selective_scan_backward(
        &self,
        stream: &mut GpuStream<D>,
        gradients: ScanGradients<'_, Self>,
        regated: Option<MatrixMut<'_, Self, P::Activation>>,
        dout: Matrix<'_, Self, P::Activation>,
        inputs: ScanInputs<'_, Self>,
        saved: Slice<'_, Self, f32>,
        shape: ScanShape,
    ) -> Result<()> {
        self.launch_selective_scan_backward(stream, gradients, regated, dout, inputs, saved, shape)
    }

    fn causal_conv1d_silu_step(
        &self,
        stream: &mut GpuStream<D>,
        out: MatrixMut<'_, Self, P::Activation>,
        state: SliceMut<'_, Self, f32>,
        x: Matrix<'_, Self, P::Activation>,
        weight: Slice<'_, Self, f32>,
        bias: Option<Slice<'_, Self, f32>>,
        shape: ConvShape,
    ) -> Result<()> {
        self.launch_causal_conv1d_silu_step(stream, out, state, x, weight, bias, shape)
    }

    fn selective_scan_step(
        &self,
        stream: &mut GpuStream<D>,
        out: MatrixMut<'_, Self, P::Activation>,
        state: SliceMut<'_, Self, f32>,
        inputs: ScanInputs<'_, Self>,
        shape: ScanShape,
    ) -> Result<()> {
        self.launch_selective_scan_step(stream, out, state, inputs, shape)
    }

    fn attention_forward(
        &self,
        stream: &mut GpuStream<D>,
        out: MatrixMut<'_, Self, P::Activation>,
        log_sum_exp: SliceMut<'_, Self, f32>,
        inputs: AttentionInputs<'_, Self>,
        shape: AttentionShape,
    ) -> Result<()> {
        self.launch_attention_forward(stream, out, log_sum_exp, inputs, shape)
    }

    fn attention_backward(
        &self,
        stream: &mut GpuStream<D>,
        dqkv: MatrixMut<'_, Self, P::Activation>,
        dout: Matrix<'_, Self, P::Activation>,
        out: Matrix<'_, Self, P::Activation>,
        log_sum_exp: Slice<'_, Self, f32>,
        inputs: AttentionInputs<'_, Self>,
        shape: AttentionShape,
    ) -> Result<()> {
        self.launch_attention_backward(stream, dqkv, dout, out, log_sum_exp, inputs, shape)
    }

    fn append_to_cache(
        &self,
        stream: &mut GpuStream<D>,
        cache: SliceMut<'_, Self, P::Activation>,
        rows: Matrix<'_, Self, P::Activation>,
        past: Slice<'_, Self, u32>,
        capacity: usize,
    ) -> Result<()> {
        self.launch_append_to_cache(stream, cache, rows, past, capacity)
    }

    fn attention_cached(
        &self,
        stream: &mut GpuStream<D>,
        out: MatrixMut<'_, Self, P::Activation>,
        q: Matrix<'_, Self, P::Activation>,
        cache: KeyValueCache<'_, Self>,
        shape: AttentionShape,
    ) -> Result<()> {
        self.launch_attention_cached(stream, out, q, cache, shape)
    }

    fn cross_entropy(
        &self,
        stream: &mut GpuStream<D>,
        losses: SliceMut<'_, Self, f32>,
        logits: SliceMut<'_, Self, P::Activation>,
        targets: Slice<'_, Self, u32>,
        gradient: LogitGradient,
        shape: CrossEntropyShape,
    ) -> Result<()> {
        self.launch_cross_entropy(stream, losses, logits, targets, gradient, shape)
    }

    fn accumulate(
        &self,
        stream: &mut GpuStream<D>,
        lane: SliceMut<'_, Self, f32>,
        gradients: Slice<'_, Self, f32>,
    ) -> Result<()> {
        self.launch_accumulate(stream, lane, gradients)
    }

    fn mean_gradient(
        &self,
        stream: &mut GpuStream<D>,
        out: SliceMut<'_, Self, f32>,
        uses: &[Slice<'_, Self, f32>],
        count: f32,
    ) -> Result<()> {
        self.launch_mean_gradient(stream, out, uses, count)
    }

    fn sums_of_squares(
        &self,
        stream: &mut GpuStream<D>,
        x: Slice<'_, Self, f32>,
        ends: &[usize],
    ) -> Result<Vec<f64>> {
        self.launch_sums_of_squares(stream, x, ends)
    }

    fn adamw(
        &self,
        stream: &mut GpuStream<D>,
        parameters: SliceMut<'_, Self, f32>,
        exp_avg: SliceMut<'_, Self, f32>,
        exp_avg_sq: SliceMut<'_, Self, f32>,
        gradient: Slice<'_, Self, f32>,
        step: AdamWStep,
    ) -> Result<()> {
        self.launch_adamw(stream, parameters, exp_avg, exp_avg_sq, gradient, step)
    }
}
