//! Memory of one device for the kernels of another.

use super::context;
use super::table::{Device, PoolAccess, Table};
use crate::backend::PeerAccess;
use crate::error::Result;

/// The name of all devices together in errors.
pub const ALL: &str = "GPUs";

/// How many of the first `devices` devices work together: from the first on, as long as they are of its kind and all of them reach
/// each other's memory.
pub(super) fn together<K: PartialEq>(
    table: &Table,
    devices: usize,
    kind: impl Fn(&Table, Device) -> Result<K>,
) -> Result<usize> {
    let device = |ordinal| table.on(ALL, "asking for a device", context::device(table, ordinal));
    let first = kind(table, device(0)?)?;
    for ordinal in 1..devices {
        let next = device(ordinal)?;
        if kind(table, next)? != first {
            return Ok(ordinal);
        }
        for before in 0..ordinal {
            let other = device(before)?;
            let reaches = |device, peer| can_access(table, ALL, device, peer);
            if !(reaches(next, other)? && reaches(other, next)?) {
                return Ok(ordinal);
            }
        }
    }
    Ok(devices)
}

fn can_access(table: &Table, name: &str, device: Device, peer: Device) -> Result<bool> {
    let mut can = 0;
    // SAFETY: it writes one number; both devices are the interface's.
    let asked = unsafe { (table.can_access_peer)(&raw mut can, device, peer) };
    table.on(name, "asking for access to a peer", asked.result())?;
    Ok(can != 0)
}

/// Lets kernels of `device` read and write what comes from the pool of `peer`; `name` is the device's.
pub(super) fn reach(table: &Table, name: &str, device: Device, peer: Device) -> Result<PeerAccess> {
    if device == peer {
        return Ok(PeerAccess::Direct);
    }
    if !can_access(table, name, device, peer)? {
        return Ok(PeerAccess::Absent);
    }
    let access = PoolAccess::of(device);
    let mut pool = std::ptr::null_mut();
    // SAFETY: the peer is open, the first call writes one handle, and the description is one whole struct.
    let allowed = unsafe {
        let found = (table.default_pool)(&raw mut pool, peer).result();
        found.and_then(|()| (table.pool_set_access)(pool, &raw const access, 1).result())
    };
    table.on(name, "reaching the memory of a peer", allowed).map(|()| PeerAccess::Direct)
}
