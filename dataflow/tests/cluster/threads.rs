//! Failures among the threads of one process, and among processes without anyone dying.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;

use tidemill::cluster::{
    Abort, Actor, ClusterError, ClusterSettings, ExitClass, Failure, WorkerContext, execute,
};
use timely::dataflow::operators::vec::Map;
use timely::dataflow::operators::{Exchange, Input, Inspect, Probe, ToStream};

use crate::ring::{cluster, ring, ring_with_fate, settings, soon, with_abort};

#[test]
fn a_panic_in_an_operator_ends_every_thread() {
    let work = ring_with_fate(1, || panic!("the {} is broken", "operator"));
    let error = soon(|| execute(ClusterSettings::workers(3), work)).unwrap_err();
    assert_eq!(error.to_string(), "worker 1 panicked: the operator is broken");
    assert_eq!(error.exit_class(), ExitClass::Restart);
}

#[test]
fn a_panic_on_the_only_thread_is_an_error_too() {
    let work = ring_with_fate(0, || panic!("alone"));
    let error = soon(|| execute(ClusterSettings::workers(1), work)).unwrap_err();
    assert_eq!(error.to_string(), "worker 0 panicked: alone");
}

#[test]
fn an_error_of_one_worker_ends_every_thread() {
    let work = |context: &mut WorkerContext<'_>| -> Result<(), Failure> {
        ring(context, |_| {});
        if context.index() == 2 {
            for _ in 0..20 {
                context.step_or_park()?;
            }
            let error = std::io::Error::other("row 7 is outside the vocabulary");
            return Err(Failure::fix_input(error));
        }
        Ok(context.run_until_done()?)
    };
    let error = soon(|| execute(ClusterSettings::workers(3), work)).unwrap_err();
    let ClusterError::Failed { actor, exit_class, cause } = &error else { panic!("{error:?}") };
    assert_eq!((actor, exit_class), (&Actor::Worker(2), &ExitClass::FixInput));
    assert!(cause.downcast_ref::<std::io::Error>().is_some(), "the caller gets its own error back");
    assert_eq!(error.with_causes(), "worker 2 failed: row 7 is outside the vocabulary");
}

#[test]
fn workers_that_wait_for_ever_are_woken() {
    let abort = Abort::new();
    let (ready, waiting) = mpsc::channel();
    let outside = abort.clone();
    let culprit = std::thread::spawn(move || {
        (0..3).for_each(|_| waiting.recv().unwrap());
        outside.fail(Actor::Thread("test".into()), Failure::fix_input("enough"));
    });
    let error = soon(|| {
        with_abort(3, &abort, move |context| {
            // An input that is never closed: this dataflow is never complete.
            let _input = context.dataflow::<u64, _, _>(|scope| {
                let (input, stream) = scope.new_input::<Vec<u64>>();
                stream.probe();
                input
            });
            ready.send(()).map_err(Failure::restart)?;
            Ok(context.run_until_done()?)
        })
    });
    culprit.join().unwrap();
    assert_eq!(error.unwrap_err().with_causes(), "thread test failed: enough");
}

#[test]
fn a_panic_in_a_guarded_thread_ends_the_run_with_its_message() {
    let error = soon(|| {
        execute(ClusterSettings::workers(2), |context| {
            if context.index() == 0 {
                context.abort().guard_thread("decode", || panic!("bad shard"))?;
            }
            ring(context, |_| {});
            Ok(context.run_until_done()?)
        })
    });
    assert_eq!(error.unwrap_err().to_string(), "thread decode panicked: bad shard");
}

/// Sums 0..1000 over all workers' exchange: traffic between all of them, and a result each.
pub fn exchange_sums(context: &mut WorkerContext<'_>) -> Result<u64, Failure> {
    let (sender, receiver) = mpsc::channel();
    let numbers = if context.index() == 0 { 0..1000u64 } else { 0..0 };
    context.dataflow::<u64, _, _>(|scope| {
        numbers
            .to_stream(scope)
            .container::<Vec<_>>()
            .exchange(|number: &u64| *number)
            .inspect(move |number| sender.send(*number).unwrap());
    });
    context.run_until_done()?;
    Ok(receiver.iter().sum())
}

#[test]
fn runs_in_sequence_and_side_by_side_return_their_results() {
    let whole = 999 * 1000 / 2;
    for _ in 0..2 {
        let sums = execute(ClusterSettings::workers(3), exchange_sums).unwrap();
        assert_eq!((sums.len(), sums.iter().sum::<u64>()), (3, whole));
    }
    let failing = std::thread::spawn(|| {
        execute(ClusterSettings::workers(2), ring_with_fate(0, || panic!("not yours")))
    });
    let runs: Vec<_> = (1..=3)
        .map(|threads| {
            std::thread::spawn(move || execute(ClusterSettings::workers(threads), exchange_sums))
        })
        .collect();
    for run in runs {
        assert_eq!(run.join().unwrap().unwrap().iter().sum::<u64>(), whole);
    }
    assert!(failing.join().unwrap().is_err());
}

#[test]
fn a_cluster_completes_and_can_be_run_again() {
    for (processes, threads) in [(3, 2), (2, 1)] {
        let results = soon(|| cluster(settings(processes, threads), exchange_sums));
        let sums: Vec<u64> = results.into_iter().flat_map(Result::unwrap).collect();
        assert_eq!(sums.len(), processes * threads);
        assert_eq!(sums.iter().sum::<u64>(), 999 * 1000 / 2);
        assert!(sums.iter().all(|&sum| sum > 0), "every worker had a part: {sums:?}");
    }
}

#[test]
fn a_panic_ends_every_process_with_the_same_message() {
    let work = ring_with_fate(3, || panic!("the operator is broken"));
    let mut results = soon(|| cluster(settings(2, 2), work)).into_iter().map(Result::unwrap_err);
    let (other, origin) = (results.next().unwrap(), results.next().unwrap());
    assert_eq!(origin.to_string(), "worker 3 panicked: the operator is broken");
    let ClusterError::Reported { peer, exit_class, message } = other else { panic!("{other:?}") };
    assert_eq!((peer.process, exit_class), (1, ExitClass::Restart));
    assert_eq!(message, origin.to_string());
}

#[test]
fn an_error_keeps_its_class_on_the_way_to_the_peers() {
    let wrong_input = |context: &mut WorkerContext<'_>| -> Result<(), Failure> {
        ring(context, |_| {});
        if context.index() == 2 {
            return Err(Failure::fix_input("lanes is not a power of two"));
        }
        Ok(context.run_until_done()?)
    };
    for result in soon(|| cluster(settings(3, 1), wrong_input)) {
        let error = result.unwrap_err();
        assert_eq!(error.exit_class(), ExitClass::FixInput);
        let text = error.with_causes();
        assert!(text.ends_with("worker 2 failed: lanes is not a power of two"), "{text}");
    }
    let disk = |context: &mut WorkerContext<'_>| -> Result<(), Failure> {
        if context.index() == 0 { Err(Failure::restart("disk full")) } else { Ok(()) }
    };
    for result in soon(|| cluster(settings(2, 1), disk)) {
        assert_eq!(result.unwrap_err().exit_class(), ExitClass::Restart);
    }
}

/// Connections break while they are full of data: the workers must not be poisoned by it (a panic
/// while another unwinds would end this process).
#[test]
fn heavy_traffic_does_not_hide_the_message() {
    let flood = |context: &mut WorkerContext<'_>| -> Result<(), Failure> {
        let (index, peers) = (context.index() as u64, context.peers() as u64);
        let mut seen = 0u64;
        context.dataflow::<u64, _, _>(|scope| {
            (0..40_000_000u64)
                .to_stream(scope)
                .container::<Vec<_>>()
                .map(move |number| number * peers + (index + 1) % peers)
                .exchange(|number: &u64| *number)
                .inspect(move |_| {
                    seen += 1;
                    assert!(index != 1 || seen < 200_000, "the sink is full");
                });
        });
        Ok(context.run_until_done()?)
    };
    for result in soon(|| cluster(settings(2, 1), flood)) {
        let text = result.unwrap_err().with_causes();
        assert!(text.ends_with("worker 1 panicked: the sink is full"), "{text}");
    }
}

#[test]
fn workers_share_one_value_of_a_type_in_their_process_and_with_no_other() {
    let work = |context: &mut WorkerContext<'_>| {
        context.of_process::<AtomicUsize>().fetch_add(1, Ordering::Relaxed);
        let counted = context.of_process::<AtomicUsize>();
        context.step_while(|| counted.load(Ordering::Relaxed) < 3)?;
        Ok(counted.load(Ordering::Relaxed))
    };
    for process in soon(|| cluster(settings(2, 3), work)) {
        assert_eq!(process.unwrap(), [3, 3, 3]);
    }
}
