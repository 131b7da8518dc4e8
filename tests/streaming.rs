//! A data set as a stream in a timely program: the same for any number of workers, gone on with anywhere, never further
//! ahead than allowed, and a damaged shard is an error at its place.
//!
//! Seen red: with the bound on the read-ahead left out.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::iter::once;
use std::num::NonZeroU64;
use std::ops::Range;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

use tidemill::operators::{StreamData, StreamPlan};
use tidemill::streaming_data::order::{ShuffleOrder, ShuffleSettings};
use tidemill::streaming_data::reader::{Decoder, DecoderSettings, Sample};
use tidemill::streaming_data::{DataSet, Mixture};
use timely::container::CapacityContainerBuilder;
use timely::dataflow::channels::pact::Pipeline;
use timely::dataflow::operators::generic::operator::Operator;
use timely::dataflow::operators::{ConnectLoop, Feedback};

use crate::support::Workbench;

const STEP: u64 = 20;
const READ_AHEAD: u64 = 2;

/// What arrived: step and sample, in order of arrival, or the error.
type Arrived = Vec<Result<(u64, Sample), String>>;

fn decoder(folder: &Path) -> Decoder {
    let shuffle = ShuffleSettings {
        order: ShuffleOrder::Window,
        window_samples: NonZeroU64::new(50).unwrap(),
        seed: 3,
    };
    let mixture = Mixture::of(DataSet::open(folder).unwrap(), shuffle).unwrap();
    Decoder::new(mixture, DecoderSettings::default()).unwrap()
}

/// Streams steps on some workers to an operator that takes its time with each step, and sees that nothing comes too
/// early.
fn stream(decoder: &Decoder, steps: Range<u64>, workers: usize) -> Vec<Arrived> {
    let decoder = decoder.clone();
    let number = |number| NonZeroU64::new(number).unwrap();
    let plan = StreamPlan {
        steps: steps.clone(),
        step_positions: number(STEP),
        read_ahead_steps: number(READ_AHEAD),
    };
    let guards = timely::execute(timely::Config::process(workers), move |worker| {
        let arrived = Rc::new(RefCell::new(Arrived::new()));
        let (kept, first) = (Rc::clone(&arrived), plan.steps.start);
        worker.dataflow::<u64, _, _>(|scope| {
            let (done, progress) = scope.feedback::<Vec<()>>(1);
            let open = |positions, wake: Arc<dyn Fn() + Send + Sync>| {
                decoder.reader_with_wake(positions, move || wake())
            };
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
                            // Steps are let go late, one by one, and only when they are whole.
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
    // More workers than positions: some have nothing.
    assert_eq!(stream(&decoder, 0..2, 25).concat().len() as u64, 2 * STEP);
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
