//! Buffers, copies and events.

use tidemill_kernels::{Backend, Element, KernelError, PeerAccess, Slice, SliceMut};

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

/// Buffers begin as zeros, and bytes are written only to their target.
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

/// An event is complete after a wait for it, and the earlier work of its device stream is then done.
pub fn events_complete<B: Backend>(arm: &Arm<B>) {
    let backend = &arm.backend;
    let mut device = Device::new(arm);
    let buffer = device.upload(&[1.0_f32; 1000]);
    let event = backend.record(&mut device.stream).unwrap();
    backend.wait(&event).unwrap();
    assert!(backend.is_complete(&event).unwrap());
    assert_eq!(device.download(&buffer), [1.0; 1000]);
    // Device streams do not wait for each other, and a second stream works like the first.
    let mut second = Device::new(arm);
    let event = backend.record(&mut second.stream).unwrap();
    backend.wait(&event).unwrap();
    assert!(backend.is_complete(&event).unwrap());
    // Only an event that was recorded with timing has a time, even if the driver's event was used
    // before for another point.
    for _ in 0..3 {
        let from = backend.record_timed(&mut device.stream).unwrap();
        let untimed = backend.record(&mut device.stream).unwrap();
        let to = backend.record_timed(&mut device.stream).unwrap();
        backend.wait(&to).unwrap();
        assert!(backend.elapsed_milliseconds(&from, &to).unwrap() >= 0.0);
        for (from, to) in [(&from, &untimed), (&untimed, &to)] {
            let refused = backend.elapsed_milliseconds(from, to);
            assert!(matches!(refused, Err(KernelError::Device { attempted: "timing", .. })));
        }
    }
}

/// Copies to and from pinned memory keep the order of their stream, and the host sees the copied bytes.
pub fn pinned_memory_holds_what_is_copied<B: Backend>(arm: &Arm<B>) {
    const ELEMENTS: usize = 1000;
    let backend = &arm.backend;
    let mut device = Device::new(arm);
    let mut pinned = backend.pinned::<f32>(ELEMENTS).unwrap();
    assert_eq!(backend.pinned_values(&pinned).unwrap(), [0.0; ELEMENTS]);
    let values: Vec<f32> = (0..ELEMENTS).map(|i| i as f32 - 0.5).collect();
    backend.pinned_values_mut(&mut pinned).unwrap().copy_from_slice(&values);
    let mut buffer = device.upload(&[0.0_f32; ELEMENTS]);
    let stream = &mut device.stream;
    let all = SliceMut::all(&mut buffer);
    backend.write_async(stream, all, &pinned, 0).unwrap();
    // To the device and back, shifted by one element.
    let most = Slice::new(&buffer, 0, ELEMENTS - 1).unwrap();
    backend.read_async(stream, &mut pinned, 1, most).unwrap();
    let found = backend.pinned_values(&pinned).unwrap();
    assert_eq!((found[0], &found[1..]), (values[0], &values[..ELEMENTS - 1]));
    // A write by the host does not affect a copy that was enqueued before.
    backend.write_async(stream, SliceMut::all(&mut buffer), &pinned, 0).unwrap();
    backend.pinned_values_mut(&mut pinned).unwrap().fill(-1.0);
    assert_eq!(device.download(&buffer)[1..], values[..ELEMENTS - 1]);

    let stream = &mut device.stream;
    let two = Slice::new(&buffer, 0, 2).unwrap();
    assert_shape_error("read", backend.read_async(stream, &mut pinned, ELEMENTS - 1, two));
    assert_shape_error("read", backend.read_async(stream, &mut pinned, usize::MAX, two));
    let two = SliceMut::new(&mut buffer, 0, 2).unwrap();
    assert_shape_error("write", backend.write_async(stream, two, &pinned, ELEMENTS - 1));
    let none = Slice::new(&buffer, 0, 0).unwrap();
    backend.read_async(stream, &mut pinned, ELEMENTS, none).unwrap();
    assert_eq!(backend.pinned_values(&pinned).unwrap(), [-1.0; ELEMENTS]);
    // More copies than the test waits for.
    for _ in 0..100 {
        backend.write_async(stream, SliceMut::all(&mut buffer), &pinned, 0).unwrap();
    }
    drop(pinned);
    assert_eq!(device.download(&buffer), [-1.0; ELEMENTS]);
}

/// The sum, on one stream, of values that another stream writes repeatedly, and the expected sum.
/// `backends` are the devices of the two streams; the second reads the memory of the first. `holds` must make the first wait for
/// the second's event before it writes again.
pub fn handed_on<B: Backend>(
    backends: [&B; 2],
    holds: impl Fn(&mut B::DeviceStream, &B::Event),
) -> [Vec<f32>; 2] {
    const ROUNDS: usize = 20;
    const ELEMENTS: usize = 700;
    let [writing, adding] = backends;
    assert_eq!(adding.reach(writing).unwrap(), PeerAccess::Direct);
    let mut streams = backends.map(|backend| backend.device_stream().unwrap());
    let [writer, adder] = &mut streams;
    let mut source = writing.pinned::<f32>(ROUNDS * ELEMENTS).unwrap();
    let values = writing.pinned_values_mut(&mut source).unwrap();
    values.iter_mut().enumerate().for_each(|(i, value)| *value = (i % 509) as f32);
    let mut expected = vec![0.0; ELEMENTS];
    for round in values.chunks(ELEMENTS) {
        expected.iter_mut().zip(round).for_each(|(sum, value)| *sum += value);
    }
    let mut handed = writing.allocate::<f32>(writer, ELEMENTS).unwrap();
    let mut sum = adding.allocate::<f32>(adder, ELEMENTS).unwrap();
    for round in 0..ROUNDS {
        let to = SliceMut::all(&mut handed);
        writing.write_async(writer, to, &source, round * ELEMENTS).unwrap();
        let written = writing.record(writer).unwrap();
        adding.wait_for(adder, &written).unwrap();
        adding.accumulate(adder, SliceMut::all(&mut sum), Slice::all(&handed)).unwrap();
        let added = adding.record(adder).unwrap();
        holds(writer, &added);
    }
    let mut found = vec![0.0; ELEMENTS];
    adding.read(adder, &mut found, Slice::all(&sum)).unwrap();
    // The memory must still exist for the pending work of the writer.
    writing.wait(&writing.record(writer).unwrap()).unwrap();
    [found, expected]
}

/// A stream waits for the events of another without the host.
pub fn streams_wait_for_each_other<B: Backend>(arm: &Arm<B>) {
    let holds = |stream: &mut _, event: &_| arm.backend.wait_for(stream, event).unwrap();
    let [found, expected] = handed_on([&arm.backend; 2], holds);
    assert_eq!(found, expected);
}

/// Rounded copies hold the rounded masters, each at its own element.
pub fn rounded_copies_follow_their_masters<B: Backend<Activation: Number>>(arm: &Arm<B>) {
    let backend = &arm.backend;
    let mut device = Device::new(arm);
    // Numbers with more digits than a bf16, so that the copies are rounded.
    let before: Vec<f32> = (0..40).map(|i| (i as f32 - 3.5) * 1.001).collect();
    let rounded = |values: &[f32]| -> Vec<B::Activation> {
        values.iter().map(|&value| B::Activation::rounded(value)).collect()
    };
    let mut master = device.upload(&before);
    let mut weights = backend.rounded_copy(&mut device.stream, 40).unwrap();
    for (start, elements) in [(0, 17), (17, 23)] {
        let stream = &mut device.stream;
        backend.round_to_activation(stream, &mut weights, &master, start, elements).unwrap();
    }
    let found = device.download(B::compute_buffer(&master, &weights));
    assert!(found == rounded(&before), "{found:?}");
    let changed = SliceMut::new(&mut master, 5, 2).unwrap();
    backend.write(&mut device.stream, changed, &[100.0, 200.0]).unwrap();
    backend.round_to_activation(&mut device.stream, &mut weights, &master, 5, 2).unwrap();
    let mut after = before;
    after[5..7].copy_from_slice(&[100.0, 200.0]);
    let found = device.download(B::compute_buffer(&master, &weights));
    assert!(found == rounded(&after), "{found:?}");
}
