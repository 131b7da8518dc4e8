//! The cost of communication: bytes, and intervals of a device stream.

use tidemill_kernels::Backend;

use super::Result;

/// Bytes that a rank has received.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// From workers of its process, whose memory it reads.
    pub from_memory: u64,
    /// From other processes.
    pub from_processes: u64,
    /// The part of `from_processes` that [`Host`](super::Host) has received from other hosts.
    pub from_hosts: u64,
}

impl Traffic {
    /// Notes `bytes` that were read from peers.
    pub(super) fn read(&mut self, bytes: usize) {
        self.from_memory += bytes as u64;
    }

    /// Notes `bytes` that came from other processes.
    pub(super) fn came(&mut self, bytes: usize) {
        self.from_processes += bytes as u64;
    }

    /// Notes `bytes` that came from another host.
    pub(super) fn came_from_host(&mut self, bytes: usize) {
        self.came(bytes);
        self.from_hosts += bytes as u64;
    }
}

/// Two points of one device stream.
pub struct Interval<B: Backend> {
    /// Where it begins.
    pub from: B::Event,
    /// Where it ends.
    pub to: B::Event,
}

/// The cost of a rank's communication.
pub struct CommunicationCost<B: Backend> {
    /// The bytes that came.
    pub traffic: Traffic,
    /// For each sum: from where the sums of this process's ranks were ready to behind the result. It includes the wait for other
    /// processes that had not computed or sent theirs by then.
    pub sums: Vec<Interval<B>>,
    /// For each bucket that was gathered: from where this rank was ready to gather it to where all of it had come. It includes the
    /// wait for ranks that had not updated it yet.
    pub gathers: Vec<Interval<B>>,
}

impl<B: Backend> Default for CommunicationCost<B> {
    fn default() -> Self {
        Self { traffic: Traffic::default(), sums: Vec::new(), gathers: Vec::new() }
    }
}

impl<B: Backend> CommunicationCost<B> {
    /// Notes a sum that began at `from`, and answers where it ends: behind all work that is enqueued on `stream`.
    pub(super) fn summed(
        &mut self,
        (backend, stream): (&B, &mut B::DeviceStream),
        from: B::Event,
    ) -> Result<B::Event> {
        let to = backend.record_timed(stream)?;
        self.sums.push(Interval { from, to: to.clone() });
        Ok(to)
    }

    /// Notes a gather that began at `from` and ends behind all work that is enqueued on `stream`.
    pub(super) fn gathered(
        &mut self,
        (backend, stream): (&B, &mut B::DeviceStream),
        from: B::Event,
    ) -> Result<()> {
        let to = backend.record_timed(stream)?;
        self.gathers.push(Interval { from, to });
        Ok(())
    }
}
