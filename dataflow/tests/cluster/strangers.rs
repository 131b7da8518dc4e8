//! Callers that do not belong to the cluster: they learn nothing, take no place and end nothing.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

use tidemill::cluster::{
    Admission, ClusterError, ClusterSettings, ExitClass, Failure, Secret, WorkerContext, execute,
};
use timely::dataflow::operators::vec::Map;
use timely::dataflow::operators::{Exchange, ToStream};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::processes::{TestProcess, limited};
use crate::proxy::Proxy;
use crate::ring::{SOON, cluster, settings, soon};
use crate::threads::exchange_sums;

/// The size of the first message of a handshake.
const HANDSHAKE_BYTES: usize = 48;

/// Settings of two processes that know one secret.
fn secret_settings(secret: &Secret) -> Vec<ClusterSettings> {
    let mut all = settings(2, 1);
    all.iter_mut().for_each(|each| each.admission = Admission::Secret(secret.clone()));
    all
}

/// Runs two processes to their right end, and `disturb` with the address of the first while that
/// waits for the second.
fn complete_though(secret: &Secret, disturb: impl FnOnce(&str)) {
    let mut all = secret_settings(secret);
    let (second, first) = (all.pop().unwrap(), all.pop().unwrap());
    let address = first.addresses[0].clone();
    let first = std::thread::spawn(move || execute(first, exchange_sums));
    disturb(&address);
    let second = soon(|| execute(second, exchange_sums)).unwrap();
    let first = first.join().unwrap().unwrap();
    assert_eq!(first.iter().chain(&second).sum::<u64>(), 999 * 1000 / 2);
}

/// The bytes that a caller receives until the connection is closed.
fn answer(address: &str, words: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(SOON)).unwrap();
    // Being hung up on in the middle of a word is an answer too.
    let _ = stream.write_all(words);
    let _ = stream.shutdown(Shutdown::Write);
    let mut heard = Vec::new();
    let _ = stream.read_to_end(&mut heard);
    heard
}

/// The bytes that process 1 sends to process 0: on the control connection, and on the data connection.
fn recorded(secret: &Secret) -> [Vec<u8>; 2] {
    let mut all = secret_settings(secret);
    let proxy = Proxy::before(&all[0].addresses[0], None);
    all[1].addresses[0] = proxy.address.clone();
    soon(|| cluster(all, exchange_sums)).into_iter().for_each(|result| drop(result.unwrap()));
    let passed = proxy.passed.lock().unwrap();
    [0, 1].map(|connection| passed.connections[connection][0].clone())
}

#[test]
fn a_process_with_another_secret_is_no_peer_and_both_say_what_may_be_wrong() {
    let (secret, another) = (Secret::generate().unwrap(), Secret::generate().unwrap());
    for admission in [Admission::Secret(another), Admission::LoopbackOnly] {
        let mut all = secret_settings(&secret);
        // Long enough for a machine at work: without a greeting, both would only say that time has passed.
        all[0].connect_deadline = Duration::from_millis(2_000);
        all[1].connect_deadline = Duration::from_millis(1_500);
        all[1].admission = admission;
        for result in soon(|| cluster(all, exchange_sums)) {
            let error = result.unwrap_err();
            assert!(matches!(error, ClusterError::Unreachable { .. }), "{error}");
            assert!(error.with_causes().contains("secret"), "{}", error.with_causes());
            assert_eq!(error.exit_class(), ExitClass::Restart);
        }
    }
}

#[test]
fn strangers_are_not_answered_and_end_nothing() {
    let early = b"tidemill\0\0\0\x2f{\"process\":1,\"purpose\":\"control\",\"identity\":{}}";
    let other = recorded(&Secret::generate().unwrap());
    complete_though(&Secret::generate().unwrap(), |address| {
        let greetings = [&early[..], &[0; HANDSHAKE_BYTES], &[0xff; 5000], &other[0], &other[1]];
        for words in greetings {
            assert_eq!(answer(address, words), b"", "{:?} were answered", &words[..8]);
        }
    });
}

/// A listener on the network can repeat what a process said. It thereby proves that the secret was known once, and
/// gets one message of a handshake that it cannot continue.
#[test]
fn a_recorded_greeting_takes_no_place() {
    let secret = Secret::generate().unwrap();
    let recorded = recorded(&secret);
    complete_though(&secret, |address| {
        for words in &recorded {
            assert_eq!(answer(address, words).len(), HANDSHAKE_BYTES);
            assert_eq!(answer(address, &words[..HANDSHAKE_BYTES]).len(), HANDSHAKE_BYTES);
            assert_eq!(answer(address, &words[HANDSHAKE_BYTES..]), b"");
        }
    });
}

#[test]
fn mutated_greetings_open_nothing() {
    const SEED: u64 = 20_261_122;
    const CASES: usize = 1000;
    let secret = Secret::generate().unwrap();
    let recorded = recorded(&secret);
    let mut drawn = 0u64;
    let mut random = move |below: usize| {
        drawn += 1;
        xxh3_64_with_seed(&drawn.to_le_bytes(), SEED) as usize % below
    };
    complete_though(&secret, |address| {
        for case in 0..CASES {
            let mut words = recorded[random(2)][..400].to_vec();
            for _ in 0..[1, 1, 2, 5, 20][random(5)] {
                let at = random(words.len());
                match random(4) {
                    0 => words[at] ^= 1 << random(8),
                    1 => words.insert(at, random(256) as u8),
                    2 if words.len() > 1 => drop(words.remove(at)),
                    _ => words.truncate(at + 1),
                }
            }
            // The answer depends on whether the first message is intact.
            let whole = recorded.iter().any(|each| words.starts_with(&each[..HANDSHAKE_BYTES]));
            let heard = answer(address, &words).len();
            assert_eq!(heard, if whole { HANDSHAKE_BYTES } else { 0 }, "seed {SEED}, case {case}");
        }
    });
}

/// With room for fewer connections than strangers, in descriptors and in the bound on them.
#[test]
fn idle_strangers_keep_no_process_out() {
    for (descriptors, idle) in [(40, 100), (1024, 200)] {
        let mut members =
            [descriptors, 1024].map(|descriptors| TestProcess::of(limited("ring", descriptors)));
        let addresses = [0, 1].map(|index| members[index].line("port "));
        members[0].begin(0, 1, Duration::from_secs(30), &addresses);
        let strangers: Vec<TcpStream> = (0..idle)
            .map(|_| TcpStream::connect(&addresses[0]).expect("the port is open"))
            .collect();
        members[1].begin(1, 1, Duration::from_secs(30), &addresses);
        for member in &members {
            member.line("at work");
        }
        drop(strangers);
    }
}

/// Neither silence nor what was recorded proves anything: both are kept only as long as there is room for newer ones.
#[test]
fn the_oldest_of_too_many_strangers_is_hung_up_on() {
    /// More than a process greets at a time.
    const MANY: usize = 80;
    let secret = Secret::generate().unwrap();
    let recorded = recorded(&secret);
    complete_though(&secret, |address| {
        for words in [&[][..], &recorded[0][..HANDSHAKE_BYTES]] {
            let stranger = |_| {
                let mut stream = TcpStream::connect(address).unwrap();
                stream.write_all(words).unwrap();
                stream.read_exact(&mut vec![0; words.len()]).unwrap();
                stream
            };
            let strangers: Vec<TcpStream> = (0..MANY).map(stranger).collect();
            // Sooner than it would have been for being slow.
            let mut oldest = &strangers[0];
            oldest.set_read_timeout(Some(Duration::from_secs(3))).unwrap();
            assert_eq!(oldest.read(&mut [0]).expect("the oldest is hung up on"), 0);
        }
    });
}

/// The receiving side of a peer that is joined, and sends without end what is never consumed.
#[test]
fn a_peer_that_sends_more_than_may_wait_is_named() {
    const LIMIT_BYTES: usize = 2 << 20;
    let mut all = settings(2, 1);
    all.iter_mut().for_each(|each| each.received_limit_bytes = LIMIT_BYTES);
    let flood = |context: &mut WorkerContext<'_>| -> Result<(), Failure> {
        if context.index() == 0 {
            context.dataflow::<u64, _, _>(|scope| {
                (0..u64::MAX)
                    .to_stream(scope)
                    .container::<Vec<_>>()
                    .map(|n| 2 * n + 1)
                    .exchange(|n| *n);
            });
        }
        // Worker 1 never builds the dataflow.
        Ok(context.step_while(|| true)?)
    };
    let expected =
        format!("process 0 (127.0.0.1:{{}}) sent more than {LIMIT_BYTES} bytes that wait");
    for result in soon(|| cluster(all, flood)) {
        let error = result.unwrap_err();
        let text = error.with_causes();
        let (start, end) = expected.split_once("{}").unwrap();
        assert!(text.contains(start) && text.contains(end), "{text}");
        assert_eq!(error.exit_class(), ExitClass::Restart);
    }
}

/// The port is open no longer than it is waited at.
#[test]
fn the_port_is_closed_once_all_have_met() {
    let mut all = settings(2, 1);
    let addresses = all[0].addresses.clone();
    for result in soon(|| {
        cluster(std::mem::take(&mut all), move |_| {
            let deadline = Instant::now() + SOON;
            for address in &addresses {
                // The last to have met may be about to close it.
                while TcpStream::connect(address).is_ok() {
                    assert!(Instant::now() < deadline, "{address} is still open");
                }
            }
            Ok(())
        })
    }) {
        result.unwrap();
    }
}
