//! Ranks that are threads of one process, each with a device.
//!
//! An owner's kernel loads the memory of its peers directly and adds along the tree: nothing is staged, and every byte
//! crosses the link once. Copies of what was updated are loads too.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::mpsc::{self, Receiver, Sender};

use tidemill_kernels::backend::TreeTerm;
use tidemill_kernels::{Backend, Element, MemoryPlace, PeerAccess, Shared, SliceMut};

use super::{Abort, Communicator, CommunicatorError, Cut, Result};
use crate::tree::{Node, Tree};

/// The sum over the lanes of a node, in a buffer of the rank that formed it.
pub struct Part<B: Backend> {
    /// The lanes.
    pub node: Node,
    /// The buffer.
    pub sums: Shared<B, f32>,
}

impl<B: Backend> Clone for Part<B> {
    fn clone(&self) -> Self {
        Self { node: self.node, sums: self.sums.clone() }
    }
}

/// What a rank has updated of a bucket, in a buffer of its own.
pub struct Update<B: Backend, T: Element> {
    /// The buffer.
    pub values: Shared<B, T>,
    /// Where what the rank owns of the bucket begins in it.
    pub start: usize,
}

impl<B: Backend, T: Element> Clone for Update<B, T> {
    fn clone(&self) -> Self {
        Self { values: self.values.clone(), start: self.start }
    }
}

/// What is told of a bucket at a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key {
    pub(super) step: u64,
    pub(super) bucket: u32,
}

enum Message<B: Backend, T: Element> {
    Sums { rank: usize, key: Key, parts: Vec<Part<B>>, ready: B::Event },
    Updated { rank: usize, key: Key, update: Update<B, T>, ready: B::Event },
    Abort,
}

/// What every rank has told of a bucket, in the order of ranks, and the events behind it.
pub(super) type OfRanks<C, E> = Vec<(C, E)>;

/// What some ranks have told so far.
type Told<C, E> = BTreeMap<Key, Vec<Option<(C, E)>>>;

/// What a rank was last told of each bucket, and reads: the memory stays for as long, whatever becomes of the others. Their
/// owners overwrite it only after all have read, but a run may end before.
struct Read<B: Backend, T: Element> {
    sums: BTreeMap<u32, OfRanks<Vec<Part<B>>, B::Event>>,
    updates: BTreeMap<u32, OfRanks<Update<B, T>, B::Event>>,
}

/// Tells all ranks of a process what one of them has. It may be cloned, for the threads of a rank.
pub struct Post<B: Backend, T: Element> {
    rank: usize,
    ranks: Vec<Sender<Message<B, T>>>,
}

impl<B: Backend, T: Element> Clone for Post<B, T> {
    fn clone(&self) -> Self {
        Self { rank: self.rank, ranks: self.ranks.clone() }
    }
}

impl<B: Backend, T: Element> Post<B, T> {
    /// This rank's part of the sums of `bucket` at `step` is final once `ready` is reached, and stays until this rank has gathered
    /// what every owner made of it.
    ///
    /// # Errors
    /// [`CommunicatorError::Closed`].
    pub fn sums(&self, step: u64, bucket: u32, parts: &[Part<B>], ready: &B::Event) -> Result<()> {
        let key = Key { step, bucket };
        self.tell(|| Message::Sums {
            rank: self.rank,
            key,
            parts: parts.to_vec(),
            ready: ready.clone(),
        })
    }

    /// What this rank owns of `bucket` has been updated once `ready` is reached, and stays until every rank has posted its sums of
    /// the next step.
    ///
    /// # Errors
    /// [`CommunicatorError::Closed`].
    pub fn updated(
        &self,
        step: u64,
        bucket: u32,
        update: &Update<B, T>,
        ready: &B::Event,
    ) -> Result<()> {
        let key = Key { step, bucket };
        self.tell(|| Message::Updated {
            rank: self.rank,
            key,
            update: update.clone(),
            ready: ready.clone(),
        })
    }

    fn tell(&self, message: impl Fn() -> Message<B, T>) -> Result<()> {
        let told = |rank: &Sender<_>| rank.send(message()).map_err(|_| CommunicatorError::Closed);
        self.ranks.iter().try_for_each(told)
    }
}

/// The end of one rank at which it learns what the others have. Before it is dropped, the device streams that it was used with
/// must have run: what they read is then given back.
///
/// A call waits until every rank has told of the bucket, which their threads do when they enqueue: so the host waits for
/// other hosts, and devices wait for devices. All ranks must go through the buckets in the same order.
pub struct Threads<B: Backend, T: Element> {
    rank: usize,
    tree: Tree,
    post: Post<B, T>,
    messages: Receiver<Message<B, T>>,
    sums: Told<Vec<Part<B>>, B::Event>,
    updates: Told<Update<B, T>, B::Event>,
    read: Read<B, T>,
    /// Whether the ranks were told to end.
    is_over: bool,
}

impl<B: Backend, T: Element> Threads<B, T> {
    /// The ends of ranks whose devices are `backends`, in order, which sum over the lanes of `tree`.
    ///
    /// # Errors
    /// [`CommunicatorError::OutOfReach`], or a device that fails.
    pub fn group(backends: &[&B], tree: Tree) -> Result<Vec<Self>> {
        for (rank, backend) in backends.iter().enumerate() {
            for (peer, of_peer) in backends.iter().enumerate() {
                let absent = backend.memory() == MemoryPlace::Host
                    || backend.reach(of_peer)? == PeerAccess::Absent;
                if absent {
                    return Err(CommunicatorError::OutOfReach { rank, peer });
                }
            }
        }
        let (ranks, messages): (Vec<_>, Vec<_>) = backends.iter().map(|_| mpsc::channel()).unzip();
        let end = |(rank, messages)| Self {
            rank,
            tree,
            post: Post { rank, ranks: ranks.clone() },
            messages,
            sums: BTreeMap::new(),
            updates: BTreeMap::new(),
            read: Read { sums: BTreeMap::new(), updates: BTreeMap::new() },
            is_over: false,
        };
        Ok(messages.into_iter().enumerate().map(end).collect())
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The number of ranks.
    pub fn ranks(&self) -> usize {
        self.post.ranks.len()
    }

    /// With which this rank tells the others.
    pub fn post(&self) -> Post<B, T> {
        self.post.clone()
    }

    /// From when it is called on every rank that waits, or comes to wait, is told [`CommunicatorError::Closed`].
    pub fn abort_handle(&self) -> Abort {
        let ranks = self.post.ranks.clone();
        Box::new(move || {
            for rank in &ranks {
                // A rank that is gone waits for nothing.
                let _ = rank.send(Message::Abort);
            }
        })
    }

    /// The sums over all lanes of elements `owned` of the buffers in which `bucket` was posted, one range after the other in `out`.
    ///
    /// # Errors
    /// Parts that are not all lanes once, [`CommunicatorError::Closed`], or a device that fails.
    pub fn reduce_scatter(
        &mut self,
        backend: &B,
        stream: &mut B::DeviceStream,
        (step, bucket): (u64, u32),
        owned: &[Range<usize>],
        mut out: SliceMut<'_, B, f32>,
    ) -> Result<()> {
        let told = self.wait_for_sums(Key { step, bucket })?;
        let mut parts = Vec::new();
        // Also where nothing is owned: a rank that has posted has gathered what this one is about to update.
        for (of_rank, ready) in &told {
            backend.wait_for(stream, ready)?;
            parts.extend(of_rank);
        }
        parts.sort_by_key(|part| part.node);
        let nodes: Vec<Node> = parts.iter().map(|part| part.node).collect();
        let joins = self.tree.joins(&nodes)?;
        let mut start = 0;
        for range in owned.iter().filter(|range| !range.is_empty()) {
            let mut terms = Vec::with_capacity(parts.len());
            for (part, &joins) in parts.iter().zip(&joins) {
                let values = Some(part.sums.slice(range.start, range.len())?);
                terms.push(TreeTerm { values, joins });
            }
            backend.tree_sum(stream, out.reborrow().sub(start, range.len())?, &terms)?;
            start += range.len();
        }
        drop(parts);
        self.read.sums.insert(bucket, told);
        Ok(())
    }

    /// What every owner has updated of `bucket`, in `out`, which holds the bucket. What this rank owns is copied too, unless it is
    /// there already.
    ///
    /// # Errors
    /// [`CommunicatorError::Closed`], or a device that fails.
    pub fn gather(
        &mut self,
        backend: &B,
        stream: &mut B::DeviceStream,
        (step, bucket): (u64, u32),
        cut: &Cut,
        mut out: SliceMut<'_, B, T>,
        own: OwnPart,
    ) -> Result<()> {
        let told = self.wait_for_updates(Key { step, bucket })?;
        for (rank, (update, ready)) in told.iter().enumerate() {
            let range = cut.of_rank(rank);
            if range.is_empty() || (rank == self.rank && own == OwnPart::IsThere) {
                continue;
            }
            backend.wait_for(stream, ready)?;
            let from = update.values.slice(update.start, range.len())?;
            backend.copy(stream, out.reborrow().sub(range.start, range.len())?, from)?;
        }
        self.read.updates.insert(bucket, told);
        Ok(())
    }

    /// What every rank has told of its sums.
    pub(super) fn wait_for_sums(&mut self, key: Key) -> Result<OfRanks<Vec<Part<B>>, B::Event>> {
        loop {
            if let Some(told) = complete(&mut self.sums, key) {
                return Ok(told);
            }
            self.receive()?;
        }
    }

    fn wait_for_updates(&mut self, key: Key) -> Result<OfRanks<Update<B, T>, B::Event>> {
        loop {
            if let Some(told) = complete(&mut self.updates, key) {
                return Ok(told);
            }
            self.receive()?;
        }
    }

    fn receive(&mut self) -> Result<()> {
        if self.is_over {
            return Err(CommunicatorError::Closed);
        }
        let ranks = self.post.ranks.len();
        match self.messages.recv().map_err(|_| CommunicatorError::Closed)? {
            Message::Sums { rank, key, parts, ready } => {
                note(&mut self.sums, ranks, (rank, "the sums", key), (parts, ready))
            }
            Message::Updated { rank, key, update, ready } => {
                note(&mut self.updates, ranks, (rank, "the update", key), (update, ready))
            }
            Message::Abort => {
                self.is_over = true;
                Err(CommunicatorError::Closed)
            }
        }
    }
}

impl<B: Backend> Communicator<B> for Threads<B, f32> {
    fn rank(&self) -> usize {
        Self::rank(self)
    }

    fn ranks(&self) -> usize {
        Self::ranks(self)
    }

    fn post(&self) -> Post<B, f32> {
        Self::post(self)
    }

    fn abort_handle(&self) -> Abort {
        Self::abort_handle(self)
    }

    fn reduce_scatter(
        &mut self,
        backend: &B,
        stream: &mut B::DeviceStream,
        key: (u64, u32),
        owned: &[Vec<Range<usize>>],
        out: SliceMut<'_, B, f32>,
    ) -> Result<()> {
        let rank = self.rank;
        Self::reduce_scatter(self, backend, stream, key, &owned[rank], out)
    }

    fn updated(
        &mut self,
        (step, bucket): (u64, u32),
        update: Update<B, f32>,
        ready: &B::Event,
    ) -> Result<()> {
        self.post.updated(step, bucket, &update, ready)
    }

    fn gather(
        &mut self,
        backend: &B,
        stream: &mut B::DeviceStream,
        key: (u64, u32),
        cut: &Cut,
        out: SliceMut<'_, B, f32>,
    ) -> Result<()> {
        Self::gather(self, backend, stream, key, cut, out, OwnPart::IsThere)
    }
}

/// Whether what a rank owns is where it gathers to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OwnPart {
    /// It was updated there.
    IsThere,
    /// It was updated elsewhere.
    IsElsewhere,
}

/// Keeps what a rank has told.
fn note<C, E>(
    told: &mut Told<C, E>,
    ranks: usize,
    (rank, what, key): (usize, &'static str, Key),
    value: (C, E),
) -> Result<()> {
    let of_ranks = told.entry(key).or_insert_with(|| (0..ranks).map(|_| None).collect());
    match of_ranks[rank].replace(value) {
        None => Ok(()),
        Some(_) => {
            let Key { step, bucket } = key;
            Err(CommunicatorError::Posted { rank, what, bucket, step, wrong: "twice" })
        }
    }
}

/// What all ranks have told of a bucket, once they have.
fn complete<C, E>(told: &mut Told<C, E>, key: Key) -> Option<OfRanks<C, E>> {
    let is_complete = told.get(&key).is_some_and(|of_ranks| of_ranks.iter().all(Option::is_some));
    is_complete.then(|| told.remove(&key)).flatten()?.into_iter().collect()
}
