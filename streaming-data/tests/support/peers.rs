//! Processes that are threads of this one, and what carries messages between them.

#![allow(dead_code, reason = "each test program uses its part of it")]

use std::{
    collections::VecDeque,
    sync::{Condvar, Mutex, MutexGuard},
    time::Duration,
};

use tidemill_streaming_data::prepare::{Parted, Peers, PrepareError};

/// Where the processes are.
struct Room {
    processes: usize,
    /// Bytes that may be in flight between two of them.
    window: usize,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Messages in flight, indexed by sender and receiver.
    mail: Vec<VecDeque<Vec<u8>>>,
    messages: u64,
    bytes: u64,
    is_over: bool,
    first_error: Option<PrepareError>,
}

impl Room {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    fn between(&self, from: usize, to: usize) -> usize {
        from * self.processes + to
    }
}

struct Chair<'a> {
    room: &'a Room,
    process: usize,
}

impl Peers for Chair<'_> {
    fn process(&self) -> usize {
        self.process
    }

    fn processes(&self) -> usize {
        self.room.processes
    }

    fn send(
        &self,
        to: usize,
        message: Vec<u8>,
        patience: Duration,
    ) -> Result<Option<Vec<u8>>, Parted> {
        let between = self.room.between(self.process, to);
        let is_full = |state: &mut State| {
            let on_the_way: usize = state.mail[between].iter().map(Vec::len).sum();
            let is_first = state.mail[between].is_empty();
            !state.is_over && !is_first && on_the_way + message.len() > self.room.window
        };
        let waited = self.room.changed.wait_timeout_while(self.room.lock(), patience, is_full);
        let (mut state, waited) = waited.unwrap();
        if state.is_over {
            return Err(Parted);
        }
        if waited.timed_out() {
            return Ok(Some(message));
        }
        state.messages += 1;
        state.bytes += message.len() as u64;
        state.mail[between].push_back(message);
        self.room.changed.notify_all();
        Ok(None)
    }

    fn receive(
        &self,
        from: &[usize],
        patience: Duration,
    ) -> Result<Option<(usize, Vec<u8>)>, Parted> {
        let between = |&from: &usize| self.room.between(from, self.process);
        let has_none = |state: &mut State| {
            !state.is_over && from.iter().all(|from| state.mail[between(from)].is_empty())
        };
        let waited = self.room.changed.wait_timeout_while(self.room.lock(), patience, has_none);
        let (mut state, _) = waited.unwrap();
        if state.is_over {
            return Err(Parted);
        }
        let mut found = from.iter().map(|from| (*from, state.mail[between(from)].pop_front()));
        let found = found.find_map(|(from, message)| Some((from, message?)));
        self.room.changed.notify_all();
        Ok(found)
    }
}

/// The amount of messages that were sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sent {
    pub messages: u64,
    pub bytes: u64,
}

/// The result of process 0, where each of so many processes does `work`; the first error ends them all. Between two of them at
/// most `window` bytes are in flight.
pub fn in_processes<R: Send>(
    processes: usize,
    window: usize,
    work: impl Fn(&dyn Peers) -> Result<Option<R>, PrepareError> + Sync,
) -> Result<(R, Sent), PrepareError> {
    let room = Room { processes, window, state: Mutex::default(), changed: Condvar::new() };
    room.lock().mail.resize(processes * processes, VecDeque::new());
    let done = std::thread::scope(|scope| {
        let (room, work) = (&room, &work);
        let run = |process: usize| {
            move || {
                let done = work(&Chair { room, process });
                done.unwrap_or_else(|error| {
                    let mut state = room.lock();
                    state.is_over = true;
                    state.first_error.get_or_insert(error);
                    room.changed.notify_all();
                    None
                })
            }
        };
        let threads: Vec<_> = (0..processes).map(|process| scope.spawn(run(process))).collect();
        let done: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        done
    });
    let state = room.state.into_inner().unwrap();
    if let Some(error) = state.first_error {
        return Err(error);
    }
    assert!(state.mail.iter().all(VecDeque::is_empty), "messages without a receiver");
    assert!(done.iter().skip(1).all(Option::is_none), "process 0 alone reports");
    let sent = Sent { messages: state.messages, bytes: state.bytes };
    Ok((done.into_iter().next().flatten().expect("process 0 reports"), sent))
}
