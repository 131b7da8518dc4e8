//! The likeliest token of each row of logits.

use super::Cpu;
use super::device_stream::ComputeThreads;
use super::rows::{Rows, exactly_mut};
use crate::backend::NO_TOKEN;
use crate::error::Result;
use crate::view::{Matrix, SliceMut};

fn likeliest_of(logits: &[f32], scale: f32) -> u32 {
    let mut best = (NO_TOKEN, f32::NEG_INFINITY);
    for (column, logit) in logits.iter().enumerate() {
        let logit = logit * scale;
        if !logit.is_finite() {
            return NO_TOKEN;
        }
        if logit > best.1 {
            best = (column as u32, logit);
        }
    }
    best.0
}

pub(crate) fn likeliest(
    threads: &ComputeThreads,
    tokens: SliceMut<'_, Cpu, u32>,
    logits: Matrix<'_, Cpu, f32>,
    scale: f32,
) -> Result<()> {
    const KERNEL: &str = "likeliest";
    let [rows, columns] = logits.shape();
    let tokens = exactly_mut(KERNEL, "tokens", tokens, rows)?;
    let logits = Rows::new(KERNEL, "logits", logits, rows, columns)?;
    let share = threads.share(rows);
    threads.for_each(tokens.chunks_mut(share).enumerate(), |(part, tokens)| {
        for (row, token) in (part * share..).zip(tokens) {
            *token = likeliest_of(logits.row(row), scale);
        }
    });
    Ok(())
}
