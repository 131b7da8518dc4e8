//! Biases, GELU and clamps.

use tidemill_kernels::backend::{Gelu, GeluGradients};
use tidemill_kernels::reference::gelu::{gelu, gelu_derivative};
use tidemill_kernels::shape::GrainRows;
use tidemill_kernels::{Backend, Slice};

use super::agreement::{
    Transcript, assert_close, assert_close_beside, assert_same_bits, tolerance,
};
use super::arm::Arm;
use super::device::{Device, Layout, MARGINS, Placed, assert_shape_error};
use super::inputs::{Inputs, wide};
use super::number::Number;
use super::refusal_case::{
    Bench, assert_answer, matrix, matrix_mut, slice, slice_mut, wrong_by_one,
};

/// Rows and columns: of one element, odd, and beyond a block's columns.
const SHAPES: [[usize; 2]; 6] = [[1, 1], [3, 7], [5, 16], [9, 129], [2, 2056], [6, 1088]];

/// The inputs of the maps.
struct Case {
    x: Vec<f32>,
    dout: Vec<f32>,
    bias: Vec<f32>,
}

impl Case {
    fn new<T: Number>(seed: u64, [rows, columns]: [usize; 2]) -> Self {
        let inputs = &mut Inputs::new(seed);
        Self {
            x: inputs.uniform_of::<T>(rows * columns, -6.0, 6.0),
            dout: inputs.uniform_of::<T>(rows * columns, -1.0, 1.0),
            bias: inputs.uniform(columns, -1.0, 1.0),
        }
    }

    /// x plus the bias, rounded as the kernels round it.
    fn biased(&self, biased: bool) -> Vec<f64> {
        let bias = self.bias.iter().cycle();
        let sums = self.x.iter().zip(bias).map(|(x, bias)| if biased { x + bias } else { *x });
        sums.map(f64::from).collect()
    }

    fn rows(&self, rows: std::ops::Range<usize>) -> Self {
        let columns = self.bias.len();
        let elements = rows.start * columns..rows.end * columns;
        Self {
            x: self.x[elements.clone()].to_vec(),
            dout: self.dout[elements].to_vec(),
            bias: self.bias.clone(),
        }
    }
}

/// The results of GELU, forward and backward.
struct OfGelu {
    values: Vec<f32>,
    gradients: Vec<f32>,
    /// `[grains, n]`, if there is a bias.
    dbias: Option<Vec<f32>>,
}

/// Values and gradients of GELU. The gradients of the bias equal the sums of [`bias_backward`](Backend::bias_backward), and the values of
/// both directions are equal, to the bit.
fn run_gelu<B: Backend<Activation: Number>>(
    device: &mut Device<'_, B>,
    label: &str,
    case: &Case,
    biased: bool,
    grains: GrainRows,
    kind: Gelu,
) -> OfGelu {
    let (rows, columns) = (grains.rows(), case.bias.len());
    let (strided, packed) = (Layout::inside_wider(rows, columns), Layout::packed(rows, columns));
    let x = Placed::<B, B::Activation>::new(device, strided, &case.x);
    let mut gradient = Placed::<B, B::Activation>::new(device, strided, &case.dout);
    let bias = Placed::<B>::new(device, Layout::range(columns), &case.bias);
    let bias = || biased.then(|| bias.slice());
    let mut out = Placed::<B, B::Activation>::poisoned(device, packed);
    let mut again = Placed::<B, B::Activation>::poisoned(device, packed);
    let of_grains = Layout::packed(grains.grains(), columns);
    let mut dbias = biased.then(|| Placed::<B>::poisoned(device, of_grains));
    let mut sums = Placed::<B>::poisoned(device, of_grains);
    let (backend, stream) = (device.backend, &mut device.stream);
    backend.gelu_forward(stream, out.matrix_mut(), x.matrix(), bias(), kind).unwrap();
    let gradients = GeluGradients {
        gradient: gradient.matrix_mut(),
        out: again.matrix_mut(),
        dbias: dbias.as_mut().map(Placed::slice_mut),
    };
    backend.gelu_backward(stream, gradients, x.matrix(), bias(), grains, kind).unwrap();
    backend.bias_backward(stream, sums.slice_mut(), gradient.matrix(), grains).unwrap();
    let found = OfGelu {
        values: out.read(device),
        gradients: gradient.read(device),
        dbias: dbias.map(|dbias| dbias.read(device)),
    };
    // All NaN count as equal.
    let of_one_nan = |x: &[f32]| -> Vec<f32> {
        x.iter().map(|&x| if x.is_nan() { f32::NAN } else { x }).collect()
    };
    let [again, values] = [&again.read(device), &found.values].map(|x| of_one_nan(x));
    assert_same_bits(&format!("{label} values again"), &again, &values);
    if let Some(dbias) = &found.dbias {
        assert_same_bits(&format!("{label} bias"), dbias, &sums.read(device));
    }
    found
}

/// Both kinds of GELU agree with the definition, and an element does not depend on others.
pub fn gelu_agrees<B: Backend<Activation: Number>>(arm: &Arm<B>) -> Transcript {
    let mut device = Device::new(arm);
    let mut transcript = Transcript::default();
    // In the last case a run of rows of a bias's gradient ends within a grain.
    for (seed, shape) in SHAPES.into_iter().chain([[75, 40]]).enumerate() {
        let case = Case::new::<B::Activation>(seed as u64, shape);
        let grains = GrainRows::new(shape[0], 2 + 11 * seed).unwrap();
        for (kind, biased) in
            [(Gelu::Erf, true), (Gelu::Erf, false), (Gelu::Tanh, true), (Gelu::Tanh, false)]
        {
            let label = format!("{kind:?} gelu {shape:?} seed {seed} bias {biased}");
            device.margin = MARGINS[0];
            let found = run_gelu(&mut device, &label, &case, biased, grains, kind);
            let x = case.biased(biased);
            let values: Vec<f64> = x.iter().map(|&x| gelu(x, kind)).collect();
            let slopes = x.iter().map(|&x| gelu_derivative(x, kind));
            let gradients: Vec<f64> =
                slopes.zip(wide(&case.dout)).map(|(slope, dout)| slope * dout).collect();
            let allowed = tolerance::<B::Activation>(1);
            assert_close(&format!("{label} forward"), &found.values, &values, allowed);
            let backward = format!("{label} backward");
            assert_close_beside(&backward, &found.gradients, &gradients, allowed, 1.0);
            transcript.record(&label, &found.values);
            transcript.record(&label, &found.gradients);
            // The last grain has the same bits when it is computed alone.
            device.margin = MARGINS[1];
            let last = grains.range(grains.grains() - 1);
            let first = last.start * shape[1];
            let one = GrainRows::new(last.len(), last.len()).unwrap();
            let alone = run_gelu(&mut device, &label, &case.rows(last), biased, one, kind);
            assert_same_bits(&label, &alone.values, &found.values[first..]);
            assert_same_bits(&label, &alone.gradients, &found.gradients[first..]);
            if let (Some(alone), Some(found)) = (&alone.dbias, &found.dbias) {
                transcript.record(&label, found);
                assert_same_bits(&label, alone, &found[found.len() - shape[1]..]);
            }
        }
    }
    transcript
}

/// GELU of large numbers: its limits, no NaN without a NaN in the input, and a NaN for each NaN.
pub fn gelu_saturates<B: Backend<Activation: Number>>(arm: &Arm<B>) -> Transcript {
    let mut device = Device::new(arm);
    let mut transcript = Transcript::default();
    let mut x: Vec<f32> = vec![1.5e38, 1e20, 40.0, -40.0, -1e20, 0.0, f32::NAN];
    x.iter_mut().for_each(|x| *x = B::Activation::rounded(*x).widened());
    let case = Case { dout: vec![1.0; x.len()], bias: vec![0.0; x.len()], x };
    for kind in [Gelu::Erf, Gelu::Tanh] {
        let grains = GrainRows::new(1, 1).unwrap();
        let found = run_gelu(&mut device, "far out", &case, false, grains, kind);
        let OfGelu { values, gradients: slopes, .. } = found;
        assert_same_bits("values", &values[..3], &case.x[..3]);
        assert_same_bits("slopes", &slopes[..3], &[1.0; 3]);
        for y in values[3..6].iter().chain(&slopes[3..5]) {
            assert!(y.abs() < 1e-15, "{kind:?}: {values:?}, {slopes:?}");
        }
        assert_same_bits("slope at zero", &slopes[5..6], &[0.5]);
        assert!(values[6].is_nan() && slopes[6].is_nan(), "{kind:?}");
        transcript.record("gelu", &values[..6]);
    }
    transcript
}

/// Biases are added to either kind of matrix, and their gradients are sums over the rows of a grain.
pub fn biases_agree<B: Backend<Activation: Number>>(arm: &Arm<B>) -> Transcript {
    let mut device = Device::new(arm);
    let mut transcript = Transcript::default();
    for (seed, [rows, columns]) in SHAPES.into_iter().chain([[150, 40]]).enumerate() {
        device.margin = MARGINS[seed % 2];
        let label = format!("bias [{rows}, {columns}] seed {seed}");
        let case = Case::new::<B::Activation>(seed as u64, [rows, columns]);
        let strided = Layout::inside_wider(rows, columns);
        let bias = Placed::<B>::new(&mut device, Layout::range(columns), &case.bias);
        let mut out = Placed::<B, B::Activation>::new(&mut device, strided, &case.x);
        let mut out_f32 = Placed::<B>::new(&mut device, strided, &case.x);
        let dout = Placed::<B, B::Activation>::new(&mut device, strided, &case.dout);
        let (backend, stream) = (device.backend, &mut device.stream);
        backend.add_bias(stream, out.matrix_mut(), bias.slice()).unwrap();
        backend.add_bias_f32(stream, out_f32.matrix_mut(), bias.slice()).unwrap();
        let sums: Vec<f32> = case.biased(true).into_iter().map(|x| x as f32).collect();
        let rounded: Vec<f32> = sums.iter().map(|&x| B::Activation::rounded(x).widened()).collect();
        assert_same_bits(&label, &out.read(&mut device), &rounded);
        assert_same_bits(&label, &out_f32.read(&mut device), &sums);

        for rows_per_grain in [1, 4, 100, rows + 1] {
            let grains = GrainRows::new(rows, rows_per_grain).unwrap();
            let label = format!("{label} {grains:?}");
            let of_grains = Layout::packed(grains.grains(), columns);
            let mut dbias = Placed::<B>::poisoned(&mut device, of_grains);
            let stream = &mut device.stream;
            backend.bias_backward(stream, dbias.slice_mut(), dout.matrix(), grains).unwrap();
            let found = dbias.read(&mut device);
            for (grain, found) in found.chunks(columns).enumerate() {
                let range = grains.range(grain);
                let expected: Vec<f64> = (0..columns)
                    .map(|i| range.clone().map(|row| f64::from(case.dout[row * columns + i])).sum())
                    .collect();
                let allowed = tolerance::<f32>(range.len());
                assert_close_beside(&label, found, &expected, allowed, 1.0);
                // A grain has the same bits when it is computed alone.
                let part = Layout::packed(range.len(), columns);
                let dout = &case.rows(range.clone()).dout;
                let part = Placed::<B, B::Activation>::new(&mut device, part, dout);
                let mut alone = Placed::<B>::poisoned(&mut device, Layout::range(columns));
                let one = GrainRows::new(range.len(), rows_per_grain).unwrap();
                let stream = &mut device.stream;
                backend.bias_backward(stream, alone.slice_mut(), part.matrix(), one).unwrap();
                assert_same_bits(&label, &alone.read(&mut device), found);
            }
            transcript.record(&label, &found);
        }
    }
    transcript
}

/// The gradients of biases over grains of more than 512 runs of 32 rows, the last of which is not whole, and over a short last grain:
/// runs are added one after the other, from the first. Of each run one row alone is not zero, so that its sum is exact.
pub fn biases_of_long_grains_agree<B: Backend<Activation: Number>>(arm: &Arm<B>) -> Transcript {
    const RUN_ROWS: usize = 32;
    let mut device = Device::new(arm);
    let mut transcript = Transcript::default();
    let (rows, rows_per_grain, columns) = (33_900, 16_890, 37);
    let grains = GrainRows::new(rows, rows_per_grain).unwrap();
    let label = format!("{columns} biases of {grains:?}");
    let mut dout = Case::new::<B::Activation>(1, [rows, columns]).dout;
    for (place, row) in (0..grains.grains()).flat_map(|grain| grains.range(grain).enumerate()) {
        if place % RUN_ROWS != place / RUN_ROWS % 10 {
            dout[row * columns..(row + 1) * columns].fill(0.0);
        }
    }
    let placed = Placed::<B, B::Activation>::new(&mut device, Layout::packed(rows, columns), &dout);
    let mut dbias = Placed::<B>::poisoned(&mut device, Layout::packed(grains.grains(), columns));
    let (backend, stream) = (device.backend, &mut device.stream);
    backend.bias_backward(stream, dbias.slice_mut(), placed.matrix(), grains).unwrap();
    let found = dbias.read(&mut device);
    for (grain, found) in found.chunks(columns).enumerate() {
        let mut expected = vec![0.0_f32; columns];
        for row in grains.range(grain) {
            for (sum, term) in expected.iter_mut().zip(&dout[row * columns..]) {
                *sum += term;
            }
        }
        assert_same_bits(&format!("{label} grain {grain}"), found, &expected);
    }
    transcript.record(&label, &found);
    transcript
}

/// Clamps keep elements within the limit to the bit, and pass no gradient to elements beyond it.
pub fn clamps_agree<B: Backend<Activation: Number>>(arm: &Arm<B>) -> Transcript {
    let mut device = Device::new(arm);
    let mut transcript = Transcript::default();
    for (seed, [rows, columns]) in SHAPES.into_iter().enumerate() {
        device.margin = MARGINS[seed % 2];
        let label = format!("clamp [{rows}, {columns}] seed {seed}");
        let mut case = Case::new::<B::Activation>(seed as u64, [rows, columns]);
        let limit = 2.5;
        if let [first, second, third, fourth, ..] = &mut case.x[..] {
            [*first, *second, *third, *fourth] = [limit, -limit, f32::INFINITY, -0.0];
        }
        let strided = Layout::inside_wider(rows, columns);
        let x = Placed::<B, B::Activation>::new(&mut device, strided, &case.x);
        let mut out =
            Placed::<B, B::Activation>::poisoned(&mut device, Layout::packed(rows, columns));
        let mut dx = Placed::<B, B::Activation>::new(&mut device, strided, &case.dout);
        let (backend, stream) = (device.backend, &mut device.stream);
        backend.clamp(stream, out.matrix_mut(), x.matrix(), limit).unwrap();
        backend.clamp_backward(stream, dx.matrix_mut(), x.matrix(), limit).unwrap();
        let expected: Vec<f32> = case.x.iter().map(|x| x.clamp(-limit, limit)).collect();
        let pairs = case.x.iter().zip(&case.dout);
        let gradient: Vec<f32> =
            pairs.map(|(x, dout)| if x.abs() > limit { 0.0 } else { *dout }).collect();
        let (out, dx) = (out.read(&mut device), dx.read(&mut device));
        assert_same_bits(&label, &out, &expected);
        assert_same_bits(&label, &dx, &gradient);
        transcript.record(&label, &out);
        transcript.record(&label, &dx);
    }
    transcript
}

/// Shapes that do not fit maps of 5 rows of 4, and invalid limits.
pub fn refuse_shapes<B: Backend<Activation: Number>>(arm: &Arm<B>) {
    let (backend, mut bench) = (&arm.backend, Bench::new(arm));
    let grains = GrainRows::new(5, 2).unwrap();
    for (wrong, sizes) in wrong_by_one([5, 4, 5, 4, 4, 5, 4, 12]) {
        let [rows, width, x_rows, x_width, bias, out_rows, out_width, dbias] = sizes;
        let (activations, zeros) = (&bench.activations, &bench.zeros);
        let (stream, outs) = (&mut bench.device.stream, &mut bench.activation_outs);
        let [out, gradient, ..] = outs;
        let x = || matrix(activations, [x_rows, x_width]);
        let bias: Option<Slice<'_, B, f32>> = Some(slice(zeros, bias));
        let gradients = GeluGradients {
            gradient: matrix_mut(gradient, [rows, width]),
            out: matrix_mut(out, [out_rows, out_width]),
            dbias: Some(slice_mut(&mut bench.outs[0], dbias)),
        };
        let result = backend.gelu_backward(stream, gradients, x(), bias, grains, Gelu::Erf);
        assert_answer("gelu_backward", wrong, result);
        let of_forward = wrong.filter(|&size| size < 5);
        let y = matrix_mut(out, [rows, width]);
        let result = backend.gelu_forward(stream, y, x(), bias, Gelu::Tanh);
        assert_answer("gelu_forward", of_forward, result);
        let without_bias = wrong.filter(|&size| size < 4);
        let result = backend.clamp(stream, matrix_mut(out, [rows, width]), x(), 1.0);
        assert_answer("clamp", without_bias, result);
        let result = backend.clamp_backward(stream, matrix_mut(out, [rows, width]), x(), 1.0);
        assert_answer("clamp_backward", without_bias, result);
    }
    for limit in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        let x = matrix(&bench.activations, [5, 4]);
        let (stream, out) = (&mut bench.device.stream, &mut bench.activation_outs[0]);
        assert_shape_error("clamp", backend.clamp(stream, matrix_mut(out, [5, 4]), x, limit));
        let result = backend.clamp_backward(stream, matrix_mut(out, [5, 4]), x, limit);
        assert_shape_error("clamp_backward", result);
    }
    for (wrong, [width, bias]) in wrong_by_one([4, 4]) {
        let bias = slice(&bench.zeros, bias);
        let (stream, out) = (&mut bench.device.stream, &mut bench.activation_outs[0]);
        assert_answer(
            "add_bias",
            wrong,
            backend.add_bias(stream, matrix_mut(out, [5, width]), bias),
        );
        let out = matrix_mut(&mut bench.outs[0], [5, width]);
        assert_answer("add_bias_f32", wrong, backend.add_bias_f32(stream, out, bias));
    }
    for (wrong, [dbias, rows, width]) in wrong_by_one([12, 5, 4]) {
        let dout = matrix(&bench.activations, [rows, width]);
        let dbias = slice_mut(&mut bench.outs[0], dbias);
        let grains = GrainRows::new(5, 2).unwrap();
        let result = backend.bias_backward(&mut bench.device.stream, dbias, dout, grains);
        assert_answer("bias_backward", wrong, result);
    }
    bench.finish();
}
