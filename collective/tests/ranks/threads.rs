//! Ranks of one process that sum and gather over emulated devices, whose queues run in any order.
//!
//! Seen red: with an owner that does not wait for its peers' sums, with a gather that does not wait for an update, and, below,
//! with a rank that does not wait for the gather before it computes again.

use std::num::NonZeroUsize;
use std::sync::Arc;

use crate::rank::{Care, LANES, Rank, Rounds, SMALL, STEPS, alone, bits, cuts};
use tidemill_collective::communicator::{Communicator, CommunicatorError, Cut, Key, Threads};
use tidemill_collective::{CollectiveError, Node};
use tidemill_kernels::emulator::{EmulatorSettings, Schedule};
use tidemill_kernels::{Backend, Cpu, Emulator, Fp32, Gpu, Runtime, SliceMut};

type Device = Gpu<Emulator, Fp32>;

fn device(schedule: &Arc<Schedule>) -> Device {
    let emulator = Emulator::new(EmulatorSettings { warp: 32, seed: 0 }).unwrap();
    Gpu::new(emulator.with_schedule(schedule))
}

/// The values of every rank after all steps.
fn trained(ranks: usize, seed: u64, rounds: Rounds, care: Care) -> Vec<Vec<f32>> {
    let schedule = Schedule::new(seed);
    let devices: Vec<_> = (0..ranks).map(|_| device(&schedule)).collect();
    trained_on(&devices, rounds, care)
}

fn trained_on<B: Backend>(devices: &[B], rounds: Rounds, care: Care) -> Vec<Vec<f32>> {
    let (ranks, backends) = (devices.len(), devices.iter().collect::<Vec<_>>());
    let schedule = rounds.schedule(LANES, ranks);
    let ends = Threads::group(&backends, &schedule).unwrap();
    let cuts = cuts(SMALL, ranks);
    std::thread::scope(|scope| {
        let run = |(device, end)| {
            let (cuts, schedule) = (&cuts, &schedule);
            scope.spawn(move || {
                let mut rank = Rank::new(device, Box::new(end), schedule, SMALL, cuts);
                (0..STEPS).for_each(|step| rank.step(step, care).unwrap());
                rank.replica()
            })
        };
        let running: Vec<_> = devices.iter().zip(ends).map(run).collect();
        running.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn any_number_of_ranks_train_the_same_to_the_bit() {
    let expected = bits(&alone(SMALL));
    for ranks in [1, 2, 3, 5, 8] {
        for seed in 0..2 {
            for rounds in Rounds::BOTH {
                for replica in trained(ranks, seed, rounds, Care::Taken) {
                    assert!(bits(&replica) == expected, "{ranks} ranks, order {seed}, {rounds:?}");
                }
            }
        }
    }
}

#[test]
fn a_rank_that_does_not_wait_for_what_it_gathers_or_others_read_is_found_out() {
    let expected = bits(&alone(SMALL));
    let is_right = |seed, care| {
        let replicas = trained(2, seed, Rounds::ALane, care);
        replicas.iter().all(|replica| bits(replica) == expected)
    };
    assert!(!(0..10).all(|seed| is_right(seed, Care::NotTaken)));
    assert!(!(0..10).all(|seed| is_right(seed, Care::NotRead)));
}

/// In the host's memory what is posted is a copy.
#[test]
fn ranks_of_the_host_train_the_same_to_the_bit() {
    let expected = bits(&alone(SMALL));
    let cpu = Cpu::new(NonZeroUsize::MIN).unwrap();
    for ranks in [2, 3, 8] {
        let devices: Vec<_> = (0..ranks).map(|_| cpu.clone()).collect();
        for replica in trained_on(&devices, Rounds::ALane, Care::Taken) {
            assert!(bits(&replica) == expected, "{ranks} ranks");
        }
    }
}

#[test]
fn lanes_that_are_missing_or_told_twice_are_errors() {
    let schedule = Schedule::new(0);
    let devices = [device(&schedule), device(&schedule)];
    let mut ends = Threads::group(&devices.each_ref(), &Rounds::One.schedule(2, 2)).unwrap();
    let mut stream = devices[0].device_stream().unwrap();
    let sums = devices[0].allocate::<f32>(&mut stream, 8).unwrap();
    let mut out = devices[0].allocate::<f32>(&mut stream, 4).unwrap();
    let (node, cut, bucket) = (Node::leaf(0), Cut::at(vec![4, 8]), 0..8);
    let uses = std::slice::from_ref(&bucket);
    for (end, device) in ends.iter().zip(&devices) {
        end.post().sums(device, &mut stream, Key::new(7, 3), &[(node, &sums)], uses).unwrap();
    }
    let scratch = SliceMut::all(&mut out);
    let error = ends[0]
        .reduce_scatter(&devices[0], &mut stream, Key::new(7, 3), &cut, scratch)
        .err()
        .unwrap();
    let twice = CollectiveError::DuplicateNode { node, present: node };
    assert!(matches!(&error, CommunicatorError::Collective(found) if *found == twice), "{error}");
    for _ in 0..2 {
        let post = ends[0].post();
        post.sums(&devices[0], &mut stream, Key::new(8, 3), &[(node, &sums)], uses).unwrap();
    }
    let scratch = SliceMut::all(&mut out);
    let error = ends[1]
        .reduce_scatter(&devices[1], &mut stream, Key::new(8, 3), &cut, scratch)
        .err()
        .unwrap();
    let expected = "rank 0 posted the sums of bucket 3 at step 9 twice";
    assert_eq!(error.to_string(), expected);
}

/// A bucket joins others once every rank has posted it.
#[test]
fn what_all_have_posted_may_join() {
    let schedule = Schedule::new(0);
    let devices = [device(&schedule), device(&schedule)];
    let mut ends = Threads::group(&devices.each_ref(), &Rounds::One.schedule(2, 2)).unwrap();
    let mut stream = devices[0].device_stream().unwrap();
    let sums = devices[0].allocate::<f32>(&mut stream, 8).unwrap();
    let (key, uses) = (Key::new(2, 1), std::slice::from_ref(&(0..8)));
    for rank in 0..2 {
        assert!(!ends[0].can_join(key).unwrap(), "posted by {rank} of 2");
        let nodes = [(Node::leaf(rank as u32), &sums)];
        ends[rank].post().sums(&devices[rank], &mut stream, key, &nodes, uses).unwrap();
    }
    assert!(ends[0].can_join(key).unwrap());
    assert!(!ends[0].can_join(Key::new(2, 0)).unwrap(), "another bucket");
    ends[1].abort_handle()();
    let ended = ends[0].can_join(Key::new(2, 0));
    assert!(matches!(ended, Err(CommunicatorError::Closed)), "{ended:?}");
}

#[test]
fn ranks_that_wait_are_ended() {
    let schedule = Schedule::new(0);
    let devices = [device(&schedule), device(&schedule)];
    let mut ends = Threads::group(&devices.each_ref(), &Rounds::One.schedule(2, 2)).unwrap();
    let abort = ends[0].abort_handle();
    std::thread::scope(|scope| {
        for (end, device) in ends.iter_mut().zip(&devices) {
            scope.spawn(move || {
                let mut stream = device.device_stream().unwrap();
                let mut out = device.allocate::<f32>(&mut stream, 4).unwrap();
                let cut = Cut::at(vec![4, 8]);
                for _ in 0..2 {
                    let out = SliceMut::all(&mut out);
                    let summed = end.reduce_scatter(device, &mut stream, Key::new(0, 0), &cut, out);
                    assert!(matches!(summed, Err(CommunicatorError::Closed)));
                }
            });
        }
        abort();
    });
}
