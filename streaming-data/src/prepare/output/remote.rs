//! A data set that is written to a store.
//!
//! A store has no rename, and shards without an index would be taken for a data set. So the first
//! object that is written is a [claim](crate::data_set::index) in the place of the index, and the index is the
//! last: it takes the claim's place. In between the folder is no data set. The claim of a process that was
//! killed is taken over.
//!
//! That place holds claims, one after the other, and at last an index; each is put only over the one that
//! was seen there, and none is ever removed: see [`Claim`]. So of two processes that prepare the same data
//! set at the same time, the one that claimed it last goes on; the other finds before its next object that
//! the claim is not its own, and could not publish in any case. Each writes objects under names that hold its
//! token, and removes only these. A process that has published its index also removes the objects of others
//! that it had seen there before: their claims are gone, and cannot become an index. Updatable data sets name
//! objects by their content, without a token: every process writes the same bytes, and none removes them.
//!
//! An index may still arrive though its put failed without an answer. So the shards that it names are removed
//! only after another claim was put over the one that it needs.
//!
//! Shards are written to unnamed files in the folder for temporary files, which leave nothing behind after a kill, and
//! are uploaded while the next are being written.

use std::{
    collections::BTreeMap,
    env,
    fs::File,
    path::{Path, PathBuf},
    time::Duration,
};

use bytes::Bytes;

use super::Output;
use crate::{
    data_set::index::{INDEX_FILE, Index, claim_of, is_claim, version_file},
    error::DataError,
    prepare::{PrepareError, TOKENIZER_FILE, output::shard::is_shard_file},
    store::{Cancel, Claim, Claimed, Entry, RemoteFolder, Started, TOKEN_DIGITS, new_token},
};

/// How long one call waits for a shard that is being uploaded.
const MOMENT: Duration = Duration::from_millis(50);

/// See the [module](self).
pub(crate) struct RemoteOutput {
    folder: RemoteFolder,
    /// Where shards are on this machine.
    temporary: PathBuf,
    token: String,
    claim: Claim,
    given_up: Cancel,
    uploading: Vec<Started<Claimed>>,
}

/// The state of an index that was put without an answer.
#[derive(Debug, PartialEq, Eq)]
enum Unanswered {
    /// It is there.
    Published,
    /// It is not there, and never will be.
    Refused,
    /// The store does not say.
    Unknown,
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
        loop {
            let found = folder.find(INDEX_FILE)?;
            if found.as_ref().is_some_and(|found| !is_claim(&found.content)) {
                return exists("a data set");
            }
            let entries = folder.list()?;
            let is_in_the_way = |entry: &Entry| {
                let name = entry.name.as_str();
                name.ends_with(".parquet") || name == TOKENIZER_FILE || token_of(name).is_some()
            };
            if found.is_none() && entries.iter().any(is_in_the_way) {
                return exists("files of a data set");
            }
            // A new one each time: the one before may have been there, and no state comes twice.
            let token = new_token();
            let content = claim_of(&token).into();
            if let Some(claim) = folder.claim(INDEX_FILE, content, found.as_ref())? {
                let (given_up, uploading) = (Cancel::default(), Vec::new());
                return Ok(RemoteOutput { folder, temporary, token, claim, given_up, uploading });
            }
            // Another was there first: with a claim, or a data set.
        }
    }

    fn check_claim(&self) -> Result<(), PrepareError> {
        match self.folder.is_claimed_by(&self.claim)? {
            true => Ok(()),
            false => Err(self.taken()),
        }
    }

    fn taken(&self) -> PrepareError {
        PrepareError::OutputTaken { path: self.folder.location().to_string().into() }
    }

    /// Writes the files that belong to the index, and checks that all shards are stored.
    fn complete(
        &self,
        index: &Index,
        tokenizer_json: Option<&str>,
    ) -> Result<Vec<Entry>, PrepareError> {
        self.check_claim()?;
        if let (Some(json), Some(file)) = (tokenizer_json, &index.tokenizer_file) {
            self.folder.put(file, Bytes::from(json.to_owned()))?;
        }
        let entries = self.folder.list()?;
        let stored: BTreeMap<&str, u64> =
            entries.iter().map(|entry| (entry.name.as_str(), entry.bytes)).collect();
        for shard in &index.shards {
            let found = stored.get(&*shard.file).copied();
            if found == Some(shard.bytes) {
                continue;
            }
            // After another process published its index, that process removes these files.
            self.check_claim()?;
            let path = self.folder.location().join(&shard.file).to_string().into();
            return Err(match found {
                Some(found) => DataError::ShardBytes { path, expected: shard.bytes, found },
                None => DataError::MissingShard { path },
            }
            .into());
        }
        Ok(entries)
    }

    /// The state of an index whose put failed. It cannot arrive any more once another claim has replaced
    /// the one that it was to replace.
    fn fence(&mut self, index: &[u8]) -> Unanswered {
        let folder = self.folder.hurried();
        let fence = claim_of(&new_token()).into();
        match folder.replace_claim(&mut self.claim, fence) {
            Ok(Claimed::Ours) => Unanswered::Refused,
            Ok(Claimed::Others) => match folder.find(INDEX_FILE) {
                Ok(Some(found)) if found.content == index => Unanswered::Published,
                Ok(_) => Unanswered::Refused,
                Err(_) => Unanswered::Unknown,
            },
            Err(_) => Unanswered::Unknown,
        }
    }

    /// Removes all files that were written under the own token; also the claim, in a store without conditions: a store that
    /// has conditions never brings back an earlier object.
    fn remove_own(&self) -> Result<(), DataError> {
        let folder = self.folder.hurried();
        let is_own = |name: &str| token_of(name) == Some(&self.token);
        remove(&folder, &folder.list()?, is_own)?;
        if !self.claim.is_checked() && folder.is_claimed_by(&self.claim)? {
            folder.delete(INDEX_FILE)?;
        }
        Ok(())
    }
}

impl Output for RemoteOutput {
    fn folder(&self) -> &Path {
        &self.temporary
    }

    fn name_of(&self, file: &str) -> String {
        let (kind, rest) = file.split_at(file.find(['-', '.']).unwrap_or(file.len()));
        format!("{kind}-{}{rest}", self.token)
    }

    fn create(&self, _: &str) -> Result<File, PrepareError> {
        unnamed_file(&self.temporary)
    }

    fn take(&mut self, _: &str, name: &str, file: File) -> Result<(), PrepareError> {
        let started = self.folder.start_claimed(&self.claim, name, file, &self.given_up)?;
        self.uploading.push(started);
        Ok(())
    }

    fn put(&mut self, name: &str, content: Vec<u8>) -> Result<(), PrepareError> {
        self.check_claim()?;
        Ok(self.folder.put(name, content.into())?)
    }

    fn has_at_most(&mut self, uploading: usize) -> Result<bool, PrepareError> {
        let stored = wait_for_some(&mut self.uploading, uploading)?;
        match stored.contains(&Claimed::Others) {
            true => Err(self.taken()),
            false => Ok(self.uploading.len() <= uploading),
        }
    }

    fn publish(
        mut self: Box<Self>,
        index: &Index,
        tokenizer_json: Option<&str>,
    ) -> Result<(), PrepareError> {
        assert!(self.uploading.is_empty(), "all shards were waited for");
        let put = match index.state {
            Some(_) => self.put(&version_file(index), index.to_bytes()),
            None => Ok(()),
        };
        let entries = match put.and_then(|()| self.complete(index, tokenizer_json)) {
            Ok(entries) => entries,
            Err(error) => {
                self.abandon();
                return Err(error);
            }
        };
        let bytes = index.to_bytes();
        let put = self.folder.replace_claim(&mut self.claim, bytes.clone().into());
        let error = match put {
            Ok(Claimed::Ours) => {
                // It was there before the index was, so that the claim over it is gone. The data set is
                // complete, whether or not it can be removed.
                let is_left_over =
                    |name: &str| token_of(name).is_some_and(|token| token != self.token);
                let _ = remove(&self.folder, &entries, is_left_over);
                return Ok(());
            }
            Ok(Claimed::Others) => self.taken(),
            Err(error) => match self.fence(&bytes) {
                Unanswered::Published => return Ok(()),
                Unanswered::Refused => error.into(),
                // The files that the index names have to stay.
                Unanswered::Unknown => return Err(error.into()),
            },
        };
        self.abandon();
        Err(error)
    }

    fn abandon(mut self: Box<Self>) {
        // An object that is still being sent could arrive after its removal.
        self.given_up.cancel();
        for started in self.uploading.drain(..) {
            let _ = started.wait();
        }
        // Whatever ended the run is the error to report. What stays is under a claim, and is no data
        // set.
        let _ = self.remove_own();
    }
}

/// Takes out the uploads that have ended; where more than `most` have not, it waits a moment.
pub(super) fn wait_for_some<T>(
    uploading: &mut Vec<Started<T>>,
    most: usize,
) -> Result<Vec<T>, PrepareError> {
    let (mut at, mut arrived) = (0, Vec::new());
    while at < uploading.len() {
        // Only the first upload is waited for; the others are only checked.
        let is_waited_for = at == 0 && uploading.len() > most;
        let time = if is_waited_for { MOMENT } else { Duration::ZERO };
        match uploading[at].wait_for(time) {
            None => at += 1,
            Some(stored) => {
                uploading.remove(at);
                arrived.push(stored?);
            }
        }
    }
    Ok(arrived)
}

pub(super) fn unnamed_file(folder: &Path) -> Result<File, PrepareError> {
    tempfile::tempfile_in(folder).map_err(PrepareError::io("create a temporary file in", folder))
}

/// The token in a name that [`Output::name_of`] gives in stores, for a shard or a tokenizer.
fn token_of(name: &str) -> Option<&str> {
    let (kind, rest) = name.split_once('-')?;
    let (token, rest) = rest.split_at_checked(TOKEN_DIGITS)?;
    let is_token = token.bytes().all(|digit| digit.is_ascii_hexdigit());
    let file = format!("{kind}{rest}");
    (is_token && (is_shard_file(&file) || file == TOKENIZER_FILE)).then_some(token)
}

/// Removes the objects with such names.
fn remove(
    folder: &RemoteFolder,
    entries: &[Entry],
    is_removed: impl Fn(&str) -> bool,
) -> Result<(), DataError> {
    let names = entries.iter().map(|entry| entry.name.as_str());
    names.filter(|name| is_removed(name)).try_for_each(|name| folder.delete(name))
}

#[cfg(test)]
mod tests;
