//! The measurements of a run, and how they are printed.

use std::time::Instant;

use anyhow::Context;
use tidemill_kernels::backend::KernelTime;
use tidemill_model::Blueprint;

use super::TrainBench;
use crate::batch::BatchPlan;
use crate::cli::Format;
use crate::cli::output::{counted, result_line};
use crate::memory::peak_resident_bytes;
use crate::operators::StepReport;

/// The measurements of a run.
pub(super) struct Measured {
    /// The device of this process, in words.
    pub device: String,
    /// The reports of one warm-up step and the measured ones, and when they came.
    pub reports: Vec<(StepReport, Instant)>,
    /// Memory that the run took of the first worker's device, if that has a memory of its own.
    pub device_memory_bytes: Option<usize>,
    /// Device time of the last step by kernel, where it was asked for, of the first worker's device.
    pub profile: Vec<KernelTime>,
}

/// The measurements, and the settings that they belong to.
pub(super) struct Outcome<'a> {
    pub bench: &'a TrainBench,
    pub cut: &'a BatchPlan,
    pub model: &'a Blueprint,
    /// Workers of all processes.
    pub workers: usize,
    pub processes: usize,
    pub measured: Measured,
}

/// Rates of the measured steps.
struct Rates {
    tokens_per_second: f64,
    step_milliseconds: f64,
    /// Billions of operations a second of the matrix products: 6 operations a parameter and token, forward and backward.
    gigaflops: f64,
    first_loss: f64,
    last_loss: f64,
}

impl Outcome<'_> {
    pub(super) fn print(&self) -> anyhow::Result<()> {
        let rates = self.rates()?;
        match self.bench.format {
            Format::Json => self.print_json(&rates),
            Format::Text => self.print_text(&rates),
        }
    }

    fn rates(&self) -> anyhow::Result<Rates> {
        let reports = &self.measured.reports;
        let (first, started) = reports.first().context("no step was reported")?;
        let (last, ended) = reports.last().context("no step was reported")?;
        let tokens: u64 = reports.iter().skip(1).map(|(report, _)| report.tokens).sum();
        let seconds = (*ended - *started).as_secs_f64();
        let tokens_per_second = tokens as f64 / seconds;
        let parameters = self.model.layout().parameters();
        Ok(Rates {
            tokens_per_second,
            step_milliseconds: seconds * 1e3 / self.bench.steps.get() as f64,
            gigaflops: 6.0 * parameters as f64 * tokens_per_second / 1e9,
            first_loss: first.loss,
            last_loss: last.loss,
        })
    }

    fn print_json(&self, rates: &Rates) -> anyhow::Result<()> {
        let Self { bench, cut, model, workers, processes, measured } = self;
        let kernel = |time: &KernelTime| {
            let KernelTime { kernel, launches, milliseconds } = time;
            serde_json::json!({ "kernel": kernel, "launches": launches, "milliseconds": milliseconds })
        };
        let result = serde_json::json!({
            "tokens_per_second": rates.tokens_per_second,
            "step_milliseconds": rates.step_milliseconds,
            "preset": bench.preset,
            "parameters": model.layout().parameters(),
            "device": measured.device,
            "seq_len": bench.seq_len,
            "samples_per_step": cut.samples_per_step(),
            "lanes": cut.lanes(),
            "grain_samples": cut.grain_samples(),
            "shard": cut.sharding().word(),
            "microbatch_grains": cut.microbatch_grains(),
            "workers": workers,
            "processes": processes,
            "threads": bench.threads,
            "matmul_gigaflops": rates.gigaflops,
            "peak_memory_bytes": peak_resident_bytes(),
            "device_memory_bytes": measured.device_memory_bytes,
            "profile": measured.profile.iter().map(kernel).collect::<Vec<_>>(),
            "first_loss": rates.first_loss,
            "last_loss": rates.last_loss,
        });
        result_line!("{result}")
    }

    fn print_text(&self, rates: &Rates) -> anyhow::Result<()> {
        let Self { bench, cut, workers, processes, measured, .. } = self;
        let Rates { tokens_per_second, gigaflops, .. } = rates;
        // With several processes, numbers of a single process name that process.
        let (of_processes, of_process) = match processes {
            1 => (String::new(), ""),
            processes => (format!(" of {processes} processes"), " of process 0"),
        };
        let of_worker = if *workers == 1 { "" } else { " of worker 0" };
        result_line!(
            "{tokens_per_second:.0} tokens/s: {} with {}{of_processes} on {}, lanes {}, {} of {} a step",
            bench.preset,
            counted(*workers, "worker", "workers"),
            measured.device,
            cut.lanes(),
            counted(cut.samples_per_step(), "sample", "samples"),
            counted(bench.seq_len.get(), "token", "tokens"),
        )?;
        result_line!(
            "its matrix products alone are {gigaflops:.0} GFLOP/s, which bound it: compare the device's peak"
        )?;
        if let Some(bytes) = peak_resident_bytes() {
            result_line!("peak memory{of_process} {:.0} MB", bytes as f64 / 1e6)?;
        }
        if let Some(bytes) = measured.device_memory_bytes {
            result_line!("memory of the device{of_worker} {:.0} MB", bytes as f64 / 1e6)?;
        }
        let total: f64 = measured.profile.iter().map(|time| time.milliseconds).sum();
        if !measured.profile.is_empty() {
            result_line!("the last step on the device{of_worker}, {total:.2} ms:")?;
        }
        for KernelTime { kernel, launches, milliseconds } in &measured.profile {
            let percent = 100.0 * milliseconds / total;
            result_line!("{milliseconds:>10.2} ms {percent:>5.1} % {launches:>7} x {kernel}")?;
        }
        Ok(())
    }
}
