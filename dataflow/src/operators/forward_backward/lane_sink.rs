//! Where the gradients of a microbatch go while it is computed.

use tidemill_kernels::Backend;
use tidemill_model::{GradientSink, Layout};

use super::block_order::BlockOrder;
use crate::cluster::Failure;
use crate::operators::job_thread::Stopped;

/// A [`GradientSink`] of one microbatch of a lane.
pub(super) trait LaneSink<B: Backend>: GradientSink<B> {
    /// The microbatch is the lane's last: the lane's final sums go on as its blocks are done.
    fn close(&mut self);

    /// The order of its blocks, which are the blocks of the layout.
    fn order(&mut self) -> (&mut BlockOrder, &Layout);

    /// The reason why the backward pass ended, if that was not the order of its blocks.
    fn stopped(&mut self) -> Option<Stopped> {
        None
    }

    /// Ends the microbatch, and with its last the lane.
    fn end(self: Box<Self>);

    /// Checks that every block was done, once, the last first.
    fn check_pass(&mut self) -> Result<(), Failure> {
        let (order, layout) = self.order();
        order.check_pass(layout)
    }

    /// Says which block was done out of order, if one was.
    fn check_order(&mut self) -> Result<(), Failure> {
        self.order().0.check()
    }
}
