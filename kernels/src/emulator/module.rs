//! Sources, compiled to libraries of the host.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char};
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};

use tempfile::TempDir;

use super::SourceChange;
use crate::error::{KernelError, Result};
use crate::gpu::cache::CacheEntry;
use crate::gpu::driver::{ElementKind, Launch, Start};
use crate::gpu::source::{HEADERS, Source, SourceOptions};

/// The header that emulates a device's own functions; part of the emulator alone.
const EMULATOR_HEADER: &str = include_str!("../../gpu/emulator.h");
/// The code that runs the blocks of a launch. It is compiled once, not with each source, and linked to all of them.
static LAUNCHER: Source = Source {
    name: "emulator_launch.cpp",
    text: include_str!("../../gpu/emulator_launch.cpp"),
    definitions: &[],
};

const COMPILER: &str = "g++";

/// A compiled source.
pub struct Library {
    library: libloading::Library,
    source: &'static str,
}

type Kernel = unsafe extern "C" fn(*const u8);
/// Answers null, or what went wrong.
type LaunchEntry = unsafe extern "C" fn(
    kernel: Kernel,
    arguments: *const u8,
    grid: *const u32,
    threads: u32,
    shared_bytes: usize,
    seed: u64,
    workers: u32,
    must_wait: bool,
) -> *const c_char;

fn failure(attempted: &'static str, answer: impl ToString) -> KernelError {
    KernelError::Device { attempted, device: "the emulator".to_owned(), answer: answer.to_string() }
}

/// The properties of the emulated GPU that sources are compiled for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Emulated {
    /// Lanes of a warp.
    pub(super) warp: u32,
    /// Whether groups of warps multiply bf16 together.
    pub(super) group_products: bool,
}

/// The library of `source`; compiled once for each set of changes, device and precision in this process, and kept on disk.
pub(super) fn compile(
    source: &'static Source,
    options: SourceOptions,
    device: Emulated,
    changes: &[SourceChange],
) -> Result<Arc<Library>> {
    type Place = Arc<Mutex<Option<Arc<Library>>>>;
    static LIBRARIES: Mutex<BTreeMap<(&str, String), Place>> = Mutex::new(BTreeMap::new());
    let arguments = arguments(source, options, device);
    let key = (source.name, format!("{} {changes:?}", arguments.join(" ")));
    // Other threads may compile meanwhile, except the same source.
    let place = {
        let mut libraries = LIBRARIES.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(libraries.entry(key).or_default())
    };
    let mut place = place.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(library) = &*place {
        return Ok(Arc::clone(library));
    }
    let mut hashed = arguments.clone();
    hashed.extend([EMULATOR_HEADER, LAUNCHER.text, source.text].map(str::to_owned));
    hashed.extend(changes.iter().map(|change| format!("{change:?}")));
    let entry = CacheEntry::new(source, COMPILER, &hashed, "so");
    let mut built = None;
    if entry.read().is_none() {
        let image = build(source, changes, device, &arguments)?;
        entry.write(&image);
        built = entry.read().is_none().then_some(image);
    }
    let library = match (built, entry.path()) {
        (None, Some(path)) => open(path, source.name)?,
        (built, _) => {
            let image = built.map_or_else(|| build(source, changes, device, &arguments), Ok)?;
            let folder = tempfile::tempdir().map_err(|error| failure("making a folder", error))?;
            let path = folder.path().join("kernels.so");
            std::fs::write(&path, image).map_err(|error| failure("writing a library", error))?;
            open(&path, source.name)?
        }
    };
    let library = Arc::new(library);
    *place = Some(Arc::clone(&library));
    Ok(library)
}

fn arguments(source: &Source, options: SourceOptions, device: Emulated) -> Vec<String> {
    let mut arguments = shared_arguments(device);
    arguments.extend(["-x", "c++", "-shared", "-Wl,-Bsymbolic"].map(str::to_owned));
    if device.group_products && options.activation == ElementKind::Bf16 {
        arguments.push("-DGROUP_PRODUCTS=1".to_owned());
    }
    arguments.extend(source.arguments(options));
    arguments
}

/// The compiler's arguments for kernels and for the launcher.
fn shared_arguments(device: Emulated) -> Vec<String> {
    let mut arguments: Vec<String> = [
        "-std=c++20",
        // Most of what is compiled runs once: to optimise more takes longer than it saves.
        "-O1",
        "-fPIC",
        "-pthread",
        "-fno-gnu-unique",
        "-fvisibility=hidden",
        "-ffp-contract=off",
        "-Wall",
        "-Werror",
        "-Wno-unknown-pragmas",
        "-Wno-unused-function",
        "-DEMULATOR",
    ]
    .map(str::to_owned)
    .into();
    // Without this the compiler would call the C library, with the same bits.
    #[cfg(target_arch = "x86_64")]
    if std::is_x86_feature_detected!("fma") {
        arguments.push("-mfma".to_owned());
    }
    arguments.push(format!("-DWARP={}", device.warp));
    arguments
}

/// `text` of the file `name`, with what `changes` change of it, one after the other.
fn changed(name: &str, text: &str, changes: &[SourceChange]) -> Result<String> {
    let mut text = text.to_owned();
    for &SourceChange { from, to, .. } in changes.iter().filter(|change| change.source == name) {
        if !text.contains(from) {
            return Err(failure("changing a source", format!("{name} has no {from:?}")));
        }
        text = text.replacen(from, to, 1);
    }
    Ok(text)
}

/// Whether `text` includes the header `name`, or one that does.
pub(super) fn includes(text: &str, name: &str) -> bool {
    let included = |header: &str| text.contains(&format!("#include \"{header}\""));
    included(name)
        || HEADERS.iter().any(|header| included(header.name) && includes(header.text, name))
}

fn build(
    source: &'static Source,
    changes: &[SourceChange],
    device: Emulated,
    arguments: &[String],
) -> Result<Vec<u8>> {
    const OBJECT: &str = "emulator_launch.o";
    let folder = tempfile::tempdir().map_err(|error| failure("making a folder", error))?;
    write(&folder, OBJECT, &*launcher(device)?)?;
    write(&folder, "emulator.h", EMULATOR_HEADER)?;
    for header in HEADERS {
        write(&folder, header.name, changed(header.name, header.text, changes)?)?;
    }
    write(&folder, source.name, changed(source.name, source.text, changes)?)?;
    let files = [source.name, "-x", "none", OBJECT].map(str::to_owned);
    run_compiler(&folder, source, arguments.iter().cloned().chain(files))
}

/// The launcher's object for warps of `device`; compiled once in this process, and kept on disk.
fn launcher(device: Emulated) -> Result<Arc<Vec<u8>>> {
    static OBJECTS: Mutex<BTreeMap<u32, Arc<Vec<u8>>>> = Mutex::new(BTreeMap::new());
    let mut objects = OBJECTS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(object) = objects.get(&device.warp) {
        return Ok(Arc::clone(object));
    }
    let mut arguments = shared_arguments(device);
    arguments.push("-c".to_owned());
    let hashed = [&arguments[..], &[EMULATOR_HEADER.to_owned()]].concat();
    let entry = CacheEntry::new(&LAUNCHER, COMPILER, &hashed, "o");
    let object = match entry.read() {
        Some(object) => object,
        None => {
            let folder = tempfile::tempdir().map_err(|error| failure("making a folder", error))?;
            write(&folder, "emulator.h", EMULATOR_HEADER)?;
            write(&folder, LAUNCHER.name, LAUNCHER.text)?;
            arguments.push(LAUNCHER.name.to_owned());
            let object = run_compiler(&folder, &LAUNCHER, arguments)?;
            entry.write(&object);
            object
        }
    };
    let object = Arc::new(object);
    objects.insert(device.warp, Arc::clone(&object));
    Ok(object)
}

fn write(folder: &TempDir, name: &str, text: impl AsRef<[u8]>) -> Result<()> {
    std::fs::write(folder.path().join(name), text)
        .map_err(|error| failure("writing a source", error))
}

/// Runs the compiler with `arguments` in `folder`, which holds `source`; returns the bytes of the compiled file.
fn run_compiler(
    folder: &TempDir,
    source: &Source,
    arguments: impl IntoIterator<Item = String>,
) -> Result<Vec<u8>> {
    let out = folder.path().join("compiled");
    let result = Command::new(COMPILER)
        .args(arguments)
        .arg("-o")
        .arg(&out)
        .current_dir(folder.path())
        .output()
        .map_err(|error| failure("running g++", error))?;
    if !result.status.success() {
        return Err(KernelError::Compile {
            source_name: source.name,
            architecture: "the emulator".to_owned(),
            log: String::from_utf8_lossy(&result.stderr).into_owned(),
        });
    }
    std::fs::read(&out).map_err(|error| failure("reading what was compiled", error))
}

fn open(path: &Path, source: &'static str) -> Result<Library> {
    // SAFETY: the library is one that this module compiled; loading it runs no code of the source.
    let library = unsafe { libloading::Library::new(path) };
    Ok(Library { library: library.map_err(|error| failure("opening a library", error))?, source })
}

impl Library {
    /// Says whether the library has a kernel.
    pub(super) fn check(&self, name: &'static str) -> Result<()> {
        // SAFETY: the symbol is only looked up.
        let found = unsafe { self.library.get::<Kernel>(name) };
        found.map(drop).map_err(|error| failure("looking for a kernel", error))
    }

    fn number(&self, name: &str, what: &str) -> Result<u32> {
        let symbol = format!("{name}_{what}");
        // SAFETY: the dialect's KERNEL and SHARED_BYTES define all of them as 32-bit constants.
        let number = unsafe { self.library.get::<*const u32>(symbol.as_str()) };
        let number = number.map_err(|error| failure("looking for a kernel's number", error))?;
        // SAFETY: as above.
        Ok(unsafe { **number })
    }

    /// Runs a kernel to its end.
    ///
    /// # Safety
    /// The addresses among the arguments must name memory as large as the kernel reaches.
    pub(super) unsafe fn launch(
        &self,
        name: &'static str,
        launch: Launch,
        arguments: &[u8],
        seed: u64,
        workers: u32,
    ) -> Result<()> {
        let expected = self.number(name, "argument_bytes")? as usize;
        if arguments.len() != expected {
            let what = "bytes of the arguments' struct";
            return Err(KernelError::shape(name, what, expected, arguments.len()));
        }
        let most = self.number(name, "threads")?;
        if launch.threads == 0 || launch.threads > most {
            let expected = format!("1 to {most}");
            return Err(KernelError::shape(name, "threads", expected, launch.threads));
        }
        // A kernel that declares its shared memory gets exactly that.
        if let Ok(expected) = self.number(name, "shared_bytes")
            && launch.shared_bytes != expected as usize
        {
            let what = "dynamic shared bytes of a block";
            return Err(KernelError::shape(name, what, expected, launch.shared_bytes));
        }
        // The struct on the kernel's side wants its own alignment.
        let mut aligned = vec![0_u64; arguments.len().div_ceil(8)];
        bytemuck::cast_slice_mut::<u64, u8>(&mut aligned)[..arguments.len()]
            .copy_from_slice(arguments);
        let failed = |error| failure("launching a kernel", error);
        tracing::trace!(name, source = self.source, ?launch, "emulated");
        // SAFETY: both symbols are of the emulator's own making and have these types; the size of the struct was
        // compared, and the caller guarantees the validity of what it holds.
        let answer = unsafe {
            let kernel = self.library.get::<Kernel>(name).map_err(failed)?;
            let entry = self.library.get::<LaunchEntry>("emulator_launch").map_err(failed)?;
            let answer = entry(
                *kernel,
                aligned.as_ptr().cast(),
                launch.grid.as_ptr(),
                launch.threads,
                launch.shared_bytes,
                seed,
                workers,
                matches!(launch.start, Start::Early { .. }),
            );
            // The text is valid until this thread's next launch.
            (!answer.is_null()).then(|| CStr::from_ptr(answer).to_string_lossy().into_owned())
        };
        answer
            .map_or(Ok(()), |answer| Err(failure("running a kernel", format!("{name}: {answer}"))))
    }
}
