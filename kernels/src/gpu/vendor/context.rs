//! An open device, and the threads that use it.

use std::ffi::c_int;
use std::sync::Arc;

use super::table::{Binding, Code, Device, RawContext, Table};
use crate::error::Result;

type Answered<T> = std::result::Result<T, Code>;

/// An open device.
pub struct Context {
    table: &'static Table,
    device: Device,
    /// The device's context, where threads are bound by one.
    raw: RawContext,
}

// SAFETY: the interface lets any thread use a context.
unsafe impl Send for Context {}
// SAFETY: as above; nothing changes it.
unsafe impl Sync for Context {}

/// The number of devices.
pub fn device_count(table: &Table) -> Answered<usize> {
    let mut count = 0;
    // SAFETY: the first call takes nothing, the second writes one number.
    unsafe {
        (table.init)(0).result()?;
        (table.device_count)(&raw mut count).result()?;
    }
    Ok(usize::try_from(count).unwrap_or(0))
}

/// Device `ordinal` of an interface that was started.
pub fn device(table: &Table, ordinal: usize) -> Answered<Device> {
    let mut device = 0;
    // SAFETY: it writes one number.
    unsafe { (table.device)(&raw mut device, ordinal as c_int) }.result().map(|()| device)
}

/// An attribute of a device, by the vendor's number.
pub fn attribute(table: &Table, device: Device, attribute: u32) -> Answered<c_int> {
    let mut value = 0;
    // SAFETY: it writes one number.
    unsafe { (table.device_attribute)(&raw mut value, attribute, device) }.result().map(|()| value)
}

impl Context {
    /// Opens device `ordinal`, and makes it this thread's own.
    pub fn open(table: &'static Table, ordinal: usize) -> Answered<Arc<Self>> {
        // SAFETY: it takes nothing.
        unsafe { (table.init)(0) }.result()?;
        let device = device(table, ordinal)?;
        let mut raw = std::ptr::null_mut();
        match table.binding {
            // SAFETY: it writes one handle.
            Binding::Context { retain, .. } => unsafe { retain(&raw mut raw, device) }.result()?,
            Binding::Number { .. } => {}
        }
        let context = Arc::new(Self { table, device, raw });
        context.bind()?;
        Ok(context)
    }

    pub fn table(&self) -> &'static Table {
        self.table
    }

    pub fn device(&self) -> Device {
        self.device
    }

    /// Makes the device this thread's own: what every call begins with.
    pub fn bind(&self) -> Answered<()> {
        match self.table.binding {
            Binding::Context { current, make_current, .. } => {
                let mut bound = std::ptr::null_mut();
                // SAFETY: the first writes one handle; the context is alive.
                unsafe {
                    current(&raw mut bound).result()?;
                    if bound == self.raw { Ok(()) } else { make_current(self.raw).result() }
                }
            }
            Binding::Number { current, make_current } => {
                let mut bound = -1;
                // SAFETY: the first writes one number; the device is the interface's.
                unsafe {
                    current(&raw mut bound).result()?;
                    if bound == self.device { Ok(()) } else { make_current(self.device).result() }
                }
            }
        }
    }

    pub fn name(&self) -> Answered<String> {
        let mut name = [0_u8; 256];
        // SAFETY: it writes at most as many bytes as it is told that there is room for.
        let asked = unsafe {
            (self.table.device_name)(name.as_mut_ptr().cast(), name.len() as c_int, self.device)
        };
        asked.result()?;
        let end = name.iter().position(|&byte| byte == 0).unwrap_or(name.len());
        Ok(String::from_utf8_lossy(&name[..end]).into_owned())
    }

    /// Free bytes of the device and all; it must be this thread's own.
    pub fn memory_bytes(&self) -> Answered<[usize; 2]> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: it writes two numbers.
        let asked = unsafe { (self.table.memory_info)(&raw mut free, &raw mut total) };
        asked.result().map(|()| [free, total])
    }

    /// The device's UUID, which no other device has.
    pub fn uuid(&self) -> Answered<[u8; 16]> {
        let mut uuid = [0; 16];
        // SAFETY: it writes 16 bytes.
        unsafe { (self.table.device_uuid)(&raw mut uuid, self.device) }.result().map(|()| uuid)
    }

    /// An attribute, by the vendor's number, of the device, which is called `name`.
    pub fn attribute(&self, name: &str, attribute: u32) -> Result<c_int> {
        let found = self::attribute(self.table, self.device, attribute);
        self.table.on(name, "asking for an attribute", found)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        match self.table.binding {
            Binding::Context { release, .. } => {
                let _ = self.bind();
                // SAFETY: nothing of the context is used any more. A failure leaves nothing to do.
                let _ = unsafe { release(self.device) };
            }
            Binding::Number { .. } => {}
        }
    }
}
