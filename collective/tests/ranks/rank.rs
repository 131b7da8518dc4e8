//! A rank that trains a little: its lanes' gradients are sums of made-up addends and the parameters, which every owner updates.

use std::sync::Arc;

use tidemill_collective::communicator::{
    Communicator, CommunicatorError, Cut, Key, ReduceScatter, Values, ValuesMut,
};
use tidemill_collective::{LaneSchedule, Node};
use tidemill_kernels::{Backend, Slice, SliceMut};

pub const LANES: usize = 8;
pub const STEPS: u64 = 3;
/// Elements of buckets.
pub type Buckets = &'static [usize];
/// Less than ranks have granules of, and several blocks of a kernel.
pub const SMALL: Buckets = &[700, 33, 5000, 64];
const GRANULE: usize = 64;

/// The events that a rank waits for before it computes again.
#[derive(Clone, Copy, PartialEq)]
pub enum Care {
    /// The end of its own gathers.
    Taken,
    /// For nothing.
    NotTaken,
    /// For what it gathered, but not for others before it writes over what they read.
    NotRead,
}

/// How lanes leave a rank.
#[derive(Clone, Copy, Debug)]
pub enum Rounds {
    /// All at once.
    One,
    /// Each once it is computed.
    ALane,
}

impl Rounds {
    pub const BOTH: [Self; 2] = [Self::One, Self::ALane];

    pub fn schedule(self, lanes: usize, ranks: usize) -> Arc<LaneSchedule> {
        Arc::new(match self {
            Self::One => LaneSchedule::at_once(lanes, ranks).unwrap(),
            Self::ALane => LaneSchedule::one_by_one(lanes, ranks).unwrap(),
        })
    }
}

pub fn elements(buckets: Buckets) -> usize {
    buckets.iter().sum()
}

/// The term of `lane` at a step. Magnitudes vary, so that another order of the sum gives other bits.
fn addend(step: u64, lane: usize, elements: usize) -> Vec<f32> {
    let value = |i: usize| {
        let mut x = (step << 40) + ((lane as u64) << 32) + i as u64;
        x = (x ^ (x >> 30)).wrapping_add(1).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let unit = ((x ^ (x >> 31)) >> 40) as f32 / (1 << 23) as f32 - 1.0;
        unit * 10_f32.powi((x % 7) as i32 - 3)
    };
    (0..elements).map(value).collect()
}

/// The parameters after all steps, by one thread without a device: each lane's gradient is its addend plus the parameters, and
/// the sum over lanes is added to them.
pub fn alone(buckets: Buckets) -> Vec<f32> {
    fn tree_sum(lanes: &[Vec<f32>]) -> Vec<f32> {
        let [lane] = lanes else {
            let (left, right) = lanes.split_at(lanes.len() / 2);
            return tree_sum(left).iter().zip(tree_sum(right)).map(|(l, r)| l + r).collect();
        };
        lane.clone()
    }
    let mut parameters = vec![0.0_f32; elements(buckets)];
    for step in 0..STEPS {
        let gradient = |lane| {
            addend(step, lane, parameters.len())
                .iter()
                .zip(&parameters)
                .map(|(a, p)| a + p)
                .collect::<Vec<f32>>()
        };
        let lanes: Vec<_> = (0..LANES).map(gradient).collect();
        parameters.iter_mut().zip(tree_sum(&lanes)).for_each(|(p, sum)| *p += sum);
    }
    parameters
}

/// Where each bucket begins.
fn starts(buckets: Buckets) -> impl Iterator<Item = usize> {
    buckets.iter().scan(0, |end, elements| {
        *end += elements;
        Some(*end - elements)
    })
}

/// Sums of lanes that join as they come, in order.
struct Along<B: Backend> {
    nodes: Vec<(Node, B::Buffer<f32>)>,
}

impl<B: Backend> Along<B> {
    fn new() -> Self {
        Self { nodes: Vec::new() }
    }

    fn push(
        &mut self,
        device: &B,
        stream: &mut B::DeviceStream,
        mut node: Node,
        mut sum: B::Buffer<f32>,
    ) -> Result<(), CommunicatorError> {
        let joins = |left: Node, right: Node| {
            left.lanes() == right.lanes() && left.lo.is_multiple_of(2 * left.lanes())
        };
        while self.nodes.last().is_some_and(|(left, _)| joins(*left, node)) {
            let (left, mut scratch) = self.nodes.pop().unwrap();
            device.accumulate(stream, SliceMut::all(&mut scratch), Slice::all(&sum))?;
            (node, sum) = (Node { lo: left.lo, hi: node.hi }, scratch);
        }
        self.nodes.push((node, sum));
        Ok(())
    }
}

/// A rank: it computes on one stream, and sums, updates and gathers on another.
pub struct Rank<'a, B: Backend> {
    device: &'a B,
    pub end: Box<dyn Communicator<B>>,
    schedule: Arc<LaneSchedule>,
    buckets: Buckets,
    cuts: &'a [Cut],
    compute: B::DeviceStream,
    state: B::DeviceStream,
    replica: B::Buffer<f32>,
    /// Masters of what is owned, bucket after bucket.
    masters: B::Buffer<f32>,
    /// For each round the sums at the nodes of this rank's lanes.
    nodes: Vec<Vec<(Node, B::Buffer<f32>)>>,
    gathered: Option<B::Event>,
}

impl<'a, B: Backend> Rank<'a, B> {
    pub fn new(
        device: &'a B,
        end: Box<dyn Communicator<B>>,
        schedule: &Arc<LaneSchedule>,
        buckets: Buckets,
        cuts: &'a [Cut],
    ) -> Self {
        let (mut compute, mut state) =
            (device.device_stream().unwrap(), device.device_stream().unwrap());
        let owned = cuts.iter().map(|cut| cut.of_rank(end.rank()).len()).sum();
        Self {
            replica: device.allocate(&mut compute, elements(buckets)).unwrap(),
            masters: device.allocate(&mut state, owned).unwrap(),
            nodes: Vec::new(),
            schedule: Arc::clone(schedule),
            gathered: None,
            device,
            end,
            buckets,
            cuts,
            compute,
            state,
        }
    }

    /// The sums over the nodes of this rank's lanes.
    fn compute(&mut self, step: u64, care: Care) {
        let Self { device, compute, nodes, replica, .. } = self;
        let elements = B::elements(replica);
        if care != Care::NotTaken
            && let Some(gathered) = &self.gathered
        {
            device.wait_for(compute, gathered).unwrap();
        }
        let rank = self.end.rank();
        let mut scratch = std::mem::take(nodes).into_iter().flatten().map(|(_, buffer)| buffer);
        for round in 0..self.schedule.rounds() {
            let mut of_round = Vec::new();
            for node in self.schedule.nodes(round, rank..rank + 1).unwrap() {
                let mut sums = Along::new();
                for lane in node.lo..node.hi {
                    let mut pinned = device.pinned::<f32>(elements).unwrap();
                    let values = device.pinned_values_mut(&mut pinned).unwrap();
                    values.copy_from_slice(&addend(step, lane as usize, elements));
                    let mut sum = match sums.nodes.is_empty().then(|| scratch.next()).flatten() {
                        Some(scratch) => scratch,
                        None => device.allocate(compute, elements).unwrap(),
                    };
                    device.write_async(compute, SliceMut::all(&mut sum), &pinned, 0).unwrap();
                    let parameters = Slice::all(replica);
                    device.accumulate(compute, SliceMut::all(&mut sum), parameters).unwrap();
                    sums.push(*device, compute, Node::leaf(lane), sum).unwrap();
                }
                of_round.append(&mut sums.nodes);
            }
            nodes.push(of_round);
        }
    }

    /// # Errors
    /// The errors of the communicator.
    pub fn step(&mut self, step: u64, care: Care) -> Result<(), CommunicatorError> {
        self.compute(step, care);
        let Self { device, compute, state, end, buckets, cuts, masters, replica, nodes, .. } = self;
        let post = end.post();
        let mut readings = Vec::new();
        for (round, nodes) in nodes.iter().enumerate() {
            let nodes: Vec<_> = nodes.iter().map(|(node, sums)| (*node, sums)).collect();
            for (bucket, start) in starts(buckets).enumerate() {
                let range = start..start + buckets[bucket];
                let uses = std::slice::from_ref(&range);
                let key = Key { round: round as u32, ..Key::new(step, bucket as u32) };
                readings.push(post.sums_until_read(*device, compute, key, &nodes, uses)?);
            }
        }
        let mut sums: Vec<_> = cuts.iter().map(|_| Along::new()).collect();
        for round in 0..self.schedule.rounds() {
            let nodes = self.schedule.sums(round).unwrap();
            let own = |cut: &Cut| cut.of_rank(end.rank()).len();
            let rooms =
                cuts.iter().map(|cut| device.allocate::<f32>(state, own(cut) * nodes.len()));
            let mut rooms = rooms.collect::<Result<Vec<_>, _>>()?;
            let all = cuts.iter().zip(&mut rooms).enumerate().map(|(bucket, (cut, room))| {
                let key = Key { round: round as u32, ..Key::new(step, bucket as u32) };
                ReduceScatter { key, cut, out: SliceMut::all(room) }
            });
            let mut all: Vec<_> = all.collect();
            // Several at once, one alone, and the rest at once: all of them are posted, or will be.
            let (rest, alone) = (all.split_off(all.len() / 2), all.pop());
            end.reduce_scatter_each(*device, state, all)?;
            if let Some(ReduceScatter { key, cut, out }) = alone {
                end.reduce_scatter(*device, state, key, cut, out)?;
            }
            end.reduce_scatter_each(*device, state, rest)?;
            for (bucket, (cut, scratch)) in cuts.iter().zip(&rooms).enumerate() {
                let elements = cut.of_rank(end.rank()).len();
                for (index, &node) in nodes.iter().enumerate().filter(|_| elements > 0) {
                    let mut sum = device.allocate(state, elements)?;
                    let from = Slice::new(scratch, index * elements, elements)?;
                    device.copy(state, SliceMut::all(&mut sum), from)?;
                    sums[bucket].push(*device, state, node, sum)?;
                }
            }
        }
        let mut at = 0;
        for sums in &sums {
            let Some((_, sum)) = sums.nodes.first() else { continue };
            let out = SliceMut::new(masters, at, B::elements(sum))?;
            device.accumulate(state, out, Slice::all(sum))?;
            at += B::elements(sum);
        }
        let mut at = 0;
        for ((bucket, cut), start) in cuts.iter().enumerate().zip(starts(buckets)) {
            let own = cut.of_rank(end.rank());
            let values = Slice::new(masters, at, own.len())?;
            let out = SliceMut::new(replica, start + own.start, own.len())?;
            if !own.is_empty() {
                device.copy(state, out, values)?;
            }
            end.updated(*device, state, Key::new(step, bucket as u32), cut, Values::Fp32(values))?;
            at += own.len();
        }
        for ((bucket, cut), start) in cuts.iter().enumerate().zip(starts(buckets)) {
            let out = SliceMut::new(replica, start, buckets[bucket])?;
            end.gather(*device, state, Key::new(step, bucket as u32), cut, ValuesMut::Fp32(out))?;
        }
        self.gathered = Some(device.record(state)?);
        // The memory that was read may be written again.
        for reading in readings.into_iter().flatten().filter(|_| care != Care::NotRead) {
            reading.end(*device, compute)?;
        }
        for (_, sum) in nodes.iter_mut().flatten() {
            device.fill_zero(compute, SliceMut::all(sum))?;
        }
        Ok(())
    }

    pub fn replica(&mut self) -> Vec<f32> {
        self.device.to_vec(&mut self.state, Slice::all(&self.replica)).unwrap()
    }
}

/// How the buckets are cut over `ranks`.
pub fn cuts(buckets: Buckets, ranks: usize) -> Vec<Cut> {
    let cut = |(first, &elements): (usize, &usize)| Cut::new(elements, ranks, GRANULE, first);
    buckets.iter().enumerate().map(cut).collect()
}

pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}
