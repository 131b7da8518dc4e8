//! Sums of gradients: over grains, over uses of a parameter, and of squares.

use tidemill_kernels::reference::gradient_sums;
use tidemill_kernels::{Backend, Slice, SliceMut};

use super::agreement::{Transcript, assert_close, assert_same_bits, tolerance};
use super::arm::Arm;
use super::device::{Device, Layout, MARGINS, Placed};
use super::inputs::{Inputs, wide};

/// Sizes around a vector's width, and one that a backend may share among threads.
const SIZES: [usize; 9] = [1, 3, 15, 16, 17, 1000, 4095, 4097, 150_001];

/// More uses of a parameter than a launch may take at once.
const USES: [usize; 4] = [1, 2, 3, 19];

fn accumulated<B: Backend>(
    device: &mut Device<'_, B>,
    label: &str,
    lane: &[f32],
    gradients: &[&[f32]],
) -> Vec<f32> {
    let mut placed_lane = Placed::new(device, Layout::range(lane.len()), lane);
    for gradients in gradients {
        let placed = Placed::new(device, Layout::range(gradients.len()), gradients);
        let (backend, stream) = (device.backend, &mut device.stream);
        backend.accumulate(stream, placed_lane.slice_mut(), placed.slice()).expect(label);
    }
    placed_lane.read(device)
}

/// Grains are added in order, to the bit, however many come in one call.
pub fn accumulate_agrees<B: Backend>(arm: &Arm<B>) -> Transcript {
    let mut device = Device::new(arm);
    let mut transcript = Transcript::default();
    for elements in SIZES {
        for grains in [1, 2, 5] {
            device.margin = MARGINS[grains % 2];
            let label = format!("accumulate {elements} elements of {grains} grains");
            let mut inputs = Inputs::new((elements * 8 + grains) as u64);
            let lane = inputs.uniform(elements, -1.0, 1.0);
            let gradients = inputs.uniform(grains * elements, -1.0, 1.0);
            let found = accumulated(&mut device, &label, &lane, &[&gradients]);
            let expected = gradient_sums::accumulate(&wide(&lane), &wide(&gradients));
            assert_close(&label, &found, &expected, tolerance::<f32>(grains));
            let mut in_order = lane.clone();
            for gradient in gradients.chunks(elements) {
                in_order.iter_mut().zip(gradient).for_each(|(lane, g)| *lane += g);
            }
            assert_same_bits(&label, &found, &in_order);
            let one_by_one: Vec<&[f32]> = gradients.chunks(elements).collect();
            let found_one_by_one = accumulated(&mut device, &label, &lane, &one_by_one);
            assert_same_bits(&label, &found_one_by_one, &found);
            transcript.record(&label, &found);
        }
    }
    transcript
}

/// The uses of a parameter, wherever they are in a slice, are added in order into the first and divided once, to the bit; nothing else
/// changes.
pub fn mean_gradient_agrees<B: Backend>(arm: &Arm<B>) -> Transcript {
    let backend = &arm.backend;
    let mut device = Device::new(arm);
    let mut transcript = Transcript::default();
    for elements in SIZES {
        for uses in USES {
            // Aligned uses, and unaligned ones.
            for (margin, gap) in [(MARGINS[0], 16 - elements % 16), (MARGINS[1], 3)] {
                device.margin = margin;
                let label = format!("{elements} elements of {uses} uses {gap} apart");
                let mut inputs = Inputs::new((elements * 8 + uses) as u64);
                let stride = elements + gap;
                // The uses in the order of their sum: the first is at neither the lowest nor the highest address.
                let starts: Vec<usize> =
                    (0..uses).map(|i| (i * 7 + uses / 2) % uses * stride).collect();
                let values = inputs.uniform(uses * stride, -1.0, 1.0);
                let mut placed = Placed::new(&mut device, Layout::range(uses * stride), &values);
                let count = 1021.0;
                let stream = &mut device.stream;
                let (first, others) = (starts[0], &starts[1..]);
                let sums = placed.slice_mut();
                backend.mean_gradient(stream, sums, first, others, elements, count).expect(&label);
                let found = placed.read(&mut device);
                let wide_values = wide(&values);
                let wide_uses: Vec<&[f64]> =
                    starts.iter().map(|&at| &wide_values[at..][..elements]).collect();
                let expected = gradient_sums::mean_gradient(&wide_uses, f64::from(count));
                let found_mean = &found[first..][..elements];
                assert_close(&label, found_mean, &expected, tolerance::<f32>(uses));
                let mut mean = values[first..][..elements].to_vec();
                for &other in others {
                    let values = &values[other..][..elements];
                    mean.iter_mut().zip(values).for_each(|(sum, x)| *sum += x);
                }
                mean.iter_mut().for_each(|sum| *sum /= count);
                let mut changed = values;
                changed[first..][..elements].copy_from_slice(&mean);
                assert_same_bits(&label, &found, &changed);
                transcript.record(&label, &found);
            }
        }
    }
    transcript
}

/// The sums of squares that a call writes over poison.
fn squares<B: Backend>(
    device: &mut Device<'_, B>,
    x: Slice<'_, B, f32>,
    ends: &[usize],
) -> Vec<f64> {
    let mut out = device.upload(&vec![f64::NAN; ends.len()]);
    let Device { backend, stream, .. } = device;
    backend.sums_of_squares(stream, SliceMut::all(&mut out), x, ends).expect("sums");
    device.download(&out)
}

/// Sums of squares are computed in `f64` and depend only on the elements, neither on their place nor
/// on the other ranges of a call.
pub fn sums_of_squares_agree<B: Backend>(arm: &Arm<B>) -> Transcript {
    let mut device = Device::new(arm);
    let mut transcript = Transcript::default();
    for elements in SIZES {
        for magnitude in [1.0, 1e18, 1e-18] {
            let label = format!("sums_of_squares {elements} elements within {magnitude:e}");
            let x = Inputs::new(elements as u64).uniform(elements, -magnitude, magnitude);
            let placed = Placed::new(&mut device, Layout::range(elements), &x);
            let (third, half) = (elements / 3, elements / 2);
            for ends in [&[elements] as &[_], &[third, third, half, elements]] {
                let label = format!("{label} ending at {ends:?}");
                let found = squares(&mut device, placed.slice(), ends);
                let starts = std::iter::once(0).chain(ends.iter().copied());
                for (range, found) in starts.zip(ends).map(|(start, &end)| start..end).zip(&found) {
                    let x = &x[range.clone()];
                    let expected = gradient_sums::sum_of_squares(&wide(x));
                    let error = (found - expected).abs();
                    assert!(
                        error <= 1e-12 * expected,
                        "{label} {range:?}: found {found:e}, expected {expected:e}"
                    );
                    let layout = Layout::columns_of(1, x.len() + 13, 13, x.len());
                    let moved = Placed::new(&mut device, layout, x);
                    let row = moved.matrix();
                    let slice = Slice::new(row.buffer(), row.start(), x.len()).unwrap();
                    let alone = squares(&mut device, slice, &[x.len()])[0];
                    assert_eq!(alone.to_bits(), found.to_bits(), "{label} {range:?}: by itself");
                }
                transcript.record_words(&label, found.iter().map(|sum| sum.to_bits()));
            }
        }
    }
    let nothing = device.upload::<f32>(&[]);
    assert!(squares(&mut device, Slice::all(&nothing), &[]).is_empty(), "no ranges, no sums");
    assert_eq!(squares(&mut device, Slice::all(&nothing), &[0, 0]), [0.0; 2], "of nothing");
    transcript
}
