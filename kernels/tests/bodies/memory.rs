//! Buffers, copies and events.

use tidemill_kernels::{Backend, Element, Slice, SliceMut};

use super::arm::Arm;
use super::device::{Device, assert_shape_error};
use super::number::Number;

fn moves<B: Backend, T: Element + PartialEq + std::fmt::Debug>(
    device: &mut Device<'_, B>,
    values: [T; 5],
    zero: T,
) {
    let backend = device.backend;
    let mut buffer = backend.allocate::<T>(&mut device.stream, 9).unwrap();
    assert_eq!(B::elements(&buffer), 9);
    assert_eq!(device.download(&buffer), [zero; 9], "a new buffer of {}", T::NAME);
    let inside = SliceMut::new(&mut buffer, 3, 5).unwrap();
    backend.write(&mut device.stream, inside, &values).unwrap();
    let mut read = [zero; 3];
    let part = Slice::new(&buffer, 4, 3).unwrap();
    backend.read(&mut device.stream, &mut read, part).unwrap();
    assert_eq!(read, values[1..4]);

    let mut copy = device.upload(&values);
    let out = SliceMut::new(&mut copy, 1, 2).unwrap();
    let from = Slice::new(&buffer, 6, 2).unwrap();
    backend.copy(&mut device.stream, out, from).unwrap();
    let [first, _, _, fourth, fifth] = values;
    assert_eq!(device.download(&copy), [first, fourth, fifth, fourth, fifth]);
    let out = SliceMut::new(&mut copy, 3, 1).unwrap();
    backend.fill_zero(&mut device.stream, out).unwrap();
    assert_eq!(device.download(&copy), [first, fourth, fifth, zero, fifth]);

    let out = SliceMut::new(&mut copy, 0, 2).unwrap();
    let too_many = backend.write(&mut device.stream, out, &values[..3]);
    assert_shape_error("write", too_many);
    let from = Slice::new(&copy, 0, 2).unwrap();
    assert_shape_error("read", backend.read(&mut device.stream, &mut read, from));
    let out = SliceMut::new(&mut copy, 0, 2).unwrap();
    let from = Slice::new(&buffer, 0, 3).unwrap();
    assert_shape_error("copy", backend.copy(&mut device.stream, out, from));
    let unchanged = [first, fourth, fifth, zero, fifth];
    assert_eq!(device.download(&copy), unchanged, "refused calls write nothing");
}

/// Buffers begin as zeros, and bytes move only where they are told to.
pub fn buffers_hold_what_is_written<B: Backend>(arm: &Arm<B>) {
    let backend = &arm.backend;
    let mut device = Device::new(arm);
    moves(&mut device, [1.5_f32, -2.0, 1e-40, f32::MAX, -0.5], 0.0);
    moves(&mut device, [1.5_f64, -2.0, 1e-310, f64::MAX, -0.5], 0.0);
    moves(&mut device, [1_u32, 2, u32::MAX, 4, 5], 0);
    let halves = [1.5, -2.0, 1e-40, 3e38, -0.5].map(half::bf16::from_f32);
    moves(&mut device, halves, half::bf16::ZERO);
    let empty = backend.allocate::<f32>(&mut device.stream, 0).unwrap();
    assert_eq!(B::elements(&empty), 0);
}

/// An event is complete once waited for, and its device stream's work is then done.
pub fn events_complete<B: Backend>(arm: &Arm<B>) {
    let backend = &arm.backend;
    let mut device = Device::new(arm);
    let buffer = device.upload(&[1.0_f32; 1000]);
    let event = backend.record(&mut device.stream).unwrap();
    backend.wait(&event).unwrap();
    assert!(backend.is_complete(&event).unwrap());
    assert_eq!(device.download(&buffer), [1.0; 1000]);
    // Device streams do not wait for each other, and a second one works like the first.
    let mut second = Device::new(arm);
    let event = backend.record(&mut second.stream).unwrap();
    backend.wait(&event).unwrap();
    assert!(backend.is_complete(&event).unwrap());
}

/// Compute weights hold the masters that were refreshed, each at its own element.
pub fn compute_weights_follow_their_masters<B: Backend<Activation: Number>>(arm: &Arm<B>) {
    let backend = &arm.backend;
    let mut device = Device::new(arm);
    // Numbers with more digits than a bf16 has: the copies are the masters rounded.
    let before: Vec<f32> = (0..40).map(|i| (i as f32 - 3.5) * 1.001).collect();
    let rounded = |values: &[f32]| -> Vec<B::Activation> {
        values.iter().map(|&value| B::Activation::rounded(value)).collect()
    };
    let mut master = device.upload(&before);
    let mut weights = backend.compute_weights(&mut device.stream, 40).unwrap();
    for (start, elements) in [(0, 17), (17, 23)] {
        let stream = &mut device.stream;
        backend.refresh_compute_weights(stream, &mut weights, &master, start, elements).unwrap();
    }
    let found = device.download(B::compute_buffer(&master, &weights));
    assert!(found == rounded(&before), "{found:?}");
    let changed = SliceMut::new(&mut master, 5, 2).unwrap();
    backend.write(&mut device.stream, changed, &[100.0, 200.0]).unwrap();
    backend.refresh_compute_weights(&mut device.stream, &mut weights, &master, 5, 2).unwrap();
    let mut after = before;
    after[5..7].copy_from_slice(&[100.0, 200.0]);
    let found = device.download(B::compute_buffer(&master, &weights));
    assert!(found == rounded(&after), "{found:?}");
}
