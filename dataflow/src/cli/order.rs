//! The canonical order, as flags name it.

use clap::ValueEnum;
use tidemill_streaming_data::order::ShuffleOrder;

/// How the samples of an epoch are permuted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum OrderChoice {
    None,
    Shard,
    Window,
    Full,
}

impl From<OrderChoice> for ShuffleOrder {
    fn from(choice: OrderChoice) -> Self {
        match choice {
            OrderChoice::None => Self::None,
            OrderChoice::Shard => Self::Shard,
            OrderChoice::Window => Self::Window,
            OrderChoice::Full => Self::Full,
        }
    }
}
