//! Processes that meet, or do not.

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::time::{Duration, Instant};

use tidemill::cluster::{
    Abort, Actor, Admission, Cluster, ClusterError, ClusterSettings, ExitClass, Failure, Secret,
    WorkerContext, execute, read_hosts,
};

use crate::ring::{SOON, cluster, ring, settings, soon};

#[test]
fn a_different_identity_is_an_error_on_every_side() {
    let settings = settings(3, 1).into_iter().map(|settings| {
        let architecture = if settings.process == 2 { "avx2" } else { "avx512" };
        settings.with_identity("device.architecture", architecture).with_identity("seed", "17")
    });
    let expected =
        "peers disagree on device.architecture: process 0 has avx512, process 2 has avx2";
    let or = "peers disagree on device.architecture: process 1 has avx512, process 2 has avx2";
    for result in soon(|| cluster(settings.collect(), |_| Ok(()))) {
        let error = result.unwrap_err();
        let text = error.with_causes();
        assert!(text.ends_with(expected) || text.ends_with(or), "{text}");
        assert_eq!(error.exit_class(), ExitClass::FixInput);
    }
}

#[test]
fn different_numbers_of_workers_and_missing_keys_are_named() {
    let mut unequal = settings(2, 1);
    unequal[1].workers = 2;
    for result in soon(|| cluster(unequal, |_| Ok(()))) {
        let text = result.unwrap_err().with_causes();
        let expected = "on workers per process: process 0 has 1, process 1 has 2";
        assert!(text.ends_with(expected), "{text}");
    }
    let mut unequal = settings(2, 1);
    unequal[0].identity.insert("data set".into(), "abc".into());
    for result in soon(|| cluster(unequal, |_| Ok(()))) {
        let text = result.unwrap_err().with_causes();
        assert!(text.ends_with("on data set: process 0 has abc, process 1 has nothing"), "{text}");
    }
}

/// Addresses decide which processes cross the network together, and each process has a list of its own.
#[test]
fn processes_of_one_host_for_some_and_of_two_for_others_are_an_error() {
    let mut unequal = settings(2, 1);
    let other_name = unequal[0].addresses[1].replace("127.0.0.1", "127.0.0.2");
    unequal[0].addresses[1] = other_name;
    for result in soon(|| cluster(unequal, |_| Ok(()))) {
        let text = result.unwrap_err().with_causes();
        let expected =
            "on processes on hosts: process 0 has 1 each on 2, process 1 has 2 each on 1";
        assert!(text.ends_with(expected), "{text}");
    }
}

#[test]
fn missing_peers_are_named_at_the_deadline() {
    let mut all = settings(3, 1);
    // The listener of process 0 is closed. That of process 2 is open, but accepts no connection.
    drop(all.remove(0));
    let mut lonely = all.remove(0);
    lonely.connect_deadline = Duration::from_millis(400);
    let addresses = lonely.addresses.clone();
    let start = Instant::now();
    let error = execute(lonely, |_| Ok(())).unwrap_err();
    assert!((Duration::from_millis(400)..SOON).contains(&start.elapsed()), "{:?}", start.elapsed());
    let expected = format!(
        "no connection within 0.4 s to process 0 ({}), process 2 ({})",
        addresses[0], addresses[2]
    );
    assert_eq!(error.to_string(), expected);
    assert_eq!(error.exit_class(), ExitClass::Restart);
    assert!(error.with_causes().len() > expected.len(), "the last attempt's error is its source");
}

#[test]
fn whoever_waits_for_a_third_hears_that_the_second_has_failed() {
    let mut all = settings(3, 1);
    let missing = all.pop();
    all[1].connect_deadline = Duration::from_millis(600);
    // Process 0 would wait for 20 s.
    for result in soon(|| cluster(all, |_| Ok(()))) {
        let text = result.unwrap_err().with_causes();
        assert!(text.contains("no connection within 0.6 s to process 2"), "{text}");
    }
    drop(missing);
}

#[test]
fn strangers_are_dropped_and_delay_nobody() {
    let all = settings(2, 1);
    let address = all[0].addresses[0].clone();
    // They come first: half-open, garbage, another protocol, a frame that never ends, a wrong index.
    let greetings: [&[u8]; 5] = [
        b"",
        &[0xff; 100],
        b"GET / HTTP/1.1\r\n\r\n",
        b"tidemill\0\0\x10\0{\"proc",
        b"tidemill\0\0\0\x07\"hello\"",
    ];
    let mut strangers: Vec<TcpStream> = Vec::new();
    for greeting in greetings {
        let mut stranger = TcpStream::connect(&address).unwrap();
        stranger.write_all(greeting).unwrap();
        strangers.push(stranger);
    }
    let results = soon(|| cluster(all, |context| Ok(context.index())));
    let indices: Vec<usize> = results.into_iter().flat_map(Result::unwrap).collect();
    assert_eq!(indices, [0, 1]);
    drop(strangers);
}

#[test]
fn a_second_process_of_the_same_index_is_refused() {
    let mut all = settings(3, 1);
    all[0].connect_deadline = Duration::from_millis(1500);
    let missing = all.pop();
    let mut twin = ClusterSettings::process(1, 1, all[0].addresses.clone());
    twin.listener = Some(TcpListener::bind("127.0.0.1:0").unwrap());
    all.push(twin);
    let errors: Vec<_> = cluster(all, |_| Ok(())).into_iter().map(Result::unwrap_err).collect();
    let refused = |error: &&ClusterError| {
        matches!(error, ClusterError::Refused { process: 1, .. })
            && error.to_string().contains("before")
    };
    assert_eq!(errors.iter().filter(refused).count(), 1, "{errors:?}");
    drop(missing);
}

#[test]
fn what_a_terminal_would_obey_is_not_repeated_of_a_peer() {
    let escapes = "\u{1b}]0;title\u{7}\u{1b}[2J\u{202e}";
    let unlike = settings(2, 1).into_iter().map(|settings| {
        let value = format!("{escapes}{}", settings.process);
        settings.with_identity(format!("device{escapes}"), value)
    });
    let mut told = soon(|| cluster::<(), _>(unlike.collect(), |_| Ok(())));
    let fails = move |context: &mut WorkerContext<'_>| -> Result<(), Failure> {
        match context.index() {
            0 => Ok(context.step_while(|| true)?),
            _ => Err(Failure::restart(format!("the disk {escapes} is full"))),
        }
    };
    told.push(soon(|| cluster(settings(2, 1), fails)).swap_remove(0));
    for (result, said) in told.into_iter().zip(["disagree", "disagree", "is full"]) {
        let text = result.unwrap_err().with_causes();
        let obeyed = |character: char| character.is_control() || character == '\u{202e}';
        assert!(text.contains(said) && !text.contains(obeyed), "{text:?}");
    }
}

#[test]
fn an_abort_ends_the_search_for_peers() {
    let mut all = settings(2, 1);
    let abort = Abort::new();
    let outside = abort.clone();
    let culprit = std::thread::spawn(move || {
        outside.fail(Actor::Thread("main".into()), Failure::fix_input("no use"))
    });
    let error = soon(|| Cluster::connect_with(all.remove(0), abort).map(|_| ())).unwrap_err();
    culprit.join().unwrap();
    assert_eq!(error.with_causes(), "thread main failed: no use");
}

#[test]
fn a_stop_before_all_have_met_is_the_same_word_for_all_that_hear_it() {
    let mut all = settings(3, 1);
    let missing = all.pop();
    let aborts = [Abort::new(), Abort::new()];
    let stop = aborts[1].clone();
    let (first, second) = soon(|| {
        let processes: Vec<_> = all
            .into_iter()
            .zip(aborts)
            .map(|(settings, abort)| {
                std::thread::spawn(|| Cluster::connect_with(settings, abort).map(|_| ()))
            })
            .collect();
        stop.abort(ClusterError::StoppedEarly);
        let mut ends = processes.into_iter().map(|process| process.join().unwrap().unwrap_err());
        (ends.next().unwrap(), ends.next().unwrap())
    });
    for error in [first, second] {
        assert!(matches!(error, ClusterError::StoppedEarly), "{error}");
    }
    drop(missing);
}

#[test]
fn a_cluster_over_machines_without_a_secret_is_refused() {
    let machines = || vec!["127.0.0.1:2101".to_string(), "192.0.2.1:2101".to_string()];
    let mut settings = ClusterSettings::process(1, 0, machines());
    let error = soon(|| execute(settings, |_| Ok(()))).unwrap_err();
    assert_eq!(error.exit_class(), ExitClass::FixInput);
    let text = error.to_string();
    for part in ["192.0.2.1:2101", "TIDEMILL_CLUSTER_SECRET", "openssl rand -hex 32", "--insecure"]
    {
        assert!(text.contains(part), "{part} is not in {text}");
    }
    for admission in [Admission::Anyone, Admission::Secret(Secret::generate().unwrap())] {
        settings = ClusterSettings::process(1, 0, machines());
        settings.admission = admission;
        settings.check_admission().unwrap();
        // Its own address is one that the other machine cannot reach.
        let error = soon(|| execute(settings, |_| Ok(()))).unwrap_err();
        assert!(matches!(error, ClusterError::LoopbackAmongMachines { .. }), "{error}");
        assert_eq!(error.exit_class(), ExitClass::FixInput);
    }
}

/// The one that waits a fifth of a second for a sign gets one every six seconds only.
#[test]
fn different_peer_deadlines_do_not_end_a_healthy_run() {
    let mut all = settings(2, 1);
    all[0].peer_deadline = Duration::from_millis(200);
    let results = soon(|| {
        cluster(all, |context| {
            ring(context, |_| {});
            let start = Instant::now();
            context.step_while(|| start.elapsed() < Duration::from_millis(800))?;
            for dataflow in context.installed_dataflows() {
                context.drop_dataflow(dataflow);
            }
            Ok(())
        })
    });
    for result in results {
        result.unwrap();
    }
}

/// Otherwise a process that starts a little later would try to connect until its own deadline.
#[test]
fn a_process_that_fails_early_still_tells_those_that_come() {
    let mut all = settings(2, 1).into_iter();
    let (early, late) = (all.next().unwrap(), all.next().unwrap());
    let abort = Abort::new();
    abort.fail(Actor::Thread("main".into()), Failure::fix_input("wrong config"));
    let first = std::thread::spawn(move || Cluster::connect_with(early, abort).map(|_| ()));
    std::thread::park_timeout(Duration::from_millis(200));
    let text = soon(|| execute(late, |_| Ok(()))).unwrap_err().with_causes();
    assert!(text.ends_with("thread main failed: wrong config"), "{text}");
    assert!(first.join().unwrap().is_err());
}

#[test]
fn an_address_in_use_and_wrong_settings_are_named() {
    let mut all = settings(2, 1);
    let taken = all[1].listener.take().unwrap();
    let error = execute(all.remove(1), |_| Ok(())).unwrap_err();
    let address = taken.local_addr().unwrap();
    assert_eq!(error.to_string(), format!("cannot listen at {address}"));
    assert_eq!(error.exit_class(), ExitClass::Restart);

    let beyond = ClusterSettings::process(1, 2, vec!["a:1".into(), "b:1".into()]);
    let text = execute(beyond, |_| Ok(())).unwrap_err().to_string();
    assert_eq!(text, "process index 2 is out of range: the cluster has 2 processes, from 0");
    let text = execute(ClusterSettings::workers(0), |_| Ok(())).unwrap_err().to_string();
    assert_eq!(text, "the number of workers must be at least 1, found 0");
}

#[test]
fn settings_come_from_a_hosts_file() {
    let folder = tempfile::tempdir().unwrap();
    let hosts = folder.path().join("hosts.txt");
    std::fs::write(&hosts, "# two nodes\nnode-a:2101\n\nnode-b:2101\n").unwrap();
    assert_eq!(read_hosts(&hosts).unwrap(), ["node-a:2101", "node-b:2101"]);
    let settings = ClusterSettings::from_hosts(2, 1, &hosts).unwrap();
    assert_eq!((settings.processes(), settings.process), (2, 1));
    let error = ClusterSettings::from_hosts(2, 2, &hosts).unwrap_err();
    assert!(matches!(error, ClusterError::ProcessIndex { process: 2, processes: 2 }));
    assert!(read_hosts(Path::new("absent")).is_err());
}
