//! Ranks of several groups and hosts whose bytes timely carries: the same weights, and no more bytes than two of them would send.

use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use crate::rank::{Buckets, Care, LANES, Rank, Rounds, SMALL, STEPS, alone, bits, cuts, elements};
use tidemill_collective::carry::Carry;
use tidemill_collective::communicator::{
    Communicator, CommunicatorError, Cut, Holders, Host, Key, Topology, Traffic, Values, ValuesMut,
};
use tidemill_collective::{CHUNK_ELEMENTS, LaneSchedule};
use tidemill_kernels::emulator::{EmulatorSettings, Schedule};
use tidemill_kernels::{Backend, Cpu, Emulator, Fp32, Gpu, KernelError, Runtime, Slice, SliceMut};
use timely::container::CapacityContainerBuilder;
use timely::dataflow::InputHandle;
use timely::{CommunicationConfig, Config, WorkerConfig};

/// So large that the owned part of a bucket is sent in several pieces.
const LARGE: Buckets = &[3 * CHUNK_ELEMENTS + 5, 2 * CHUNK_ELEMENTS, 100];

const EACH: Holders = Holders::EACH;

/// `count` in `parts` parts, as even as that goes.
fn parts(count: usize, parts: usize) -> Vec<Range<usize>> {
    (0..parts).map(|part| part * count / parts..(part + 1) * count / parts).collect()
}

/// `ranks` in `groups` groups, each on a host of its own.
fn groups(ranks: usize, groups: usize) -> Topology {
    Topology::of_groups(parts(ranks, groups)).unwrap()
}

/// `ranks` in `groups` groups on `hosts` hosts.
fn hosts(ranks: usize, groups: usize, hosts: usize) -> Topology {
    Topology::new(parts(ranks, groups), parts(groups, hosts)).unwrap()
}

/// Ranges of so many each, one after the other.
fn ranges(lengths: &[usize]) -> Vec<Range<usize>> {
    let ends = lengths.iter().scan(0, |end, length| {
        *end += length;
        Some(*end - length..*end)
    });
    ends.collect()
}

/// The values of a rank at the end, and the bytes that it received.
type Ended = (Vec<f32>, Traffic);

/// The work of a rank with its end; it reports the end of each step.
type Run<B> =
    dyn Fn(&B, Host<B>, &mut dyn FnMut(u64)) -> Result<Ended, CommunicatorError> + Send + Sync;

/// The results of ranks on `devices`, in `groups`, after each has run `run`. Timely's workers stand for processes: their messages
/// are serialized and read again.
fn carried<B: Backend>(
    devices: Vec<B>,
    topology: &Topology,
    (schedule, holders): (&Arc<LaneSchedule>, Holders),
    window_bytes: usize,
    run: Arc<Run<B>>,
) -> Vec<Result<Ended, CommunicatorError>> {
    let ranks = devices.len();
    let mut ends = Vec::new();
    for (index, group) in topology.groups().iter().enumerate() {
        let backends: Vec<_> = devices[group.clone()].iter().collect();
        let of_group = Host::group(&backends, topology, index, schedule, holders).unwrap();
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

/// The results of ranks that train.
fn trained<B: Backend>(
    devices: Vec<B>,
    buckets: Buckets,
    topology: &Topology,
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
        Ok((rank.replica(), rank.end.take_cost().traffic))
    };
    carried(devices, topology, (&schedule, EACH), window_bytes, Arc::new(run))
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

/// Hosts that are as large as others and not, of groups that are and are not, of which one has all ranks but one too.
///
/// Seen failing: with zeros passed on in place of an update, with terms that wait for others and are not copied, and, where they wait
/// forever, with one line for what a rank sends and what it passes on, and with a relay that counts uses by its own lanes.
#[test]
fn any_ranks_on_any_hosts_train_the_same_to_the_bit() {
    let shapes: [(&[usize], &[usize]); 10] = [
        (&[1, 1, 1], &[2, 1]),
        (&[1, 1, 1], &[1, 2]),
        (&[1, 1, 1, 1], &[2, 2]),
        (&[1, 1, 1, 1, 1], &[3, 2]),
        (&[2, 1, 1, 2], &[1, 3]),
        (&[1, 2, 3, 1], &[2, 1, 1]),
        (&[2, 2, 2, 2], &[2, 2]),
        (&[1; 8], &[4, 4]),
        (&[1; 8], &[1, 7]),
        (&[1; 8], &[3, 3, 2]),
    ];
    for (buckets, window_bytes) in [(SMALL, 0), (SMALL, 4 << 20), (LARGE, 0), (LARGE, 1 << 20)] {
        let expected = bits(&alone(buckets));
        for (of_groups, of_hosts) in shapes {
            let topology = Topology::new(ranges(of_groups), ranges(of_hosts)).unwrap();
            for rounds in Rounds::BOTH {
                let devices = cpus(topology.ranks());
                for ended in trained(devices, buckets, &topology, rounds, window_bytes) {
                    let (replica, _) = ended.unwrap();
                    let is_same = bits(&replica) == expected;
                    assert!(is_same, "{topology:?}, {rounds:?}, window {window_bytes}");
                }
            }
        }
    }
}

#[test]
fn devices_on_several_hosts_train_the_same_to_the_bit() {
    let expected = bits(&alone(SMALL));
    for (ranks, of_groups, of_hosts) in [(3, 3, 2), (4, 4, 2), (5, 4, 2)] {
        for rounds in Rounds::BOTH {
            let topology = hosts(ranks, of_groups, of_hosts);
            for window_bytes in [0, 4 << 20] {
                for ended in trained(emulators(ranks), SMALL, &topology, rounds, window_bytes) {
                    let (replica, _) = ended.unwrap();
                    assert!(bits(&replica) == expected, "{topology:?}, {rounds:?}");
                }
            }
        }
    }
}

/// The bytes that all ranks have received together.
fn received(topology: &Topology) -> Traffic {
    let ended = trained(cpus(topology.ranks()), LARGE, topology, Rounds::One, 4 << 20);
    let of_ranks = ended.into_iter().map(|ended| ended.unwrap().1);
    of_ranks.fold(Traffic::default(), |sum, traffic| Traffic {
        from_memory: sum.from_memory + traffic.from_memory,
        from_processes: sum.from_processes + traffic.from_processes,
        from_hosts: sum.from_hosts + traffic.from_hosts,
    })
}

/// Bytes of all buckets in all steps.
fn bytes_of_all() -> u64 {
    STEPS * (elements(LARGE) * size_of::<f32>()) as u64
}

/// All that crosses between two processes: half of the sums one way and half the other, and as much of what was updated.
#[test]
fn a_group_sends_what_one_worker_would() {
    for ranks in [2, 4, 8] {
        let Traffic { from_memory, from_processes, from_hosts } = received(&groups(ranks, 2));
        assert_eq!(from_processes, 2 * bytes_of_all(), "{ranks} ranks in 2 processes");
        assert_eq!((from_hosts, from_memory == 0), (from_processes, ranks == 2));
    }
}

/// Between hosts crosses what crosses between processes, whatever their numbers of processes; within them each process
/// receives the sums of the others once, and what was updated once.
///
/// Seen failing: with each group on a host of its own.
#[test]
fn a_host_sends_what_one_process_would() {
    for (ranks, of_groups, of_hosts) in
        [(2, 2, 2), (4, 4, 2), (8, 4, 2), (8, 8, 2), (8, 8, 4), (4, 4, 1)]
    {
        let Traffic { from_processes, from_hosts, .. } =
            received(&hosts(ranks, of_groups, of_hosts));
        let (others, others_here) = (of_hosts as u64 - 1, (of_groups / of_hosts) as u64 - 1);
        let what = format!("{ranks} ranks in {of_groups} processes on {of_hosts} hosts");
        assert_eq!(from_hosts, 2 * others * bytes_of_all(), "{what}");
        let here = from_processes - from_hosts;
        assert_eq!(here, 2 * of_hosts as u64 * others_here * bytes_of_all(), "{what}");
    }
}

/// Where the workers of a process hold the parameters together, each has what it and its counterparts have updated, and nothing else is
/// sent; be it that they read each other's memory or not.
#[test]
fn counterparts_have_what_they_have_updated() {
    const OWNED: [usize; 3] = [2 * CHUNK_ELEMENTS + 3, 0, 17];
    for (members, processes, is_group, of_hosts) in [
        (2, 2, true, 2),
        (3, 2, true, 2),
        (2, 3, false, 3),
        (3, 1, true, 1),
        (1, 3, true, 3),
        (2, 4, true, 2),
        (2, 3, false, 2),
        (1, 4, true, 2),
    ] {
        let ranks = members * processes;
        let holders = Holders::together(NonZeroUsize::new(members).unwrap());
        let by_process = ranges(&vec![members; processes]);
        let of_each = if is_group { 1 } else { members };
        let on_hosts = parts(processes, of_hosts).into_iter();
        let on_hosts = on_hosts.map(|of| of.start * of_each..of.end * of_each).collect();
        let of_groups = if is_group { by_process } else { parts(ranks, ranks) };
        let topology = Topology::new(of_groups, on_hosts).unwrap();
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
            Ok((values.as_slice().to_vec(), end.take_cost().traffic))
        };
        let ended = carried(cpus(ranks), &topology, (&schedule, holders), 1 << 20, Arc::new(run));
        let (mut came, mut came_from_hosts) = (0, 0);
        for (rank, ended) in ended.into_iter().enumerate() {
            let (found, traffic) = ended.unwrap();
            assert!(found == held(STEPS - 1, rank));
            came += traffic.from_processes;
            came_from_hosts += traffic.from_hosts;
            assert!(members == 1 || traffic.from_memory == 0, "{traffic:?}");
        }
        let all: usize = (0..ranks).map(owned).sum();
        let once = STEPS as usize * all * size_of::<f32>();
        let to_others = [(processes - 1) * once, (of_hosts - 1) * once].map(|bytes| bytes as u64);
        let found = [came, came_from_hosts];
        assert_eq!(found, to_others, "{members} of {ranks}: once a process, and once a host");
    }
}

/// The data that never comes.
#[derive(Clone, Copy, Debug)]
enum Missing {
    /// Data of the other worker of the group.
    OfGroup,
    /// Data of the other group.
    OfOthers,
}

/// From when any member aborts, every wait of a rank ends, and so does every later one.
#[test]
fn ranks_that_wait_for_their_group_or_another_are_ended() {
    const SOON: Duration = Duration::from_secs(20);
    let (cpu, cut, bucket) = (&cpus(1)[0], Cut::at(vec![4, 8, 12]), 0..12);
    let uses = std::slice::from_ref(&bucket);
    for missing in [Missing::OfGroup, Missing::OfOthers] {
        for is_gathered in [false, true] {
            let schedule = Rounds::One.schedule(4, 3);
            let topology = Topology::of_groups(vec![0..2, 2..3]).unwrap();
            let mut ends = Host::group(&[cpu, cpu], &topology, 0, &schedule, EACH).unwrap();
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
            // The couriers are kept and never run, so that nothing reaches the other group.
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
fn groups_of_other_ranks_are_refused() {
    let cpu = &cpus(1)[0];
    let schedule = Rounds::One.schedule(LANES, 3);
    let refused = |topology: &Topology, group| {
        let error = Host::group(&[cpu], topology, group, &schedule, EACH).err();
        assert!(error.is_some(), "{topology:?} {group}");
    };
    refused(&groups(2, 2), 0);
    refused(&groups(3, 3), 3);
    refused(&groups(3, 2), 1);
    refused(&groups(8, 8), 3);
}
