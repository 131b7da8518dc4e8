//! The checked shape of attention.

use std::num::NonZeroUsize;

use super::{PADDING, SequenceShape, at_least_one, countable};
use crate::error::{KernelError, Result};

/// The widest head that kernels take.
pub const MOST_HEAD_WIDTH: usize = 256;

/// Causal attention of `heads` heads, `head_width` wide, over each sample by itself.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionShape {
    sequences: SequenceShape,
    heads: usize,
    key_value_heads: usize,
    head_width: usize,
    scale: f32,
    window: Option<NonZeroUsize>,
}

impl AttentionShape {
    /// Attention whose scores are `scale q . k`. A query sees its own position and those before it, of which a `window`
    /// leaves the newest `window`, its own among them.
    ///
    /// # Errors
    /// A size of zero, a head wider than [`MOST_HEAD_WIDTH`], a scale that is not finite, or more elements than can be
    /// counted.
    pub fn new(
        sequences: SequenceShape,
        heads: usize,
        head_width: usize,
        scale: f32,
        window: Option<NonZeroUsize>,
    ) -> Result<Self> {
        at_least_one("attention", "heads", heads)?;
        if !(1..=MOST_HEAD_WIDTH).contains(&head_width) {
            let expected = format!("1 to {MOST_HEAD_WIDTH}");
            return Err(KernelError::shape("attention", "head width", expected, head_width));
        }
        if !scale.is_finite() {
            return Err(KernelError::shape("attention", "scale", "a finite number", scale));
        }
        // Memory of kernels is for positions and head widths rounded up.
        let [t, p] = [sequences.positions(), head_width].map(|size| size.saturating_add(PADDING));
        countable("attention", "elements", &[sequences.samples(), t, heads, p, 3])?;
        Ok(Self { sequences, heads, key_value_heads: heads, head_width, scale, window })
    }

    /// The same with fewer heads of keys and values, each of which several heads of queries share, `h / g` in turn (grouped-query
    /// attention, Ainslie et al., 2023): head i of queries reads head `i g / h`.
    ///
    /// # Errors
    /// A number that does not divide the heads of queries.
    pub fn with_key_value_heads(self, key_value_heads: usize) -> Result<Self> {
        if key_value_heads == 0 || !self.heads.is_multiple_of(key_value_heads) {
            let expected = format!("a divisor of the {} heads of queries", self.heads);
            let what = "heads of keys and values";
            return Err(KernelError::shape("attention", what, expected, key_value_heads));
        }
        Ok(Self { key_value_heads, ..self })
    }

    /// Refuses heads that rotary positions cannot be turned by, and a table of other than whole positions.
    pub(crate) fn check_rotary(self, kernel: &'static str, table_elements: usize) -> Result<()> {
        let p = self.head_width;
        if !p.is_multiple_of(2) {
            return Err(KernelError::shape(kernel, "head width", "an even number", p));
        }
        let positions = self.sequences.positions();
        if !table_elements.is_multiple_of(p) || table_elements / p < positions {
            let expected = format!("{p} elements for each of at least {positions} positions");
            return Err(KernelError::shape(kernel, "table", expected, table_elements));
        }
        Ok(())
    }

    /// b and t.
    pub fn sequences(self) -> SequenceShape {
        self.sequences
    }

    /// h, heads of queries.
    pub fn heads(self) -> usize {
        self.heads
    }

    /// p, the width of a head.
    pub fn head_width(self) -> usize {
        self.head_width
    }

    /// g, heads of keys and values.
    pub fn key_value_heads(self) -> usize {
        self.key_value_heads
    }

    /// h / g, the heads of queries that share one of keys and values.
    pub fn group(self) -> usize {
        self.heads / self.key_value_heads
    }

    /// h p, the columns of queries.
    pub fn width(self) -> usize {
        self.heads * self.head_width
    }

    /// g p, the columns of keys, and of values.
    pub fn key_value_width(self) -> usize {
        self.key_value_heads * self.head_width
    }

    /// The factor of `q . k`.
    pub fn scale(self) -> f32 {
        self.scale
    }

    /// The most positions that a query attends to, its own among them; `None` for all.
    pub fn window(self) -> Option<NonZeroUsize> {
        self.window
    }
}
