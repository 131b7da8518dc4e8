//! Memory of one device for the kernels of another.

use cudarc::driver::sys::{CUmemAccess_flags, CUmemLocationType};
use cudarc::driver::{result, sys};

use super::failure::on;
use crate::backend::PeerAccess;
use crate::error::Result;

/// How many of the first `devices` devices work together: from the first on, as long as they are like it and all of them reach
/// each other's memory.
pub(super) fn together(devices: usize) -> Result<usize> {
    const NAME: &str = "GPUs";
    let device =
        |ordinal: usize| on(NAME, "asking for a device", result::device::get(ordinal as i32));
    let kind = |device| {
        use sys::CUdevice_attribute as Attribute;
        let of = |attribute| {
            // SAFETY: the device is one of the driver's.
            let found = unsafe { result::device::get_attribute(device, attribute) };
            on(NAME, "asking for an attribute", found)
        };
        Ok([
            of(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            of(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            of(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        ])
    };
    let first = kind(device(0)?)?;
    for ordinal in 1..devices {
        let next = device(ordinal)?;
        if kind(next)? != first {
            return Ok(ordinal);
        }
        for before in 0..ordinal {
            let other = device(before)?;
            if !(can_access(NAME, next, other)? && can_access(NAME, other, next)?) {
                return Ok(ordinal);
            }
        }
    }
    Ok(devices)
}

fn can_access(name: &str, device: sys::CUdevice, peer: sys::CUdevice) -> Result<bool> {
    let mut can = 0;
    // SAFETY: it writes one number; both devices are the driver's.
    let asked = unsafe { sys::cuDeviceCanAccessPeer(&raw mut can, device, peer) }.result();
    on(name, "asking for access to a peer", asked)?;
    Ok(can != 0)
}

/// Lets kernels of `device` read and write what comes from the pool of `peer`; `name` is the device's.
pub(super) fn reach(name: &str, device: sys::CUdevice, peer: sys::CUdevice) -> Result<PeerAccess> {
    if device == peer {
        return Ok(PeerAccess::Direct);
    }
    if !can_access(name, device, peer)? {
        return Ok(PeerAccess::Absent);
    }
    // SAFETY: zeros are a value of this plain struct.
    let mut access: sys::CUmemAccessDesc = unsafe { std::mem::zeroed() };
    access.location.type_ = CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
    access.location.id = device;
    access.flags = CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    // SAFETY: the peer is open, and the description is one whole struct.
    let allowed = unsafe {
        result::device::get_default_mem_pool(peer)
            .and_then(|pool| sys::cuMemPoolSetAccess(pool, &raw const access, 1).result())
    };
    on(name, "reaching the memory of a peer", allowed).map(|()| PeerAccess::Direct)
}
