//! The data set's decoder as the graph's source of samples.

use std::ops::Range;
use std::path::Path;

use tidemill_model::Tokens;
use tidemill_streaming_data::Mixture;
use tidemill_streaming_data::reader::{Decoder, Sample};

use crate::cluster::Failure;
use crate::error::JobError;
use crate::operators::requests::Requests;
use crate::operators::{SampleSource, Wake};

/// Samples of one worker, decoded by its process's [`Decoder`].
pub struct DecodedSamples {
    mixture: Mixture,
    vocab_size: usize,
    requests: Requests<Sample>,
}

impl DecodedSamples {
    /// Samples from `decoder`, which may serve other workers too, for a model of `vocab_size` tokens.
    pub fn new(decoder: Decoder, vocab_size: usize) -> Self {
        let mixture = decoder.mixture().clone();
        let open =
            move |positions, wake: Wake| decoder.reader_with_wake([positions], move || wake());
        Self { mixture, vocab_size, requests: Requests::new(open) }
    }

    /// A data set without an index does not know its vocabulary; the model does.
    fn check(&self, Sample { position, tokens }: Sample) -> Result<(u64, Tokens), JobError> {
        let outside = tokens.iter().find(|&&token| token as usize >= self.vocab_size);
        let Some(&token) = outside else { return Ok((position, tokens)) };
        let (path, row) = origin(&self.mixture, position);
        Err(JobError::Token { path: path.to_owned(), row, token, vocab_size: self.vocab_size })
    }
}

/// The shard of the sample at a position, and its row there.
pub(super) fn origin(mixture: &Mixture, position: u64) -> (&Path, u64) {
    let mixed = mixture.sample_at(position);
    let shard = &mixture.data_set(mixed.part).shards()[mixed.sample.shard];
    (shard.path(), mixed.sample.row)
}

impl SampleSource for DecodedSamples {
    type Sample = Tokens;

    fn request(&mut self, positions: Range<u64>) {
        self.requests.push(positions);
    }

    fn poll(&mut self) -> Result<Option<(u64, Tokens)>, Failure> {
        let sample = self.requests.poll()?;
        Ok(sample.map(|sample| self.check(sample)).transpose()?)
    }

    fn set_wake(&mut self, wake: Wake) {
        self.requests.set_wake(wake);
    }
}
