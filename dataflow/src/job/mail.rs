//! Messages between workers before the graph of a run is built: a few records, each to the worker that it names.

use std::cell::RefCell;
use std::rc::Rc;

use timely::ExchangeData;
use timely::container::CapacityContainerBuilder;
use timely::dataflow::operators::{Operator, Probe};
use timely::dataflow::{InputHandle, ProbeHandle, Scope};

use crate::cluster::progress;
use crate::operators::addressed::Addressed;

/// Sends records to workers. Every worker has one, and closes it.
pub(super) type Sender<D> = InputHandle<u64, CapacityContainerBuilder<Vec<Addressed<D>>>>;

/// The messages that came to this worker.
pub(super) type Inbox<D> = Rc<RefCell<Vec<D>>>;

/// A way for records from every worker to every worker. All have arrived once the probe is done.
pub(super) fn mail<D: ExchangeData + Clone>(
    scope: Scope<'_, u64>,
    name: &str,
) -> (Sender<D>, Inbox<D>, ProbeHandle<u64>) {
    let (mut sender, inbox, probe) = (Sender::new(), Inbox::default(), ProbeHandle::new());
    let arrived = Rc::clone(&inbox);
    sender
        .to_stream(scope)
        .unary::<CapacityContainerBuilder<Vec<()>>, _, _, _>(
            Addressed::by_destination(),
            name,
            |_, _| {
                move |input, _output| {
                    input.for_each(|_time, records| {
                        progress::moved();
                        arrived.borrow_mut().extend(records.drain(..).map(Addressed::into_record));
                    });
                }
            },
        )
        .probe_with(&probe);
    (sender, inbox, probe)
}
