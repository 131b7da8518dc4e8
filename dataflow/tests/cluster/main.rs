//! Workers over threads and processes: whatever fails, all of them end, soon, with its message.
//!
//! Clusters within this process are threads with a connection each (`ring::cluster`). Where a
//! process has to die, this executable starts itself: `processes::child_entry`.

mod processes;
mod proxy;
mod rendezvous;
mod ring;
mod standstill;
mod strangers;
mod supervisor;
mod tampering;
mod threads;
