//! Operations that write, list and remove objects.

use std::{fs::File, io, path::PathBuf, sync::Arc, time::Duration};

use bytes::Bytes;
use futures_util::{StreamExt, TryStreamExt, stream::FuturesUnordered};
use object_store::{MultipartUpload, ObjectStore, ObjectStoreExt, PutPayload};
use tokio::{task::spawn_blocking, time::timeout};

use super::{
    Entry, StoreFailure,
    operation::{Attempts, Operation, transfer_time},
    runtime::Cancel,
};
use crate::error::DataError;

/// Parts in which a large object is written; all stores take parts of this size.
const PART_BYTES: u64 = 8 << 20;

/// Most parts of an object: stores take 10,000, and S3 wants them of equal size.
const MOST_PARTS: u64 = 9_999;

/// Parts that are uploaded at the same time.
const PARTS_AT_ONCE: usize = 4;

impl Operation {
    /// The objects and folders that are directly in the folder.
    pub(super) async fn list(&self) -> Result<(Vec<Entry>, Vec<String>), DataError> {
        let _permit = self.permits.acquire().await;
        let mut attempts = Attempts::new(self);
        let listing = loop {
            match self.within(self.store.list_with_delimiter(Some(&self.path))).await {
                Ok(listing) => break listing,
                Err(failure) => attempts.failed(failure).await?,
            }
        };
        let mut entries: Vec<Entry> = listing
            .objects
            .into_iter()
            .filter_map(|object| {
                let name = object.location.filename()?.to_owned();
                let modified = object.last_modified.into();
                Some(Entry { name, bytes: object.size, modified, e_tag: object.e_tag })
            })
            .collect();
        entries.sort_by(|one, other| one.name.cmp(&other.name));
        let folders = listing.common_prefixes.iter().filter_map(|prefix| prefix.filename());
        let mut folders: Vec<String> = folders.map(str::to_owned).collect();
        folders.sort();
        Ok((entries, folders))
    }

    /// Writes a whole object.
    pub(super) async fn put(&self, bytes: Bytes) -> Result<(), DataError> {
        let _permit = self.permits.acquire().await;
        let mut attempts = Attempts::new(self);
        loop {
            match self.put_once(bytes.clone()).await {
                Ok(()) => return Ok(()),
                Err(failure) => attempts.failed(failure).await?,
            }
        }
    }

    /// Writes a whole object from a file.
    pub(super) async fn put_file(&self, file: PathBuf) -> Result<(), DataError> {
        let opened = spawn_blocking({
            let file = file.clone();
            move || File::open(file)
        });
        match opened.await {
            Ok(Ok(opened)) => self.put_opened(opened, &Cancel::default()).await,
            Ok(Err(error)) => Err(DataError::io("open", file)(error)),
            Err(_) => Err(DataError::Cancelled { url: self.url() }),
        }
    }

    /// Writes a whole object from a file that is open. Given up, it ends soon, and leaves no parts
    /// in the store.
    pub(super) async fn put_opened(&self, file: File, given_up: &Cancel) -> Result<(), DataError> {
        let _permit = self.permits.acquire().await;
        let bytes =
            file.metadata().map_err(DataError::io("look at what becomes", self.url()))?.len();
        let source = Source { file: Arc::new(file), bytes };
        let mut attempts = Attempts::new(self);
        // The upload reports no progress: its deadline covers the whole.
        attempts.bytes = source.bytes;
        loop {
            let written = match source.bytes <= PART_BYTES {
                true => self.put_whole(&source).await,
                false => self.put_parts(&source, given_up).await,
            };
            let Err(failure) = written else { return Ok(()) };
            match given_up.unless(attempts.failed(failure)).await {
                Some(go_on) => go_on?,
                None => return Err(DataError::Cancelled { url: self.url() }),
            }
        }
    }

    async fn put_once(&self, bytes: Bytes) -> Result<(), StoreFailure> {
        let deadline = self.transfer_deadline(bytes.len() as u64);
        let put = self.store.put(&self.path, PutPayload::from_bytes(bytes));
        within(deadline, put).await.map(|_| ())
    }

    /// One attempt to write an object at once.
    async fn put_whole(&self, source: &Source) -> Result<(), StoreFailure> {
        self.put_once(source.read(0, source.bytes).await?).await
    }

    /// One attempt to write an object in parts; it is there only when all of them are.
    async fn put_parts(&self, source: &Source, given_up: &Cancel) -> Result<(), StoreFailure> {
        let mut upload = match self.within(self.store.put_multipart(&self.path)).await {
            Ok(upload) => upload,
            // Web servers know no parts.
            Err(StoreFailure::Unsupported { .. }) => return self.put_whole(source).await,
            Err(failure) => return Err(failure),
        };
        let written = given_up.unless(self.put_each_part(source, upload.as_mut())).await;
        let written = match written {
            Some(Ok(())) => self.within(upload.complete()).await.map(|_| ()),
            Some(failed) => failed,
            None => Err(StoreFailure::Other { said: "it was given up".to_owned() }),
        };
        if written.is_err() {
            // Where this fails too, the store's own rules remove the incomplete upload.
            let _ = self.within(upload.abort()).await;
        }
        written
    }

    async fn put_each_part(
        &self,
        source: &Source,
        upload: &mut dyn MultipartUpload,
    ) -> Result<(), StoreFailure> {
        let mut running = FuturesUnordered::new();
        let part_bytes = part_bytes(source.bytes);
        for number in 0..source.bytes.div_ceil(part_bytes) {
            if running.len() == PARTS_AT_ONCE {
                running.next().await.transpose()?;
            }
            let start = number * part_bytes;
            let part = source.read(start, part_bytes.min(source.bytes - start)).await?;
            let deadline = self.transfer_deadline(part.len() as u64);
            running.push(within(deadline, upload.put_part(PutPayload::from_bytes(part))));
        }
        running.try_collect::<()>().await
    }

    /// Removes an object; that it is not there is no failure.
    pub(super) async fn delete(&self) -> Result<(), DataError> {
        let _permit = self.permits.acquire().await;
        let mut attempts = Attempts::new(self);
        loop {
            match self.within(self.store.delete(&self.path)).await {
                Ok(()) | Err(StoreFailure::NotFound { .. }) => return Ok(()),
                Err(failure) => attempts.failed(failure).await?,
            }
        }
    }

    /// How far a request that sends has come is not known: it has time for all.
    pub(super) fn transfer_deadline(&self, bytes: u64) -> Duration {
        self.settings.progress_deadline.saturating_add(transfer_time(bytes))
    }
}

/// The size of all parts of an object but the last: a multiple of [`PART_BYTES`].
fn part_bytes(bytes: u64) -> u64 {
    PART_BYTES * bytes.div_ceil(MOST_PARTS * PART_BYTES).max(1)
}

async fn within<T>(
    deadline: Duration,
    answer: impl Future<Output = Result<T, object_store::Error>>,
) -> Result<T, StoreFailure> {
    match timeout(deadline, answer).await {
        Ok(answer) => Ok(answer?),
        Err(_) => Err(StoreFailure::Stalled(deadline)),
    }
}

/// A file that is being written to a store.
struct Source {
    file: Arc<File>,
    bytes: u64,
}

impl Source {
    async fn read(&self, start: u64, bytes: u64) -> Result<Bytes, StoreFailure> {
        let file = Arc::clone(&self.file);
        let read = spawn_blocking(move || {
            use std::io::{Read, Seek, SeekFrom};
            let mut content = vec![0; bytes as usize];
            // Parts are read one after the other: they share the file's offset.
            let mut file = &*file;
            file.seek(SeekFrom::Start(start))?;
            file.read_exact(&mut content)?;
            Ok(content.into())
        });
        read.await.unwrap_or_else(|error| Err(io::Error::other(error))).map_err(|error| {
            let said = format!("the file that is written cannot be read: {error}");
            StoreFailure::Unsupported { said }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_object_has_more_parts_than_stores_take() {
        for bytes in [1, PART_BYTES + 1, 9_999 * PART_BYTES, 9_999 * PART_BYTES + 1, 5 << 40] {
            let part = part_bytes(bytes);
            assert!(part.is_multiple_of(PART_BYTES) && bytes.div_ceil(part) < 10_000, "{bytes}");
        }
        assert_eq!(part_bytes(9_999 * PART_BYTES), PART_BYTES);
    }
}
