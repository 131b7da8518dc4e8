//! Ranks of several processes, whose bytes a library moves that stands in for the vendor's: over any devices.

use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use tidemill_collective::communicator::{
    Communicator, CommunicatorError, Cut, Holders, Key, LocalRank, Nccl, Traffic, Values, ValuesMut,
};
use tidemill_collective::{LaneSchedule, Node};
use tidemill_kernels::gpu::collectives::{CollectiveLibrary, GroupId, LibraryCollective};
use tidemill_kernels::{Backend, KernelError, Slice, SliceMut};

/// Makes a test of each body, with the `ARM` that stands beside it.
macro_rules! every_body {
    () => {
        group::every_body!(
            any_number_of_ranks_sums_along_the_tree
            a_process_is_sent_what_one_rank_would_be
            processes_of_other_sizes_do_not_join
            a_rank_that_sums_the_lanes_of_another_is_named
            what_the_library_does_alone_is_done_to_all_ranks
            a_rank_whose_peer_never_comes_can_be_ended
            a_rank_ends_what_all_of_its_process_wait_for
            what_the_library_refuses_is_an_error_with_its_words
        );
    };
    ($($test:ident)*) => {
        $(
            #[test]
            fn $test() {
                group::$test(&ARM);
            }
        )*
    };
}
pub(crate) use every_body;

/// Devices of a kind, and the library that moves their bytes.
pub struct Arm<B> {
    pub device: fn() -> B,
    pub library: fn() -> CollectiveLibrary,
}

const LANES: usize = 8;
const ELEMENTS: usize = 700;
const GRANULE: usize = 64;
/// Where the uses of the only bucket begin in the buffers of gradients.
const SLOTS: [usize; 2] = [30, 800];

/// A lane's gradient of a step, of magnitudes that show the order of a sum.
fn gradient(step: u64, lane: usize, index: usize) -> f32 {
    let mixed =
        (step << 40 | (lane as u64) << 20 | index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let unit = (mixed >> 40) as f32 / (1 << 23) as f32 - 1.0;
    unit * 10_f32.powi((mixed % 7) as i32 - 3)
}

/// The sum over the lanes of `node`.
fn sum(step: u64, node: Node, index: usize) -> f32 {
    if node.lanes() == 1 {
        return gradient(step, node.lo as usize, index);
    }
    let middle = node.lo + node.lanes() / 2;
    let (left, right) = (Node { hi: middle, ..node }, Node { lo: middle, ..node });
    sum(step, left, index) + sum(step, right, index)
}

/// The gradient arena of a rank: as long as its last slot.
const ARENA: usize = SLOTS[1] + ELEMENTS;

/// The results of a rank in two steps, sums of both uses and gathered values, beside the expected ones.
fn run_rank<B: Backend>(
    backend: &B,
    group: (&CollectiveLibrary, GroupId),
    (local, rank): (LocalRank<B>, usize),
    (schedule, holders): (&Arc<LaneSchedule>, Holders),
) -> Result<Traffic, CommunicatorError> {
    let ranks = schedule.workers();
    let mut end = Nccl::join(backend, group, (local, ranks), schedule, holders)?;
    assert_eq!((end.rank(), end.ranks()), (rank, ranks));
    let mut traffic = Traffic::default();
    let mut stream = backend.device_stream()?;
    let cut = Cut::new(ELEMENTS, ranks, GRANULE, 1);
    let uses = SLOTS.map(|slot| slot..slot + ELEMENTS);
    let Range { start, end: last } = cut.of_rank(rank);
    let owned = SLOTS.map(|slot| slot + start..slot + last);
    let elements = cut.of_rank(rank).len();
    // The memory that other ranks of the process read stays allocated.
    let mut stay = Vec::new();
    for step in 0..2 {
        let mut gradients = Vec::new();
        for round in 0..schedule.rounds() {
            let mut sums_of = Vec::new();
            for node in schedule.nodes(round, rank..rank + 1)? {
                let values: Vec<f32> = (0..ARENA).map(|index| sum(step, node, index)).collect();
                let mut sums = backend.allocate::<f32>(&mut stream, ARENA)?;
                backend.write(&mut stream, SliceMut::all(&mut sums), &values)?;
                sums_of.push((node, sums));
            }
            let nodes: Vec<_> = sums_of.iter().map(|(node, sums)| (*node, sums)).collect();
            let key = Key { round: round as u32, ..Key::new(step, 0) };
            let reading = end.post().sums_until_read(backend, &mut stream, key, &nodes, &uses)?;
            let of_round = schedule.sums(round)?;
            let mut out =
                backend.allocate::<f32>(&mut stream, of_round.len() * SLOTS.len() * elements)?;
            end.reduce_scatter(backend, &mut stream, key, &cut, SliceMut::all(&mut out))?;
            reading.expect("a device's memory is read where it is").end(backend, &mut stream)?;
            let found = backend.to_vec(&mut stream, Slice::all(&out))?;
            let of_node = |node| {
                let uses = owned.iter().flat_map(|range| range.clone());
                uses.map(move |index| sum(step, node, index))
            };
            let expected: Vec<f32> = of_round.into_iter().flat_map(of_node).collect();
            let bits =
                |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&found), bits(&expected), "rank {rank} of {ranks}, step {step}");
            gradients.push(sums_of);
        }

        // Every rank writes its own, and has what its counterparts wrote: side by side what they hold.
        let value = |of: usize, index: usize| (step as usize * 10_000 + of * 1_000 + index) as f32;
        let counterparts: Vec<_> = holders.counterparts(rank, ranks).collect();
        let of_rank = |of: usize| (0..cut.of_rank(of).len()).map(move |index| value(of, index));
        let ends = counterparts.iter().scan(0, |end, &of| {
            *end += cut.of_rank(of).len();
            Some(*end)
        });
        let held = Cut::at(ends.collect());
        let expected: Vec<f32> = counterparts.iter().flat_map(|&of| of_rank(of)).collect();
        let mut masters = backend.allocate::<f32>(&mut stream, expected.len())?;
        let range = held.of_rank(holders.place(rank));
        let own: Vec<f32> = of_rank(rank).collect();
        backend.write(&mut stream, SliceMut::new(&mut masters, range.start, range.len())?, &own)?;
        let values = Slice::new(&masters, range.start, range.len())?;
        end.updated(backend, &mut stream, Key::new(step, 0), &held, Values::Fp32(values))?;
        let whole = SliceMut::all(&mut masters);
        end.gather(backend, &mut stream, Key::new(step, 0), &held, ValuesMut::Fp32(whole))?;
        let found = backend.to_vec(&mut stream, Slice::all(&masters))?;
        assert_eq!(found, expected, "rank {rank} of {ranks}, {holders:?}");
        traffic = end.take_cost().traffic;
        stay.push((masters, gradients));
    }
    Ok(traffic)
}

/// Runs all ranks, those of a process side by side, and answers what came to each process in the last step.
fn run_ranks<B: Backend>(
    arm: &Arm<B>,
    (ranks, of_process): (usize, usize),
    (schedule, holders): (LaneSchedule, Holders),
) -> Vec<Traffic> {
    let (library, schedule) = ((arm.library)(), Arc::new(schedule));
    let group = (&library, library.group_id().unwrap());
    let devices: Vec<B> = (0..ranks).map(|_| (arm.device)()).collect();
    let mut locals = Vec::new();
    for (process, devices) in devices.chunks(of_process).enumerate() {
        let devices: Vec<&B> = devices.iter().collect();
        let first = process * of_process;
        locals.extend(LocalRank::of_process(&devices, first, &schedule).unwrap());
    }
    let of_ranks: Vec<Traffic> = std::thread::scope(|scope| {
        let start = |(rank, (device, local))| {
            let of_ranks = (&schedule, holders);
            scope.spawn(move || run_rank(device, group, (local, rank), of_ranks).unwrap())
        };
        let running: Vec<_> = devices.iter().zip(locals).enumerate().map(start).collect();
        running.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    let sum = |of_process: &[Traffic]| Traffic {
        from_memory: of_process.iter().map(|traffic| traffic.from_memory).sum(),
        from_processes: of_process.iter().map(|traffic| traffic.from_processes).sum(),
        from_hosts: 0,
    };
    of_ranks.chunks(of_process).map(sum).collect()
}

/// In processes of one rank and of several, which hold the parameters each or together.
pub fn any_number_of_ranks_sums_along_the_tree<B: Backend>(arm: &Arm<B>) {
    for (ranks, of_process, members) in [
        (1, 1, 1),
        (2, 1, 1),
        (2, 2, 1),
        (3, 1, 1),
        (5, 1, 1),
        (8, 1, 1),
        (4, 2, 1),
        (4, 2, 2),
        (6, 2, 1),
        (6, 3, 1),
        (6, 3, 3),
        (8, 4, 1),
    ] {
        let holders = Holders::together(NonZeroUsize::new(members).unwrap());
        for schedule in [LaneSchedule::at_once, LaneSchedule::one_by_one] {
            let schedule = schedule(LANES, ranks).unwrap();
            run_ranks(arm, (ranks, of_process), (schedule, holders));
        }
    }
}

/// The bytes that cross between processes do not depend on the number of ranks in each.
pub fn a_process_is_sent_what_one_rank_would_be<B: Backend>(arm: &Arm<B>) {
    let bytes = |elements: usize| (elements * size_of::<f32>()) as u64;
    for ranks in [2, 4, 8] {
        let schedule = LaneSchedule::at_once(LANES, ranks).unwrap();
        let of_processes = run_ranks(arm, (ranks, ranks / 2), (schedule, Holders::EACH));
        let came: u64 = of_processes.iter().map(|traffic| traffic.from_processes).sum();
        // The sums of all uses come to their owners once, and every parameter to the process that does not own it.
        assert_eq!(came, bytes(SLOTS.len() * ELEMENTS) + bytes(ELEMENTS), "{ranks} ranks");
        // Each rank of a process reads the sums and parameters of its peers once.
        let read = bytes((ranks / 2 - 1) * (SLOTS.len() + 1) * ELEMENTS);
        assert!(of_processes.iter().all(|traffic| traffic.from_memory == read), "{ranks} ranks");
    }
}

pub fn processes_of_other_sizes_do_not_join<B: Backend>(arm: &Arm<B>) {
    let library = (arm.library)();
    let devices = [(arm.device)(), (arm.device)()];
    let schedule = Arc::new(LaneSchedule::at_once(8, 3).unwrap());
    let ends = LocalRank::of_process(&[&devices[0], &devices[1]], 0, &schedule).unwrap();
    let group = (&library, library.group_id().unwrap());
    for (local, device) in ends.into_iter().zip(&devices) {
        let joined = Nccl::join(device, group, (local, 3), &schedule, Holders::EACH);
        let error = joined.err().expect("three ranks are no processes of two").to_string();
        let expected =
            "expected as many ranks in every process, found 3 ranks and one process of 2";
        assert_eq!(error, expected);
    }
}

/// Also where the process has all of its lanes once.
pub fn a_rank_that_sums_the_lanes_of_another_is_named<B: Backend>(arm: &Arm<B>) {
    let (library, devices) = ((arm.library)(), [(arm.device)(), (arm.device)()]);
    let schedule = Arc::new(LaneSchedule::at_once(2, 2).unwrap());
    let locals = LocalRank::of_process(&devices.each_ref(), 0, &schedule).unwrap();
    let group = (&library, library.group_id().unwrap());
    let join =
        |(local, device)| Nccl::join(device, group, (local, 2), &schedule, Holders::EACH).unwrap();
    let mut ends: Vec<_> = locals.into_iter().zip(&devices).map(join).collect();
    let mut stream = devices[0].device_stream().unwrap();
    let sums = devices[0].allocate::<f32>(&mut stream, 8).unwrap();
    let mut out = devices[0].allocate::<f32>(&mut stream, 4).unwrap();
    let (key, bucket) = (Key::new(6, 3), 0..8);
    for (end, lane) in ends.iter().zip([1, 0]) {
        let (nodes, uses) = ([(Node::leaf(lane), &sums)], std::slice::from_ref(&bucket));
        end.post().sums(&devices[0], &mut stream, key, &nodes, uses).unwrap();
    }
    let (cut, out) = (Cut::at(vec![4, 8]), SliceMut::all(&mut out));
    let summed = ends[0].reduce_scatter(&devices[0], &mut stream, key, &cut, out);
    let expected = "rank 0 posted the sums of bucket 3 at step 7 over other lanes than its own";
    assert_eq!(summed.unwrap_err().to_string(), expected);
}

/// The library adds the shares of all ranks, and brings all shares to every rank, in an order of its own.
pub fn what_the_library_does_alone_is_done_to_all_ranks<B: Backend>(arm: &Arm<B>) {
    const SHARE: usize = 100;
    let library = (arm.library)();
    for ranks in [1, 2, 3, 5] {
        let id = library.group_id().unwrap();
        let run_rank = |rank| -> Result<(), KernelError> {
            let backend = (arm.device)();
            let member = backend.join_group(&library, id, (rank, ranks))?;
            let mut stream = backend.device_stream()?;
            let mut all = backend.allocate::<f32>(&mut stream, ranks * SHARE)?;
            let mut share = backend.allocate::<f32>(&mut stream, SHARE)?;
            for step in 0..2 {
                let values = |of: usize| (0..ranks * SHARE).map(move |i| gradient(step, of, i));
                let own: Vec<f32> = values(rank).collect();
                backend.write(&mut stream, SliceMut::all(&mut all), &own)?;
                let (out, from) = (SliceMut::all(&mut share), Slice::all(&all));
                let sum = LibraryCollective::ReduceScatter;
                backend.library_collective(&mut stream, &member, sum, out, from)?;
                let sums = backend.to_vec(&mut stream, Slice::all(&share))?;
                for (index, found) in (rank * SHARE..).zip(&sums) {
                    let terms = || (0..ranks).map(|of| f64::from(gradient(step, of, index)));
                    let (sum, magnitude): (f64, f64) = (terms().sum(), terms().map(f64::abs).sum());
                    let bound = ranks as f64 * f64::from(f32::EPSILON) * magnitude;
                    assert!((f64::from(*found) - sum).abs() <= bound, "{index}: {found}, {sum}");
                }
                let share_of = |of: usize| values(of).skip(of * SHARE).take(SHARE);
                let own: Vec<f32> = share_of(rank).collect();
                backend.write(&mut stream, SliceMut::all(&mut share), &own)?;
                let (out, from) = (SliceMut::all(&mut all), Slice::all(&share));
                let gather = LibraryCollective::AllGather;
                backend.library_collective(&mut stream, &member, gather, out, from)?;
                let found = backend.to_vec(&mut stream, Slice::all(&all))?;
                assert!(found.into_iter().eq((0..ranks).flat_map(share_of)), "{rank} of {ranks}");
            }
            if ranks > 1 {
                let (out, from) = (SliceMut::all(&mut share), Slice::new(&all, 0, SHARE)?);
                let what = LibraryCollective::ReduceScatter;
                assert!(backend.library_collective(&mut stream, &member, what, out, from).is_err());
            }
            Ok(())
        };
        std::thread::scope(|scope| {
            (0..ranks).for_each(|rank| {
                scope.spawn(move || run_rank(rank).unwrap());
            });
        });
    }
}

/// Only one of two ranks ever joins: it waits until it is aborted, from another thread.
pub fn a_rank_whose_peer_never_comes_can_be_ended<B: Backend>(arm: &Arm<B>) {
    let (library, backend) = ((arm.library)(), (arm.device)());
    let id = library.group_id().unwrap();
    let schedule = Arc::new(LaneSchedule::at_once(2, 2).unwrap());
    let local = (LocalRank::alone(0, &schedule), 2);
    let mut end = Nccl::join(&backend, (&library, id), local, &schedule, Holders::EACH).unwrap();
    let mut stream = backend.device_stream().unwrap();
    let sums = backend.allocate::<f32>(&mut stream, 8).unwrap();
    let (nodes, bucket) = ([(Node::leaf(0), &sums)], 0..8);
    let uses = std::slice::from_ref(&bucket);
    end.post().sums(&backend, &mut stream, Key::new(0, 0), &nodes, uses).unwrap();
    let mut out = backend.allocate::<f32>(&mut stream, 4).unwrap();
    let abort = end.abort_handle();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            let cut = Cut::at(vec![4, 8]);
            let mut sum = |key| {
                let out = SliceMut::all(&mut out);
                end.reduce_scatter(&backend, &mut stream, key, &cut, out).unwrap_err()
            };
            let (first, later) = (sum(Key::new(0, 0)), sum(Key::new(1, 0)));
            (first, later)
        });
        abort();
        let (first, later) = waiting.join().unwrap();
        let aborted = |error: &CommunicatorError| {
            matches!(error, CommunicatorError::Closed)
                || matches!(error, CommunicatorError::Device(KernelError::Device { answer, .. })
                    if answer == "the group was aborted")
        };
        assert!(aborted(&first), "{first}");
        assert!(matches!(later, CommunicatorError::Closed), "{later}");
    });
}

/// One of two processes never joins: both ranks of the other wait in the library, and one of them is told to end.
pub fn a_rank_ends_what_all_of_its_process_wait_for<B: Backend>(arm: &Arm<B>) {
    const SOON: Duration = Duration::from_secs(20);
    let (library, devices) = ((arm.library)(), [(arm.device)(), (arm.device)()]);
    let schedule = Arc::new(LaneSchedule::at_once(4, 4).unwrap());
    let locals = LocalRank::of_process(&devices.each_ref(), 0, &schedule).unwrap();
    let group = (&library, library.group_id().unwrap());
    let join =
        |(local, device)| Nccl::join(device, group, (local, 4), &schedule, Holders::EACH).unwrap();
    let ends: Vec<_> = locals.into_iter().zip(&devices).map(join).collect();
    let aborts: Vec<_> = ends.iter().map(|end| end.abort_handle()).collect();
    let mut stream = devices[0].device_stream().unwrap();
    let sums = devices[0].allocate::<f32>(&mut stream, 8).unwrap();
    let (key, bucket, cut) = (Key::new(0, 0), 0..8, Cut::at(vec![2, 4, 6, 8]));
    for (lane, end) in (0..).zip(&ends) {
        let (nodes, uses) = ([(Node::leaf(lane), &sums)], std::slice::from_ref(&bucket));
        end.post().sums(&devices[0], &mut stream, key, &nodes, uses).unwrap();
    }
    let (ended, of_ranks) = mpsc::channel();
    std::thread::scope(|scope| {
        for (mut end, device) in ends.into_iter().zip(&devices) {
            let (ended, cut) = (ended.clone(), &cut);
            scope.spawn(move || {
                let mut stream = device.device_stream().unwrap();
                let mut out = device.allocate::<f32>(&mut stream, 2).unwrap();
                let out = SliceMut::all(&mut out);
                let summed = end.reduce_scatter(device, &mut stream, key, cut, out);
                ended.send(summed.is_err()).unwrap();
            });
        }
        let mut aborts = aborts.into_iter();
        aborts.next().unwrap()();
        let found = [(); 2].map(|()| of_ranks.recv_timeout(SOON));
        // Where the first has not ended all, the others do, so that the test ends.
        aborts.for_each(|abort| abort());
        assert_eq!(found, [Ok(true); 2], "the ranks that ended with an error");
    });
}

pub fn what_the_library_refuses_is_an_error_with_its_words<B: Backend>(arm: &Arm<B>) {
    let (library, backend) = ((arm.library)(), (arm.device)());
    let id = library.group_id().unwrap();
    assert!(id == GroupId::from_bytes(id.to_bytes()));
    let join = |rank_of| backend.join_group(&library, id, rank_of);
    let (member, peer) = (join((0, 2)).unwrap(), join((1, 2)).unwrap());
    let error = join((1, 2)).err().unwrap().to_string();
    assert!(error.contains("joining a group") && error.contains("invalid usage"), "{error}");
    let mut stream = backend.device_stream().unwrap();
    let mut buffer = backend.allocate::<f32>(&mut stream, 8).unwrap();
    let from = backend.allocate::<f32>(&mut stream, 8).unwrap();
    let send = |elements| [(0, Slice::<B, f32>::new(&from, 0, elements).unwrap())];
    backend.exchange(&mut stream, &peer, &send(3), SliceMut::all(&mut buffer), &[]).unwrap();
    let wrong = [(1, 0..4)];
    let all = SliceMut::all(&mut buffer);
    let error = backend.exchange(&mut stream, &member, &[], all, &wrong).unwrap_err().to_string();
    assert!(error.contains("exchanging") && error.contains("invalid argument"), "{error}");
    let outside = [(1, 6..9)];
    let all = SliceMut::all(&mut buffer);
    assert!(backend.exchange(&mut stream, &member, &[], all, &outside).is_err());
    let missing = CollectiveLibrary::open("libno-such-collectives.so.7").err().unwrap().to_string();
    assert!(missing.contains("libno-such-collectives.so.7"), "{missing}");
}
