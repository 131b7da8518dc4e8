//! Every test body through HIP: fp32 in waves of 64, and bf16 in waves of 32.
//!
//! Without an AMD GPU the libraries of HIP are those of `hip_runtime`, which emulates three: two in waves of 64, which reach each
//! other's memory, and one in waves of 32. So the product's own way to a GPU is what is tested: modules and launches, streams, events,
//! graphs, pools, pinned memory, peers and the matrix library. `TIDEMILL_TEST_BACKEND=rocm` asks for the machine's own.

#[path = "bodies/algorithms.rs"]
mod algorithms;
mod bodies;
#[path = "../../tests/support/hip_runtime.rs"]
mod hip_runtime;
#[path = "../../tests/support/loaded_hip.rs"]
mod loaded_hip;
#[path = "../../tests/support/tested_backend.rs"]
mod tested_backend;

use bodies::arm::{Arm, Sizes, agree};
use bodies::every_body;
use bodies::memory::handed_on;
use bodies::number::Number;
use tidemill_kernels::gpu::{Driver, Installed, Precision};
use tidemill_kernels::{Bf16, Fp32, Gpu, KernelError, Rocm, Runtime};

/// The emulated devices.
const IN_WAVES_OF_64: usize = 0;
const ITS_PEER: usize = 1;
const IN_WAVES_OF_32: usize = 2;

fn open<P: Precision>(ordinal: usize) -> Gpu<Rocm, P> {
    loaded_hip::load();
    Gpu::new(Rocm::open(ordinal).unwrap())
}

fn arm<P: Precision<Activation: Number>>(ordinal: usize) -> Arm<Gpu<Rocm, P>> {
    let backend = open(ordinal);
    let mut arm = Arm::new(format!("rocm, device {ordinal}"), backend);
    arm.sizes = Sizes::Small;
    arm
}

macro_rules! tests {
    (
        of_all_arms { $($of_all:ident: $every:path;)* }
        of_one_arm { $($of_one:ident: $one:path;)* }
        of_attention { $($of_attention:ident: $attention:path;)* }
        of_one_attention { $($of_one_attention:ident: $one_attention:path;)* }
    ) => {
        tests!(fp32_in_waves_of_64, Fp32, IN_WAVES_OF_64,
            $($of_all: $every;)* $($of_attention: $attention;)*
            | $($of_one: $one;)* $($of_one_attention: $one_attention;)*);
        tests!(bf16_in_waves_of_32, Bf16, IN_WAVES_OF_32,
            $($of_all: $every;)* $($of_attention: $attention;)*
            | $($of_one: $one;)* $($of_one_attention: $one_attention;)*);
    };
    (
        $module:ident, $precision:ty, $ordinal:expr,
        $($every:ident: $of_every:path;)* | $($one:ident: $of_one:path;)*
    ) => {
        mod $module {
            use super::*;
            $(
                #[test]
                fn $every() {
                    agree(&[&arm::<$precision>($ordinal)], $of_every);
                }
            )*
            $(
                #[test]
                fn $one() {
                    $of_one(&arm::<$precision>($ordinal));
                }
            )*
        }
    };
}

every_body!(tests);

#[test]
fn every_source_compiles() {
    open::<Fp32>(IN_WAVES_OF_64).compile_all().unwrap();
    open::<Bf16>(IN_WAVES_OF_32).compile_all().unwrap();
}

#[test]
fn a_device_says_what_it_is() {
    for (ordinal, architecture, warp) in
        [(IN_WAVES_OF_64, "gfx942:sramecc+:xnack-", 64), (IN_WAVES_OF_32, "warp32", 32)]
    {
        let backend = open::<Fp32>(ordinal);
        let properties = backend.driver().properties();
        assert_eq!(properties.architecture, architecture);
        assert_eq!((properties.backend, properties.warp), ("rocm", warp));
        assert!(properties.matrix_library.contains(", solutions "), "{properties:?}");
        assert_eq!(open::<Bf16>(ordinal).device_kind(), backend.device_kind());
    }
    let identity = |ordinal| open::<Fp32>(ordinal).identity().unwrap();
    assert_eq!(identity(IN_WAVES_OF_64), identity(IN_WAVES_OF_64));
    assert_ne!(identity(IN_WAVES_OF_64), identity(ITS_PEER));
}

/// The last device is of another kind.
#[test]
fn devices_of_one_kind_work_together() {
    loaded_hip::load();
    assert_eq!(Rocm::device_count().unwrap(), 3);
    assert_eq!(Rocm::together().unwrap(), 2);
    let said = Rocm::open(3).err().unwrap().to_string();
    assert_eq!(said, "no rocm device: GPU 3 was asked for, but there are 3");
}

/// Memory of one device is read by the kernels of another, in the order of events alone; and where one event is not waited for,
/// the runtime shows it.
#[test]
fn devices_wait_for_each_other() {
    let [first, second] = [IN_WAVES_OF_64, ITS_PEER].map(open::<Fp32>);
    for devices in [[&first, &second], [&second, &first]] {
        for _ in 0..5 {
            let [found, expected] =
                handed_on(devices, |stream, event| devices[0].wait_for(stream, event).unwrap());
            assert_eq!(found, expected);
        }
    }
    let lucky = (0..20).filter(|_| {
        let [found, expected] = handed_on([&first, &second], |_, _| {});
        found == expected
    });
    assert!(lucky.count() < 20, "a missing wait must show some time");
}

#[test]
fn memory_that_a_device_does_not_have_is_refused() {
    let backend = open::<Fp32>(ITS_PEER);
    let mut stream = backend.device_stream().unwrap();
    match backend.allocate::<f32>(&mut stream, 1 << 40).err() {
        Some(KernelError::OutOfMemory { bytes, device }) => {
            assert_eq!((bytes, device.as_str()), (1 << 42, "emulated AMD GPU"));
        }
        other => panic!("expected a device without room, found {other:?}"),
    }
    backend.allocate::<f32>(&mut stream, 1000).unwrap();
}

#[test]
fn solutions_that_treat_rows_differently_are_passed_over() {
    algorithms::row_dependent_ones_are_passed_over(&arm::<Fp32>(IN_WAVES_OF_64));
    algorithms::row_dependent_ones_are_passed_over(&arm::<Bf16>(IN_WAVES_OF_32));
}
