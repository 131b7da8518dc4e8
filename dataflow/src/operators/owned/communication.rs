//! The cost of communication in steps, kept until it is asked for.

use std::collections::VecDeque;

use tidemill_collective::communicator::{CommunicationCost, Communicator, Interval};
use tidemill_kernels::Backend;

use crate::operators::error::GraphError;
use crate::operators::job_thread::{Replies, Stopped};
use crate::operators::measure::{Communication, CommunicationReport};
use crate::operators::queue_trace::QueueTrace;
use crate::operators::span::{GatheredBlocks, Span, SpentTime};
use crate::operators::ticket::Ticket;

/// The cost of communication in a step.
struct OfStep<B: Backend> {
    cost: CommunicationCost<B>,
    /// Behind the step on the stream that computes.
    done: B::Event,
    blocks: GatheredBlocks<B>,
}

impl<B: Backend> OfStep<B> {
    /// The cost in figures; its sums are over, or nearly.
    fn measured(self, backend: &B) -> tidemill_kernels::Result<Communication> {
        let Self { cost: CommunicationCost { traffic, sums, gathers }, done, blocks } = self;
        let bytes_from_memory = traffic.from_memory + blocks.bytes;
        let mut time = blocks.time(backend)?;
        let sums = sums.into_iter().map(|interval| Span { interval, awaited: done.clone() });
        // The next step begins behind them.
        let gathers = gathers.into_iter().map(|interval| {
            let awaited = interval.from.clone();
            Span { interval, awaited }
        });
        sums.chain(gathers).try_for_each(|span| time.add(backend, &span))?;
        let SpentTime { milliseconds, exposed_milliseconds } = time;
        Ok(Communication {
            bytes_from_memory,
            bytes_from_processes: traffic.from_processes,
            bytes_from_hosts: traffic.from_hosts,
            milliseconds,
            exposed_milliseconds,
        })
    }
}

/// The costs of the steps that were not asked for, in order.
pub(super) struct CommunicationLedger<B: Backend> {
    steps: VecDeque<OfStep<B>>,
    /// `None` where nothing will ask.
    replies: Option<Replies<CommunicationReport>>,
}

impl<B: Backend> CommunicationLedger<B> {
    pub(super) fn new() -> Self {
        Self { steps: VecDeque::new(), replies: None }
    }

    /// Says where answers go.
    pub(super) fn answer_to(&mut self, replies: Replies<CommunicationReport>) {
        self.replies = Some(replies);
    }

    /// A step was computed and summed: behind `done`, with parameters gathered in `blocks`. The collectives go into `trace` too.
    pub(super) fn close(
        &mut self,
        (backend, trace): (&B, &mut QueueTrace<B>),
        communicator: &mut dyn Communicator<B>,
        (done, blocks): (B::Event, GatheredBlocks<B>),
    ) -> tidemill_kernels::Result<()> {
        let cost = communicator.take_cost();
        let mut note =
            |name, of: &[Interval<B>]| of.iter().try_for_each(|it| trace.note(backend, name, it));
        note("summing gradients", &cost.sums)?;
        note("gathering parameters", &cost.gathers)?;
        if self.replies.is_some() {
            self.steps.push_back(OfStep { cost, done, blocks });
        }
        Ok(())
    }

    /// Reports the cost of the oldest step that was not reported: the step of `ticket`.
    pub(super) fn measure(&mut self, backend: &B, ticket: Ticket) -> Result<(), Stopped> {
        let (what, missing) = ("what communication took", "its step");
        let asked = self.replies.as_ref().zip(self.steps.pop_front());
        let (replies, of_step) = asked.ok_or(GraphError::Order { what, missing })?;
        let communication = of_step.measured(backend)?;
        Ok(replies.send(CommunicationReport { step: ticket.step + 1, communication })?)
    }
}
