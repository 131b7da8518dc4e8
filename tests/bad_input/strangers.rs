//! Files that are not what their names suggest, and secrets in places where they can be read.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::unix::fs::symlink;
use std::process::Command;

use crate::support::{Running, Workbench};

/// Makes a pipe without a writer.
fn pipe(bench: &Workbench, name: &str) {
    let path = bench.path(name);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
}

#[test]
fn pipes_and_devices_in_the_place_of_files_are_refused_and_not_waited_for() {
    let bench = Workbench::new();
    bench.write("texts/a.txt", "a".repeat(100));
    let out = |arguments: &[&'static str]| {
        [&["prepare", "--output", "out", "--seq-len", "16", "--input"], arguments].concat()
    };
    pipe(&bench, "model/config.json");
    pipe(&bench, "set/index.json");
    pipe(&bench, "piped.json");
    symlink("/dev/zero", bench.path("zeros.json")).unwrap();
    let (a_pipe, a_device) = ("it is a pipe, expected a regular file", "it is a device, expected");
    pipe(&bench, "piped.toml");
    pipe(&bench, "hosts");
    symlink("/dev/zero", bench.path("zeros.toml")).unwrap();
    let hosts = vec!["train", "run.toml", "-p", "0", "--hosts", "hosts"];
    let cases: [(Vec<&str>, [&str; 2]); 9] = [
        (vec!["train", "piped.toml"], ["piped.toml", a_pipe]),
        (vec!["train", "zeros.toml"], ["zeros.toml", a_device]),
        (hosts, ["hosts", a_pipe]),
        (vec!["inspect", "model"], ["model/config.json", a_pipe]),
        (vec!["generate", "--model", "model", "--prompt", "a"], ["model/config.json", a_pipe]),
        (vec!["bench", "data", "set"], ["set/index.json", a_pipe]),
        (out(&["texts", "--tokenizer", "piped.json"]), ["piped.json", a_pipe]),
        (out(&["texts", "--tokenizer", "zeros.json"]), ["zeros.json", a_device]),
        (out(&["piped.json", "--strict"]), ["piped.json", "not a regular file"]),
    ];
    for (arguments, parts) in cases {
        bench.tidemill(&arguments).refused(1, &parts);
    }
    // A shard of no bytes, whose size in the index is right.
    pipe(&bench, "mds/shard");
    let index = r#"{"version": 2, "shards": [{"column_encodings": ["str"], "column_names": ["text"],
        "column_sizes": [null], "compression": null, "format": "mds", "version": 2, "samples": 0,
        "raw_data": {"basename": "shard", "bytes": 0}, "zip_data": null}]}"#;
    bench.write("mds/index.json", index);
    bench.tidemill(&out(&["mds"])).refused(1, &["mds/shard", a_pipe]);
}

#[test]
fn a_damaged_tokenizer_is_one_line() {
    let bench = Workbench::new();
    bench.write("texts/a.txt", "a".repeat(100));
    for (damage, part) in [
        (r#"{"version": "1.0", "decoder": {"type": "#, "EOF while parsing"),
        (r#"{"version": "1.0", "decoder": {"type": }}"#, "expected value"),
        (r#"{"version": "1.0", "decoder": 1e999}"#, "number out of range"),
        // The library for such files panics on a prefix that is longer than a token.
        (
            r#"{"version": "1.0", "model": {"type": "BPE", "continuing_subword_prefix": "----",
                "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]}}"#,
            "byte index 4",
        ),
    ] {
        bench.write("tokenizer.json", damage);
        let arguments =
            ["prepare", "--input", "texts", "--output", "out", "--tokenizer", "tokenizer.json"];
        let parts = ["tokenizer.json: expected a Hugging Face tokenizer.json: ", part];
        bench.tidemill(&arguments).refused(1, &parts);
    }
}

/// The address of a store that refuses every client.
fn refusing_store() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        while let Ok((mut stream, _)) = listener.accept() {
            let mut request = [0; 4096];
            let _ = stream.read(&mut request);
            let _ = stream.write_all(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n");
        }
    });
    format!("http://{address}")
}

/// All that is logged of a request that fails, at the finest level.
#[test]
fn no_password_and_no_token_stand_in_a_trace() {
    let bench = Workbench::new();
    let trace = |endpoint: &str| {
        let line = format!(
            "export TIDEMILL_LOG=trace AWS_ENDPOINT={endpoint} AWS_ALLOW_HTTP=true AWS_REGION=r \
             AWS_ACCESS_KEY_ID=k AWS_SECRET_ACCESS_KEY=hidden AWS_SESSION_TOKEN=hidden; exec \"$@\""
        );
        let arguments = ["inspect", "s3://bucket/set"];
        Running::start_in_shell(&bench.path(""), &line, &arguments).finish()
    };
    for (endpoint, part) in [
        (&"http://user:hidden@127.0.0.1:1".to_owned(), "AWS_ENDPOINT holds a user or password"),
        (&refusing_store(), "access was refused"),
    ] {
        let finished = trace(endpoint);
        assert!(!finished.status.success() && finished.stderr.contains(part), "{finished:?}");
        for text in [&finished.stdout, &finished.stderr] {
            assert!(!text.contains("hidden"), "{text}");
            // Logs of the HTTP library, which contain addresses as they are used, hide them too.
            assert!(!text.contains("connecting to") && !text.contains("Http::connect"), "{text}");
        }
    }
}
