//! Matrix products.

use tidemill_kernels::backend::Output;
use tidemill_kernels::reference::matmul::{MatmulShape, backward, forward};
use tidemill_kernels::{Backend, Matrix};

use super::agreement::{Tolerance, Transcript, assert_close, assert_same_bits, tolerance};
use super::arm::{Arm, Sums};
use super::device::{Device, Layout, MARGINS, Placed};
use super::inputs::{Inputs, wide};
use super::number::Number;

/// `matrix[rows, columns]` row-major, transposed.
fn transposed(values: &[f32], rows: usize, columns: usize) -> Vec<f32> {
    (0..rows * columns).map(|i| values[i % rows * columns + i / rows]).collect()
}

/// How an operand is stored.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Storage {
    Packed,
    Strided,
    Transposed,
}

impl Storage {
    const ALL: [Self; 3] = [Self::Packed, Self::Strided, Self::Transposed];
}

/// An operand `[rows, columns]` in one of the ways to store it.
struct Operand<B: Backend<Activation: Number>> {
    placed: Placed<B, B::Activation>,
    storage: Storage,
}

impl<B: Backend<Activation: Number>> Operand<B> {
    fn new(
        device: &mut Device<'_, B>,
        storage: Storage,
        values: &[f32],
        rows: usize,
        columns: usize,
    ) -> Self {
        let placed = match storage {
            Storage::Packed => Placed::new(device, Layout::packed(rows, columns), values),
            Storage::Strided => {
                let layout = Layout::columns_of(rows, 2 * columns + 1, columns, columns);
                Placed::new(device, layout, values)
            }
            Storage::Transposed => {
                let layout = Layout::columns_of(columns, rows + 3, 2, rows);
                Placed::new(device, layout, &transposed(values, rows, columns))
            }
        };
        Self { placed, storage }
    }

    fn view(&self) -> Matrix<'_, B, B::Activation> {
        match self.storage {
            Storage::Packed | Storage::Strided => self.placed.matrix(),
            Storage::Transposed => self.placed.matrix().transposed(),
        }
    }
}

/// A product with each type of output.
struct Products {
    /// The result of [`Backend::matmul`].
    activation: Vec<f32>,
    /// The result of [`Backend::matmul_f32`].
    f32: Vec<f32>,
}

impl Products {
    /// Asserts that both agree with the definition, whose sums have `inner` terms.
    #[track_caller]
    fn assert_close<T: Number>(&self, label: &str, expected: &[f64], inner: usize) {
        self.assert_close_within(label, expected, inner, tolerance::<T>(inner));
    }

    /// [`assert_close`](Self::assert_close) for a sum with the old output: a matrix library may round the product to the type of the
    /// output before it adds.
    #[track_caller]
    fn assert_added_close<T: Number>(&self, label: &str, expected: &[f64], inner: usize) {
        self.assert_close_within(label, expected, inner, tolerance::<T>(inner).rounded_twice());
    }

    #[track_caller]
    fn assert_close_within(
        &self,
        label: &str,
        expected: &[f64],
        inner: usize,
        of_activations: Tolerance,
    ) {
        assert_close(label, &self.activation, expected, of_activations);
        assert_close(&format!("{label} in f32"), &self.f32, expected, tolerance::<f32>(inner));
    }

    /// Asserts that both equal the elements of `whole` that `part` takes, to the bit.
    #[track_caller]
    fn assert_part_of(&self, label: &str, whole: &Self, part: impl Fn(&[f32]) -> Vec<f32>) {
        assert_same_bits(label, &self.activation, &part(&whole.activation));
        assert_same_bits(&format!("{label} in f32"), &self.f32, &part(&whole.f32));
    }

    fn record(&self, transcript: &mut Transcript, label: &str) {
        transcript.record(label, &self.activation);
        transcript.record(label, &self.f32);
    }
}

fn product<B: Backend<Activation: Number>>(
    device: &mut Device<'_, B>,
    label: &str,
    initial: Option<&[f32]>,
    a: Matrix<'_, B, B::Activation>,
    b: Matrix<'_, B, B::Activation>,
) -> Products {
    let layout = Layout::inside_wider(a.shape()[0], b.shape()[1]);
    let (mut out, mut out_f32): (Placed<B, B::Activation>, Placed<B>) = match initial {
        Some(initial) => {
            (Placed::new(device, layout, initial), Placed::new(device, layout, initial))
        }
        None => (Placed::poisoned(device, layout), Placed::poisoned(device, layout)),
    };
    let output = if initial.is_some() { Output::Add } else { Output::Overwrite };
    let (backend, stream) = (device.backend, &mut device.stream);
    backend.matmul(stream, out.matrix_mut(), a, b, output).expect(label);
    backend.matmul_f32(stream, out_f32.matrix_mut(), a, b, output).expect(label);
    let products = Products { activation: out.read(device), f32: out_f32.read(device) };
    if let Some(initial) = initial {
        let base = Placed::<B, f32>::new(device, layout, initial);
        let mut onto = Placed::<B, f32>::poisoned(device, layout);
        let (backend, stream) = (device.backend, &mut device.stream);
        backend.matmul_onto(stream, onto.matrix_mut(), base.matrix(), a, b, None).expect(label);
        assert_same_bits(&format!("{label}, onto"), &onto.read(device), &products.f32);
        assert_same_bits(&format!("{label}, base"), &base.read(device), initial);
    }
    if device.sums == Sums::OneByOne && B::Activation::ROUNDING == 0.0 {
        let label = format!("{label} matmul_f32");
        assert_same_bits(&label, &products.f32, &products.activation);
    }
    products
}

/// Two streams of one device that exist together compute the same product.
///
/// Seen failing: with one handle of AMD's library for both.
pub fn two_streams_agree<B: Backend<Activation: Number>>(arm: &Arm<B>) {
    let (rows, inner, columns) = (7, 33, 16);
    let numbers = |seed, count| Inputs::new(seed).uniform_of::<B::Activation>(count, -1.0, 1.0);
    let (a, b) = (numbers(1, rows * inner), numbers(2, inner * columns));
    let mut devices = [Device::new(arm), Device::new(arm)];
    let [one, other] = devices.each_mut().map(|device| {
        let a = Operand::new(device, Storage::Packed, &a, rows, inner);
        let b = Operand::new(device, Storage::Packed, &b, inner, columns);
        product(device, "two streams", None, a.view(), b.view())
    });
    assert_same_bits("two streams", &one.activation, &other.activation);
    assert_same_bits("two streams in f32", &one.f32, &other.f32);
}

/// Products of many sizes and storages agree with the definition.
pub fn agrees<B: Backend<Activation: Number>>(arm: &Arm<B>) -> Transcript {
    let mut device = Device::new(arm);
    let mut transcript = Transcript::default();
    let mut seed = 0;
    let all_rows = device.sizes.choose(vec![1, 2, 7, 16, 33], vec![1, 7, 16]);
    let all_columns = device.sizes.choose(vec![1, 8, 31, 40], vec![8, 31]);
    for inner in device.sizes.choose(vec![1, 3, 16, 17, 255, 256, 257, 600], vec![1, 16, 17, 257]) {
        for &rows in &all_rows {
            for &columns in &all_columns {
                seed += 1;
                device.margin = MARGINS[seed as usize % 2];
                let mut inputs = Inputs::new(seed);
                let shape = MatmulShape { rows, inner, columns };
                let storages = [0, 1].map(|_| Storage::ALL[inputs.pick(3)]);
                let label = format!("matmul {shape:?} {storages:?} seed {seed}");
                let a = inputs.uniform_of::<B::Activation>(rows * inner, -1.0, 1.0);
                let b = inputs.uniform_of::<B::Activation>(inner * columns, -1.0, 1.0);
                let a_operand = Operand::new(&mut device, storages[0], &a, rows, inner);
                let b_operand = Operand::new(&mut device, storages[1], &b, inner, columns);
                let initial = inputs.uniform_of::<B::Activation>(rows * columns, -1.0, 1.0);
                let expected = forward(&wide(&a), &wide(&b), shape);

                let (a_view, b_view) = (a_operand.view(), b_operand.view());
                let out = product(&mut device, &label, None, a_view, b_view);
                out.assert_close::<B::Activation>(&label, &expected, inner);
                out.record(&mut transcript, &label);

                let label = format!("{label} added");
                let out = product(&mut device, &label, Some(&initial), a_view, b_view);
                let sums: Vec<f64> =
                    expected.iter().zip(&initial).map(|(x, &i)| x + f64::from(i)).collect();
                out.assert_added_close::<B::Activation>(&label, &sums, inner);
                out.record(&mut transcript, &label);
            }
        }
    }
    transcript
}

/// The gradients of a product are products of transposed views.
pub fn backward_agrees<B: Backend<Activation: Number>>(arm: &Arm<B>) -> Transcript {
    let mut device = Device::new(arm);
    let mut transcript = Transcript::default();
    for (seed, shape) in [(1, (1, 1, 1)), (2, (9, 17, 3)), (3, (129, 40, 33))] {
        let (rows, inner, columns) = shape;
        let shape = MatmulShape { rows, inner, columns };
        let label = format!("matmul backward {shape:?} seed {seed}");
        let mut inputs = Inputs::new(seed);
        let a = inputs.uniform_of::<B::Activation>(rows * inner, -1.0, 1.0);
        let b = inputs.uniform_of::<B::Activation>(inner * columns, -1.0, 1.0);
        let dout = inputs.uniform_of::<B::Activation>(rows * columns, -1.0, 1.0);
        let placed_a: Placed<B, B::Activation> =
            Placed::new(&mut device, Layout::packed(rows, inner), &a);
        let placed_b: Placed<B, B::Activation> =
            Placed::new(&mut device, Layout::packed(inner, columns), &b);
        let placed_dout = Placed::new(&mut device, Layout::packed(rows, columns), &dout);
        let b_transposed = placed_b.matrix().transposed();
        let da = product(&mut device, &label, None, placed_dout.matrix(), b_transposed);
        let a_transposed = placed_a.matrix().transposed();
        let db = product(&mut device, &label, None, a_transposed, placed_dout.matrix());
        let expected = backward(&wide(&dout), &wide(&a), &wide(&b), shape);
        da.assert_close::<B::Activation>(&format!("{label} da"), &expected.da, columns);
        db.assert_close::<B::Activation>(&format!("{label} db"), &expected.db, rows);
        da.record(&mut transcript, &label);
        db.record(&mut transcript, &label);
    }
    transcript
}

/// An element's bits do not depend on the number of rows or on its row; where terms are added one by
/// one, they depend neither on the number of columns nor on how the operands are stored.
pub fn elements_are_independent<B: Backend<Activation: Number>>(arm: &Arm<B>) -> Transcript {
    let mut device = Device::new(arm);
    let mut transcript = Transcript::default();
    let (rows, columns) = (37, 45);
    for (seed, inner) in [(1, 17), (2, 300), (3, 700)] {
        let mut inputs = Inputs::new(seed);
        let a = inputs.uniform_of::<B::Activation>(rows * inner, -1.0, 1.0);
        let b = inputs.uniform_of::<B::Activation>(inner * columns, -1.0, 1.0);
        let initial = inputs.uniform_of::<B::Activation>(rows * columns, -1.0, 1.0);
        let packed_a = Operand::new(&mut device, Storage::Packed, &a, rows, inner);
        let packed_b = Operand::new(&mut device, Storage::Packed, &b, inner, columns);
        for initial in [None, Some(initial.as_slice())] {
            let label = format!("matmul inner {inner} added {} seed {seed}", initial.is_some());
            let (all_a, all_b) = (packed_a.view(), packed_b.view());
            let whole = product(&mut device, &label, initial, all_a, all_b);
            whole.record(&mut transcript, &label);
            for (first, count) in [(0, 1), (36, 1), (5, 2), (11, 13), (1, 36)] {
                let inside = first * columns..(first + count) * columns;
                let initial = initial.map(|initial| &initial[inside.clone()]);
                let a = all_a.rows(first, count).unwrap();
                let out = product(&mut device, &label, initial, a, all_b);
                let label = format!("{label} rows {first}+{count}");
                out.assert_part_of(&label, &whole, |whole| whole[inside.clone()].to_vec());
            }
            if device.sums == Sums::Ordered {
                continue;
            }
            for storage in Storage::ALL {
                let stored_a = Operand::new(&mut device, storage, &a, rows, inner);
                let stored_b = Operand::new(&mut device, storage, &b, inner, columns);
                let (a, b) = (stored_a.view(), stored_b.view());
                let out = product(&mut device, &label, initial, a, b);
                let label = format!("{label} stored {storage:?}");
                out.assert_part_of(&label, &whole, <[f32]>::to_vec);
            }
            for (first, count) in [(0, 1), (44, 1), (5, 3), (20, 17)] {
                let narrow = |values: &[f32]| -> Vec<f32> {
                    let rows = values.chunks(columns);
                    rows.flat_map(|row| row[first..first + count].to_vec()).collect()
                };
                let initial = initial.map(narrow);
                let b = all_b.columns(first, count).unwrap();
                let out = product(&mut device, &label, initial.as_deref(), all_a, b);
                let label = format!("{label} columns {first}+{count}");
                out.assert_part_of(&label, &whole, narrow);
            }
        }
    }
    transcript
}

/// As [`elements_are_independent`], for enough rows to fill a device: a library divides work between multiprocessors only
/// if there is enough.
pub fn rows_of_any_number_agree<B: Backend<Activation: Number>>(arm: &Arm<B>) -> Transcript {
    const FEW: usize = 129;
    let mut device = Device::new(arm);
    let mut transcript = Transcript::default();
    let rows = device.sizes.choose(vec![4096], vec![300])[0];
    for (seed, inner, columns) in [(1, 264, 8), (2, 19, 33)] {
        let mut inputs = Inputs::new(seed);
        let a = inputs.uniform_of::<B::Activation>(rows * inner, -1.0, 1.0);
        let b = inputs.uniform_of::<B::Activation>(inner * columns, -1.0, 1.0);
        let initial = inputs.uniform_of::<B::Activation>(rows * columns, -1.0, 1.0);
        let a = Operand::new(&mut device, Storage::Packed, &a, rows, inner);
        let b = Operand::new(&mut device, Storage::Transposed, &b, inner, columns);
        for initial in [None, Some(initial.as_slice())] {
            let label = format!("matmul of {rows} rows, inner {inner}, seed {seed}");
            let whole = product(&mut device, &label, initial, a.view(), b.view());
            whole.record(&mut transcript, &label);
            let last = rows - FEW;
            for (first, count) in [(0, 1), (rows - 1, 1), (0, FEW), (rows / 2, FEW), (last, FEW)] {
                let inside = first * columns..(first + count) * columns;
                let initial = initial.map(|initial| &initial[inside.clone()]);
                let a = a.view().rows(first, count).unwrap();
                let out = product(&mut device, &label, initial, a, b.view());
                let label = format!("{label}, {count} from {first}");
                out.assert_part_of(&label, &whole, |whole| whole[inside.clone()].to_vec());
            }
        }
    }
    transcript
}
