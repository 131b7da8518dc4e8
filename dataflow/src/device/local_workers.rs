//! The workers of a process among all workers of its machine.

use std::num::NonZeroUsize;

use crate::cluster::{ClusterSettings, host};

/// The workers of this process among all workers of its machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocalWorkers {
    /// Workers of earlier processes on the same machine.
    pub first: usize,
    /// Workers of this process.
    pub count: usize,
    /// Workers of all processes on the same machine.
    pub here: usize,
}

impl LocalWorkers {
    /// `count` workers of the only process of its machine.
    pub fn alone(count: usize) -> Self {
        Self { first: 0, count, here: count }
    }

    /// `count` workers of the first of several processes, all on this machine.
    pub fn of_each(count: usize, processes: NonZeroUsize) -> Self {
        Self { first: 0, count, here: count.saturating_mul(processes.get()) }
    }

    /// The workers of one process of a cluster. Processes are on one machine where their addresses name the same host.
    pub fn of(cluster: &ClusterSettings) -> Self {
        let earlier = processes_here(cluster, cluster.process);
        let here = Self::processes_here(cluster).saturating_mul(cluster.workers);
        Self { first: earlier.saturating_mul(cluster.workers), count: cluster.workers, here }
    }

    /// How many processes of a cluster are on this machine, this one among them.
    pub fn processes_here(cluster: &ClusterSettings) -> usize {
        processes_here(cluster, cluster.addresses.len()).max(1)
    }
}

/// How many of the first `processes` of a cluster are on this process's machine.
fn processes_here(cluster: &ClusterSettings, processes: usize) -> usize {
    let of = |address: &String| host(address).map(str::to_owned);
    let own = cluster.addresses.get(cluster.process).and_then(of);
    cluster.addresses.iter().take(processes).filter(|other| of(other) == own).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cluster(process: usize, addresses: &[&str]) -> ClusterSettings {
        let addresses = addresses.iter().map(|&address| address.to_owned()).collect();
        ClusterSettings::process(3, process, addresses)
    }

    #[test]
    fn processes_of_one_host_take_turns() {
        assert_eq!(LocalWorkers::of(&ClusterSettings::workers(2)), LocalWorkers::alone(2));
        let hosts = ["a:1", "b:1", "a:2", "[::1]:9", "b:2", "a:3"];
        let first = |process| LocalWorkers::of(&cluster(process, &hosts)).first;
        assert_eq!([0, 1, 2, 3, 4, 5].map(first), [0, 0, 3, 0, 3, 6]);
        let here = |process| LocalWorkers::processes_here(&cluster(process, &hosts));
        assert_eq!([0, 1, 2, 3, 4, 5].map(here), [3, 2, 3, 1, 2, 3]);
        assert_eq!(LocalWorkers::processes_here(&ClusterSettings::workers(2)), 1);
        let workers = LocalWorkers::of(&cluster(2, &hosts));
        assert_eq!(workers, LocalWorkers { first: 3, count: 3, here: 9 });
        let three = NonZeroUsize::new(3).unwrap();
        assert_eq!(LocalWorkers::of(&cluster(0, &hosts)), LocalWorkers::of_each(3, three));
    }

    #[test]
    fn one_machine_has_several_names_of_its_own() {
        let hosts = ["localhost:1", "127.0.0.1:2", "[::1]:3", "::1:4", "a:5"];
        let workers = |process| LocalWorkers::of(&cluster(process, &hosts));
        assert_eq!([0, 1, 2, 3, 4].map(|process| workers(process).first), [0, 3, 6, 9, 0]);
        assert_eq!([0, 1, 2, 3, 4].map(|process| workers(process).here), [12, 12, 12, 12, 3]);
    }
}
