//! Processes that are threads of this one, which meet over loopback as any others do.

use std::net::TcpListener;
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use tidemill_streaming_data::prepare::{Parted, Peers, PrepareError};

use super::post::{MESSAGE_BYTES, WINDOW_BYTES};
use super::together;
use crate::cluster::{ClusterError, ClusterSettings, ExitClass};
use crate::job::StopRequest;

const SECOND: Duration = Duration::from_secs(1);
/// Longer than anything here takes.
const LONG: Duration = Duration::from_secs(60);

/// The result of `work` in each of so many processes.
fn in_processes<R: Send + 'static>(
    processes: usize,
    work: impl Fn(&dyn Peers) -> Result<R, PrepareError> + Clone + Send + 'static,
) -> Vec<Result<R, ClusterError>> {
    let listeners: Vec<_> =
        (0..processes).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
    let addresses: Vec<_> =
        listeners.iter().map(|it| it.local_addr().unwrap().to_string()).collect();
    let start = |(process, listener)| {
        let mut settings = ClusterSettings::process(1, process, addresses.clone());
        settings.listener = Some(listener);
        let work = work.clone();
        std::thread::spawn(move || together(settings, &StopRequest::default(), work))
    };
    let threads: Vec<_> = listeners.into_iter().enumerate().map(start).collect();
    threads.into_iter().map(|thread| thread.join().unwrap()).collect()
}

/// The message with which `from` says something to `to` the `number`-th time.
fn message(from: usize, to: usize, number: usize) -> Vec<u8> {
    const BYTES: [usize; 8] = [0, 1, 100, 256 << 10, (256 << 10) + 1, 70_000, 5 << 20, 3];
    let first = from * 31 + to * 7 + number;
    (0..BYTES[(first + number) % BYTES.len()]).map(|at| (first + at) as u8).collect()
}

#[test]
fn messages_arrive_whole_and_in_order_between_all() {
    const MESSAGES: usize = 24;
    let results = in_processes(3, |peers| {
        let (own, all) = (peers.process(), [0, 1, 2]);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for number in 0..MESSAGES {
                    for to in all {
                        let mut left = Some(message(own, to, number));
                        while let Some(message) = left {
                            left = peers.send(to, message, SECOND).unwrap();
                        }
                    }
                }
            });
            let mut received = [0; 3];
            while received != [MESSAGES; 3] {
                let Some((from, found)) = peers.receive(&all, LONG)? else { panic!("none came") };
                assert!(found == message(from, own, received[from]), "{from} to {own}");
                received[from] += 1;
            }
            Ok(peers.receive(&all, Duration::ZERO)?.is_none())
        })
    });
    for result in results {
        assert!(result.unwrap(), "nothing else came");
    }
}

#[test]
fn a_sender_waits_for_room_and_what_is_large_goes_alone() {
    let is_full = Arc::new(Barrier::new(2));
    let results = in_processes(2, move |peers| {
        let moment = Duration::from_millis(50);
        if peers.process() == 1 {
            is_full.wait();
            let mut taken = 0;
            while let Some((_, message)) = peers.receive(&[0], LONG)? {
                taken += 1;
                if message.len() == 9 << 20 {
                    break;
                }
            }
            return Ok(taken);
        }
        let send = |bytes: usize| Ok::<_, Parted>(peers.send(1, vec![7; bytes], moment)?.is_none());
        let mut sent = 0;
        while send(100_000)? {
            sent += 1;
        }
        // Messages on their way to another process take none of the room here.
        assert!(peers.send(0, vec![1; 9 << 20], moment)?.is_none());
        assert_eq!(peers.receive(&[0], LONG)?.map(|(_, it)| it.len()), Some(9 << 20));
        is_full.wait();
        while !send(9 << 20)? {}
        Ok(sent)
    });
    let [sent, taken] = [0, 1].map(|process: usize| *results[process].as_ref().unwrap());
    assert_eq!((sent, taken), (WINDOW_BYTES / (100_000 + MESSAGE_BYTES), sent + 1));
}

#[test]
fn the_error_of_one_ends_all_that_wait() {
    let begun = Instant::now();
    let results = in_processes(4, |peers| {
        if peers.process() == 1 {
            return Err(PrepareError::Message { process: 7 });
        }
        let waited = match peers.process() {
            0 => peers.receive(&[1], LONG).map(|_| ()),
            // No process sends a message; the wait ends with the run.
            3 => peers.receive(&[], LONG).map(|_| ()),
            _ => loop {
                if let Err(parted) = peers.send(1, vec![0; 1 << 20], LONG) {
                    break Err(parted);
                }
            },
        };
        assert_eq!(waited, Err(Parted));
        Ok(waited?)
    });
    assert!(begun.elapsed() < LONG / 2, "they waited on");
    for (process, result) in results.into_iter().enumerate() {
        let error = result.unwrap_err();
        assert_eq!(error.exit_class(), ExitClass::Restart);
        match error {
            ClusterError::Failed { cause, .. } if process == 1 => {
                assert!(cause.is::<PrepareError>(), "{cause}");
            }
            ClusterError::Reported { peer, message, .. } if process != 1 => {
                assert_eq!(peer.process, 1);
                assert!(message.contains("process 7 sent something else"), "{message}");
            }
            other => panic!("{process}: {}", other.with_causes()),
        }
    }
}

#[test]
fn a_panic_of_one_ends_all() {
    let results = in_processes(2, |peers| match peers.process() {
        0 => panic!("a bug"),
        _ => Ok(peers.receive(&[0], LONG).map(|_| ())?),
    });
    for result in results {
        let error = result.unwrap_err().with_causes();
        assert!(error.contains("a bug"), "{error}");
    }
}
