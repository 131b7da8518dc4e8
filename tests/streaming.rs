//! A data set as a stream in a timely program: the same for any number of workers, resumed
//! anywhere, with a bounded read-ahead; a damaged shard is an error at its place.
//!
//! Seen red: with the bound on the read-ahead left out.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::iter::once;
use std::num::{NonZeroU64, NonZeroUsize};
use std::ops::Range;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

use arrow_array::cast::AsArray;
use arrow_array::types::Int32Type;
use tidemill::operators::{Positioned, StreamData, StreamPlan, WorkerPositions};
use tidemill::streaming_data::data_set::table::{
    Columns, RowBatch, Table, TableDecoder, TableSettings,
};
use tidemill::streaming_data::order::{ShuffleOrder, ShuffleSettings};
use tidemill::streaming_data::reader::{Decoder, DecoderSettings, Reader, Sample};
use tidemill::streaming_data::{DataSet, DataSettings, Mixture};
use timely::container::CapacityContainerBuilder;
use timely::dataflow::channels::pact::Pipeline;
use timely::dataflow::operators::generic::operator::Operator;
use timely::dataflow::operators::{ConnectLoop, Feedback};

use crate::support::Workbench;

const STEP: u64 = 20;
const READ_AHEAD: u64 = 2;

/// The arrivals: step and sample (or rows), in order of arrival, or the error.
type Arrived<T = Sample> = Vec<Result<(u64, T), String>>;

fn decoder(folder: &Path) -> Decoder {
    let shuffle = ShuffleSettings {
        order: ShuffleOrder::Window,
        window_samples: NonZeroU64::new(50).unwrap(),
        seed: 3,
    };
    let mixture = Mixture::of(DataSet::open(folder).unwrap(), shuffle).unwrap();
    Decoder::new(mixture, DecoderSettings::default()).unwrap()
}

/// Streams steps of samples.
fn stream(decoder: &Decoder, steps: Range<u64>, workers: usize) -> Vec<Arrived> {
    let decoder = decoder.clone();
    let open = move |positions: WorkerPositions, wake: Arc<dyn Fn() + Send + Sync>| {
        decoder.reader_with_wake(positions, move || wake())
    };
    stream_any(open, steps, workers)
}

/// Streams steps on some workers to an operator that is slow with each step, and checks that
/// nothing arrives too early.
fn stream_any<T, O>(open: O, steps: Range<u64>, workers: usize) -> Vec<Arrived<T>>
where
    T: Positioned + Clone + Send + 'static,
    O: Fn(WorkerPositions, Arc<dyn Fn() + Send + Sync>) -> Reader<T>
        + Clone
        + Send
        + Sync
        + 'static,
{
    let number = |number| NonZeroU64::new(number).unwrap();
    let plan = StreamPlan {
        steps: steps.clone(),
        step_positions: number(STEP),
        read_ahead_steps: number(READ_AHEAD),
    };
    let guards = timely::execute(timely::Config::process(workers), move |worker| {
        let arrived = Rc::new(RefCell::new(Arrived::new()));
        let (kept, first, open) = (Rc::clone(&arrived), plan.steps.start, open.clone());
        worker.dataflow::<u64, _, _>(|scope| {
            let (done, progress) = scope.feedback::<Vec<()>>(1);
            scope
                .stream_data(open, progress, &plan)
                .unary_frontier::<CapacityContainerBuilder<Vec<()>>, _, _, _>(
                    Pipeline,
                    "Slow",
                    move |_capability, info| {
                        let activator = scope.worker().activator_for(info.address);
                        let (mut held, mut done, mut turns) = (VecDeque::new(), first, 0);
                        move |(input, frontier), _output| {
                            input.for_each(|time, items| {
                                let step = *time.time();
                                assert!(step < done + READ_AHEAD, "step {step}, {done} are done");
                                if held.back().is_none_or(|(last, _)| *last != step) {
                                    held.push_back((step, time.retain(0)));
                                }
                                for item in items.drain(..) {
                                    let item = item.map(|sample| (step, sample));
                                    kept.borrow_mut().push(item.map_err(|error| error.to_string()));
                                }
                            });
                            turns += 1;
                            let step = held.front().map(|(step, _)| *step);
                            // Steps are released late, one by one, and only once they are complete.
                            if let Some(step) = step.filter(|step| !frontier.less_equal(step)) {
                                if turns % 7 == 0 {
                                    held.pop_front();
                                    done = step + 1;
                                }
                                activator.activate();
                            }
                        }
                    },
                )
                .connect_loop(done);
        });
        while worker.step_or_park(None) {}
        arrived.take()
    });
    guards.unwrap().join().into_iter().map(Result::unwrap).collect()
}

#[test]
fn steps_are_the_same_for_any_workers_and_from_any_start() {
    let bench = Workbench::new();
    let decoder = decoder(&bench.path("data"));
    let expected: Vec<Sample> = decoder.reader(once(0..12 * STEP)).map(Result::unwrap).collect();
    for workers in [1, 2, 3, 7] {
        let per_worker = stream(&decoder, 0..12, workers);
        let mut samples = Vec::new();
        for arrived in per_worker {
            let arrived: Vec<_> = arrived.into_iter().map(Result::unwrap).collect();
            assert!(arrived.is_sorted_by_key(|(step, sample)| (*step, sample.position)));
            assert!(arrived.iter().all(|(step, sample)| *step == sample.position / STEP));
            samples.extend(arrived.into_iter().map(|(_, sample)| sample));
        }
        samples.sort_by_key(|sample| sample.position);
        assert_eq!(samples, expected, "{workers} workers");
    }
    let from: Arrived = stream(&decoder, 5..12, 2).into_iter().flatten().collect();
    let mut from: Vec<Sample> = from.into_iter().map(|item| item.unwrap().1).collect();
    from.sort_by_key(|sample| sample.position);
    assert_eq!(from, expected[5 * STEP as usize..], "gone on with");
    assert!(stream(&decoder, 7..7, 2).concat().is_empty(), "no steps");
    // More workers than positions: some have none.
    assert_eq!(stream(&decoder, 0..2, 25).concat().len() as u64, 2 * STEP);
}

/// A worker that never has samples ends at once, and does not delay the others.
#[test]
fn workers_without_positions_do_not_hold_up_a_long_plan() {
    let bench = Workbench::new();
    let decoder = decoder(&bench.path("data"));
    assert_eq!(stream(&decoder, 0..1 << 9, 25).concat().len() as u64, STEP << 9);
}

#[test]
fn rows_of_any_columns_come_like_samples() {
    let bench = Workbench::new();
    let shuffle = decoder(&bench.path("data")).mixture().order(0).settings();
    let table = Table::open(bench.path("data"), &Columns::All, &DataSettings::default()).unwrap();
    let batch_rows = NonZeroUsize::new(3).unwrap();
    let settings = TableSettings { batch_rows, ..TableSettings::default() };
    let decoder = TableDecoder::new(&table, shuffle, settings).unwrap();
    let row_tokens = |rows: &RowBatch| -> Vec<(u64, Vec<i32>)> {
        let lists = rows.rows.column(0).as_fixed_size_list();
        let row = |at| lists.value(at).as_primitive::<Int32Type>().values().to_vec();
        rows.positions.clone().zip((0..rows.rows.num_rows()).map(row)).collect()
    };
    let read = decoder.reader(once(0..8 * STEP)).map(Result::unwrap);
    let expected: Vec<_> = read.flat_map(|rows| row_tokens(&rows)).collect();
    for workers in [1, 2, 5] {
        let decoder = decoder.clone();
        let open = move |positions: WorkerPositions, wake: Arc<dyn Fn() + Send + Sync>| {
            decoder.reader_with_wake(positions, move || wake())
        };
        let arrived: Arrived<RowBatch> = stream_any(open, 0..8, workers).concat();
        let mut rows = Vec::new();
        for item in arrived {
            let (step, batch) = item.unwrap();
            assert!(batch.positions.clone().all(|position| position / STEP == step));
            rows.extend(row_tokens(&batch));
        }
        rows.sort_by_key(|(position, _)| *position);
        assert_eq!(rows, expected, "{workers} workers");
    }
}

#[test]
fn a_damaged_shard_is_an_error_at_its_place_and_the_end() {
    let bench = Workbench::new();
    let decoder = decoder(&bench.path("data"));
    let shard = decoder.mixture().data_set(0).shards()[0].path().to_owned();
    let mut bytes = std::fs::read(&shard).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&shard, bytes).unwrap();
    let arrived = stream(&decoder, 0..40, 1).concat();
    let (last, before) = arrived.split_last().unwrap();
    assert!(before.iter().all(Result::is_ok));
    assert!(last.as_ref().unwrap_err().contains("is damaged"), "{last:?}");
}
