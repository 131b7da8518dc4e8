//! The values that blocks and others read equal the masters.

use tidemill_kernels::backend::ActivationElement;
use tidemill_kernels::reference::master::split;
use tidemill_kernels::{Backend, MasterMut, Slice, SliceMut};
use tidemill_model::{
    Decay, Device, Held, JoinRoom, Layout, MasterPlace, Parameters, Reading, Result,
};

use super::arm::Arm;

/// A table that is looked up and multiplied, a matrix, and vectors between them.
fn layout() -> Layout {
    let mut layout = Layout::new();
    let table = layout.segment("table");
    layout.tensor("table", &[5, 3], Decay::Decayed, 8);
    let body = layout.segment("body");
    for (name, elements, reading) in [
        ("norm", 5, Reading::Fp32),
        ("matrix", 77, Reading::Activation),
        ("bias", 19, Reading::Fp32),
    ] {
        let tensor = layout.tensor(name, &[elements], Decay::Exempt, 1);
        layout.set_reading(tensor, reading);
    }
    layout.block("first", &[table]);
    layout.block("body", &[body]);
    layout
}

/// Numbers of all magnitudes, some of them halfway between two of bf16.
fn arena(elements: usize, seed: u32) -> Vec<f32> {
    let bits = |index: usize| {
        let mixed = (index as u32 + 7 * seed).wrapping_mul(0x9e37_79b9);
        let bits = 0x3000_0000 + (mixed >> 5);
        if index.is_multiple_of(3) { (bits & 0xffff_0000) | 0x8000 } else { bits }
    };
    (0..elements).map(|index| f32::from_bits(bits(index))).collect()
}

/// The value that products read for `value`.
fn rounded<B: Backend>(value: f32) -> f32 {
    match B::Activation::REMAINDERS {
        0 => value,
        _ => f32::from_bits(u32::from(split(value).0) << 16),
    }
}

/// Replaces the masters at `place`.
fn replace<B: Backend>(
    device: &mut Device<'_, B>,
    parameters: &mut Parameters<B>,
    place: &MasterPlace,
    values: &[f32],
) {
    let Device { backend, stream } = device;
    let mut from = backend.allocate::<f32>(stream, values.len()).unwrap();
    backend.write(stream, SliceMut::all(&mut from), values).unwrap();
    let change = |device: &mut Device<'_, B>, masters: MasterMut<'_, B>| -> Result<()> {
        Ok(device.backend.split_master(device.stream, masters, Slice::all(&from))?)
    };
    parameters.update(device, place, change).unwrap();
}

/// Compares all values that can be read with `arena`.
fn check<B: Backend>(
    device: &mut Device<'_, B>,
    layout: &Layout,
    parameters: &Parameters<B>,
    arena: &[f32],
) {
    let all = parameters.rounded(0..arena.len()).unwrap();
    let found = device.backend.to_vec(device.stream, all).unwrap();
    for (index, (found, &value)) in found.into_iter().zip(arena).enumerate() {
        assert_eq!(found.widened().to_bits(), rounded::<B>(value).to_bits(), "element {index}");
    }
    for (index, segment) in layout.segments().iter().enumerate() {
        let lease = parameters.lease(layout, index).unwrap();
        for tensor in &layout.tensors()[segment.tensors.clone()] {
            let start = tensor.offset - segment.range.start;
            let place = start..start + tensor.stored_elements;
            lease.weight(&place, 1, place.len()).unwrap();
            if tensor.reading.is_fp32() {
                let found = lease.vector(&place).unwrap();
                let found = device.backend.to_vec(device.stream, found).unwrap();
                assert_eq!(found, arena[tensor.stored_range()], "{}", tensor.name);
            }
        }
    }
}

pub fn hold_what_they_were_given<B: Backend>(arm: &Arm<B>) {
    let (layout, backend) = (layout(), &arm.backend);
    let mut stream = backend.device_stream().unwrap();
    let device = &mut Device { backend, stream: &mut stream };
    let mut arena = arena(layout.parameter_elements(), 1);
    let elements = arena.len();
    let read_alone = Parameters::from_host(device, &layout, &arena).unwrap();
    check(device, &layout, &read_alone, &arena);

    // Two parts, which begin and end inside tensors, in another order than that of the arena.
    let place = |start: usize, end: usize, first| MasterPlace { range: start..end, start: first };
    let owned = [place(10, 30, 40), place(50, 90, 0)];
    let whole = Held::whole::<B>(&layout);
    let mut parameters =
        Parameters::with_masters(device, &layout, whole.clone(), &arena, &owned).unwrap();
    check(device, &layout, &parameters, &arena);
    let mut room = JoinRoom::default();
    let mut read = |device: &mut Device<'_, B>, parameters: &Parameters<B>, place: &MasterPlace| {
        let elements = place.range.len();
        let mut values = vec![f32::NAN; elements];
        parameters.read(device, place, &mut values, &mut room).unwrap();
        let mut pinned = device.backend.pinned::<f32>(elements + 3).unwrap();
        parameters.read_async(device, place, (&mut pinned, 3), &mut room).unwrap();
        assert_eq!(device.backend.pinned_values(&pinned).unwrap()[3..], values);
        values
    };
    for place in &owned {
        assert_eq!(read(device, &parameters, place), arena[place.range.clone()]);
    }
    let inner = place(60, 80, 10);
    let values = self::arena(20, 9);
    replace(device, &mut parameters, &inner, &values);
    arena[60..80].copy_from_slice(&values);
    check(device, &layout, &parameters, &arena);
    assert_eq!(read(device, &parameters, &owned[1]), arena[50..90]);

    let end = whole.vector_elements();
    assert_eq!(end > 0, B::Activation::REMAINDERS > 0);
    assert!(
        parameters.vectors(0..end + 1).is_err() && parameters.rounded(0..elements + 1).is_err()
    );
    assert!(Parameters::with_masters(device, &layout, whole, &arena[1..], &owned).is_err());

    // A part of the parameters: owned ones, and ones that another worker owns.
    let of_others = [0..10, 100..120];
    let parts = owned.iter().map(|place| place.range.clone()).chain(of_others.clone());
    let some = Held::parts::<B>(&layout, parts);
    let not_held = [place(30, 31, 0)];
    let error = Parameters::with_masters(device, &layout, some.clone(), &arena, &not_held).err();
    assert!(error.expect("not held").to_string().contains("side by side"));
    let mut some = Parameters::with_masters(device, &layout, some, &arena, &owned).unwrap();
    let inner = place(60, 80, 10);
    let values = self::arena(20, 5);
    replace(device, &mut some, &inner, &values);
    arena[60..80].copy_from_slice(&values);
    for place in &owned {
        assert_eq!(read(device, &some, place), arena[place.range.clone()]);
    }
    let held: Vec<_> = some.held().within(&(0..elements)).collect();
    assert_eq!(held.iter().map(ExactSizeIterator::len).sum::<usize>(), 90, "{held:?}");
    for range in held {
        let at = some.held().place(&range).unwrap();
        let found = device.backend.to_vec(device.stream, some.rounded(at).unwrap()).unwrap();
        for (found, &value) in found.into_iter().zip(&arena[range.clone()]) {
            assert_eq!(found.widened().to_bits(), rounded::<B>(value).to_bits(), "{range:?}");
        }
        for tensor in layout.tensors().iter().filter(|tensor| tensor.reading.is_fp32()) {
            let stored = tensor.stored_range();
            let inside = stored.start.max(range.start)..stored.end.min(range.end);
            let Some(at) = some.held().fp32_place(&inside).filter(|_| !inside.is_empty()) else {
                continue;
            };
            let found = device.backend.to_vec(device.stream, some.in_fp32(at).unwrap()).unwrap();
            assert_eq!(found, arena[inside], "{}", tensor.name);
        }
    }
    assert!(some.rounded(0..91).is_err() && some.lease(&layout, 1).is_err());
}
