//! Ranks of one process that sum and gather over emulated devices, whose queues run in any order.
//!
//! Seen red: with an owner that does not wait for its peers' sums, with a gather that does not wait for an update, and, below,
//! with a rank that does not wait for the gather before it computes again.

use std::ops::Range;
use std::sync::Arc;

use tidemill_collective::communicator::{CommunicatorError, Cut, OwnPart, Part, Threads, Update};
use tidemill_collective::{CollectiveError, Node, Tree, lane_cut};
use tidemill_kernels::emulator::{EmulatorSettings, Schedule};
use tidemill_kernels::{Backend, Emulator, Fp32, Gpu, Runtime, Shared, Slice, SliceMut};

type Device = Gpu<Emulator, Fp32>;
type Stream = <Device as Runtime>::DeviceStream;
type Buffer = <Device as Runtime>::Buffer<f32>;
type Event = <Device as Runtime>::Event;
type Ranks = Threads<Device, f32>;

const LANES: usize = 8;
const STEPS: u64 = 3;
/// Elements of the buckets: less than ranks have granules of, and several blocks of a kernel.
const BUCKETS: [usize; 4] = [700, 33, 5000, 64];
const GRANULE: usize = 64;

/// What a rank waits for before it computes again.
#[derive(Clone, Copy, PartialEq)]
enum Care {
    /// For what it gathered.
    Taken,
    /// For nothing.
    NotTaken,
}

fn device(schedule: &Arc<Schedule>) -> Device {
    let emulator = Emulator::new(EmulatorSettings { warp: 32, seed: 0 }).unwrap();
    Gpu::new(emulator.with_schedule(schedule))
}

fn share(buffer: &Buffer) -> Shared<Device, f32> {
    Device::share(buffer).expect("a device with a memory of its own")
}

fn elements() -> usize {
    BUCKETS.iter().sum()
}

/// What lane `lane` adds at a step, of magnitudes that show the order of a sum.
fn addend(step: u64, lane: usize) -> Vec<f32> {
    let value = |i: usize| {
        let mut x = (step << 40) + ((lane as u64) << 32) + i as u64;
        x = (x ^ (x >> 30)).wrapping_add(1).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let unit = ((x ^ (x >> 31)) >> 40) as f32 / (1 << 23) as f32 - 1.0;
        unit * 10_f32.powi((x % 7) as i32 - 3)
    };
    (0..elements()).map(value).collect()
}

/// The parameters after all steps, by one thread without a device: each lane's gradient is its addend plus the parameters, and
/// the sum over lanes is added to them.
fn alone() -> Vec<f32> {
    fn tree_sum(lanes: &[Vec<f32>]) -> Vec<f32> {
        let [lane] = lanes else {
            let (left, right) = lanes.split_at(lanes.len() / 2);
            return tree_sum(left).iter().zip(tree_sum(right)).map(|(l, r)| l + r).collect();
        };
        lane.clone()
    }
    let mut parameters = vec![0.0_f32; elements()];
    for step in 0..STEPS {
        let gradient = |lane| {
            addend(step, lane).iter().zip(&parameters).map(|(a, p)| a + p).collect::<Vec<f32>>()
        };
        let lanes: Vec<_> = (0..LANES).map(gradient).collect();
        parameters.iter_mut().zip(tree_sum(&lanes)).for_each(|(p, sum)| *p += sum);
    }
    parameters
}

/// A rank: it computes on one stream, and sums, updates and gathers on another.
struct Rank<'a> {
    device: &'a Device,
    ends: Ranks,
    cuts: &'a [Cut],
    compute: Stream,
    state: Stream,
    replica: Buffer,
    /// Masters and sums of what is owned, bucket after bucket.
    masters: Buffer,
    sums: Buffer,
    nodes: Vec<(Node, Buffer)>,
    gathered: Option<Event>,
}

impl<'a> Rank<'a> {
    fn new(device: &'a Device, ends: Ranks, cuts: &'a [Cut]) -> Self {
        let (mut compute, mut state) =
            (device.device_stream().unwrap(), device.device_stream().unwrap());
        let owned = cuts.iter().map(|cut| cut.of_rank(ends.rank()).len()).sum();
        Self {
            replica: device.allocate(&mut compute, elements()).unwrap(),
            masters: device.allocate(&mut state, owned).unwrap(),
            sums: device.allocate(&mut state, owned).unwrap(),
            nodes: Vec::new(),
            gathered: None,
            device,
            ends,
            cuts,
            compute,
            state,
        }
    }

    /// The sums over the nodes of this rank's lanes.
    fn compute(&mut self, step: u64, care: Care) -> Event {
        let Self { device, compute, nodes, replica, .. } = self;
        if care == Care::Taken
            && let Some(gathered) = &self.gathered
        {
            device.wait_for(compute, gathered).unwrap();
        }
        let ranks = self.cuts[0].ranks();
        let tree = Tree::new(LANES).unwrap();
        let lanes = lane_cut(LANES, ranks).unwrap()[self.ends.rank()].clone();
        let mut room = std::mem::take(nodes).into_iter().map(|(_, buffer)| buffer);
        for node in tree.cover(&lanes) {
            let mut sums: Vec<(usize, Buffer)> = Vec::new();
            for lane in node.lo as usize..node.hi as usize {
                let mut pinned = device.pinned::<f32>(elements()).unwrap();
                let values = device.pinned_values_mut(&mut pinned).unwrap();
                values.copy_from_slice(&addend(step, lane));
                let mut sum = match sums.is_empty().then(|| room.next()).flatten() {
                    Some(room) => room,
                    None => device.allocate(compute, elements()).unwrap(),
                };
                device.write_async(compute, SliceMut::all(&mut sum), &pinned, 0).unwrap();
                let parameters = Slice::all(replica);
                device.accumulate(compute, SliceMut::all(&mut sum), parameters).unwrap();
                let mut lanes = 1;
                while sums.last().is_some_and(|(before, _)| *before == lanes) {
                    let (before, mut left) = sums.pop().unwrap();
                    let right = Slice::all(&sum);
                    device.accumulate(compute, SliceMut::all(&mut left), right).unwrap();
                    (lanes, sum) = (before + lanes, left);
                }
                sums.push((lanes, sum));
            }
            let (_, sum) = sums.pop().unwrap();
            nodes.push((node, sum));
        }
        device.record(compute).unwrap()
    }

    fn step(&mut self, step: u64, care: Care) -> Result<(), CommunicatorError> {
        let ready = self.compute(step, care);
        let Self { device, state, ends, cuts, masters, sums, replica, nodes, .. } = self;
        let post = ends.post();
        let starts = || {
            BUCKETS.iter().scan(0, |end, elements| {
                *end += elements;
                Some(*end - elements)
            })
        };
        let part = |(node, sums): &(Node, Buffer)| Part { node: *node, sums: share(sums) };
        let parts: Vec<_> = nodes.iter().map(part).collect();
        for bucket in 0..BUCKETS.len() {
            post.sums(step, bucket as u32, &parts, &ready)?;
        }
        let mut at = 0;
        let mut owned = Vec::new();
        for ((bucket, cut), start) in cuts.iter().enumerate().zip(starts()) {
            let Range { start: first, end } = cut.of_rank(ends.rank());
            let elements = end - first;
            let out = SliceMut::new(sums, at, elements)?;
            let range = start + first..start + end;
            ends.reduce_scatter(device, state, (step, bucket as u32), &[range], out)?;
            owned.push(at);
            at += elements;
        }
        if at > 0 {
            device.accumulate(state, SliceMut::all(masters), Slice::all(sums))?;
        }
        let updated = device.record(state)?;
        let values = share(masters);
        for (bucket, &start) in owned.iter().enumerate() {
            let update = Update { values: values.clone(), start };
            post.updated(step, bucket as u32, &update, &updated)?;
        }
        for ((bucket, cut), start) in cuts.iter().enumerate().zip(starts()) {
            let (key, own) = ((step, bucket as u32), OwnPart::IsElsewhere);
            let out = SliceMut::new(replica, start, BUCKETS[bucket])?;
            ends.gather(device, state, key, cut, out, own)?;
        }
        self.gathered = Some(device.record(state)?);
        Ok(())
    }

    fn replica(mut self) -> Vec<f32> {
        self.device.to_vec(&mut self.state, Slice::all(&self.replica)).unwrap()
    }
}

/// What every rank has after all steps.
fn trained(ranks: usize, seed: u64, care: Care) -> Vec<Vec<f32>> {
    let schedule = Schedule::new(seed);
    let devices: Vec<_> = (0..ranks).map(|_| device(&schedule)).collect();
    let backends: Vec<_> = devices.iter().collect();
    let ends = Ranks::group(&backends, Tree::new(LANES).unwrap()).unwrap();
    let cut = |(first, &elements): (usize, &usize)| Cut::new(elements, ranks, GRANULE, first);
    let cuts: Vec<_> = BUCKETS.iter().enumerate().map(cut).collect();
    std::thread::scope(|scope| {
        let run = |(device, ends)| {
            let cuts = &cuts;
            scope.spawn(move || {
                let mut rank = Rank::new(device, ends, cuts);
                (0..STEPS).for_each(|step| rank.step(step, care).unwrap());
                rank.replica()
            })
        };
        let running: Vec<_> = devices.iter().zip(ends).map(run).collect();
        running.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn any_number_of_ranks_train_the_same_to_the_bit() {
    let expected = bits(&alone());
    for ranks in [1, 2, 3, 5, 8] {
        for seed in 0..2 {
            for replica in trained(ranks, seed, Care::Taken) {
                assert!(bits(&replica) == expected, "{ranks} ranks, order {seed}");
            }
        }
    }
}

#[test]
fn a_rank_that_does_not_wait_for_what_it_gathers_is_found_out() {
    let expected = bits(&alone());
    let is_right =
        |seed| trained(2, seed, Care::NotTaken).iter().all(|replica| bits(replica) == expected);
    assert!(!(0..10).all(is_right));
}

#[test]
fn lanes_that_are_missing_or_told_twice_are_errors() {
    let schedule = Schedule::new(0);
    let devices = [device(&schedule), device(&schedule)];
    let tree = Tree::new(2).unwrap();
    let mut ends = Ranks::group(&devices.each_ref(), tree).unwrap();
    let mut stream = devices[0].device_stream().unwrap();
    let mut sums = devices[0].allocate::<f32>(&mut stream, 8).unwrap();
    let event = devices[0].record(&mut stream).unwrap();
    let part = Part { node: Node::leaf(0), sums: share(&sums) };
    let owned = 0..4;
    let parts = [part.clone()];
    for end in &ends {
        end.post().sums(7, 3, &parts, &event).unwrap();
    }
    let out = SliceMut::new(&mut sums, 0, 4).unwrap();
    let error = ends[0]
        .reduce_scatter(&devices[0], &mut stream, (7, 3), std::slice::from_ref(&owned), out)
        .err()
        .unwrap();
    let twice = CollectiveError::DuplicateNode { node: part.node, present: part.node };
    assert!(matches!(&error, CommunicatorError::Collective(found) if *found == twice), "{error}");
    for _ in 0..2 {
        ends[0].post().sums(8, 3, &parts, &event).unwrap();
    }
    let out = SliceMut::new(&mut sums, 0, 4).unwrap();
    let error = ends[1]
        .reduce_scatter(&devices[1], &mut stream, (8, 3), std::slice::from_ref(&owned), out)
        .err()
        .unwrap();
    let expected = "rank 0 posted the sums of bucket 3 at step 9 twice";
    assert_eq!(error.to_string(), expected);
}

#[test]
fn ranks_that_wait_are_ended() {
    let schedule = Schedule::new(0);
    let devices = [device(&schedule), device(&schedule)];
    let tree = Tree::new(2).unwrap();
    let mut ends = Ranks::group(&devices.each_ref(), tree).unwrap();
    let abort = ends[0].abort_handle();
    std::thread::scope(|scope| {
        for (end, device) in ends.iter_mut().zip(&devices) {
            scope.spawn(move || {
                let mut stream = device.device_stream().unwrap();
                let mut out = device.allocate::<f32>(&mut stream, 8).unwrap();
                for _ in 0..2 {
                    let summed = end.reduce_scatter(
                        device,
                        &mut stream,
                        (0, 0),
                        &[0..4, 4..8],
                        SliceMut::all(&mut out),
                    );
                    assert!(matches!(summed, Err(CommunicatorError::Closed)));
                }
            });
        }
        abort();
    });
}
