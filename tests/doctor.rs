//! `doctor` on machines of many kinds: one page with the parts found, those that work, and how to
//! get the others; the exit code says whether the requested backend works.

use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::support::{Finished, Running, Workbench, hip_runtime};

/// `doctor` with `libraries` first in the loader's path, and the machine's own GPUs hidden.
fn doctor(libraries: &Path, variables: &[(&str, &str)], more: &[&str]) -> Finished {
    let folder = tempfile::tempdir().unwrap();
    let hidden = [("LD_LIBRARY_PATH", libraries.to_str().unwrap())];
    let environment: Vec<_> = hidden
        .iter()
        .chain(variables)
        .map(|&(name, value)| (name.to_owned(), value.to_owned()))
        .collect();
    let arguments = [&["doctor", "--format", "json"], more].concat();
    Running::start_with(&environment, folder.path(), &arguments).finish()
}

const NO_NVIDIA: (&str, &str) = ("CUDA_VISIBLE_DEVICES", "");
const NO_AMD: (&str, &str) = ("HIP_VISIBLE_DEVICES", "-1");

fn section<'a>(page: &'a Value, backend: &str) -> &'a Value {
    let sections = page["backends"].as_array().unwrap();
    sections.iter().find(|section| section["backend"] == backend).unwrap()
}

/// The first check of this name.
fn check<'a>(page: &'a Value, backend: &str, name: &str) -> &'a Value {
    let checks = section(page, backend)["checks"].as_array().unwrap();
    let found = checks.iter().find(|check| check["check"] == name);
    found.unwrap_or_else(|| panic!("no {name}: {page:#}"))
}

#[track_caller]
fn assert_check(page: &Value, backend: &str, name: &str, state: &str, parts: &[&str]) {
    let check = check(page, backend, name);
    assert_eq!(check["state"], state, "{check}");
    for part in parts {
        assert!(check.to_string().contains(part), "{part:?} is not in {check}");
    }
}

#[test]
fn a_machine_without_gpus_computes_on_its_cpu() {
    let nothing = tempfile::tempdir().unwrap();
    let done = doctor(nothing.path(), &[NO_NVIDIA, NO_AMD], &[]).expect(0);
    let page = done.json();
    assert_eq!(page["works"], true);
    assert_eq!(page["verdict"], "auto computes on cpu, which works");
    for backend in ["cuda", "rocm"] {
        assert_eq!(section(&page, backend)["works"], false);
        assert_eq!(section(&page, backend)["is_here"], false);
        assert!(page.to_string().contains("install "), "{page:#}");
    }
    assert_check(&page, "cpu", "kernels, fp32", "works", &["agree with their definitions"]);
    // As many workers as there are cores, up to four.
    let same = " workers and 2 processes leave the same bytes as one";
    assert_check(&page, "cpu", "training, fp32", "works", &[same]);

    let asked = doctor(nothing.path(), &[NO_NVIDIA, NO_AMD], &["--backend", "cuda"]).expect(1);
    assert_eq!(asked.json()["verdict"], "cuda is not here");
    assert_eq!(asked.json()["backends"].as_array().unwrap().len(), 1);
}

#[test]
fn gpus_that_work_are_checked_through() {
    let done = doctor(hip_runtime::folder(), &[NO_NVIDIA], &["--backend", "rocm"]).expect(0);
    let page = done.json();
    assert_eq!(page["verdict"], "rocm works");
    assert_check(&page, "rocm", "driver", "works", &["HIP 7.0", "libamdhip64.so.7"]);
    for (device, name) in [("device 0", "gfx942:sramecc+:xnack-"), ("device 2", "warp32")] {
        assert_check(&page, "rocm", device, "works", &["emulated AMD GPU", name, "of 16.0 GiB"]);
    }
    assert_check(&page, "rocm", "compiler", "works", &["hiprtc 7.", "libhiprtc.so.7"]);
    let libraries = [
        "on GPU 0, 1 hipBLASLt 1.2.3; ",
        "on GPU 2 rocBLAS 5.0.0.emulated (hipBLASLt is not used: libhipblaslt.so.1 makes no handle: architecture mismatch)",
        "/libhipblaslt.so.1",
    ];
    assert_check(&page, "rocm", "matrix library", "works", &libraries);
    assert_check(&page, "rocm", "together", "works", &["2 of 3 are of one kind"]);
    for precision in ["fp32", "bf16"] {
        assert_check(&page, "rocm", &format!("kernels, {precision}"), "works", &["agree with"]);
        let parts = ["2 workers and 2 processes leave the same bytes as one", "of the CPU's"];
        assert_check(&page, "rocm", &format!("training, {precision}"), "works", &parts);
    }
}

/// No kernel compiles, and `cache`, which is empty, holds none that was compiled before.
fn without_kernels(cache: &Path) -> [(&str, &str); 2] {
    [("EMULATED_HIP_REFUSED_SOURCES", ".cu"), ("TIDEMILL_KERNEL_CACHE", cache.to_str().unwrap())]
}

#[test]
fn kernels_that_do_not_compile_are_named() {
    let cache = tempfile::tempdir().unwrap();
    let variables = [&[NO_NVIDIA][..], &without_kernels(cache.path())].concat();
    let done = doctor(hip_runtime::folder(), &variables, &["--backend", "rocm"]).expect(1);
    let page = done.json();
    assert_eq!(page["verdict"], "rocm does not work");
    let parts = ["compiling ", "error: refused for a test", "report this page"];
    assert_check(&page, "rocm", "kernels, fp32", "fails", &parts);
}

/// The runtime and its compiler, without matrix libraries.
fn without_matrix_libraries() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for library in ["libamdhip64.so.7", "libhiprtc.so.7"] {
        let from = hip_runtime::folder().join(library);
        std::os::unix::fs::symlink(from, folder.path().join(library)).unwrap();
    }
    folder
}

#[test]
fn a_library_that_is_broken_is_named() {
    let folder = without_matrix_libraries();
    std::fs::write(folder.path().join("librocblas.so.5"), "no library").unwrap();
    for more in [&["--backend", "rocm"][..], &[]] {
        let done = doctor(folder.path(), &[NO_NVIDIA], more).expect(1);
        let page = done.json();
        let parts = ["librocblas.so.5 cannot be opened", "install it again"];
        assert_check(&page, "rocm", "matrix library", "fails", &parts);
        assert_check(&page, "rocm", "compiler", "works", &[]);
        assert_eq!(section(&page, "rocm")["is_here"], true);
    }
}

/// Without either matrix library; and with a broken hipBLASLt, which is reported whether or not
/// rocBLAS takes its place.
#[test]
fn a_matrix_library_that_cannot_be_used_is_named() {
    let folder = without_matrix_libraries();
    let place = |library: &str| folder.path().join(library);
    let variables = [NO_NVIDIA, ("HIP_VISIBLE_DEVICES", "0")];
    let page = |code, more: &[(&str, &str)]| {
        let variables = [&variables[..], more].concat();
        doctor(folder.path(), &variables, &["--backend", "rocm"]).expect(code).json()
    };
    let install = "install the package hipblaslt or rocblas";
    let absent = "librocblas.so.5 was not found";
    assert_check(&page(1, &[]), "rocm", "matrix library", "missing", &[absent, install]);

    let lacking = hip_runtime::folder().join("librocblas.so.5");
    std::os::unix::fs::symlink(&lacking, place("libhipblaslt.so.1")).unwrap();
    let lacks =
        "hipBLASLt is not used: the matrix library libhipblaslt.so.1 has no hipblasLtCreate";
    assert_check(&page(1, &[]), "rocm", "matrix library", "fails", &[absent, lacks]);

    std::os::unix::fs::symlink(&lacking, place("librocblas.so.5")).unwrap();
    // Checks of kernels and of training would take most of the time.
    let cache = tempfile::tempdir().unwrap();
    let without_kernels = without_kernels(cache.path());
    let works = ["rocBLAS 5.0.0.emulated", lacks];
    assert_check(&page(1, &without_kernels), "rocm", "matrix library", "works", &works);

    std::fs::remove_file(place("libhipblaslt.so.1")).unwrap();
    let whole = hip_runtime::folder().join("libhipblaslt.so.1");
    std::os::unix::fs::symlink(whole, place("libhipblaslt.so.1")).unwrap();
    let no_handle = "libhipblaslt.so.1 makes no handle: architecture mismatch";
    let no_algorithm = "hipBLASLt 1.2.3 proposes no algorithm for GPU 0";
    for (refused, code, more, why) in
        [("handles", 1, &without_kernels[..], no_handle), ("products", 0, &[], no_algorithm)]
    {
        let variables = [&[("EMULATED_HIPBLASLT_REFUSES", refused)][..], more].concat();
        let works = ["rocBLAS 5.0.0.emulated", why];
        assert_check(&page(code, &variables), "rocm", "matrix library", "works", &works);
    }
}

#[test]
fn a_driver_that_is_too_old_is_told_what_to_become() {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("driver.c");
    let text = "int cuDriverGetVersion(int* version) { *version = 12040; return 0; }\n\
                int cuGetErrorString(int code, const char** text) { (void)code; *text = 0; return 1; }\n\
                int cuInit(unsigned flags) { return (int)flags; }\n";
    std::fs::write(&source, text).unwrap();
    let library = folder.path().join("libcuda.so.1");
    let built = Command::new("g++")
        .args(["-x", "c", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o"])
        .args([&library, &source])
        .status();
    assert!(built.unwrap().success());
    for (more, verdict) in [
        (&["--backend", "cuda"][..], "cuda does not work"),
        (&[], "cpu works; what is here of cuda does not"),
    ] {
        let done = doctor(folder.path(), &[NO_AMD], more).expect(1);
        let page = done.json();
        assert_eq!(page["verdict"], verdict);
        let parts = ["is of CUDA 12.4, 12.8 or newer is needed", "driver 570"];
        assert_check(&page, "cuda", "driver", "fails", &parts);
    }
}

#[test]
fn the_page_can_be_read() {
    let bench = Workbench::new();
    let line = "CUDA_VISIBLE_DEVICES= HIP_VISIBLE_DEVICES=-1 \"$@\"";
    let arguments = ["doctor", "--backend", "cpu"];
    let done = Running::start_in_shell(bench.folder(), line, &arguments).finish().expect(0);
    for line in
        ["tidemill ", "\ncpu: works\n", "\n  training, fp32  works", "\nresult: cpu works\n"]
    {
        assert!(done.stdout.contains(line), "{line:?} is not in\n{}", done.stdout);
    }
}
