//! Scaled sums.

use tidemill_kernels::Backend;
use tidemill_kernels::backend::{Values, ValuesMut};
use tidemill_kernels::reference::optimizer::axpby;

use super::agreement::{Transcript, assert_close_beside, assert_same_bits, tolerance};
use super::arm::Arm;
use super::device::{Device, Layout, MARGINS, Placed, assert_shape_error};
use super::inputs::{Inputs, wide};
use super::number::Number;

/// Elements in one of the types.
enum Either<B: Backend<Activation: Number>> {
    Fp32(Placed<B>),
    Activations(Placed<B, B::Activation>),
}

impl<B: Backend<Activation: Number>> Either<B> {
    fn new(
        device: &mut Device<'_, B>,
        is_fp32: bool,
        values: Option<&[f32]>,
        elements: usize,
    ) -> Self {
        let range = Layout::range(elements);
        match (is_fp32, values) {
            (true, Some(values)) => Self::Fp32(Placed::new(device, range, values)),
            (true, None) => Self::Fp32(Placed::poisoned(device, range)),
            (false, Some(values)) => Self::Activations(Placed::new(device, range, values)),
            (false, None) => Self::Activations(Placed::poisoned(device, range)),
        }
    }

    fn values(&self) -> Values<'_, B> {
        match self {
            Self::Fp32(placed) => Values::Fp32(placed.slice()),
            Self::Activations(placed) => Values::Activations(placed.slice()),
        }
    }

    fn values_mut(&mut self) -> ValuesMut<'_, B> {
        match self {
            Self::Fp32(placed) => ValuesMut::Fp32(placed.slice_mut()),
            Self::Activations(placed) => ValuesMut::Activations(placed.slice_mut()),
        }
    }

    fn read(&self, device: &mut Device<'_, B>) -> Vec<f32> {
        match self {
            Self::Fp32(placed) => placed.read(device),
            Self::Activations(placed) => placed.read(device),
        }
    }
}

/// Sums agree with the definition in every pair of types, and alignment changes no bit. With a factor of 0 the old values are not read.
pub fn agrees<B: Backend<Activation: Number>>(arm: &Arm<B>) -> Transcript {
    let mut device = Device::new(arm);
    let mut transcript = Transcript::default();
    for elements in device.sizes.choose(vec![1, 3, 17, 1000, 150_001], vec![1, 3, 17, 1000, 5003]) {
        let mut inputs = Inputs::new(elements as u64);
        let before = inputs.uniform_of::<B::Activation>(elements, -1.0, 1.0);
        let x = inputs.uniform_of::<B::Activation>(elements, -1.0, 1.0);
        for (keep, factor) in [(0.0, -0.3), (0.95, 0.05), (1.0, -2.0)] {
            for [out_is_fp32, x_is_fp32] in
                [[true, true], [true, false], [false, true], [false, false]]
            {
                let label = format!(
                    "axpby of {elements} elements, {keep} and {factor}, fp32: {out_is_fp32}, {x_is_fp32}"
                );
                let mut expected = match keep == 0.0 {
                    true => vec![0.0; elements],
                    false => wide(&before),
                };
                axpby(&mut expected, f64::from(keep), f64::from(factor), &wide(&x));
                let results = MARGINS.map(|margin| {
                    device.margin = margin;
                    let kept = (keep != 0.0).then_some(&*before);
                    let mut out = Either::new(&mut device, out_is_fp32, kept, elements);
                    let x = Either::new(&mut device, x_is_fp32, Some(&x), elements);
                    let (backend, stream) = (device.backend, &mut device.stream);
                    backend
                        .axpby(stream, out.values_mut(), keep, factor, x.values())
                        .expect(&label);
                    out.read(&mut device)
                });
                assert_same_bits(&label, &results[1], &results[0]);
                let allowed = match out_is_fp32 {
                    true => tolerance::<f32>(1),
                    false => tolerance::<B::Activation>(1),
                };
                assert_close_beside(&label, &results[0], &expected, allowed, 1.0);
                transcript.record(&label, &results[0]);
            }
        }
    }
    transcript
}

/// Operands of different lengths.
pub fn refuses_shapes<B: Backend<Activation: Number>>(arm: &Arm<B>) {
    let mut device = Device::new(arm);
    let mut out: Placed<B> = Placed::poisoned(&mut device, Layout::range(7));
    let x: Placed<B> = Placed::poisoned(&mut device, Layout::range(8));
    let (out, x) = (ValuesMut::Fp32(out.slice_mut()), Values::Fp32(x.slice()));
    let result = arm.backend.axpby(&mut device.stream, out, 1.0, 1.0, x);
    assert_shape_error("another length", result);
}
