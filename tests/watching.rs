//! Watching a run while it trains: events for TensorBoard, numbers for Prometheus.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;

use serde_json::Value;

use crate::support::Workbench;
use crate::support::processes::wait_until;
use crate::support::program::free_hosts;

/// A file of events for each start, with a record for each step and evaluation after the two that
/// begin a file.
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

/// While it trains, in one process and in the first of two; and only if it is asked for.
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
        // A second run finds the port in use.
        let taken =
            ["train", "run.toml", "--set", "run.dir=other", "-w", "1", "--metrics-port", port];
        bench.tidemill(&taken).failed(75, &["--metrics-port", port]);
        program.signal_until_it_ends("TERM").expect(0);
        std::fs::remove_dir_all(bench.path("run")).unwrap();
    }
}

/// The events of a trace, also of an incomplete one.
fn trace(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap();
    let whole =
        serde_json::from_str(&text).or_else(|_| serde_json::from_str(&(text.clone() + "]")));
    whole.unwrap_or_else(|error| panic!("{error}: {text}"))
}

/// The names of a track's spans, which all are nested or disjoint.
fn spans(events: &[Value], track: &str) -> Vec<String> {
    let is_track = |event: &&Value| event["args"]["name"].as_str().is_some_and(|it| it == track);
    let named = events.iter().find(is_track).unwrap_or_else(|| panic!("no track {track}"));
    let own = |event: &&Value| event["ph"] == "X" && event["tid"] == named["tid"];
    // In nanoseconds: microseconds with three digits behind the point.
    let whole = |event: &Value, key: &str| (event[key].as_f64().unwrap() * 1e3).round() as i64;
    let mut found: Vec<(i64, i64, &str)> = events
        .iter()
        .filter(own)
        .map(|event| {
            let begin = whole(event, "ts");
            (begin, begin + whole(event, "dur"), event["name"].as_str().unwrap())
        })
        .collect();
    found.sort_by_key(|&(begin, end, _)| (begin, -end));
    // The unit to which a number of this size is rounded.
    const ROUNDED: i64 = 1_000;
    let mut open: Vec<i64> = Vec::new();
    for &(begin, end, name) in &found {
        while open.last().is_some_and(|&outer| outer <= begin + ROUNDED) {
            open.pop();
        }
        let inside = open.last().is_none_or(|&outer| end <= outer + ROUNDED);
        assert!(inside, "{name} of {track} ends after what it lies in");
        open.push(end);
    }
    found.into_iter().map(|(_, _, name)| name.to_owned()).collect()
}

/// Every operator of every worker and the work of their threads; for a killed run all but the end.
#[test]
fn a_trace_has_every_operator_and_thread() {
    let bench = Workbench::new();
    let traced = ["train", "run.toml", "--trace", "trace.json"];
    // A trace takes the place of a trace alone.
    let config = std::fs::read(bench.path("run.toml")).unwrap();
    let over = ["train", "run.toml", "--trace", "run.toml"];
    bench.tidemill(&over).refused(1, &["run.toml: expected no file, or a trace"]);
    assert_eq!(std::fs::read(bench.path("run.toml")).unwrap(), config);
    bench.tidemill(&[&traced[..], &["-n", "2", "-w", "1"]].concat()).expect(0);
    let operators = [
        "Dataflow",
        "Samples",
        "ForwardBackward",
        "Reduce",
        "Optimize",
        "Gather",
        "Snapshot",
        "Checkpoint",
        "Feedback",
    ];
    let mut begins = Vec::new();
    for (worker, file) in ["trace.json", "trace-1.json"].into_iter().enumerate() {
        let text = std::fs::read_to_string(bench.path(file)).unwrap();
        assert!(serde_json::from_str::<Value>(&text).is_ok(), "a run that ends closes its file");
        let events = trace(&bench.path(file));
        let names = spans(&events, &format!("worker {worker}: operators"));
        for operator in operators {
            assert!(names.iter().any(|name| name == operator), "{operator} is not in {names:?}");
        }
        let device = spans(&events, &format!("thread device-{worker}"));
        let steps = device.iter().filter(|name| *name == "forward and backward").count();
        assert!(steps >= 4, "of 5 steps the first compiles kernels: {device:?}");
        let optimizer = spans(&events, &format!("thread optimizer-{worker}"));
        assert!(optimizer.iter().any(|name| name == "updating parameters"), "{optimizer:?}");
        // Two lanes and three steps behind the first, which prepares the device, at least.
        let queue = spans(&events, &format!("thread device-{worker}: device queue"));
        let computed = queue.iter().filter(|name| *name == "forward and backward").count();
        assert!(computed >= 5, "{queue:?}");
        let queue = spans(&events, &format!("thread optimizer-{worker}: device queue"));
        for work in
            ["summing gradients", "mean gradients", "updating parameters", "gathering parameters"]
        {
            assert!(queue.iter().any(|name| name == work), "{work} is not in {queue:?}");
        }
        let times = events.iter().filter_map(|event| event["ts"].as_f64());
        begins.push(times.fold(f64::INFINITY, f64::min));
    }
    let apart = (begins[0] - begins[1]).abs();
    assert!(apart < 60e6, "processes have one clock: {apart} microseconds");
    let long = ["--set", "run.steps=1000000", "--set", "run.dir=other", "-w", "2"];
    let program = bench.start(&[&traced[..], &long].concat());
    wait_until("spans to be written", || {
        let text = std::fs::read_to_string(bench.path("trace.json")).unwrap_or_default();
        text.matches("ForwardBackward").count() > 20 && !text.trim_end().ends_with(']')
    });
    program.signal("KILL");
    program.finish();
    let events = trace(&bench.path("trace.json"));
    for worker in 0..2 {
        let names = spans(&events, &format!("worker {worker}: operators"));
        assert!(names.iter().any(|name| name == "ForwardBackward"));
    }
    let some = ["--set", "run.dir=some", "--trace-steps", "3..4", "-w", "2"];
    bench.tidemill(&[&traced[..], &some].concat()).expect(0);
    let events = trace(&bench.path("trace.json"));
    let device = events.iter().filter(|event| event["name"] == "forward and backward");
    let steps = device.map(|event| event["args"]["step"].as_u64().unwrap());
    // Spans of a thread that does not know its step are written while a device is working on one of
    // these steps.
    let steps: BTreeSet<u64> = steps.filter(|&step| step > 0).collect();
    assert_eq!(steps, BTreeSet::from([3, 4]));
    for worker in 0..2 {
        let names = spans(&events, &format!("worker {worker}: operators"));
        assert!(names.iter().any(|name| name == "ForwardBackward"), "{names:?}");
    }
    for wrong in ["4..3", "0..3", "3", "a..b"] {
        let wrong = [&traced[..], &["--trace-steps", wrong]].concat();
        bench.tidemill(&wrong).refused(2, &["--trace-steps", "counted from 1"]);
    }
    let alone = ["train", "run.toml", "--trace-steps", "3..4"];
    bench.tidemill(&alone).refused(2, &["--trace"]);
    let nowhere = ["train", "run.toml", "--set", "run.dir=third", "--trace", "no/trace.json"];
    bench.tidemill(&nowhere).refused(1, &["--trace: writing no/trace.json failed"]);
}
