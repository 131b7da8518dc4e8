//! Gradients of weights, added to a lane grain by grain.

use tidemill_kernels::Backend;
use tidemill_kernels::backend::Output;
use tidemill_kernels::reference::matmul::{MatmulShape, forward};
use tidemill_kernels::shape::GrainRows;

use super::agreement::{Transcript, assert_close, assert_same_bits, tolerance};
use super::arm::{Arm, Sums};
use super::device::{Device, Layout, MARGINS, Placed};
use super::inputs::{Inputs, wide};
use super::number::Number;

/// Sizes of one call.
#[derive(Clone, Copy, Debug)]
struct Case {
    rows: usize,
    rows_per_grain: usize,
    /// Columns of the gradient of the output.
    m: usize,
    /// Columns of the input.
    k: usize,
}

const fn case(rows: usize, rows_per_grain: usize, m: usize, k: usize) -> Case {
    Case { rows, rows_per_grain, m, k }
}

/// Short last grains, grains of one row, more of these than are computed together, grains longer than a block of any matrix library, and
/// grains of several parts.
const CASES: [Case; 11] = [
    case(1, 1, 1, 1),
    case(6, 1, 3, 5),
    case(16, 16, 17, 8),
    case(17, 5, 1, 33),
    case(129, 40, 24, 16),
    case(600, 257, 31, 40),
    case(1030, 1030, 9, 7),
    case(131, 1, 3, 5),
    case(10_030, 5_003, 9, 7),
    case(16_384, 8_192, 5, 8),
    case(70_000, 70_000, 2, 3),
];

/// Grains of three parts: the last is short in the first case, which also has a grain of one part, and whole in the second.
const CASES_OF_PARTS: [Case; 2] = [case(16_405, 8_200, 6, 8), case(24_576, 12_288, 3, 5)];

/// The operands of a case, each inside wider rows.
struct Operands<B: Backend<Activation: Number>> {
    case: Case,
    grains: GrainRows,
    grad_out: Vec<f32>,
    input: Vec<f32>,
    placed_grad_out: Placed<B, B::Activation>,
    placed_input: Placed<B, B::Activation>,
}

impl<B: Backend<Activation: Number>> Operands<B> {
    fn new(device: &mut Device<'_, B>, inputs: &mut Inputs, case: Case) -> Self {
        let Case { rows, rows_per_grain, m, k } = case;
        let grad_out = inputs.uniform_of::<B::Activation>(rows * m, -1.0, 1.0);
        let input = inputs.uniform_of::<B::Activation>(rows * k, -1.0, 1.0);
        let grad_out_layout = Layout::columns_of(rows, m + 3, 2, m);
        let input_layout = Layout::columns_of(rows, 2 * k + 1, k, k);
        Self {
            case,
            grains: GrainRows::new(rows, rows_per_grain).unwrap(),
            placed_grad_out: Placed::new(device, grad_out_layout, &grad_out),
            placed_input: Placed::new(device, input_layout, &input),
            grad_out,
            input,
        }
    }

    /// `lane` after the grains of rows `first .. first + rows` were added in one call.
    fn added(
        &self,
        device: &mut Device<'_, B>,
        lane: &[f32],
        layout: Layout,
        (first, rows): (usize, usize),
    ) -> Vec<f32> {
        let mut placed = Placed::new(device, layout, lane);
        let grad_out = self.placed_grad_out.matrix().rows(first, rows).unwrap();
        let input = self.placed_input.matrix().rows(first, rows).unwrap();
        let grains = GrainRows::new(rows, self.case.rows_per_grain).unwrap();
        let (backend, stream) = (device.backend, &mut device.stream);
        backend
            .weight_gradient_add(stream, placed.matrix_mut(), grad_out, input, grains)
            .unwrap_or_else(|error| panic!("{:?}: {error}", self.case));
        placed.read(device)
    }

    /// `lane + sum over grains of grad_out_g^T input_g`, in `f64`.
    fn expected(&self, lane: &[f32]) -> Vec<f64> {
        let Case { rows, m, k, .. } = self.case;
        let grad_out = wide(&self.grad_out);
        let transposed: Vec<f64> =
            (0..m * rows).map(|i| grad_out[i % rows * m + i / rows]).collect();
        let shape = MatmulShape { rows: m, inner: rows, columns: k };
        let product = forward(&transposed, &wide(&self.input), shape);
        product.iter().zip(wide(lane)).map(|(sum, lane)| sum + lane).collect()
    }
}

/// Agrees with the definition, and an element's bits depend on neither the lane's stride nor on how
/// many grains come in one call.
pub fn agrees<B: Backend<Activation: Number>>(arm: &Arm<B>) -> Transcript {
    let mut device = Device::new(arm);
    let mut transcript = Transcript::default();
    for (seed, case) in CASES.into_iter().enumerate() {
        let label = format!("weight_gradient_add {case:?} seed {seed}");
        let mut inputs = Inputs::new(seed as u64);
        let operands = Operands::new(&mut device, &mut inputs, case);
        let Case { rows, rows_per_grain, m, k } = case;
        let lane = inputs.uniform(m * k, -1.0, 1.0);
        let packed = Layout::packed(m, k);
        device.margin = MARGINS[0];
        let found = operands.added(&mut device, &lane, packed, (0, rows));
        assert_close(&label, &found, &operands.expected(&lane), tolerance::<f32>(rows));
        transcript.record(&label, &found);

        let strided = Layout::columns_of(m, 2 * k + 1, k, k);
        let elsewhere = operands.added(&mut device, &lane, strided, (0, rows));
        assert_same_bits(&format!("{label} in a strided lane"), &elsewhere, &found);
        if device.sums == Sums::OneByOne {
            let expected = product_then_sum(&mut device, &operands, &lane);
            assert_same_bits(&format!("{label} product, then sum"), &found, &expected);
        }
        let mut one_by_one = lane;
        for first in (0..rows).step_by(rows_per_grain) {
            let rows = rows_per_grain.min(rows - first);
            one_by_one = operands.added(&mut device, &one_by_one, packed, (first, rows));
        }
        assert_same_bits(&format!("{label} one by one"), &one_by_one, &found);
    }
    transcript
}

/// Where terms are added one by one, equal to the bit to a product of each grain by itself, then added.
fn product_then_sum<B: Backend<Activation: Number>>(
    device: &mut Device<'_, B>,
    operands: &Operands<B>,
    lane: &[f32],
) -> Vec<f32> {
    let Case { m, k, .. } = operands.case;
    let mut sum: Placed<B> = Placed::new(device, Layout::packed(m, k), lane);
    let mut product: Placed<B> = Placed::poisoned(device, Layout::packed(m, k));
    for grain in 0..operands.grains.grains() {
        let rows = operands.grains.range(grain);
        let grad_out = operands.placed_grad_out.matrix().rows(rows.start, rows.len()).unwrap();
        let input = operands.placed_input.matrix().rows(rows.start, rows.len()).unwrap();
        let (out, grad_out) = (product.matrix_mut(), grad_out.transposed());
        let (backend, stream) = (device.backend, &mut device.stream);
        backend.matmul_f32(stream, out, grad_out, input, Output::Overwrite).unwrap();
        backend.accumulate(stream, sum.slice_mut(), product.slice()).unwrap();
    }
    sum.read(device)
}

/// The rows of each part of a grain of at most 65,536: those documented for GPUs, and the whole grain elsewhere.
fn part_rows(sums: Sums, grain_rows: usize) -> usize {
    match sums {
        Sums::OneByOne => grain_rows,
        Sums::Ordered => 4096,
    }
}

/// Equal to the bit to the gradients of the parts of each grain, each formed as if it were a grain, added to one another in order and
/// then to the lane.
pub fn parts_are_added_in_order<B: Backend<Activation: Number>>(arm: &Arm<B>) -> Transcript {
    let mut device = Device::new(arm);
    let mut transcript = Transcript::default();
    for (seed, case) in CASES_OF_PARTS.into_iter().enumerate() {
        let label = format!("parts of {case:?} seed {seed}");
        let mut inputs = Inputs::new(100 + seed as u64);
        let operands = Operands::new(&mut device, &mut inputs, case);
        let Case { rows, m, k, .. } = case;
        let lane = inputs.uniform(m * k, -1.0, 1.0);
        let packed = Layout::packed(m, k);
        let found = operands.added(&mut device, &lane, packed, (0, rows));
        assert_close(&label, &found, &operands.expected(&lane), tolerance::<f32>(rows));
        transcript.record(&label, &found);

        let mut expected = lane;
        for grain in 0..operands.grains.grains() {
            let grain_rows = operands.grains.range(grain);
            let step = part_rows(device.sums, grain_rows.len());
            let mut of_grain = vec![0.0_f32; m * k];
            for first in grain_rows.clone().step_by(step) {
                let part = (first, step.min(grain_rows.end - first));
                let part = operands.added(&mut device, &vec![0.0; m * k], packed, part);
                of_grain.iter_mut().zip(part).for_each(|(sum, term)| *sum += term);
            }
            expected.iter_mut().zip(of_grain).for_each(|(sum, term)| *sum += term);
        }
        assert_same_bits(&label, &found, &expected);
    }
    transcript
}
