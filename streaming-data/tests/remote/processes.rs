//! Processes that share a cache, are killed, or have no room: each is this program again.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use tidemill_streaming_data::{
    DataError, DataSet,
    hash::{ContentHash, ContentHasher},
    order::ShuffleOrder,
};

use crate::{
    ROW_TOKENS, SAMPLES, decoder, files,
    s3_server::S3Server,
    settings,
    support::{Form, indexed_example, outcome::line, write_example, write_index},
    wait_until,
    web_server::serve,
};

const SHARDS: [u64; 8] = [90, 100, 90, 80, 100, 90, 100, 70];
const LONG_ROW: usize = 2049;
const SET: &str = "TIDEMILL_TEST_SET";
const CACHE: &str = "TIDEMILL_TEST_CACHE";
const LIMIT: &str = "TIDEMILL_TEST_LIMIT";
const RESULT: &str = "TIDEMILL_TEST_RESULT";
/// `name=value` of the settings of the store, one a line.
const OPTIONS: &str = "TIDEMILL_TEST_OPTIONS";

/// Hash of an epoch, or the error as a line.
fn epoch(set: &str, cache: &Path, limit: Option<u64>) -> Result<ContentHash, DataError> {
    let mut settings = settings(cache, limit);
    let options = std::env::var(OPTIONS).unwrap_or_default();
    let options = options.lines().filter_map(|line| line.split_once('='));
    settings.store.options = options.map(|(name, value)| (name.into(), value.into())).collect();
    let data_set = DataSet::open_with(set, &settings)?;
    let decoder = decoder(&data_set, ShuffleOrder::Window, None)?;
    let mut hasher = ContentHasher::new();
    for sample in decoder.reader(std::iter::once(0..data_set.samples())) {
        let sample = sample?;
        hasher.update(&sample.position.to_be_bytes());
        sample.tokens.iter().for_each(|token| hasher.update(&token.to_be_bytes()));
    }
    Ok(hasher.finish())
}

/// The program of the other tests' processes.
#[test]
#[ignore = "other tests start it, with an environment of its own"]
fn child() {
    let variable = |name| std::env::var(name).unwrap();
    let limit = std::env::var(LIMIT).ok().map(|limit| limit.parse().unwrap());
    let result = match epoch(&variable(SET), Path::new(&variable(CACHE)), limit) {
        Ok(hash) => hash.to_string(),
        Err(error) => line(&error),
    };
    fs::write(variable(RESULT), result).unwrap();
}

/// A server with a data set of shards that take a while, and a cache.
struct Stage {
    set: tempfile::TempDir,
    root: tempfile::TempDir,
    cache: tempfile::TempDir,
    server: S3Server,
}

impl Stage {
    fn new() -> Stage {
        let set = tempfile::tempdir().unwrap();
        let root = tempfile::tempdir().unwrap();
        let form = Form { group_rows: 20, page_rows: 20, ..Form::plain() };
        write_example(set.path(), &SHARDS, LONG_ROW, &form);
        write_index(set.path(), LONG_ROW - 1, crate::support::EXAMPLE_VOCABULARY, &SHARDS, &form);
        let bucket = root.path().join("bucket");
        fs::create_dir(&bucket).unwrap();
        for (name, _) in files(set.path()) {
            fs::copy(set.path().join(&name), bucket.join(&name)).unwrap();
        }
        let server = S3Server::start(root.path());
        Stage { set, root, cache: tempfile::tempdir().unwrap(), server }
    }

    /// The answer that every process must give.
    fn expected(&self) -> String {
        let set = self.set.path().to_str().unwrap();
        epoch(set, self.cache.path(), None).unwrap().to_string()
    }

    fn result(&self, number: usize) -> PathBuf {
        self.root.path().join(format!("result-{number}"))
    }

    /// Starts a process; the shell may do something before.
    fn start(&self, number: usize, limit: Option<u64>, before: &str) -> Child {
        let mut command = Command::new("sh");
        command.args(["-c", &format!("{before} exec \"$@\""), "sh"]);
        command.arg(std::env::current_exe().unwrap());
        command.args(["--exact", "processes::child", "--ignored", "--nocapture"]);
        command.envs(self.server.options());
        command.env(SET, "s3://bucket").env(CACHE, self.cache.path());
        command.env(RESULT, self.result(number));
        if let Some(limit) = limit {
            command.env(LIMIT, limit.to_string());
        }
        command.stdout(Stdio::null()).stderr(Stdio::null());
        command.spawn().unwrap()
    }

    /// The output of a process, which must end by itself.
    fn finish(&self, number: usize, mut child: Child) -> String {
        assert!(child.wait().unwrap().success());
        fs::read_to_string(self.result(number)).unwrap()
    }

    fn count(&self, suffix: &str) -> usize {
        files(self.cache.path()).iter().filter(|(name, _)| name.ends_with(suffix)).count()
    }
}

/// The environment alone says where the store is; processes that want the same shards at the same
/// time download each of them once.
#[test]
fn processes_share_a_cache_and_download_once() {
    let stage = Stage::new();
    let children: Vec<Child> = (0..3).map(|number| stage.start(number, None, "")).collect();
    let expected = stage.expected();
    for (number, child) in children.into_iter().enumerate() {
        assert_eq!(stage.finish(number, child), expected);
    }
    for shard in 0..SHARDS.len() {
        let request = format!("GET /bucket/shard-{shard:05}.parquet");
        assert_eq!(stage.server.count(&request), 1, "{request}");
    }
    assert_eq!((stage.count(".shard"), stage.count("")), (SHARDS.len(), SHARDS.len()));
}

/// With a limit that holds half of the shards, processes at the same place of the stream do not
/// keep each other from what they need.
#[test]
fn processes_share_a_limit() {
    let stage = Stage::new();
    let largest = files(stage.set.path()).iter().map(|(_, bytes)| *bytes).max().unwrap();
    let limit = 5 * largest;
    let children: Vec<Child> = (0..2).map(|number| stage.start(number, Some(limit), "")).collect();
    let expected = stage.expected();
    for (number, child) in children.into_iter().enumerate() {
        assert_eq!(stage.finish(number, child), expected);
    }
    let held: u64 = files(stage.cache.path()).iter().map(|(_, bytes)| bytes).sum();
    assert!(held <= limit, "{held} of {limit}");
}

/// Killed in the middle of downloads again and again, and nothing has to be cleaned: the next
/// process goes on with what was there, and ends with the samples of an undisturbed one.
#[test]
fn kills_in_the_middle_of_downloads_leave_nothing_behind() {
    let stage = Stage::new();
    let mut left_behind = 0;
    for kill in 0..8 {
        let mut child = stage.start(kill, None, "");
        // Later and later: after this many shards, while another is being downloaded.
        wait_until(|| {
            let is_over = stage.result(kill).exists();
            is_over
                || stage.count(".shard") >= kill.min(SHARDS.len() - 1) && stage.count(".part") > 0
        });
        child.kill().unwrap();
        child.wait().unwrap();
        left_behind += stage.count(".part");
    }
    assert!(left_behind > 0, "no kill came in the middle of a download");
    let child = stage.start(99, None, "");
    assert_eq!(stage.finish(99, child), stage.expected());
    assert_eq!((stage.count(".shard"), stage.count("")), (SHARDS.len(), SHARDS.len()));
}

/// A disk that is smaller than the limit: what is needed last is dropped, and the samples are the same. Where
/// nothing may be dropped, or what must be there does not fit, it is one clear line.
#[test]
#[ignore = "mounts a tmpfs, which not every machine allows; .ci/run runs it where it does"]
fn a_disk_that_is_smaller_than_the_limit() {
    let stage = Stage::new();
    let shards: Vec<u64> = files(stage.set.path())
        .into_iter()
        .filter(|(name, _)| name.ends_with(".parquet"))
        .map(|(_, bytes)| bytes)
        .collect();
    let (all, largest) = (shards.iter().sum::<u64>(), *shards.iter().max().unwrap());
    // A disk of its own for a process, which is gone with it.
    let on_disk = |bytes: u64| {
        format!(
            "set -- unshare --map-root-user --mount sh -c \
             'mount -t tmpfs -o size={bytes} none \"$TIDEMILL_TEST_CACHE\" && exec \"$@\"' sh \"$@\";"
        )
    };
    let expected = stage.expected();
    for (number, disk) in [9 * largest / 2, 6 * largest, all - largest].into_iter().enumerate() {
        let child = stage.start(number, Some(all), &on_disk(disk));
        assert_eq!(stage.finish(number, child), expected, "a disk of {disk} bytes");
    }
    for (number, (disk, limit)) in
        [(6 * largest, None), (largest / 2, Some(all)), (largest / 2, None)].into_iter().enumerate()
    {
        let child = stage.start(10 + number, limit, &on_disk(disk));
        let said = stage.finish(10 + number, child);
        let words = ["cannot keep a shard in cache", "No space left on device"];
        let is_line = !said.contains('\n') && words.iter().all(|word| said.contains(word));
        assert!(is_line, "a disk of {disk} bytes, limit {limit:?}: {said}");
    }
}

/// A disk without room for a shard is one clear line, and nothing half-landed stays.
#[test]
fn a_full_disk_is_one_line() {
    let stage = Stage::new();
    // In blocks of 512 bytes: less than any shard.
    let child = stage.start(0, None, "trap '' XFSZ; ulimit -f 100;");
    let said = stage.finish(0, child);
    assert!(!said.contains('\n') && said.contains("cannot make room for"), "{said}");
    assert!(said.contains("File too large") && said.contains("tidemill-h"), "{said}");
    // The process may have ended while a thread was about to remove its part.
    assert_eq!(stage.count(".shard"), 0);
    let child = stage.start(1, None, "");
    assert_eq!(stage.finish(1, child), stage.expected());
    assert_eq!((stage.count(".shard"), stage.count("")), (SHARDS.len(), SHARDS.len()));
}

/// Stores are found by their usual variables, and settings go before the environment; variables without the name of a
/// store are ignored, since they may have been set for another purpose.
#[test]
fn the_environment_says_where_stores_are() {
    let folder = indexed_example(&SAMPLES, ROW_TOKENS);
    let (address, _stop) = serve(folder.path());
    let key = |address: &str| {
        format!(
            "{{\"gcs_base_url\": \"http://{address}\", \"disable_oauth\": true, \
            \"client_email\": \"\", \"private_key\": \"\", \"private_key_id\": \"\"}}"
        )
    };
    let (right, nobody) = (key(&address.to_string()), key("127.0.0.1:1"));
    let google = |key: &str| {
        [("GOOGLE_SERVICE_ACCOUNT_KEY", key.to_owned()), ("GOOGLE_ALLOW_HTTP", "true".to_owned())]
    };
    let azure = [
        ("AZURE_STORAGE_ACCOUNT_NAME", "account".to_owned()),
        ("AZURE_STORAGE_ENDPOINT", format!("http://{address}/account")),
        ("AZURE_SKIP_SIGNATURE", "true".to_owned()),
        ("AZURE_ALLOW_HTTP", "true".to_owned()),
    ];
    let given = format!("GOOGLE_SERVICE_ACCOUNT_KEY={right}");
    let expected = epoch(folder.path().to_str().unwrap(), folder.path(), None).unwrap();
    for (url, variables, options) in [
        ("gs://bucket/set", &google(&right)[..], ""),
        ("gs://bucket/set", &google(&nobody), &given),
        ("az://container/set", &azure, ""),
    ] {
        let place = tempfile::tempdir().unwrap();
        let result = place.path().join("result");
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "processes::child", "--ignored", "--nocapture"]);
        command.envs(variables.iter().map(|(name, value)| (name, value)));
        command.envs([("TIMEOUT", "never"), ("TOKEN", "of something else"), ("ENDPOINT", "?")]);
        command.env(SET, url).env(CACHE, place.path().join("cache")).env(RESULT, &result);
        command.env(OPTIONS, options).stdout(Stdio::null()).stderr(Stdio::null());
        assert!(command.status().unwrap().success());
        assert_eq!(fs::read_to_string(&result).unwrap(), expected.to_string(), "{url}");
    }
}
