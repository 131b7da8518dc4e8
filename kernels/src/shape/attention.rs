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
        // What kernels keep rounds positions and head widths up.
        let [t, p] = [sequences.positions(), head_width].map(|size| size.saturating_add(PADDING));
        countable("attention", "elements", &[sequences.samples(), t, heads, p, 3])?;
        Ok(Self { sequences, heads, head_width, scale, window })
    }

    /// b and t.
    pub fn sequences(self) -> SequenceShape {
        self.sequences
    }

    /// h, heads.
    pub fn heads(self) -> usize {
        self.heads
    }

    /// p, the width of a head.
    pub fn head_width(self) -> usize {
        self.head_width
    }

    /// h p, the columns of queries, keys and values.
    pub fn width(self) -> usize {
        self.heads * self.head_width
    }

    /// The factor of `q . k`.
    pub fn scale(self) -> f32 {
        self.scale
    }

    /// How many positions a query sees at most, its own among them.
    pub fn window(self) -> Option<NonZeroUsize> {
        self.window
    }
}
