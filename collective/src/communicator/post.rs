//! What the workers that read each other's memory tell each other, and where each hears it.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};

use tidemill_kernels::{Backend, MemoryPlace, Shared, Slice};

use super::values::SharedValues;
use super::{Abort, CommunicatorError, Holders, Result};
use crate::carry::Arrived;
use crate::chunk::{ChunkHeader, Part};
use crate::error::CollectiveError;
use crate::lane_schedule::LaneSchedule;
use crate::tree::Node;

/// The sums of a worker's lanes, and what it is told once they were read.
pub(super) struct Told<B: Backend> {
    pub(super) sums: Vec<Sums<B>>,
    /// The number of uses of the bucket, which a worker without lanes in a round tells too.
    pub(super) uses: usize,
    read: Option<Sender<B::Event>>,
}

impl<B: Backend> Clone for Told<B> {
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

/// What is told, summed or gathered at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key {
    /// The step, from 0.
    pub step: u64,
    /// Of sums the round of their lanes, as the [`LaneSchedule`] has them; of what is updated 0, and 1 of what is beside it.
    pub round: u32,
    /// The bucket.
    pub bucket: u32,
}

impl Key {
    /// A bucket of the first round of a step, or what is updated of it.
    pub fn new(step: u64, bucket: u32) -> Self {
        Self { step, round: 0, bucket }
    }

    /// What is updated beside it: of a bucket that is gathered in two precisions the other one.
    #[must_use]
    pub fn beside(self) -> Self {
        Self { round: 1, ..self }
    }
}

/// What a worker has told and others read.
pub struct Reading<B: Backend> {
    readers: usize,
    read: Receiver<B::Event>,
}

impl<B: Backend> Reading<B> {
    /// What is enqueued on `stream` from now on may write over what was told. Waits until all have enqueued that they read it.
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

/// What comes from other processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum What {
    Sums,
    Update,
}

impl What {
    /// That `rank` has sent of it what it had not to.
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
    Sums { member: usize, key: Key, told: Told<B>, ready: B::Event },
    Updated { member: usize, key: Key, values: SharedValues<B>, ready: B::Event },
    Arrived(Arrived),
    Damaged(CollectiveError),
    Abort,
}

/// What every member has told of a bucket, in order, and the events behind it.
pub(super) type OfMembers<C, E> = Vec<(C, E)>;

/// What a worker was last told of each bucket, and reads: the memory stays for as long, whatever becomes of the others. Their
/// owners overwrite it only after all have read, but a run may end before.
pub(super) struct Read<B: Backend> {
    sums: BTreeMap<u32, OfMembers<Told<B>, B::Event>>,
    updates: BTreeMap<(u32, u32), OfMembers<SharedValues<B>, B::Event>>,
}

impl<B: Backend> Read<B> {
    pub(super) fn new() -> Self {
        Self { sums: BTreeMap::new(), updates: BTreeMap::new() }
    }

    /// Behind `read` was read all that was told.
    pub(super) fn keep_sums(
        &mut self,
        backend: &B,
        read: &B::Event,
        bucket: u32,
        told: OfMembers<Told<B>, B::Event>,
    ) {
        for (Told { read: answer, .. }, _) in &told {
            let Some(answer) = answer else { continue };
            // A worker that is gone writes over nothing.
            let _ = answer.send(read.clone());
        }
        // In the host's memory all was read when the call returned, and its owner wants it back.
        if backend.memory() == MemoryPlace::Device {
            self.sums.insert(bucket, told);
        }
    }

    pub(super) fn keep_updates(
        &mut self,
        backend: &B,
        key: Key,
        told: OfMembers<SharedValues<B>, B::Event>,
    ) {
        if backend.memory() == MemoryPlace::Device {
            self.updates.insert((key.round, key.bucket), told);
        }
    }
}

/// What some members have told so far.
type Incomplete<C, E> = BTreeMap<Key, Vec<Option<(C, E)>>>;

/// Tells what one worker has to all that read its memory, itself among them. It may be cloned, for the threads of a worker.
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
    /// This worker's part of the sums of `bucket` is final once `stream` has run: for each node of its lanes the buffer, which
    /// stays as it is until this worker has gathered what every owner made of it, and in it the bucket's range for each use.
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
        self.tell_sums((backend, stream), key, nodes, uses, None)
    }

    /// [`sums`](Self::sums) that stay as they are until they were read, and may be written over then. `None` where they may be at
    /// once.
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
            // What others read is a copy.
            return self.tell_sums((backend, stream), key, nodes, uses, None).map(|()| None);
        }
        let (sender, read) = mpsc::channel();
        self.tell_sums((backend, stream), key, nodes, uses, Some(&sender))?;
        Ok(Some(Reading { readers: self.members.len(), read }))
    }

    fn tell_sums(
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
        let (member, told) = (self.member, Told { sums, uses: uses.len(), read: read.cloned() });
        self.tell(|| Message::Sums { member, key, told: told.clone(), ready: ready.clone() })
    }

    /// What this worker owns of a bucket is in `values` once `stream` has run, and stays there until every worker has posted its
    /// sums of the next step.
    pub(super) fn updated(
        &self,
        backend: &B,
        stream: &mut B::DeviceStream,
        key: Key,
        values: &SharedValues<B>,
    ) -> Result<()> {
        let (member, ready) = (self.member, backend.record(stream)?);
        self.tell(|| Message::Updated { member, key, values: values.clone(), ready: ready.clone() })
    }

    fn tell(&self, message: impl Fn() -> Message<B>) -> Result<()> {
        let told =
            |member: &Sender<_>| member.send(message()).map_err(|_| CommunicatorError::Closed);
        self.members.iter().try_for_each(told)
    }

    /// Hands what comes from other processes to this worker; what was updated to all that read its memory, where each of them
    /// holds it, so that it comes once.
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

    /// From when it is called on every member that waits, or comes to wait, is told [`CommunicatorError::Closed`].
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

/// Where a worker hears what the others have, and what comes from other processes.
///
/// A call waits until every member has told of the bucket, which their threads do when they enqueue: so the host waits for
/// other hosts, and devices wait for devices.
pub(super) struct Inbox<B: Backend> {
    /// The rank of the first member, for messages.
    first_rank: usize,
    members: usize,
    schedule: Arc<LaneSchedule>,
    messages: Receiver<Message<B>>,
    sums: Incomplete<Told<B>, B::Event>,
    updates: Incomplete<SharedValues<B>, B::Event>,
    arrived: BTreeMap<(Key, What), VecDeque<Arrived>>,
    /// By bucket: the last step and round of which all has come from other processes.
    closed: BTreeMap<(What, u32), (u64, u32)>,
    /// Whether the members were told to end.
    is_over: bool,
}

/// The ends of `members` workers that read each other's memory, the first of which is rank `first_rank`.
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
    /// What every member has told of its sums.
    pub(super) fn sums(&mut self, key: Key) -> Result<OfMembers<Told<B>, B::Event>> {
        loop {
            if let Some(told) = complete(&mut self.sums, key) {
                return Ok(told);
            }
            self.receive()?;
        }
    }

    /// What every member has told of what it has updated.
    pub(super) fn updates(&mut self, key: Key) -> Result<OfMembers<SharedValues<B>, B::Event>> {
        loop {
            if let Some(told) = complete(&mut self.updates, key) {
                return Ok(told);
            }
            self.receive()?;
        }
    }

    /// The next that comes from another process.
    pub(super) fn arrived(&mut self, key: Key, what: What) -> Result<Arrived> {
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

    /// All that other processes have to send of a bucket has come.
    ///
    /// # Errors
    /// More of it, now or when it comes: nothing would use it, and its sender waited for the credit.
    pub(super) fn close(&mut self, key: Key, what: What) -> Result<()> {
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
        let (first, members) = (self.first_rank, self.members);
        match self.messages.recv().map_err(|_| CommunicatorError::Closed)? {
            Message::Sums { member, key, told, ready } => {
                let of = (member, first, "the sums", key);
                note(&mut self.sums, members, of, (told, ready))
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
                        (Key { step: header.step, round: round as u32, bucket }, What::Sums)
                    }
                    (Part::Update { bucket, beside, .. }, _) => {
                        let key = Key::new(header.step, bucket);
                        (if beside { key.beside() } else { key }, What::Update)
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

fn too_much(what: What, key: Key, header: &ChunkHeader) -> CommunicatorError {
    what.wrong(header.source as usize, key, "after all of it had come")
}

/// Keeps what a member has told.
fn note<C, E>(
    told: &mut Incomplete<C, E>,
    members: usize,
    (member, first_rank, what, key): (usize, usize, &'static str, Key),
    value: (C, E),
) -> Result<()> {
    let of_members = told.entry(key).or_insert_with(|| (0..members).map(|_| None).collect());
    match of_members[member].replace(value) {
        None => Ok(()),
        Some(_) => {
            let (Key { step, bucket, .. }, rank) = (key, first_rank + member);
            Err(CommunicatorError::Posted { rank, what, bucket, step, wrong: "twice" })
        }
    }
}

/// What all members have told of a bucket, once they have.
fn complete<C, E>(told: &mut Incomplete<C, E>, key: Key) -> Option<OfMembers<C, E>> {
    let is_complete = told.get(&key).is_some_and(|of| of.iter().all(Option::is_some));
    is_complete.then(|| told.remove(&key)).flatten()?.into_iter().collect()
}
