//! The parameters that the device thread computes with, for as long as it is lent them.

use tidemill_kernels::Backend;
use tidemill_model::{Device, Layout, ParameterSource};

use super::gathered::GatheredParameters;
use crate::cluster::Failure;
use crate::operators::gather_plan::GatherPlan;
use crate::operators::job_thread::Stopped;
use crate::operators::lending::Borrower;
use crate::operators::plan::TrainingPlan;
use crate::operators::span::GatheredBlocks;

/// A device stream, and the parameters that it computes with.
pub(super) struct Replica<B: Backend> {
    pub(super) stream: B::DeviceStream,
    pub(super) borrower: Borrower<B>,
    /// Where the parameters of blocks are gathered, if they are shared out.
    gathered: Option<GatheredParameters<B>>,
}

/// The parameters that are lent.
pub(super) struct Borrowed<'a, B: Backend> {
    pub(super) source: Box<dyn ParameterSource<B> + 'a>,
    /// May read them.
    pub(super) stream: &'a mut B::DeviceStream,
    /// Sums that may be used again.
    pub(super) sums: Option<B::Buffer<f32>>,
}

impl<B: Backend> Replica<B> {
    /// The replica of one of `workers` workers.
    pub(super) fn new(
        backend: &B,
        mut stream: B::DeviceStream,
        borrower: Borrower<B>,
        (layout, plan, workers): (&Layout, &TrainingPlan, usize),
    ) -> Result<Self, Failure> {
        let mut gathered = None;
        if borrower.is_of_parts() {
            let mut device = Device { backend, stream: &mut stream };
            let holders = borrower.holders();
            let held = |member| plan.held::<B>(layout, holders, (member, workers));
            let members: Vec<_> = (0..holders.members()).map(held).collect();
            let of_blocks = GatherPlan::new(layout, &members);
            gathered = Some(GatheredParameters::new(&mut device, of_blocks, borrower.member())?);
        }
        Ok(Self { stream, borrower, gathered })
    }

    /// The parameters as they are now. Waits for the optimizer threads where they have not lent them yet.
    pub(super) fn borrow<'a>(
        &'a mut self,
        backend: &B,
        layout: &'a Layout,
    ) -> Result<Borrowed<'a, B>, Stopped> {
        let Self { stream, borrower, gathered } = self;
        if let Some(gathered) = gathered.as_mut().filter(|_| !borrower.has_borrowed()) {
            gathered.forget();
        }
        let copies = gathered.as_mut().map(GatheredParameters::stream);
        let (lent, sums) = borrower.borrow(backend, copies.into_iter().chain([&mut *stream]))?;
        let source: Box<dyn ParameterSource<B> + 'a> = match gathered {
            Some(gathered) => Box::new(gathered.source(layout, lent)),
            None => Box::new(lent[0].source(layout)),
        };
        Ok(Borrowed { source, stream, sums })
    }

    /// Gives everything back, once all enqueued work has run.
    pub(super) fn give_back(
        &mut self,
        backend: &B,
        sums: Option<B::Buffer<f32>>,
    ) -> Result<(), Stopped> {
        let Self { stream, borrower, gathered } = self;
        let mut blocks = GatheredBlocks::default();
        if let Some(gathered) = gathered {
            let copied = backend.record(gathered.stream())?;
            backend.wait_for(stream, &copied)?;
            blocks = gathered.take_blocks();
        }
        borrower.give_back(backend, stream, sums, blocks)
    }

    /// Waits for reads of others' memory, before they may be given up. A device that fails has said so.
    pub(super) fn finish(&mut self, backend: &B) {
        if let Some(gathered) = &mut self.gathered {
            let _ = gathered.finish(backend);
        }
    }
}
