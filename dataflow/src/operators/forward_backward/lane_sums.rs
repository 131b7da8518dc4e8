//! Where the gradients of a worker's lanes are summed.

use tidemill_kernels::Backend;
use tidemill_model::Trainable;

use super::accumulators::Accumulators;
use super::bucket_sums::BucketSums;
use super::device::DeviceParts;
use crate::operators::bucket_memory::BucketMemory;
use crate::operators::lending::Borrower;
use crate::parallel::Sharding;

/// Where gradients are summed over lanes.
pub(super) enum LaneSums<B: Backend> {
    /// Here, until the last lane is done.
    Here(Accumulators<B>),
    /// At the owners of the parameters, lane by lane.
    AtOwners(BucketSums<B>),
}

impl<B: Backend> LaneSums<B> {
    pub(super) fn of<M: Trainable<B>>(parts: &DeviceParts<B, M>, borrower: &Borrower<B>) -> Self {
        let DeviceParts { plan, model, lanes, .. } = parts;
        let is_alone = borrower.post.is_none();
        if is_alone || plan.batch.sharding() == Sharding::Optimizer {
            return Self::Here(Accumulators::new());
        }
        let microbatches = |&lane: &usize| plan.batch.microbatches(lane).count();
        let most = lanes.iter().map(microbatches).max().unwrap_or(0);
        let memory = BucketMemory::new(model.layout(), &plan.buckets, most);
        Self::AtOwners(BucketSums::new(model.layout(), &plan.buckets, memory))
    }

    /// Takes back the accumulators that were kept, and `sums`, which was taken: none is needed any longer.
    pub(super) fn reuse(&mut self, sums: Option<B::Buffer<f32>>) {
        if let Self::Here(accumulators) = self {
            accumulators.reuse(sums);
        }
    }

    /// The sums over all lanes, of a worker that has all of them.
    pub(super) fn take_kept(&mut self) -> Option<B::Buffer<f32>> {
        match self {
            Self::Here(accumulators) => accumulators.take_kept(),
            Self::AtOwners(_) => None,
        }
    }
}
