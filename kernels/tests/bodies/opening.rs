//! Opening a device again does not disturb its users.

use tidemill_kernels::{Backend, Slice, SliceMut};

use crate::bodies::arm::Arm;
use crate::bodies::device::Device;
use crate::bodies::number::Number;

/// A recording holds what was enqueued, although another thread opens its device meanwhile.
pub fn spoils_no_recording<B: Backend<Activation: Number>>(arm: &Arm<B>, open: impl Fn() + Sync) {
    const ELEMENTS: usize = 1000;
    let mut device = Device::new(arm);
    let backend = device.backend;
    let gradient = device.upload(&[0.375_f32; ELEMENTS]);
    let mut lane = device.upload(&[1.0_f32; ELEMENTS]);
    let mut add = |stream: &mut B::DeviceStream| {
        backend.accumulate(stream, SliceMut::all(&mut lane), Slice::all(&gradient))
    };
    add(&mut device.stream).unwrap();
    let recorded = backend.record_graph(&mut device.stream, &mut |stream| {
        add(stream)?;
        std::thread::scope(|scope| scope.spawn(&open).join()).unwrap();
        add(stream)
    });
    backend.replay(&mut device.stream, &recorded.unwrap().unwrap()).unwrap();
    assert_eq!(device.download(&lane), [2.125; ELEMENTS]);
}
