//! Positions of a table to record batches: which slices of which row groups hold them, each decoded
//! once and kept until it has gone out of use.

use std::{
    collections::BTreeMap,
    ops::Range,
    sync::{Arc, Mutex, PoisonError},
};

use arrow_array::{RecordBatch, UInt32Array};
use arrow_schema::ArrowError;
use arrow_select::{interleave::interleave_record_batch, take::take_record_batch};

use super::{
    Owner, Reader,
    queue::{BatchRule, Plan},
    worker_pool::{Bounds, IfBusy, Progress, Work},
};
use crate::{
    cache::memory::{BoundedCache, Weigh},
    data_set::{
        shards::Files,
        table::{RowBatch, Table, TableSettings},
    },
    error::DataError,
    fetch::Fetcher,
    order::{CanonicalOrder, SampleId, ShuffleSettings},
    shard::{Footer, Rows, SliceReader},
};

/// Row groups whose decoding is kept, to go on from the slice that it has come to.
const OPEN_GROUPS: usize = 8;

/// A slice of a row group of a shard.
type Place = (usize, usize, usize);

/// See the [module](self).
pub(super) struct TableRows {
    table: Table,
    order: CanonicalOrder,
    fetcher: Fetcher,
    decoded: BoundedCache<Place, Rows>,
    /// Keyed by shard and row group.
    open: BoundedCache<(usize, usize), OpenGroup>,
}

/// How far a row group is decoded; none before it is begun.
#[derive(Default)]
struct OpenGroup(Mutex<Option<SliceReader>>);

impl Weigh for OpenGroup {
    /// They are counted, not weighed.
    fn weight_bytes(&self) -> usize {
        1
    }
}

impl TableRows {
    fn new(
        table: &Table,
        shuffle: ShuffleSettings,
        settings: TableSettings,
    ) -> Result<(TableRows, Bounds), DataError> {
        let order = table.order(shuffle)?;
        let fetcher = Fetcher::new(table.all(), &order, None, settings.threads.get())?;
        let waiting_bytes = settings.memory_bytes / 4;
        // It was read when the table was opened.
        let footer = table.all().footer(0, &fetcher)?;
        let bounds = Bounds {
            batch: BatchRule { samples: settings.batch_rows.get() as u64, ends_with_range: true },
            batches: batches(table, &footer, settings.batch_rows.get(), waiting_bytes),
        };
        let rows = TableRows {
            table: table.clone(),
            order,
            fetcher,
            decoded: BoundedCache::new(settings.memory_bytes - waiting_bytes),
            open: BoundedCache::new(OPEN_GROUPS),
        };
        Ok((rows, bounds))
    }

    /// A slice of a row group.
    fn slice(&self, place: Place, footer: &Footer) -> Result<Arc<Rows>, DataError> {
        if let Some(rows) = self.decoded.get(place) {
            return Ok(rows);
        }
        let (shard, group, slice) = place;
        let open =
            self.open.get_or_load((shard, group), || Ok::<_, DataError>(OpenGroup::default()))?;
        // One thread at a time: the slices of a row group come one after the other. Decoding that
        // failed or panicked is begun again.
        let mut reader = open.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(rows) = self.decoded.get(place) {
            return Ok(rows);
        }
        let file = self.fetcher.file(shard)?;
        let schema = self.table.schema();
        let mut going = match reader.take() {
            Some(going) if going.next_slice() <= slice => going,
            _ => footer.slices_from(&file, group, slice, schema)?,
        };
        loop {
            let at = going.next_slice();
            // Pieces decoded on the way are kept too: they are needed soon, or are evicted first.
            let rows = self.decoded.put((shard, group, at), going.read(&file, schema)?);
            if at == slice {
                // Pages of a row group that is decoded would be held for nothing.
                *reader = Some(going).filter(|going| !going.is_at_end());
                return Ok(rows);
            }
        }
    }
}

/// Batches that may wait, by the bytes of a row according to the footer of the first shard.
fn batches(table: &Table, footer: &Footer, batch_rows: usize, waiting_bytes: usize) -> usize {
    let row_bytes = usize::try_from(footer.row_bytes(table.schema())).unwrap_or(usize::MAX).max(1);
    (waiting_bytes / row_bytes.saturating_mul(batch_rows)).clamp(1, 1024)
}

impl Work for TableRows {
    type Item = RowBatch;
    type Scratch = ();

    fn begin(&self, reader: u64, positions: &[Range<u64>]) {
        if let [first, ..] = positions {
            self.fetcher.begin_batch(reader, first.clone());
        }
    }

    fn end(&self, reader: u64, positions: &[Range<u64>]) {
        if let [first, ..] = positions {
            self.fetcher.end_batch(reader, first.start);
        }
    }

    fn remove_reader(&self, reader: u64) {
        self.fetcher.remove_reader(reader);
    }

    fn close(&self) {
        self.fetcher.close();
    }

    fn make(
        &self,
        positions: &[Range<u64>],
        (): &mut (),
        batches: &mut Vec<RowBatch>,
        _: IfBusy,
        _: &dyn Fn() -> bool,
    ) -> Result<Progress, DataError> {
        for range in positions {
            batches.push(self.make_batch(range.clone())?);
        }
        Ok(Progress::Made)
    }

    fn loads(&self) -> u64 {
        0
    }
}

impl TableRows {
    fn make_batch(&self, positions: Range<u64>) -> Result<RowBatch, DataError> {
        let ids: Vec<SampleId> = positions.clone().map(|at| self.order.sample_at(at)).collect();
        self.fetcher.begin(&ids, |shard, group| {
            self.decoded.holds(&(shard, group, 0)) || self.open.holds(&(shard, group))
        })?;
        // Which rows of which slices, and which rows of the batch they become.
        let mut wanted: BTreeMap<Place, Vec<(u32, usize)>> = BTreeMap::new();
        for (at, id) in ids.iter().enumerate() {
            let footer = self.table.all().footer(id.shard, &self.fetcher)?;
            let (group, first_row) = footer.group_of(id.row);
            let slice_rows = footer.slice_rows(group, self.table.schema());
            let row = id.row - first_row;
            let place = (id.shard, group, (row / slice_rows) as usize);
            wanted.entry(place).or_default().push(((row % slice_rows) as u32, at));
        }
        let gathering = |source: ArrowError| DataError::ShardFormat {
            action: "gather rows of",
            path: self.table.path().to_owned(),
            source: source.into(),
        };
        // One slice after the other; each keeps only the rows that the batch takes.
        let (mut parts, mut places) = (Vec::new(), vec![(0, 0); ids.len()]);
        for (place, rows) in wanted {
            let footer = self.table.all().footer(place.0, &self.fetcher)?;
            let slice = self.slice(place, &footer)?;
            let indices = UInt32Array::from_iter_values(rows.iter().map(|&(row, _)| row));
            for (row, (_, at)) in rows.into_iter().enumerate() {
                places[at] = (parts.len(), row);
            }
            parts.push(take_record_batch(&slice.0, &indices).map_err(gathering)?);
        }
        let parts: Vec<&RecordBatch> = parts.iter().collect();
        let rows = interleave_record_batch(&parts, &places).map_err(gathering)?;
        Ok(RowBatch { positions, rows })
    }
}

/// Held by table decoders and their readers.
#[derive(Clone)]
pub(crate) struct TableOwner(Arc<Owner<TableRows>>);

impl TableOwner {
    pub(crate) fn start(
        table: &Table,
        shuffle: ShuffleSettings,
        settings: TableSettings,
    ) -> Result<TableOwner, DataError> {
        let (rows, bounds) = TableRows::new(table, shuffle, settings)?;
        Ok(TableOwner(Owner::start(rows, bounds, settings.threads)?))
    }

    pub(crate) fn reader(
        &self,
        plan: Plan,
        wake: impl Fn() + Send + Sync + 'static,
    ) -> Reader<RowBatch> {
        self.0.reader(plan, wake)
    }
}
