//! The data set's decoder as the graph's source of samples.

use std::collections::VecDeque;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::task::Poll;

use tidemill_streaming_data::Mixture;
use tidemill_streaming_data::reader::{Decoder, Reader, Sample};

use crate::cluster::Failure;
use crate::error::JobError;
use crate::operators::{SampleSource, Wake};

/// Samples of one worker, decoded by its process's [`Decoder`].
pub struct DecodedSamples {
    decoder: Decoder,
    vocab_size: usize,
    /// One reader for each request that is not exhausted, in order.
    readers: VecDeque<Reader>,
    wake: Arc<OnceLock<Wake>>,
}

impl DecodedSamples {
    /// Samples from `decoder`, which may serve other workers too, for a model of `vocab_size` tokens.
    pub fn new(decoder: Decoder, vocab_size: usize) -> Self {
        Self { decoder, vocab_size, readers: VecDeque::new(), wake: Arc::default() }
    }

    /// A data set without an index does not know its vocabulary; the model does.
    fn check(&self, sample: Sample) -> Result<Sample, JobError> {
        let outside = sample.tokens.iter().find(|&&token| token as usize >= self.vocab_size);
        let Some(&token) = outside else { return Ok(sample) };
        let (path, row) = origin(self.decoder.mixture(), sample.position);
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
    fn request(&mut self, positions: Range<u64>) {
        let wake = Arc::clone(&self.wake);
        let wake = move || {
            if let Some(wake) = wake.get() {
                wake();
            }
        };
        self.readers.push_back(self.decoder.reader_with_wake([positions], wake));
    }

    fn poll(&mut self) -> Result<Option<Sample>, Failure> {
        while let Some(reader) = self.readers.front_mut() {
            match reader.try_next() {
                Poll::Ready(Some(sample)) => return Ok(Some(self.check(sample?)?)),
                Poll::Ready(None) => self.readers.pop_front(),
                Poll::Pending => return Ok(None),
            };
        }
        Ok(None)
    }

    fn set_wake(&mut self, wake: Wake) {
        // The graph sets it once, before it asks for anything.
        let _ = self.wake.set(wake);
    }
}
