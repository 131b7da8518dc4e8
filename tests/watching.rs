//! Runs that are watched while they train: events for TensorBoard, numbers for Prometheus.

use std::io::{Read, Write};
use std::net::TcpStream;

use crate::support::Workbench;
use crate::support::processes::wait_until;
use crate::support::program::free_hosts;

/// A file of events for each start, which hold a record a step and evaluation besides the two that a file begins with.
#[test]
fn tensorboard_has_the_steps_of_each_start() {
    let bench = Workbench::new();
    let set = ["--set", "metrics.tensorboard=true", "--set", "schedule.steps=5"];
    for steps in ["run.steps=3", "run.steps=5", "run.steps=5"] {
        bench
            .tidemill(&[&["train", "run.toml", "-w", "2", "--set", steps], &set[..]].concat())
            .expect(0);
    }
    let mut files: Vec<_> = std::fs::read_dir(bench.path("run/tensorboard"))
        .unwrap()
        .map(|it| it.unwrap().path())
        .collect();
    files.sort();
    let steps = files.iter().map(|file| {
        let (bytes, tag) = (std::fs::read(file).unwrap(), b"train/loss");
        bytes.windows(tag.len()).filter(|part| part == tag).count()
    });
    let steps: Vec<_> = steps.filter(|&steps| steps > 0).collect();
    assert_eq!(steps, [3, 2], "{files:?}");
}

/// While it trains, in one process and as the first of two; and only where it is asked for.
#[test]
fn a_metrics_port_answers_with_the_latest_numbers() {
    let bench = Workbench::new();
    for processes in [&["-w", "1"][..], &["-n", "2", "-w", "1"]] {
        let hosts = free_hosts(1);
        let address = hosts.trim_end();
        let (_, port) = address.rsplit_once(':').unwrap();
        let long = ["train", "run.toml", "--set", "run.steps=1000000", "--metrics-port", port];
        let program = bench.start(&[&long, processes].concat());
        let ask = |request: &str| -> Option<String> {
            let mut socket = TcpStream::connect(address).ok()?;
            socket
                .write_all(format!("{request} HTTP/1.1\r\nHost: here\r\n\r\n").as_bytes())
                .ok()?;
            let mut answer = String::new();
            socket.read_to_string(&mut answer).ok()?;
            Some(answer)
        };
        let number = |answer: &str, name: &str| -> Option<f64> {
            let line = answer.lines().find_map(|line| line.strip_prefix(name))?;
            line.trim().parse().ok()
        };
        let mut answer = String::new();
        wait_until("a step to be told", || {
            answer = ask("GET /metrics").unwrap_or_default();
            number(&answer, "tidemill_step ").is_some_and(|step| step >= 2.0)
        });
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        assert!(answer.contains("application/openmetrics-text"), "{answer}");
        assert_eq!(number(&answer, "tidemill_steps "), Some(1e6), "{answer}");
        assert!(number(&answer, "tidemill_loss ").is_some_and(|loss| loss > 1.0), "{answer}");
        assert!(answer.trim_end().ends_with("# EOF"), "{answer}");
        assert!(ask("GET /").unwrap().starts_with("HTTP/1.1 404"));
        assert!(ask("POST /metrics").unwrap().starts_with("HTTP/1.1 405"));
        // A second run finds the port taken.
        let taken =
            ["train", "run.toml", "--set", "run.dir=other", "-w", "1", "--metrics-port", port];
        bench.tidemill(&taken).failed(75, &["--metrics-port", port]);
        program.signal_until_it_ends("TERM").expect(0);
        std::fs::remove_dir_all(bench.path("run")).unwrap();
    }
}
