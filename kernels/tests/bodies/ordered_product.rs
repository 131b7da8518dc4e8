//! Products with a stated order over k.

use tidemill_kernels::backend::Output;
use tidemill_kernels::reference::matmul::{MatmulShape, forward};
use tidemill_kernels::{Backend, Matrix};

use super::agreement::{Transcript, assert_close, assert_same_bits, tolerance};
use super::arm::Arm;
use super::device::{Device, Layout, MARGINS, Placed};
use super::inputs::{Inputs, wide};
use super::number::Number;

/// `matrix[rows, columns]` row-major, transposed.
pub fn transposed(values: &[f64], rows: usize, columns: usize) -> Vec<f64> {
    (0..rows * columns).map(|i| values[i % rows * columns + i / rows]).collect()
}

/// The product with each type of output, of activations first.
fn product<B: Backend<Activation: Number>>(
    device: &mut Device<'_, B>,
    label: &str,
    initial: Option<&[f32]>,
    a: Matrix<'_, B, B::Activation>,
    weight: Matrix<'_, B, B::Activation>,
) -> [Vec<f32>; 2] {
    let layout = Layout::inside_wider(a.shape()[0], weight.shape()[0]);
    let (mut out, mut out_f32): (Placed<B, B::Activation>, Placed<B>) = match initial {
        Some(initial) => {
            (Placed::new(device, layout, initial), Placed::new(device, layout, initial))
        }
        None => (Placed::poisoned(device, layout), Placed::poisoned(device, layout)),
    };
    let output = if initial.is_some() { Output::Add } else { Output::Overwrite };
    let (backend, stream) = (device.backend, &mut device.stream);
    backend.ordered_matmul(stream, out.matrix_mut(), a, weight, output).expect(label);
    backend.ordered_matmul_f32(stream, out_f32.matrix_mut(), a, weight, output).expect(label);
    [out.read(device), out_f32.read(device)]
}

/// Asserts that both results equal the elements of `whole` from `first` on.
#[track_caller]
fn assert_part_of(label: &str, part: &[Vec<f32>; 2], whole: &[Vec<f32>; 2], first: usize) {
    for (part, whole) in part.iter().zip(whole) {
        assert_same_bits(label, part, &whole[first..first + part.len()]);
    }
}

/// Products of many sizes agree with the definition, and less aligned rows give the same bits.
///
/// Seen failing: without the barrier before a block adds its segments.
pub fn agrees<B: Backend<Activation: Number>>(arm: &Arm<B>) -> Transcript {
    let mut device = Device::new(arm);
    let mut transcript = Transcript::default();
    let all_rows = device.sizes.choose(vec![1, 2, 7, 8, 16, 17, 40, 129], vec![1, 8, 9, 17, 40]);
    let all_columns = device.sizes.choose(vec![1, 8, 31, 40, 136], vec![8, 31, 130]);
    let all_inner = vec![1, 8, 17, 72, 160, 512, 520, 1100, 1544];
    let mut shapes = Vec::new();
    for inner in device.sizes.choose(all_inner, vec![17, 160, 1032]) {
        for &rows in &all_rows {
            let shape = |&columns| MatmulShape { rows, inner, columns };
            shapes.extend(all_columns.iter().map(shape));
        }
    }
    // One segment for each warp, and more warps than a device of two multiprocessors holds.
    shapes.push(MatmulShape { rows: 3, inner: 3080, columns: 104 });
    for (seed, shape) in (1..).zip(shapes) {
        let mut inputs = Inputs::new(seed);
        let MatmulShape { rows, inner, columns } = shape;
        let label = format!("ordered product {shape:?} seed {seed}");
        let a = inputs.uniform_of::<B::Activation>(rows * inner, -1.0, 1.0);
        let weight = inputs.uniform_of::<B::Activation>(columns * inner, -1.0, 1.0);
        let initial = inputs.uniform_of::<B::Activation>(rows * columns, -1.0, 1.0);
        let b = transposed(&wide(&weight), columns, inner);
        let expected = forward(&wide(&a), &b, shape);
        let sums: Vec<f64> =
            expected.iter().zip(&initial).map(|(x, &i)| x + f64::from(i)).collect();
        let mut found: Vec<[Vec<f32>; 2]> = Vec::new();
        for margin in MARGINS {
            device.margin = margin;
            let of_a = Layout::columns_of(rows, inner + 8, 0, inner);
            let a: Placed<B, B::Activation> = Placed::new(&mut device, of_a, &a);
            let of_weight = Layout::packed(columns, inner);
            let weight: Placed<B, B::Activation> = Placed::new(&mut device, of_weight, &weight);
            let (a, weight) = (a.matrix(), weight.matrix());
            found.push(product(&mut device, &label, None, a, weight));
            found.push(product(&mut device, &label, Some(&initial), a, weight));
        }
        for (out, expected) in found[..2].iter().zip([&expected, &sums]) {
            assert_close(&label, &out[0], expected, tolerance::<B::Activation>(inner));
            let label = format!("{label} in f32");
            assert_close(&label, &out[1], expected, tolerance::<f32>(inner));
            out.iter().for_each(|out| transcript.record(&label, out));
        }
        assert_part_of(&format!("{label} less aligned"), &found[2], &found[0], 0);
        assert_part_of(&format!("{label} added less aligned"), &found[3], &found[1], 0);
    }
    transcript
}

/// A row has the same bits among any other rows, and a column among any other columns.
///
/// Seen failing: with segments that the kernel for few rows, or separate blocks, leave out; with a segment that starts from the last sum.
pub fn rows_of_any_number_agree<B: Backend<Activation: Number>>(arm: &Arm<B>) -> Transcript {
    let mut device = Device::new(arm);
    let mut transcript = Transcript::default();
    let rows = device.sizes.choose_for_gpu(vec![4096], vec![150])[0];
    // Columns of one block of groups and of several, whole tiles and parts of tiles; on a whole device, also columns that fill few blocks.
    let all = vec![
        (1, 160, 8),
        (2, 1544, 40),
        (3, 1030, 33),
        (4, 2048, 130),
        (5, 5120, 192),
        (6, 2568, 2560),
        (7, 160, 5120),
    ];
    for (seed, inner, columns) in device
        .sizes
        .choose_for_gpu(all, vec![(1, 160, 8), (2, 1032, 24), (3, 525, 33), (4, 520, 84)])
    {
        let mut inputs = Inputs::new(seed);
        let a = inputs.uniform_of::<B::Activation>(rows * inner, -1.0, 1.0);
        let weight = inputs.uniform_of::<B::Activation>(columns * inner, -1.0, 1.0);
        let initial = inputs.uniform_of::<B::Activation>(rows * columns, -1.0, 1.0);
        let a: Placed<B, B::Activation> = Placed::new(&mut device, Layout::packed(rows, inner), &a);
        let weight: Placed<B, B::Activation> =
            Placed::new(&mut device, Layout::packed(columns, inner), &weight);
        for initial in [None, Some(initial.as_slice())] {
            let label = format!("ordered product of {rows} rows, inner {inner}, seed {seed}");
            let whole = product(&mut device, &label, initial, a.matrix(), weight.matrix());
            whole.iter().for_each(|out| transcript.record(&label, out));
            for count in device.sizes.choose_for_gpu(
                vec![1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 1024],
                vec![1, 7, 17, 33, 65, 129],
            ) {
                for first in device.sizes.choose(
                    vec![0, (rows / 2 - 3).min(rows - count), rows - count],
                    vec![rows - count],
                ) {
                    let label = format!("{label}, {count} from {first}");
                    let inside = first * columns..(first + count) * columns;
                    let initial = initial.map(|initial| &initial[inside.clone()]);
                    let a = a.matrix().rows(first, count).unwrap();
                    let part = product(&mut device, &label, initial, a, weight.matrix());
                    assert_part_of(&label, &part, &whole, inside.start);
                }
            }
            let (first, count) = (columns / 2, columns / 2);
            let label = format!("{label}, columns {first}+{count}");
            let narrow = |values: &[f32]| -> Vec<f32> {
                values.chunks(columns).flat_map(|row| row[first..first + count].to_vec()).collect()
            };
            let initial = initial.map(narrow);
            let weight = weight.matrix().rows(first, count).unwrap();
            let part = product(&mut device, &label, initial.as_deref(), a.matrix(), weight);
            let expected = whole.each_ref().map(|out| narrow(out));
            assert_part_of(&label, &part, &expected, 0);
        }
    }
    transcript
}
