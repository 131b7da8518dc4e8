//! Tokens of all processes to shards: process 0's side of a preparation whose tokens are one stream.

use std::{
    cell::{Cell, RefCell},
    sync::mpsc::channel,
    thread,
};

use super::gather::{Report, ask, gather};
use crate::{
    data_set::index::ShardEntry,
    prepare::{
        PrepareError, Progress,
        output::{
            Output,
            shard::{Naming, ShardWriter},
        },
        pipeline::{
            Outcome,
            ahead::{Ahead, Next},
            batch::{Batch, Collect},
            job::{Work, start_workers},
            job_queue::JobQueue,
        },
        tokens::pack::{Packer, RowGroup},
    },
};

/// Gathers tokens, and writes shards of them.
///
/// # Errors
/// As [`prepare`](crate::prepare::prepare()), and [`PrepareError::Parted`].
pub(crate) fn pack_together(
    work: &Work<'_>,
    output: &mut dyn Output,
    progress: &mut Report<'_>,
) -> Result<Outcome, PrepareError> {
    let (jobs, samples) = (JobQueue::default(), Cell::new(0));
    thread::scope(|scope| {
        let jobs = &jobs;
        let (results, encoded) = channel();
        // Every thread then ends after its current job, also on an error.
        let _closed_at_end = jobs.close_at_end();
        start_workers(scope, work, jobs, &results)?;
        let latest = Cell::new(Progress::default());
        let progress = RefCell::new(progress);
        let tell = |now: Progress| {
            latest.set(now);
            (progress.borrow_mut())(Progress { samples: samples.get(), ..now })
        };
        let mut packing = Packing {
            work,
            packer: Packer::new(work.cut),
            writer: ShardWriter::new(work.format, output, Naming::Number),
            row_groups: Ahead::new(jobs, encoded),
            samples: &samples,
            go_on: &|| ask(&mut |now| tell(now), latest.get()),
        };
        let mut outcome = gather(work, &mut packing, &mut |now| tell(now))?;
        packing.finish(&mut outcome)?;
        Ok(outcome)
    })
}

struct Packing<'a> {
    work: &'a Work<'a>,
    packer: Packer,
    writer: ShardWriter<'a>,
    /// Between them there is nothing.
    row_groups: Ahead<'a, ()>,
    samples: &'a Cell<u64>,
    go_on: &'a dyn Fn() -> Result<(), PrepareError>,
}

impl Packing<'_> {
    fn encode(&mut self, row_group: RowGroup) -> Result<(), PrepareError> {
        self.row_groups.encode(row_group);
        self.write_until(2 * self.work.workers as u64)
    }

    /// Writes the next row groups, until at most `most` are being encoded.
    fn write_until(&mut self, most: u64) -> Result<(), PrepareError> {
        while let Some(next) = self.row_groups.next(most)? {
            let Next::Rows(row_group) = next else { unreachable!("nothing is kept here") };
            while !self.writer.has_room_for(&row_group)? {
                (self.go_on)()?;
            }
            self.samples.set(self.samples.get() + row_group.samples as u64);
            self.writer.append(row_group)?;
            (self.go_on)()?;
        }
        Ok(())
    }

    fn finish(mut self, outcome: &mut Outcome) -> Result<(), PrepareError> {
        let end = std::mem::replace(&mut self.packer, Packer::new(self.work.cut)).finish();
        outcome.tokens = end.tokens;
        outcome.dropped_tokens = end.dropped_tokens;
        end.row_group.map_or(Ok(()), |row_group| self.encode(row_group))?;
        self.write_until(0)?;
        self.writer.close()?;
        while !self.writer.are_stored()? {
            (self.go_on)()?;
        }
        (self.go_on)()?;
        let shards: Vec<ShardEntry> = self.writer.written();
        outcome.shards = shards;
        Ok(())
    }
}

impl Collect for Packing<'_> {
    fn take(&mut self, _: usize, batch: Batch) -> Result<(), PrepareError> {
        let row_groups = self.packer.push(&batch.tokens);
        row_groups.into_iter().try_for_each(|row_group| self.encode(row_group))
    }
}
