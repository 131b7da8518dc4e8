//! Every kernel of a backend against its definition, in each precision.

use tidemill_kernels::Backend;
use tidemill_kernels::checks::{self, Checked, Outcome};

use super::advice::REPORT;
use super::page::{Check, Section};
use crate::cli::exit::one_line;
use crate::device::{
    BackendChoice, DeviceChoice, DeviceSettings, Devices, LocalWorkers, Precision, WithBackend,
    kind_in_words,
};

/// Adds what kernels compute, on the first device.
pub(super) fn add(section: &mut Section, backend: BackendChoice) {
    let precisions: &[Precision] = match backend {
        BackendChoice::Cpu => &[Precision::Fp32],
        _ => &[Precision::Fp32, Precision::Bf16],
    };
    for &precision in precisions {
        let settings = DeviceSettings { backend, precision, ..Default::default() };
        let opened = DeviceChoice::new(&settings).and_then(|choice| {
            if precision == Precision::Fp32 && backend != BackendChoice::Cpu {
                let (all, together) = (choice.places(), choice.default_workers(usize::MAX, 1));
                let found =
                    format!("{together} of {all} are of one kind and read each other's memory");
                section.add(Check::works("together", found));
            }
            choice.open(LocalWorkers::alone(1), Kernels { section: &mut *section, precision })
        });
        if let Err(error) = opened {
            let advice = "what is said above it is found, and still it cannot be opened";
            section.add(Check::fails("opening it", one_line(&error), advice));
            return;
        }
    }
}

struct Kernels<'a> {
    section: &'a mut Section,
    precision: Precision,
}

impl WithBackend for Kernels<'_> {
    type Output = ();

    fn run<B: Backend>(self, devices: Devices<B>) {
        let Self { section, precision } = self;
        if precision == Precision::Fp32 {
            section.add(Check::works("kind", kind_in_words(devices.kind())));
        }
        let check = format!("kernels, {}", precision.word());
        let checked = checks::run(devices.first().as_ref());
        let (count, mut worst, mut is_right) = (checked.len(), 0.0_f64, true);
        for Checked { kernels, outcome } in checked {
            let wrong = match outcome {
                Outcome::Agrees { worst: error } => {
                    worst = worst.max(error);
                    continue;
                }
                Outcome::Differs { what } => what,
                Outcome::Refused(error) => one_line(&error),
            };
            is_right = false;
            section.add(Check::fails(&check, format!("{kernels}: {wrong}"), REPORT));
        }
        if is_right {
            let found = format!(
                "{count} groups agree with their definitions; the largest error is {worst:.2} of what is allowed"
            );
            section.add(Check::works(check, found));
        }
    }
}
