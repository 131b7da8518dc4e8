//! Recorded kernels.

use tidemill_kernels::{Backend, Slice, SliceMut};

use super::arm::Arm;
use super::device::Device;
use super::number::Number;

const ELEMENTS: usize = 1000;

/// `lane += gradient`, enqueued once and replayed twice, gives what three calls give; recording runs nothing.
pub fn repeat_what_was_recorded<B: Backend<Activation: Number>>(arm: &Arm<B>) {
    let mut device = Device::new(arm);
    let backend = device.backend;
    let gradient = device.upload(&[0.375_f32; ELEMENTS]);
    let mut lane = device.upload(&[1.0_f32; ELEMENTS]);
    let add = |stream: &mut B::DeviceStream, lane: &mut B::Buffer<f32>| {
        backend.accumulate(stream, SliceMut::all(lane), Slice::all(&gradient))
    };
    add(&mut device.stream, &mut lane).unwrap();
    let recorded = backend.record_graph(&mut device.stream, &mut |stream| add(stream, &mut lane));
    let Some(graph) = recorded.unwrap() else {
        assert_eq!(
            device.download(&lane),
            [1.375; ELEMENTS],
            "a device without graphs enqueues nothing"
        );
        return;
    };
    assert_eq!(device.download(&lane), [1.375; ELEMENTS], "recording runs nothing");
    backend.replay(&mut device.stream, &graph).unwrap();
    backend.replay(&mut device.stream, &graph).unwrap();
    assert_eq!(device.download(&lane), [2.125; ELEMENTS]);
}

/// A graph that outlives a buffer touches nobody else's: memory that it names is not handed out again.
pub fn keep_what_was_dropped<B: Backend<Activation: Number>>(arm: &Arm<B>) {
    let mut device = Device::new(arm);
    let backend = device.backend;
    let gradient = device.upload(&[1.0_f32; ELEMENTS]);
    let mut lane = device.upload(&[0.0_f32; ELEMENTS]);
    let recorded = backend.record_graph(&mut device.stream, &mut |stream| {
        backend.accumulate(stream, SliceMut::all(&mut lane), Slice::all(&gradient))
    });
    let Some(graph) = recorded.unwrap() else { return };
    drop((lane, gradient));
    let others: Vec<_> = (0..8).map(|_| device.upload(&[3.0_f32; ELEMENTS])).collect();
    backend.replay(&mut device.stream, &graph).unwrap();
    for other in &others {
        assert_eq!(device.download(other), [3.0; ELEMENTS]);
    }
    drop(graph);
    // What was kept is given back with the graph.
    let again = device.upload(&[5.0_f32; ELEMENTS]);
    assert_eq!(device.download(&again), [5.0; ELEMENTS]);
}
