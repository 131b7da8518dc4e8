//! The step of the selective scan that computes its raw step sizes itself.

use tidemill_kernels::Backend;
use tidemill_kernels::backend::PieceState;
use tidemill_kernels::backend::{Output, ScanStepInputs};
use tidemill_kernels::reference::matmul::{MatmulShape, forward};
use tidemill_kernels::reference::selective_scan::{ScanInputs, step};
use tidemill_kernels::shape::{ScanShape, SequenceShape};

use super::agreement::{Transcript, assert_close_beside, assert_same_bits, tolerance};
use super::arm::Arm;
use super::device::{Device, Layout, MARGINS, Placed, assert_shape_error};
use super::inputs::{Inputs, wide};
use super::number::Number;
use super::ordered_product::transposed;
use super::scan_case::{PlacedInputs, Regime, ScanCase};

/// Ranks, channels, states and samples: sizes of the fused kernel, and for each of its conditions one size that fails it.
const SIZES: [[usize; 4]; 9] = [
    [160, 64, 16, 1],
    [8, 32, 16, 1],
    [72, 96, 16, 2],
    [256, 32, 16, 2],
    [264, 32, 16, 1],
    [5, 64, 16, 2],
    [16, 64, 16, 3],
    [16, 40, 16, 1],
    [1, 1, 1, 1],
];

/// A step has the bits of the product followed by the scan of one position, and agrees with the definition of both.
pub fn agrees<B: Backend<Activation: Number>>(arm: &Arm<B>) -> Transcript {
    let backend = &arm.backend;
    let mut device = Device::new(arm);
    let mut transcript = Transcript::default();
    for (seed, [rank, channels, states, samples]) in SIZES.into_iter().enumerate() {
        let label = format!(
            "step of {rank} terms, {channels} channels, {states} states, {samples} samples"
        );
        let mut inputs = Inputs::new(seed as u64);
        let shape =
            ScanShape::new(SequenceShape::new(samples, 1).unwrap(), 1, channels, states).unwrap();
        let case = ScanCase::new::<B::Activation>(&mut inputs, shape, Regime::Mild);
        let low = inputs.uniform_of::<B::Activation>(samples * rank, -1.0, 1.0);
        let weight = inputs.uniform_of::<B::Activation>(channels * rank, -0.2, 0.2);
        let held = samples * channels * states;
        let initial = inputs.uniform(held, -1.0, 1.0);

        let of_product = MatmulShape { rows: samples, inner: rank, columns: channels };
        let columns = transposed(&wide(&weight), channels, rank);
        let delta_raw = forward(&wide(&low), &columns, of_product);
        let mut expected_state = wide(&initial);
        let inputs = case.wide();
        let expected = step(
            &mut expected_state,
            &ScanInputs { delta_raw: &delta_raw, ..inputs.view() },
            shape,
        );
        for margin in MARGINS {
            device.margin = margin;
            let placed = PlacedInputs::new(&mut device, &case, shape);
            let low =
                Placed::new(&mut device, Layout::columns_of(samples, rank + 8, 0, rank), &low);
            let weight = Placed::new(&mut device, Layout::packed(channels, rank), &weight);
            let packed = Layout::packed(samples, channels);
            let [mut apart, mut together, mut delta_apart, mut delta_together]: [Placed<
                B,
                B::Activation,
            >; 4] = std::array::from_fn(|_| Placed::poisoned(&mut device, packed));
            let [mut state_apart, mut state_together]: [Placed<B>; 2] =
                std::array::from_fn(|_| Placed::new(&mut device, Layout::range(held), &initial));
            let (product, stream) = (delta_apart.matrix_mut(), &mut device.stream);
            backend
                .ordered_matmul(stream, product, low.matrix(), weight.matrix(), Output::Overwrite)
                .expect(&label);
            let view = placed.view();
            let step = ScanStepInputs {
                low: low.matrix(),
                dt_weight: weight.matrix(),
                delta_bias: view.delta_bias,
                x: view.x,
                bc: view.bc,
                z: view.z,
                a_log: view.a_log,
                d: view.d,
            };
            let view = step.with(delta_apart.matrix());
            let (out, state) = (apart.matrix_mut(), state_apart.slice_mut());
            let piece = PieceState { state, lengths: None };
            backend.selective_scan_piece(stream, out, piece, view, shape).expect(&label);
            let (out, state) = (together.matrix_mut(), state_together.slice_mut());
            let room = delta_together.matrix_mut();
            backend.selective_scan_step(stream, out, state, room, step, shape).expect(&label);

            let (out, state) = (together.read(&mut device), state_together.read(&mut device));
            assert_same_bits(&label, &out, &apart.read(&mut device));
            assert_same_bits(&format!("{label} state"), &state, &state_apart.read(&mut device));
            // The raw step size is rounded once more than in the definition.
            let of_state = tolerance::<B::Activation>(rank + states);
            let of_out = of_state.rounded_twice().beside(2.0 * B::Activation::ROUNDING);
            assert_close_beside(&label, &out, &expected, of_out, 1.0);
            let of_state = of_state.beside(B::Activation::ROUNDING);
            assert_close_beside(&format!("{label} state"), &state, &expected_state, of_state, 1.0);
            transcript.record(&label, &out);
            transcript.record(&format!("{label} state"), &state);
        }
    }
    transcript.assert_each_label_has_one_result();
    transcript
}

/// A step of two positions is refused, and so is a row of `low` with another number of terms than `dt_weight`.
pub fn refuses_shapes<B: Backend<Activation: Number>>(arm: &Arm<B>) {
    let mut device = Device::new(arm);
    let shape_of = |positions| {
        let sequences = SequenceShape::new(1, positions).unwrap();
        ScanShape::new(sequences, 1, 32, 16).unwrap()
    };
    for (what, positions, terms) in [("two positions", 2, 8), ("another rank", 1, 16)] {
        let shape = shape_of(positions);
        let case = ScanCase::new::<B::Activation>(&mut Inputs::new(1), shape, Regime::Mild);
        let placed = PlacedInputs::new(&mut device, &case, shape);
        let low: Placed<B, B::Activation> =
            Placed::poisoned(&mut device, Layout::packed(positions, 8));
        let weight: Placed<B, B::Activation> =
            Placed::poisoned(&mut device, Layout::packed(32, terms));
        let mut out = Placed::poisoned(&mut device, Layout::packed(positions, 32));
        let mut room = Placed::poisoned(&mut device, Layout::packed(positions, 32));
        let mut state = Placed::poisoned(&mut device, Layout::range(32 * 16));
        let view = placed.view();
        let step = ScanStepInputs {
            low: low.matrix(),
            dt_weight: weight.matrix(),
            delta_bias: view.delta_bias,
            x: view.x,
            bc: view.bc,
            z: view.z,
            a_log: view.a_log,
            d: view.d,
        };
        let (out, state, room) = (out.matrix_mut(), state.slice_mut(), room.matrix_mut());
        let result =
            arm.backend.selective_scan_step(&mut device.stream, out, state, room, step, shape);
        assert_shape_error(what, result);
    }
}
