//! The parts that a vendor's GPUs need, and which of them are present: a complete list, where
//! opening a device reports only the first missing part.

use std::ffi::{CStr, c_void};

use crate::error::Result;

/// A library that was found, and opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundLibrary {
    /// Its name and version.
    pub version: String,
    /// The file, where the loader tells.
    pub file: Option<String>,
}

/// A device that was found, whether or not it can be used.
#[derive(Debug)]
pub struct FoundDevice {
    /// The device's name.
    pub name: String,
    /// The architecture that kernels are compiled for, such as `sm_90a`; an error where no kernel is written for it.
    pub architecture: Result<String>,
    /// Free bytes and all.
    pub memory_bytes: [usize; 2],
}

/// The devices and libraries of one vendor, each as found or with the error.
#[derive(Debug)]
pub struct Inventory {
    /// The library that lists devices.
    pub driver: Result<FoundLibrary>,
    /// The devices.
    pub devices: Result<Vec<FoundDevice>>,
    /// The compiler of kernels.
    pub compiler: Result<FoundLibrary>,
    /// The library of matrix products.
    pub matrix_library: Result<FoundLibrary>,
    /// The library that moves bytes between the devices of several processes; training in one process needs none.
    pub collective_library: Result<FoundLibrary>,
}

/// The file that the code or data at `address` was loaded from.
pub(crate) fn file_of(address: *const c_void) -> Option<String> {
    let mut found = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: the call takes any address, and fills in the struct where it answers other than 0; zeros are a value of it.
    let (answer, found) =
        unsafe { (libc::dladdr(address, found.as_mut_ptr()), found.assume_init()) };
    if answer == 0 || found.dli_fname.is_null() {
        return None;
    }
    // SAFETY: the loader's name of the file ends with a zero, and stays as long as the library is open.
    let name = unsafe { CStr::from_ptr(found.dli_fname) }.to_string_lossy();
    let path = std::path::Path::new(name.as_ref());
    // Links show which name was found, and the file at their end shows the version.
    let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    Some(path.display().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_of_a_function_is_told() {
        let file = file_of(libc::getpid as *const c_void).unwrap();
        assert!(file.contains("libc"), "{file}");
        assert_eq!(file_of(std::ptr::null()), None);
    }
}
