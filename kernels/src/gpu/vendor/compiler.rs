//! A vendor's compiler in the process: NVRTC or hiprtc, whose interfaces are the same except for
//! their names.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::time::Instant;

use super::library::OpenLibrary;
use crate::error::{KernelError, Result};
use crate::gpu::cache::CacheEntry;
use crate::gpu::inventory::FoundLibrary;
use crate::gpu::source::{HEADERS, Source};

type RawProgram = *mut c_void;

/// Whether groups of warps multiply together on devices of `architecture`, by the same rule as `dialect.h`: on code for Hopper
/// itself, as no newer architecture has these instructions.
pub fn takes_group_products(architecture: &str) -> bool {
    architecture == "sm_90a"
}

/// The status that a function of the compiler returns.
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Answer(c_int);

const SUCCESS: Answer = Answer(0);

/// Writes how many bytes there are.
type SizeOf = unsafe extern "C" fn(RawProgram, *mut usize) -> Answer;
/// Writes as many bytes.
type BytesOf = unsafe extern "C" fn(RawProgram, *mut c_char) -> Answer;

/// The names of a compiler's functions.
pub struct Names {
    /// The prefix of all functions, such as `nvrtc`.
    pub prefix: &'static str,
    /// The word for machine code in the functions' names, such as `CUBIN` in `nvrtcGetCUBIN`.
    pub image: &'static str,
    /// The ending of files of machine code in the cache.
    pub extension: &'static str,
}

/// A compiler, open.
pub struct Compiler {
    /// Its name in errors.
    name: String,
    create: unsafe extern "C" fn(
        *mut RawProgram,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> Answer,
    compile: unsafe extern "C" fn(RawProgram, c_int, *const *const c_char) -> Answer,
    destroy: unsafe extern "C" fn(*mut RawProgram) -> Answer,
    log: (SizeOf, BytesOf),
    image: (SizeOf, BytesOf),
    version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> Answer,
    error_text: unsafe extern "C" fn(Answer) -> *const c_char,
    names: &'static Names,
    library: OpenLibrary,
}

impl Compiler {
    /// Finds the functions of a compiler of `backend` in `library`.
    ///
    /// # Errors
    /// The first function that the library lacks.
    pub fn find(library: OpenLibrary, backend: &str, names: &'static Names) -> Result<Self> {
        let Names { prefix, image, .. } = names;
        let name = |rest: &str| format!("{prefix}{rest}");
        // SAFETY: the vendor documents each function with the type of the field that it goes to.
        unsafe {
            Ok(Self {
                name: format!("{backend}'s compiler"),
                create: library.function(&name("CreateProgram"))?,
                compile: library.function(&name("CompileProgram"))?,
                destroy: library.function(&name("DestroyProgram"))?,
                log: (
                    library.function(&name("GetProgramLogSize"))?,
                    library.function(&name("GetProgramLog"))?,
                ),
                image: (
                    library.function(&name(&format!("Get{image}Size")))?,
                    library.function(&name(&format!("Get{image}")))?,
                ),
                version: library.function(&name("Version"))?,
                error_text: library.function(&name("GetErrorString"))?,
                names,
                library,
            })
        }
    }

    /// The library, for functions that other vendors' compilers do not have.
    #[cfg(feature = "cuda")]
    pub fn library(&self) -> &OpenLibrary {
        &self.library
    }

    /// The compiler's version and file, for the inventory.
    ///
    /// # Errors
    /// An error of the compiler when it is asked for its version.
    pub fn found(&self) -> Result<FoundLibrary> {
        let Names { prefix, .. } = self.names;
        let version = format!("{prefix} {}", self.version()?);
        Ok(self.library.found(version, &format!("{prefix}Version")))
    }

    /// The compiler's version, such as `12.9`.
    ///
    /// # Errors
    /// An error of the compiler.
    pub fn version(&self) -> Result<String> {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: it writes two numbers.
        let asked = unsafe { (self.version)(&raw mut major, &raw mut minor) };
        self.answered("asking for the version", asked)?;
        Ok(format!("{major}.{minor}"))
    }

    /// The machine code of `source`, from the cache on disk where it was compiled before by a compiler of the same `version`, which
    /// it is told, with the same `arguments`. Before it is compiled, `check` may refuse.
    ///
    /// # Errors
    /// An error of `check`, or a source that does not compile.
    pub fn cached(
        &self,
        source: &'static Source,
        architecture: &str,
        arguments: &[String],
        version: &str,
        check: impl FnOnce() -> Result<()>,
    ) -> Result<Vec<u8>> {
        let entry = CacheEntry::new(source, version, arguments, self.names.extension);
        if let Some(image) = entry.read() {
            return Ok(image);
        }
        check()?;
        tracing::info!(%source, architecture, "compiling kernels");
        let started = Instant::now();
        let image = self.compile(source, architecture, arguments)?;
        let seconds = started.elapsed().as_secs_f64();
        tracing::debug!(%source, seconds, "compiled kernels");
        entry.write(&image);
        Ok(image)
    }

    /// The machine code of `source`; `architecture` is what errors say that it was compiled for.
    ///
    /// # Errors
    /// A source that does not compile.
    fn compile(
        &self,
        source: &'static Source,
        architecture: &str,
        arguments: &[String],
    ) -> Result<Vec<u8>> {
        let program = Program::new(self, source)?;
        let arguments = arguments.iter().map(|option| text(option)).collect::<Result<Vec<_>>>()?;
        let options: Vec<*const c_char> = arguments.iter().map(|option| option.as_ptr()).collect();
        // SAFETY: the program is open; the options end with a zero and outlive the call.
        let compiled =
            unsafe { (self.compile)(program.raw, options.len() as c_int, options.as_ptr()) };
        if compiled != SUCCESS {
            let log = program.bytes("reading the log", self.log)?;
            let log = String::from_utf8_lossy(&log).trim_end_matches('\0').trim().to_owned();
            let architecture = architecture.to_owned();
            return Err(KernelError::Compile { source_name: source.name, architecture, log });
        }
        program.bytes("reading kernels", self.image)
    }

    /// Asks an answer to be success.
    ///
    /// # Errors
    /// The compiler's words for anything else.
    pub fn answered(&self, attempted: &'static str, answer: Answer) -> Result<()> {
        if answer == SUCCESS {
            return Ok(());
        }
        // SAFETY: the library answers a constant text for any code.
        let text = unsafe { CStr::from_ptr((self.error_text)(answer)) };
        let (device, answer) = (self.name.clone(), text.to_string_lossy().into_owned());
        Err(KernelError::Device { attempted, device, answer })
    }
}

fn text(text: &str) -> Result<CString> {
    CString::new(text).map_err(|_| KernelError::shape("compile", "source", "no zero in it", "one"))
}

/// A source on its way to machine code.
struct Program<'a> {
    compiler: &'a Compiler,
    raw: RawProgram,
}

impl<'a> Program<'a> {
    fn new(compiler: &'a Compiler, source: &'static Source) -> Result<Self> {
        let (code, name) = (text(source.text)?, text(source.name)?);
        let headers = HEADERS.iter().map(|header| text(header.text)).collect::<Result<Vec<_>>>()?;
        let names = HEADERS.iter().map(|header| text(header.name)).collect::<Result<Vec<_>>>()?;
        let headers: Vec<*const c_char> = headers.iter().map(|header| header.as_ptr()).collect();
        let names: Vec<*const c_char> = names.iter().map(|name| name.as_ptr()).collect();
        let mut raw = std::ptr::null_mut();
        // SAFETY: all texts end with a zero and outlive the call, which copies them.
        let created = unsafe {
            (compiler.create)(
                &raw mut raw,
                code.as_ptr(),
                name.as_ptr(),
                headers.len() as c_int,
                headers.as_ptr(),
                names.as_ptr(),
            )
        };
        compiler.answered("opening a source", created)?;
        Ok(Self { compiler, raw })
    }

    fn bytes(&self, attempted: &'static str, (size, bytes): (SizeOf, BytesOf)) -> Result<Vec<u8>> {
        let mut count = 0;
        // SAFETY: the program is open, here and below, and the size is asked before that many bytes are written.
        let asked = unsafe { size(self.raw, &raw mut count) };
        self.compiler.answered(attempted, asked)?;
        let mut found = vec![0_u8; count];
        // SAFETY: as above.
        let read = unsafe { bytes(self.raw, found.as_mut_ptr().cast()) };
        self.compiler.answered(attempted, read)?;
        Ok(found)
    }
}

impl Drop for Program<'_> {
    fn drop(&mut self) {
        // SAFETY: the program is open and not used again.
        unsafe { (self.compiler.destroy)(&raw mut self.raw) };
    }
}
