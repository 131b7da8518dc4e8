//! Products with a bias, added by the matrix library or by a kernel of this crate.

use tidemill_kernels::Backend;
use tidemill_kernels::reference::matmul::{MatmulShape, forward};

use super::agreement::{Transcript, assert_close_beside, assert_same_bits, tolerance};
use super::arm::Arm;
use super::device::{Device, Layout, MARGINS, Placed};
use super::inputs::{Inputs, wide};
use super::number::Number;

/// Rows, terms and columns: of one element, odd, and aligned as a library prefers.
const SHAPES: [[usize; 3]; 5] = [[1, 1, 1], [2, 3, 8], [7, 17, 31], [33, 257, 40], [129, 64, 96]];

struct Case {
    a: Vec<f32>,
    weight: Vec<f32>,
    bias: Vec<f32>,
    base: Vec<f32>,
}

/// `a weight^T + bias` as activations, and `base + a weight^T + bias` in fp32.
struct Results {
    activations: Vec<f32>,
    onto: Vec<f32>,
}

impl Case {
    fn rows(&self, shape: MatmulShape, rows: std::ops::Range<usize>) -> Self {
        let MatmulShape { inner, columns, .. } = shape;
        Self {
            a: self.a[rows.start * inner..rows.end * inner].to_vec(),
            weight: self.weight.clone(),
            bias: self.bias.clone(),
            base: self.base[rows.start * columns..rows.end * columns].to_vec(),
        }
    }
}

fn run<B: Backend<Activation: Number>>(
    device: &mut Device<'_, B>,
    label: &str,
    case: &Case,
    [inner, columns]: [usize; 2],
) -> Results {
    let rows = case.a.len() / inner;
    let layout = Layout::inside_wider(rows, columns);
    let a = Placed::<B, B::Activation>::new(device, Layout::packed(rows, inner), &case.a);
    let weight = Layout::packed(columns, inner);
    let weight = Placed::<B, B::Activation>::new(device, weight, &case.weight);
    let bias = Placed::<B>::new(device, Layout::range(columns), &case.bias);
    let base = Placed::<B>::new(device, layout, &case.base);
    let mut out = Placed::<B, B::Activation>::poisoned(device, layout);
    let [mut onto, mut without] = [(); 2].map(|()| Placed::<B>::poisoned(device, layout));
    let (backend, stream) = (device.backend, &mut device.stream);
    let right = || weight.matrix().transposed();
    backend
        .matmul_biased(stream, out.matrix_mut(), a.matrix(), right(), bias.slice())
        .expect(label);
    let (base, bias) = (|| base.matrix(), Some(bias.slice()));
    backend.matmul_onto(stream, onto.matrix_mut(), base(), a.matrix(), right(), bias).expect(label);
    backend
        .matmul_onto(stream, without.matrix_mut(), base(), a.matrix(), right(), None)
        .expect(label);
    let results = Results { activations: out.read(device), onto: onto.read(device) };
    let sums = without.read(device);
    let sums: Vec<f32> =
        sums.iter().zip(case.bias.iter().cycle()).map(|(sum, bias)| sum + bias).collect();
    assert_same_bits(&format!("{label} onto"), &results.onto, &sums);
    results
}

/// A bias is added to fp32 with the bits of [`add_bias_f32`](Backend::add_bias_f32), and to activations as the definition does; a row's
/// bits do not depend on the other rows.
pub fn agree<B: Backend<Activation: Number>>(arm: &Arm<B>) -> Transcript {
    let mut device = Device::new(arm);
    let mut transcript = Transcript::default();
    for (seed, [rows, inner, columns]) in SHAPES.into_iter().enumerate() {
        for margin in MARGINS {
            device.margin = margin;
            let shape = MatmulShape { rows, inner, columns };
            let label = format!("{shape:?} with a bias, margin {margin}");
            let inputs = &mut Inputs::new(seed as u64);
            let case = Case {
                a: inputs.uniform_of::<B::Activation>(rows * inner, -1.0, 1.0),
                weight: inputs.uniform_of::<B::Activation>(columns * inner, -1.0, 1.0),
                bias: inputs.uniform(columns, -2.0, 2.0),
                base: inputs.uniform(rows * columns, -1.0, 1.0),
            };
            let found = run(&mut device, &label, &case, [inner, columns]);
            let weight = wide(&case.weight);
            let b: Vec<f64> =
                (0..inner * columns).map(|i| weight[i % columns * inner + i / columns]).collect();
            let products = forward(&wide(&case.a), &b, shape);
            let bias = wide(&case.bias).into_iter().cycle();
            let sums: Vec<f64> = products.into_iter().zip(bias).map(|(x, bias)| x + bias).collect();
            // The bias, of up to 2, or the product is rounded to activations.
            let allowed = tolerance::<B::Activation>(inner).rounded_twice();
            let allowed = allowed.beside(B::Activation::ROUNDING);
            assert_close_beside(&label, &found.activations, &sums, allowed, 2.0);
            let onto: Vec<f64> =
                sums.iter().zip(&case.base).map(|(sum, &base)| sum + f64::from(base)).collect();
            let allowed = tolerance::<f32>(inner).rounded_twice();
            assert_close_beside(&format!("{label} onto"), &found.onto, &onto, allowed, 2.0);
            transcript.record(&label, &found.activations);
            transcript.record(&label, &found.onto);
            for range in [0..1, rows - 1..rows, rows / 2..rows] {
                let inside = range.start * columns..range.end * columns;
                let label = format!("{label}, rows {range:?}");
                let part = run(&mut device, &label, &case.rows(shape, range), [inner, columns]);
                assert_same_bits(&label, &part.activations, &found.activations[inside.clone()]);
                assert_same_bits(&label, &part.onto, &found.onto[inside]);
            }
        }
    }
    transcript
}
