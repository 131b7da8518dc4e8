//! `tidemill doctor`: the devices of this machine, checked.
//!
//! For each maker of GPUs, and for the CPU: the parts that were found, that work, or that are missing, and how to get them. Working parts are tried: every
//! kernel against its definition, and short training runs whose weights are compared. The page is made to be pasted into a report.
//!
//! The exit code is 0 if the device that was asked for works: the backend that `--backend` names, or else whatever `auto` would choose, as long
//! as no GPU that is here is left out because something about it is broken.

mod advice;
mod computing;
mod page;
mod parts;
mod training;

use clap::Args;
use tidemill_kernels::cpu::InstructionSet;

use self::page::{Check, Page, Section, State};
use super::Format;
use super::exit::ExitCode;
use super::output::{note_line, result_line};
use crate::device::BackendChoice;

/// Flags of `tidemill doctor`.
#[derive(Debug, Args)]
pub(crate) struct DoctorArguments {
    /// The devices to check; auto is all that there are here.
    #[arg(long, value_enum, value_name = "BACKEND", default_value_t)]
    backend: BackendChoice,
    /// How the page is printed.
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

pub(crate) fn run(arguments: &DoctorArguments) -> anyhow::Result<ExitCode> {
    let page = Page::new(arguments.backend, sections(arguments.backend));
    match arguments.format {
        Format::Json => result_line!("{}", serde_json::to_string_pretty(&page)?)?,
        Format::Text => result_line!("{}", page.in_words())?,
    }
    Ok(if page.works { ExitCode::SUCCESS } else { ExitCode::from(1) })
}

/// The sections that a flag asks for.
fn sections(asked: BackendChoice) -> Vec<Section> {
    let all = [BackendChoice::Cuda, BackendChoice::Rocm, BackendChoice::Cpu];
    let wanted = |backend: &BackendChoice| asked == BackendChoice::Auto || asked == *backend;
    all.into_iter().filter(wanted).map(section).collect()
}

fn section(backend: BackendChoice) -> Section {
    let hint = match backend {
        BackendChoice::Cpu => "",
        _ => ": compiling kernels may take a minute the first time",
    };
    note_line!("checking {}{hint}", backend.word());
    let mut section = Section::new(backend.word());
    let is_ready = match backend.inventory() {
        None => {
            section.add(Check::works("processor", processor()));
            true
        }
        Some(Err(why)) => {
            section.add(Check::missing("driver", why, "use a program that was built with it"));
            false
        }
        Some(Ok(inventory)) => parts::add(&mut section, backend, &inventory),
    };
    if is_ready {
        computing::add(&mut section, backend);
        if section.state() == State::Works {
            training::add(&mut section, backend);
        }
    }
    section
}

/// The name of the processor, and the vector instructions that kernels use on it.
fn processor() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("model name"));
    let name = line.map(|line| line.trim_start_matches([' ', '\t', ':']));
    let instructions = InstructionSet::best().name();
    match name {
        Some(name) => format!("{name}, {instructions}"),
        None => instructions.to_owned(),
    }
}
