//! Assembles a language model from its parts: the tensors of each segment, and the segments that
//! each block uses.

use serde_json::Value;
use tidemill_kernels::Backend;

use super::{BlockList, LanguageModel, Place, Positions, Recompute};
use crate::block::AnyBlock;
use crate::embedding::{Embedding, NewEmbedding};
use crate::head::Head;
use crate::layout::{Passes, Reading};
use crate::norm::{NewNorm, Norm};
use crate::parameter_list::ParameterList;

/// The parts of a language model around its blocks.
#[derive(Clone, Debug)]
pub struct Stem<'a> {
    /// v, tokens of the vocabulary.
    pub vocab_size: usize,
    /// d, the width of the residual stream.
    pub width: usize,
    /// The name of the embedding table in files.
    pub embedding_name: &'a str,
    /// Learned positions, where the model has some.
    pub positions: Option<NewPositions<'a>>,
    /// The last norm.
    pub norm: NewNorm,
    /// The name of the head's table in files; `None` where the head reads the embedding table.
    pub head_name: Option<&'a str>,
    /// The standard deviation of the initial tables.
    pub standard_deviation: f64,
    /// The factor that logits are multiplied by.
    pub logit_scale: f32,
}

/// A table of learned positions.
#[derive(Clone, Copy, Debug)]
pub struct NewPositions<'a> {
    /// Its name in files.
    pub name: &'a str,
    /// How many positions there are.
    pub count: usize,
}

impl<B: Backend> LanguageModel<B> {
    /// The model of `count` blocks between embedding and head. `add_block` receives the index of
    /// each block, adds the block's tensors to the newest segment, which is the block's own, and
    /// returns the block.
    ///
    /// Segments are `embedding`, `positions` where they are learned, `blocks.0` and so on, `norm_f` and, where the head has a
    /// table of its own, `lm_head`.
    pub fn assemble(
        stem: Stem<'_>,
        count: usize,
        config_json: Value,
        mut add_block: impl FnMut(&mut ParameterList, usize) -> Box<dyn AnyBlock<B>>,
    ) -> Self {
        let mut parameters = ParameterList::new();
        let width = stem.width;
        let table = |parameters: &mut ParameterList, name: &str, rows: usize, reading| {
            let standard_deviation = stem.standard_deviation;
            let table = NewEmbedding { name, rows, width, reading, standard_deviation };
            Embedding::add(parameters, table)
        };
        let embedding_segment = parameters.segment("embedding");
        // The head multiplies by its table in activation precision; the embedding looks up its rows
        // in fp32.
        let reading = stem.head_name.map_or(Reading::Both, |_| Reading::Fp32);
        let embedding = table(&mut parameters, stem.embedding_name, stem.vocab_size, reading);
        let positions = stem.positions.map(|NewPositions { name, count }| {
            let segment = parameters.segment("positions");
            (segment, table(&mut parameters, name, count, Reading::Fp32), count)
        });
        let mut blocks = Vec::with_capacity(count);
        let mut block_segments = Vec::with_capacity(count);
        for index in 0..count {
            block_segments.push(parameters.segment(format!("blocks.{index}")));
            blocks.push(add_block(&mut parameters, index));
        }
        let norm_segment = parameters.segment("norm_f");
        let norm = Norm::add(&mut parameters, stem.norm);
        let (head_segment, head_table) = match stem.head_name {
            Some(name) => {
                let segment = parameters.segment("lm_head");
                (segment, table(&mut parameters, name, stem.vocab_size, Reading::Activation).table)
            }
            None => (embedding_segment, embedding.table.clone()),
        };

        let mut embedding_segments = vec![embedding_segment];
        embedding_segments.extend(positions.as_ref().map(|(segment, ..)| *segment));
        let embedding_use = parameters.block("embedding", &embedding_segments);
        parameters.set_use_reading(embedding_use, Reading::Fp32);
        for looked_up in embedding_use..embedding_use + embedding_segments.len() {
            parameters.set_use_passes(looked_up, Passes::Forward);
        }
        let embedding_place =
            Place { segment: embedding_segment, block: 0, use_index: embedding_use };
        let positions = positions.map(|(segment, embedding, count)| Positions {
            embedding,
            count,
            place: Place { segment, block: 0, use_index: embedding_use + 1 },
        });
        let mut block_places = Vec::with_capacity(count);
        for (index, segment) in block_segments.into_iter().enumerate() {
            let block = parameters.layout().blocks().len();
            let use_index = parameters.block(format!("blocks.{index}"), &[segment]);
            block_places.push(Place { segment, block, use_index });
        }
        let head_block = parameters.layout().blocks().len();
        let norm_use = parameters.block("head", &[norm_segment, head_segment]);
        parameters.set_use_reading(norm_use + 1, Reading::Activation);
        Self {
            parameters,
            config_json,
            recompute: Recompute::None,
            embedding,
            embedding_place,
            positions,
            blocks: BlockList::new(blocks),
            block_places,
            head: Head {
                norm,
                table: head_table,
                vocab_size: stem.vocab_size,
                width,
                logit_scale: stem.logit_scale,
                norm_use,
                table_use: norm_use + 1,
            },
            head_segments: [norm_segment, head_segment],
            head_block,
        }
    }
}
