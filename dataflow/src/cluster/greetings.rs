//! Connections of peers that have not introduced themselves yet, each on a thread, and never too many.
//!
//! Callers that have not proved that they know the cluster's secret are strangers. There are at
//! most [`STRANGERS`] of them at a time: the oldest is hung up on for each that comes beyond that.
//! A process of the cluster says its first words at once and calls again where it is hung up on,
//! so that any number of idle strangers costs it a moment at most.

use std::collections::BTreeMap;
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// How many strangers may be connected at a time.
const STRANGERS: usize = 64;
/// How long to wait for a change that only another thread of this process or of another can make.
const PATIENCE: Duration = Duration::from_millis(100);

#[derive(Default)]
pub(super) struct Greetings {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    closed: bool,
    next: u64,
    /// Threads that greet strangers, those included that have been hung up on.
    threads: usize,
    strangers: BTreeMap<u64, Arc<TcpStream>>,
    /// Connections of this process's own, and of those that know the secret.
    friends: BTreeMap<u64, Arc<TcpStream>>,
}

/// A greeting that goes on; it is over when this is dropped.
pub(super) struct Greeting {
    greetings: Arc<Greetings>,
    id: u64,
    counted: bool,
}

impl Greetings {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Greets a caller on a thread of its own.
    pub(super) fn greet(
        self: &Arc<Self>,
        stream: TcpStream,
        greet: impl FnOnce(Arc<TcpStream>, Greeting) + Send + 'static,
    ) {
        let stream = Arc::new(stream);
        let mut state = self.lock();
        while state.strangers.len() >= STRANGERS {
            hang_up_on_the_oldest(&mut state);
        }
        // The threads of closed connections end soon, by themselves.
        while state.threads >= 2 * STRANGERS && !state.closed {
            let waited = self.changed.wait_timeout(state, PATIENCE);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        if state.closed {
            return;
        }
        state.next += 1;
        state.threads += 1;
        let id = state.next;
        state.strangers.insert(id, Arc::clone(&stream));
        drop(state);
        let greeting = Greeting { greetings: Arc::clone(self), id, counted: true };
        let spawned = std::thread::Builder::new()
            .name("cluster:greet".to_string())
            .spawn(move || greet(stream, greeting));
        if let Err(error) = spawned {
            // A process of the cluster calls again; there may be room for its thread then.
            tracing::debug!(%error, "no thread for a caller");
        }
    }

    /// Holds a connection that this process has made, so that [`Greetings::close`] cuts it. None
    /// if they are closed.
    pub(super) fn hold(self: &Arc<Self>, stream: &Arc<TcpStream>) -> Option<Greeting> {
        let mut state = self.lock();
        if state.closed {
            return None;
        }
        state.next += 1;
        let id = state.next;
        state.friends.insert(id, Arc::clone(stream));
        Some(Greeting { greetings: Arc::clone(self), id, counted: false })
    }

    /// Frees the place of the oldest stranger, and waits a moment for it, or for anything else to
    /// end: the system has no descriptor or no memory left for another connection.
    pub(super) fn make_room(&self) {
        let mut state = self.lock();
        hang_up_on_the_oldest(&mut state);
        if !state.closed {
            drop(self.changed.wait_timeout(state, PATIENCE));
        }
    }

    /// Cuts every connection that is still being greeted, and takes no others.
    pub(super) fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        for stream in state.strangers.values().chain(state.friends.values()) {
            let _ = stream.shutdown(Shutdown::Both);
        }
        self.changed.notify_all();
    }
}

/// Its thread notices, and ends.
fn hang_up_on_the_oldest(state: &mut State) {
    if let Some((_, stream)) = state.strangers.pop_first() {
        let _ = stream.shutdown(Shutdown::Both);
    }
}

impl Greeting {
    /// The caller knows the secret: it is not hung up on for strangers any more.
    pub(super) fn known(&mut self) {
        let mut state = self.greetings.lock();
        if let Some(stream) = state.strangers.remove(&self.id) {
            state.friends.insert(self.id, stream);
        }
        state.threads -= usize::from(std::mem::take(&mut self.counted));
        self.greetings.changed.notify_all();
    }
}

impl Drop for Greeting {
    fn drop(&mut self) {
        let mut state = self.greetings.lock();
        state.strangers.remove(&self.id);
        state.friends.remove(&self.id);
        state.threads -= usize::from(self.counted);
        self.greetings.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::net::TcpListener;
    use std::sync::mpsc;

    #[test]
    fn the_oldest_stranger_goes_for_the_newest_and_friends_stay() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let greetings = Arc::<Greetings>::default();
        let (ends, ended) = mpsc::channel();
        let mut callers = Vec::new();
        for caller in 0..STRANGERS + 3 {
            let ends = ends.clone();
            callers.push(TcpStream::connect(listener.local_addr().unwrap()).unwrap());
            let stream = listener.accept().unwrap().0;
            let (ready, known) = mpsc::channel();
            greetings.greet(stream, move |stream, mut greeting| {
                if caller == 0 {
                    greeting.known();
                }
                ready.send(()).unwrap();
                let _ = (&*stream).read(&mut [0]);
                ends.send(caller).unwrap();
            });
            known.recv().unwrap();
        }
        // The first has become a friend: two strangers had to go.
        let gone = || ended.recv_timeout(50 * PATIENCE).expect("a stranger is hung up on");
        let mut gone = [gone(), gone()];
        gone.sort_unstable();
        assert_eq!(gone, [1, 2]);
        assert!(ended.try_recv().is_err());
        assert_eq!(greetings.lock().strangers.len(), STRANGERS);
        greetings.close();
        assert_eq!(ended.iter().take(STRANGERS + 1).count(), STRANGERS + 1);
    }
}
