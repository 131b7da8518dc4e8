//! The posts between workers that read each other's memory: a [`Post`] announces, an `Inbox` receives.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender, TryRecvError};

use tidemill_kernels::{Backend, MemoryPlace, Shared, Slice};

use super::values::SharedValues;
use super::{Abort, CommunicatorError, Holders, Result};
use crate::carry::Arrived;
use crate::chunk::{ChunkHeader, Part};
use crate::error::CollectiveError;
use crate::lane_schedule::LaneSchedule;
use crate::node::Node;

/// The posted sums of a worker's lanes, and where readers tell that they have read them.
pub(super) struct PostedSums<B: Backend> {
    pub(super) sums: Vec<Sums<B>>,
    /// The number of uses of the bucket, which a worker without lanes in a round posts too.
    pub(super) uses: usize,
    read: Option<Sender<B::Event>>,
}

impl<B: Backend> Clone for PostedSums<B> {
    fn clone(&self) -> Self {
        Self { sums: self.sums.clone(), uses: self.uses, read: self.read.clone() }
    }
}

/// The sum over the lanes of a node, for each use of a bucket.
pub(super) struct Sums<B: Backend> {
    pub(super) node: Node,
    pub(super) uses: Vec<Shared<B, f32>>,
}

impl<B: Backend> Clone for Sums<B> {
    fn clone(&self) -> Self {
        Self { node: self.node, uses: self.uses.clone() }
    }
}

/// Names one sum or gather: a bucket of a round of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key {
    /// The step, from 0.
    pub step: u64,
    /// For a sum the round of its lanes in the [`LaneSchedule`]; for an update 0, or 1 where it is in the second precision.
    pub round: u32,
    /// The bucket.
    pub bucket: u32,
}

impl Key {
    /// A bucket of the first round of a step, or its update.
    pub fn new(step: u64, bucket: u32) -> Self {
        Self { step, round: 0, bucket }
    }

    /// The update in the second precision, of a bucket that is gathered in two.
    #[must_use]
    pub fn beside(self) -> Self {
        Self { round: 1, ..self }
    }
}

/// Posted memory that other workers are reading.
pub struct Reading<B: Backend> {
    readers: usize,
    read: Receiver<B::Event>,
}

impl<B: Backend> Reading<B> {
    /// Waits until all readers have enqueued their reads; work that is enqueued on `stream` afterwards may overwrite the memory.
    ///
    /// # Errors
    /// [`CommunicatorError::Closed`], or a device that fails.
    pub fn end(self, backend: &B, stream: &mut B::DeviceStream) -> Result<()> {
        for _ in 0..self.readers {
            let read = self.read.recv().map_err(|_| CommunicatorError::Closed)?;
            backend.wait_for(stream, &read)?;
        }
        Ok(())
    }
}

/// The kinds of chunks from other processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum ArrivalKind {
    Sums,
    Update,
}

impl ArrivalKind {
    /// The error of a chunk that `rank` should not have sent.
    pub(super) fn wrong(self, rank: usize, key: Key, wrong: &'static str) -> CommunicatorError {
        let what = match self {
            Self::Sums => "the sums",
            Self::Update => "the update",
        };
        let Key { step, bucket, .. } = key;
        CommunicatorError::Posted { rank, what, bucket, step, wrong }
    }
}

pub(super) enum Message<B: Backend> {
    Sums { member: usize, key: Key, posted: PostedSums<B>, ready: B::Event },
    Updated { member: usize, key: Key, values: SharedValues<B>, ready: B::Event },
    Arrived(Arrived),
    Damaged(CollectiveError),
    Abort,
}

/// The posts of every member about a bucket, in order, and their events.
pub(super) type OfMembers<C, E> = Vec<(C, E)>;

/// The posts that a worker is reading, the last of each bucket. They keep the memory alive even where its owner is gone: an owner
/// overwrites it only after all have read, but a run may end before.
pub(super) struct HeldPosts<B: Backend> {
    sums: BTreeMap<u32, OfMembers<PostedSums<B>, B::Event>>,
    updates: BTreeMap<(u32, u32), OfMembers<SharedValues<B>, B::Event>>,
}

impl<B: Backend> HeldPosts<B> {
    pub(super) fn new() -> Self {
        Self { sums: BTreeMap::new(), updates: BTreeMap::new() }
    }

    /// Keeps posted sums, which are all read once `read` has happened, and tells their owners.
    pub(super) fn keep_sums(
        &mut self,
        backend: &B,
        read: &B::Event,
        bucket: u32,
        posted: OfMembers<PostedSums<B>, B::Event>,
    ) {
        for (PostedSums { read: answer, .. }, _) in &posted {
            let Some(answer) = answer else { continue };
            // A worker that is gone overwrites nothing.
            let _ = answer.send(read.clone());
        }
        // Reads of the host's memory end with the call, and its owner takes the memory back.
        if backend.memory() == MemoryPlace::Device {
            self.sums.insert(bucket, posted);
        }
    }

    pub(super) fn keep_updates(
        &mut self,
        backend: &B,
        key: Key,
        posted: OfMembers<SharedValues<B>, B::Event>,
    ) {
        if backend.memory() == MemoryPlace::Device {
            self.updates.insert((key.round, key.bucket), posted);
        }
    }
}

/// The posts of some members so far.
type Incomplete<C, E> = BTreeMap<Key, Vec<Option<(C, E)>>>;

/// Posts from one worker to all that read its memory, itself among them. It may be cloned, for the threads of a worker.
pub struct Post<B: Backend> {
    /// Which of them this is.
    member: usize,
    members: Vec<Sender<Message<B>>>,
}

impl<B: Backend> Clone for Post<B> {
    fn clone(&self) -> Self {
        Self { member: self.member, members: self.members.clone() }
    }
}

impl<B: Backend> Post<B> {
    /// Posts this worker's sums of a bucket, which are final once `stream` has run: for each node of its lanes the buffer, which
    /// stays unchanged until this worker has gathered the updates of all owners, and the bucket's range in it for each use.
    ///
    /// # Errors
    /// [`CommunicatorError::Closed`], or a device that fails.
    pub fn sums(
        &self,
        backend: &B,
        stream: &mut B::DeviceStream,
        key: Key,
        nodes: &[(Node, &B::Buffer<f32>)],
        uses: &[Range<usize>],
    ) -> Result<()> {
        self.post_sums((backend, stream), key, nodes, uses, None)
    }

    /// Posts [`sums`](Self::sums) that stay unchanged only until they were read. `None` where they may be overwritten at once.
    ///
    /// # Errors
    /// As [`sums`](Self::sums).
    pub fn sums_until_read(
        &self,
        backend: &B,
        stream: &mut B::DeviceStream,
        key: Key,
        nodes: &[(Node, &B::Buffer<f32>)],
        uses: &[Range<usize>],
    ) -> Result<Option<Reading<B>>> {
        if backend.memory() == MemoryPlace::Host {
            // Others read a copy.
            return self.post_sums((backend, stream), key, nodes, uses, None).map(|()| None);
        }
        let (sender, read) = mpsc::channel();
        self.post_sums((backend, stream), key, nodes, uses, Some(&sender))?;
        Ok(Some(Reading { readers: self.members.len(), read }))
    }

    fn post_sums(
        &self,
        (backend, stream): (&B, &mut B::DeviceStream),
        key: Key,
        nodes: &[(Node, &B::Buffer<f32>)],
        uses: &[Range<usize>],
        read: Option<&Sender<B::Event>>,
    ) -> Result<()> {
        let mut sums = Vec::with_capacity(nodes.len());
        for &(node, buffer) in nodes {
            let share = |range: &Range<usize>| {
                backend.share(stream, Slice::new(buffer, range.start, range.len())?)
            };
            sums.push(Sums {
                node,
                uses: uses.iter().map(share).collect::<std::result::Result<_, _>>()?,
            });
        }
        let ready = backend.record(stream)?;
        let (member, posted) =
            (self.member, PostedSums { sums, uses: uses.len(), read: read.cloned() });
        self.send(|| Message::Sums { member, key, posted: posted.clone(), ready: ready.clone() })
    }

    /// Posts the update of this worker's part of a bucket: it is in `values` once `stream` has run, and stays there until every
    /// worker has posted its sums of the next step.
    pub(super) fn updated(
        &self,
        backend: &B,
        stream: &mut B::DeviceStream,
        key: Key,
        values: &SharedValues<B>,
    ) -> Result<()> {
        let (member, ready) = (self.member, backend.record(stream)?);
        self.send(|| Message::Updated { member, key, values: values.clone(), ready: ready.clone() })
    }

    fn send(&self, message: impl Fn() -> Message<B>) -> Result<()> {
        let send =
            |member: &Sender<_>| member.send(message()).map_err(|_| CommunicatorError::Closed);
        self.members.iter().try_for_each(send)
    }

    /// Hands chunks from other processes to this worker, and updates to all workers that read its memory, where each of them holds
    /// the parameters: so an update crosses between processes once.
    pub(super) fn deliver(
        &self,
        arrived: std::result::Result<Arrived, CollectiveError>,
        holders: Holders,
    ) {
        let is_for_all = |part| holders == Holders::EACH && matches!(part, Part::Update { .. });
        // A worker that is gone reads nothing: the run is over.
        match arrived {
            Ok(arrived) if arrived.part().is_some_and(is_for_all) => {
                for member in &self.members {
                    let _ = member.send(Message::Arrived(arrived.clone()));
                }
            }
            Ok(arrived) => {
                let _ = self.members[self.member].send(Message::Arrived(arrived));
            }
            Err(error) => {
                let _ = self.members[self.member].send(Message::Damaged(error));
            }
        }
    }

    /// From its call on, every wait of a member ends with [`CommunicatorError::Closed`].
    pub(super) fn abort_handle(&self) -> Abort {
        let members = self.members.clone();
        Box::new(move || {
            for member in &members {
                // A member that is gone waits for nothing.
                let _ = member.send(Message::Abort);
            }
        })
    }
}

/// Receives the posts of other workers, and chunks from other processes.
///
/// A call waits until every member has posted the bucket, which their threads do when they enqueue: so the host waits for
/// other hosts, and devices wait for devices.
pub(super) struct Inbox<B: Backend> {
    /// The rank of the first member, for messages.
    first_rank: usize,
    members: usize,
    schedule: Arc<LaneSchedule>,
    messages: Receiver<Message<B>>,
    sums: Incomplete<PostedSums<B>, B::Event>,
    updates: Incomplete<SharedValues<B>, B::Event>,
    arrived: BTreeMap<(Key, ArrivalKind), VecDeque<Arrived>>,
    /// For each bucket the last step and round whose chunks have all come from other processes.
    closed: BTreeMap<(ArrivalKind, u32), (u64, u32)>,
    /// Whether the members were aborted.
    is_over: bool,
}

/// The ends of `members` workers that read each other's memory; the first has rank `first_rank`.
pub(super) fn members<B: Backend>(
    first_rank: usize,
    members: usize,
    schedule: &Arc<LaneSchedule>,
) -> Vec<(Post<B>, Inbox<B>)> {
    let (senders, receivers): (Vec<_>, Vec<_>) = (0..members).map(|_| mpsc::channel()).unzip();
    let end = |(member, messages)| {
        let inbox = Inbox {
            first_rank,
            members,
            schedule: Arc::clone(schedule),
            messages,
            sums: BTreeMap::new(),
            updates: BTreeMap::new(),
            arrived: BTreeMap::new(),
            closed: BTreeMap::new(),
            is_over: false,
        };
        (Post { member, members: senders.clone() }, inbox)
    };
    receivers.into_iter().enumerate().map(end).collect()
}

impl<B: Backend> Inbox<B> {
    /// The posted sums of every member.
    pub(super) fn sums(&mut self, key: Key) -> Result<OfMembers<PostedSums<B>, B::Event>> {
        loop {
            if let Some(posted) = complete(&mut self.sums, key) {
                return Ok(posted);
            }
            self.receive()?;
        }
    }

    /// Whether every member has posted sums of `key`.
    pub(super) fn has_sums(&mut self, key: Key) -> Result<bool> {
        loop {
            if self.sums.get(&key).is_some_and(|of| of.iter().all(Option::is_some)) {
                return Ok(true);
            }
            match self.messages.try_recv() {
                Ok(message) => self.take(message)?,
                Err(TryRecvError::Empty) => return Ok(false),
                Err(TryRecvError::Disconnected) => return Err(CommunicatorError::Closed),
            }
        }
    }

    /// The posted updates of every member.
    pub(super) fn updates(&mut self, key: Key) -> Result<OfMembers<SharedValues<B>, B::Event>> {
        loop {
            if let Some(posted) = complete(&mut self.updates, key) {
                return Ok(posted);
            }
            self.receive()?;
        }
    }

    /// The next chunk from another process.
    pub(super) fn arrived(&mut self, key: Key, what: ArrivalKind) -> Result<Arrived> {
        loop {
            if let Some(waiting) = self.arrived.get_mut(&(key, what))
                && let Some(arrived) = waiting.pop_front()
            {
                if waiting.is_empty() {
                    self.arrived.remove(&(key, what));
                }
                return Ok(arrived);
            }
            self.receive()?;
        }
    }

    /// Notes that all chunks of a bucket have come from other processes.
    ///
    /// # Errors
    /// A chunk too many, now or when it comes: nothing would use it, and its sender would wait for the credit.
    pub(super) fn close(&mut self, key: Key, what: ArrivalKind) -> Result<()> {
        self.closed.insert((what, key.bucket), (key.step, key.round));
        let waiting = self.arrived.remove(&(key, what));
        match waiting.and_then(|mut waiting| waiting.pop_front()) {
            Some(arrived) => Err(too_much(what, key, arrived.chunk().header()?)),
            None => Ok(()),
        }
    }

    fn receive(&mut self) -> Result<()> {
        if self.is_over {
            return Err(CommunicatorError::Closed);
        }
        let message = self.messages.recv().map_err(|_| CommunicatorError::Closed)?;
        self.take(message)
    }

    fn take(&mut self, message: Message<B>) -> Result<()> {
        let (first, members) = (self.first_rank, self.members);
        match message {
            Message::Sums { member, key, posted, ready } => {
                let of = (member, first, "the sums", key);
                note(&mut self.sums, members, of, (posted, ready))
            }
            Message::Updated { member, key, values, ready } => {
                let of = (member, first, "the update", key);
                note(&mut self.updates, members, of, (values, ready))
            }
            Message::Arrived(arrived) => {
                let header = arrived.chunk().header()?;
                let round = self.schedule.round_of(header.node.lo as usize);
                let (key, what) = match (header.part, round) {
                    (Part::Gradient { bucket, .. }, Some(round)) => {
                        (Key { step: header.step, round: round as u32, bucket }, ArrivalKind::Sums)
                    }
                    (Part::Update { bucket, beside, .. }, _) => {
                        let key = Key::new(header.step, bucket);
                        (if beside { key.beside() } else { key }, ArrivalKind::Update)
                    }
                    _ => {
                        let what = "it is neither sums of these lanes nor what was updated";
                        return Err(CollectiveError::Malformed { what }.into());
                    }
                };
                let closed = self.closed.get(&(what, key.bucket));
                if closed.is_some_and(|&last| (key.step, key.round) <= last) {
                    return Err(too_much(what, key, header));
                }
                self.arrived.entry((key, what)).or_default().push_back(arrived);
                Ok(())
            }
            Message::Damaged(error) => Err(error.into()),
            Message::Abort => {
                self.is_over = true;
                Err(CommunicatorError::Closed)
            }
        }
    }
}

fn too_much(what: ArrivalKind, key: Key, header: &ChunkHeader) -> CommunicatorError {
    what.wrong(header.source as usize, key, "after all of it had come")
}

/// Keeps a member's post.
fn note<C, E>(
    posted: &mut Incomplete<C, E>,
    members: usize,
    (member, first_rank, what, key): (usize, usize, &'static str, Key),
    value: (C, E),
) -> Result<()> {
    let of_members = posted.entry(key).or_insert_with(|| (0..members).map(|_| None).collect());
    match of_members[member].replace(value) {
        None => Ok(()),
        Some(_) => {
            let (Key { step, bucket, .. }, rank) = (key, first_rank + member);
            Err(CommunicatorError::Posted { rank, what, bucket, step, wrong: "twice" })
        }
    }
}

/// The posts of all members about a bucket, once they are complete.
fn complete<C, E>(posted: &mut Incomplete<C, E>, key: Key) -> Option<OfMembers<C, E>> {
    let is_complete = posted.get(&key).is_some_and(|of| of.iter().all(Option::is_some));
    is_complete.then(|| posted.remove(&key)).flatten()?.into_iter().collect()
}
