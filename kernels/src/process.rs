//! The end of a process whose devices may still compute.
//!
//! The libraries of a device register handlers that run at exit and free what a thread that waits for a kernel still uses:
//! the process would end by a signal instead of by its exit code.

use std::ffi::c_int;

unsafe extern "C" {
    fn _exit(status: c_int) -> !;
}

/// Ends the process with `code` and without exit handlers. What is to be kept was flushed before.
pub fn exit_at_once(code: u8) -> ! {
    // SAFETY: the C library's function takes any number and does not return.
    unsafe { _exit(c_int::from(code)) }
}
