//! Norms of both kinds: their cases, and the checks that they share.

use std::ops::Range;

use tidemill_kernels::backend::{NormGradient, NormGradients, NormInput, NormInputs, NormSaved};
use tidemill_kernels::shape::{GrainRows, NormShape};
use tidemill_kernels::{Backend, MatrixMut};

use super::agreement::{Transcript, assert_same_bits};
use super::arm::{Arm, Sizes};
use super::device::{Device, Layout, MARGINS, Placed};
use super::inputs::Inputs;
use super::number::Number;

/// A kind of norm, the type of its input, and whether it has a bias.
#[derive(Clone, Copy, Debug)]
pub struct Kind {
    pub norm: Norm,
    pub input: Input,
    pub biased: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Norm {
    /// Without a bias.
    Rms,
    /// RMS norm without a bias of each head of a row of activations; the field is the number of heads.
    RmsOfHeads(usize),
    Layer,
}

impl Norm {
    pub fn shape(self, grains: GrainRows, width: usize) -> NormShape {
        let shape = match self {
            Self::Rms => NormShape::rms(grains, width, 1e-5),
            Self::RmsOfHeads(heads) => NormShape::rms_of_heads(grains, heads, width, 1e-5),
            Self::Layer => NormShape::layer(grains, width, 1e-5),
        };
        shape.unwrap()
    }

    fn heads(self) -> usize {
        match self {
            Self::RmsOfHeads(heads) => heads,
            Self::Rms | Self::Layer => 1,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Input {
    Residual,
    Activation,
}

impl Kind {
    /// The number of statistics of a row.
    fn statistics(self) -> usize {
        match self.norm {
            Norm::Rms | Norm::RmsOfHeads(_) => self.norm.heads(),
            Norm::Layer => 2,
        }
    }
}

/// The inputs of a norm, forward and backward.
pub struct Case {
    pub x: Vec<f32>,
    pub weight: Vec<f32>,
    pub bias: Option<Vec<f32>>,
    pub dy: Vec<f32>,
    /// The values of `dx` of the residual stream before the backward norm adds to them.
    pub residual: Vec<f32>,
}

impl Case {
    /// Deviations of x of about `magnitude`; for a layer norm, a mean of the same size. With heads, `width` is that of one head.
    pub fn new<T: Number>(
        inputs: &mut Inputs,
        kind: Kind,
        [rows, width]: [usize; 2],
        magnitude: f32,
    ) -> Self {
        let (low, high) = match kind.norm {
            Norm::Rms | Norm::RmsOfHeads(_) => (-magnitude, magnitude),
            Norm::Layer => (-magnitude, 2.0 * magnitude),
        };
        let elements = rows * kind.norm.heads() * width;
        Self {
            x: match kind.input {
                Input::Residual => inputs.uniform(elements, low, high),
                Input::Activation => inputs.uniform_of::<T>(elements, low, high),
            },
            weight: inputs.uniform(width, 0.5, 1.5),
            bias: kind.biased.then(|| inputs.uniform(width, -1.0, 1.0)),
            dy: inputs.uniform_of::<T>(elements, -1.0, 1.0),
            residual: inputs.uniform(elements, -1.0, 1.0),
        }
    }

    /// The case of some rows, each of `columns` elements.
    fn rows(&self, columns: usize, rows: Range<usize>) -> Self {
        let elements = rows.start * columns..rows.end * columns;
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
pub struct Results {
    pub y: Vec<f32>,
    /// The first statistic of all rows, then the next.
    pub statistics: Vec<f32>,
    pub dx: Vec<f32>,
    pub dweight: Vec<f32>,
    pub dbias: Option<Vec<f32>>,
}

impl Results {
    /// The statistics of `range` of all rows, each of `heads` heads.
    fn statistics_of(&self, range: Range<usize>, rows: usize, heads: usize) -> Vec<f32> {
        let range = range.start * heads..range.end * heads;
        let of_rows = self.statistics.chunks(rows * heads);
        of_rows.flat_map(|values| values[range.clone()].to_vec()).collect()
    }
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

    fn gradient<'a>(
        &'a mut self,
        rounded: Option<MatrixMut<'a, B, B::Activation>>,
        dy: &'a Placed<B, B::Activation>,
    ) -> NormGradient<'a, B> {
        match self {
            Self::Fp32(dx) => {
                NormGradient::Residual { dx: dx.matrix_mut(), rounded, dy: dy.matrix() }
            }
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

pub fn run<B: Backend<Activation: Number>>(
    device: &mut Device<'_, B>,
    label: &str,
    kind: Kind,
    case: &Case,
    shape: NormShape,
) -> Results {
    let (rows, width) = (shape.grains().rows(), shape.width());
    let strided = Layout::inside_wider(rows, shape.columns());
    let packed = Layout::packed(rows, shape.columns());
    let of_grains = Layout::packed(shape.grains().grains(), width);
    let x = Either::new(device, kind.input, strided, &case.x);
    let weight = Placed::<B>::new(device, Layout::range(width), &case.weight);
    let bias = case.bias.as_ref().map(|bias| Placed::<B>::new(device, Layout::range(width), bias));
    let dy = Placed::new(device, packed, &case.dy);
    let mut y = Placed::poisoned(device, packed);
    let mut statistics = Placed::<B>::poisoned(device, Layout::range(kind.statistics() * rows));
    let held = if kind.input == Input::Residual { &case.residual } else { &case.dy };
    let mut dx = Either::new(device, kind.input, strided, held);
    // The copy of dx equals dx.
    let copies = kind.input == Input::Residual && rows % 2 == 1;
    let mut rounded = copies.then(|| Placed::<B, B::Activation>::poisoned(device, strided));
    let mut dweight = Placed::<B>::poisoned(device, of_grains);
    let mut dbias = kind.biased.then(|| Placed::<B>::poisoned(device, of_grains));
    let (backend, stream) = (device.backend, &mut device.stream);
    let inputs =
        NormInputs { x: x.input(), weight: weight.slice(), bias: bias.as_ref().map(Placed::slice) };
    let forward =
        backend.norm_forward(stream, y.matrix_mut(), statistics.slice_mut(), inputs, shape);
    forward.expect(label);
    let copy = rounded.as_mut().map(Placed::matrix_mut);
    let gradients = NormGradients {
        x: dx.gradient(copy, &dy),
        dweight: dweight.slice_mut(),
        dbias: dbias.as_mut().map(Placed::slice_mut),
    };
    let saved = NormSaved { x: x.input(), statistics: statistics.slice(), weight: weight.slice() };
    let backward = backend.norm_backward(stream, gradients, saved, shape);
    backward.expect(label);
    let dx = dx.read(device);
    if let Some(rounded) = rounded {
        let expected: Vec<f32> =
            dx.iter().map(|&dx| B::Activation::rounded(dx).widened()).collect();
        assert_same_bits(&format!("{label} rounded"), &rounded.read(device), &expected);
    }
    Results {
        y: y.read(device),
        statistics: statistics.read(device),
        dx,
        dweight: dweight.read(device),
        dbias: dbias.map(|dbias| dbias.read(device)),
    }
}

/// Pairs of a number of rows and the rows of a grain; for small sizes, `many` is the largest.
pub fn row_counts(sizes: Sizes, width: usize, many: (usize, usize)) -> Vec<(usize, usize)> {
    if width > 768 {
        return vec![(1, 1), (3, 2)];
    }
    let full = [1, 2, 7, 33].iter().flat_map(|&rows| [1, 2, 4].map(|of_grain| (rows, of_grain)));
    sizes.choose(full.chain([(150, 140)]).collect(), vec![(1, 1), (7, 2), many])
}

/// A row's bits do not depend on the other rows or on its alignment, nor a grain's gradients on the other grains.
pub fn rows_are_independent<B: Backend<Activation: Number>>(
    arm: &Arm<B>,
    kinds: [Kind; 3],
) -> Transcript {
    let mut device = Device::new(arm);
    let mut transcript = Transcript::default();
    // Rows wider than 512 take a block each; a thread holds one pack or two, where rows are aligned. Narrow heads are summed by 512 of a
    // grain.
    let sizes = [(11, 4, 3), (11, 4, 40), (11, 4, 768), (6, 4, 1032), (6, 4, 520), (28, 14, 17)];
    for ((seed, (rows, of_grain, width)), kind) in (1..).zip(sizes).zip(kinds.into_iter().cycle()) {
        let grains = GrainRows::new(rows, of_grain).unwrap();
        let shape = kind.norm.shape(grains, width);
        let label = format!("{kind:?} {shape:?} seed {seed}");
        let case = Case::new::<B::Activation>(&mut Inputs::new(seed), kind, [rows, width], 1.0);
        device.margin = MARGINS[1];
        let unaligned = run(&mut device, &label, kind, &case, shape);
        device.margin = MARGINS[0];
        let whole = run(&mut device, &label, kind, &case, shape);
        assert_same_bits(&label, &unaligned.y, &whole.y);
        assert_same_bits(&label, &unaligned.dx, &whole.dx);
        assert_same_bits(&label, &unaligned.dweight, &whole.dweight);
        transcript.record(&label, &whole.y);
        transcript.record(&label, &whole.dweight);
        let mut assert_alone = |label: &str, range: Range<usize>| {
            let of_range = GrainRows::new(range.len(), grains.rows_per_grain()).unwrap();
            let shape = kind.norm.shape(of_range, width);
            let columns = shape.columns();
            let rows_alone = case.rows(columns, range.clone());
            let part = run(&mut device, label, kind, &rows_alone, shape);
            let elements = range.start * columns..range.end * columns;
            assert_same_bits(label, &part.y, &whole.y[elements.clone()]);
            assert_same_bits(label, &part.dx, &whole.dx[elements]);
            assert_same_bits(
                label,
                &part.statistics,
                &whole.statistics_of(range, rows, shape.heads()),
            );
            part
        };
        for grain in 0..grains.grains() {
            let label = format!("{label} grain {grain}");
            let part = assert_alone(&label, grains.range(grain));
            let of_grain = grain * width..(grain + 1) * width;
            assert_same_bits(&label, &part.dweight, &whole.dweight[of_grain.clone()]);
            if let (Some(part), Some(whole)) = (&part.dbias, &whole.dbias) {
                assert_same_bits(&label, part, &whole[of_grain]);
            }
        }
        for row in 0..rows {
            assert_alone(&format!("{label} row {row}"), row..row + 1);
        }
    }
    transcript
}

/// Rows that fill a device have the bits that each has alone, also where a block's last rows are fewer, and so have rows between these
/// and few.
pub fn many_rows_are_independent<B: Backend<Activation: Number>>(
    arm: &Arm<B>,
    kinds: [Kind; 3],
) -> Transcript {
    let mut device = Device::new(arm);
    let mut transcript = Transcript::default();
    let rows = device.sizes.choose_for_gpu(vec![10_003, 1_003], vec![131]);
    let widths = kinds.into_iter().flat_map(|kind| [(kind, 520), (kind, 1032)]);
    let cases = rows.iter().flat_map(|&rows| widths.clone().map(move |case| (rows, case)));
    for (seed, (rows, (kind, width))) in (1..).zip(cases) {
        let shape_of = |rows| kind.norm.shape(GrainRows::new(rows, rows).unwrap(), width);
        let shape = shape_of(rows);
        let label = format!("{kind:?} {shape:?} seed {seed}");
        let case = Case::new::<B::Activation>(&mut Inputs::new(seed), kind, [rows, width], 1.0);
        let whole = run(&mut device, &label, kind, &case, shape);
        assert!(
            whole.y.iter().chain(&whole.statistics).all(|x| x.is_finite()),
            "{label}: found NaN"
        );
        for row in (0..10).chain([rows / 2]).chain(rows - 10..rows) {
            let label = format!("{label} row {row}");
            let alone = case.rows(width, row..row + 1);
            let part = run(&mut device, &label, kind, &alone, shape_of(1));
            let elements = row * width..(row + 1) * width;
            assert_same_bits(&label, &part.y, &whole.y[elements]);
            let statistics = whole.statistics_of(row..row + 1, rows, 1);
            assert_same_bits(&label, &part.statistics, &statistics);
        }
        transcript.record(&label, &whole.y);
        transcript.record(&label, &whole.statistics);
    }
    transcript
}
