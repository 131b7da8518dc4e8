//! Ranks that sum, update and gather, by each communicator that needs no library.

mod host;
mod rank;
mod threads;
