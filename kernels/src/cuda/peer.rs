//! Memory of one device for the kernels of another.

use cudarc::driver::sys::{CUmemAccess_flags, CUmemLocationType};
use cudarc::driver::{result, sys};

use super::failure::on;
use crate::backend::PeerAccess;
use crate::error::Result;

/// Lets kernels of `device` read and write what comes from the pool of `peer`; `name` is the device's.
pub(super) fn reach(name: &str, device: sys::CUdevice, peer: sys::CUdevice) -> Result<PeerAccess> {
    if device == peer {
        return Ok(PeerAccess::Direct);
    }
    let mut can = 0;
    // SAFETY: it writes one number; both devices are open.
    let asked = unsafe { sys::cuDeviceCanAccessPeer(&raw mut can, device, peer) }.result();
    on(name, "asking for access to a peer", asked)?;
    if can == 0 {
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
