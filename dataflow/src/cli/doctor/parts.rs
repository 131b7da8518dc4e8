//! The parts of the software that a maker's GPUs need, as they were found.

use tidemill_kernels::KernelError;
use tidemill_kernels::gpu::Inventory;
use tidemill_kernels::gpu::inventory::{FoundDevice, FoundLibrary};

use super::advice::{Part, advice};
use super::page::{Check, Section};
use crate::device::BackendChoice;

/// Adds the parts that were found; returns whether all that computing needs are there.
pub(super) fn add(section: &mut Section, backend: BackendChoice, inventory: &Inventory) -> bool {
    let Inventory { driver, devices, compiler, matrix_library, collective_library } = inventory;
    section.add(library(backend, Part::Driver, driver));
    if let Err(error) = driver {
        // Without a driver nothing else matters; one that is broken or too old is something that is here.
        section.is_here = !is_absent(error);
        return false;
    }
    let mut is_ready = add_devices(section, backend, devices);
    for (part, found) in [(Part::Compiler, compiler), (Part::MatrixLibrary, matrix_library)] {
        is_ready &= found.is_ok();
        section.add(library(backend, part, found));
    }
    let collectives = library(backend, Part::CollectiveLibrary, collective_library);
    let is_there = collective_library.is_ok();
    section.add(if is_there { collectives } else { collectives.not_needed() });
    is_ready
}

fn is_absent(error: &KernelError) -> bool {
    matches!(error, KernelError::Unavailable { reason, .. } if reason.ends_with("was not found"))
}

/// Why something cannot be had, without saying again that it cannot.
fn reason(error: &KernelError) -> String {
    match error {
        KernelError::Unavailable { reason, .. } => reason.clone(),
        other => other.to_string(),
    }
}

fn library(backend: BackendChoice, part: Part, found: &Result<FoundLibrary, KernelError>) -> Check {
    match found {
        Ok(FoundLibrary { version, file: Some(file) }) => {
            Check::works(part.name(), format!("{version}: {file}"))
        }
        Ok(FoundLibrary { version, file: None }) => Check::works(part.name(), version),
        Err(error) => {
            let why = reason(error);
            let advice = advice(backend, part, &why);
            match is_absent(error) {
                true => Check::missing(part.name(), why, advice),
                false => Check::fails(part.name(), why, advice),
            }
        }
    }
}

/// Whether there are devices, and kernels for the first.
fn add_devices(
    section: &mut Section,
    backend: BackendChoice,
    found: &Result<Vec<FoundDevice>, KernelError>,
) -> bool {
    let devices = match found {
        Ok(devices) => devices,
        Err(error) => {
            let why = reason(error);
            let advice = advice(backend, Part::Devices, &why);
            // A driver without devices is what many machines have.
            section.is_here = error.may_succeed_later();
            section.add(Check::missing(Part::Devices.name(), why, advice));
            return false;
        }
    };
    for (ordinal, device) in devices.iter().enumerate() {
        let FoundDevice { name, architecture, memory_bytes: [free, all] } = device;
        let [free, all] = [free, all].map(|&bytes| bytes as f64 / f64::from(1 << 30));
        let memory = format!("{free:.1} of {all:.1} GiB free");
        let check = format!("device {ordinal}");
        section.add(match architecture {
            Ok(architecture) => Check::works(check, format!("{name}, {architecture}, {memory}")),
            Err(error) => {
                let advice = "there are no kernels for it, or the libraries are too old for it";
                Check::fails(check, format!("{memory}: {error}"), advice)
            }
        });
    }
    devices.first().is_some_and(|device| device.architecture.is_ok())
}
