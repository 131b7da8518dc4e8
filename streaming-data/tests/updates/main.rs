//! Data sets that are kept up to date: an update leaves what a preparation from nothing would.

#[path = "../support/outcome.rs"]
mod outcome;
#[path = "../support/peers.rs"]
mod peers;
mod support;

mod changes;
mod follow;
mod histories;
mod kept;
mod reports;
mod stores;
