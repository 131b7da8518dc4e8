//! Sources become machine code of the device at hand, by NVRTC.

use std::ffi::{CStr, CString, c_char};

use cudarc::nvrtc::sys::{self, nvrtcProgram, nvrtcResult};

use super::{BACKEND, unavailable};
use crate::error::{KernelError, Result};
use crate::gpu::cache::CacheEntry;
use crate::gpu::source::{HEADERS, Source, SourceOptions};

/// The machine code of `source` for `architecture`.
pub(super) fn cubin(
    source: &'static Source,
    options: SourceOptions,
    device: &str,
    architecture: &str,
) -> Result<Vec<u8>> {
    let version = version()?;
    let options = arguments(options, architecture);
    let entry = CacheEntry::new(source, &format!("NVRTC {version}"), &options, "cubin");
    if let Some(image) = entry.read() {
        return Ok(image);
    }
    check_architecture(device, architecture, &version)?;
    tracing::info!(source = source.name, architecture, "compiling kernels");
    let image = Program::new(source, architecture)?.compile(&options)?;
    entry.write(&image);
    Ok(image)
}

/// What NVRTC is told; contraction is off because kernels say themselves where they fuse.
fn arguments(options: SourceOptions, architecture: &str) -> Vec<String> {
    let mut arguments = vec![
        format!("--gpu-architecture={architecture}"),
        "--std=c++17".to_owned(),
        "--fmad=false".to_owned(),
        "--device-as-default-execution-space".to_owned(),
    ];
    let definitions = options.definitions().into_iter();
    arguments.extend(definitions.map(|(name, value)| format!("-D{name}={value}")));
    arguments
}

/// The version of NVRTC.
///
/// # Errors
/// A library that is not there.
pub(super) fn version() -> Result<String> {
    // SAFETY: looks for a library, and asks it for two numbers.
    unsafe {
        if !sys::is_culib_present() {
            return Err(unavailable("NVIDIA's run-time compiler libnvrtc.so was not found"));
        }
        let (mut major, mut minor) = (0, 0);
        answered("asking for the version", sys::nvrtcVersion(&raw mut major, &raw mut minor))?;
        Ok(format!("{major}.{minor}"))
    }
}

/// Older compilers do not know newer devices.
fn check_architecture(device: &str, architecture: &str, version: &str) -> Result<()> {
    let mut count = 0;
    // SAFETY: the first call says how many numbers the second writes.
    let known = unsafe {
        answered("asking for architectures", sys::nvrtcGetNumSupportedArchs(&raw mut count))?;
        let mut known = vec![0; usize::try_from(count).unwrap_or(0)];
        answered("asking for architectures", sys::nvrtcGetSupportedArchs(known.as_mut_ptr()))?;
        known
    };
    check_known(&known, device, architecture, version)
}

/// `known` are architectures as NVRTC numbers them, the oldest first.
fn check_known(known: &[i32], device: &str, architecture: &str, version: &str) -> Result<()> {
    let number: String = architecture.chars().filter(char::is_ascii_digit).collect();
    if known.iter().any(|known| known.to_string() == number) {
        return Ok(());
    }
    let expected = match (known.first(), known.last()) {
        (Some(first), Some(last)) => {
            format!("one from sm_{first} to sm_{last}, which NVRTC {version} compiles for")
        }
        _ => format!("one that NVRTC {version} compiles for"),
    };
    let (device, found) = (device.to_owned(), architecture.to_owned());
    Err(KernelError::UnsupportedArchitecture { device, found, expected })
}

fn answered(attempted: &'static str, result: nvrtcResult) -> Result<()> {
    if result == nvrtcResult::NVRTC_SUCCESS {
        return Ok(());
    }
    // SAFETY: the library answers a constant text for any code.
    let text = unsafe { CStr::from_ptr(sys::nvrtcGetErrorString(result)) };
    let answer = text.to_string_lossy().into_owned();
    Err(KernelError::Device { attempted, device: format!("{BACKEND}'s compiler"), answer })
}

fn text(text: &str) -> Result<CString> {
    CString::new(text).map_err(|_| unavailable("a kernel's source holds a zero"))
}

/// A source on its way to machine code.
struct Program<'a> {
    program: nvrtcProgram,
    source: &'static Source,
    architecture: &'a str,
}

impl<'a> Program<'a> {
    fn new(source: &'static Source, architecture: &'a str) -> Result<Self> {
        let (code, name) = (text(source.text)?, text(source.name)?);
        let headers = HEADERS.iter().map(|header| text(header.text)).collect::<Result<Vec<_>>>()?;
        let names = HEADERS.iter().map(|header| text(header.name)).collect::<Result<Vec<_>>>()?;
        let headers: Vec<*const c_char> = headers.iter().map(|header| header.as_ptr()).collect();
        let names: Vec<*const c_char> = names.iter().map(|name| name.as_ptr()).collect();
        let mut program = std::ptr::null_mut();
        // SAFETY: all texts end with a zero and outlive the call, which copies them.
        let created = unsafe {
            sys::nvrtcCreateProgram(
                &raw mut program,
                code.as_ptr(),
                name.as_ptr(),
                headers.len() as i32,
                headers.as_ptr(),
                names.as_ptr(),
            )
        };
        answered("opening a source", created)?;
        Ok(Self { program, source, architecture })
    }

    fn compile(self, arguments: &[String]) -> Result<Vec<u8>> {
        let arguments = arguments.iter().map(|option| text(option)).collect::<Result<Vec<_>>>()?;
        let options: Vec<*const c_char> = arguments.iter().map(|option| option.as_ptr()).collect();
        // SAFETY: the program is open; the options end with a zero and outlive the call. Sizes are asked before
        // that many bytes are written.
        unsafe {
            let compiled =
                sys::nvrtcCompileProgram(self.program, options.len() as i32, options.as_ptr());
            if compiled != nvrtcResult::NVRTC_SUCCESS {
                return Err(KernelError::Compile {
                    source_name: self.source.name,
                    architecture: self.architecture.to_owned(),
                    log: self.log()?,
                });
            }
            let mut bytes = 0;
            answered("reading kernels", sys::nvrtcGetCUBINSize(self.program, &raw mut bytes))?;
            let mut image = vec![0_u8; bytes];
            let place = image.as_mut_ptr().cast();
            answered("reading kernels", sys::nvrtcGetCUBIN(self.program, place))?;
            Ok(image)
        }
    }

    fn log(&self) -> Result<String> {
        let mut bytes = 0;
        // SAFETY: the program is open, and the size is asked before that many bytes are written.
        unsafe {
            answered("reading the log", sys::nvrtcGetProgramLogSize(self.program, &raw mut bytes))?;
            let mut log = vec![0_u8; bytes];
            let place = log.as_mut_ptr().cast();
            answered("reading the log", sys::nvrtcGetProgramLog(self.program, place))?;
            let text = String::from_utf8_lossy(&log);
            Ok(text.trim_end_matches('\0').trim().to_owned())
        }
    }
}

impl Drop for Program<'_> {
    fn drop(&mut self) {
        // SAFETY: the program is open and not used again.
        unsafe { sys::nvrtcDestroyProgram(&raw mut self.program) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_the_compiler_does_not_know_is_named_with_what_it_knows() {
        let known = [75, 80, 90, 100];
        for architecture in ["sm_80", "sm_90a", "sm_100a"] {
            check_known(&known, "a GPU", architecture, "12.9").unwrap();
        }
        let error = check_known(&known, "a GPU", "sm_120a", "12.9").unwrap_err();
        let expected =
            "a GPU is sm_120a, expected one from sm_75 to sm_100, which NVRTC 12.9 compiles for";
        assert_eq!(error.to_string(), expected);
    }
}
