//! A data set that is written to a store.
//!
//! A store has no rename, and shards without an index would be taken for a data set. So the first
//! object that is written is a [claim](crate::index) in the place of the index, and the index is the
//! last: it takes the claim's place. In between nobody reads what is there. A claim that was left by a
//! process that was killed is taken over, with all that was written under it.
//!
//! Of two that prepare the same data set at the same time, the one that claimed it last goes on; the
//! other sees before its next object that the claim is not its own, and ends without touching
//! anything. Objects are removed under the own claim alone, and only those with names that `prepare`
//! gives.
//!
//! Shards are written to files without a name in the folder for temporary files, of which a kill
//! leaves nothing, and sent while the next are being written.

use std::{
    collections::{BTreeMap, BTreeSet},
    env,
    fs::File,
    path::{Path, PathBuf},
    time::Duration,
};

use bytes::Bytes;

use super::Output;
use crate::{
    error::DataError,
    index::{CLAIM_KEY, INDEX_FILE, Index, is_claim},
    prepare::{PrepareError, TOKENIZER_FILE, shard::is_shard_file},
    store::{Cancel, Entry, Guard, Guarded, RemoteFolder, Started},
};

/// How long a shard on its way is waited for before the caller may look at something else.
const MOMENT: Duration = Duration::from_millis(50);

/// See the [module](self).
pub(crate) struct RemoteOutput {
    folder: RemoteFolder,
    /// Where shards are on this machine.
    temporary: PathBuf,
    claim: Guard,
    given_up: Cancel,
    on_their_way: Vec<Started<Guarded>>,
}

impl RemoteOutput {
    /// Claims a folder of a store that holds no data set.
    ///
    /// # Errors
    /// [`PrepareError::OutputExists`], [`DataError::Store`], and [`DataError::Io`] where there can be no
    /// temporary files.
    pub(crate) fn begin(folder: RemoteFolder) -> Result<RemoteOutput, PrepareError> {
        let temporary = env::temp_dir();
        unnamed_file(&temporary)?;
        let exists = |found| {
            Err(PrepareError::OutputExists { path: folder.location().to_string().into(), found })
        };
        let is_claimed = match folder.get_if_there(INDEX_FILE)? {
            Some(index) if is_claim(&index) => true,
            Some(_) => return exists("a data set"),
            None => false,
        };
        let entries = folder.list()?;
        let is_in_the_way =
            |entry: &Entry| entry.name.ends_with(".parquet") || entry.name == TOKENIZER_FILE;
        if !is_claimed && entries.iter().any(is_in_the_way) {
            return exists("files of a data set");
        }
        let claim = Guard::new(INDEX_FILE, CLAIM_KEY);
        let output = RemoteOutput {
            folder,
            temporary,
            claim,
            given_up: Cancel::default(),
            on_their_way: Vec::new(),
        };
        match output.folder.put_guard(&output.claim) {
            Ok(()) => Ok(output),
            Err(error) => {
                // It may have landed all the same.
                Box::new(output).abandon();
                Err(error.into())
            }
        }
    }

    fn check_claim(&self) -> Result<(), PrepareError> {
        match self.folder.is_guarded(&self.claim)? {
            true => Ok(()),
            false => Err(self.taken()),
        }
    }

    fn taken(&self) -> PrepareError {
        PrepareError::OutputTaken { path: self.folder.location().to_string().into() }
    }

    fn complete(&self, index: &Index, tokenizer_json: Option<&str>) -> Result<(), PrepareError> {
        self.check_claim()?;
        if let Some(json) = tokenizer_json {
            self.folder.put(TOKENIZER_FILE, Bytes::from(json.to_owned()))?;
        }
        let entries = self.folder.list()?;
        self.check_claim()?;
        let stored: BTreeMap<&str, u64> =
            entries.iter().map(|entry| (entry.name.as_str(), entry.bytes)).collect();
        for shard in &index.shards {
            let path = || self.folder.location().join(&shard.file).to_string().into();
            match stored.get(&*shard.file) {
                Some(&found) if found == shard.bytes => {}
                Some(&found) => {
                    return Err(DataError::ShardBytes {
                        path: path(),
                        expected: shard.bytes,
                        found,
                    }
                    .into());
                }
                None => return Err(DataError::MissingShard { path: path() }.into()),
            }
        }
        // What a killed process left is all that it does not name.
        let named: BTreeSet<&str> = index
            .shards
            .iter()
            .map(|shard| &*shard.file)
            .chain(index.tokenizer_file.as_deref())
            .collect();
        remove(&self.folder, &entries, |name| named.contains(name))?;
        Ok(self.folder.put(INDEX_FILE, Bytes::from(index.to_bytes()))?)
    }

    /// Removes all that was written, and the claim last, as long as that is the own one.
    fn remove_all(&self) -> Result<(), DataError> {
        let folder = self.folder.hurried();
        if folder.is_guarded(&self.claim)? {
            remove(&folder, &folder.list()?, |_| false)?;
            folder.delete(INDEX_FILE)?;
        }
        Ok(())
    }
}

impl Output for RemoteOutput {
    fn folder(&self) -> &Path {
        &self.temporary
    }

    fn create(&self, _: &str) -> Result<File, PrepareError> {
        unnamed_file(&self.temporary)
    }

    fn take(&mut self, name: &str, file: File) -> Result<(), PrepareError> {
        let started = self.folder.start_guarded(name, file, &self.claim, &self.given_up)?;
        self.on_their_way.push(started);
        Ok(())
    }

    fn has_at_most(&mut self, on_their_way: usize) -> Result<bool, PrepareError> {
        let mut at = 0;
        while at < self.on_their_way.len() {
            // The first is waited for; whether others have arrived is seen at once.
            let is_waited_for = at == 0 && self.on_their_way.len() > on_their_way;
            let time = if is_waited_for { MOMENT } else { Duration::ZERO };
            match self.on_their_way[at].wait_for(time) {
                None => at += 1,
                Some(stored) => {
                    self.on_their_way.remove(at);
                    if stored? == Guarded::Refused {
                        return Err(self.taken());
                    }
                }
            }
        }
        Ok(self.on_their_way.len() <= on_their_way)
    }

    fn publish(
        self: Box<Self>,
        index: &Index,
        tokenizer_json: Option<&str>,
    ) -> Result<(), PrepareError> {
        assert!(self.on_their_way.is_empty(), "all shards were waited for");
        let completed = self.complete(index, tokenizer_json);
        if completed.is_err() {
            self.abandon();
        }
        completed
    }

    fn abandon(mut self: Box<Self>) {
        // What is still being sent could land behind what removes it.
        self.given_up.cancel();
        for started in self.on_their_way.drain(..) {
            let _ = started.wait();
        }
        // Whatever ended the run is the error to report. What stays is under a claim, and is no data
        // set.
        let _ = self.remove_all();
    }
}

fn unnamed_file(folder: &Path) -> Result<File, PrepareError> {
    tempfile::tempfile_in(folder).map_err(PrepareError::io("create a temporary file in", folder))
}

/// Removes the objects that a `prepare` may have written, but for the claim and those to keep.
fn remove(
    folder: &RemoteFolder,
    entries: &[Entry],
    is_kept: impl Fn(&str) -> bool,
) -> Result<(), DataError> {
    let is_ours = |name: &str| is_shard_file(name) || name == TOKENIZER_FILE;
    let names = entries.iter().map(|entry| entry.name.as_str());
    names.filter(|name| is_ours(name) && !is_kept(name)).try_for_each(|name| folder.delete(name))
}
