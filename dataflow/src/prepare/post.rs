//! Messages between the threads of processes, through a timely dataflow.
//!
//! ```text
//! threads -> outgoing -> [Post] --exchange by destination--> [Deliver] -> inbox of this process, by origin -> threads
//! ```
//!
//! Timely has no bound for data on its way, so messages take credit: between two processes [`WINDOW_BYTES`] may be sent that
//! were not received. A message is received when a thread has taken it; its bytes come back as credit, by the same dataflow.
//! Neither operator ever waits. The dataflow ends when all processes have closed their end of it.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use tidemill_streaming_data::prepare::{Parted, Peers};
use timely::container::CapacityContainerBuilder;
use timely::dataflow::Scope;
use timely::dataflow::operators::Operator;
use timely::dataflow::operators::generic::operator::source;
use timely::scheduling::SyncActivator;

use super::parcel::{Kind, Parcel, by_destination};
use crate::cluster::{Abort, ClusterError};

/// Bytes that may be on their way from one process to another; a larger message is on its way alone.
pub(super) const WINDOW_BYTES: u64 = 4 << 20;

/// The most of a message that goes in one piece: well below the pieces of memory that timely sends.
const PARCEL_BYTES: usize = 256 << 10;

/// Bytes of the window that a message takes beside its own bytes.
pub(super) const MESSAGE_BYTES: u64 = 64;

/// See the [module](self).
pub(super) struct Post {
    process: usize,
    processes: usize,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    /// Wakes the operator that sends.
    sender: OnceLock<SyncActivator>,
}

#[derive(Default)]
struct State {
    outgoing: Vec<Parcel>,
    /// For each process the bytes that were sent to it and not taken there.
    in_flight: Vec<u64>,
    /// For each process the bytes of its next message that have arrived.
    arriving: Vec<Vec<u8>>,
    /// For each process its messages that were not taken yet.
    inbox: Vec<VecDeque<Vec<u8>>>,
    /// This process sends nothing more.
    is_closed: bool,
    /// The run was ended.
    is_over: bool,
}

impl Post {
    /// The post of a process, which is over when `abort` is.
    pub(super) fn new(process: usize, processes: usize, abort: &Abort) -> Post {
        let shared = Arc::<Shared>::default();
        {
            let mut state = shared.lock();
            state.in_flight.resize(processes, 0);
            state.arriving.resize(processes, Vec::new());
            state.inbox.resize(processes, VecDeque::new());
        }
        let over = Arc::clone(&shared);
        abort.on_abort(move || {
            over.lock().is_over = true;
            over.changed.notify_all();
        });
        Post { process, processes, shared }
    }

    /// Puts the operators into a dataflow.
    pub(super) fn install(&self, scope: Scope<'_, u64>, abort: &Abort) {
        let shared = Arc::clone(&self.shared);
        let parcels = source::<_, CapacityContainerBuilder<Parcel>, _, _>(
            scope,
            "Post",
            move |capability, info| {
                let activator = scope.worker().sync_activator_for(info.address.to_vec());
                let _ = shared.sender.set(activator);
                let mut capability = Some(capability);
                move |output| {
                    let (outgoing, is_closed) = shared.take_outgoing();
                    if let Some(capability) = &capability {
                        for mut parcel in outgoing {
                            output.session(capability).give_container(&mut parcel);
                        }
                    }
                    if is_closed {
                        capability = None;
                    }
                }
            },
        );
        let (shared, process, abort) = (Arc::clone(&self.shared), self.process, abort.clone());
        parcels.sink(by_destination(), "Deliver", move |(input, _frontier)| {
            input.for_each(|_time, parcel| {
                if let Err(wrong) = shared.deliver(std::mem::take(parcel), process) {
                    abort.abort(wrong);
                }
            });
        });
    }

    /// This process sends nothing more.
    pub(super) fn close(&self) {
        self.shared.lock().is_closed = true;
        self.shared.wake_sender();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake_sender(&self) {
        if let Some(sender) = self.sender.get() {
            // A worker that is gone sends nothing.
            let _ = sender.activate();
        }
    }

    fn take_outgoing(&self) -> (Vec<Parcel>, bool) {
        let mut state = self.lock();
        (std::mem::take(&mut state.outgoing), state.is_closed)
    }

    fn deliver(&self, parcel: Parcel, process: usize) -> Result<(), ClusterError> {
        let mut state = self.lock();
        let from = parcel.from as usize;
        if parcel.to as usize != process || from >= state.inbox.len() {
            return Err(malformed());
        }
        match parcel.kind {
            Kind::Part => state.arriving[from].extend_from_slice(&parcel.bytes),
            Kind::Last => {
                let mut message = std::mem::take(&mut state.arriving[from]);
                match message.is_empty() {
                    true => message = parcel.bytes,
                    false => message.extend_from_slice(&parcel.bytes),
                }
                state.inbox[from].push_back(message);
                self.changed.notify_all();
            }
            Kind::Credit => {
                let bytes = parcel.credited().ok_or_else(malformed)?;
                state.in_flight[from] = state.in_flight[from].saturating_sub(bytes);
                self.changed.notify_all();
            }
            Kind::Empty => {}
            Kind::Malformed => return Err(malformed()),
        }
        Ok(())
    }
}

fn malformed() -> ClusterError {
    ClusterError::Workers { message: "a parcel that was changed on its way".to_owned() }
}

/// Bytes of the window that a message takes.
fn cost(message: &[u8]) -> u64 {
    message.len() as u64 + MESSAGE_BYTES
}

impl Peers for Post {
    fn process(&self) -> usize {
        self.process
    }

    fn processes(&self) -> usize {
        self.processes
    }

    fn send(
        &self,
        to: usize,
        message: Vec<u8>,
        patience: Duration,
    ) -> Result<Option<Vec<u8>>, Parted> {
        let cost = cost(&message);
        let is_full = |state: &mut State| {
            let in_flight = state.in_flight[to];
            !state.is_over && in_flight > 0 && in_flight + cost > WINDOW_BYTES
        };
        let waited = self.shared.changed.wait_timeout_while(self.shared.lock(), patience, is_full);
        let (mut state, waited) = waited.unwrap_or_else(PoisonError::into_inner);
        if state.is_over {
            return Err(Parted);
        }
        if waited.timed_out() {
            return Ok(Some(message));
        }
        state.in_flight[to] += cost;
        let (to, from) = (to as u32, self.process as u32);
        if message.len() <= PARCEL_BYTES {
            state.outgoing.push(Parcel { kind: Kind::Last, to, from, bytes: message });
        } else {
            let parts = message.len().div_ceil(PARCEL_BYTES);
            for (at, bytes) in message.chunks(PARCEL_BYTES).enumerate() {
                let kind = if at + 1 == parts { Kind::Last } else { Kind::Part };
                state.outgoing.push(Parcel { kind, to, from, bytes: bytes.to_vec() });
            }
        }
        drop(state);
        self.shared.wake_sender();
        Ok(None)
    }

    fn receive(
        &self,
        from: &[usize],
        patience: Duration,
    ) -> Result<Option<(usize, Vec<u8>)>, Parted> {
        let has_none = |state: &mut State| {
            !state.is_over && from.iter().all(|&process| state.inbox[process].is_empty())
        };
        let waited = self.shared.changed.wait_timeout_while(self.shared.lock(), patience, has_none);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if state.is_over {
            return Err(Parted);
        }
        let received = from.iter().find_map(|&process| {
            let message = state.inbox[process].pop_front()?;
            Some((process, message))
        });
        if let Some((process, message)) = &received {
            let credit = Parcel::credit(*process, self.process, cost(message));
            state.outgoing.push(credit);
            drop(state);
            self.shared.wake_sender();
        }
        Ok(received)
    }
}
