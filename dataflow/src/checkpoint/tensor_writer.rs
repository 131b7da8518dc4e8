//! The files of tensors of a checkpoint, filled in place by chunks that come in any order.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tidemill_collective::StatePart;
use tidemill_files::lock::is_same_file;
use tidemill_model::hugging_face::{PlannedFile, stored_bytes};

use super::file_plan::{FilePlan, FileShare};
use super::side_by_side::side_by_side;
use super::trainer_state::checksum_of;
use crate::error::{JobError, Result};

/// The files of a share, which is all that one process writes.
pub(super) struct TensorWriter {
    plan: Arc<FilePlan>,
    folder: PathBuf,
    /// Indexed by the number of the file; `None` where another process writes it.
    files: Vec<Option<OpenFile>>,
    /// For each part the ranges that were written, end by start.
    written: BTreeMap<StatePart, BTreeMap<usize, usize>>,
}

/// A file that is being filled.
struct OpenFile {
    name: String,
    path: PathBuf,
    file: File,
    elements_left: usize,
}

impl TensorWriter {
    /// Creates the files of `share` in `folder`.
    ///
    /// # Errors
    /// A file that cannot be created, or is there.
    pub(super) fn begin(plan: &Arc<FilePlan>, folder: &Path, share: FileShare) -> Result<Self> {
        let create = |(number, planned)| {
            share.has(number).then(|| OpenFile::create(folder, planned)).transpose()
        };
        let files = plan.files().enumerate().map(create).collect::<Result<_>>()?;
        let plan = Arc::clone(plan);
        Ok(Self { plan, folder: folder.to_owned(), files, written: BTreeMap::new() })
    }

    /// Writes `values` at element `start` of a part's arena. Each element is written once, in any order.
    ///
    /// # Errors
    /// A file that cannot be written, elements that were written before (others are missing then), or those of a file that
    /// another process writes.
    pub(super) fn write(&mut self, part: StatePart, start: usize, values: &[f32]) -> Result<()> {
        let end = start + values.len();
        let written = self.written.entry(part).or_default();
        if let Some((&before, &until)) = written.range(..end).next_back()
            && until > start
        {
            let what = format!(
                "elements {start} to {end} of {part:?} arrived, but {before} to {until} were written before"
            );
            return Err(JobError::checkpoint(&self.folder, what));
        }
        written.insert(start, end);
        for (file, piece) in self.plan.pieces(part, start..end) {
            let values = &values[piece.arena.start - start..piece.arena.end - start];
            let Some(file) = &mut self.files[file] else {
                let what = format!("elements {start} to {end} of {part:?} are another process's");
                return Err(JobError::checkpoint(&self.folder, what));
            };
            file.write_at(values, piece.file_offset)?;
        }
        Ok(())
    }

    /// Syncs the files; answers the checksum of each by its name. It is of the bytes that the system reads back, several files at
    /// once.
    ///
    /// # Errors
    /// Elements that were not written, or a file that cannot be synced or read.
    pub(super) fn finish(&mut self) -> Result<BTreeMap<String, String>> {
        for file in self.files.iter().flatten() {
            if file.elements_left != 0 {
                let what = format!("{} elements were never written", file.elements_left);
                return Err(JobError::checkpoint(&file.path, what));
            }
        }
        let jobs = self.files.iter().flatten().collect();
        let checksums = side_by_side(
            jobs,
            &self.folder,
            || false,
            |file: &OpenFile, shared| {
                file.sync()?;
                let mut read = &file.file;
                read.seek(SeekFrom::Start(0))
                    .map_err(|source| JobError::file("reading", &file.path, source))?;
                let checksum = checksum_of(read, &file.path, || shared.moved())?;
                Ok((file.name.clone(), checksum))
            },
        )?;
        Ok(checksums.into_iter().flatten().collect())
    }

    /// Whether the files at these paths are these files.
    pub(super) fn is_in_place(&self) -> bool {
        self.files.iter().flatten().all(OpenFile::is_in_place)
    }

    /// The first file of another process that is not in the folder, or not as large as it has to be.
    pub(super) fn missing(&self) -> Option<PathBuf> {
        let others = self.files.iter().zip(self.plan.files()).filter(|(ours, _)| ours.is_none());
        others.map(|(_, planned)| (self.folder.join(&planned.name), planned)).find_map(
            |(path, it)| {
                let bytes = std::fs::metadata(&path).map(|found| found.len()).ok();
                (bytes != Some(it.layout.file_bytes())).then_some(path)
            },
        )
    }

    /// Removes the files, where they are in place.
    pub(super) fn remove(&self) {
        for file in self.files.iter().flatten().filter(|file| file.is_in_place()) {
            // A file that cannot be removed now is swept when the run folder is next opened.
            let _ = std::fs::remove_file(&file.path);
        }
    }
}

impl OpenFile {
    fn create(folder: &Path, planned: &PlannedFile) -> Result<Self> {
        let PlannedFile { name, layout } = planned;
        let path = folder.join(name);
        let create = || -> std::io::Result<File> {
            let mut options = OpenOptions::new();
            let file = options.read(true).write(true).create_new(true).open(&path)?;
            file.set_len(layout.file_bytes())?;
            file.write_all_at(layout.header_bytes(), 0)?;
            Ok(file)
        };
        let file = create().map_err(|source| JobError::file("writing", &path, source))?;
        let elements_left = layout.tensors().iter().map(|tensor| tensor.elements).sum();
        Ok(Self { name: name.clone(), path, file, elements_left })
    }

    fn write_at(&mut self, values: &[f32], offset: u64) -> Result<()> {
        self.file
            .write_all_at(&stored_bytes(values), offset)
            .map_err(|source| JobError::file("writing", &self.path, source))?;
        self.elements_left = self.elements_left.saturating_sub(values.len());
        Ok(())
    }

    fn is_in_place(&self) -> bool {
        let looks =
            std::fs::metadata(&self.path).and_then(|there| Ok((there, self.file.metadata()?)));
        looks.is_ok_and(|(there, ours)| is_same_file(&there, &ours))
    }

    fn sync(&self) -> Result<()> {
        self.file.sync_all().map_err(|source| JobError::file("syncing", &self.path, source))
    }
}
