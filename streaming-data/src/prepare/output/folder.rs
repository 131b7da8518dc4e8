//! The folder that is written aside and put in place when it is complete.
//!
//! A folder of shards without an index is a data set too, so half of one must never be under
//! the output's name. Everything is written into a hidden folder next to the output, synced, and
//! renamed in one step. Nothing that was there is overwritten, and on failure nothing of ours
//! stays: neither the hidden folder nor parents that were made for it. What a killed process left
//! is no input of anyone, and removed by the next run with that output.

use std::{
    env,
    ffi::{OsStr, OsString},
    fs::{self, File, Permissions},
    io::{self, Write},
    path::{Path, PathBuf},
};

use tidemill_files::{durable, scratch::ScratchFolder};

use super::Output;
use crate::{
    data_set::index::{INDEX_FILE, Index, version_file},
    prepare::{PrepareError, TOKENIZER_FILE},
};

/// The middle of the names of hidden folders: after the output's name, before the part that differs between folders.
const PREPARING: &str = ".preparing-";

/// Whether this is the name of a data set in the making, or of a rest that one left.
pub(crate) fn is_in_the_making(name: &OsStr) -> bool {
    name.to_str().is_some_and(|name| name.starts_with('.') && name.contains(PREPARING))
}

/// A folder in the making; dropped before it is published, it leaves nothing behind.
#[derive(Debug)]
pub(crate) struct OutputFolder {
    output: PathBuf,
    /// Where everything is written; none once it was published.
    aside: Option<ScratchFolder>,
    /// Files that were put, and folders that were made for them.
    put: Vec<String>,
    made_folders: Vec<String>,
    /// Folders above the output that were made for it, the outermost first.
    made_parents: Vec<PathBuf>,
}

impl OutputFolder {
    /// Begins a folder that is to appear as `output`, which is missing or an empty folder.
    ///
    /// # Errors
    /// [`PrepareError::OutputExists`], or [`DataError::Io`] when a folder cannot be made there.
    pub(crate) fn begin(output: &Path) -> Result<OutputFolder, PrepareError> {
        let exists = |found| PrepareError::OutputExists { path: output.to_owned(), found };
        let permissions = match fs::symlink_metadata(output) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(source) => return Err(PrepareError::io("look at", output)(source)),
            Ok(_) => {
                // Behind a link as well: it is its target that is put in place.
                let metadata = fs::metadata(output).map_err(PrepareError::io("look at", output))?;
                if !metadata.is_dir() {
                    return Err(exists("a file"));
                }
                let mut entries =
                    fs::read_dir(output).map_err(PrepareError::io("list folder", output))?;
                if entries.next().is_some() {
                    return Err(exists("a folder that is not empty"));
                }
                Some(metadata.permissions())
            }
        };
        let in_place = match permissions {
            Some(_) => fs::canonicalize(output).map_err(PrepareError::io("look at", output))?,
            None => std::path::absolute(output).map_err(PrepareError::io("look at", output))?,
        };
        if env::current_dir().is_ok_and(|current| current == in_place) {
            return Err(exists("the current folder, which cannot be put in place as a whole"));
        }
        let mut folder = OutputFolder {
            output: in_place,
            aside: None,
            put: Vec::new(),
            made_folders: Vec::new(),
            made_parents: Vec::new(),
        };
        folder.make_parents()?;
        folder.make_aside(permissions.as_ref())?;
        if permissions.is_some() {
            // A mount point cannot be replaced: that is better known now than at the end.
            folder.rename_into_place()?;
            folder.make_aside(permissions.as_ref())?;
        }
        Ok(folder)
    }

    /// Where to write.
    fn path(&self) -> &Path {
        self.aside.as_ref().expect("the folder was not published yet").path()
    }

    fn write(&self, name: &str, content: &[u8]) -> Result<(), PrepareError> {
        let mut file = self.create(name)?;
        file.write_all(content).map_err(PrepareError::io("write", self.path().join(name)))
    }

    /// Syncs the files, which are all that were written, and puts the folder in place; also when
    /// something appeared under the output's name in the meantime, that is an error.
    fn put_in_place<'a>(
        mut self,
        files: impl IntoIterator<Item = &'a str>,
    ) -> Result<(), PrepareError> {
        let sync = |file: &str| {
            let path = self.path().join(file);
            durable::sync(&path).map_err(PrepareError::io("write", &path))
        };
        files.into_iter().try_for_each(sync)?;
        self.put.iter().map(String::as_str).try_for_each(sync)?;
        for folder in self.made_folders.iter().map(|name| self.path().join(name)) {
            durable::sync_folder(&folder).map_err(PrepareError::io("write", &folder))?;
        }
        durable::sync_folder(self.path()).map_err(PrepareError::io("write", self.path()))?;
        self.rename_into_place()?;
        let made = std::mem::take(&mut self.made_parents);
        for name in made.iter().chain([&self.output]) {
            durable::sync_parent(name).map_err(PrepareError::io("keep the name of", name))?;
        }
        Ok(())
    }

    fn make_parents(&mut self) -> Result<(), PrepareError> {
        let missing: Vec<PathBuf> = self
            .output
            .ancestors()
            .skip(1)
            .take_while(|parent| !parent.as_os_str().is_empty() && !parent.exists())
            .map(Path::to_owned)
            .collect();
        for parent in missing.into_iter().rev() {
            match fs::create_dir(&parent) {
                Ok(()) => self.made_parents.push(parent),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(source) => return Err(PrepareError::io("create folder", parent)(source)),
            }
        }
        Ok(())
    }

    fn make_aside(&mut self, permissions: Option<&Permissions>) -> Result<(), PrepareError> {
        let mut beginning = OsString::from(".");
        beginning.push(self.output.file_name().unwrap_or_default());
        beginning.push(PREPARING);
        let parent = self.output.parent().unwrap_or(&self.output);
        let aside = ScratchFolder::new_in(parent, &beginning)
            .map_err(PrepareError::io("create a folder in", parent))?;
        self.aside = Some(aside);
        match permissions {
            None => Ok(()),
            Some(permissions) => fs::set_permissions(self.path(), permissions.clone())
                .map_err(PrepareError::io("set permissions of", self.path())),
        }
    }

    fn rename_into_place(&mut self) -> Result<(), PrepareError> {
        let aside = self.aside.take().expect("the folder was not published yet");
        if let Err((error, aside)) = aside.rename(&self.output) {
            self.aside = Some(aside);
            let output = self.output.clone();
            return Err(match error.kind() {
                // The folder was not there, or empty, when the preparation began.
                io::ErrorKind::DirectoryNotEmpty | io::ErrorKind::AlreadyExists => {
                    let found = "what was put there while this was prepared, as by another program";
                    PrepareError::OutputExists { path: output, found }
                }
                _ => PrepareError::io("put the data set in place as", output)(error),
            });
        }
        Ok(())
    }
}

impl Output for OutputFolder {
    fn folder(&self) -> &Path {
        self.path()
    }

    fn name_of(&self, file: &str) -> String {
        file.to_owned()
    }

    fn create(&self, name: &str) -> Result<File, PrepareError> {
        let path = self.path().join(name);
        File::create_new(&path).map_err(PrepareError::io("create", path))
    }

    fn take(&mut self, written_as: &str, name: &str, _: File) -> Result<(), PrepareError> {
        if written_as == name {
            return Ok(());
        }
        let (from, to) = (self.path().join(written_as), self.path().join(name));
        fs::rename(&from, &to).map_err(PrepareError::io("name shard", to))
    }

    fn put(&mut self, name: &str, content: Vec<u8>) -> Result<(), PrepareError> {
        if let Some((folder, _)) = name.rsplit_once('/')
            && !self.made_folders.iter().any(|made| made == folder)
        {
            let path = self.path().join(folder);
            fs::create_dir(&path).map_err(PrepareError::io("create folder", path))?;
            self.made_folders.push(folder.to_owned());
        }
        let path = self.path().join(name);
        fs::write(&path, content).map_err(PrepareError::io("write", path))?;
        self.put.push(name.to_owned());
        Ok(())
    }

    fn has_at_most(&mut self, _: usize) -> Result<bool, PrepareError> {
        Ok(true)
    }

    fn publish(
        mut self: Box<Self>,
        index: &Index,
        tokenizer_json: Option<&str>,
    ) -> Result<(), PrepareError> {
        if index.state.is_some() {
            self.put(&version_file(index), index.to_bytes())?;
        }
        if let Some(json) = tokenizer_json {
            self.write(TOKENIZER_FILE, json.as_bytes())?;
        }
        self.write(INDEX_FILE, &index.to_bytes())?;
        let beside = tokenizer_json.map(|_| TOKENIZER_FILE).into_iter().chain([INDEX_FILE]);
        self.put_in_place(index.shards.iter().map(|shard| shard.file.as_str()).chain(beside))
    }

    fn abandon(self: Box<Self>) {}
}

impl Drop for OutputFolder {
    fn drop(&mut self) {
        // It is in one of the parents.
        drop(self.aside.take());
        for parent in self.made_parents.iter().rev() {
            // Refused, and rightly, when something else was put there.
            let _ = fs::remove_dir(parent);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).unwrap();
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_dropped_folder_leaves_nothing_and_a_published_one_is_whole() {
        let folder = tempfile::tempdir().unwrap();
        let output = folder.path().join("new/deep/set");
        let begun = OutputFolder::begin(&output).unwrap();
        begun.write("a", b"1").unwrap();
        assert!(!output.exists() && begun.path().join("a").exists());
        drop(begun);
        assert!(names(folder.path()).is_empty());

        let begun = OutputFolder::begin(&output).unwrap();
        begun.write("a", b"1").unwrap();
        begun.put_in_place(["a"]).unwrap();
        assert_eq!(names(output.parent().unwrap()), ["set"]);
        assert_eq!(fs::read(output.join("a")).unwrap(), b"1");
    }

    #[test]
    fn what_exists_is_never_overwritten_and_an_empty_folder_is_used() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "mine").unwrap();
        let full = folder.path().join("full");
        fs::create_dir(&full).unwrap();
        fs::write(full.join("mine"), "").unwrap();
        for taken in [&file, &full] {
            let error = OutputFolder::begin(taken).unwrap_err();
            assert!(matches!(&error, PrepareError::OutputExists { .. }), "{error}");
            assert!(error.to_string().contains(taken.to_str().unwrap()), "{error}");
        }
        let late = folder.path().join("late");
        let begun = OutputFolder::begin(&late).unwrap();
        fs::create_dir(&late).unwrap();
        fs::write(late.join("mine"), "").unwrap();
        assert!(begun.put_in_place([]).is_err(), "someone else was faster");
        assert_eq!(names(&late), ["mine"]);

        let empty = folder.path().join("empty");
        fs::create_dir(&empty).unwrap();
        drop(OutputFolder::begin(&empty).unwrap());
        assert!(names(&empty).is_empty(), "still there");
        OutputFolder::begin(&empty).unwrap().put_in_place([]).unwrap();
        assert_eq!(names(folder.path()), ["empty", "file", "full", "late"]);
    }

    #[test]
    fn what_a_killed_process_left_is_removed_and_what_one_writes_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let output = folder.path().join("set");
        let left = OutputFolder::begin(&output).unwrap();
        let second = OutputFolder::begin(&output).unwrap();
        assert_ne!(left.path(), second.path());
        let dead = folder.path().join(".set.preparing-1-0");
        let other = folder.path().join(".sets.preparing-1-0");
        for folder in [&dead, &other] {
            fs::create_dir(folder).unwrap();
            fs::write(folder.join("shard-00000.parquet"), "").unwrap();
            fs::write(folder.with_added_extension("lock"), "").unwrap();
        }
        drop(OutputFolder::begin(&output).unwrap());
        assert!(!dead.exists() && other.exists() && second.path().exists());
        second.put_in_place([]).unwrap();
        assert!(left.path().exists() && output.exists());
    }
}
