//! Layer norm.

use tidemill_kernels::Backend;
use tidemill_kernels::backend::{NormGradient, NormInput};
use tidemill_kernels::reference::layer_norm::{backward, forward};
use tidemill_kernels::shape::{GrainRows, NormShape};

use super::agreement::{
    Transcript, assert_close, assert_close_beside, assert_same_bits, tolerance,
};
use super::arm::{Arm, Sizes};
use super::device::{Device, Layout, MARGINS, Placed, assert_shape_error};
use super::inputs::{Inputs, wide};
use super::number::Number;
use super::refusals::{Bench, assert_answer, matrix, matrix_mut, slice, slice_mut, wrong_by_one};

/// What a norm is of, and whether it has a bias.
#[derive(Clone, Copy, Debug)]
struct Kind {
    input: Input,
    biased: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Input {
    Residual,
    Activation,
}

const KINDS: [Kind; 3] = [
    Kind { input: Input::Residual, biased: true },
    Kind { input: Input::Residual, biased: false },
    Kind { input: Input::Activation, biased: true },
];

/// The inputs of a norm, forward and backward.
struct Case {
    x: Vec<f32>,
    weight: Vec<f32>,
    bias: Option<Vec<f32>>,
    dy: Vec<f32>,
    /// What `dx` of the residual stream holds before the backward norm adds to it.
    residual: Vec<f32>,
}

impl Case {
    /// x lies around a mean as large as its deviations.
    fn new<T: Number>(
        inputs: &mut Inputs,
        kind: Kind,
        rows: usize,
        width: usize,
        magnitude: f32,
    ) -> Self {
        let (low, high) = (-magnitude, 2.0 * magnitude);
        Self {
            x: match kind.input {
                Input::Residual => inputs.uniform(rows * width, low, high),
                Input::Activation => inputs.uniform_of::<T>(rows * width, low, high),
            },
            weight: inputs.uniform(width, 0.5, 1.5),
            bias: kind.biased.then(|| inputs.uniform(width, -1.0, 1.0)),
            dy: inputs.uniform_of::<T>(rows * width, -1.0, 1.0),
            residual: inputs.uniform(rows * width, -1.0, 1.0),
        }
    }

    /// The case of some rows alone.
    fn rows(&self, rows: std::ops::Range<usize>, width: usize) -> Self {
        let elements = rows.start * width..rows.end * width;
        Self {
            x: self.x[elements.clone()].to_vec(),
            weight: self.weight.clone(),
            bias: self.bias.clone(),
            dy: self.dy[elements.clone()].to_vec(),
            residual: self.residual[elements].to_vec(),
        }
    }
}

/// The results of a norm, forward and backward.
struct Results {
    y: Vec<f32>,
    statistics: Vec<f32>,
    dx: Vec<f32>,
    dweight: Vec<f32>,
    dbias: Option<Vec<f32>>,
}

/// A matrix of either kind.
enum Either<B: Backend<Activation: Number>> {
    Fp32(Placed<B, f32>),
    Activation(Placed<B, B::Activation>),
}

impl<B: Backend<Activation: Number>> Either<B> {
    fn new(device: &mut Device<'_, B>, input: Input, layout: Layout, values: &[f32]) -> Self {
        match input {
            Input::Residual => Self::Fp32(Placed::new(device, layout, values)),
            Input::Activation => Self::Activation(Placed::new(device, layout, values)),
        }
    }

    fn input(&self) -> NormInput<'_, B> {
        match self {
            Self::Fp32(x) => NormInput::Residual(x.matrix()),
            Self::Activation(x) => NormInput::Activation(x.matrix()),
        }
    }

    fn gradient<'a>(&'a mut self, dy: &'a Placed<B, B::Activation>) -> NormGradient<'a, B> {
        match self {
            Self::Fp32(dx) => NormGradient::Residual { dx: dx.matrix_mut(), dy: dy.matrix() },
            Self::Activation(dx) => NormGradient::InPlace(dx.matrix_mut()),
        }
    }

    fn read(&self, device: &mut Device<'_, B>) -> Vec<f32> {
        match self {
            Self::Fp32(x) => x.read(device),
            Self::Activation(x) => x.read(device),
        }
    }
}

fn run<B: Backend<Activation: Number>>(
    device: &mut Device<'_, B>,
    label: &str,
    kind: Kind,
    case: &Case,
    shape: NormShape,
) -> Results {
    let (rows, width) = (shape.grains().rows(), shape.width());
    let strided = Layout::inside_wider(rows, width);
    let packed = Layout::packed(rows, width);
    let of_grains = Layout::packed(shape.grains().grains(), width);
    let x = Either::new(device, kind.input, strided, &case.x);
    let weight = Placed::<B>::new(device, Layout::range(width), &case.weight);
    let bias = case.bias.as_ref().map(|bias| Placed::<B>::new(device, Layout::range(width), bias));
    let dy = Placed::new(device, packed, &case.dy);
    let mut y = Placed::poisoned(device, packed);
    let mut statistics = Placed::<B>::poisoned(device, Layout::range(2 * rows));
    let held = if kind.input == Input::Residual { &case.residual } else { &case.dy };
    let mut dx = Either::new(device, kind.input, strided, held);
    let mut dweight = Placed::<B>::poisoned(device, of_grains);
    let mut dbias = kind.biased.then(|| Placed::<B>::poisoned(device, of_grains));
    let (backend, stream) = (device.backend, &mut device.stream);
    backend
        .layer_norm_forward(
            stream,
            y.matrix_mut(),
            statistics.slice_mut(),
            x.input(),
            weight.slice(),
            bias.as_ref().map(Placed::slice),
            shape,
        )
        .expect(label);
    backend
        .layer_norm_backward(
            stream,
            dx.gradient(&dy),
            dweight.slice_mut(),
            dbias.as_mut().map(Placed::slice_mut),
            x.input(),
            statistics.slice(),
            weight.slice(),
            shape,
        )
        .expect(label);
    Results {
        y: y.read(device),
        statistics: statistics.read(device),
        dx: dx.read(device),
        dweight: dweight.read(device),
        dbias: dbias.map(|dbias| dbias.read(device)),
    }
}

/// Rows, and rows of a grain.
fn row_counts(sizes: Sizes, width: usize) -> Vec<(usize, usize)> {
    if width > 768 {
        return vec![(1, 1), (3, 2)];
    }
    let full = [1, 2, 7, 33].iter().flat_map(|&rows| [1, 2, 4].map(|of_grain| (rows, of_grain)));
    sizes.choose(full.chain([(150, 140)]).collect(), vec![(1, 1), (7, 2), (50, 40)])
}

/// Norms of many sizes and magnitudes agree with the definition, forward and backward.
pub fn agrees<B: Backend<Activation: Number>>(arm: &Arm<B>) -> Transcript {
    let mut device = Device::new(arm);
    let mut transcript = Transcript::default();
    let mut seed = 0;
    for width in [1, 3, 16, 17, 40, 129, 768, 2056, 8200] {
        for (rows, rows_per_grain) in row_counts(device.sizes, width) {
            for (magnitude, kind) in
                [1.0, 3e4, 1e-2].into_iter().zip(KINDS.into_iter().cycle().skip(rows))
            {
                seed += 1;
                device.margin = MARGINS[seed as usize % 2];
                let grains = GrainRows::new(rows, rows_per_grain).unwrap();
                let shape = NormShape::new(grains, width, 1e-5).unwrap();
                let label =
                    format!("layer_norm {kind:?} {shape:?} magnitude {magnitude} seed {seed}");
                let inputs = &mut Inputs::new(seed);
                let case = Case::new::<B::Activation>(inputs, kind, rows, width, magnitude);
                let results = run(&mut device, &label, kind, &case, shape);
                check::<B>(&mut transcript, &label, kind, &case, &results, shape);
            }
        }
    }
    transcript
}

fn check<B: Backend<Activation: Number>>(
    transcript: &mut Transcript,
    label: &str,
    kind: Kind,
    case: &Case,
    results: &Results,
    shape: NormShape,
) {
    let (rows, width) = (shape.grains().rows(), shape.width());
    let (x, weight, bias) = (wide(&case.x), wide(&case.weight), case.bias.as_deref().map(wide));
    let outputs = forward(&x, &weight, bias.as_deref(), shape);
    let gradients = backward(&wide(&case.dy), &x, &weight, shape);
    let residual = wide(&case.residual);
    let over_row = tolerance::<f32>(width);
    let of_dx = match kind.input {
        Input::Residual => over_row,
        Input::Activation => tolerance::<B::Activation>(width),
    };
    let over_grain = tolerance::<f32>(width.max(shape.grains().rows_per_grain()));
    let [means, reciprocals] = [0, rows].map(|from| &results.statistics[from..from + rows]);
    // The mean's rounding, against deviations: rows of one element have none, and eps alone divides the error.
    let greatest = case.x.iter().fold(0.0_f64, |greatest, x| greatest.max(f64::from(x.abs())));
    for row in 0..rows {
        let inside = row * width..(row + 1) * width;
        let r = outputs.reciprocal_deviations[row];
        let centred = over_row.beside(greatest * r * 2e-7);
        // The terms of dx cancel: wholly, where a row has one element.
        let dx: Vec<f64> = inside
            .clone()
            .map(|i| {
                gradients.dx[i] + if kind.input == Input::Residual { residual[i] } else { 0.0 }
            })
            .collect();
        let label = format!("{label} row {row}");
        let of_dx = of_dx.beside(greatest * r * 2e-7);
        assert_close_beside(
            &format!("{label} dx"),
            &results.dx[inside.clone()],
            &dx,
            of_dx,
            2.0 * r,
        );
        let (mean, reciprocal) = (&means[row..=row], &reciprocals[row..=row]);
        assert_close_beside(
            &format!("{label} mean"),
            mean,
            &outputs.means[row..=row],
            over_row,
            greatest,
        );
        assert_close(&format!("{label} reciprocal"), reciprocal, &[r], centred);
        let of_y = tolerance::<B::Activation>(width).beside(greatest * r * 2e-7);
        assert_close_beside(
            &format!("{label} y"),
            &results.y[inside.clone()],
            &outputs.y[inside],
            of_y,
            1.0,
        );
    }
    let steepest =
        outputs.reciprocal_deviations.iter().fold(0.0, |steepest: f64, &r| steepest.max(r));
    let over_grain = over_grain.beside(greatest * steepest * 2e-7);
    assert_close_beside(
        &format!("{label} dweight"),
        &results.dweight,
        &gradients.dweight,
        over_grain,
        1.0,
    );
    transcript.record(label, &results.y);
    transcript.record(label, &results.statistics);
    transcript.record(label, &results.dx);
    transcript.record(label, &results.dweight);
    if let Some(dbias) = &results.dbias {
        assert_close_beside(&format!("{label} dbias"), dbias, &gradients.dbias, over_grain, 1.0);
        transcript.record(label, dbias);
    }
}

/// A row's bits do not depend on the rows beside it or on what a row lies in, nor a grain's gradient on the other grains.
pub fn rows_are_independent<B: Backend<Activation: Number>>(arm: &Arm<B>) -> Transcript {
    let mut device = Device::new(arm);
    let mut transcript = Transcript::default();
    for ((seed, width), kind) in [(1, 3), (2, 40), (3, 768)].into_iter().zip(KINDS) {
        let rows = 11;
        let grains = GrainRows::new(rows, 4).unwrap();
        let shape = NormShape::new(grains, width, 1e-5).unwrap();
        let label = format!("layer_norm {kind:?} {shape:?} seed {seed}");
        let case = Case::new::<B::Activation>(&mut Inputs::new(seed), kind, rows, width, 1.0);
        device.margin = MARGINS[1];
        let unaligned = run(&mut device, &label, kind, &case, shape);
        device.margin = MARGINS[0];
        let whole = run(&mut device, &label, kind, &case, shape);
        assert_same_bits(&label, &unaligned.y, &whole.y);
        assert_same_bits(&label, &unaligned.dx, &whole.dx);
        assert_same_bits(&label, &unaligned.dweight, &whole.dweight);
        transcript.record(&label, &whole.y);
        transcript.record(&label, &whole.dweight);
        let alone = |range: &std::ops::Range<usize>| {
            let grains = GrainRows::new(range.len(), grains.rows_per_grain()).unwrap();
            NormShape::new(grains, shape.width(), shape.eps()).unwrap()
        };
        for grain in 0..grains.grains() {
            let range = grains.range(grain);
            let part = case.rows(range.clone(), width);
            let part = run(&mut device, &label, kind, &part, alone(&range));
            let label = format!("{label} grain {grain}");
            let of_grain = grain * width..(grain + 1) * width;
            assert_same_bits(&label, &part.dweight, &whole.dweight[of_grain.clone()]);
            if let (Some(part), Some(whole)) = (&part.dbias, &whole.dbias) {
                assert_same_bits(&label, part, &whole[of_grain]);
            }
        }
        for row in 0..rows {
            let range = row..row + 1;
            let part = case.rows(range.clone(), width);
            let part = run(&mut device, &label, kind, &part, alone(&range));
            let label = format!("{label} row {row}");
            let inside = row * width..(row + 1) * width;
            assert_same_bits(&label, &part.y, &whole.y[inside.clone()]);
            assert_same_bits(&label, &part.dx, &whole.dx[inside]);
            let statistics = [whole.statistics[row], whole.statistics[rows + row]];
            assert_same_bits(&label, &part.statistics, &statistics);
        }
    }
    transcript
}

/// Shapes that do not fit a norm of 5 rows of 4 in grains of 2, and gradients of another kind than their input.
pub fn refuses_shapes<B: Backend<Activation: Number>>(arm: &Arm<B>) {
    let (backend, mut bench) = (&arm.backend, Bench::new(arm));
    let shape = NormShape::new(GrainRows::new(5, 2).unwrap(), 4, 1e-5).unwrap();
    for (wrong, sizes) in wrong_by_one([5, 4, 5, 4, 10, 4, 4]) {
        let [rows, width, x_rows, x_width, statistics, weight, bias] = sizes;
        for input in [Input::Residual, Input::Activation] {
            let result = backend.layer_norm_forward(
                &mut bench.device.stream,
                matrix_mut(&mut bench.activation_outs[0], [rows, width]),
                slice_mut(&mut bench.outs[0], statistics),
                match input {
                    Input::Residual => NormInput::Residual(matrix(&bench.zeros, [x_rows, x_width])),
                    Input::Activation => {
                        NormInput::Activation(matrix(&bench.activations, [x_rows, x_width]))
                    }
                },
                slice(&bench.zeros, weight),
                Some(slice(&bench.zeros, bias)),
                shape,
            );
            assert_answer("layer_norm_forward", wrong, result);
        }
    }
    for (wrong, sizes) in wrong_by_one([5, 4, 5, 4, 12, 12, 10, 4, 5, 4]) {
        let (of_residual, dy) = ([sizes[0], sizes[1]], [sizes[8], sizes[9]]);
        for (gradient, input) in [
            (Input::Residual, Input::Residual),
            (Input::Activation, Input::Activation),
            (Input::Residual, Input::Activation),
            (Input::Activation, Input::Residual),
        ] {
            let [dx, dweight, dbias, ..] = &mut bench.outs;
            let result = backend.layer_norm_backward(
                &mut bench.device.stream,
                match gradient {
                    Input::Residual => NormGradient::Residual {
                        dx: matrix_mut(dx, of_residual),
                        dy: matrix(&bench.activations, dy),
                    },
                    Input::Activation => NormGradient::InPlace(matrix_mut(
                        &mut bench.activation_outs[0],
                        of_residual,
                    )),
                },
                slice_mut(dweight, sizes[4]),
                Some(slice_mut(dbias, sizes[5])),
                match input {
                    Input::Residual => {
                        NormInput::Residual(matrix(&bench.zeros, [sizes[2], sizes[3]]))
                    }
                    Input::Activation => {
                        NormInput::Activation(matrix(&bench.activations, [sizes[2], sizes[3]]))
                    }
                },
                slice(&bench.zeros, sizes[6]),
                slice(&bench.zeros, sizes[7]),
                shape,
            );
            // A gradient in place has no dy beside it.
            let wrong = wrong.filter(|&size| gradient == Input::Residual || size < 8);
            if gradient == input {
                assert_answer("layer_norm_backward", wrong, result);
            } else {
                assert_shape_error("a gradient of another kind than x", result);
            }
        }
    }
    bench.finish();
}
