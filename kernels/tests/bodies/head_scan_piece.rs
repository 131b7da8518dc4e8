//! The scan of heads over pieces of sequences.

use tidemill_kernels::Backend;
use tidemill_kernels::backend::PieceState;
use tidemill_kernels::reference::head_scan::piece;

use super::agreement::{Transcript, assert_close_beside, tolerance};
use super::arm::Arm;
use super::device::{Device, Layout, MARGINS, Placed};
use super::head_scan_case::{HeadScanCase, PlacedInputs, shape_of, with_sequences};
use super::inputs::{Inputs, wide};
use super::number::Number;
use super::pieces::{Cut, LENGTHS, cuts, rows_there, slice};
use super::scan_case::Regime;

/// Outputs agree with the definition and have the same bits however sequences are cut, position by position too; so does the
/// remembered state.
pub fn pieces_agree<B: Backend<Activation: Number>>(arm: &Arm<B>) -> Transcript {
    let backend = &arm.backend;
    let mut device = Device::new(arm);
    let mut transcript = Transcript::default();
    let (samples, positions) = (LENGTHS.len(), LENGTHS[0]);
    let sizes = [[1, 1, 1, 1], [3, 5, 1, 17], [4, 16, 2, 16], [2, 64, 1, 128], [2, 17, 2, 3]];
    for (seed, heads) in sizes.into_iter().enumerate() {
        device.margin = MARGINS[seed % 2];
        let mut inputs = Inputs::new(seed as u64);
        let whole = shape_of([samples, positions], samples, heads);
        let (width, held) = (whole.width(), whole.width() * whole.states());
        let regime = [Regime::Mild, Regime::Saturated][seed % 2];
        let case = HeadScanCase::new::<B::Activation>(&mut inputs, whole, regime);
        let initial = inputs.uniform(samples * held, -1.0, 1.0);

        let (mut expected, mut expected_state) = (Vec::new(), Vec::new());
        for (sample, length) in LENGTHS.into_iter().enumerate() {
            let mut state = wide(&initial[sample * held..][..held]);
            let rows = sample * positions..sample * positions + length;
            let one = case.rows(&rows, whole).wide();
            let shape = with_sequences(whole, [1, length], 1);
            expected.extend(piece(&mut state, &one.view(), shape));
            expected_state.extend(state);
        }
        for pieces in cuts() {
            let label = format!("scan of heads {heads:?}, pieces {pieces:?}");
            let mut state = Placed::new(&mut device, Layout::range(samples * held), &initial);
            let mut all = vec![f32::NAN; samples * positions * width];
            for cut in Cut::all(&pieces) {
                let (sequences, length) = (cut.lengths.len(), cut.positions.len());
                let shape = with_sequences(whole, [sequences, length], sequences);
                let columns = HeadScanCase::columns(whole);
                let of_rows = std::array::from_fn(|i| cut.rows(&case.of_rows[i], columns[i]));
                let part = HeadScanCase { of_rows, ..case.clone() };
                let placed = PlacedInputs::new(&mut device, &part, shape);
                let packed = Layout::packed(shape.sequences().rows(), width);
                let mut out: Placed<B> = Placed::poisoned(&mut device, packed);
                let lengths = cut.told(&mut device);
                let (results, lengths) = (out.matrix_mut(), slice::<B>(&lengths));
                let state = state.slice_mut().sub(0, sequences * held).unwrap();
                let stream = &mut device.stream;
                backend
                    .head_scan_piece(
                        stream,
                        results,
                        PieceState { state, lengths },
                        placed.view(),
                        shape,
                    )
                    .expect(&label);
                cut.place::<f32>(&out.read(&mut device), width, &mut all);
            }
            let found = rows_there(&all, width);
            let state = state.read(&mut device);
            let of_sums = tolerance::<f32>(whole.states() * positions);
            assert_close_beside(&label, &found, &expected, of_sums, 1.0);
            assert_close_beside(&format!("{label} state"), &state, &expected_state, of_sums, 1.0);
            // One label for all cuts, whose results must be equal.
            let label = format!("scan of heads {heads:?}");
            transcript.record(&label, &found);
            transcript.record(&format!("{label} state"), &state);
        }
    }
    transcript.assert_each_label_has_one_result();
    transcript
}
