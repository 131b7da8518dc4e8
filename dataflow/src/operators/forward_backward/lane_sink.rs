//! Where the gradients of a lane go while it is computed.

use tidemill_kernels::Backend;
use tidemill_model::{GradientSink, Layout};

use super::block_order::BlockOrder;
use crate::cluster::Failure;
use crate::operators::companion::Stopped;

/// A [`GradientSink`] of one lane.
pub(super) trait LaneSink<B: Backend>: GradientSink<B> {
    /// The next backward pass is the lane's last: what is final of it goes on as its blocks are done.
    fn close(&mut self);

    /// The order of its blocks, which are those of the layout.
    fn order(&mut self) -> (&mut BlockOrder, &Layout);

    /// What ended a backward pass, where it was not the order of its blocks.
    fn stopped(&mut self) -> Option<Stopped> {
        None
    }

    /// Ends the lane.
    fn end_lane(self: Box<Self>);

    /// Ends a backward pass: every block must have been done, once, the last first.
    fn end_pass(&mut self) -> Result<(), Failure> {
        let (order, layout) = self.order();
        order.end_pass(layout)
    }

    /// Says which block was done out of order, if one was.
    fn check_order(&mut self) -> Result<(), Failure> {
        self.order().0.check()
    }
}
