//! Muon against its published definition in f64.

use std::num::NonZeroUsize;

use tidemill_kernels::{Cpu, MasterMut, Runtime};

use super::*;
use crate::layout::{Decay, Layout};
use crate::optimizer::{OptimizerName, UpdateTerms, WeightDecay};

const RATE: f64 = 0.02;

/// `matrix[rows, columns]`
type Wide = Vec<Vec<f64>>;

fn product(a: &Wide, b: &Wide) -> Wide {
    let columns = b.first().map_or(0, Vec::len);
    let element = |row: &[f64], j: usize| row.iter().zip(b).map(|(x, b)| x * b[j]).sum();
    a.iter().map(|row| (0..columns).map(|j| element(row, j)).collect()).collect()
}

fn transposed(a: &Wide) -> Wide {
    (0..a[0].len()).map(|j| a.iter().map(|row| row[j]).collect()).collect()
}

fn sum(x: f64, a: &Wide, y: f64, b: &Wide) -> Wide {
    let row =
        |(a, b): (&Vec<f64>, &Vec<f64>)| a.iter().zip(b).map(|(a, b)| x * a + y * b).collect();
    a.iter().zip(b).map(row).collect()
}

/// `zeropower_via_newtonschulz5` of Jordan's post.
fn orthogonal(g: &Wide, iterations: u32) -> Wide {
    let norm = g.iter().flatten().map(|x| x * x).sum::<f64>().sqrt().max(1e-7);
    let is_tall = g.len() > g[0].len();
    let mut x = sum(1.0 / norm, g, 0.0, g);
    if is_tall {
        x = transposed(&x);
    }
    for _ in 0..iterations {
        let a = product(&x, &transposed(&x));
        let b = sum(-4.775, &a, 2.0315, &product(&a, &a));
        x = sum(3.4445, &x, 1.0, &product(&b, &x));
    }
    if is_tall { transposed(&x) } else { x }
}

/// Numbers between -1 and 1, different for each seed.
fn numbers(seed: u64, elements: usize) -> Vec<f32> {
    let number = |index: usize| {
        let mut x = (seed << 32 | index as u64).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x ^= x >> 27;
        (x >> 40) as f32 / (1_u64 << 23) as f32 - 1.0
    };
    (0..elements).map(number).collect()
}

fn wide(values: &[f32], columns: usize) -> Wide {
    let row = |row: &[f32]| row.iter().map(|&x| f64::from(x)).collect();
    values.chunks(columns).map(row).collect()
}

/// The parameters of `tensor` after three updates, with states of `counts` numbers.
fn updated(settings: &OptimizerSettings, tensor: &Tensor, counts: [usize; 3]) -> Vec<f32> {
    let backend = Cpu::new(NonZeroUsize::MIN).expect("a thread");
    let mut stream = backend.device_stream().expect("a stream");
    let rule = Muon::new(settings.clone());
    let elements = tensor.elements();
    let mut parameters = backend.allocate::<f32>(&mut stream, elements).expect("memory");
    backend
        .write(&mut stream, SliceMut::all(&mut parameters), &numbers(9, elements))
        .expect("written");
    let mut states =
        counts.map(|count| backend.allocate::<f32>(&mut stream, count.max(1)).expect("memory"));
    for state in &mut states {
        backend.fill_zero(&mut stream, SliceMut::all(state)).expect("filled");
    }
    for update in 1..=3 {
        let mut gradient = backend.allocate::<f32>(&mut stream, elements).expect("memory");
        let values = numbers(update, elements);
        backend.write(&mut stream, SliceMut::all(&mut gradient), &values).expect("written");
        let mut none = backend.allocate::<u16>(&mut stream, 1).expect("memory");
        let remainder = SliceMut::new(&mut none, 0, 0).expect("nothing");
        let states = states.iter_mut().zip(counts);
        let states =
            states.map(|(state, count)| SliceMut::new(state, 0, count).expect("its numbers"));
        let views = UpdateViews {
            tensor: Some(tensor),
            parameters: MasterMut::new(SliceMut::all(&mut parameters), remainder).expect("masters"),
            states: states.collect(),
            gradient: Slice::all(&gradient),
        };
        let terms = UpdateTerms { learning_rate_factor: 1.0, weight_decay: WeightDecay::OfRule };
        let scalars = UpdateScalars::new(update, RATE, SCALE, terms);
        let device = &mut Device { backend: &backend, stream: &mut stream };
        rule.update(device, views, scalars).expect("updated");
    }
    backend.to_vec(&mut stream, Slice::all(&parameters)).expect("read")
}

/// The clipping coefficient of the gradients.
const SCALE: f32 = 0.5;

fn tensor(shape: &[usize], row_multiple: usize) -> Tensor {
    let mut layout = Layout::new();
    layout.segment("only");
    layout.tensor("only", shape, Decay::Decayed, row_multiple);
    layout.tensors()[0].clone()
}

#[test]
fn hidden_matrices_are_updated_as_published() {
    let original = MuonSettings { step_size: MuonStepSize::Original, ..Default::default() };
    let plain = MuonSettings { lookahead: Lookahead::None, momentum: 0.5, ..Default::default() };
    let short = MuonSettings { iterations: 2, ..original };
    for (own, [rows, columns], factor) in [
        (MuonSettings::default(), [5, 37], 0.2 * 37_f64.sqrt()),
        (MuonSettings::default(), [33, 8], 0.2 * 33_f64.sqrt()),
        (original, [48, 12], 2.0),
        (original, [12, 48], 1.0),
        (plain, [16, 16], 0.8),
        (short, [1, 7], 1.0),
    ] {
        let settings = OptimizerSettings {
            muon: Some(own),
            weight_decay: 0.3,
            ..OptimizerSettings::of(OptimizerName::Muon)
        };
        settings.check().expect("allowed");
        let elements = rows * columns;
        let found = updated(&settings, &tensor(&[rows, columns], 1), [elements, 0, 0]);

        let mut parameters = wide(&numbers(9, elements), columns);
        let mut momentum = vec![vec![0.0; columns]; rows];
        for update in 1..=3 {
            let g = wide(&numbers(update, elements), columns);
            let g = sum(f64::from(SCALE), &g, 0.0, &g);
            momentum = sum(own.momentum, &momentum, 1.0 - own.momentum, &g);
            let direction = match own.lookahead {
                Lookahead::Nesterov => sum(own.momentum, &momentum, 1.0 - own.momentum, &g),
                Lookahead::None => momentum.clone(),
            };
            let direction = orthogonal(&direction, own.iterations);
            parameters = sum(1.0 - RATE * 0.3, &parameters, -RATE * factor, &direction);
        }
        for (found, expected) in found.iter().zip(parameters.iter().flatten()) {
            let error = (f64::from(*found) - expected).abs();
            assert!(error < 5e-6, "{own:?} {rows} x {columns}: found {found}, expected {expected}");
        }
    }
}

/// Five iterations bring every singular value of a random matrix to between 0.6 and 1.3, as the post shows.
#[test]
fn updates_are_nearly_orthogonal() {
    let x = orthogonal(&wide(&numbers(4, 8 * 64), 64), 5);
    let gram = product(&x, &transposed(&x));
    for (i, row) in gram.iter().enumerate() {
        for (j, &element) in row.iter().enumerate() {
            let expected = if i == j { 1.0 } else { 0.0 };
            assert!((element - expected).abs() < 0.6, "[{i}, {j}] = {element}");
        }
    }
}

/// A vector, a filter of three dimensions and a table get the bits of AdamW.
#[test]
fn all_else_is_adamw() {
    let settings = OptimizerSettings::of(OptimizerName::Muon);
    let adamw = OptimizerSettings { name: OptimizerName::Adamw, muon: None, ..settings.clone() };
    for (shape, row_multiple) in [(&[17][..], 1), (&[4, 1, 3], 1), (&[5, 3], 8)] {
        let tensor = tensor(shape, row_multiple);
        let elements = tensor.elements();
        let found = updated(&settings, &tensor, [0, elements, elements]);
        let mut expected = numbers(9, elements);
        let rule = AdamW::new(adamw.clone());
        let mut moments = [vec![0.0_f64; elements], vec![0.0_f64; elements]];
        for update in 1..=3 {
            let terms =
                UpdateTerms { learning_rate_factor: 1.0, weight_decay: WeightDecay::OfRule };
            let step = rule.step(UpdateScalars::new(update, RATE, SCALE, terms));
            let mut state = tidemill_kernels::reference::optimizer::AdamWState {
                parameters: expected.iter().map(|&x| f64::from(x)).collect(),
                exp_avg: moments[0].clone(),
                exp_avg_sq: moments[1].clone(),
            };
            let gradient: Vec<f64> =
                numbers(update, elements).iter().map(|&x| f64::from(x)).collect();
            tidemill_kernels::reference::optimizer::adamw(&mut state, &gradient, step);
            expected = state.parameters.iter().map(|&x| x as f32).collect();
            moments = [state.exp_avg, state.exp_avg_sq];
        }
        for (found, expected) in found.iter().zip(&expected) {
            assert!((found - expected).abs() < 1e-5, "{shape:?}: {found}, {expected}");
        }
    }
}

#[test]
fn settings_that_no_update_can_use_are_refused() {
    let said = |own: MuonSettings| {
        let settings = OptimizerSettings::of(OptimizerName::Muon);
        let settings = OptimizerSettings { muon: Some(own), ..settings };
        settings.check().expect_err("refused").to_string()
    };
    let momentum = MuonSettings { momentum: 1.0, ..Default::default() };
    assert!(said(momentum).starts_with("optimizer.muon.momentum: expected a number of at least 0"));
    let none = MuonSettings { iterations: 0, ..Default::default() };
    assert!(said(none).starts_with("optimizer.muon.iterations: expected a number from 1 to 20"));
    let table = OptimizerSettings { muon: Some(MuonSettings::default()), ..Default::default() };
    let error = table.check().expect_err("refused").to_string();
    assert!(
        error.contains("optimizer.muon: expected no value, as adamw has no such setting"),
        "{error}"
    );
}
