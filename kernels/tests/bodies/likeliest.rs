//! The most likely token of each row of logits.

use tidemill_kernels::backend::NO_TOKEN;
use tidemill_kernels::{Backend, SliceMut};

use super::agreement::Transcript;
use super::arm::Arm;
use super::device::{Device, Layout, Placed, assert_shape_error};
use super::inputs::Inputs;
use super::number::{Number, rounded};

fn tokens<B: Backend>(
    device: &mut Device<'_, B>,
    layout: Layout,
    logits: &[f32],
    rows: usize,
    scale: f32,
) -> Vec<u32> {
    let logits: Placed<B> = Placed::new(device, layout, logits);
    let mut tokens = device.upload(&vec![7; rows]);
    let (backend, stream) = (device.backend, &mut device.stream);
    backend.likeliest(stream, SliceMut::all(&mut tokens), logits.matrix(), scale).unwrap();
    device.download(&tokens)
}

fn tokens_of_activations<B: Backend<Activation: Number>>(
    device: &mut Device<'_, B>,
    layout: Layout,
    logits: &[f32],
    rows: usize,
    scale: f32,
) -> Vec<u32> {
    let logits: Placed<B, B::Activation> = Placed::new(device, layout, logits);
    let mut tokens = device.upload(&vec![7; rows]);
    let (backend, stream) = (device.backend, &mut device.stream);
    let (out, logits) = (SliceMut::all(&mut tokens), logits.matrix());
    backend.likeliest_of_activations(stream, out, logits, scale).unwrap();
    device.download(&tokens)
}

/// The lowest column of the greatest logit, in random rows and in rows with special values; the padding of a row is never read.
///
/// Seen failing: without its barrier, without the columns of other threads, those of later loads and those behind the last whole load, where
/// a later equal stays, and where infinity counts as a number.
pub fn agrees<B: Backend<Activation: Number>>(arm: &Arm<B>) -> Transcript {
    let mut device = Device::new(arm);
    let mut transcript = Transcript::default();
    for (seed, rows, columns) in
        [(1, 1, 1), (2, 3, 31), (3, 2, 1023), (4, 2, 1025), (5, 5, 3000), (6, 2, 20_475)]
    {
        for scale in [1.0, 0.25] {
            let mut inputs = Inputs::new(seed);
            let mut logits = inputs.uniform_of::<f32>(rows * columns, -3.0, 3.0);
            // Two equal greatest logits.
            for row in logits.chunks_mut(columns) {
                let (one, other) = (inputs.pick(columns), inputs.pick(columns));
                row[one] = 5.0;
                row[other] = 5.0;
            }
            let layout = Layout::columns_of(rows, columns + 5, 0, columns);
            let found = tokens(&mut device, layout, &logits, rows, scale);
            let expected = |row: &[f32]| row.iter().position(|&logit| logit == 5.0).unwrap() as u32;
            let expected: Vec<u32> = logits.chunks(columns).map(expected).collect();
            assert_eq!(found, expected, "seed {seed}, scale {scale}: found, expected");
            transcript.record_words("likeliest", found.iter().map(|&token| u64::from(token)));
            let logits = rounded::<B::Activation>(&logits);
            let found = tokens_of_activations(&mut device, layout, &logits, rows, scale);
            assert_eq!(found, expected, "seed {seed}, scale {scale}: found, expected");
        }
    }
    let (infinite, most) = (f32::INFINITY, f32::MAX);
    let hard = [
        [-0.0, 0.0, -1.0, 0.0],
        [-most, -2.0, -most, -2.0],
        [-most; 4],
        [1.0, f32::NAN, 2.0, 0.0],
        [infinite, 1.0, 2.0, 3.0],
        [-infinite, 1.0, 2.0, 3.0],
        [1e-45, 0.0, 3e-45, -1e-45],
    ];
    for layout in [Layout::packed(7, 4), Layout::columns_of(7, 5, 0, 4)] {
        let found = tokens(&mut device, layout, hard.as_flattened(), 7, 1.0);
        assert_eq!(found, [0, 1, 0, NO_TOKEN, NO_TOKEN, NO_TOKEN, 2], "found, expected");
    }
    let hard = rounded::<B::Activation>(hard[..6].as_flattened());
    let found = tokens_of_activations(&mut device, Layout::packed(6, 4), &hard, 6, 1.0);
    assert_eq!(found[3..], [NO_TOKEN; 3], "found, expected");
    let found = tokens(&mut device, Layout::packed(1, 2), &[most, 1.0], 1, 2.0);
    assert_eq!(found, [NO_TOKEN], "found, expected");
    transcript
}

/// Exactly one token for each row.
pub fn refuses_shapes<B: Backend<Activation: Number>>(arm: &Arm<B>) {
    let mut device = Device::new(arm);
    let logits: Placed<B> = Placed::new(&mut device, Layout::packed(2, 3), &[0.0; 6]);
    for count in [1, 3] {
        let mut tokens = device.upload(&vec![0; count]);
        let (backend, stream) = (device.backend, &mut device.stream);
        let result = backend.likeliest(stream, SliceMut::all(&mut tokens), logits.matrix(), 1.0);
        assert_shape_error("likeliest", result);
    }
}
