//! Something that stands still is named at the step deadline, also where every process breathes; and a run ends without
//! threads that do not.

use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tidemill::cluster::progress::{self, Phase};
use tidemill::cluster::{
    Abort, Actor, Cluster, ClusterError, ClusterSettings, ExitClass, Failure, WorkerContext,
    execute,
};
use timely::dataflow::operators::{Inspect, ToStream};

use crate::processes::TestProcess;
use crate::ring::{ring, settings, soon, with_abort};

const DEADLINE: Duration = Duration::from_millis(600);

/// Short deadlines: for what stands still, and for what is left at the end.
fn impatient(settings: ClusterSettings) -> ClusterSettings {
    ClusterSettings { step_deadline: Some(DEADLINE), ending_deadline: DEADLINE, ..settings }
}

/// A worker that waits for sums which never come.
fn waits(context: &mut WorkerContext<'_>) -> Result<(), Failure> {
    ring(context, |_| {});
    progress::enter(Phase::WaitingForSums, 4);
    Ok(context.run_until_done()?)
}

#[test]
fn a_peer_that_has_joined_and_only_breathes_is_named() {
    let mut breather = TestProcess::start("breathes");
    let mut own = settings(2, 1).remove(0);
    own.addresses[1] = breather.line("port ");
    let peer = own.addresses[1].clone();
    let line = format!("1 1 1000 {}\n", own.addresses.join(" "));
    breather.stdin.write_all(line.as_bytes()).unwrap();
    own.peer_deadline = Duration::from_secs(1);
    let error = soon(|| execute(impatient(own), waits)).unwrap_err();
    let expected = format!(
        "process 1 ({peer}) has stood still for 0.6 s, the step deadline, before its first step: \
         starting"
    );
    assert_eq!(error.to_string(), expected);
    assert_eq!(error.exit_class(), ExitClass::Restart);
}

#[test]
fn a_process_that_stands_still_is_named_by_all_and_those_that_wait_for_it_are_not() {
    let settings = settings(3, 1).into_iter().map(impatient).collect();
    let work = |context: &mut WorkerContext<'_>| {
        if context.index() != 2 {
            return waits(context);
        }
        ring(context, |_| {});
        progress::enter(Phase::ReadingSamples, 4);
        Ok(context.run_until_done()?)
    };
    for result in soon(|| crate::ring::cluster(settings, work)) {
        let text = result.unwrap_err().with_causes();
        assert!(text.contains("worker 2 has stood still for 0.6 s"), "{text}");
        assert!(text.ends_with("in step 4: reading samples"), "{text}");
    }
}

#[test]
fn a_request_that_nothing_answers_still_ends_at_the_deadline() {
    // All wait: what they wait for was lost. The one that has come least far is named.
    let settings = settings(2, 1).into_iter().map(impatient).collect();
    let work = |context: &mut WorkerContext<'_>| {
        progress::enter(Phase::WaitingForSums, 5 - context.index() as u64);
        let worker: &mut timely::worker::Worker = context;
        let _open = worker.dataflow::<u64, _, _>(|scope| {
            let (input, stream) = timely::dataflow::operators::Input::new_input::<Vec<u64>>(&scope);
            stream.inspect(|_| ());
            input
        });
        Ok(context.run_until_done()?)
    };
    for result in soon(|| crate::ring::cluster::<(), _>(settings, work)) {
        let text = result.unwrap_err().with_causes();
        assert!(text.contains("worker 1 of process 1") || text.contains("worker 1 has"), "{text}");
        assert!(text.ends_with("in step 4: waiting for sums of others"), "{text}");
    }
}

/// Blocks an operator of worker 0 until the sender is dropped.
fn stuck(context: &mut WorkerContext<'_>, gate: &Mutex<mpsc::Receiver<()>>) -> Result<(), Failure> {
    if context.index() == 0 {
        progress::enter(Phase::Reporting, 7);
        let _ = gate.lock().unwrap().recv();
    }
    ring(context, |_| progress::moved());
    Ok(context.run_until_done()?)
}

#[test]
fn a_worker_that_is_stuck_in_an_observer_ends_the_run_and_is_left_behind() {
    let (release, gate) = mpsc::channel();
    let gate = Arc::new(Mutex::new(gate));
    let work = move |context: &mut WorkerContext<'_>| stuck(context, &gate);
    let error = soon(|| execute(impatient(ClusterSettings::workers(2)), work)).unwrap_err();
    let expected = "worker 0 did not end within 0.6 s of the end of the run: worker 0 has stood \
                    still for 0.6 s, the step deadline, in step 7: telling what has happened";
    assert_eq!(error.with_causes(), expected);
    assert_eq!(error.exit_class(), ExitClass::Restart);
    drop(release);
}

#[test]
fn an_error_beside_a_worker_that_is_stuck_keeps_its_class() {
    let (release, gate) = mpsc::channel::<()>();
    let gate = Arc::new(Mutex::new(gate));
    let work = move |context: &mut WorkerContext<'_>| -> Result<(), Failure> {
        if context.index() == 0 {
            let _ = gate.lock().unwrap().recv();
        }
        Err(Failure::new(ExitClass::FixInput, "lanes is not a power of two"))
    };
    let settings = ClusterSettings { ending_deadline: DEADLINE, ..ClusterSettings::workers(2) };
    let error = soon(|| execute::<(), _>(settings, work)).unwrap_err();
    let ClusterError::LeftBehind { left, .. } = &error else { panic!("{error:?}") };
    assert_eq!(*left, [Actor::Worker(0)]);
    assert!(error.with_causes().ends_with("lanes is not a power of two"), "{error:?}");
    assert_eq!(error.exit_class(), ExitClass::FixInput);
    drop(release);
}

/// Drops what it holds when its thread ends.
struct Held(Arc<AtomicBool>);

impl Drop for Held {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

#[test]
fn a_thread_that_still_computes_when_the_run_is_aborted_is_waited_for() {
    let abort = Abort::new();
    let freed = Arc::new(AtomicBool::new(false));
    let (working, work_begun) = mpsc::channel();
    let work_begun = Mutex::new(work_begun);
    let held = Mutex::new(Some((Held(Arc::clone(&freed)), working)));
    let work = move |context: &mut WorkerContext<'_>| -> Result<(), Failure> {
        if let Some((held, working)) = held.lock().unwrap().take() {
            let abort = context.abort().clone();
            context.abort().guard_thread("companion", move || compute(&abort, held, &working))?;
        }
        let _ = work_begun.lock().unwrap().recv();
        Err(Failure::restart("enough"))
    };
    let error = soon(|| with_abort(1, &abort, work)).unwrap_err();
    assert!(error.with_causes().ends_with("enough"), "{error:?}");
    assert!(freed.load(Ordering::Acquire), "what the thread held is free");
}

/// Computes for a while after the run is aborted.
fn compute(abort: &Abort, held: Held, working: &Sender<()>) -> Result<(), Failure> {
    working.send(()).map_err(Failure::restart)?;
    let (aborted, end) = mpsc::channel::<()>();
    abort.on_abort(move || drop(aborted));
    let _ = end.recv();
    let mut sum = 0_u64;
    for number in 0..50_000_000_u64 {
        sum = std::hint::black_box(sum ^ number);
    }
    drop(held);
    Ok(())
}

#[test]
fn a_run_that_is_done_does_not_hide_a_thread_that_is_not() {
    let (release, gate) = mpsc::channel::<()>();
    let gate = Mutex::new(Some(gate));
    let work = move |context: &mut WorkerContext<'_>| -> Result<(), Failure> {
        let gate = gate.lock().unwrap().take().unwrap();
        let wait = move || {
            let _ = gate.recv();
            Ok(())
        };
        context.abort().guard_thread("reader", wait)?;
        context.dataflow::<u64, _, _>(|scope| {
            (0..10_u64).to_stream(scope).container::<Vec<_>>().inspect(|_| ());
        });
        Ok(())
    };
    let settings = ClusterSettings { ending_deadline: DEADLINE, ..ClusterSettings::workers(1) };
    let error = soon(|| Cluster::connect(settings).unwrap().execute(work)).unwrap_err();
    assert_eq!(error.to_string(), "thread reader did not end within 0.6 s of the end of the run");
    assert_eq!(error.exit_class(), ExitClass::Restart);
    drop(release);
}
