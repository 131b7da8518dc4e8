//! The trait of a model family's config, and the checks of sizes that families share.
//!
//! [`ModelConfig`](crate::ModelConfig) is a config of any family, as a folder or a `[model]` table names it.

use tidemill_kernels::Backend;

use crate::error::{ModelError, Result};
use crate::language_model::LanguageModel;

/// The config of a model family: it builds the model, and states its sizes and special tokens.
pub trait Family {
    /// Builds the model of these sizes, on any backend.
    ///
    /// # Errors
    /// Sizes that no model can have.
    fn build<B: Backend>(&self) -> Result<LanguageModel<B>>
    where
        Self: Sized;

    /// v, the tokens of the vocabulary.
    fn vocab_size(&self) -> usize;

    /// d, the width of the residual stream.
    fn d_model(&self) -> usize;

    /// The number of blocks.
    fn n_layers(&self) -> usize;

    /// The special tokens that model files name for generation.
    fn special_tokens(&self) -> SpecialTokens;

    /// [`special_tokens`](Self::special_tokens) as a reference that can be written.
    fn special_tokens_mut(&mut self) -> &mut SpecialTokens;
}

impl<B: Backend> LanguageModel<B> {
    /// Builds the model of `config`.
    ///
    /// # Errors
    /// Sizes that no model can have.
    pub fn new(config: &impl Family) -> Result<Self> {
        config.build()
    }
}

/// Tokens of a vocabulary that have a meaning of their own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpecialTokens {
    /// Begins a document.
    pub bos: Option<u32>,
    /// Ends a document.
    pub eos: Option<u32>,
    /// Fills short rows.
    pub pad: Option<u32>,
}

/// The plain methods of [`Family`] for a config with fields of these names.
macro_rules! family_sizes {
    ($($sizes:ident)?) => {
        fn vocab_size(&self) -> usize {
            self.$($sizes.)?vocab_size
        }

        fn d_model(&self) -> usize {
            self.$($sizes.)?d_model
        }

        fn n_layers(&self) -> usize {
            self.$($sizes.)?n_layers
        }

        fn special_tokens(&self) -> crate::family::SpecialTokens {
            self.$($sizes.)?special_tokens
        }

        fn special_tokens_mut(&mut self) -> &mut crate::family::SpecialTokens {
            &mut self.$($sizes.)?special_tokens
        }
    };
}
pub(crate) use family_sizes;

/// The shortest list whose repetition begins with all of `items`.
pub(crate) fn period<T: PartialEq>(items: &[T]) -> &[T] {
    let repeats = |length: &usize| (0..items.len()).all(|i| items[i] == items[i % length]);
    let length = (1..=items.len()).find(repeats).unwrap_or_default();
    &items[..length]
}

/// Names the first of `sizes` that is out of its bounds.
pub(crate) fn check_sizes(sizes: &[(&str, usize, std::ops::RangeInclusive<usize>)]) -> Result<()> {
    for (key, found, allowed) in sizes {
        if !allowed.contains(found) {
            let expected = format!("{} to {}", allowed.start(), allowed.end());
            return Err(ModelError::config(*key, expected, found));
        }
    }
    Ok(())
}

/// Refuses an `eps` that makes no norm.
pub(crate) fn check_norm_eps(eps: f64) -> Result<()> {
    // Norms compute in fp32.
    if !((eps as f32).is_finite() && eps as f32 > 0.0) {
        return Err(ModelError::config("norm_eps", "a number above 0, in fp32", eps));
    }
    Ok(())
}

/// The number of heads for `d_model` columns that keeps heads as wide as those of a model of `like`
/// columns and heads, or nearly so, with widths that are a multiple of `multiple` columns. The
/// number of heads stays the same where that is possible.
pub(crate) fn heads_like(like: (usize, usize), d_model: usize, multiple: usize) -> usize {
    let (like_d_model, like_heads) = like;
    if head_width(d_model, like_heads).is_ok_and(|width| width.is_multiple_of(multiple)) {
        return like_heads;
    }
    let width = like_d_model / like_heads.max(1);
    let widths = (1..=tidemill_kernels::shape::MOST_HEAD_WIDTH.min(d_model))
        .filter(|width| d_model.is_multiple_of(*width) && width.is_multiple_of(multiple));
    let nearest = widths.min_by_key(|candidate| candidate.abs_diff(width));
    nearest.map_or(like_heads, |width| d_model / width)
}

/// The keys of a file for the number of heads and for the width that they share.
#[derive(Clone, Copy)]
pub(crate) struct HeadKeys {
    pub heads: &'static str,
    pub width: &'static str,
}

/// The width of a head of `n_heads` that share `d_model`.
pub(crate) fn head_width(d_model: usize, n_heads: usize) -> Result<usize> {
    head_width_of(HeadKeys { heads: "n_heads", width: "d_model" }, d_model, n_heads)
}

/// [`head_width`], with errors that use the key names of a file.
pub(crate) fn head_width_of(keys: HeadKeys, d_model: usize, n_heads: usize) -> Result<usize> {
    const MOST: usize = tidemill_kernels::shape::MOST_HEAD_WIDTH;
    let HeadKeys { heads, width } = keys;
    if n_heads == 0 || !d_model.is_multiple_of(n_heads) {
        let expected = format!("a divisor of {width}, which is {d_model}");
        return Err(ModelError::config(heads, expected, n_heads));
    }
    let columns = d_model / n_heads;
    if columns > MOST {
        let expected = format!("heads of at most {MOST} columns, of a {width} of {d_model}");
        return Err(ModelError::config(heads, expected, n_heads));
    }
    Ok(columns)
}
