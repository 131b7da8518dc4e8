//! A vendor's library, opened at run time, so that a program built with it also runs on machines
//! without the library.

use std::ffi::c_void;
use std::sync::OnceLock;

use crate::error::{KernelError, Result, loader_answer};
use crate::gpu::inventory::{FoundLibrary, file_of};

/// The value in `place`, made by `open` when it is first asked for; after a failure the next call tries again.
///
/// # Errors
/// An error of `open`.
pub fn once<T>(
    place: &'static OnceLock<T>,
    open: impl FnOnce() -> Result<T>,
) -> Result<&'static T> {
    if let Some(opened) = place.get() {
        return Ok(opened);
    }
    let opened = open()?;
    Ok(place.get_or_init(|| opened))
}

/// An open library.
pub struct OpenLibrary {
    library: libloading::Library,
    backend: &'static str,
    /// A description of the library and the name that it was opened by, separated by a space.
    name: String,
}

impl OpenLibrary {
    /// Opens the first of `names` that is there; `what` says what they are names of.
    ///
    /// # Errors
    /// The library is missing, or cannot be opened.
    pub fn first_of(backend: &'static str, what: &str, names: &[&str]) -> Result<Self> {
        for name in names {
            // SAFETY: the library's own code runs when it is opened; it is the vendor's system library.
            match unsafe { libloading::Library::new(*name) } {
                Ok(library) => {
                    return Ok(Self { library, backend, name: format!("{what} {name}") });
                }
                Err(error) if is_absent(name, &error) => {}
                Err(error) => {
                    let reason =
                        format!("{what} {name} cannot be opened: {}", loader_answer(&error));
                    return Err(KernelError::Unavailable { backend, reason });
                }
            }
        }
        let reason = format!("{what} {} was not found", names.first().unwrap_or(&""));
        Err(KernelError::Unavailable { backend, reason })
    }

    /// The name that it was found by.
    pub fn file_name(&self) -> &str {
        self.name.rsplit(' ').next().unwrap_or(&self.name)
    }

    /// An entry of the inventory: `version`, and the file that holds `symbol`.
    pub fn found(&self, version: String, symbol: &str) -> FoundLibrary {
        // SAFETY: the symbol is only looked up.
        let symbol = unsafe { self.library.get::<*const c_void>(symbol) };
        let file = symbol.ok().and_then(|symbol| file_of(*symbol));
        FoundLibrary { version, file }
    }

    /// Whether it has a function `symbol`.
    pub fn has(&self, symbol: &str) -> bool {
        // SAFETY: the symbol is only looked up.
        unsafe { self.library.get::<unsafe extern "C" fn()>(symbol) }.is_ok()
    }

    /// The function `symbol`.
    ///
    /// # Errors
    /// A library that lacks it: it is of another version.
    ///
    /// # Safety
    /// `F` is the type that the library documents for the function, which is used no longer than the library is open.
    pub unsafe fn function<F: Copy>(&self, symbol: &str) -> Result<F> {
        // SAFETY: the caller guarantees the validity of the type.
        let found = unsafe { self.library.get::<F>(symbol) };
        found.map(|function| *function).map_err(|_| {
            let (backend, name) = (self.backend, &self.name);
            let reason = format!("{name} has no {symbol}: it is of a version that does not fit");
            KernelError::Unavailable { backend, reason }
        })
    }
}

/// Whether nothing of this name is there, as opposed to something that is broken or lacks what it needs itself.
fn is_absent(name: &str, error: &libloading::Error) -> bool {
    let answer = loader_answer(error);
    let of_name = answer.strip_prefix(name).and_then(|rest| rest.strip_prefix(": "));
    of_name.is_some_and(|answer| answer.starts_with("cannot open shared object file: No such file"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(names: &[&str]) -> String {
        OpenLibrary::first_of("cuda", "the driver", names).err().unwrap().to_string()
    }

    #[test]
    fn a_library_that_is_not_there_is_told_by_its_first_name() {
        let said = refusal(&["libno-such-driver.so.1", "libno-such-driver.so"]);
        assert_eq!(said, "no cuda device: the driver libno-such-driver.so.1 was not found");
    }

    #[test]
    fn a_library_that_is_broken_is_not_said_to_be_missing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("libbroken.so");
        std::fs::write(&path, "no library").unwrap();
        let said = refusal(&["libno-such-driver.so.1", path.to_str().unwrap()]);
        assert!(said.contains("libbroken.so cannot be opened: "), "{said}");
    }

    #[test]
    fn a_function_that_is_not_there_is_an_error() {
        let library = OpenLibrary::first_of("cuda", "the library", &["libc.so.6"]).unwrap();
        // SAFETY: `getpid` has this type; the other is not there.
        unsafe {
            library.function::<unsafe extern "C" fn() -> i32>("getpid").unwrap();
            let missing = library.function::<unsafe extern "C" fn()>("cuNoSuchCall").err();
            let said = missing.unwrap().to_string();
            assert!(said.contains("libc.so.6 has no cuNoSuchCall"), "{said}");
        }
    }
}
