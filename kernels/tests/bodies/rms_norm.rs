//! RMSNorm.

use tidemill_kernels::Backend;
use tidemill_kernels::reference::rms_norm::{backward, forward};
use tidemill_kernels::shape::{GrainRows, NormShape};

use super::agreement::{
    Transcript, assert_close, assert_close_beside, assert_same_bits, tolerance,
};
use super::arm::{Arm, Sizes};
use super::device::{Device, Layout, MARGINS, Placed};
use super::inputs::{Inputs, wide};
use super::number::Number;

/// The inputs of a norm, forward and backward.
struct Case {
    x: Vec<f32>,
    weight: Vec<f32>,
    dy: Vec<f32>,
    /// What `dx` holds before the backward norm adds to it.
    residual: Vec<f32>,
}

impl Case {
    fn new<T: Number>(inputs: &mut Inputs, rows: usize, width: usize, magnitude: f32) -> Self {
        Self {
            x: inputs.uniform(rows * width, -magnitude, magnitude),
            weight: inputs.uniform(width, 0.5, 1.5),
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
            dy: self.dy[elements.clone()].to_vec(),
            residual: self.residual[elements].to_vec(),
        }
    }
}

/// The results of a norm, forward and backward.
struct Results {
    y: Vec<f32>,
    reciprocal_rms: Vec<f32>,
    dx: Vec<f32>,
    dweight: Vec<f32>,
}

fn run<B: Backend<Activation: Number>>(
    device: &mut Device<'_, B>,
    label: &str,
    case: &Case,
    shape: NormShape,
) -> Results {
    let (rows, width) = (shape.grains().rows(), shape.width());
    let strided = Layout::inside_wider(rows, width);
    let packed = Layout::packed(rows, width);
    let x = Placed::new(device, strided, &case.x);
    let weight = Placed::new(device, Layout::range(width), &case.weight);
    let dy = Placed::new(device, packed, &case.dy);
    let mut y = Placed::poisoned(device, packed);
    let mut reciprocal_rms = Placed::poisoned(device, Layout::range(rows));
    let mut dx = Placed::new(device, strided, &case.residual);
    let mut dweight = Placed::poisoned(device, Layout::packed(shape.grains().grains(), width));
    let (backend, stream) = (device.backend, &mut device.stream);
    backend
        .rms_norm_forward(
            stream,
            y.matrix_mut(),
            reciprocal_rms.slice_mut(),
            x.matrix(),
            weight.slice(),
            shape,
        )
        .expect(label);
    backend
        .rms_norm_backward(
            stream,
            dx.matrix_mut(),
            dweight.slice_mut(),
            dy.matrix(),
            x.matrix(),
            reciprocal_rms.slice(),
            weight.slice(),
            shape,
        )
        .expect(label);
    Results {
        y: y.read(device),
        reciprocal_rms: reciprocal_rms.read(device),
        dx: dx.read(device),
        dweight: dweight.read(device),
    }
}

/// Rows, and rows of a grain.
fn row_counts(sizes: Sizes, width: usize) -> Vec<(usize, usize)> {
    if width > 768 {
        return vec![(1, 1), (3, 2)];
    }
    let full = [1, 2, 7, 33].iter().flat_map(|&rows| [1, 2, 4].map(|of_grain| (rows, of_grain)));
    sizes.choose(full.chain([(150, 140)]).collect(), vec![(1, 1), (7, 2), (150, 140)])
}

/// Norms of many sizes and magnitudes agree with the definition, forward and backward.
pub fn agrees<B: Backend<Activation: Number>>(arm: &Arm<B>) -> Transcript {
    let mut device = Device::new(arm);
    let mut transcript = Transcript::default();
    let mut seed = 0;
    for width in [1, 3, 16, 17, 40, 129, 768, 2056, 8200] {
        for (rows, rows_per_grain) in row_counts(device.sizes, width) {
            for magnitude in [1.0, 3e4, 1e-4] {
                seed += 1;
                device.margin = MARGINS[seed as usize % 2];
                let grains = GrainRows::new(rows, rows_per_grain).unwrap();
                let shape = NormShape::new(grains, width, 1e-5).unwrap();
                let label = format!("rms_norm {shape:?} magnitude {magnitude} seed {seed}");
                let case =
                    Case::new::<B::Activation>(&mut Inputs::new(seed), rows, width, magnitude);
                let results = run(&mut device, &label, &case, shape);

                let (x, weight) = (wide(&case.x), wide(&case.weight));
                let outputs = forward(&x, &weight, shape);
                let gradients = backward(&wide(&case.dy), &x, &weight, shape);
                let residual = wide(&case.residual);
                let dx: Vec<f64> =
                    residual.iter().zip(&gradients.dx).map(|(r, dx)| r + dx).collect();
                let over_row = tolerance::<f32>(width);
                let over_grain = tolerance::<f32>(width.max(rows_per_grain));
                // The two terms of dx cancel: wholly, where a row has one element.
                for row in 0..rows {
                    let label = format!("{label} dx row {row}");
                    let row_of_terms = 1.5 * outputs.reciprocal_rms[row];
                    let inside = row * width..(row + 1) * width;
                    let (found, expected) = (&results.dx[inside.clone()], &dx[inside]);
                    assert_close_beside(&label, found, expected, over_row, row_of_terms);
                }
                transcript.record(&label, &results.dx);
                for (what, found, expected, tolerance) in [
                    ("y", &results.y, &outputs.y, tolerance::<B::Activation>(width)),
                    ("reciprocal_rms", &results.reciprocal_rms, &outputs.reciprocal_rms, over_row),
                    ("dweight", &results.dweight, &gradients.dweight, over_grain),
                ] {
                    let label = format!("{label} {what}");
                    assert_close(&label, found, expected, tolerance);
                    transcript.record(&label, found);
                }
            }
        }
    }
    transcript
}

/// A row's bits do not depend on the rows beside it, nor a grain's gradient on the other grains.
pub fn rows_are_independent<B: Backend<Activation: Number>>(arm: &Arm<B>) -> Transcript {
    let mut device = Device::new(arm);
    let mut transcript = Transcript::default();
    for (seed, width) in [(1, 3), (2, 40), (3, 768)] {
        let (rows, rows_per_grain) = (11, 4);
        let grains = GrainRows::new(rows, rows_per_grain).unwrap();
        let shape = NormShape::new(grains, width, 1e-5).unwrap();
        let label = format!("rms_norm {shape:?} seed {seed}");
        let case = Case::new::<B::Activation>(&mut Inputs::new(seed), rows, width, 1.0);
        device.margin = MARGINS[1];
        let unaligned = run(&mut device, &label, &case, shape);
        device.margin = MARGINS[0];
        let whole = run(&mut device, &label, &case, shape);
        assert_same_bits(&label, &unaligned.y, &whole.y);
        assert_same_bits(&label, &unaligned.dx, &whole.dx);
        assert_same_bits(&label, &unaligned.dweight, &whole.dweight);
        transcript.record(&label, &whole.y);
        transcript.record(&label, &whole.dweight);
        for grain in 0..grains.grains() {
            let range = grains.range(grain);
            let alone = NormShape::new(
                GrainRows::new(range.len(), rows_per_grain).unwrap(),
                shape.width(),
                shape.eps(),
            )
            .unwrap();
            let part = run(&mut device, &label, &case.rows(range.clone(), width), alone);
            let label = format!("{label} grain {grain}");
            let elements = range.start * width..range.end * width;
            assert_same_bits(&label, &part.y, &whole.y[elements.clone()]);
            assert_same_bits(&label, &part.reciprocal_rms, &whole.reciprocal_rms[range]);
            assert_same_bits(&label, &part.dx, &whole.dx[elements]);
            let dweight = &whole.dweight[grain * width..(grain + 1) * width];
            assert_same_bits(&label, &part.dweight, dweight);
        }
        for row in 0..rows {
            let alone =
                NormShape::new(GrainRows::new(1, 1).unwrap(), shape.width(), shape.eps()).unwrap();
            let part = run(&mut device, &label, &case.rows(row..row + 1, width), alone);
            let label = format!("{label} row {row}");
            assert_same_bits(&label, &part.y, &whole.y[row * width..(row + 1) * width]);
            assert_same_bits(&label, &part.dx, &whole.dx[row * width..(row + 1) * width]);
        }
    }
    transcript
}
