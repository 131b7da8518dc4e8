//! Settings of a run that are allowed and may surprise, in words for the user: each names the consequence and the key that decides.

use tidemill_model::ModelConfig;
use tidemill_streaming_data::Mixture;
use tidemill_streaming_data::order::ShuffleOrder;

/// How `max_seq_len` and the length of samples go together: a model trains on samples as long as they are.
///
/// `written` is the number that the user gave, `model` is a model with new random parameters.
pub(super) fn of_positions(
    model: &ModelConfig,
    written: Option<usize>,
    seq_len: usize,
) -> Option<String> {
    match (model.learned_positions(), written) {
        (Some(most), _) if seq_len < most => Some(format!(
            "samples have {seq_len} tokens and the model has {most} positions: those behind the first {seq_len} are never \
             trained (`prepare --seq-len {most}` makes longer samples, model.max_seq_len = {seq_len} fewer positions)"
        )),
        (None, Some(written)) if seq_len != written => Some(format!(
            "model.max_seq_len is {written} and samples have {seq_len} tokens: the run trains on all {seq_len}, and \
             max_seq_len only stands in config.json (`prepare --seq-len {written}` makes samples of that length)"
        )),
        _ => None,
    }
}

/// How well windows mix a data set, where a batch is worth less than half as many samples drawn from all of it.
///
/// Windows lie over whole shards in a permuted order. A window of w samples over shards of s has samples of `k = max(1, w / s)`
/// places, and the mean over a batch of B of a quantity that drifts along the stored order has a variance of about `1 / B + 1 / k` of that of one
/// sample: the batch is worth `1 / (1 / B + 1 / k)` samples, as
/// [`OrderStatistics`](tidemill_streaming_data::order::statistics::OrderStatistics) measures.
pub(super) fn of_order(data: &Mixture, samples_per_step: usize) -> Option<String> {
    data.parts().iter().enumerate().find_map(|(part, mixed)| {
        let settings = data.order(part).settings();
        let (samples, window) = (mixed.data_set.samples(), settings.window_samples.get());
        if settings.order != ShuffleOrder::Window || window >= samples {
            return None;
        }
        let shard_samples = samples as f64 / mixed.data_set.shards().len() as f64;
        let places = (window as f64 / shard_samples).max(1.0);
        let batch = samples_per_step as f64;
        let worth = 1.0 / (1.0 / batch + 1.0 / places);
        (2.0 * worth < batch).then(|| {
            format!(
                "steps take their samples from {window} neighbours at a time, of {samples}: where a data set lies in the order of its \
                 sources, a run goes from source to source. A larger data.window_samples or data.shuffle = \"full\" mixes more \
                 (`tidemill inspect --order` compares them)"
            )
        })
    })
}
