//! Embedding.

use tidemill_kernels::reference::embedding::{backward, forward};
use tidemill_kernels::shape::GrainRows;
use tidemill_kernels::{Backend, KernelError, Slice};

use super::agreement::{Transcript, assert_close, assert_same_bits, tolerance};
use super::device::{Device, Layout, Placed};
use super::inputs::{Inputs, wide};

/// What the backward embedding promises to the bit: for each grain the sum of its rows from +0.0,
/// in order, then added to the lane.
fn add_in_order(lane: &mut [f32], dout: &[f32], tokens: &[u32], width: usize, grains: GrainRows) {
    for grain in 0..grains.grains() {
        let mut sum = vec![0.0_f32; lane.len()];
        for row in grains.range(grain) {
            for i in 0..width {
                sum[tokens[row] as usize * width + i] += dout[row * width + i];
            }
        }
        for (lane, sum) in lane.iter_mut().zip(sum) {
            *lane += sum;
        }
    }
}

/// Rows are copied to the bit; gradients are summed in the order promised, to the bit.
pub fn agrees<B: Backend<Activation = f32>>(backend: &B) -> Transcript {
    let mut device = Device::new(backend);
    let mut transcript = Transcript::default();
    let mut seed = 0;
    for vocab_size in [1, 5, 17, 259] {
        for width in [1, 3, 16, 17, 40] {
            for (rows, rows_per_grain) in [(1, 1), (7, 2), (9, 9), (128, 48)] {
                seed += 1;
                let mut inputs = Inputs::new(seed);
                let grains = GrainRows::new(rows, rows_per_grain).unwrap();
                let label =
                    format!("embedding vocab {vocab_size} width {width} {grains:?} seed {seed}");
                let table = inputs.uniform(vocab_size * width, -1.0, 1.0);
                let lane = inputs.uniform(vocab_size * width, -1.0, 1.0);
                let dout = inputs.uniform(rows * width, -1.0, 1.0);
                let tokens = inputs.tokens(rows, vocab_size);
                let strided = Layout::columns_of(rows, width + 2, 1, width);
                let wide_table = Layout::columns_of(vocab_size, width + 3, 2, width);
                let placed_tokens = device.upload(&tokens);
                let placed_table = Placed::new(&mut device, wide_table, &table);
                let mut out = Placed::poisoned(&mut device, strided);
                let tokens_view = Slice::all(&placed_tokens);
                backend
                    .embedding_forward(
                        &mut device.stream,
                        out.matrix_mut(),
                        placed_table.matrix(),
                        tokens_view,
                    )
                    .expect(&label);
                let out = out.read(&mut device);
                let expected = forward(&wide(&table), &tokens, width);
                let expected: Vec<f32> = expected.iter().map(|&x| x as f32).collect();
                assert_same_bits(&label, &out, &expected);

                let placed_dout = Placed::new(&mut device, strided, &dout);
                let mut placed_lane = Placed::new(&mut device, wide_table, &lane);
                backend
                    .embedding_backward_add(
                        &mut device.stream,
                        placed_lane.matrix_mut(),
                        placed_dout.matrix(),
                        tokens_view,
                        grains,
                    )
                    .expect(&label);
                let found = placed_lane.read(&mut device);
                let dtable = backward(&wide(&dout), &tokens, vocab_size, width);
                let expected: Vec<f64> =
                    dtable.iter().zip(&lane).map(|(d, &lane)| d + f64::from(lane)).collect();
                assert_close(&label, &found, &expected, tolerance::<f32>(rows));
                let mut in_order = lane.clone();
                add_in_order(&mut in_order, &dout, &tokens, width, grains);
                assert_same_bits(&format!("{label} in order"), &found, &in_order);
                transcript.record(&label, &found);
            }
        }
    }
    transcript
}

/// A token outside the vocabulary is named with its row, forward and backward.
pub fn refuses_tokens_out_of_range<B: Backend<Activation = f32>>(backend: &B) {
    let (rows, vocab_size, width) = (4, 5, 3);
    for token in [5, 6, u32::MAX] {
        let tokens = [4, 0, token, 1];
        let expect = |error: KernelError| match error {
            KernelError::TokenOutOfRange { row: 2, token: found, vocab_size: 5, .. } => {
                assert_eq!(found, token);
            }
            other => panic!("expected token {token} out of range, found {other:?}"),
        };
        let mut device = Device::new(backend);
        let placed_tokens = device.upload(&tokens);
        let table = Placed::new(&mut device, Layout::packed(vocab_size, width), &[0.5; 15]);
        let mut out = Placed::poisoned(&mut device, Layout::packed(rows, width));
        let result = backend.embedding_forward(
            &mut device.stream,
            out.matrix_mut(),
            table.matrix(),
            Slice::all(&placed_tokens),
        );
        expect(device.error_of(result));

        let mut device = Device::new(backend);
        let placed_tokens = device.upload(&tokens);
        let mut lane = Placed::new(&mut device, Layout::packed(vocab_size, width), &[0.5; 15]);
        let dout = Placed::new(&mut device, Layout::packed(rows, width), &[0.5; 12]);
        let result = backend.embedding_backward_add(
            &mut device.stream,
            lane.matrix_mut(),
            dout.matrix(),
            Slice::all(&placed_tokens),
            GrainRows::new(rows, 2).unwrap(),
        );
        expect(device.error_of(result));
    }
}
