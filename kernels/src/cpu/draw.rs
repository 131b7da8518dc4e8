//! A token drawn from each row of logits: the definition, row by row.

use super::rows::{Rows, exactly, exactly_mut};
use super::{Cpu, DeviceStream};
use crate::backend::{Draw, DrawSettings, NO_TOKEN};
use crate::draw as definition;
use crate::error::Result;
use crate::view::{Matrix, Slice, SliceMut};

impl Draw for Cpu {
    fn draw(
        &self,
        stream: &mut DeviceStream,
        tokens: SliceMut<'_, Cpu, u32>,
        logits: Matrix<'_, Cpu, f32>,
        uniforms: Slice<'_, Cpu, f64>,
        scale: f32,
        settings: &DrawSettings,
    ) -> Result<()> {
        const KERNEL: &str = "draw";
        let threads = stream.threads();
        settings.check()?;
        let [rows, columns] = logits.shape();
        let tokens = exactly_mut(KERNEL, "tokens", tokens, rows)?;
        let logits = Rows::new(KERNEL, "logits", logits, rows, columns)?;
        let uniforms = exactly(KERNEL, "uniform numbers", uniforms, rows)?;
        let share = threads.share(rows);
        threads.for_each(tokens.chunks_mut(share).enumerate(), |(part, tokens)| {
            let mut candidates = Vec::new();
            for (row, token) in (part * share..).zip(tokens) {
                let logits = logits.row(row).iter().map(|logit| logit * scale);
                if !logits.clone().all(f32::is_finite) {
                    *token = NO_TOKEN;
                    continue;
                }
                definition::keep_candidates(&mut candidates, logits.map(f64::from), settings);
                *token = definition::draw(&candidates, uniforms[row]);
            }
        });
        Ok(())
    }
}
