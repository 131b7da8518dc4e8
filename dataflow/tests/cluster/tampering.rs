//! A bit that is flipped between two processes: it is noticed, wherever it is, and changes nothing.

use std::time::Duration;

use tidemill::cluster::{Admission, ExitClass, Secret};

use crate::proxy::{Flip, Proxy};
use crate::ring::{cluster, settings, soon};
use crate::threads::exchange_sums;

const CONTROL: usize = 0;
const DATA: usize = 1;

/// How two processes end that sum over a connection with this flip, and the bytes that passed.
fn run(admission: &Admission, flip: Option<Flip>) -> (&'static str, Vec<[usize; 2]>) {
    let mut all = settings(2, 1);
    let proxy = Proxy::before(&all[0].addresses[0], flip);
    all[1].addresses[0] = proxy.address.clone();
    for each in &mut all {
        each.admission = admission.clone();
        // How long one waits for the other where the last word of a greeting did not arrive.
        each.connect_deadline = Duration::from_millis(1500);
    }
    let results = soon(|| cluster(all, exchange_sums));
    let passed = proxy.passed.lock().unwrap();
    let lengths = passed.connections.iter().map(|both| both.each_ref().map(Vec::len)).collect();
    let mut noticed = false;
    let mut sum = 0;
    for result in &results {
        match result {
            Ok(sums) => sum += sums.iter().sum::<u64>(),
            Err(error) => {
                noticed = true;
                assert_eq!(error.exit_class(), ExitClass::Restart, "{flip:?}: {error}");
                assert!(error.to_string().contains("process "), "{flip:?}: {error}");
            }
        }
    }
    let end = match (passed.flipped, noticed) {
        (_, true) => "noticed",
        (true, false) if passed.connections.len() > 2 => "greeted again",
        (true, false) => panic!("{flip:?} was not noticed"),
        (false, false) => "not flipped",
    };
    assert!(noticed || sum == 999 * 1000 / 2, "{flip:?}: {sum}");
    (end, lengths)
}

/// With a secret and without one: the greetings, and the messages after them.
#[test]
fn every_flipped_bit_is_noticed_and_none_changes_a_result() {
    let secret = Admission::Secret(Secret::generate().unwrap());
    for admission in [secret, Admission::LoopbackOnly] {
        let (end, lengths) = run(&admission, None);
        assert_eq!((end, lengths.len()), ("not flipped", 2));
        let flip_all = |connection: usize, direction: usize| {
            let length = lengths[connection][direction];
            // Evenly over the connection, in steps of no pattern, and its last message.
            let places = (0..8).map(|index| index * length / 8 + 7 * index % 13);
            let flip = |(index, byte)| {
                let (towards_caller, bit) = (direction == 1, (index % 8) as u8);
                run(&admission, Some(Flip { connection, towards_caller, byte, bit })).0
            };
            places.chain([length - 20]).enumerate().map(flip).collect::<Vec<_>>()
        };
        let ends: Vec<&str> = std::thread::scope(|scope| {
            let places = [(CONTROL, 0), (CONTROL, 1), (DATA, 0), (DATA, 1)];
            let threads = places.map(|(connection, direction)| {
                let flip_all = &flip_all;
                scope.spawn(move || flip_all(connection, direction))
            });
            threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
        });
        let count = |end| ends.iter().filter(|found| **found == end).count();
        // Lengths differ by a few bytes from run to run: most flips meet a byte.
        assert!(count("not flipped") < 6, "{ends:?}");
        assert!(count("noticed") > 12 && count("greeted again") > 4, "{ends:?}");
    }
}
