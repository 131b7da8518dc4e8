//! Ends a process whose devices may still compute.
//!
//! The libraries of a device register handlers that run at exit and free memory that a thread
//! waiting for a kernel still uses: the process would end by a signal instead of with its exit
//! code.

use std::ffi::c_int;

unsafe extern "C" {
    fn _exit(status: c_int) -> !;
}

/// Ends the process with `code` and without exit handlers. Whatever has to be kept must have been
/// flushed before.
pub fn exit_at_once(code: u8) -> ! {
    // SAFETY: the C library's function takes any number and does not return.
    unsafe { _exit(c_int::from(code)) }
}
