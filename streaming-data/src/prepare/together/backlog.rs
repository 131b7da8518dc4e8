//! Messages that wait for their turn: in memory up to a bound, and beyond that in a file without a name.

use std::{
    collections::VecDeque,
    fs::File,
    io::{self, Read, Seek, SeekFrom, Write},
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use crate::prepare::PrepareError;

/// Bytes that wait in memory.
const MEMORY_BYTES: usize = 32 << 20;

/// First in, first out; one thread puts in and one takes out.
#[derive(Debug)]
pub(super) struct Backlog {
    state: Mutex<State>,
    changed: Condvar,
    bound: usize,
}

#[derive(Debug, Default)]
struct State {
    /// The items before all those in the file.
    memory: VecDeque<Vec<u8>>,
    memory_bytes: usize,
    file: Option<Spill>,
    has_ended: bool,
}

#[derive(Debug)]
struct Spill {
    file: File,
    lengths: VecDeque<usize>,
    read_at: u64,
    written_to: u64,
}

/// The items taken out.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Popped {
    Message(Vec<u8>),
    /// Nothing came in time.
    Nothing,
    /// Nothing more will come.
    End,
}

impl Backlog {
    pub(super) fn new() -> Backlog {
        Backlog::with_bound(MEMORY_BYTES)
    }

    fn with_bound(bound: usize) -> Backlog {
        Backlog { state: Mutex::default(), changed: Condvar::new(), bound }
    }

    /// Puts a message in; it never waits.
    ///
    /// # Errors
    /// Errors of the temporary file.
    pub(super) fn push(&self, message: Vec<u8>) -> Result<(), PrepareError> {
        let mut state = self.lock();
        let is_on_disk = state.file.as_ref().is_some_and(|spill| !spill.lengths.is_empty());
        if is_on_disk || state.memory_bytes + message.len() > self.bound && state.memory_bytes > 0 {
            let spill = match &mut state.file {
                Some(spill) => spill,
                none => none.insert(Spill::new().map_err(failed)?),
            };
            spill.write(&message).map_err(failed)?;
        } else {
            state.memory_bytes += message.len();
            state.memory.push_back(message);
        }
        drop(state);
        self.changed.notify_all();
        Ok(())
    }

    /// Nothing more will come.
    pub(super) fn end(&self) {
        self.lock().has_ended = true;
        self.changed.notify_all();
    }

    /// Takes the next message out.
    ///
    /// # Errors
    /// Errors of the temporary file.
    pub(super) fn pop(&self, patience: Duration) -> Result<Popped, PrepareError> {
        let has_nothing = |state: &mut State| {
            let is_on_disk = state.file.as_ref().is_some_and(|spill| !spill.lengths.is_empty());
            state.memory.is_empty() && !is_on_disk && !state.has_ended
        };
        let waited = self.changed.wait_timeout_while(self.lock(), patience, has_nothing);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if let Some(message) = state.memory.pop_front() {
            state.memory_bytes -= message.len();
            return Ok(Popped::Message(message));
        }
        let read = state.file.as_mut().map_or(Ok(None), Spill::read).map_err(failed)?;
        Ok(match read {
            Some(message) => Popped::Message(message),
            None if state.has_ended => Popped::End,
            None => Popped::Nothing,
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Spill {
    fn new() -> io::Result<Spill> {
        let file = tempfile::tempfile()?;
        Ok(Spill { file, lengths: VecDeque::new(), read_at: 0, written_to: 0 })
    }

    fn write(&mut self, message: &[u8]) -> io::Result<()> {
        self.file.seek(SeekFrom::Start(self.written_to))?;
        self.file.write_all(message)?;
        self.written_to += message.len() as u64;
        self.lengths.push_back(message.len());
        Ok(())
    }

    fn read(&mut self) -> io::Result<Option<Vec<u8>>> {
        let Some(length) = self.lengths.pop_front() else { return Ok(None) };
        let mut message = vec![0; length];
        self.file.seek(SeekFrom::Start(self.read_at))?;
        self.file.read_exact(&mut message)?;
        self.read_at += length as u64;
        if self.lengths.is_empty() {
            // All was read: its room is free again.
            self.file.set_len(0)?;
            (self.read_at, self.written_to) = (0, 0);
        }
        Ok(Some(message))
    }
}

fn failed(error: io::Error) -> PrepareError {
    PrepareError::io("keep what waits for process 0 in", std::env::temp_dir())(error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_come_in_order_whether_or_not_they_were_on_disk() {
        for bound in [0, 1, 50, 1 << 20] {
            let backlog = Backlog::with_bound(bound);
            let message = |number: usize| vec![number as u8; number * 31 % 100];
            let (mut put, mut taken) = (0, 0);
            // Now more is put in, now more taken out.
            for round in 0..40 {
                for _ in 0..round % 7 {
                    backlog.push(message(put)).unwrap();
                    put += 1;
                    assert!(backlog.lock().memory_bytes <= bound.max(99));
                }
                for _ in 0..(round + 3) % 7 {
                    let popped = backlog.pop(Duration::ZERO).unwrap();
                    if taken == put {
                        assert_eq!(popped, Popped::Nothing);
                    } else {
                        assert_eq!(popped, Popped::Message(message(taken)));
                        taken += 1;
                    }
                }
            }
            backlog.end();
            for number in taken..put {
                let popped = backlog.pop(Duration::ZERO).unwrap();
                assert_eq!(popped, Popped::Message(message(number)), "what is there comes first");
            }
            assert_eq!(backlog.pop(Duration::ZERO).unwrap(), Popped::End);
            assert_eq!(backlog.lock().memory_bytes, 0);
            let on_disk = |spill: &Spill| spill.file.metadata().unwrap().len();
            assert_eq!(backlog.lock().file.as_ref().map_or(0, on_disk), 0);
        }
    }
}
