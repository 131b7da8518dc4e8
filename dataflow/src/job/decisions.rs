//! The decisions of worker 0's process about a run's data, told to the other processes.

use std::sync::Arc;

use timely::container::CapacityContainerBuilder;
use timely::dataflow::Scope;
use timely::dataflow::operators::Operator;
use timely::dataflow::operators::generic::source;

use super::data_versions::{DataVersions, Decision};
use crate::cluster::progress;
use crate::operators::addressed::Addressed;
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
    let first_workers: Vec<usize> = (0..scope.peers()).step_by(threads.max(1)).collect();
    let is_source = scope.index() == 0;
    let decided = Arc::clone(data_versions);
    let told = source::<_, CapacityContainerBuilder<Vec<Addressed<Decision>>>, _, _>(
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
                            for &worker in &first_workers {
                                session.give(Addressed::new(worker, decision.clone()));
                            }
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
        Addressed::by_destination(),
        "Decided",
        |_, _| {
            move |input, _output| {
                input.for_each(|_time, told| {
                    progress::moved();
                    let decisions = told.drain(..).map(Addressed::into_record);
                    decisions.for_each(|decision| data_versions.decide(decision));
                });
            }
        },
    );
}
