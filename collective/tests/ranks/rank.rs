//! A rank that trains a little: its lanes' gradients are sums of made-up addends and the parameters, which every owner updates.

use tidemill_collective::communicator::{Communicator, CommunicatorError, Cut};
use tidemill_collective::{Node, Tree, lane_cut};
use tidemill_kernels::{Backend, Slice, SliceMut};

pub const LANES: usize = 8;
pub const STEPS: u64 = 3;
/// Elements of buckets.
pub type Buckets = &'static [usize];
/// Less than ranks have granules of, and several blocks of a kernel.
pub const SMALL: Buckets = &[700, 33, 5000, 64];
const GRANULE: usize = 64;

/// What a rank waits for before it computes again.
#[derive(Clone, Copy, PartialEq)]
pub enum Care {
    /// For what it gathered.
    Taken,
    /// For nothing.
    NotTaken,
}

pub fn elements(buckets: Buckets) -> usize {
    buckets.iter().sum()
}

/// What lane `lane` adds at a step, of magnitudes that show the order of a sum.
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

/// A rank: it computes on one stream, and sums, updates and gathers on another.
pub struct Rank<'a, B: Backend> {
    device: &'a B,
    pub end: Box<dyn Communicator<B>>,
    buckets: Buckets,
    cuts: &'a [Cut],
    compute: B::DeviceStream,
    state: B::DeviceStream,
    replica: B::Buffer<f32>,
    /// Masters and sums of what is owned, bucket after bucket.
    masters: B::Buffer<f32>,
    sums: B::Buffer<f32>,
    nodes: Vec<(Node, B::Buffer<f32>)>,
    gathered: Option<B::Event>,
}

impl<'a, B: Backend> Rank<'a, B> {
    pub fn new(
        device: &'a B,
        end: Box<dyn Communicator<B>>,
        buckets: Buckets,
        cuts: &'a [Cut],
    ) -> Self {
        let (mut compute, mut state) =
            (device.device_stream().unwrap(), device.device_stream().unwrap());
        let owned = cuts.iter().map(|cut| cut.of_rank(end.rank()).len()).sum();
        Self {
            replica: device.allocate(&mut compute, elements(buckets)).unwrap(),
            masters: device.allocate(&mut state, owned).unwrap(),
            sums: device.allocate(&mut state, owned).unwrap(),
            nodes: Vec::new(),
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
        if care == Care::Taken
            && let Some(gathered) = &self.gathered
        {
            device.wait_for(compute, gathered).unwrap();
        }
        let ranks = self.cuts[0].ranks();
        let tree = Tree::new(LANES).unwrap();
        let lanes = lane_cut(LANES, ranks).unwrap()[self.end.rank()].clone();
        let mut room = std::mem::take(nodes).into_iter().map(|(_, buffer)| buffer);
        for node in tree.cover(&lanes) {
            let mut sums: Vec<(usize, B::Buffer<f32>)> = Vec::new();
            for lane in node.lo as usize..node.hi as usize {
                let mut pinned = device.pinned::<f32>(elements).unwrap();
                let values = device.pinned_values_mut(&mut pinned).unwrap();
                values.copy_from_slice(&addend(step, lane, elements));
                let mut sum = match sums.is_empty().then(|| room.next()).flatten() {
                    Some(room) => room,
                    None => device.allocate(compute, elements).unwrap(),
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
    }

    /// # Errors
    /// Those of the communicator.
    pub fn step(&mut self, step: u64, care: Care) -> Result<(), CommunicatorError> {
        self.compute(step, care);
        let Self {
            device, compute, state, end, buckets, cuts, masters, sums, replica, nodes, ..
        } = self;
        let post = end.post();
        let nodes: Vec<_> = nodes.iter().map(|(node, sums)| (*node, sums)).collect();
        for (bucket, start) in starts(buckets).enumerate() {
            let range = start..start + buckets[bucket];
            let uses = std::slice::from_ref(&range);
            post.sums(device, compute, (step, bucket as u32), &nodes, uses)?;
        }
        let mut at = 0;
        for (bucket, cut) in cuts.iter().enumerate() {
            let elements = cut.of_rank(end.rank()).len();
            let out = SliceMut::new(sums, at, elements)?;
            end.reduce_scatter(device, state, (step, bucket as u32), cut, out)?;
            at += elements;
        }
        if at > 0 {
            device.accumulate(state, SliceMut::all(masters), Slice::all(sums))?;
        }
        let mut at = 0;
        for ((bucket, cut), start) in cuts.iter().enumerate().zip(starts(buckets)) {
            let own = cut.of_rank(end.rank());
            let values = Slice::new(masters, at, own.len())?;
            let out = SliceMut::new(replica, start + own.start, own.len())?;
            if !own.is_empty() {
                device.copy(state, out, values)?;
            }
            end.updated(device, state, (step, bucket as u32), cut, values)?;
            at += own.len();
        }
        for ((bucket, cut), start) in cuts.iter().enumerate().zip(starts(buckets)) {
            let out = SliceMut::new(replica, start, buckets[bucket])?;
            end.gather(device, state, (step, bucket as u32), cut, out)?;
        }
        self.gathered = Some(device.record(state)?);
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
