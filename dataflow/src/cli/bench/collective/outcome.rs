//! The measured rates, and how they are printed.

use std::num::NonZeroU64;

use serde_json::{Value, json};
use tidemill_collective::CHUNK_ELEMENTS;

use super::Way;
use super::measure::{Measured, Rates};
use crate::cli::Format;
use crate::cli::output::result_line;

/// A caution about the rates of a library alone.
const LIBRARY_ALONE: &str =
    "sums in an order of the library's own, which training never uses, compared within rounding";

/// The measured rates.
#[derive(Debug)]
pub(super) struct Outcome {
    /// Workers of all processes.
    pub workers: usize,
    pub processes: usize,
    pub way: Way,
    pub arena_mebibytes: usize,
    pub rounds: NonZeroU64,
    pub measured: Vec<Measured>,
}

impl Outcome {
    /// Prints it, of workers on `device`.
    pub(super) fn print(&self, format: Format, device: &str) -> anyhow::Result<()> {
        match format {
            Format::Json => result_line!("{}", self.to_json(device)),
            Format::Text => self.lines(device).iter().try_for_each(|line| result_line!("{line}")),
        }
    }

    fn has_library_alone(&self) -> bool {
        self.measured.iter().any(|row| row.library_alone.is_some())
    }

    pub(super) fn to_json(&self, device: &str) -> Value {
        let row = |row: &Measured| {
            let Measured { bucket_mebibytes, ours, library_alone } = row;
            let library_alone = library_alone.map(|Rates { summed, gathered }| {
                json!({
                    "reduce_scatter_gigabytes_per_second": summed,
                    "all_gather_gigabytes_per_second": gathered,
                })
            });
            json!({
                "bucket_mebibytes": bucket_mebibytes,
                "summed_gigabytes_per_second": ours.summed,
                "gathered_gigabytes_per_second": ours.gathered,
                "nccl_alone": library_alone,
            })
        };
        json!({
            "device": device,
            "through": match self.way {
                Way::Devices => "devices",
                Way::Memory => "memory",
                Way::Library => "nccl",
                Way::Host => "host",
            },
            "workers": self.workers,
            "processes": self.processes,
            "arena_mebibytes": self.arena_mebibytes,
            "rounds": self.rounds,
            "nccl_alone": self.has_library_alone().then_some(LIBRARY_ALONE),
            "buckets": self.measured.iter().map(row).collect::<Vec<_>>(),
        })
    }

    pub(super) fn lines(&self, device: &str) -> Vec<String> {
        let Self { workers, processes, way, arena_mebibytes: arena, .. } = self;
        let of_processes = match processes {
            1 => String::new(),
            processes => format!(" of {processes} processes"),
        };
        let way = match way {
            Way::Devices => "devices read each other's memory".to_owned(),
            Way::Memory => "threads read each other's memory".to_owned(),
            Way::Library => "NCCL moves parts, and their owners add them".to_owned(),
            Way::Host => {
                let kib = (CHUNK_ELEMENTS * size_of::<f32>()) >> 10;
                format!("through the host, in chunks of {kib} KiB")
            }
        };
        let mut lines = vec![
            format!("{workers} workers{of_processes} on {device}, {arena} MiB each: {way}"),
            "what a worker receives a second, all results compared to the bit:".to_owned(),
        ];
        let (mut heads, mut end) = ("bucket MiB  summed GB/s  gathered GB/s".to_owned(), None);
        if self.has_library_alone() {
            heads += "  NCCL alone: reduce_scatter GB/s  all_gather GB/s";
            end = Some(format!("NCCL alone, by turns with ours: {LIBRARY_ALONE}"));
        }
        lines.push(heads);
        lines.extend(self.measured.iter().map(|row| {
            let Measured { bucket_mebibytes, ours: Rates { summed, gathered }, library_alone } =
                row;
            let ours = format!("{bucket_mebibytes:>10}  {summed:>11.2}  {gathered:>13.2}");
            let library_alone = library_alone
                .map(|Rates { summed, gathered }| format!("  {summed:>31.2}  {gathered:>15.2}"));
            ours + &library_alone.unwrap_or_default()
        }));
        lines.extend(end);
        lines
    }
}
