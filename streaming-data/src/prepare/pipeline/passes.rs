//! Inputs to shards, by one process or by several: one pass, or two where documents are compared with each other first.

use std::ops::ControlFlow;

use super::{Outcome, job::Work};
use crate::prepare::{
    Dedup, DedupReport, DedupSettings, Phase, PrepareError, Progress,
    choose::{
        admit::{Pass, Rules},
        duplicates::{Collector, Verdicts},
    },
    output::Output,
    pipeline,
    together::{ask, compare_together, pack_together},
};

type Report<'a> = dyn FnMut(Progress) -> ControlFlow<()> + 'a;

/// Reads the inputs once, or twice where their documents are compared with each other first.
///
/// # Errors
/// As [`prepare`](super::prepare()).
pub(crate) fn run_passes(
    work: Work<'_>,
    dedup: DedupSettings,
    output: &mut dyn Output,
    progress: &mut Report<'_>,
) -> Result<(Outcome, DedupReport), PrepareError> {
    if dedup.dedup == Dedup::None {
        let outcome = make_shards(&work, output, progress)?;
        return Ok((outcome, DedupReport::default()));
    }
    let with = |pass| Work { rules: Rules { pass, ..work.rules }, ..work };
    let signing = with(Pass::Sign(dedup.dedup));
    let (mut verdicts, first, report) = find_duplicates(&signing, dedup, progress)?;
    let groups = verdicts.groups.take();
    let tokenizing = with(Pass::Tokenize(Some(&verdicts)));
    let mut outcome = make_shards(&tokenizing, output, progress)?;
    // The second pass looks only at kept documents.
    outcome.left_out.excluded = first.left_out.excluded;
    outcome.left_out.filtered.rejected = first.left_out.filtered.rejected;
    outcome.left_out.tally.add(&first.left_out.tally);
    let compared = outcome.left_out.tally.compared();
    outcome.groups = groups.map(|groups| groups.report(compared));
    Ok((outcome, report))
}

/// The pass that compares.
fn find_duplicates(
    work: &Work<'_>,
    dedup: DedupSettings,
    progress: &mut Report<'_>,
) -> Result<(Verdicts, Outcome, DedupReport), PrepareError> {
    if work.peers.is_some() {
        return compare_together(work, dedup, progress);
    }
    let mut collector = Collector::new(dedup, work.rules.reporting);
    let first = pipeline::run(work, None, Some(&mut collector), progress)?;
    let bytes_total = work.inputs.iter().map(|input| input.bytes).sum();
    let position = Progress { phase: Phase::Sorting, bytes_total, ..Progress::default() };
    let verdicts = collector.finish(&mut || ask(progress, position))?;
    let report = verdicts.report();
    Ok((verdicts, first, report))
}

/// The pass that tokenizes.
fn make_shards(
    work: &Work<'_>,
    output: &mut dyn Output,
    progress: &mut Report<'_>,
) -> Result<Outcome, PrepareError> {
    match work.peers {
        Some(_) => pack_together(work, output, progress),
        None => pipeline::run(work, Some(output), None, progress),
    }
}
