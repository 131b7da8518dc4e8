//! The decisions of worker 0's process about a run's data, told to the other processes.

use std::sync::Arc;

use timely::container::CapacityContainerBuilder;
use timely::dataflow::Scope;
use timely::dataflow::channels::pact::Exchange;
use timely::dataflow::operators::Operator;
use timely::dataflow::operators::generic::source;

use super::data_versions::{DataVersions, Decision};
use crate::cluster::progress;
use crate::operators::wake;

/// Tells every process the decisions of worker 0's [`DataVersions`], for as long as there may be more. To be called by every worker
/// of `scope`; each process has `threads`.
///
/// # Contract
/// - Each decision reaches the first worker of each process, in order.
/// - The dataflow ends when the samples of worker 0 do.
/// - It never blocks: decisions are made on a thread, which wakes it.
pub(super) fn share_decisions(
    scope: Scope<'_, u64>,
    data_versions: &Arc<DataVersions>,
    threads: usize,
) {
    type AddressedDecision = (u64, Decision);
    let first_workers = (0..scope.peers()).step_by(threads.max(1)).map(|worker| worker as u64);
    let first_workers: Vec<u64> = first_workers.collect();
    let is_source = scope.index() == 0;
    let decided = Arc::clone(data_versions);
    let told = source::<_, CapacityContainerBuilder<Vec<AddressedDecision>>, _, _>(
        scope,
        "Decide",
        |capability, operator| {
            let mut held = is_source.then_some(capability);
            if is_source {
                decided.wake_for_decisions(wake(scope, &operator));
            }
            move |output| {
                while let Some(capability) = &held {
                    match decided.next_decision() {
                        Some(Some(decision)) => {
                            let mut session = output.session(capability);
                            first_workers
                                .iter()
                                .for_each(|&to| session.give((to, decision.clone())));
                        }
                        Some(None) => break,
                        None => held = None,
                    }
                }
            }
        },
    );
    let data_versions = Arc::clone(data_versions);
    told.unary::<CapacityContainerBuilder<Vec<()>>, _, _, _>(
        Exchange::new(|(to, _): &AddressedDecision| *to),
        "Decided",
        |_, _| {
            move |input, _output| {
                input.for_each(|_time, told| {
                    progress::moved();
                    told.drain(..).for_each(|(_, decision)| data_versions.decide(decision));
                });
            }
        },
    );
}
