//! One token drawn from each row of logits.

use tidemill_kernels::backend::{DrawSettings, NO_TOKEN};
use tidemill_kernels::draw as definition;
use tidemill_kernels::{Backend, Slice, SliceMut};

use super::agreement::Transcript;
use super::arm::{Arm, Sizes};
use super::device::{Device, Layout, Placed, assert_shape_error};
use super::inputs::Inputs;
use super::number::Number;

/// All tokens are candidates, with unchanged logits.
const PLAIN: DrawSettings = DrawSettings { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0 };

/// Every filter alone, and together.
fn filters() -> [DrawSettings; 12] {
    [
        PLAIN,
        DrawSettings { temperature: 0.7, ..PLAIN },
        DrawSettings { top_k: 1, ..PLAIN },
        DrawSettings { top_k: 50, ..PLAIN },
        DrawSettings { top_k: 3000, temperature: 1.3, ..PLAIN },
        DrawSettings { top_p: 0.95, ..PLAIN },
        DrawSettings { top_p: 0.5, temperature: 2.0, ..PLAIN },
        DrawSettings { top_p: 1e-9, ..PLAIN },
        DrawSettings { min_p: 0.05, ..PLAIN },
        DrawSettings { min_p: 1.0, ..PLAIN },
        DrawSettings { top_k: 40, top_p: 0.9, ..PLAIN },
        DrawSettings { temperature: 0.8, top_k: 100, top_p: 0.97, min_p: 0.02 },
    ]
}

/// `count` numbers spread evenly over the open interval (0, 1).
fn grid(count: usize) -> Vec<f64> {
    (0..count).map(|i| (i as f64 + 0.5) / count as f64).collect()
}

fn drawn<B: Backend>(
    device: &mut Device<'_, B>,
    layout: Layout,
    logits: &[f32],
    uniforms: &[f64],
    scale: f32,
    settings: &DrawSettings,
) -> Vec<u32> {
    let logits: Placed<B> = Placed::new(device, layout, logits);
    let mut tokens = device.upload(&vec![7; uniforms.len()]);
    let uniforms = device.upload(uniforms);
    let (backend, stream) = (device.backend, &mut device.stream);
    let (out, uniforms) = (SliceMut::all(&mut tokens), Slice::all(&uniforms));
    backend.draw(stream, out, logits.matrix(), uniforms, scale, settings).unwrap();
    device.download(&tokens)
}

/// The tokens that the definition draws.
fn expected(logits: &[f32], uniforms: &[f64], scale: f32, settings: &DrawSettings) -> Vec<u32> {
    let mut candidates = Vec::new();
    let rows = logits.chunks_exact(logits.len() / uniforms.len()).zip(uniforms);
    rows.map(|(row, &uniform)| {
        let logits = row.iter().map(|logit| f64::from(logit * scale));
        definition::keep_candidates(&mut candidates, logits, settings);
        definition::draw(&candidates, uniform)
    })
    .collect()
}

/// Rows of logits: spread widely, many equal, close together, and one logit far above all others.
fn logits(inputs: &mut Inputs, rows: usize, columns: usize) -> Vec<f32> {
    let mut logits = inputs.uniform_of::<f32>(rows * columns, -9.0, 9.0);
    for (row, logits) in logits.chunks_mut(columns).enumerate() {
        match row % 4 {
            0 => {}
            1 => logits.iter_mut().for_each(|logit| *logit = (*logit).round() / 4.0),
            2 => logits.iter_mut().for_each(|logit| *logit /= 64.0),
            _ => logits[columns / 2] = 1e30,
        }
    }
    logits
}

/// Tokens equal the definition's for every size and filter; the padding of a row is never read, and rows do not affect each other.
///
/// Seen failing: without its barriers, without the sums of other threads, without the order of equal logits, with +0 and -0 unequal.
pub fn agrees<B: Backend<Activation: Number>>(arm: &Arm<B>) -> Transcript {
    let mut device = Device::new(arm);
    let mut transcript = Transcript::default();
    let most = device.sizes.choose(vec![4], vec![1])[0];
    let sizes = [(1, 1, 1), (2, 3, 7), (3, 1, 259), (4, 4, 259), (5, 5, 4099), (6, most, 50_257)];
    for (seed, rows, columns) in sizes {
        for (place, settings) in filters().iter().enumerate() {
            let of_small = match columns {
                ..1000 => &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11][..],
                1000..5000 => &[0, 4, 5, 6, 11],
                _ => &[5, 11],
            };
            if device.sizes == Sizes::Small && !of_small.contains(&place) {
                continue;
            }
            let mut inputs = Inputs::new(100 * seed + place as u64);
            let logits = logits(&mut inputs, rows, columns);
            let uniforms = inputs.uniform(rows, 0.001, 0.999);
            let uniforms: Vec<f64> = uniforms.into_iter().map(f64::from).collect();
            let layout = Layout::columns_of(rows, columns + 5, 0, columns);
            let scale = if place % 2 == 0 { 1.0 } else { 0.25 };
            let found = drawn(&mut device, layout, &logits, &uniforms, scale, settings);
            let expected = expected(&logits, &uniforms, scale, settings);
            assert_eq!(found, expected, "{columns} columns, {settings:?}: found, expected");
            transcript.record_words("draw", found.iter().map(|&token| u64::from(token)));
        }
    }
    // For top-k, +0 and -0 are equal; top-p takes +0 first.
    let zeros = [-0.0, 0.0, -0.0, 0.0, -1.0, -0.0];
    for settings in [
        DrawSettings { top_k: 1, ..PLAIN },
        DrawSettings { top_k: 3, ..PLAIN },
        DrawSettings { top_k: 3, top_p: 0.7, ..PLAIN },
        DrawSettings { top_p: 0.3, ..PLAIN },
    ] {
        let uniforms = grid(16);
        let logits = zeros.repeat(16);
        let found = drawn(&mut device, Layout::packed(16, 6), &logits, &uniforms, 1.0, &settings);
        let expected = expected(&logits, &uniforms, 1.0, &settings);
        assert_eq!(found, expected, "{settings:?}: found, expected");
    }
    transcript
}

/// Evenly spread uniform numbers draw each token as often as its probability says, within one.
pub fn follows_the_distribution<B: Backend<Activation: Number>>(arm: &Arm<B>) -> Transcript {
    let mut device = Device::new(arm);
    let mut transcript = Transcript::default();
    let draws = device.sizes.choose(vec![2000], vec![50])[0];
    let row = [1.0, -2.0, 0.5, 3.0, -0.25, 2.9, 0.0];
    let logits = row.repeat(draws);
    let layout = Layout::packed(draws, row.len());
    for temperature in [1.0, 0.5, 3.0] {
        let settings = DrawSettings { temperature, ..PLAIN };
        let found = drawn(&mut device, layout, &logits, &grid(draws), 1.0, &settings);
        let weights = row.map(|logit| (f64::from(logit) / temperature).exp());
        let sum: f64 = weights.iter().sum();
        for (token, weight) in weights.iter().enumerate() {
            let count = found.iter().filter(|&&found| found as usize == token).count() as f64;
            let expected = weight / sum * draws as f64;
            assert!((count - expected).abs() <= 1.0, "{token}: found {count}, expected {expected}");
        }
        assert!(
            found.is_sorted(),
            "a greater uniform number draws no lower token: found {found:?}"
        );
        transcript.record_words("draws", found.iter().map(|&token| u64::from(token)));
    }
    transcript
}

/// Hard rows: a row with NaN or an infinity has no token; a uniform number between two weights draws the definition's token or none.
pub fn leaves_what_is_in_doubt<B: Backend<Activation: Number>>(arm: &Arm<B>) -> Transcript {
    let mut device = Device::new(arm);
    let mut transcript = Transcript::default();
    let (infinite, most) = (f32::INFINITY, f32::MAX);
    let hard = [
        [1.0, f32::NAN, 2.0, 0.0],
        [1.0, -f32::NAN, 2.0, 0.0],
        [infinite, 1.0, 2.0, 3.0],
        [-infinite, 1.0, 2.0, 3.0],
        [-most, most, -most, 0.0],
        [-most; 4],
        [1e-45, 0.0, 3e-45, -1e-45],
    ];
    let half = [0.3; 7];
    let layout = Layout::packed(7, 4);
    for settings in filters() {
        let found = drawn(&mut device, layout, hard.as_flattened(), &half, 1.0, &settings);
        let of_finite = expected(hard[4..].as_flattened(), &half[4..], 1.0, &settings);
        assert_eq!(found[..4], [NO_TOKEN; 4], "{settings:?}: found, expected");
        for (found, expected) in found[4..].iter().zip(of_finite) {
            let is_either = *found == expected || *found == NO_TOKEN;
            assert!(is_either, "{settings:?}: found {found}, expected {expected}");
        }
        transcript.record_words("hard", found.iter().map(|&token| u64::from(token)));
    }
    // More equal candidates than are sorted; and uniform numbers at borders of weights that are exact.
    let columns = 5000;
    let equal = vec![1.25; columns];
    for (top_k, top_p, token) in [(0, 1.0, 1500), (9, 1.0, 1500), (0, 0.9001, 1350)] {
        let settings = DrawSettings { top_k, top_p, ..PLAIN };
        let layout = Layout::packed(1, columns);
        let found = drawn(&mut device, layout, &equal, &[0.30001], 1.0, &settings);
        assert_eq!(found, [token], "{settings:?}: found, expected");
    }
    for (uniform, settings) in [
        (0.3, PLAIN),
        (0.0, PLAIN),
        (1.0 - f64::EPSILON / 2.0, PLAIN),
        (0.3, DrawSettings { top_p: 0.5, ..PLAIN }),
        (0.9, DrawSettings { top_p: 1.0 - f64::EPSILON / 2.0, ..PLAIN }),
    ] {
        for columns in [1, 4, columns] {
            let equal = &equal[..columns];
            let layout = Layout::packed(1, columns);
            let found = drawn(&mut device, layout, equal, &[uniform], 1.0, &settings)[0];
            let expected = expected(equal, &[uniform], 1.0, &settings)[0];
            let is_either = found == expected || found == NO_TOKEN;
            assert!(is_either, "{settings:?}: found {found}, expected {expected}");
            transcript.record_words("doubt", [u64::from(found)]);
        }
    }
    transcript
}

/// One token and one uniform number for each row; and valid settings only.
pub fn refuses_shapes<B: Backend<Activation: Number>>(arm: &Arm<B>) {
    let mut device = Device::new(arm);
    let logits: Placed<B> = Placed::new(&mut device, Layout::packed(2, 3), &[0.0; 6]);
    let mut refused = |tokens: usize, uniforms: usize, settings: DrawSettings| {
        let mut tokens = device.upload(&vec![0; tokens]);
        let uniforms = device.upload(&vec![0.5; uniforms]);
        let (out, uniforms) = (SliceMut::all(&mut tokens), Slice::all(&uniforms));
        let (backend, stream) = (device.backend, &mut device.stream);
        let result = backend.draw(stream, out, logits.matrix(), uniforms, 1.0, &settings);
        assert_shape_error("draw", result);
    };
    for (tokens, uniforms) in [(1, 2), (3, 2), (2, 1), (2, 3)] {
        refused(tokens, uniforms, PLAIN);
    }
    for temperature in [0.0, -1.0, f64::NAN, f64::INFINITY, 1e-300] {
        refused(2, 2, DrawSettings { temperature, ..PLAIN });
    }
    for (top_p, min_p) in [(0.0, 0.0), (1.5, 0.0), (f64::NAN, 0.0), (1.0, 1.5), (1.0, 1e-300)] {
        refused(2, 2, DrawSettings { top_p, min_p, ..PLAIN });
    }
}
