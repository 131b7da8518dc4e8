//! The files after an update that is killed or fails, at each change that it makes.

use std::{
    cell::RefCell,
    collections::BTreeMap,
    fs, io,
    num::NonZeroUsize,
    ops::ControlFlow,
    path::{Path, PathBuf},
    rc::Rc,
    time::{Duration, SystemTime},
};

use super::*;
use crate::{
    DataSet,
    prepare::{
        ByteTokenizer, Dedup, DedupSettings, Layout, output::updated_folder::steps::at_each_step,
        prepare,
    },
};

type Files = BTreeMap<PathBuf, Vec<u8>>;

/// Every file of a folder and those in it, by its path below.
fn files(folder: &Path) -> Files {
    let (mut files, mut folders) = (Files::new(), vec![folder.to_owned()]);
    while let Some(inner) = folders.pop() {
        for entry in fs::read_dir(&inner).unwrap() {
            let path = entry.unwrap().path();
            match path.is_dir() {
                true => folders.push(path),
                false => {
                    let name = path.strip_prefix(folder).unwrap().to_owned();
                    files.insert(name, fs::read(&path).unwrap());
                }
            }
        }
    }
    files
}

fn write(folder: &Path, files: &Files) {
    for (name, content) in files {
        let path = folder.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }
}

/// Inputs of two moments: in the second some are gone, changed and new.
fn write_inputs(folder: &Path, moment: usize) {
    fs::create_dir_all(folder).unwrap();
    for at in 0..40_usize {
        let path = folder.join(format!("{at:02}.txt"));
        match (moment, at % 9) {
            (1, 4) => fs::remove_file(path).unwrap(),
            (1, 7) => write_input(&path, moment, &format!("changed {at} ").repeat(20)),
            (0, _) => write_input(&path, moment, &format!("text {} ", at % 31).repeat(25)),
            _ => {}
        }
    }
}

/// At a time that is long ago and tells the moments apart: how the file looks is noted, before the index is there.
fn write_input(path: &Path, moment: usize, text: &str) {
    fs::write(path, text).unwrap();
    let time = SystemTime::UNIX_EPOCH + Duration::from_secs(1_600_000_000 + moment as u64);
    fs::File::options().append(true).open(path).unwrap().set_modified(time).unwrap();
}

fn settings(inputs: &Path, output: PathBuf) -> PrepareSettings {
    let seq_len = NonZeroUsize::new(16).unwrap();
    PrepareSettings {
        dedup: DedupSettings { dedup: Dedup::Exact, ..DedupSettings::default() },
        shard_samples: NonZeroUsize::new(40),
        layout: Layout::Updatable,
        ..PrepareSettings::new(vec![inputs.to_owned()], output, seq_len)
    }
}

fn prepare_to(inputs: &Path, output: &Path) {
    let go_on = &mut |_: Progress| ControlFlow::Continue(());
    prepare(&settings(inputs, output.to_owned()), &ByteTokenizer, go_on).unwrap();
}

fn update_of(output: &Path) -> Result<UpdateReport, PrepareError> {
    let go_on = &mut |_: Progress| ControlFlow::Continue(());
    update(&UpdateSettings::new(output.to_owned()), &ByteTokenizer, go_on)
}

/// A data set of the first moment, and the files of one that is prepared at the second, which it is now.
fn two_moments(folder: &Path) -> (PathBuf, Files) {
    let (inputs, output) = (folder.join("in"), folder.join("out"));
    write_inputs(&inputs, 0);
    prepare_to(&inputs, &output);
    write_inputs(&inputs, 1);
    prepare_to(&inputs, &folder.join("new"));
    (output, files(&folder.join("new")))
}

fn holds(found: &Files, expected: &Files) -> bool {
    let is_told = |name: &Path| name.ends_with("seen");
    expected.iter().all(|(name, content)| is_told(name) || found.get(name) == Some(content))
}

#[test]
fn a_kill_at_any_step_leaves_a_complete_version_and_the_next_update_ends_it() {
    let folder = tempfile::tempdir().unwrap();
    let (output, expected) = two_moments(folder.path());
    let before = files(&output);
    let left: Rc<RefCell<Vec<Files>>> = Rc::default();
    let (seen, place) = (Rc::clone(&left), output.clone());
    let look = move || {
        seen.borrow_mut().push(files(&place));
        Ok(())
    };
    at_each_step(look, || update_of(&output)).unwrap();
    assert!(holds(&files(&output), &expected));
    let left = left.borrow();
    assert!(left.len() > 10, "{} steps", left.len());
    for (at, left) in left.iter().enumerate() {
        let killed = folder.path().join(format!("killed-{at}"));
        write(&killed, left);
        // The data set opens, and is the same as before.
        let data_set = DataSet::open(&killed).unwrap();
        assert_eq!(fs::read(killed.join("index.json")).unwrap(), before[Path::new("index.json")]);
        for shard in 0..data_set.shards().len() {
            data_set.group_tokens(shard, 0).unwrap();
        }
        update_of(&killed).unwrap();
        let found = files(&killed);
        assert!(holds(&found, &expected), "step {at}");
        assert!(
            holds(
                &found,
                &before
                    .clone()
                    .into_iter()
                    .filter(|(name, _)| { name != Path::new("index.json") })
                    .collect()
            ),
            "step {at}: the version before"
        );
        // Nothing else is left once older versions are removed.
        prune(&killed, NonZeroUsize::MIN).unwrap();
        let names: Vec<_> = files(&killed).into_keys().collect();
        assert_eq!(names, expected.keys().cloned().collect::<Vec<_>>(), "step {at}");
    }
}

#[test]
fn a_full_disk_at_any_step_is_an_error_and_leaves_what_was() {
    let folder = tempfile::tempdir().unwrap();
    let (output, expected) = two_moments(folder.path());
    let before = files(&output);
    for failing in 0.. {
        let mut step = 0;
        let fail = move || {
            step += 1;
            match step > failing {
                true => Err(io::Error::from(io::ErrorKind::StorageFull)),
                false => Ok(()),
            }
        };
        match at_each_step(fail, || update_of(&output)) {
            Ok(_) => {
                assert!(failing > 10);
                break;
            }
            Err(error) => {
                let cause = std::error::Error::source(&error).unwrap().to_string();
                assert!(cause.contains("no storage space"), "{error}: {cause}");
            }
        }
        let found = files(&output);
        assert!(holds(&found, &before), "{failing}");
        let is_hidden = |name: &PathBuf| name.to_string_lossy().contains(".updating-");
        assert!(!found.keys().any(is_hidden), "{failing}");
        assert_eq!(fs::read(output.join("index.json")).unwrap(), before[Path::new("index.json")]);
    }
    assert!(holds(&files(&output), &expected));
}
