//! The likeliest token of each row of logits.

use super::rows::{Rows, exactly_mut};
use super::{Cpu, DeviceStream};
use crate::backend::{Likeliest, NO_TOKEN};
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

impl Likeliest for Cpu {
    fn likeliest(
        &self,
        stream: &mut DeviceStream,
        tokens: SliceMut<'_, Cpu, u32>,
        logits: Matrix<'_, Cpu, f32>,
        scale: f32,
    ) -> Result<()> {
        const KERNEL: &str = "likeliest";
        let threads = stream.threads();
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

    fn likeliest_of_activations(
        &self,
        stream: &mut DeviceStream,
        tokens: SliceMut<'_, Self, u32>,
        logits: Matrix<'_, Self, f32>,
        scale: f32,
    ) -> Result<()> {
        self.likeliest(stream, tokens, logits, scale)
    }
}
