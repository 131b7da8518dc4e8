//! Matrix products.

use tidemill_kernels::backend::Output;
use tidemill_kernels::reference::matmul::{MatmulShape, backward, forward};
use tidemill_kernels::{Backend, Matrix};

use super::agreement::{Transcript, assert_close, assert_same_bits, tolerance};
use super::device::{Device, Layout, Placed};
use super::inputs::{Inputs, wide};

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
struct Operand<B: Backend> {
    placed: Placed<B>,
    storage: Storage,
}

impl<B: Backend> Operand<B> {
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

    fn view(&self) -> Matrix<'_, B, f32> {
        match self.storage {
            Storage::Packed | Storage::Strided => self.placed.matrix(),
            Storage::Transposed => self.placed.matrix().transposed(),
        }
    }
}

/// Both products of `a` and `b` must give the same bits here, where activations are fp32.
#[track_caller]
fn product<B: Backend<Activation = f32>>(
    device: &mut Device<'_, B>,
    label: &str,
    initial: Option<&[f32]>,
    a: Matrix<'_, B, f32>,
    b: Matrix<'_, B, f32>,
) -> Vec<f32> {
    let layout = Layout::columns_of(a.shape()[0], b.shape()[1] + 3, 1, b.shape()[1]);
    let mut outs = [0, 1].map(|_| match initial {
        Some(initial) => Placed::new(device, layout, initial),
        None => Placed::poisoned(device, layout),
    });
    let output = if initial.is_some() { Output::Add } else { Output::Overwrite };
    let (backend, stream) = (device.backend, &mut device.stream);
    backend.matmul(stream, outs[0].matrix_mut(), a, b, output).expect(label);
    backend.matmul_f32(stream, outs[1].matrix_mut(), a, b, output).expect(label);
    let [out, out_f32] = outs.map(|out| out.read(device));
    assert_same_bits(&format!("{label} matmul_f32"), &out_f32, &out);
    out
}

/// Products of many sizes and storages agree with the definition.
pub fn agrees<B: Backend<Activation = f32>>(backend: &B) -> Transcript {
    let mut device = Device::new(backend);
    let mut transcript = Transcript::default();
    let mut seed = 0;
    for inner in [1, 3, 16, 17, 255, 256, 257, 600] {
        for rows in [1, 2, 7, 16, 33] {
            for columns in [1, 8, 31, 40] {
                seed += 1;
                let mut inputs = Inputs::new(seed);
                let shape = MatmulShape { rows, inner, columns };
                let storages = [0, 1].map(|_| Storage::ALL[inputs.pick(3)]);
                let label = format!("matmul {shape:?} {storages:?} seed {seed}");
                let a = inputs.uniform(rows * inner, -1.0, 1.0);
                let b = inputs.uniform(inner * columns, -1.0, 1.0);
                let a_operand = Operand::new(&mut device, storages[0], &a, rows, inner);
                let b_operand = Operand::new(&mut device, storages[1], &b, inner, columns);
                let initial = inputs.uniform(rows * columns, -1.0, 1.0);
                let expected = forward(&wide(&a), &wide(&b), shape);

                let (a_view, b_view) = (a_operand.view(), b_operand.view());
                let out = product(&mut device, &label, None, a_view, b_view);
                assert_close(&label, &out, &expected, tolerance::<f32>(inner));
                transcript.record(&label, &out);

                let label = format!("{label} added");
                let out = product(&mut device, &label, Some(&initial), a_view, b_view);
                let sums: Vec<f64> =
                    expected.iter().zip(&initial).map(|(x, &i)| x + f64::from(i)).collect();
                assert_close(&label, &out, &sums, tolerance::<f32>(inner));
                transcript.record(&label, &out);
            }
        }
    }
    transcript
}

/// The gradients of a product are products of transposed views.
pub fn backward_agrees<B: Backend<Activation = f32>>(backend: &B) -> Transcript {
    let mut device = Device::new(backend);
    let mut transcript = Transcript::default();
    for (seed, shape) in [(1, (1, 1, 1)), (2, (9, 17, 3)), (3, (129, 40, 33))] {
        let (rows, inner, columns) = shape;
        let shape = MatmulShape { rows, inner, columns };
        let label = format!("matmul backward {shape:?} seed {seed}");
        let mut inputs = Inputs::new(seed);
        let a = inputs.uniform(rows * inner, -1.0, 1.0);
        let b = inputs.uniform(inner * columns, -1.0, 1.0);
        let dout = inputs.uniform(rows * columns, -1.0, 1.0);
        let placed_a = Placed::new(&mut device, Layout::packed(rows, inner), &a);
        let placed_b = Placed::new(&mut device, Layout::packed(inner, columns), &b);
        let placed_dout = Placed::new(&mut device, Layout::packed(rows, columns), &dout);
        let b_transposed = placed_b.matrix().transposed();
        let da = product(&mut device, &label, None, placed_dout.matrix(), b_transposed);
        let a_transposed = placed_a.matrix().transposed();
        let db = product(&mut device, &label, None, a_transposed, placed_dout.matrix());
        let expected = backward(&wide(&dout), &wide(&a), &wide(&b), shape);
        assert_close(&format!("{label} da"), &da, &expected.da, tolerance::<f32>(columns));
        assert_close(&format!("{label} db"), &db, &expected.db, tolerance::<f32>(rows));
        transcript.record(&label, &da);
        transcript.record(&label, &db);
    }
    transcript
}

/// An element's bits depend neither on the number of rows or columns, nor on its place, nor on how
/// the operands are stored.
pub fn elements_are_independent<B: Backend<Activation = f32>>(backend: &B) -> Transcript {
    let mut device = Device::new(backend);
    let mut transcript = Transcript::default();
    let (rows, columns) = (37, 45);
    for (seed, inner) in [(1, 17), (2, 300), (3, 700)] {
        let mut inputs = Inputs::new(seed);
        let a = inputs.uniform(rows * inner, -1.0, 1.0);
        let b = inputs.uniform(inner * columns, -1.0, 1.0);
        let initial = inputs.uniform(rows * columns, -1.0, 1.0);
        let packed_a = Operand::new(&mut device, Storage::Packed, &a, rows, inner);
        let packed_b = Operand::new(&mut device, Storage::Packed, &b, inner, columns);
        for initial in [None, Some(initial.as_slice())] {
            let label = format!("matmul inner {inner} added {} seed {seed}", initial.is_some());
            let (all_a, all_b) = (packed_a.view(), packed_b.view());
            let whole = product(&mut device, &label, initial, all_a, all_b);
            transcript.record(&label, &whole);
            for storage in Storage::ALL {
                let stored_a = Operand::new(&mut device, storage, &a, rows, inner);
                let stored_b = Operand::new(&mut device, storage, &b, inner, columns);
                let (a, b) = (stored_a.view(), stored_b.view());
                let out = product(&mut device, &label, initial, a, b);
                assert_same_bits(&format!("{label} stored {storage:?}"), &out, &whole);
            }
            for (first, count) in [(0, 1), (36, 1), (5, 2), (11, 13), (1, 36)] {
                let initial = initial.map(|i| &i[first * columns..(first + count) * columns]);
                let a = all_a.rows(first, count).unwrap();
                let out = product(&mut device, &label, initial, a, all_b);
                let expected = &whole[first * columns..(first + count) * columns];
                assert_same_bits(&format!("{label} rows {first}+{count}"), &out, expected);
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
                assert_same_bits(&label, &out, &narrow(&whole));
            }
        }
    }
    transcript
}
