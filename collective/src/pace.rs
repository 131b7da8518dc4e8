//! The timely operator that sends chunks as credit allows.

use timely::container::CapacityContainerBuilder;
use timely::dataflow::channels::pact::{Exchange, Pipeline};
use timely::dataflow::operators::Capability;
use timely::dataflow::operators::generic::OutputBuilder;
use timely::dataflow::operators::generic::builder_rc::OperatorBuilder;
use timely::dataflow::{Stream, StreamVec};
use timely::progress::Antichain;
use timely::progress::operate::FrontierInterest;

use crate::chunk::Chunk;
use crate::credit::{Credit, PacedQueue};

/// Holds chunks back until there is credit for them.
pub trait Pace<'scope> {
    /// Passes the chunks on, at most `window_bytes` of them between this worker and those that consume them.
    ///
    /// # Contract
    /// - Input: chunks of this worker. Whoever consumes one, on whichever worker, gives credit for its
    ///   [`payload_bytes`](Chunk::payload_bytes) back to the worker that its header calls source; `credits`
    ///   brings it here (it is exchanged by [`Credit::to`], usually out of a `feedback`).
    /// - Output: the same chunks at the same times, in order. It is not exchanged yet: the consumer's
    ///   input does that with [`by_destination`](crate::by_destination).
    /// - Memory: what the input gives and credit does not yet allow waits here.
    /// - Progress: `credits` has no path to the output, so it closes no cycle. Any window makes progress, as long as
    ///   consuming a chunk waits for nobody.
    #[must_use]
    fn pace(self, credits: StreamVec<'scope, u64, Credit>, window_bytes: usize) -> Self;
}

impl<'scope> Pace<'scope> for Stream<'scope, u64, Chunk> {
    fn pace(self, credits: StreamVec<'scope, u64, Credit>, window_bytes: usize) -> Self {
        let mut builder = OperatorBuilder::new("Pace".to_owned(), self.scope());
        let (output, paced) = builder.new_output::<Chunk>();
        let mut output = OutputBuilder::<_, CapacityContainerBuilder<Chunk>>::from(output);
        let mut chunks = builder.new_input(self, Pipeline);
        let by_worker = Exchange::new(|credit: &Credit| u64::from(credit.to));
        let no_path = [(0, Antichain::new())];
        let mut credits = builder.new_input_connection(credits, by_worker, no_path);
        builder.set_notify_for(0, FrontierInterest::Never);
        builder.set_notify_for(1, FrontierInterest::Never);
        builder.build(move |_capabilities| {
            let mut queue = PacedQueue::<(Capability<u64>, Chunk)>::new(window_bytes);
            move |_frontiers| {
                credits.for_each(|_time, returned| {
                    returned.drain(..).for_each(|credit| queue.give_back(credit.bytes));
                });
                chunks.for_each(|time, chunk| {
                    let chunk = std::mem::take(chunk);
                    queue.push(chunk.payload_bytes(), (time.retain(0), chunk));
                });
                let mut output = output.activate();
                while let Some((capability, mut chunk)) = queue.pop() {
                    output.session(&capability).give_container(&mut chunk);
                }
            }
        });
        paced
    }
}
