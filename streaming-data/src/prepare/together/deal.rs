//! Which process reads which input.

use std::{cmp::Reverse, collections::BinaryHeap};

/// The cost of an input in addition to its bytes: it is looked up and opened.
const BYTES_OF_OPENING: u64 = 4096;

/// The process of each input: the one that has least to read so far, and of several the first. So all come to the inputs
/// in the middle at about the same time, and little waits for its turn.
pub(super) fn deal(bytes: impl Iterator<Item = u64>, processes: usize) -> Vec<usize> {
    let mut loads: BinaryHeap<_> =
        (0..processes).map(|process| Reverse((0_u64, process))).collect();
    bytes
        .map(|bytes| {
            let Reverse((load, process)) = loads.pop().expect("there is at least one process");
            let load = load.saturating_add(bytes).saturating_add(BYTES_OF_OPENING);
            loads.push(Reverse((load, process)));
            process
        })
        .collect()
}

/// The inputs of one process, in order.
pub(super) fn dealt_to(owners: &[usize], process: usize) -> Vec<usize> {
    let own = owners.iter().enumerate().filter(|(_, owner)| **owner == process);
    own.map(|(input, _)| input).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loads_differ_by_one_input_at_most_and_every_input_is_dealt_once() {
        let sizes: Vec<u64> = (0..1000_u64).map(|at| at * at % 7919).collect();
        for processes in [1, 2, 3, 7, 2000] {
            let owners = deal(sizes.iter().copied(), processes);
            let load = |process: usize| -> u64 {
                let own = dealt_to(&owners, process);
                own.iter().map(|&input| sizes[input] + BYTES_OF_OPENING).sum()
            };
            let loads: Vec<u64> = (0..processes).map(load).collect();
            let (least, most) = (loads.iter().min().unwrap(), loads.iter().max().unwrap());
            assert!(most - least <= 7919 + BYTES_OF_OPENING, "{processes}: {least}..{most}");
            let all: usize = (0..processes).map(|process| dealt_to(&owners, process).len()).sum();
            assert_eq!(all, sizes.len());
        }
        // One that is huge keeps its process from all others.
        assert_eq!(deal([9, 1 << 40, 1, 1, 1].into_iter(), 2), [0, 1, 0, 0, 0]);
        assert_eq!(deal([u64::MAX, u64::MAX, 1].into_iter(), 2), [0, 1, 0]);
    }
}
