//! Split masters: they are joined without loss, and AdamW updates them like fp32 parameters.

use tidemill_kernels::backend::ActivationElement;
use tidemill_kernels::master::remainder_elements;
use tidemill_kernels::reference::master::{join, split};
use tidemill_kernels::reference::optimizer::{AdamWState, adamw};
use tidemill_kernels::{Backend, Master, MasterMut, Run, Slice, SliceMut};

use super::adamw::{PlacedState, step};
use super::agreement::{Transcript, assert_close, assert_same_bits, tolerance};
use super::arm::Arm;
use super::device::{Device, Layout, MARGINS, Placed, assert_shape_error};
use super::inputs::{Inputs, wide};
use super::number::Number;
use super::refusal_case::{Bench, assert_answer, slice, slice_mut, wrong_by_one};

/// Sizes around a pack, and one of several blocks.
const SIZES: [usize; 9] = [1, 3, 7, 8, 9, 17, 1000, 2048, 10_001];

/// Elements of poison before an operand: aligned as a model's buffers are, unaligned, and aligned for a pack of floats but not for a
/// pack of halves.
const STARTS: [usize; 3] = [MARGINS[0], MARGINS[1], 4];

/// A master on the device, between poison.
pub struct PlacedMaster<B: Backend<Activation: Number>> {
    rounded: Placed<B, B::Activation>,
    remainder: Placed<B, u16>,
}

impl<B: Backend<Activation: Number>> PlacedMaster<B> {
    fn poisoned(device: &mut Device<'_, B>, elements: usize) -> Self {
        let remainder = Layout::range(remainder_elements::<B>(elements));
        Self {
            rounded: Placed::poisoned(device, Layout::range(elements)),
            remainder: Placed::poisoned(device, remainder),
        }
    }

    pub fn split(device: &mut Device<'_, B>, values: &[f32]) -> Self {
        let mut placed = Self::poisoned(device, values.len());
        let from = Placed::new(device, Layout::range(values.len()), values);
        let (backend, stream) = (device.backend, &mut device.stream);
        backend.split_master(stream, placed.master_mut(), from.slice()).unwrap();
        placed
    }

    fn master(&self) -> Master<'_, B> {
        Master::new(self.rounded.slice(), self.remainder.slice()).unwrap()
    }

    pub fn master_mut(&mut self) -> MasterMut<'_, B> {
        MasterMut::new(self.rounded.slice_mut(), self.remainder.slice_mut()).unwrap()
    }

    /// The copy that products read, and the remainder, as numbers.
    pub fn read(&self, device: &mut Device<'_, B>) -> [Vec<f32>; 2] {
        [self.rounded.read(device), self.remainder.read(device)]
    }

    pub fn joined(&self, device: &mut Device<'_, B>) -> Vec<f32> {
        let mut out = Placed::poisoned(device, Layout::range(self.master().elements()));
        let (backend, stream) = (device.backend, &mut device.stream);
        let runs = Run::all(self.master().elements());
        backend.join_master(stream, out.slice_mut(), self.master(), &runs).unwrap();
        out.read(device)
    }
}

/// The copy that products read of a master of `values`.
fn expected_halves<B: Backend>(values: &[f32]) -> [Vec<f32>; 2] {
    if B::Activation::REMAINDERS == 0 {
        return [values.to_vec(), Vec::new()];
    }
    let halves = values.iter().map(|&value| split(value));
    let upper = |rounded| f32::from_bits(u32::from(rounded) << 16);
    halves.map(|(rounded, remainder)| (upper(rounded), f32::from(remainder))).unzip().into()
}

#[track_caller]
fn assert_same_halves(label: &str, found: &[Vec<f32>; 2], expected: &[Vec<f32>; 2]) {
    for (what, (found, expected)) in
        ["rounded", "remainder"].into_iter().zip(found.iter().zip(expected))
    {
        assert_same_bits(&format!("{label}, {what}"), found, expected);
    }
}

/// Numbers of every kind: both signs of upper halves from zero to NaN, with the lower halves around which rounding changes.
/// The first are the NaN of NVIDIA's arithmetic and the finite numbers whose copy is infinite.
fn every_kind(elements: usize) -> Vec<f32> {
    let uppers = [0x7fff, 0x7f7f, 0xff7f, 0x8000, 0, 1, 0x007f, 0x3f80, 0x3f81, 0xbf7f, 0x7f80];
    let uppers = uppers.into_iter().chain([0xff80, 0x7fc0, 0xffff, 0x4048, 0x8001]);
    let lowers = [0xffff, 0x8000, 0, 0x8001, 0x7fff, 1];
    let kinds: Vec<u32> =
        uppers.flat_map(|upper: u32| lowers.map(|lower: u32| upper << 16 | lower)).collect();
    let mut inputs = Inputs::new(elements as u64);
    // After all kinds, any bits.
    let bits = kinds.into_iter().chain(std::iter::repeat_with(|| inputs.pick(1 << 32) as u32));
    bits.map(f32::from_bits).take(elements).collect()
}

/// Splitting agrees with the definition, and joining restores the master, for any alignment.
pub fn splitting_agrees<B: Backend<Activation: Number>>(arm: &Arm<B>) -> Transcript {
    let mut device = Device::new(arm);
    let mut transcript = Transcript::default();
    for elements in SIZES {
        for margin in STARTS {
            device.margin = margin;
            let label = format!("{elements} masters after {margin}");
            let values = every_kind(elements);
            let placed = PlacedMaster::split(&mut device, &values);
            let found = placed.read(&mut device);
            assert_same_halves(&label, &found, &expected_halves::<B>(&values));
            let joined = placed.joined(&mut device);
            for (i, (joined, value)) in joined.iter().zip(&values).enumerate() {
                let same = joined.to_bits() == value.to_bits();
                let [joined_bits, bits] = [joined, value].map(|x| x.to_bits());
                assert!(
                    same || value.is_nan() && joined.is_nan(),
                    "{label}[{i}]: found {joined_bits:#010x}, expected {bits:#010x}"
                );
            }
            transcript.record(&label, &joined);
            for half in &found {
                transcript.record(&label, half);
            }
        }
    }
    transcript
}

/// Any two halves are joined as the definition says, also halves that no master is split into.
pub fn joining_agrees<B: Backend<Activation: Number>>(arm: &Arm<B>) -> Transcript {
    let mut device = Device::new(arm);
    let mut transcript = Transcript::default();
    for elements in SIZES {
        for margin in STARTS {
            device.margin = margin;
            let label = format!("{elements} pairs of halves after {margin}");
            let mut inputs = Inputs::new(elements as u64);
            let any_half = |_| inputs.pick(1 << 16) as u16;
            let remainders: Vec<u16> = (0..elements).map(any_half).collect();
            let rounded = Inputs::new(7).uniform_of::<B::Activation>(elements, -4.0, 4.0);
            let expected: Vec<f32> = if B::Activation::REMAINDERS == 0 {
                rounded.clone()
            } else {
                let upper = |x: &f32| (x.to_bits() >> 16) as u16;
                let halves = rounded.iter().map(upper).zip(&remainders);
                halves.map(|(rounded, &remainder)| join(rounded, remainder)).collect()
            };
            let kept = remainder_elements::<B>(elements);
            let remainders: Vec<f32> = remainders[..kept].iter().map(|&x| f32::from(x)).collect();
            let placed = PlacedMaster {
                rounded: Placed::new(&mut device, Layout::range(elements), &rounded),
                remainder: Placed::new(&mut device, Layout::range(kept), &remainders),
            };
            let joined = placed.joined(&mut device);
            assert_same_bits(&label, &joined, &expected);
            transcript.record(&label, &joined);
        }
    }
    transcript
}

/// Masters and moments have the bits that AdamW gives fp32 parameters, in any chunk; the copy is the rounded master.
pub fn adamw_agrees<B: Backend<Activation: Number>>(arm: &Arm<B>) -> Transcript {
    let mut device = Device::new(arm);
    let mut transcript = Transcript::default();
    // Elements, the margin of the moments and the margin of the master: either may be less aligned.
    let [aligned, unaligned, of_floats] = STARTS;
    let few = vec![
        [1, unaligned, unaligned],
        [3, aligned, aligned],
        [17, unaligned, aligned],
        [1000, aligned, unaligned],
        [2050, aligned, aligned],
        [5003, aligned, of_floats],
    ];
    let many = [few.as_slice(), &[[150_001, aligned, aligned]]].concat();
    for [elements, margin, master_margin] in device.sizes.choose(many, few) {
        device.margin = master_margin;
        let mut inputs = Inputs::new(elements as u64);
        let parameters = inputs.uniform(elements, -1.0, 1.0);
        let mut master = PlacedMaster::split(&mut device, &parameters);
        device.margin = margin;
        let mut whole = PlacedState::new(&mut device, &parameters);
        let mut expected = AdamWState {
            parameters: wide(&parameters),
            exp_avg: vec![0.0; elements],
            exp_avg_sq: vec![0.0; elements],
        };
        let zeros = vec![0.0; elements];
        let mut moments =
            [(); 2].map(|()| Placed::new(&mut device, Layout::range(elements), &zeros));
        for (number, magnitude) in [(1, 1.0), (2, 10.0), (3, 1e-9), (4, 0.0), (1000, 0.1)] {
            let label = format!("adamw_master {elements} elements, step {number}");
            let gradient = inputs.uniform(elements, -magnitude, magnitude);
            whole.update(&mut device, &gradient, step(number));
            adamw(&mut expected, &wide(&gradient), step(number));
            let gradient = Placed::new(&mut device, Layout::range(elements), &gradient);
            // Two chunks; the second begins at any element.
            for (start, elements) in [(0, elements / 3), (elements / 3, elements - elements / 3)] {
                let moments = moments
                    .each_mut()
                    .map(|moment| moment.slice_mut().sub(start, elements).unwrap());
                let result = device.backend.adamw_master(
                    &mut device.stream,
                    master.master_mut().sub(start, elements).unwrap(),
                    moments,
                    gradient.slice().sub(start, elements).unwrap(),
                    step(number),
                );
                result.expect(&label);
            }
            let joined = master.joined(&mut device);
            let [exp_avg, exp_avg_sq] = [0, 1].map(|i| moments[i].read(&mut device));
            let [whole, whole_avg, whole_avg_sq] = whole.read(&mut device);
            assert_close(&label, &joined, &expected.parameters, tolerance::<f32>(1));
            assert_same_bits(&format!("{label}, joined"), &joined, &whole);
            assert_same_bits(&format!("{label}, exp_avg"), &exp_avg, &whole_avg);
            assert_same_bits(&format!("{label}, exp_avg_sq"), &exp_avg_sq, &whole_avg_sq);
            let halves = master.read(&mut device);
            assert_same_halves(&label, &halves, &expected_halves::<B>(&whole));
            transcript.record(&label, &joined);
        }
    }
    transcript
}

/// A NaN in the gradient shows in the copy that products read.
pub fn failures_reach_the_copy<B: Backend<Activation: Number>>(arm: &Arm<B>) {
    let mut device = Device::new(arm);
    let mut master = PlacedMaster::split(&mut device, &[1.0; 9]);
    let layout = Layout::range(9);
    let [mut exp_avg, mut exp_avg_sq] =
        [(); 2].map(|()| Placed::new(&mut device, layout, &[0.0; 9]));
    let mut gradient = [0.5; 9];
    gradient[2] = f32::NAN;
    gradient[8] = f32::INFINITY;
    let gradient = Placed::new(&mut device, layout, &gradient);
    let (backend, stream) = (device.backend, &mut device.stream);
    let (exp_avg, exp_avg_sq) = (exp_avg.slice_mut(), exp_avg_sq.slice_mut());
    let parameters = master.master_mut();
    backend
        .adamw_master(stream, parameters, [exp_avg, exp_avg_sq], gradient.slice(), step(1))
        .unwrap();
    let [rounded, _] = master.read(&mut device);
    let joined = master.joined(&mut device);
    for (i, (rounded, joined)) in rounded.iter().zip(&joined).enumerate() {
        let expected = [2, 8].contains(&i);
        assert_eq!([rounded.is_nan(), joined.is_nan()], [expected; 2], "{i}: {rounded} {joined}");
    }
}

/// Runs are copied to their places, for any number, order and alignment of runs, and nothing else is written.
pub fn runs_are_joined_in_place<B: Backend<Activation: Number>>(arm: &Arm<B>) {
    let mut device = Device::new(arm);
    let values: Vec<f32> = (0..30_000).map(|i| 1.0 + i as f32 * 1.001).collect();
    let placed = PlacedMaster::split(&mut device, &values);
    let mut inputs = Inputs::new(7);
    for (count, alignment) in [(1, 8), (2, 1), (63, 8), (64, 1), (65, 8), (200, 1)] {
        let (mut runs, mut end) = (Vec::new(), 0);
        for index in 0..count {
            // One run needs several blocks, and some runs are empty.
            let elements = if index == 1 { 5_000 } else { inputs.pick(40) };
            let from = inputs.pick(20_000) / alignment * alignment;
            let to = (end + inputs.pick(9)).next_multiple_of(alignment);
            end = to + elements;
            runs.push(Run { from: from..from + elements, to });
        }
        let mut expected = vec![7.5; end + 3];
        for Run { from, to } in &runs {
            expected[*to..][..from.len()].copy_from_slice(&values[from.clone()]);
        }
        let mut out = device.upload(&vec![7.5_f32; end + 3]);
        let (backend, stream) = (device.backend, &mut device.stream);
        backend.join_master(stream, SliceMut::all(&mut out), placed.master(), &runs).unwrap();
        assert_same_bits(&format!("{count} runs"), &device.download(&out), &expected);
    }
}

/// Parts of masters are the parts of both halves; halves of different lengths and parts past the end are refused.
pub fn parts_name_their_elements<B: Backend<Activation: Number>>(arm: &Arm<B>) {
    let mut device = Device::new(arm);
    let values: Vec<f32> = (0..20).map(|i| 1.0 + i as f32 * 1.001).collect();
    let mut placed = PlacedMaster::split(&mut device, &values);
    let mut out = device.upload(&[0.0_f32; 3]);
    let (backend, stream) = (device.backend, &mut device.stream);
    let from = placed.master().sub(5, 9).unwrap().sub(2, 3).unwrap();
    assert_eq!([from.elements(), from.rounded().elements()], [3, 3]);
    assert_eq!(from.remainder().elements(), remainder_elements::<B>(3));
    backend.join_master(stream, SliceMut::all(&mut out), from, &Run::all(3)).unwrap();
    assert_same_bits("a part", &device.download(&out), &values[7..10]);

    let written = device.upload(&[-1.5_f32, 0.3, 1e-30]);
    let mut master = placed.master_mut();
    let part = master.reborrow().sub(17, 3).unwrap();
    backend.split_master(&mut device.stream, part, Slice::all(&written)).unwrap();
    let stream = &mut device.stream;
    let from = master.as_master().sub(17, 3).unwrap();
    backend.join_master(stream, SliceMut::all(&mut out), from, &Run::all(3)).unwrap();
    assert_eq!(master.elements(), 20);
    assert_same_bits("a written part", &device.download(&out), &[-1.5, 0.3, 1e-30]);
    assert_same_bits("the others", &placed.joined(&mut device)[..17], &values[..17]);

    for (start, elements) in [(0, 21), (20, 1), (usize::MAX, 1), (1, usize::MAX)] {
        let what = format!("{elements} masters from {start}");
        assert_shape_error(&what, placed.master().sub(start, elements).map(|_| ()));
        assert_shape_error(&what, placed.master_mut().sub(start, elements).map(|_| ()));
    }
    let mut rounded = device.backend.allocate::<B::Activation>(&mut device.stream, 8).unwrap();
    let mut remainder = device.backend.allocate::<u16>(&mut device.stream, 8).unwrap();
    for wrong in (0..=8).filter(|&elements| elements != remainder_elements::<B>(7)) {
        let what = format!("{wrong} remainders of 7 masters");
        let master = Master::<B>::new(slice(&rounded, 7), slice(&remainder, wrong));
        assert_shape_error(&what, master.map(|_| ()));
        let rounded = slice_mut(&mut rounded, 7);
        let master = MasterMut::<B>::new(rounded, slice_mut(&mut remainder, wrong));
        assert_shape_error(&what, master.map(|_| ()));
    }
}

/// Operands whose lengths differ from the master's.
pub fn refuses_shapes<B: Backend<Activation: Number>>(arm: &Arm<B>) {
    let (backend, mut bench) = (&arm.backend, Bench::new(arm));
    let mut remainder = bench.device.upload(&[0_u16; 4096]);
    for (wrong, [master, other]) in wrong_by_one([7, 7]) {
        let kept = remainder_elements::<B>(master);
        let rounded = slice_mut(&mut bench.activation_outs[0], master);
        let out = MasterMut::new(rounded, slice_mut(&mut remainder, kept)).unwrap();
        let stream = &mut bench.device.stream;
        let result = backend.split_master(stream, out, slice(&bench.zeros, other));
        assert_answer("split_master", wrong, result);
    }
    // Each call joins 8 masters to 9 elements; the first run is wrong, the second is right.
    let elements = 8;
    for (from, to) in [(0..9, 0), (8..9, 0), (usize::MAX..usize::MAX, 0), (0..3, 4), (0..0, 7)] {
        let rounded = slice(&bench.activations, elements);
        let kept = remainder_elements::<B>(elements);
        let from_masters = Master::new(rounded, slice(&remainder, kept)).unwrap();
        let runs = [Run { from: from.clone(), to }, Run { from: 0..3, to: 6 }];
        let out = slice_mut(&mut bench.outs[0], 9);
        let result = backend.join_master(&mut bench.device.stream, out, from_masters, &runs);
        assert_shape_error(&format!("{from:?} to {to}"), result);
    }
    for (wrong, [master, exp_avg, exp_avg_sq, gradient]) in wrong_by_one([7, 7, 7, 7]) {
        let kept = remainder_elements::<B>(master);
        let rounded = slice_mut(&mut bench.activation_outs[0], master);
        let parameters = MasterMut::new(rounded, slice_mut(&mut remainder, kept)).unwrap();
        let [exp_avg_out, exp_avg_sq_out, ..] = &mut bench.outs;
        let result = backend.adamw_master(
            &mut bench.device.stream,
            parameters,
            [slice_mut(exp_avg_out, exp_avg), slice_mut(exp_avg_sq_out, exp_avg_sq)],
            slice(&bench.zeros, gradient),
            step(1),
        );
        assert_answer("adamw_master", wrong, result);
    }
    bench.finish();
}
