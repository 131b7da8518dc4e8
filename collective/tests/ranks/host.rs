//! Ranks of several groups whose bytes timely carries: the same weights, and no more bytes than two of them would send.

use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use crate::rank::{Buckets, Care, LANES, Rank, Rounds, SMALL, STEPS, alone, bits, cuts, elements};
use tidemill_collective::carry::Carry;
use tidemill_collective::communicator::{
    Communicator, CommunicatorError, Cut, Holders, Host, Key, Traffic, Values, ValuesMut,
};
use tidemill_collective::{CHUNK_ELEMENTS, LaneSchedule};
use tidemill_kernels::emulator::{EmulatorSettings, Schedule};
use tidemill_kernels::{Backend, Cpu, Emulator, Fp32, Gpu, KernelError, Runtime, Slice, SliceMut};
use timely::container::CapacityContainerBuilder;
use timely::dataflow::InputHandle;
use timely::{CommunicationConfig, Config, WorkerConfig};

/// Of which what a rank owns leaves in pieces.
const LARGE: Buckets = &[3 * CHUNK_ELEMENTS + 5, 2 * CHUNK_ELEMENTS, 100];

const EACH: Holders = Holders::EACH;

/// `ranks` in `groups` groups, as even as that goes.
fn groups(ranks: usize, groups: usize) -> Vec<Range<usize>> {
    (0..groups).map(|group| group * ranks / groups..(group + 1) * ranks / groups).collect()
}

/// What a rank had in the end, and received.
type Ended = (Vec<f32>, Traffic);

/// What a rank does with its end, which says of each step that it is over.
type Run<B> =
    dyn Fn(&B, Host<B>, &mut dyn FnMut(u64)) -> Result<Ended, CommunicatorError> + Send + Sync;

/// What ranks on `devices`, in `groups`, had in the end, after each has run `run`. Timely's workers stand for processes: all that they
/// exchange is written to bytes and read again.
fn carried<B: Backend>(
    devices: Vec<B>,
    groups: &[Range<usize>],
    (schedule, holders): (&Arc<LaneSchedule>, Holders),
    window_bytes: usize,
    run: Arc<Run<B>>,
) -> Vec<Result<Ended, CommunicatorError>> {
    let ranks = devices.len();
    let mut ends = Vec::new();
    for (index, group) in groups.iter().enumerate() {
        let backends: Vec<_> = devices[group.clone()].iter().collect();
        let of_group = Host::group(&backends, groups, index, schedule, holders).unwrap();
        ends.extend(of_group.into_iter().map(Some));
    }
    let (ends, devices) = (Mutex::new(ends), Arc::new(devices));
    let config = Config {
        communication: CommunicationConfig::ProcessBinary(ranks),
        worker: WorkerConfig::default(),
    };
    let workers = timely::execute(config, move |worker| {
        let index = worker.index();
        let mut end = ends.lock().unwrap()[index].take().unwrap();
        assert_eq!((end.rank(), end.ranks()), (index, ranks));
        let courier = end.courier().expect("it is carried by timely");
        assert!(end.courier().is_none(), "once");
        let mut until = InputHandle::<u64, CapacityContainerBuilder<Vec<()>>>::new();
        worker.dataflow::<u64, _, _>(|scope| {
            until.to_stream(scope).carry(courier, window_bytes);
        });
        let (devices, run) = (Arc::clone(&devices), Arc::clone(&run));
        let (done, is_done) = std::sync::mpsc::channel();
        let waker = std::thread::current();
        let thread = std::thread::spawn(move || {
            let mut over = |step| {
                done.send(step).unwrap();
                waker.unpark();
            };
            let ended = run(&devices[index], end, &mut over);
            drop(done);
            waker.unpark();
            ended
        });
        loop {
            match is_done.try_recv() {
                Ok(step) => until.advance_to(step + 1),
                Err(std::sync::mpsc::TryRecvError::Disconnected) => break,
                Err(std::sync::mpsc::TryRecvError::Empty) => {
                    worker.step_or_park(Some(std::time::Duration::from_millis(100)));
                }
            }
        }
        drop(until);
        // To its end: what others wait for is still carried, and all of it is given back.
        while worker.step_or_park(None) {}
        thread.join().unwrap()
    });
    workers.unwrap().join().into_iter().map(Result::unwrap).collect()
}

/// What ranks that train had.
fn trained<B: Backend>(
    devices: Vec<B>,
    buckets: Buckets,
    groups: &[Range<usize>],
    rounds: Rounds,
    window_bytes: usize,
) -> Vec<Result<Ended, CommunicatorError>> {
    let ranks = devices.len();
    let schedule = rounds.schedule(LANES, ranks);
    let of_ranks = Arc::clone(&schedule);
    let run = move |device: &B, end: Host<B>, over: &mut dyn FnMut(u64)| {
        let cuts = cuts(buckets, ranks);
        let mut rank = Rank::new(device, Box::new(end), &of_ranks, buckets, &cuts);
        for step in 0..STEPS {
            rank.step(step, Care::Taken)?;
            over(step);
        }
        Ok((rank.replica(), rank.end.spent().traffic))
    };
    carried(devices, groups, (&schedule, EACH), window_bytes, Arc::new(run))
}

fn cpus(count: usize) -> Vec<Cpu> {
    let cpu = Cpu::new(NonZeroUsize::MIN).unwrap();
    (0..count).map(|_| cpu.clone()).collect()
}

fn emulators(count: usize) -> Vec<Gpu<Emulator, Fp32>> {
    let schedule = Schedule::new(3);
    let device = || -> Result<_, KernelError> {
        let emulator = Emulator::new(EmulatorSettings { warp: 32, seed: 0 })?;
        Ok(Gpu::new(emulator.with_schedule(&schedule)))
    };
    (0..count).map(|_| device().unwrap()).collect()
}

/// Any window, one smaller than a chunk too.
#[test]
fn any_ranks_in_any_groups_train_the_same_to_the_bit() {
    for (buckets, window_bytes) in [(SMALL, 0), (SMALL, 4 << 20), (LARGE, 0), (LARGE, 1 << 20)] {
        let expected = bits(&alone(buckets));
        for (ranks, of) in [(1, 1), (2, 1), (2, 2), (3, 2), (5, 2), (5, 5), (8, 2), (8, 3)] {
            for rounds in Rounds::BOTH {
                let groups = groups(ranks, of);
                for ended in trained(cpus(ranks), buckets, &groups, rounds, window_bytes) {
                    let (replica, _) = ended.unwrap();
                    assert!(bits(&replica) == expected, "{ranks} ranks in {of} groups, {rounds:?}");
                }
            }
        }
    }
}

#[test]
fn devices_without_a_library_train_the_same_to_the_bit() {
    let expected = bits(&alone(SMALL));
    for (ranks, of) in [(2, 2), (3, 2), (5, 5)] {
        for rounds in Rounds::BOTH {
            let groups = groups(ranks, of);
            for ended in trained(emulators(ranks), SMALL, &groups, rounds, 4 << 20) {
                let (replica, _) = ended.unwrap();
                assert!(bits(&replica) == expected, "{ranks} ranks in {of} groups, {rounds:?}");
            }
        }
    }
}

/// All that crosses between two processes: half of the sums one way and half the other, and as much of what was updated.
#[test]
fn a_group_sends_what_one_worker_would() {
    let crossed = |ranks| -> Traffic {
        let ended = trained(cpus(ranks), LARGE, &groups(ranks, 2), Rounds::One, 4 << 20);
        let of_ranks = ended.into_iter().map(|ended| ended.unwrap().1);
        of_ranks.fold(Traffic::default(), |sum, traffic| Traffic {
            from_memory: sum.from_memory + traffic.from_memory,
            from_processes: sum.from_processes + traffic.from_processes,
        })
    };
    let bytes = STEPS * (elements(LARGE) * size_of::<f32>()) as u64;
    for ranks in [2, 4, 8] {
        let Traffic { from_memory, from_processes } = crossed(ranks);
        assert_eq!(from_processes, 2 * bytes, "{ranks} ranks in 2 processes");
        assert_eq!(from_memory == 0, ranks == 2);
    }
}

/// Where the workers of a process hold the parameters together, each has what it and its counterparts have updated, and nothing else is
/// sent; be it that they read each other's memory or not.
#[test]
fn counterparts_have_what_they_have_updated() {
    const OWNED: [usize; 3] = [2 * CHUNK_ELEMENTS + 3, 0, 17];
    for (members, processes, is_group) in
        [(2, 2, true), (3, 2, true), (2, 3, false), (3, 1, true), (1, 3, true)]
    {
        let ranks = members * processes;
        let holders = Holders::together(NonZeroUsize::new(members).unwrap());
        let groups = groups(ranks, if is_group { processes } else { ranks });
        let value = |step: u64, rank: usize, index: usize| {
            (step as usize * 1_000_000 + rank * 100_000 + index % 90_000) as f32
        };
        let owned = |rank: usize| OWNED[rank % 3];
        let held = move |step, rank| -> Vec<f32> {
            let counterparts = holders.counterparts(rank, ranks);
            let of = |rank| (0..owned(rank)).map(move |index| value(step, rank, index));
            counterparts.flat_map(of).collect()
        };
        let schedule = Rounds::One.schedule(LANES, ranks);
        let run = move |cpu: &Cpu, mut end: Host<Cpu>, over: &mut dyn FnMut(u64)| {
            let (rank, mut stream) = (end.rank(), cpu.device_stream()?);
            let ends = holders.counterparts(rank, ranks).scan(0, |end, rank| {
                *end += owned(rank);
                Some(*end)
            });
            let cut = Cut::at(ends.collect());
            let own = cut.of_rank(holders.place(rank));
            let mut values = cpu.allocate::<f32>(&mut stream, held(0, rank).len())?;
            for step in 0..STEPS {
                let range = own.clone();
                values.as_mut_slice()[own.clone()].copy_from_slice(&held(step, rank)[range]);
                let (key, updated) = (Key::new(step, 0), Slice::new(&values, own.start, own.len()));
                end.updated(cpu, &mut stream, key, &cut, Values::Fp32(updated?))?;
                let out = ValuesMut::Fp32(SliceMut::all(&mut values));
                end.gather(cpu, &mut stream, key, &cut, out)?;
                assert!(values.as_slice() == held(step, rank), "rank {rank}, step {step}");
                over(step);
            }
            Ok((values.as_slice().to_vec(), end.spent().traffic))
        };
        let ended = carried(cpus(ranks), &groups, (&schedule, holders), 1 << 20, Arc::new(run));
        let mut came = 0;
        for (rank, ended) in ended.into_iter().enumerate() {
            let (found, traffic) = ended.unwrap();
            assert!(found == held(STEPS - 1, rank));
            came += traffic.from_processes;
            assert!(members == 1 || traffic.from_memory == 0, "{traffic:?}");
        }
        let all: usize = (0..ranks).map(owned).sum();
        let to_others = STEPS as usize * (processes - 1) * size_of::<f32>();
        assert_eq!(
            came,
            (to_others * all) as u64,
            "{members} of {ranks}, each part once a process"
        );
    }
}

/// What a rank waits for in vain.
#[derive(Clone, Copy, Debug)]
enum Missing {
    /// What the other worker of its group has.
    OfGroup,
    /// What comes from the other group.
    OfOthers,
}

/// From when any member says so, whatever a rank waits for; and it comes to wait for nothing more.
#[test]
fn ranks_that_wait_for_their_group_or_another_are_ended() {
    const SOON: Duration = Duration::from_secs(20);
    let (cpu, cut, bucket) = (&cpus(1)[0], Cut::at(vec![4, 8, 12]), 0..12);
    let uses = std::slice::from_ref(&bucket);
    for missing in [Missing::OfGroup, Missing::OfOthers] {
        for is_gathered in [false, true] {
            let schedule = Rounds::One.schedule(4, 3);
            let mut ends = Host::group(&[cpu, cpu], &[0..2, 2..3], 0, &schedule, EACH).unwrap();
            let mut stream = cpu.device_stream().unwrap();
            let buffer = cpu.allocate::<f32>(&mut stream, 12).unwrap();
            let waiting = if let Missing::OfGroup = missing { 1 } else { 2 };
            for end in &mut ends[..waiting] {
                let (rank, key) = (end.rank(), Key::new(0, 0));
                let nodes = schedule.nodes(0, rank..rank + 1).unwrap();
                let nodes: Vec<_> = nodes.into_iter().map(|node| (node, &buffer)).collect();
                end.post().sums(cpu, &mut stream, key, &nodes, uses).unwrap();
                let values = Slice::new(&buffer, 0, 4).unwrap();
                end.updated(cpu, &mut stream, key, &cut, Values::Fp32(values)).unwrap();
            }
            // What is sent to the other group is not carried, and kept.
            let _couriers: Vec<_> = ends.iter_mut().map(|end| end.courier()).collect();
            let (first, abort) = (ends.remove(0), ends[0].abort_handle());
            let (cut, cpu) = (cut.clone(), cpu.clone());
            let (sender, ended) = mpsc::channel();
            std::thread::spawn(move || {
                let (mut end, mut stream) = (first, cpu.device_stream().unwrap());
                let mut out = cpu.allocate::<f32>(&mut stream, 12).unwrap();
                for step in 0..2 {
                    let key = Key::new(step, 0);
                    let waited = match is_gathered {
                        true => {
                            let out = SliceMut::all(&mut out);
                            end.gather(&cpu, &mut stream, key, &cut, ValuesMut::Fp32(out))
                        }
                        false => {
                            let out = SliceMut::new(&mut out, 0, 4).unwrap();
                            end.reduce_scatter(&cpu, &mut stream, key, &cut, out)
                        }
                    };
                    sender.send(waited).unwrap();
                }
            });
            abort();
            for _ in 0..2 {
                let waited = ended.recv_timeout(SOON).expect("it ends");
                let is_closed = matches!(waited, Err(CommunicatorError::Closed));
                assert!(is_closed, "{missing:?}, {is_gathered}: {waited:?}");
            }
        }
    }
}

#[test]
fn groups_that_are_not_all_ranks_are_refused() {
    let cpu = &cpus(1)[0];
    let schedule = Rounds::One.schedule(LANES, 3);
    let refused = |groups: &[Range<usize>], group| {
        let error = Host::group(&[cpu], groups, group, &schedule, EACH).err();
        assert!(error.is_some(), "{groups:?} {group}");
    };
    refused(&[0..1, 2..3], 0);
    refused(&[0..1, 1..2], 2);
    refused(&[0..2, 2..3], 0);
    refused(&groups(8, 8), 3);
}
