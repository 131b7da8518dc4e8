//! Reports on data sets that are kept up to date: what a preparation from nothing would say, and what changed.
//!
//! Seen red: with examples that are read again although the version before shows them; with documents of that version that are compared
//! in no order; with reports that `prune` leaves of no version, or removes of versions that it keeps.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    num::NonZeroUsize,
    ops::ControlFlow,
    path::Path,
    sync::Arc,
};

use object_store::{ObjectStore, memory::InMemory, path::Path as StorePath};
use tidemill_streaming_data::{
    DataSet,
    data_set::index::version_file_of,
    prepare::{
        ByteTokenizer, DataReport, Dedup, DedupSettings, PrepareSettings, Reporting,
        UpdateSettings,
        data_report::{Changed, REPORT_FILE, REPORT_PAGE, Verdict},
        prepare_to_store, prune, update_in_store,
    },
    store::{Location, RemoteFolder, StoreSettings},
};

use crate::support::{Bench, Files, files, prepared, word};

/// The documents of each input with their places, as they stand in files now.
pub type Documents = BTreeMap<String, Vec<(u64, String)>>;

/// Reads all inputs, in the simplest way there is.
pub fn documents_of(folder: &Path) -> Documents {
    let of_line = |(place, line): (u64, &str)| {
        let value: serde_json::Value = serde_json::from_str(line).ok()?;
        Some((place, value["text"].as_str()?.to_owned()))
    };
    let documents = files(folder).into_iter().map(|(name, content)| {
        let content = String::from_utf8(content).unwrap();
        let mut documents: Vec<(u64, String)> = match name.ends_with(".jsonl") {
            true => (1..).zip(content.lines()).filter_map(of_line).collect(),
            false => vec![(0, content)],
        };
        documents.retain(|(_, text)| !text.is_empty());
        (name, documents)
    });
    documents.collect()
}

/// The changes between two states of the inputs.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Changes {
    inputs: Changed,
    documents: Changed,
}

impl Changes {
    pub fn between(before: &Documents, after: &Documents) -> Changes {
        let mut changes = Changes::default();
        let names: BTreeSet<&String> = before.keys().chain(after.keys()).collect();
        for name in names {
            let (old, new) = (before.get(name), after.get(name));
            let inputs = &mut changes.inputs;
            match (old, new) {
                (Some(old), Some(new)) if old == new => inputs.unchanged += 1,
                (Some(_), Some(_)) => inputs.changed += 1,
                (Some(_), None) => inputs.removed += 1,
                (None, _) => inputs.added += 1,
            }
            let texts = |documents: Option<&Vec<(u64, String)>>| -> Vec<String> {
                documents.into_iter().flatten().map(|(_, text)| text.clone()).collect()
            };
            let (mut gone, mut come) = (texts(old), Vec::new());
            for text in texts(new) {
                match gone.iter().position(|old| *old == text) {
                    Some(at) => {
                        gone.remove(at);
                        changes.documents.unchanged += 1;
                    }
                    None => come.push(text),
                }
            }
            let replaced = gone.len().min(come.len());
            changes.documents.changed += replaced as u64;
            changes.documents.removed += (gone.len() - replaced) as u64;
            changes.documents.added += (come.len() - replaced) as u64;
        }
        changes
    }
}

/// All files but those of reports.
pub fn without_reports(files: Files) -> Files {
    files.into_iter().filter(|(name, _)| !name.contains("report.")).collect()
}

/// The files of reports.
pub fn reports(files: &Files) -> Files {
    let files = files.iter().filter(|(name, _)| name.contains("report."));
    files.map(|(name, content)| (name.clone(), content.clone())).collect()
}

/// The page without what an update changed.
fn without_changes(page: &[u8]) -> String {
    let page = String::from_utf8(page.to_vec()).unwrap();
    match page.split_once("<section aria-labelledby=\"changes\">") {
        Some((before, rest)) => before.to_owned() + rest.split_once("</section>\n").unwrap().1,
        None => page,
    }
}

/// The report on an updated data set is that of one that was prepared from nothing, but for what changed, which is this.
#[track_caller]
pub fn assert_same_report(updated: &Files, from_nothing: &Files, changes: &Changes) {
    let report = |files: &Files| DataReport::from_bytes(&files[REPORT_FILE]).unwrap();
    let (found, expected) = (report(updated), report(from_nothing));
    let update = found.update.clone().expect("it was updated");
    assert_eq!(DataReport { update: None, ..found }, expected);
    assert_eq!(without_changes(&updated[REPORT_PAGE]), without_changes(&from_nothing[REPORT_PAGE]));
    assert_eq!(Changes { inputs: update.inputs, documents: update.documents }, *changes);
    let of_version = |files: &Files, suffix: &str| {
        let name = version_file_of(expected.fingerprint).replace(".json", suffix);
        files[&name].clone()
    };
    for files in [updated, from_nothing] {
        assert!(of_version(files, ".report.json") == files[REPORT_FILE]);
        assert!(of_version(files, ".report.html") == files[REPORT_PAGE]);
    }
    assert_eq!(update.shards.kept + update.shards.written, expected.data.shards);
    for files in [updated, from_nothing] {
        let page = String::from_utf8_lossy(&files[REPORT_PAGE]);
        assert!(!page.contains("http:") && !page.contains("https:"), "no network");
    }
}

fn text(at: usize) -> String {
    (0..40).map(|word_at| word(at * 100 + word_at)).collect::<Vec<_>>().join(" ")
}

fn settings(bench: &Bench, output: &str) -> PrepareSettings {
    PrepareSettings {
        dedup: DedupSettings { dedup: Dedup::Exact, ..DedupSettings::default() },
        reporting: Reporting::Files,
        ..bench.settings(output)
    }
}

fn report_of(bench: &Bench) -> Option<DataReport> {
    let location = Location::of_path(&bench.path("out")).unwrap();
    DataReport::read(&location, &StoreSettings::default()).unwrap()
}

#[test]
fn verdicts_that_change_are_told() {
    let mut bench = Bench::new();
    for at in 0..30 {
        bench.write(&format!("in/b{at:02}.txt"), text(at));
    }
    bench.write("in/c.txt", text(3));
    prepared(&settings(&bench, "out"));
    let report = report_of(&bench).unwrap();
    assert_eq!((report.documents.read, report.documents.kept, report.update), (31, 30, None));
    let copies = report.verdicts.iter().find(|of| of.verdict == Verdict::Copy).unwrap();
    assert_eq!((copies.documents, &copies.examples[0].excerpt.text), (1, &text(3)));

    bench.remove("in/b03.txt");
    bench.write("in/a.txt", text(7));
    bench.update("out").unwrap();
    let update = report_of(&bench).unwrap().update.unwrap();
    let told: Vec<String> = update
        .verdicts
        .iter()
        .map(|it| format!("{} {} to {}", it.documents, it.from, it.to))
        .collect();
    assert_eq!(told, ["1 kept to copy", "1 copy to kept"]);
    let changed = Changed { added: 1, removed: 1, changed: 0, unchanged: 30 };
    assert_eq!((update.inputs, update.documents), (changed, changed));
    assert!(update.shards.kept > 0 && update.shards.written > 0);
    assert_eq!(update.former, report.fingerprint);
    // An update without changes leaves the version and the report of its making.
    bench.touch("in/c.txt");
    bench.update("out").unwrap();
    assert_eq!(report_of(&bench).unwrap().update, Some(update));
}

/// An update reads no input for its report but where a document comes to be an example.
#[test]
fn examples_that_were_shown_before_are_not_read_again() {
    let mut bench = Bench::new();
    for at in 0..9 {
        bench.write(&format!("in/b{at}.txt"), text(at));
    }
    prepared(&settings(&bench, "out"));
    // The input has its size and time of before, so the update does not read it.
    let (path, long_ago) =
        (bench.path("in/b1.txt"), fs::metadata(bench.path("in/b1.txt")).unwrap());
    fs::write(&path, "x".repeat(text(1).len())).unwrap();
    fs::File::options()
        .append(true)
        .open(&path)
        .unwrap()
        .set_modified(long_ago.modified().unwrap())
        .unwrap();
    bench.write("in/c.txt", text(70));
    bench.update("out").unwrap();
    let report = report_of(&bench).unwrap();
    let kept = &report.verdicts[0];
    assert_eq!((kept.examples[1].excerpt.text.clone(), kept.documents), (text(1), 10));
}

#[test]
fn reports_stay_with_their_versions() {
    let mut bench = Bench::new();
    for at in 0..30 {
        bench.write(&format!("in/b{at:02}.txt"), text(at));
    }
    prepared(&settings(&bench, "out"));
    let mut reports = vec![report_of(&bench).unwrap()];
    for at in 30..33 {
        bench.write(&format!("in/c{at}.txt"), text(at));
        bench.update("out").unwrap();
        reports.push(report_of(&bench).unwrap());
    }
    let listed = || -> Vec<String> {
        let names = files(&bench.path("out")).into_keys();
        names.filter(|name| name.contains("report.")).collect()
    };
    let names_of = |reports: &[DataReport]| -> Vec<String> {
        let mut names: Vec<String> = reports
            .iter()
            .flat_map(|report| {
                let version = version_file_of(report.fingerprint);
                ["html", "json"].map(|end| version.replace("json", &format!("report.{end}")))
            })
            .chain([REPORT_PAGE.to_owned(), REPORT_FILE.to_owned()])
            .collect();
        names.sort();
        names
    };
    assert_eq!(listed(), names_of(&reports));
    // The files of an update that did not end belong to no version.
    let orphan = bench.path("out").join("index/0123456789abcdef0123456789abcdef.report.html");
    fs::write(&orphan, "left").unwrap();
    let pruned = prune(&bench.path("out"), NonZeroUsize::new(2).unwrap()).unwrap();
    assert_eq!(pruned.removed.len(), 2);
    assert_eq!(listed(), names_of(&reports[2..]));
    assert_eq!(report_of(&bench).as_ref(), reports.last());

    // One that is damaged or of another version is none, and is no obstacle.
    let newest = version_file_of(reports[3].fingerprint).replace("json", "report.json");
    let content = fs::read(bench.path("out").join(REPORT_FILE)).unwrap();
    fs::write(bench.path("out").join(&newest), &content[..content.len() / 2]).unwrap();
    assert_eq!(report_of(&bench).as_ref(), reports.last(), "the copy is there still");
    fs::write(bench.path("out").join(REPORT_FILE), reports[2].to_bytes()).unwrap();
    assert_eq!(report_of(&bench), None);
    DataSet::open(bench.path("out")).unwrap();
    bench.write("in/d.txt", text(50));
    bench.update("out").unwrap();
    let report = report_of(&bench).unwrap();
    assert_eq!(report.documents.read, 34);
    prepared(&settings(&bench, "new"));
    let (out, new) = (files(&bench.path("out")), files(&bench.path("new")));
    let added = |unchanged| Changed { added: 1, unchanged, ..Changed::default() };
    let changes = Changes { inputs: added(33), documents: added(33) };
    assert_same_report(&out, &new, &changes);
}

#[test]
fn a_data_set_without_a_report_has_none_and_stays_without() {
    let mut bench = Bench::new();
    for at in 0..30 {
        bench.write(&format!("in/b{at:02}.txt"), text(at));
    }
    prepared(&PrepareSettings { reporting: Reporting::None, ..settings(&bench, "out") });
    assert_eq!(report_of(&bench), None);
    bench.write("in/c.txt", text(40));
    bench.update("out").unwrap();
    assert_eq!(report_of(&bench), None);
    assert!(files(&bench.path("out")).keys().all(|name| !name.contains("report")));
}

#[test]
fn a_store_has_the_reports_of_a_folder() {
    let mut bench = Bench::new();
    for at in 0..30 {
        bench.write(&format!("in/b{at:02}.txt"), text(at));
    }
    let store: Arc<dyn ObjectStore> = Arc::<InMemory>::default();
    let location = Location::parse("memory://bucket/set").unwrap();
    let place = (StorePath::from("set"), StoreSettings::default());
    let folder = RemoteFolder::of_store(store, place.0, location, &place.1);
    let go_on = &mut |_| ControlFlow::Continue(());
    prepare_to_store(&folder, &settings(&bench, "unused"), &ByteTokenizer, go_on).unwrap();
    prepared(&settings(&bench, "out"));
    bench.write("in/a.txt", text(3));
    bench.update("out").unwrap();
    let update = UpdateSettings::new("unused".into());
    let updated = update_in_store(&folder, &update, &ByteTokenizer, go_on).unwrap();
    let files = files(&bench.path("out"));
    let version = version_file_of(updated.prepared.fingerprint);
    for name in [
        REPORT_FILE.to_owned(),
        REPORT_PAGE.to_owned(),
        version.replace("json", "report.json"),
        version.replace("json", "report.html"),
    ] {
        let found = folder.get(&name).unwrap();
        assert!(found[..] == files[&name][..], "{name} is another");
    }
}
