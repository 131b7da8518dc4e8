//! Ranks of several processes on emulated devices, whose bytes a library moves that stands in for NCCL.
//!
//! Beside the bodies that every library passes: ranks that train, on devices whose queues run in any order. Seen red there: a rank that
//! waits neither for the sums nor for the parameters of its process, and one that says too early that it has read.

mod group;
#[path = "ranks/rank.rs"]
mod rank;
mod stand_in;

use group::Arm;
use rank::{Care, LANES, Rank, Rounds, SMALL, STEPS, alone, bits, cuts};
use tidemill_collective::communicator::{Holders, LocalRank, Nccl};
use tidemill_kernels::emulator::{EmulatorSettings, Schedule};
use tidemill_kernels::{Emulator, Fp32, Gpu};

type Device = Gpu<Emulator, Fp32>;

fn emulator() -> Emulator {
    Emulator::new(EmulatorSettings { warp: 32, seed: 0 }).unwrap()
}

const ARM: Arm<Device> = Arm { device: || Gpu::new(emulator()), library: stand_in::library };

group::every_body!();

/// The values of every rank after all steps, in processes of `of_process` ranks whose devices run in the order of `seed`.
fn trained(
    (ranks, of_process): (usize, usize),
    seed: u64,
    rounds: Rounds,
    care: Care,
) -> Vec<Vec<f32>> {
    let order = Schedule::new(seed);
    let devices: Vec<Device> =
        (0..ranks).map(|_| Gpu::new(emulator().with_schedule(&order))).collect();
    let (library, schedule) = (stand_in::library(), rounds.schedule(LANES, ranks));
    let (group, cuts) = ((&library, library.group_id().unwrap()), cuts(SMALL, ranks));
    let of_processes = devices.chunks(of_process).enumerate().flat_map(|(process, devices)| {
        let devices: Vec<_> = devices.iter().collect();
        LocalRank::of_process(&devices, process * of_process, &schedule).unwrap()
    });
    std::thread::scope(|scope| {
        let run = |(device, local)| {
            let (cuts, schedule) = (&cuts, &schedule);
            scope.spawn(move || {
                let local = (local, ranks);
                let end = Nccl::join(device, group, local, schedule, Holders::EACH).unwrap();
                let mut rank = Rank::new(device, Box::new(end), schedule, SMALL, cuts);
                (0..STEPS).for_each(|step| rank.step(step, care).unwrap());
                rank.replica()
            })
        };
        let running: Vec<_> = devices.iter().zip(of_processes).map(run).collect();
        running.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Also in one process, where no call of the library puts queues in order, and with buckets of which most ranks own nothing.
#[test]
fn any_processes_train_the_same_to_the_bit_in_any_order() {
    let expected = bits(&alone(SMALL));
    for of_ranks in [(2, 2), (3, 3), (3, 1), (4, 2), (6, 2), (6, 3), (8, 4)] {
        for seed in 0..3 {
            for rounds in Rounds::BOTH {
                for replica in trained(of_ranks, seed, rounds, Care::Taken) {
                    assert!(bits(&replica) == expected, "{of_ranks:?}, order {seed}, {rounds:?}");
                }
            }
        }
    }
}

/// In one process, as these devices are done with all before the library is called.
#[test]
fn a_rank_that_does_not_wait_for_what_it_gathers_or_its_process_reads_is_found_out() {
    let expected = bits(&alone(SMALL));
    let is_right = |seed, care| {
        let replicas = trained((2, 2), seed, Rounds::ALane, care);
        replicas.iter().all(|replica| bits(replica) == expected)
    };
    assert!(!(0..10).all(|seed| is_right(seed, Care::NotTaken)));
    assert!(!(0..10).all(|seed| is_right(seed, Care::NotRead)));
}
