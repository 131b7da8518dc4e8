//! The timely operators that carry the chunks of a [`Host`](crate::communicator::Host) communicator between processes.
//!
//! A communicator is used by a thread that may wait; timely's workers must not. So the thread hands outgoing chunks to the
//! operators, which send them as credit allows and hand arrived chunks to the thread. Credit returns once an arrived chunk
//! was used.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, OnceLock};

use timely::container::CapacityContainerBuilder;
use timely::dataflow::channels::pact::{Exchange, Pipeline};
use timely::dataflow::operators::generic::OutputBuilder;
use timely::dataflow::operators::generic::builder_rc::OperatorBuilder;
use timely::dataflow::operators::{Capability, ConnectLoop, Feedback};
use timely::dataflow::{Stream, StreamVec};
use timely::progress::Antichain;
use timely::progress::operate::FrontierInterest;
use timely::scheduling::SyncActivator;

use crate::chunk::{Chunk, ChunkHeader, Part, by_destination};
use crate::credit::{Credit, CreditLedger, PacedQueue};
use crate::error::CollectiveError;

/// Wakes an operator, once it is built.
type Wake = Arc<OnceLock<SyncActivator>>;

fn wake(operator: &Wake) {
    // An operator that is not built yet looks for chunks when it starts; one that is gone needs no wake.
    if let Some(operator) = operator.get() {
        let _ = operator.activate();
    }
}

/// The end at which a communicator hands over outgoing chunks.
#[derive(Clone)]
pub(crate) struct Outgoing {
    chunks: Sender<Vec<Chunk>>,
    wake: Wake,
}

impl Outgoing {
    /// Hands over chunks; answers whether they will still be carried.
    pub(crate) fn send(&self, chunks: Vec<Chunk>) -> bool {
        let sent = self.chunks.send(chunks).is_ok();
        wake(&self.wake);
        sent
    }
}

/// The operators' ends of a communicator, for [`Carry::carry`].
pub struct Courier {
    lines: Vec<Line>,
    deliver: Box<Deliver>,
}

/// Takes arrived chunks.
type Deliver = dyn Fn(Result<Arrived, CollectiveError>) + Send;

/// Outgoing chunks that wait for the credit of one window.
struct Line {
    outgoing: Receiver<Vec<Chunk>>,
    wake: Wake,
}

/// The ends between a communicator and its operators, which `deliver` arrived chunks. Chunks of one of the `lines` do not wait for
/// the credit of another.
pub(crate) fn courier(
    lines: usize,
    deliver: impl Fn(Result<Arrived, CollectiveError>) + Send + 'static,
) -> (Vec<Outgoing>, Courier) {
    let line = |_| {
        let (chunks, outgoing) = mpsc::channel();
        let wake = Wake::default();
        (Outgoing { chunks, wake: Arc::clone(&wake) }, Line { outgoing, wake })
    };
    let (outgoing, lines) = (0..lines).map(line).unzip();
    (outgoing, Courier { lines, deliver: Box::new(deliver) })
}

/// A chunk of another process. Its sender gets credit back when its last reader has dropped it.
#[derive(Clone)]
pub(crate) struct Arrived {
    chunk: Chunk,
    _credit: Arc<Returning>,
}

impl Arrived {
    pub(crate) fn chunk(&self) -> &Chunk {
        &self.chunk
    }

    pub(crate) fn part(&self) -> Option<Part> {
        self.chunk.header().ok().map(|header| header.part)
    }
}

/// Gives credit back when it is dropped.
struct Returning {
    time: u64,
    credit: Credit,
    returned: Sender<(u64, Credit)>,
    wake: Wake,
}

impl Drop for Returning {
    fn drop(&mut self) {
        // Where the operators are gone, no sender needs the credit.
        let _ = self.returned.send((self.time, self.credit));
        wake(&self.wake);
    }
}

/// Carries chunks between processes.
pub trait Carry<'scope> {
    /// Carries the chunks of communicators to their destinations.
    ///
    /// # Contract
    /// - Input: any stream whose frontier stays at a time for as long as this worker's communicator may send at it; its records
    ///   are dropped. The communicators of all workers have to be carried, in the same dataflow.
    /// - Memory: at most `window_bytes` of chunks in flight from each worker, and as many that it passes on for others; chunks
    ///   that wait for credit are held here.
    /// - Progress: credit returns once an arrived chunk was used. All communicators use and send chunks in one common order, so
    ///   that a chunk that one waits for is never behind a later one: any window makes progress. Chunks that are passed on
    ///   leave after they have come, which is later than a worker's own: they have a line, and a window, of their own.
    /// - Failure: a message that is no chunk, or is another worker's, is an error of the communicator.
    ///
    /// # Example
    /// Two workers, each a host of its own, update half of the parameters and gather the other half:
    ///
    /// ```
    /// use std::num::NonZeroUsize;
    /// use std::sync::{Arc, Mutex};
    /// use std::time::Duration;
    ///
    /// use tidemill_collective::communicator::{
    ///     Communicator, CommunicatorError, Cut, Holders, Host, Key, Topology, Values, ValuesMut,
    /// };
    /// use tidemill_collective::{Carry, DEFAULT_WINDOW_BYTES, LaneSchedule};
    /// use tidemill_kernels::{Cpu, Runtime, Slice, SliceMut};
    /// use timely::container::CapacityContainerBuilder;
    /// use timely::dataflow::InputHandle;
    ///
    /// let cpu = Cpu::new(NonZeroUsize::MIN)?;
    /// let topology = Topology::of_groups(vec![0..1, 1..2])?;
    /// let schedule = Arc::new(LaneSchedule::at_once(2, 2)?);
    /// let mut ends = Vec::new();
    /// for host in 0..2 {
    ///     ends.extend(Host::group(&[&cpu], &topology, host, &schedule, Holders::EACH)?.pop());
    /// }
    /// let ends = Mutex::new(ends.into_iter().map(Some).collect::<Vec<_>>());
    /// let workers = timely::execute(timely::Config::process(2), move |worker| {
    ///     let rank = worker.index();
    ///     let mut end = ends.lock().unwrap()[rank].take().expect("one for each worker");
    ///     let courier = end.courier().expect("chunks go through timely");
    ///     let mut until = InputHandle::<u64, CapacityContainerBuilder<Vec<()>>>::new();
    ///     worker.dataflow::<u64, _, _>(|scope| {
    ///         until.to_stream(scope).carry(courier, DEFAULT_WINDOW_BYTES);
    ///     });
    ///     // A communicator waits, which a worker must not: it has a thread.
    ///     let cpu = cpu.clone();
    ///     let gathered = std::thread::spawn(move || -> Result<Vec<f32>, CommunicatorError> {
    ///         let stream = &mut cpu.device_stream()?;
    ///         let (key, cut) = (Key::new(0, 0), Cut::new(6, 2, 1, 0));
    ///         let own = cut.of_rank(rank);
    ///         let mut parameters = cpu.allocate::<f32>(stream, 6)?;
    ///         parameters[own.clone()].fill(1.0 + rank as f32);
    ///         let updated = Slice::new(&parameters, own.start, own.len())?;
    ///         end.updated(&cpu, stream, key, &cut, Values::Fp32(updated))?;
    ///         let all = SliceMut::all(&mut parameters);
    ///         end.gather(&cpu, stream, key, &cut, ValuesMut::Fp32(all))?;
    ///         Ok(parameters.to_vec())
    ///     });
    ///     while !gathered.is_finished() {
    ///         worker.step_or_park(Some(Duration::from_millis(1)));
    ///     }
    ///     // Nothing more is sent from here; what others wait for is still carried.
    ///     drop(until);
    ///     while worker.step_or_park(None) {}
    ///     gathered.join().expect("no panic")
    /// })?;
    /// for parameters in workers.join() {
    ///     assert_eq!(parameters??, [1.0, 1.0, 1.0, 2.0, 2.0, 2.0]);
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    fn carry(self, courier: Courier, window_bytes: usize);
}

impl<'scope, D: Clone + 'static> Carry<'scope> for StreamVec<'scope, u64, D> {
    fn carry(self, courier: Courier, window_bytes: usize) {
        let Courier { lines, deliver } = courier;
        let deliver: Rc<Deliver> = deliver.into();
        for Line { outgoing, wake } in lines {
            let (credit_loop, credits) = self.scope().feedback::<Vec<Credit>>(1);
            let chunks = send(self.clone(), credits, outgoing, &wake, window_bytes);
            receive(chunks, Rc::clone(&deliver)).connect_loop(credit_loop);
        }
    }
}

/// Sends the outgoing chunks of a communicator, as credit allows.
fn send<'scope, D: Clone + 'static>(
    until: StreamVec<'scope, u64, D>,
    credits: StreamVec<'scope, u64, Credit>,
    outgoing: Receiver<Vec<Chunk>>,
    wake: &Wake,
    window_bytes: usize,
) -> Stream<'scope, u64, Chunk> {
    let scope = until.scope();
    let mut builder = OperatorBuilder::new("Send".to_owned(), scope);
    let (output, sent) = builder.new_output::<Chunk>();
    let mut output = OutputBuilder::<_, CapacityContainerBuilder<Chunk>>::from(output);
    let no_path: [(usize, Antichain<u64>); 0] = [];
    let mut until = builder.new_input_connection(until, Pipeline, no_path.clone());
    let by_worker = Exchange::new(|credit: &Credit| u64::from(credit.to));
    let mut credits = builder.new_input_connection(credits, by_worker, no_path);
    builder.set_notify_for(1, FrontierInterest::Never);
    let address = builder.operator_info().address.to_vec();
    // Set once: a courier is carried by one operator.
    let _ = wake.set(scope.worker().sync_activator_for(address));
    builder.build(move |mut capabilities| {
        let mut held = capabilities.pop();
        let mut queue = PacedQueue::<(Capability<u64>, Chunk)>::new(window_bytes);
        move |frontiers| {
            until.for_each(|_time, _records| ());
            credits.for_each(|_time, returned| {
                returned.drain(..).for_each(|credit| queue.give_back(credit.bytes));
            });
            // Before the frontier is read: chunks that were handed over before it moved leave at the time before.
            if let Some(held) = &held {
                for chunk in outgoing.try_iter().flatten() {
                    queue.push(chunk.payload_bytes(), (held.clone(), chunk));
                }
            }
            match (frontiers[0].frontier().first(), &mut held) {
                (Some(time), Some(held)) if time > held.time() => held.downgrade(time),
                (Some(_), _) => {}
                (None, _) => held = None,
            }
            let mut output = output.activate();
            while let Some((capability, mut chunk)) = queue.pop() {
                output.session(&capability).give_container(&mut chunk);
            }
        }
    });
    sent
}

/// Delivers arrived chunks, and returns credit once they were used.
fn receive<'scope>(
    chunks: Stream<'scope, u64, Chunk>,
    deliver: Rc<Deliver>,
) -> StreamVec<'scope, u64, Credit> {
    let scope = chunks.scope();
    let worker = scope.index();
    let mut builder = OperatorBuilder::new("Receive".to_owned(), scope);
    let (output, credits) = builder.new_output::<Vec<Credit>>();
    let mut output = OutputBuilder::<_, CapacityContainerBuilder<Vec<Credit>>>::from(output);
    let mut chunks = builder.new_input(chunks, by_destination());
    builder.set_notify_for(0, FrontierInterest::Never);
    let operator = Wake::default();
    let address = builder.operator_info().address.to_vec();
    let _ = operator.set(scope.worker().sync_activator_for(address));
    let (sender, returned) = mpsc::channel::<(u64, Credit)>();
    builder.build(move |capabilities| {
        drop(capabilities);
        // For each time the capability to return credit, and the number of chunks that are still in use.
        let mut used: BTreeMap<u64, (Capability<u64>, usize)> = BTreeMap::new();
        move |_frontiers| {
            chunks.for_each(|time, chunk| {
                let chunk = std::mem::take(chunk);
                let held = used.entry(*time.time()).or_insert_with(|| (time.retain(0), 0));
                held.1 += 1;
                let source = chunk.header().map(|header| header.source).unwrap_or_default();
                let credit = Credit { to: source, bytes: chunk.payload_bytes() as u64 };
                let (returned, wake) = (sender.clone(), Arc::clone(&operator));
                let returning = Returning { time: *time.time(), credit, returned, wake };
                let header: Result<ChunkHeader, _> = chunk.header_for(worker).copied();
                deliver(header.map(|_| Arrived { chunk, _credit: Arc::new(returning) }));
            });
            let mut ledgers: BTreeMap<u64, (CreditLedger, usize)> = BTreeMap::new();
            for (time, Credit { to, bytes }) in returned.try_iter() {
                let (ledger, chunks) = ledgers.entry(time).or_default();
                ledger.consumed(to, bytes as usize);
                *chunks += 1;
            }
            let mut output = output.activate();
            for (time, (mut ledger, chunks)) in ledgers {
                let Some((held, left)) = used.get_mut(&time) else { continue };
                output.session(&*held).give_iterator(ledger.settle());
                *left -= chunks;
                if *left == 0 {
                    used.remove(&time);
                }
            }
        }
    });
    credits
}
