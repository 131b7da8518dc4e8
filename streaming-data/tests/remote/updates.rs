//! Updates of a data set in a store that fails as networks do: the bytes of a preparation from nothing, or one clear line and
//! the version before.
//!
//! Seen red: an index that is replaced without its condition, or before that of its version; answers that are lost and taken for
//! another's update or for a failure; an index, and names in it, that are believed as they arrive.

use std::{
    collections::BTreeMap,
    fs,
    num::{NonZeroU32, NonZeroUsize},
    ops::ControlFlow,
    process::{Command, Stdio},
    sync::{Arc, atomic::Ordering},
    thread,
    time::{Duration, SystemTime},
};

use futures_util::TryStreamExt;
use object_store::{ObjectStore, ObjectStoreExt, path::Path};
use tempfile::TempDir;
use tidemill_streaming_data::{
    data_set::index::{INDEX_FILE, Index, version_file},
    prepare::{
        ByteTokenizer, Dedup, DedupSettings, Layout, Phase, PrepareError, PrepareSettings,
        UpdateReport, UpdateSettings, prepare, prepare_to_store, prune_in_store, update,
        update_in_store,
    },
    store::{Location, RemoteFolder, StoreSettings},
};

use crate::{
    assert_line,
    faulty::{Fault, Faulty, now},
    s3_server::S3Server,
    store_settings, wait_until,
};

const STEPS: usize = 3;

type Objects = BTreeMap<String, Vec<u8>>;

/// A folder of texts that come, go and change with each step.
struct Inputs(TempDir);

impl Inputs {
    fn new() -> Inputs {
        let inputs = Inputs(tempfile::tempdir().unwrap());
        for at in 0..16 {
            inputs.write(at, at);
        }
        inputs
    }

    fn write(&self, at: usize, text: usize) {
        let word = |place: usize| {
            let number = text * 500 + place * (place + 3) % 97;
            let letter = |power: u32| char::from(b'a' + (number / 26_usize.pow(power) % 26) as u8);
            (0..4).map(letter).collect::<String>() + " "
        };
        let path = self.0.path().join(format!("{at:02}.txt"));
        fs::write(&path, (0..60).map(word).collect::<String>()).unwrap();
        // Long ago, and another time for each text: it tells whether the file changed.
        let time = SystemTime::UNIX_EPOCH + Duration::from_secs(1_600_000_000 + text as u64);
        fs::File::options().append(true).open(path).unwrap().set_modified(time).unwrap();
    }

    fn step(&self, step: usize) {
        fs::remove_file(self.0.path().join(format!("{:02}.txt", 2 * step))).unwrap();
        self.write(2 * step + 7, 40 + step);
        self.write(20 + step, 20 + step);
        // A document with a copy in one step has none in the next.
        self.write(30, 2 * step + 1);
    }

    fn settings(&self, output: &str) -> PrepareSettings {
        let number = |number| NonZeroUsize::new(number).unwrap();
        PrepareSettings {
            dedup: DedupSettings { dedup: Dedup::Near, ..DedupSettings::default() },
            shard_samples: NonZeroUsize::new(40),
            layout: Layout::Updatable,
            store: store_settings(),
            ..PrepareSettings::new(vec![self.0.path().to_owned()], output.into(), number(16))
        }
    }

    /// A store with a data set of them, from which nothing fails.
    fn prepared(&self) -> Faulty {
        let store = Faulty::of_folder(tempfile::tempdir().unwrap().path(), 0, &[], 0);
        let go_on = &mut |_| ControlFlow::Continue(());
        let folder = folder(Arc::clone(&store.inner) as _, &store_settings());
        prepare_to_store(&folder, &self.settings("nowhere"), &ByteTokenizer, go_on).unwrap();
        store
    }

    /// The objects of a data set that is prepared now; not how the inputs look, which tells nothing of the data.
    fn expected(&self) -> Objects {
        let mut expected = objects(&self.prepared());
        expected.remove("state/seen").unwrap();
        expected
    }
}

fn folder(store: Arc<dyn ObjectStore>, settings: &StoreSettings) -> RemoteFolder {
    let location = Location::parse("memory://store/set").unwrap();
    RemoteFolder::of_store(store, Path::from("set"), location, settings)
}

/// All objects of the data set as they are, by their names in it.
fn objects(store: &Faulty) -> Objects {
    let prefix = Path::from("set");
    let listed: Vec<_> = now(store.inner.list(Some(&prefix)).try_collect()).unwrap();
    let read = |path: Path| {
        let found = now(store.inner.get(&path)).unwrap();
        let below = path.as_ref().strip_prefix("set/").unwrap().to_owned();
        (below, now(found.bytes()).unwrap().to_vec())
    };
    listed.into_iter().map(|object| read(object.location)).collect()
}

fn put(store: &Faulty, name: &str, content: Vec<u8>) {
    now(store.inner.put(&Path::from(format!("set/{name}")), content.into())).unwrap();
}

fn update_of(store: &Arc<Faulty>, settings: &StoreSettings) -> Result<UpdateReport, PrepareError> {
    let update = UpdateSettings::new("nowhere".into());
    let go_on = &mut |_| ControlFlow::Continue(());
    update_in_store(&folder(Arc::clone(store) as _, settings), &update, &ByteTokenizer, go_on)
}

#[track_caller]
fn assert_holds(found: &Objects, expected: &Objects, what: &str) {
    for (name, content) in expected {
        assert!(found.get(name) == Some(content), "{what}: {name}");
    }
}

/// The objects that never change once they are there.
fn lasting(objects: &Objects) -> Objects {
    let is_lasting = |name: &str| name != INDEX_FILE && name != "state/seen";
    let lasting = objects.iter().filter(|(name, _)| is_lasting(name));
    lasting.map(|(name, content)| (name.clone(), content.clone())).collect()
}

/// Gives up soon.
fn impatient() -> StoreSettings {
    StoreSettings {
        attempts: NonZeroU32::new(4).unwrap(),
        progress_deadline: Duration::from_millis(200),
        ..store_settings()
    }
}

#[test]
fn an_update_in_a_faulty_store_is_whole_or_leaves_the_version_before() {
    use Fault::{Break, Busy, Flip, Lost, Refused, Stall, Truncate};
    const FAULTS: [&[Fault]; 4] = [
        &[Busy, Break, Truncate, Flip],
        &[Busy, Break, Lost, Lost],
        &[Break, Lost, Truncate, Lost, Refused],
        &[Flip, Flip, Break, Stall],
    ];
    let inputs = Inputs::new();
    let first = objects(&inputs.prepared());
    let stores: Vec<_> = (0..48)
        .map(|seed| {
            let (faults, percent) = (FAULTS[seed % 4], [4, 10, 25, 45][seed / 4 % 4]);
            let nothing = tempfile::tempdir().unwrap();
            let store = Faulty::of_folder(nothing.path(), seed as u64, faults, percent);
            let store = store.in_a_row([2, 5, 9][seed / 16]);
            first.iter().for_each(|(name, content)| put(&store, name, content.clone()));
            Arc::new(store)
        })
        .collect();
    let (mut done, mut failed) = (0, 0);
    for step in 0..STEPS {
        inputs.step(step);
        let expected = inputs.expected();
        for (seed, store) in stores.iter().enumerate() {
            let what = format!("seed {seed}, step {step}");
            let before = objects(store);
            let updated = update_of(store, &impatient());
            let after = objects(store);
            assert_holds(&after, &lasting(&before), &what);
            let index = &after[INDEX_FILE];
            match updated {
                Ok(_) => {
                    assert_holds(&after, &expected, &what);
                    done += 1;
                }
                Err(error) => {
                    assert_line(&error, &["memory://store/set"]);
                    let is_overtaken = matches!(error, PrepareError::UpdateOvertaken { .. });
                    assert!(!is_overtaken, "{what}: {error}");
                    // Where the store did not even say what it has, the new one may be there: then it is whole.
                    match *index == before[INDEX_FILE] {
                        true => failed += 1,
                        false => assert_holds(&after, &expected, &what),
                    }
                }
            }
        }
    }
    assert!(done > 40 && failed > 40, "{done} done, {failed} failed");
    let expected = inputs.expected();
    for (seed, store) in stores.iter().enumerate() {
        store.is_calm.store(true, Ordering::SeqCst);
        update_of(store, &store_settings()).unwrap();
        assert_holds(&objects(store), &expected, &format!("seed {seed} at last"));
    }
}

/// Whether an answer comes or not, an index that is there was put there by this update.
#[test]
fn a_lost_answer_to_the_last_write_is_not_anothers_update() {
    let inputs = Inputs::new();
    let first = objects(&inputs.prepared());
    inputs.step(0);
    let expected = inputs.expected();
    let begin = |fails: &dyn Fn(Faulty) -> Faulty| {
        let nothing = tempfile::tempdir().unwrap();
        let store = Faulty::of_folder(nothing.path(), 0, &[Fault::Lost], 100).only(INDEX_FILE);
        let store = fails(store);
        first.iter().for_each(|(name, content)| put(&store, name, content.clone()));
        Arc::new(store)
    };
    let (lost, broken) = (Some(Fault::Lost), Fault::Break);
    let cases: [(&str, &dyn Fn(Faulty) -> Faulty); 5] = [
        ("each answer is lost", &|store| store.only_puts()),
        ("one is lost, and no other write succeeds", &|store| {
            store.only_puts().first_and_then(lost, broken)
        }),
        ("one is lost, and what is there arrives with another byte first", &|store| {
            store.first_and_then(lost, Fault::Flip).in_a_row(1)
        }),
        ("one is lost, and then access is refused", &|store| {
            store.only_puts().first_and_then(lost, Fault::Refused)
        }),
        ("whether the store compares is not to be learned", &|store| {
            store.only_puts().first_and_then(None, broken)
        }),
    ];
    for (what, fails) in cases {
        let store = begin(fails);
        let report =
            update_of(&store, &impatient()).unwrap_or_else(|error| panic!("{what}: {error}"));
        let after = objects(&store);
        assert_holds(&after, &expected, what);
        let newest = Index::from_bytes(&after[INDEX_FILE], INDEX_FILE.as_ref()).unwrap();
        assert_eq!(report.prepared.fingerprint, newest.fingerprint(), "{what}");
    }

    // Nothing is said any more: an error, and a version that is whole.
    let store = begin(&|store| store.first_and_then(lost, broken));
    let error = update_of(&store, &impatient()).unwrap_err();
    assert_line(&error, &["cannot", "memory://store/set/index.json", "the connection broke"]);
    assert_holds(&objects(&store), &expected, "nothing is said");
    store.is_calm.store(true, Ordering::SeqCst);
    let report = update_of(&store, &store_settings()).unwrap();
    assert_eq!(report.former, report.prepared.fingerprint);

    // Nothing was written: the version before, and no other's update.
    let store = begin(&|store| store.only_puts().first_and_then(Some(broken), Fault::Refused));
    let error = update_of(&store, &impatient()).unwrap_err();
    assert_line(&error, &["cannot write memory://store/set/index.json", "403 Forbidden"]);
    let after = objects(&store);
    assert!(after[INDEX_FILE] == first[INDEX_FILE]);
    assert_holds(&after, &lasting(&first), "nothing was written");
}

/// Names of files are hashes of their content, and everything that no hash covers is compared: an index with a changed byte is
/// neither built on nor used to prune.
#[test]
fn a_byte_of_an_index_that_is_another_is_noticed() {
    let inputs = Inputs::new();
    let store = Arc::new(inputs.prepared());
    inputs.step(0);
    update_of(&store, &store_settings()).unwrap();
    let whole = objects(&store);
    let index = Index::from_bytes(&whole[INDEX_FILE], INDEX_FILE.as_ref()).unwrap();
    let version = version_file(&index);
    let text = String::from_utf8(whole[INDEX_FILE].clone()).unwrap();
    let with = |from: &str, to: &str| {
        assert!(text.contains(from), "{from} is in {text}");
        text.replacen(from, to, 1).into_bytes()
    };
    let shard = &index.shards[0].file;
    let other_shard = shard.replacen("shard-", "shard-0", 1);
    let footer = index.shards[0].footer.unwrap().hash.to_string();
    let last = if footer.ends_with('0') { "1" } else { "0" };
    let other_footer = footer[..footer.len() - 1].to_owned() + last;
    let samples = format!("\"samples\": {}", index.shards[0].samples);
    let changes = [
        with("\"row_group_samples\": ", "\"row_group_samples\": 1"),
        with(&samples, &format!("{samples}0")),
        with(shard, &other_shard),
        with(&footer, &other_footer),
    ];
    let newest = lasting(&inputs.expected());
    for (at, change) in changes.iter().enumerate() {
        for name in [INDEX_FILE, &version] {
            let what = format!("change {at} of {name}");
            put(&store, name, change.clone());
            let before = objects(&store);
            let error = update_of(&store, &store_settings()).expect_err(&what);
            assert_line(&error, &["memory://store/set/", "expected"]);
            assert!(objects(&store) == before, "{what}");
            let undisturbed = folder(Arc::clone(&store.inner) as _, &store_settings());
            let pruned = prune_in_store(&undisturbed, NonZeroUsize::MIN);
            let after = objects(&store);
            // A file that does not list the files of a version, or lies beside the version's own index, decides about no file.
            let is_noticed = at == 1 || at == 2 && name == version;
            match pruned {
                Ok(_) => {
                    assert!(!is_noticed, "{what}");
                    put(&store, name, whole[name].clone());
                    assert_holds(&objects(&store), &newest, &what);
                }
                Err(error) => {
                    assert!(is_noticed, "{what}: {error}");
                    assert_line(&error, &["memory://store/set/", "is damaged", "expected"]);
                    assert!(after == before, "{what}");
                }
            }
            whole.iter().for_each(|(name, content)| put(&store, name, content.clone()));
        }
    }
    update_of(&store, &store_settings()).unwrap();
}

const MARK: &str = "TIDEMILL_TEST_MARK";
const PHASE: &str = "TIDEMILL_TEST_PHASE";

/// The program of the next test's processes: they update up to some moment, signal it by a file, and wait.
#[test]
#[ignore = "another test starts it, with an environment of its own"]
fn child() {
    let variable = |name| std::env::var(name).unwrap();
    let phase = variable(PHASE);
    let settings = UpdateSettings::new("s3://bucket/set".into());
    let _ = update(&settings, &ByteTokenizer, &mut |now| {
        let is_there = match phase.as_str() {
            "comparing" => now.phase == Phase::Comparing,
            "sorting" => now.phase == Phase::Sorting,
            "tokenizing" => now.phase == Phase::Tokenizing,
            _ => now.samples > 100,
        };
        if !is_there {
            return ControlFlow::Continue(());
        }
        fs::write(variable(MARK), &phase).unwrap();
        loop {
            thread::park();
        }
    });
}

/// A kill leaves the newest version as it was and nothing on this machine, whatever of the version in the making is in the
/// store; the next update ends with the bytes of an undisturbed one.
#[test]
fn kills_in_the_middle_of_updates_leave_the_newest_version() {
    let inputs = Inputs::new();
    let root = tempfile::tempdir().unwrap();
    fs::create_dir(root.path().join("bucket")).unwrap();
    let server = S3Server::start(root.path());
    let options = server.options();
    let store = StoreSettings { options, ..store_settings() };
    let go_on = &mut |_| ControlFlow::Continue(());
    let set = PrepareSettings { store: store.clone(), ..inputs.settings("s3://bucket/set") };
    prepare(&set, &ByteTokenizer, go_on).unwrap();
    let place = RemoteFolder::open(Location::parse("s3://bucket/set").unwrap(), &store).unwrap();
    let index = || place.get(INDEX_FILE).unwrap();
    let (temporary, marks) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    for (step, phase) in ["comparing", "sorting", "tokenizing", "storing"].into_iter().enumerate() {
        inputs.step(step);
        let (before, mark) = (index(), marks.path().join(phase));
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "updates::child", "--ignored", "--nocapture"])
            .envs(server.options())
            .env(MARK, &mark)
            .env(PHASE, phase)
            .env("TMPDIR", temporary.path())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        wait_until(|| mark.exists());
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(fs::read_dir(temporary.path()).unwrap().count(), 0, "{phase}");
        assert_eq!(index(), before, "{phase}");
    }
    let settings = UpdateSettings { store, ..UpdateSettings::new("s3://bucket/set".into()) };
    update(&settings, &ByteTokenizer, go_on).unwrap();
    for (name, content) in inputs.expected() {
        assert!(place.get(&name).unwrap() == content, "{name}");
    }
}
