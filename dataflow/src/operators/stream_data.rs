//! A data set, or rows of any columns, as a stream in any timely program.
//!
//! Training has its own way in ([`samples`](super::samples)); this is for everything else: counting, filtering,
//! embedding, a model of your own. The rows of a step are cut among the workers in canonical order, so the rows of a
//! step depend only on the data and the settings: not on the number of workers, and not on where the program
//! was started again.

use std::num::NonZeroU64;
use std::ops::Range;
use std::sync::Arc;
use std::task::Poll;

use tidemill_streaming_data::DataError;
use tidemill_streaming_data::data_set::table::RowBatch;
use tidemill_streaming_data::reader::{Reader, Sample};
use timely::container::CapacityContainerBuilder;
use timely::dataflow::channels::pact::Pipeline;
use timely::dataflow::operators::generic::OutputBuilder;
use timely::dataflow::operators::generic::builder_rc::OperatorBuilder;
use timely::dataflow::{Scope, StreamVec};
use timely::progress::Antichain;

use super::Wake;

/// An item that has a place in the canonical order.
pub trait Positioned {
    /// Its first position.
    fn position(&self) -> u64;
}

impl Positioned for Sample {
    fn position(&self) -> u64 {
        self.position
    }
}

impl Positioned for RowBatch {
    fn position(&self) -> u64 {
        self.positions.start
    }
}

/// Which positions of the endless canonical order are streamed, and how far ahead. Step s holds the positions
/// `[s n, (s + 1) n)`; each worker reads a consecutive part of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamPlan {
    /// The steps that are streamed. To go on after an earlier run, begin with the first step that was not done.
    pub steps: Range<u64>,
    /// Positions of a step, n: samples or rows.
    pub step_positions: NonZeroU64,
    /// Steps that may be in the dataflow beyond the last one that is done.
    pub read_ahead_steps: NonZeroU64,
}

impl StreamPlan {
    /// The positions of a step that a worker reads; those of worker 0, 1 ... one after the other are the step's.
    pub fn positions(&self, step: u64, worker: usize, workers: usize) -> Range<u64> {
        let n = self.step_positions.get();
        let cut = |part: usize| (u128::from(n) * part as u128 / workers as u128) as u64;
        step * n + cut(worker)..step * n + cut(worker + 1)
    }

    /// The positions of a worker in all steps: none at all, and not empty ranges without end, where there are more workers
    /// than positions in a step.
    fn worker_positions(
        &self,
        worker: usize,
        workers: usize,
    ) -> impl Iterator<Item = Range<u64>> + Send + 'static {
        let plan = self.clone();
        let steps = match plan.positions(0, worker, workers).is_empty() {
            true => 0..0,
            false => plan.steps.clone(),
        };
        steps.map(move |step| plan.positions(step, worker, workers))
    }
}

/// The positions of a worker, a range for each step: the plan of its reader.
pub type WorkerPositions = Box<dyn Iterator<Item = Range<u64>> + Send>;

/// Items, or why they end.
pub type StreamedResult<T> = Result<T, Arc<DataError>>;

/// A source of samples or rows.
pub trait StreamData<'scope> {
    /// This worker's part of each step.
    ///
    /// `open` makes the reader, of a decoder that the workers of a process best share, for the positions that it is
    /// given and with the wake that it is given:
    /// `|positions, wake| decoder.reader_with_wake(positions, move || wake())`.
    ///
    /// # Contract
    /// - Output: items in canonical order at the timestamps of their steps, from the first step of the plan to the
    ///   last. An error is the last item at its place; after it the stream ends.
    /// - Input: nothing of `progress` is read but its frontier, which says which steps are done: make it of
    ///   `scope.feedback(1)` and close the loop behind whatever shall bound the stream. It has no path to the output.
    /// - Memory: items of at most `read_ahead_steps` steps that are not done are in the dataflow. Beyond that the
    ///   reader decodes ahead within the memory of its decoder.
    /// - Never blocks: threads of the decoder read, and wake this operator.
    /// - Pact: items stay on their worker.
    ///
    /// # Example
    /// ```
    /// # use std::num::{NonZeroU64, NonZeroUsize};
    /// # use std::ops::ControlFlow;
    /// # use tidemill::streaming_data::prepare::{ByteTokenizer, PrepareSettings, prepare};
    /// use tidemill::operators::{StreamData, StreamPlan, Wake};
    /// use tidemill::streaming_data::order::{ShuffleOrder, ShuffleSettings};
    /// use tidemill::streaming_data::reader::{Decoder, DecoderSettings};
    /// use tidemill::streaming_data::{DataSet, Mixture};
    /// use timely::dataflow::operators::vec::Map;
    /// use timely::dataflow::operators::{ConnectLoop, Feedback, Inspect};
    ///
    /// # let folder = tempfile::tempdir()?;
    /// # let (text, data) = (folder.path().join("text.txt"), folder.path().join("data"));
    /// # std::fs::write(&text, "The tide turns the mill.\n".repeat(40))?;
    /// # let seq_len = NonZeroUsize::new(8).unwrap();
    /// # let settings = PrepareSettings::new(vec![text], data.clone(), seq_len);
    /// # prepare(&settings, &ByteTokenizer, &mut |_| ControlFlow::Continue(()))?;
    /// # let window_samples = NonZeroU64::new(64).unwrap();
    /// let shuffle = ShuffleSettings { order: ShuffleOrder::Window, window_samples, seed: 17 };
    /// let mixture = Mixture::of(DataSet::open(&data)?, shuffle)?;
    /// // The workers of a process share it.
    /// let decoder = Decoder::new(mixture, DecoderSettings::default())?;
    /// let plan = StreamPlan {
    ///     steps: 0..3,
    ///     step_positions: NonZeroU64::new(6).unwrap(),
    ///     read_ahead_steps: NonZeroU64::new(1).unwrap(),
    /// };
    /// let workers = timely::execute(timely::Config::process(2), move |worker| {
    ///     let (sender, positions) = std::sync::mpsc::channel();
    ///     worker.dataflow::<u64, _, _>(|scope| {
    ///         let (done, progress) = scope.feedback::<Vec<()>>(1);
    ///         let open = |positions, wake: Wake| {
    ///             decoder.reader_with_wake(positions, move || wake())
    ///         };
    ///         scope
    ///             .stream_data(open, progress, &plan)
    ///             .inspect_time(move |step, sample| {
    ///                 let sample = sample.as_ref().expect("a data set that can be read");
    ///                 sender.send((*step, sample.position)).unwrap();
    ///             })
    ///             // The step is done: the source may read the next.
    ///             .flat_map(|_| None)
    ///             .connect_loop(done);
    ///     });
    ///     while worker.step_or_park(None) {}
    ///     positions.iter().collect::<Vec<(u64, u64)>>()
    /// })?;
    /// let mut positions = Vec::new();
    /// for of_worker in workers.join() {
    ///     positions.push(of_worker?);
    /// }
    /// // Each worker has one half of each step.
    /// let first = [(0, 0), (0, 1), (0, 2), (1, 6), (1, 7), (1, 8), (2, 12), (2, 13), (2, 14)];
    /// assert_eq!(positions[0], first);
    /// assert_eq!(positions[1], first.map(|(step, position)| (step, position + 3)));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    fn stream_data<T: Positioned + Clone + 'static, P: Clone + 'static>(
        self,
        open: impl FnOnce(WorkerPositions, Wake) -> Reader<T>,
        progress: StreamVec<'scope, u64, P>,
        plan: &StreamPlan,
    ) -> StreamVec<'scope, u64, StreamedResult<T>>;
}

impl<'scope> StreamData<'scope> for Scope<'scope, u64> {
    fn stream_data<T: Positioned + Clone + 'static, P: Clone + 'static>(
        self,
        open: impl FnOnce(WorkerPositions, Wake) -> Reader<T>,
        progress: StreamVec<'scope, u64, P>,
        plan: &StreamPlan,
    ) -> StreamVec<'scope, u64, StreamedResult<T>> {
        let mut builder = OperatorBuilder::new("StreamData".to_owned(), self);
        let (output, items) = builder.new_output::<Vec<StreamedResult<T>>>();
        let mut output = OutputBuilder::<_, CapacityContainerBuilder<Vec<_>>>::from(output);
        let mut progress =
            builder.new_input_connection(progress, Pipeline, [(0, Antichain::new())]);
        let wake = super::wake(self, &builder.operator_info());
        let (worker, workers) = (self.index(), self.peers());
        let positions = plan.worker_positions(worker, workers);
        let mut reader = Some(open(Box::new(positions), wake));
        let (steps, n) = (plan.steps.clone(), plan.step_positions.get());
        let read_ahead = plan.read_ahead_steps.get();
        let mut waiting: Option<T> = None;
        builder.build(move |mut capabilities| {
            let mut capability = capabilities.pop();
            move |frontiers| {
                progress.for_each(|_time, items| items.clear());
                // The loop adds one to the steps that are in it. Nothing has been in it before the first of the plan.
                let in_loop = frontiers[0].frontier().iter().next().copied();
                let done =
                    in_loop.map_or(steps.end, |time| time.saturating_sub(1)).max(steps.start);
                let bound = steps.end.min(done.saturating_add(read_ahead));
                let mut output = output.activate();
                // Of the step that is held: a session ends its message, and a message has room for many items.
                let mut ready = Vec::new();
                while let (Some(from), Some(held)) = (reader.as_mut(), capability.as_mut()) {
                    let next = match waiting.take() {
                        Some(item) => Poll::Ready(Some(Ok(item))),
                        None => from.try_next(),
                    };
                    let item = match next {
                        Poll::Ready(Some(item)) => item,
                        Poll::Ready(None) => {
                            reader = None;
                            break;
                        }
                        Poll::Pending => break,
                    };
                    match item {
                        Ok(item) => {
                            let step = item.position() / n;
                            if step > *held.time() {
                                output.session(&*held).give_iterator(ready.drain(..));
                                held.downgrade(&step);
                            }
                            if step >= bound {
                                // The frontier of the loop will have it go on.
                                waiting = Some(item);
                                break;
                            }
                            ready.push(Ok(item));
                        }
                        Err(error) => {
                            ready.push(Err(Arc::new(error)));
                            reader = None;
                        }
                    }
                }
                if let Some(held) = &capability {
                    output.session(held).give_iterator(ready.into_iter());
                }
                if reader.is_none() {
                    capability = None;
                }
            }
        });
        items
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_of_the_workers_are_the_step() {
        let plan = StreamPlan {
            steps: 3..9,
            step_positions: NonZeroU64::new(10).unwrap(),
            read_ahead_steps: NonZeroU64::MIN,
        };
        for workers in [1, 2, 3, 7, 10, 13] {
            let mut next = 40;
            for worker in 0..workers {
                let part = plan.positions(4, worker, workers);
                assert_eq!(part.start, next);
                next = part.end;
            }
            assert_eq!(next, 50);
        }
    }

    #[test]
    fn a_worker_without_positions_has_no_plan() {
        let number = |number| NonZeroU64::new(number).unwrap();
        let plan = StreamPlan {
            steps: 3..u64::MAX / 20,
            step_positions: number(20),
            read_ahead_steps: number(2),
        };
        for workers in [1, 7, 20, 25] {
            let firsts = (0..workers).filter_map(|it| plan.worker_positions(it, workers).next());
            assert!(firsts.flatten().eq(60..80), "{workers} workers");
        }
    }
}
