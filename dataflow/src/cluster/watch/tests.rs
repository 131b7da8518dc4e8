//! The watch's judgement of runs in which something moves, waits or stands still.

use super::*;
use crate::cluster::progress::{self, Presence};

const DEADLINE: Duration = Duration::from_secs(10);

/// A run, and the words of its watch each second.
struct Scene {
    board: Arc<Board>,
    watch: Watch,
    now: Instant,
}

impl Scene {
    fn new() -> Self {
        let now = Instant::now();
        Self { board: Arc::default(), watch: Watch::new(DEADLINE, now), now }
    }

    fn worker(&self) -> Presence {
        let worker = self.board.join(Actor::Worker(0), Rhythm::Turns);
        worker.begin();
        worker
    }

    /// The watch's first message within so many seconds, and after how many it came; `happens` is called in each second.
    fn after(
        &mut self,
        seconds: u32,
        peers: &mut [PeerStanding],
        mut happens: impl FnMut(&mut [PeerStanding]),
    ) -> Option<(u32, String)> {
        (0..seconds).find_map(|second| {
            happens(peers);
            self.now += Duration::from_secs(1);
            let error = self.watch.look(self.now, &self.board, peers)?;
            Some((second + 1, error.to_string()))
        })
    }
}

fn peer(process: usize, phase: Phase, step: u64) -> PeerStanding {
    // It goes on breathing.
    let now = Instant::now() + Duration::from_secs(1_000_000);
    PeerStanding {
        peer: Peer { process, address: format!("host-{process}:1") },
        standing: Standing { worker: Some(process as u32), phase, step, moved: 0 },
        heard: now,
        has_left: false,
        delay: Duration::from_secs(2),
    }
}

#[test]
fn a_thread_that_does_not_move_is_named_and_not_the_worker_that_waits_for_it() {
    let mut scene = Scene::new();
    let worker = scene.worker();
    let device = scene.board.join(Actor::Thread("device-0".into()), Rhythm::Jobs);
    progress::enter(Phase::WaitingForSums, 7);
    let begins = || {
        device.begin();
        progress::enter(Phase::ForwardBackward, 0);
    };
    std::thread::scope(|threads| threads.spawn(begins).join().unwrap());
    let (second, text) = scene.after(30, &mut [], |_| worker.turn()).unwrap();
    assert_eq!(second, 11);
    let expected = "thread device-0 has stood still for 10 s, the step deadline, in step 7: \
                    forward and backward";
    assert_eq!(text, expected);
}

#[test]
fn whatever_moves_within_a_step_keeps_it_alive() {
    let mut scene = Scene::new();
    let worker = scene.worker();
    progress::enter(Phase::ReadingSamples, 1);
    let mut second = 0;
    let slow = |_: &mut [PeerStanding]| {
        worker.turn();
        second += 1;
        if second % 8 == 0 {
            progress::moved();
        }
    };
    assert_eq!(scene.after(100, &mut [], slow), None);
    let (second, text) = scene.after(30, &mut [], |_| worker.turn()).unwrap();
    assert!(second <= 11 && text.contains("worker 0"), "{second}: {text}");
    assert!(text.ends_with("in step 1: reading samples"), "{text}");
}

#[test]
fn a_worker_that_does_not_come_back_is_inside_an_operator() {
    let mut scene = Scene::new();
    let _worker = scene.worker();
    progress::enter(Phase::WaitingForSums, 3);
    let (second, text) = scene.after(30, &mut [], |_| ()).unwrap();
    assert_eq!(second, 11);
    assert!(text.starts_with("worker 0 ") && text.ends_with("inside an operator"), "{text}");
}

#[test]
fn a_store_is_waited_for_as_long_as_it_is_itself() {
    let mut scene = Scene::new();
    let worker = scene.worker();
    progress::enter(Phase::UsingStore, 0);
    assert_eq!(scene.after(1000, &mut [], |_| ()), None, "the thread does not come back");
    progress::enter(Phase::WaitingForState, 0);
    let peers = &mut [peer(1, Phase::UsingStore, 0)];
    assert_eq!(scene.after(1000, peers, |_| worker.turn()), None, "nor does a peer");
}

#[test]
fn a_peer_that_only_breathes_is_named() {
    let mut scene = Scene::new();
    let worker = scene.worker();
    progress::enter(Phase::WaitingForSums, 1);
    let peers = &mut [peer(1, Phase::WaitingForSums, 1), peer(2, Phase::Starting, 0)];
    let (second, text) = scene.after(30, peers, |_| worker.turn()).unwrap();
    assert_eq!(second, 13, "it has the time to say so itself");
    let expected = "worker 2 of process 2 (host-2:1) has stood still for 10 s, the step \
                    deadline, before its first step: starting";
    assert_eq!(text, expected);
}

#[test]
fn those_that_wait_are_not_accused_while_one_moves() {
    let mut scene = Scene::new();
    let worker = scene.worker();
    progress::enter(Phase::WaitingForSums, 5);
    let peers = &mut [peer(1, Phase::ForwardBackward, 5), peer(2, Phase::WaitingForSums, 5)];
    let one_moves = |peers: &mut [PeerStanding]| {
        worker.turn();
        peers[0].standing.moved += 1;
    };
    assert_eq!(scene.after(1000, peers, one_moves), None);
}

#[test]
fn where_all_wait_the_last_is_named() {
    let mut scene = Scene::new();
    let worker = scene.worker();
    progress::enter(Phase::WaitingForSums, 5);
    let peers = &mut [peer(1, Phase::WaitingForSums, 5), peer(2, Phase::WaitingForEnd, 4)];
    let (second, text) = scene.after(30, peers, |_| worker.turn()).unwrap();
    assert_eq!(second, 11);
    assert!(text.starts_with("worker 2 of process 2 "), "{text}");
    assert!(text.ends_with("in step 4: waiting for the end of the run"), "{text}");
    // A process alone is the last of all itself.
    let mut alone = Scene::new();
    let worker = alone.worker();
    progress::enter(Phase::WaitingForSums, 5);
    let (_, text) = alone.after(30, &mut [], |_| worker.turn()).unwrap();
    assert!(text.starts_with("worker 0 has stood still"), "{text}");
}

#[test]
fn a_peer_that_left_too_early_or_fell_silent_is_named_where_all_wait() {
    let mut scene = Scene::new();
    let worker = scene.worker();
    progress::enter(Phase::WaitingForSums, 5);
    let mut gone = peer(1, Phase::Starting, 0);
    gone.has_left = true;
    let mut peers = [gone, peer(2, Phase::WaitingForSums, 5)];
    let (second, text) = scene.after(30, &mut peers, |_| worker.turn()).unwrap();
    assert!(second == 11 && text.starts_with("worker 1 of process 1 "), "{second}: {text}");
    let mut scene = Scene::new();
    let worker = scene.worker();
    progress::enter(Phase::WaitingForSums, 5);
    let mut silent = peer(1, Phase::WaitingForSums, 6);
    silent.heard = scene.now;
    let (_, text) = scene.after(30, &mut [silent], |_| worker.turn()).unwrap();
    assert!(text.starts_with("worker 1 of process 1 "), "{text}");
    // It fell silent in a phase that is given longer.
    let mut scene = Scene::new();
    let worker = scene.worker();
    progress::enter(Phase::WaitingForSums, 5);
    let mut silent = peer(1, Phase::PreparingDevice, 1);
    silent.heard = scene.now;
    let (second, text) = scene.after(30, &mut [silent], |_| worker.turn()).unwrap();
    assert!(second == 12 && text.starts_with("worker 1 of process 1 "), "{second}: {text}");
}

#[test]
fn a_process_that_was_stopped_as_a_whole_accuses_nothing_when_it_wakes() {
    let mut scene = Scene::new();
    let worker = scene.worker();
    progress::enter(Phase::ForwardBackward, 5);
    let peers = &mut [peer(1, Phase::ForwardBackward, 5)];
    for _ in 0..10 {
        assert_eq!(scene.after(8, peers, |_| worker.turn()), None);
        scene.now += 100 * DEADLINE;
    }
    assert_eq!(scene.after(9, peers, |_| worker.turn()), None);
    assert!(scene.after(9, peers, |_| worker.turn()).is_some());
}

#[test]
fn a_process_whose_threads_have_ended_still_waits_for_its_peers() {
    let mut scene = Scene::new();
    let worker = scene.worker();
    progress::enter(Phase::WaitingForEnd, 9);
    drop(worker);
    let peers = &mut [peer(1, Phase::WaitingForSums, 8)];
    let (_, text) = scene.after(30, peers, |_| ()).unwrap();
    assert!(text.starts_with("worker 1 of process 1 "), "{text}");
    let mut done = Scene::new();
    assert_eq!(done.after(30, &mut [], |_| ()), None, "there is nothing to wait for");
}
