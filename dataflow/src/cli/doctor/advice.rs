//! Advice about parts that are missing.

use std::fs::File;

use crate::device::BackendChoice;

/// A part of what GPUs need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    Driver,
    Devices,
    Compiler,
    MatrixLibrary,
    CollectiveLibrary,
}

impl Part {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Driver => "driver",
            Self::Devices => "devices",
            Self::Compiler => "compiler",
            Self::MatrixLibrary => "matrix library",
            Self::CollectiveLibrary => "collectives",
        }
    }
}

/// How to get `part`; `why` describes its fault.
pub(super) fn advice(backend: BackendChoice, part: Part, why: &str) -> String {
    if why.contains("cannot be opened") {
        return "the file is there and damaged, or needs a library that is not (ldd says which): install it again".to_owned();
    }
    if part == Part::Devices {
        return devices(backend);
    }
    let text = match (backend, part) {
        (BackendChoice::Rocm, Part::Driver) => {
            "install ROCm 6 or 7 (https://rocm.docs.amd.com), or name the folder of libamdhip64.so in LD_LIBRARY_PATH"
        }
        (BackendChoice::Rocm, Part::Compiler) => {
            "hiprtc is part of ROCm's HIP runtime: install the package hip-runtime-amd of the same release"
        }
        (BackendChoice::Rocm, Part::MatrixLibrary) => {
            "install the package hipblaslt or rocblas of the same release of ROCm"
        }
        (BackendChoice::Rocm, _) => {
            "for several processes, install the package rccl; without it they exchange through the host's memory"
        }
        (_, Part::Driver) => {
            "install NVIDIA's driver 570 (CUDA 12.8) or newer (https://www.nvidia.com/drivers); in a container, start it with its GPUs"
        }
        (_, Part::Compiler) => {
            "install NVRTC of CUDA 12 or 13 (the package cuda-nvrtc, or pip install nvidia-cuda-nvrtc), and name its folder in \
             LD_LIBRARY_PATH if the loader does not know it"
        }
        (_, Part::MatrixLibrary) => {
            "install cuBLAS of CUDA 12 or 13 (the package libcublas, or pip install nvidia-cublas), and name its folder in \
             LD_LIBRARY_PATH if the loader does not know it"
        }
        (..) => {
            "for several processes, install NCCL (the package libnccl2, or pip install nvidia-nccl-cu13); without it they exchange \
             through the host's memory"
        }
    };
    text.to_owned()
}

/// Why a driver may show no device: what hides them, and what keeps this user from them.
fn devices(backend: BackendChoice) -> String {
    let (hidden_by, device, module, groups) = match backend {
        BackendChoice::Rocm => ("HIP_VISIBLE_DEVICES", "/dev/kfd", "amdgpu", "render and video"),
        _ => ("CUDA_VISIBLE_DEVICES", "/dev/nvidiactl", "nvidia", "video"),
    };
    if let Ok(value) = std::env::var(hidden_by) {
        return format!("{hidden_by} is set to {value:?}: unset it to see all GPUs");
    }
    match File::open(device) {
        Ok(_) => format!("{device} can be opened: the driver's own tools may say more"),
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {
            format!("this user may not open {device}: join the groups {groups}")
        }
        Err(_) => {
            format!(
                "{device} is not there: load the kernel module {module}; in a container, start it with its GPUs"
            )
        }
    }
}

/// Advice about kernels or weights that are wrong.
pub(super) const REPORT: &str =
    "please report this page: the device, its driver, a library or the program is broken";
