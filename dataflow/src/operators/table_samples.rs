//! Rows of Parquet files as samples of a model: whatever columns they have.

use std::collections::VecDeque;
use std::ops::Range;

use tidemill_model::Sample;
use tidemill_streaming_data::data_set::table::{RowBatch, TableDecoder};

use super::error::GraphError;
use super::requests::Requests;
use super::samples::{SampleSource, Wake};
use crate::cluster::Failure;

/// Makes samples of rows.
type FromRows<S> = Box<dyn FnMut(&RowBatch) -> Result<Vec<S>, Failure>>;

/// The rows of a [`Table`](tidemill_streaming_data::data_set::table::Table) as the samples of a training graph, one of each row, in
/// the canonical order of the decoder's settings.
pub struct TableSamples<S> {
    requests: Requests<RowBatch>,
    from_rows: FromRows<S>,
    /// Samples of the rows that have come, with their positions.
    ready: VecDeque<(u64, S)>,
}

impl<S> TableSamples<S> {
    /// Samples of the rows of `decoder`, which may serve other workers too. `from_rows` makes them of consecutive rows: one of each,
    /// in their order.
    ///
    /// An error of `from_rows` ends the run, and so do more samples or fewer than rows.
    pub fn new(
        decoder: TableDecoder,
        from_rows: impl FnMut(&RowBatch) -> Result<Vec<S>, Failure> + 'static,
    ) -> Self {
        let open =
            move |positions, wake: Wake| decoder.reader_with_wake([positions], move || wake());
        Self {
            requests: Requests::new(open),
            from_rows: Box::new(from_rows),
            ready: VecDeque::new(),
        }
    }
}

impl<S: Sample> SampleSource for TableSamples<S> {
    type Sample = S;

    fn request(&mut self, positions: Range<u64>) {
        self.requests.push(positions);
    }

    fn poll(&mut self) -> Result<Option<(u64, S)>, Failure> {
        while self.ready.is_empty() {
            let Some(batch) = self.requests.poll()? else { break };
            let samples = (self.from_rows)(&batch)?;
            let RowBatch { positions, rows } = batch;
            let (expected, found) = (rows.num_rows(), samples.len());
            if found != expected {
                return Err(GraphError::Rows { positions, expected, found }.into());
            }
            self.ready.extend(positions.zip(samples));
        }
        Ok(self.ready.pop_front())
    }

    fn set_wake(&mut self, wake: Wake) {
        self.requests.set_wake(wake);
    }
}
