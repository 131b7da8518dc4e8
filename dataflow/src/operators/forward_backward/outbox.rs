//! Messages of the device thread about gradients that are final.

use std::ops::Range;

use tidemill_collective::Node;
use tidemill_collective::communicator::{CommunicatorError, Key, Post, Reading};
use tidemill_kernels::{Backend, KernelError};
use tidemill_model::Device;

use super::accumulators::Finished;
use super::bucket_sums::Departing;
use super::device::{DeviceParts, DeviceReply};
use crate::operators::job_thread::{Replies, Stopped};
use crate::operators::ticket::{Ready, Ticket};

/// Tells all workers of finished buckets.
pub(super) struct Outbox<'a, B: Backend, M> {
    pub(super) step: u64,
    /// The round of the lane at hand.
    pub(super) round: u32,
    pub(super) parts: &'a DeviceParts<B, M>,
    pub(super) replies: &'a Replies<DeviceReply>,
    /// None where there are no others.
    pub(super) post: Option<Post<B>>,
}

impl<B: Backend, M> Outbox<'_, B, M> {
    fn key(&self, bucket: usize) -> Key {
        Key { round: self.round, ..Key::new(self.step, bucket as u32) }
    }

    /// The elements of each use of bucket `bucket`, counted from `starts`.
    fn uses(&self, bucket: usize, starts: impl Iterator<Item = usize>) -> Vec<Range<usize>> {
        let elements = self.parts.plan.buckets.buckets()[bucket].range.len();
        starts.map(|start| start..start + elements).collect()
    }

    /// The ranges of the uses of bucket `bucket`, which follow each other.
    fn in_turn(&self, bucket: usize) -> Vec<Range<usize>> {
        let planned = &self.parts.plan.buckets.buckets()[bucket];
        let elements = planned.range.len();
        self.uses(bucket, (0..planned.slots.len()).map(|index| index * elements))
    }

    fn ready(&self, bucket: usize) -> Result<(), Stopped> {
        let ticket = Ticket { step: self.step, bucket: bucket as u32 };
        Ok(self.replies.send(DeviceReply::Ready(Ready { ticket, round: self.round }))?)
    }

    /// Tells the others that this worker has nothing for the rounds in which it has no lane.
    pub(super) fn skip_to_end(&mut self, device: &mut Device<'_, B>) -> Result<(), Stopped> {
        let Some(post) = self.post.clone() else { return Ok(()) };
        while (self.round as usize) + 1 < self.parts.schedule.rounds() {
            self.round += 1;
            for bucket in 0..self.parts.plan.buckets.buckets().len() {
                let (key, uses) = (self.key(bucket), self.in_turn(bucket));
                let posted = post.sums(device.backend, device.stream, key, &[], &uses);
                posted.map_err(Stopped::of)?;
                self.ready(bucket)?;
            }
        }
        Ok(())
    }
}

impl<B: Backend, M> Finished<B> for Outbox<'_, B, M> {
    fn bucket(
        &mut self,
        device: &mut Device<'_, B>,
        bucket: usize,
        sums: &[(Node, &B::Buffer<f32>)],
    ) -> Result<bool, KernelError> {
        if let Some(post) = &self.post {
            let slots = self.parts.plan.buckets.buckets()[bucket].slots.iter().copied();
            let (key, uses) = (self.key(bucket), self.uses(bucket, slots));
            match post.sums(device.backend, device.stream, key, sums, &uses) {
                Ok(()) => {}
                Err(CommunicatorError::Device(error)) => return Err(error),
                // The other workers are gone.
                Err(_) => return Ok(false),
            }
        }
        Ok(self.ready(bucket).is_ok())
    }
}

impl<B: Backend, M> Departing<B> for Outbox<'_, B, M> {
    fn bucket(
        &mut self,
        device: &mut Device<'_, B>,
        bucket: usize,
        node: Node,
        sums: &B::Buffer<f32>,
    ) -> Result<Option<Reading<B>>, Stopped> {
        let post = self.post.as_ref().ok_or(Stopped::Unwanted)?;
        let (key, uses) = (self.key(bucket), self.in_turn(bucket));
        let Device { backend, stream } = device;
        let posted = post.sums_until_read(*backend, stream, key, &[(node, sums)], &uses);
        let reading = posted.map_err(Stopped::of)?;
        self.ready(bucket)?;
        Ok(reading)
    }
}
