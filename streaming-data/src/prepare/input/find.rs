//! Which files and folders hold documents, and in which order.
//!
//! Order and choice depend on the inputs and the content of the file system alone, never on the
//! order in which the system lists a folder: inputs are in byte order of their paths (as given,
//! joined with the path below the input).
//!
//! The kind of an input follows from its name, with one exception: an `index.json` that matches the glob and is
//! the index of an MDS data set makes its folder one input, and neither its files nor its
//! subfolders are searched any further, since that index may list shards in them. Any other
//! `index.json` in a folder is never an input.
//!
//! A file is an input once, however many paths lead to it (inputs given twice or inside one
//! another, symbolic links): the smallest of the paths counts. A folder is walked once per input:
//! first everything that is reached without a symbolic link to a folder, then the folders reached through
//! such links in order of their paths, so that a circle of links ends and a real path is never
//! hidden by a link to it.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::{Path, PathBuf},
    time::SystemTime,
};

use globset::{GlobBuilder, GlobMatcher};

use super::{
    format::{Format, is_mds_index},
    skip::{SkipReason, SkippedDocument},
};
use crate::{
    data_set::index::INDEX_FILE,
    prepare::{PrepareError, output::is_in_the_making},
};

/// A file to read, or a folder that is read as one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Input {
    /// Where it is, as it was reached.
    pub path: PathBuf,
    /// Its size when it was found: of a folder, the size of its index.
    pub bytes: u64,
    /// How it holds documents.
    pub format: Format,
    /// When it was last changed, as far as the file system says.
    pub changed: Option<SystemTime>,
}

/// The content of the inputs.
#[derive(Debug)]
pub(crate) struct FoundInputs {
    /// The inputs, in byte order of the paths.
    pub inputs: Vec<Input>,
    /// Files and folders that cannot be read, in byte order of their paths.
    pub skipped: Vec<SkippedDocument>,
    /// Paths that led to an input which had been reached by a smaller path.
    pub duplicates: u64,
}

/// Lists what to read: a file that is named is always an input, a folder that is named gives every
/// file below it whose path relative to that folder matches the glob.
///
/// # Errors
/// [`PrepareError::Glob`], [`DataError::Io`] for an input that does not exist, and
/// [`PrepareError::NoDocuments`] when there is neither an input nor anything skipped.
pub(crate) fn find_inputs(inputs: &[PathBuf], glob: &str) -> Result<FoundInputs, PrepareError> {
    // `*` stays within a folder, as in a shell; `**` crosses folders.
    let matcher = GlobBuilder::new(glob)
        .literal_separator(true)
        .build()
        .map_err(|source| PrepareError::Glob { glob: glob.to_owned(), source })?
        .compile_matcher();
    let mut search = Search {
        matcher,
        candidates: Vec::new(),
        skipped: Vec::new(),
        passed_over: PassedOver::default(),
    };
    for input in inputs {
        let metadata = fs::metadata(input).map_err(PrepareError::io("read input", input))?;
        if metadata.is_dir() {
            search.walk(input);
        } else if input.file_name().is_some_and(|name| name == INDEX_FILE)
            && is_mds_index(input).unwrap_or(false)
        {
            let folder = input.parent().unwrap_or(Path::new(""));
            let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
            search.take(folder.to_owned(), &metadata, Format::Mds);
        } else {
            search.take_file(input.clone(), metadata);
        }
    }
    let (mut candidates, mut skipped) = (search.candidates, search.skipped);
    candidates.sort_by(|a, b| path_bytes(&a.0.path).cmp(path_bytes(&b.0.path)));
    skipped.sort_by(|a, b| path_bytes(&a.path).cmp(path_bytes(&b.path)));
    skipped.dedup_by(|a, b| a.path == b.path);
    if candidates.is_empty() && skipped.is_empty() {
        let (inputs, found) = (inputs.to_vec(), search.passed_over.told());
        return Err(PrepareError::NoDocuments { inputs, glob: glob.to_owned(), found });
    }
    let mut seen = BTreeSet::new();
    let reached = candidates.len();
    let inputs: Vec<Input> = candidates
        .into_iter()
        .filter_map(|(input, real_path)| seen.insert(real_path).then_some(input))
        .collect();
    let duplicates = (reached - inputs.len()) as u64;
    Ok(FoundInputs { inputs, skipped, duplicates })
}

impl FoundInputs {
    /// Leaves out the files below a folder, also where a link leads there: a data set inside an input is not an input. What is named
    /// itself, as one of `inputs`, stays.
    pub(crate) fn leave_out(&mut self, folder: &Path, inputs: &[PathBuf]) {
        let Ok(folder) = fs::canonicalize(folder) else { return };
        let named = inputs.iter().filter_map(|input| fs::canonicalize(input).ok());
        let named: Vec<PathBuf> = named.filter(|input| input.starts_with(&folder)).collect();
        let is_named = |path: &PathBuf| named.iter().any(|input| path.starts_with(input));
        let is_left_out = |path: &Path| {
            fs::canonicalize(path).is_ok_and(|it| it.starts_with(&folder) && !is_named(&it))
        };
        self.inputs.retain(|input| !is_left_out(&input.path));
        self.skipped.retain(|skipped| !is_left_out(&skipped.path));
    }
}

/// The bytes by which paths are ordered. (`Path` itself compares component by component.)
pub(crate) fn path_bytes(path: &Path) -> &[u8] {
    path.as_os_str().as_encoded_bytes()
}

struct Search {
    matcher: GlobMatcher,
    /// Inputs, and the path of each without symbolic links.
    candidates: Vec<(Input, PathBuf)>,
    skipped: Vec<SkippedDocument>,
    passed_over: PassedOver,
}

/// How many suffixes an error names.
const NAMED_SUFFIXES: usize = 8;

/// Files that the glob does not match, by the suffixes of their names.
#[derive(Default)]
struct PassedOver {
    counts: BTreeMap<String, u64>,
    without_suffix: u64,
}

impl PassedOver {
    fn add(&mut self, path: &Path) {
        match path.extension() {
            Some(suffix) => {
                let suffix = suffix.to_string_lossy().into_owned();
                *self.counts.entry(suffix).or_default() += 1;
            }
            None => self.without_suffix += 1,
        }
    }

    /// The suffixes of files that were passed over, the most frequent first, and the flag that takes them.
    fn told(self) -> String {
        let mut counts: Vec<(String, u64)> = self.counts.into_iter().collect();
        counts.sort_by_key(|(_, count)| Reverse(*count));
        let mut words: Vec<String> = counts
            .iter()
            .take(NAMED_SUFFIXES)
            .map(|(suffix, count)| format!("{count} of .{suffix}"))
            .collect();
        let others: u64 = counts.iter().skip(NAMED_SUFFIXES).map(|(_, count)| count).sum();
        if others > 0 {
            words.push(format!("{others} of other suffixes"));
        }
        if self.without_suffix > 0 {
            words.push(format!("{} without a suffix", self.without_suffix));
        }
        // A name may hold characters with a meaning in a shell or a glob.
        let is_plain = |suffix: &&str| {
            let is_word = suffix.chars().all(|c| c.is_alphanumeric() || "-_+".contains(c));
            is_word && Format::of_file(Path::new(&format!("a.{suffix}"))).is_ok()
        };
        let suffixes = counts.iter().map(|(suffix, _)| suffix.as_str());
        let suffixes: Vec<&str> = suffixes.filter(is_plain).take(NAMED_SUFFIXES).collect();
        let glob = match &suffixes[..] {
            [] if self.without_suffix > 0 => "**/*".to_owned(),
            [] => return if words.is_empty() { "no file".to_owned() } else { words.join(", ") },
            [one] => format!("**/*.{one}"),
            all => format!("**/*.{{{}}}", all.join(",")),
        };
        format!("{}: --glob '{glob}' takes them", words.join(", "))
    }
}

impl Search {
    fn skip(&mut self, path: PathBuf, reason: SkipReason) {
        self.skipped.push(SkippedDocument { path, reason });
    }

    /// Takes the file at the path; anything else there is skipped.
    fn take_file(&mut self, path: PathBuf, metadata: fs::Metadata) {
        if !metadata.is_file() {
            // A pipe or device could block, never end, or differ the second time.
            return self.skip(path, SkipReason::NotAFile);
        }
        match Format::of_file(&path) {
            Ok(format) => self.take(path, &metadata, format),
            Err(reason) => self.skip(path, reason),
        }
    }

    fn take(&mut self, path: PathBuf, metadata: &fs::Metadata, format: Format) {
        let (bytes, changed) = (metadata.len(), metadata.modified().ok());
        match fs::canonicalize(&path) {
            Ok(real_path) => {
                self.candidates.push((Input { path, bytes, format, changed }, real_path));
            }
            Err(source) => self.skip(path, SkipReason::Unreadable { source }),
        }
    }

    fn walk(&mut self, input: &Path) {
        let mut walked = BTreeSet::new();
        let mut round = vec![input.to_owned()];
        while !round.is_empty() {
            let mut linked = Vec::new();
            round.sort_by(|a, b| path_bytes(a).cmp(path_bytes(b)));
            for start in round {
                let mut folders = vec![start];
                while let Some(folder) = folders.pop() {
                    match self.list(input, &folder, &mut walked, &mut linked) {
                        Ok(inner) => folders.extend(inner),
                        Err(source) => self.skip(folder, SkipReason::Unreadable { source }),
                    }
                }
            }
            round = linked;
        }
    }

    /// Takes the files of one folder that was not walked yet; returns the folders in it, and
    /// appends folders reached through symbolic links to `linked`.
    fn list(
        &mut self,
        input: &Path,
        folder: &Path,
        walked: &mut BTreeSet<PathBuf>,
        linked: &mut Vec<PathBuf>,
    ) -> io::Result<Vec<PathBuf>> {
        if !walked.insert(fs::canonicalize(folder)?) {
            return Ok(Vec::new());
        }
        let index = folder.join(INDEX_FILE);
        if self.wants(input, &index) && index.is_file() {
            match is_mds_index(&index) {
                Ok(true) => {
                    self.take(folder.to_owned(), &fs::metadata(&index)?, Format::Mds);
                    return Ok(Vec::new());
                }
                Ok(false) => {}
                Err(reason) => self.skip(index, reason),
            }
        }
        let mut inner = Vec::new();
        for entry in fs::read_dir(folder)? {
            let entry = entry?;
            let path = entry.path();
            if entry.file_type()?.is_dir() {
                if !is_in_the_making(&entry.file_name()) {
                    inner.push(path);
                }
                continue;
            }
            let wanted = entry.file_name() != INDEX_FILE && self.wants(input, &path);
            match fs::metadata(&path) {
                Ok(metadata) if metadata.is_dir() => linked.push(path),
                Ok(metadata) if wanted => self.take_file(path, metadata),
                Err(source) if wanted => self.skip(path, SkipReason::Unreadable { source }),
                Ok(metadata) if metadata.is_file() => self.passed_over.add(&path),
                Ok(_) | Err(_) => {}
            }
        }
        Ok(inner)
    }

    fn wants(&self, input: &Path, path: &Path) -> bool {
        path.strip_prefix(input).is_ok_and(|below| self.matcher.is_match(below))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(folder: &Path, files: &[&str]) {
        for file in files {
            let path = folder.join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, file).unwrap();
        }
    }

    fn found(folder: &Path, inputs: &[&str], glob: &str) -> (Vec<String>, u64) {
        let inputs: Vec<_> = inputs.iter().map(|input| folder.join(input)).collect();
        let found = find_inputs(&inputs, glob).unwrap();
        let below = |path: &Path| path.strip_prefix(folder).unwrap().to_str().unwrap().to_owned();
        (found.inputs.iter().map(|input| below(&input.path)).collect(), found.duplicates)
    }

    #[test]
    fn order_is_of_bytes_and_not_of_components_and_a_star_stays_in_its_folder() {
        let folder = tempfile::tempdir().unwrap();
        write(
            folder.path(),
            &["a/z.txt", "a.b/x.txt", "a-/x.txt", "B.txt", "é.txt", "z.txt", "no"],
        );
        let (all, _) = found(folder.path(), &[""], "**/*.txt");
        assert_eq!(all, ["B.txt", "a-/x.txt", "a.b/x.txt", "a/z.txt", "z.txt", "é.txt"]);
        assert_eq!(found(folder.path(), &[""], "*.txt").0, ["B.txt", "z.txt", "é.txt"]);
        assert_eq!(found(folder.path(), &["a"], "z.*").0, ["a/z.txt"], "relative to the input");
        // A file that is given by its path is taken regardless of the glob, and only once.
        let (named, duplicates) = found(folder.path(), &["no", "a", "a", "a/z.txt"], "**/*.txt");
        assert_eq!(named, ["a/z.txt", "no"]);
        assert_eq!(duplicates, 2);
    }

    #[cfg(unix)]
    #[test]
    fn circles_of_links_end_and_a_real_path_is_not_hidden_by_a_link() {
        use std::os::unix::fs::symlink;

        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        write(path, &["in/b/x.txt", "in/c/y.txt", "outside/o.txt"]);
        symlink(path.join("in"), path.join("in/c/up")).unwrap();
        symlink("up", path.join("in/c/again")).unwrap();
        symlink("b", path.join("in/a")).unwrap();
        symlink(path.join("outside"), path.join("in/linked")).unwrap();
        symlink("b/x.txt", path.join("in/z.txt")).unwrap();
        symlink("loop.txt", path.join("in/loop.txt")).unwrap();
        symlink("nowhere", path.join("in/dangling.txt")).unwrap();
        symlink("nowhere", path.join("in/dangling.md")).unwrap();

        let mut without = find_inputs(&[path.join("in")], "**/*.txt").unwrap();
        without.leave_out(&path.join("outside"), &[path.join("in")]);
        assert_eq!(without.inputs.len(), 2, "also where a link leads there");
        let inside = [path.join("in/b")];
        let mut within = find_inputs(&inside, "**/*.txt").unwrap();
        within.leave_out(&path.join("in"), &inside);
        assert_eq!(within.inputs.len(), 1, "an input that is named");
        let (all, duplicates) = found(path, &["in"], "**/*.txt");
        assert_eq!(all, ["in/b/x.txt", "in/c/y.txt", "in/linked/o.txt"]);
        assert_eq!(duplicates, 1, "z.txt");
        assert_eq!(found(path, &["in"], "b/*").0, ["in/b/x.txt"], "although in/a comes before");
        let skipped = find_inputs(&[path.join("in")], "**/*.txt").unwrap().skipped;
        let names: Vec<_> = skipped.iter().map(|one| one.path.file_name().unwrap()).collect();
        assert_eq!(names, ["dangling.txt", "loop.txt"], "and not dangling.md");
    }

    #[test]
    fn a_folder_without_documents_is_told_with_what_is_there_and_the_glob_to_type() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        let none = |glob| find_inputs(&[path.to_owned()], glob).unwrap_err().to_string();
        assert!(none(crate::prepare::DEFAULT_GLOB).ends_with(", found no file"));
        write(path, &["a.md", "b/c.md", "b/d.rst", "b/e.md", "README", "f.t{x", "g.md.xz"]);
        let said = none(crate::prepare::DEFAULT_GLOB);
        let expected = "found 3 of .md, 1 of .rst, 1 of .t{x, 1 of .xz, 1 without a suffix: \
                        --glob '**/*.{md,rst}' takes them";
        assert!(said.ends_with(expected), "{said}");
        assert_eq!(found(path, &[""], "**/*.{md,rst}").0.len(), 4);
        write(path, &["g.json"]);
        assert!(none("*.txt").contains("1 of .json"), "{}", none("*.txt"));
    }

    #[test]
    fn wrong_inputs_are_errors_that_name_them() {
        let folder = tempfile::tempdir().unwrap();
        let missing = folder.path().join("missing");
        let error = find_inputs(std::slice::from_ref(&missing), "**/*.txt").unwrap_err();
        assert!(error.to_string().contains(missing.to_str().unwrap()), "{error}");
        let inputs = [folder.path().to_owned()];
        let error = find_inputs(&inputs, "a[").unwrap_err();
        assert!(error.to_string().contains("\"a[\""), "{error}");
        let error = find_inputs(&inputs, "*.md").unwrap_err();
        assert!(matches!(&error, PrepareError::NoDocuments { .. }), "{error}");
        assert!(error.to_string().contains("*.md"), "{error}");
    }
}
