//! Arrivals, and the computations that they allow.

use super::*;
use crate::batch::{BatchSettings, MicrobatchGrains, MicrobatchMemory};
use crate::cluster::ExitClass;
use std::num::NonZeroU64;
use tidemill_model::{Decay, Layout, Tokens};

fn schedule(evaluated: bool) -> DeviceSchedule<Tokens> {
    with_microbatches(evaluated, MicrobatchGrains::Grains(2))
}

/// Two lanes of two grains.
fn with_microbatches(
    evaluated: bool,
    microbatch_grains: MicrobatchGrains,
) -> DeviceSchedule<Tokens> {
    let mut layout = Layout::new();
    let table = layout.segment("table");
    layout.tensor("weight", &[16], Decay::Exempt, 1);
    layout.block("only", &[table]);
    let settings = BatchSettings {
        samples_per_step: Some(4),
        lanes: Some(2),
        microbatch_grains,
        ..Default::default()
    };
    let memory = MicrobatchMemory { sample_bytes: 1, workspace_bytes: 1 };
    let plan = TrainingPlan::new(settings.plan(memory).unwrap(), &layout, 2, 9);
    let (samples, every_steps) = (NonZeroU64::new(3).unwrap(), NonZeroU64::MIN);
    let evaluation = evaluated.then_some(EvaluationPlan { samples, requests: 0, every_steps });
    DeviceSchedule::new(&Arc::new(plan), evaluation, (0, 1)).unwrap()
}

fn grain(step: u64, lane: usize, grain: usize) -> Grain {
    Grain { step, lane, grain, samples: vec![vec![0; 3]] }
}

fn feed(schedule: &mut DeviceSchedule<Tokens>, step: u64) {
    for (lane, index) in [(1, 1), (0, 0), (1, 0), (0, 1)] {
        schedule.grain(grain(step, lane, index)).unwrap();
    }
}

/// The microbatches that can be computed now: their lanes and grains, in order.
fn microbatches(schedule: &mut DeviceSchedule<Tokens>) -> Vec<(usize, Vec<usize>)> {
    let mut found = Vec::new();
    while let Some(Computation::Train { lane, range, grains, .. }) = schedule.next() {
        let of = grains.iter().map(|grain| (grain.lane, grain.grain));
        assert!(of.eq(range.clone().map(|grain| (lane, grain))));
        found.push((lane, range.collect()));
    }
    found
}

fn report(step: u64, last: bool) -> StepReport {
    StepReport {
        step,
        loss: 0.0,
        grad_norm: 0.0,
        learning_rate: 0.0,
        tokens: 0,
        total_tokens: 0,
        last,
    }
}

#[test]
fn a_step_waits_for_grains_parameters_and_the_report() {
    let mut schedule = schedule(false);
    assert_eq!(schedule.next(), None);
    feed(&mut schedule, 1);
    assert_eq!(schedule.next(), None, "step 0 has no grains");
    feed(&mut schedule, 0);
    let ticket = |step, bucket| Ticket { step, bucket };
    assert!(schedule.present(ticket(0, 0)).is_err(), "nothing was trained");
    assert_eq!(microbatches(&mut schedule), [(0, vec![0, 1]), (1, vec![0, 1])]);
    assert!(schedule.present(ticket(1, 0)).is_err(), "of another step");
    assert!(schedule.present(ticket(0, 1)).is_err(), "no such bucket");
    schedule.present(ticket(0, 0)).unwrap();
    assert!(schedule.present(ticket(0, 0)).is_err(), "twice");
    assert_eq!(schedule.next(), None, "the device still computes");
    assert!(!schedule.finished(), "the second lane");
    assert_eq!(schedule.next(), None, "the device still computes the second lane");
    assert!(schedule.finished());
    assert_eq!(schedule.next(), None, "no report");
    schedule.report(&report(1, false));
    assert!(matches!(schedule.next(), Some(Computation::Train { step: 1, .. })));
}

#[test]
fn a_microbatch_waits_for_its_own_grains_alone() {
    let mut schedule = with_microbatches(false, MicrobatchGrains::Grains(1));
    let mut arrive = |lane, index| {
        schedule.grain(grain(0, lane, index)).unwrap();
        microbatches(&mut schedule)
    };
    assert_eq!(arrive(0, 0), [(0, vec![0])]);
    assert_eq!(arrive(1, 0), [], "lanes run in order");
    assert_eq!(arrive(0, 1), [(0, vec![1]), (1, vec![0])]);
    let again = schedule.grain(grain(0, 0, 1)).unwrap_err();
    assert!(again.cause().to_string().contains("grain 1 of lane 0 came twice"));
    for _ in 0..3 {
        assert!(!schedule.finished(), "a microbatch is to come");
    }
    let ticket = Ticket { step: 0, bucket: 0 };
    assert!(schedule.present(ticket).is_err(), "a microbatch is to come");
    assert_eq!(schedule.standing(), (Phase::ReadingSamples, 1));
    let ended = schedule.check_ended().unwrap_err();
    assert!(ended.cause().to_string().contains("step 1 has 3 of the 4 grains"));
    schedule.grain(grain(0, 1, 1)).unwrap();
    assert_eq!(microbatches(&mut schedule), [(1, vec![1])]);
    assert!(schedule.finished());
    schedule.present(ticket).unwrap();
    assert_eq!(schedule.standing(), (Phase::WaitingForSums, 1));
}

#[test]
fn nothing_follows_the_last_report() {
    let mut schedule = schedule(false);
    feed(&mut schedule, 0);
    feed(&mut schedule, 1);
    assert_eq!(microbatches(&mut schedule).len(), 2);
    assert!(!schedule.finished() && schedule.finished());
    schedule.present(Ticket { step: 0, bucket: 0 }).unwrap();
    schedule.report(&report(1, true));
    assert_eq!(schedule.next(), None);
    schedule.grain(grain(2, 0, 0)).unwrap();
    assert!(schedule.is_past_last(1) && !schedule.is_past_last(0));
    assert!(schedule.check_ended().is_ok());
}

#[test]
fn an_evaluation_comes_between_two_steps() {
    let mut schedule = schedule(true);
    feed(&mut schedule, 0);
    feed(&mut schedule, 1);
    assert_eq!(microbatches(&mut schedule).len(), 2);
    assert!(!schedule.finished() && schedule.finished());
    schedule.present(Ticket { step: 0, bucket: 0 }).unwrap();
    schedule.report(&report(1, false));
    assert_eq!(schedule.next(), None, "the evaluation has no grains yet");
    let mut ran = Vec::new();
    for index in 0..3 {
        schedule.evaluation_grain(grain(1, 0, index)).unwrap();
        if index > 0 {
            let Some(Computation::Evaluate { updates: 1, grains }) = schedule.next() else {
                panic!("an evaluation is due")
            };
            ran.extend(grains.iter().map(|grain| grain.grain));
            assert_eq!(schedule.next(), None, "the device still evaluates");
            assert!(schedule.finished());
        }
    }
    assert_eq!(ran, [0, 1, 2]);
    assert!(matches!(schedule.next(), Some(Computation::Train { step: 1, .. })));
}

#[test]
fn wrong_grains_are_named() {
    let mut schedule = schedule(false);
    fn message<T: std::fmt::Debug>(result: Result<T, Failure>) -> String {
        let failure = result.unwrap_err();
        assert_eq!(failure.exit_class(), ExitClass::Restart, "{failure:?}");
        failure.cause().to_string()
    }
    schedule.grain(grain(0, 0, 0)).unwrap();
    assert!(
        message(schedule.grain(grain(0, 0, 0))).contains("step 1: grain 0 of lane 0 came twice")
    );
    assert!(message(schedule.grain(grain(0, 2, 0))).contains("a grain of lanes 0..2"));
    assert!(message(schedule.grain(grain(0, 0, 2))).contains("grain 2 of lane 0"));
    let mut short = grain(0, 1, 0);
    short.samples[0].pop();
    // Two grains of a sample each come before it.
    let expected = "the sample at position 2 is 1 positions long, expected 2";
    assert!(message(schedule.grain(short)).contains(expected));
    let mut empty = grain(0, 1, 0);
    empty.samples.clear();
    assert!(message(schedule.grain(empty)).contains("expected 1 samples, found 0"));
    assert!(message(schedule.check_ended()).contains("step 1 has 1 of the 4 grains"));
}
