//! What communication takes of a run: the bytes are those that paper says, and the times can be.

use std::collections::BTreeMap;
use std::ops::Range;

use tidemill::collective::Tree;
use tidemill::operators::{Communication, TrainingPlan};
use tidemill::parallel::Sharding;

use crate::harness::Run;
use crate::{bigram, same};

/// The measured communication by worker and step; every worker reports every step once.
fn communication_of(run: &Run) -> BTreeMap<(usize, u64), Communication> {
    let run = Run { communication_log: Default::default(), ..run.clone() };
    run.run().unwrap();
    let told = std::mem::take(&mut *run.communication_log.0.lock().unwrap());
    let first = run.resume.as_ref().map_or(1, |(step, _)| step + 1);
    assert_eq!(told.len() as u64, run.workers as u64 * (run.steps + 1 - first), "{run:?}");
    let by_step = told.into_iter().map(|(worker, step, told)| ((worker, step), told));
    let told: BTreeMap<_, _> = by_step.collect();
    let steps =
        (0..run.workers).flat_map(|worker| (first..=run.steps).map(move |step| (worker, step)));
    assert!(told.keys().copied().eq(steps), "{run:?}: {:?}", told.keys());
    for (of_step, communication) in &told {
        let Communication { milliseconds, exposed_milliseconds, .. } = *communication;
        assert!(milliseconds.is_finite() && milliseconds > 0.0, "{of_step:?}: {communication:?}");
        // Events of a CPU are instants of one clock, so that the comparison is exact.
        assert!((0.0..=milliseconds).contains(&exposed_milliseconds), "{communication:?}");
    }
    told
}

/// The traffic that the plan predicts.
struct Paper {
    plan: TrainingPlan,
    workers: usize,
    /// Workers of a process.
    members: usize,
    lanes: usize,
}

/// Elements that come from memory, and from other processes.
type Elements = [usize; 2];

impl Paper {
    fn of(run: &Run) -> Self {
        let members = run.workers / run.processes;
        Self { plan: run.plan(&bigram()), workers: run.workers, members, lanes: run.lanes }
    }

    /// Elements that `worker` owns of a range of the arena.
    fn owned(&self, worker: usize, of: &Range<usize>) -> usize {
        let owners = self.plan.owners(self.workers);
        let chunks = self.plan.chunks.chunks().iter().zip(owners);
        let owned = chunks.filter(|(chunk, owner)| {
            *owner == worker && of.contains(&chunk.range.start) && !chunk.range.is_empty()
        });
        owned.map(|(chunk, _)| chunk.range.len()).sum()
    }

    fn process(&self, worker: usize) -> Range<usize> {
        let first = worker / self.members * self.members;
        first..first + self.members
    }

    /// The number of sums that leave `workers` for each element that they do not own: one for each node of the tree over their lanes.
    /// Where each worker's lanes leave one by one, these are nodes over the lanes that leave together.
    fn terms(&self, workers: Range<usize>) -> usize {
        let lanes = |worker| self.plan.batch.worker_lanes(worker, self.workers).unwrap();
        let lanes: Vec<Vec<usize>> = workers.map(lanes).collect();
        let at_once: Vec<Vec<usize>> = match self.plan.batch.sharding() {
            Sharding::Optimizer => vec![lanes.concat()],
            Sharding::Gradients | Sharding::Parameters => {
                let rounds = lanes.iter().map(Vec::len).max().unwrap_or(0);
                let of_round =
                    |round| lanes.iter().filter_map(move |lanes| lanes.get(round).copied());
                (0..rounds).map(|round| of_round(round).collect()).collect()
            }
        };
        let tree = Tree::new(self.lanes).unwrap();
        let cover = |lanes: &[usize]| tree.cover(&(lanes[0]..lanes[0] + lanes.len())).len();
        at_once.iter().flat_map(|lanes| lanes.chunk_by(|a, b| a + 1 == *b)).map(cover).sum()
    }

    /// Each owner reads the terms of its peers, and is sent those of other processes.
    fn summed(&self, worker: usize) -> Elements {
        let own = self.process(worker);
        let peers = own.clone().filter(|&peer| peer != worker);
        let peers: usize = peers.map(|peer| self.terms(peer..peer + 1)).sum();
        let others = (0..self.workers).step_by(self.members).map(|first| self.process(first));
        let others: usize = others.filter(|of| *of != own).map(|of| self.terms(of)).sum();
        let buckets = self.plan.buckets.buckets().iter();
        let uses = buckets.map(|bucket| bucket.slots.len() * self.owned(worker, &bucket.range));
        let uses: usize = uses.sum();
        [uses * peers, uses * others]
    }

    /// The elements that other workers own. An element that another process owns is sent to the worker at the owner's place in its
    /// process, and the others read it there.
    fn gathered(&self, worker: usize) -> Elements {
        let mut elements = [0, 0];
        for owner in (0..self.workers).filter(|&owner| owner != worker) {
            let is_sent = !self.process(worker).contains(&owner)
                && owner % self.members == worker % self.members;
            let buckets = self.plan.buckets.buckets().iter();
            elements[usize::from(is_sent)] +=
                buckets.map(|bucket| self.owned(owner, &bucket.range)).sum::<usize>();
        }
        elements
    }
}

fn bytes(elements: Elements) -> [u64; 2] {
    elements.map(|elements| (elements * size_of::<f32>()) as u64)
}

fn bytes_of(communication: &Communication) -> [u64; 2] {
    [communication.bytes_from_memory, communication.bytes_from_processes]
}

/// The line of a step counts the gathers before it: there are none before the first step of a run.
#[test]
fn communication_takes_the_bytes_that_paper_says() {
    for (sharding, workers, processes) in [
        (Sharding::Optimizer, 2, 1),
        (Sharding::Optimizer, 3, 1),
        (Sharding::Gradients, 3, 1),
        (Sharding::Optimizer, 2, 2),
        (Sharding::Optimizer, 4, 2),
        (Sharding::Optimizer, 8, 4),
    ] {
        let run = Run { sharding, workers, processes, ..Run::default() };
        let paper = Paper::of(&run);
        for ((worker, step), communication) in communication_of(&run) {
            let (sums, gathers) = (paper.summed(worker), paper.gathered(worker));
            let gathers = if step == 1 { [0, 0] } else { gathers };
            let expected = bytes([0, 1].map(|from| sums[from] + gathers[from]));
            let of = format!("worker {worker} of {workers} in {processes}, step {step}");
            assert_eq!(bytes_of(&communication), expected, "{sharding:?}: {of}");
        }
    }
}

/// Half of the sums goes one way and half the other, and as much of what was updated, whatever the number of workers.
#[test]
fn processes_of_many_workers_send_each_other_what_those_of_one_do() {
    let paper = Paper::of(&Run::default());
    let buckets = paper.plan.buckets.buckets().iter();
    let [sums, updates] = buckets.fold([0, 0], |[sums, updates], bucket| {
        [sums + bucket.slots.len() * bucket.range.len(), updates + bucket.range.len()]
    });
    for workers in [2, 4, 8] {
        let mut crossed = BTreeMap::new();
        for ((_, step), communication) in
            communication_of(&Run { workers, processes: 2, ..Run::default() })
        {
            *crossed.entry(step).or_insert(0) += communication.bytes_from_processes;
        }
        for (step, crossed) in crossed {
            let [_, expected] = bytes([0, if step == 1 { sums } else { sums + updates }]);
            assert_eq!(crossed, expected, "{workers} workers, step {step}");
        }
    }
}

/// Hosts of several processes train to the same bits, and send each other what hosts of one process do.
///
/// Seen failing: with each process on a host of its own.
#[test]
fn hosts_of_many_processes_send_each_other_what_those_of_one_do() {
    let paper = Paper::of(&Run::default());
    let buckets = paper.plan.buckets.buckets().iter();
    let [sums, updates] = buckets.fold([0, 0], |[sums, updates], bucket| {
        [sums + bucket.slots.len() * bucket.range.len(), updates + bucket.range.len()]
    });
    for (workers, processes, window_bytes) in
        [(2, 2, 4 << 20), (4, 4, 4 << 20), (8, 4, 80), (8, 8, 0)]
    {
        let run = Run { workers, processes, hosts: 2, window_bytes, ..Run::default() };
        same(&run);
        let (mut crossed, mut came) = (BTreeMap::new(), 0);
        for ((_, step), communication) in communication_of(&run) {
            *crossed.entry(step).or_insert(0) += communication.bytes_from_hosts;
            came += communication.bytes_from_processes;
        }
        for (&step, &crossed) in &crossed {
            let [_, expected] = bytes([0, if step == 1 { sums } else { sums + updates }]);
            assert_eq!(crossed, expected, "{workers} workers of {processes}, step {step}");
        }
        assert_eq!(came == crossed.values().sum::<u64>(), processes == 2);
    }
    for sharding in [Sharding::Gradients, Sharding::Parameters] {
        for (workers, processes, hosts) in [(4, 4, 2), (8, 4, 2), (6, 6, 2), (3, 3, 2)] {
            same(&Run { sharding, workers, processes, hosts, window_bytes: 0, ..Run::default() });
        }
    }
}

/// A device thread of this model enters its three blocks and comes back, pass after pass. Two of them are there at a time: after the
/// first pass of a step it finds the first two, and gathers the last and then the first again. Blocks come from the workers of its process;
/// from other processes what its counterparts there have updated, once a step.
#[test]
fn parameters_that_are_shared_out_take_bytes_block_by_block() {
    for (workers, processes) in [(2, 1), (3, 1), (2, 2), (4, 2), (4, 1)] {
        let run = Run { sharding: Sharding::Parameters, workers, processes, ..Run::default() };
        let (paper, subject) = (Paper::of(&run), bigram());
        let layout = tidemill::model::Trainable::layout(&*subject.model);
        for ((worker, step), communication) in communication_of(&run) {
            // The first evaluation comes behind, and gathers too.
            if step > 4 {
                continue;
            }
            let batch = &paper.plan.batch;
            let lanes = batch.worker_lanes(worker, workers).unwrap();
            let passes: usize =
                lanes.into_iter().map(|lane| batch.microbatches(lane).count()).sum();
            let members = workers / processes;
            let from_others = |[first, last]: [usize; 2]| -> usize {
                let tensors = layout.tensors();
                let (start, end) = (tensors[first].offset, tensors[last].stored_range().end);
                let owners = paper.plan.owners(workers);
                let chunks = paper.plan.chunks.chunks().iter().zip(owners);
                let others = chunks.filter(|(_, owner)| *owner % members != worker % members);
                let inside = others.map(|(chunk, _)| {
                    chunk.range.end.min(end).saturating_sub(chunk.range.start.max(start))
                });
                // In both precisions, which are the same on CPUs.
                2 * inside.sum::<usize>()
            };
            let [table, scale, bias] = [[0, 0], [1, 1], [2, 3]].map(from_others);
            let gathered = (1 + passes) * table + scale + passes * (bias + table);
            let [from_memory, sent] = paper.summed(worker);
            let [_, updated] = if step == 1 { [0, 0] } else { paper.gathered(worker) };
            let expected = bytes([from_memory + gathered, sent + updated]);
            let of = format!("worker {worker} of {workers} in {processes}, step {step}");
            assert_eq!(bytes_of(&communication), expected, "{of}");
        }
    }
}

#[test]
fn a_worker_alone_tells_of_no_communication() {
    for sharding in Sharding::ALL {
        let run = Run { sharding, ..Run::default() };
        run.run().unwrap();
        assert!(run.communication_log.0.lock().unwrap().is_empty());
    }
}

/// A run that goes on has gathered nothing before its first step.
#[test]
fn a_resumed_run_tells_of_its_own_communication() {
    let run = Run { workers: 3, ..Run::default() };
    let whole = communication_of(&run);
    let resume = Some((4, crate::REFERENCE.checkpoints[&4].clone()));
    for ((worker, step), communication) in communication_of(&Run { resume, ..run }) {
        let like = if step == 5 { 1 } else { step };
        assert_eq!(bytes_of(&communication), bytes_of(&whole[&(worker, like)]), "step {step}");
    }
}
