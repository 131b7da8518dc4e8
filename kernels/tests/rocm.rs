//! Every test body through HIP: fp32 in waves of 64 and bf16 in waves of 32, and products the other way round too. (`emulator.rs`
//! has the other two for all bodies.)
//!
//! Without an AMD GPU the libraries of HIP are those of `hip_runtime`, which emulates three: two in
//! waves of 64, which reach each other's memory, and one in waves of 32. So the tests cover the
//! program's own HIP driver: modules and launches, streams, events, graphs, pools, pinned memory,
//! peers and the matrix library. With `TIDEMILL_TEST_BACKEND=rocm` the libraries are the machine's
//! own: then its first device runs the bodies, each twice, and the tests in [`of_emulated_devices`]
//! fail (`--skip of_emulated_devices`).
//!
//! The emulated hipBLASLt makes handles for waves of 64 alone: in waves of 32 the products are rocBLAS's.

#[path = "bodies/algorithms.rs"]
mod algorithms;
mod bodies;
#[path = "../../tests/support/hip_runtime.rs"]
mod hip_runtime;
#[path = "../../tests/support/loaded_hip.rs"]
mod loaded_hip;
#[path = "bodies/opening.rs"]
mod opening;
#[path = "../../tests/support/tested_backend.rs"]
mod tested_backend;

use bodies::agreement::Transcript;
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

/// An arm on an emulated device, or on the machine's first.
fn arm<P: Precision<Activation: Number>>(emulated: usize) -> Arm<Gpu<Rocm, P>> {
    let ordinal = if loaded_hip::is_the_machines() { 0 } else { emulated };
    let mut arm = Arm::new(format!("rocm, device {ordinal}"), open(ordinal));
    arm.sizes = Sizes::Small;
    arm
}

/// Runs `body`: twice on a device that may find other bits again.
fn agrees<P: Precision<Activation: Number>>(
    emulated: usize,
    body: fn(&Arm<Gpu<Rocm, P>>) -> Transcript,
) {
    let arm = arm(emulated);
    let times = if loaded_hip::is_the_machines() { 2 } else { 1 };
    agree(&vec![&arm; times], body);
}

macro_rules! tests {
    (
        of_all_arms { $($of_all:ident: $every:path;)* }
        of_one_arm { $($of_one:ident: $one:path;)* }
        of_groups { $($of_groups:ident: $by_groups:path;)* }
        of_one_in_groups { $($of_one_in_groups:ident: $one_by_groups:path;)* }
    ) => {
        tests!(fp32_in_waves_of_64, Fp32, IN_WAVES_OF_64,
            $($of_all: $every;)* $($of_groups: $by_groups;)*
            | $($of_one: $one;)* $($of_one_in_groups: $one_by_groups;)*);
        tests!(bf16_in_waves_of_32, Bf16, IN_WAVES_OF_32,
            $($of_all: $every;)* $($of_groups: $by_groups;)*
            | $($of_one: $one;)* $($of_one_in_groups: $one_by_groups;)*);
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
                    agrees::<$precision>($ordinal, $of_every);
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

/// Both matrix libraries multiply in both precisions.
macro_rules! products {
    ($module:ident, $precision:ty, $ordinal:expr) => {
        tests!($module, $precision, $ordinal,
            matmul_agrees: bodies::matmul::agrees;
            matmul_with_a_bias_agrees: bodies::biased_products::agree;
            matmul_backward_agrees: bodies::matmul::backward_agrees;
            matmul_rows_of_any_number_agree: bodies::matmul::rows_of_any_number_agree;
            weight_gradient_agrees: bodies::weight_gradient::agrees;
            weight_gradient_parts_are_added_in_order: bodies::weight_gradient::parts_are_added_in_order; |);
    };
}

products!(products_of_fp32_in_waves_of_32, Fp32, IN_WAVES_OF_32);
products!(products_of_bf16_in_waves_of_64, Bf16, IN_WAVES_OF_64);

#[test]
fn every_source_compiles() {
    arm::<Fp32>(IN_WAVES_OF_64).backend.compile_all().unwrap();
    arm::<Bf16>(IN_WAVES_OF_32).backend.compile_all().unwrap();
}

#[test]
fn a_device_that_is_opened_again_is_the_same() {
    let arm = arm::<Fp32>(IN_WAVES_OF_64);
    let properties = arm.backend.driver().properties();
    assert_eq!(properties.backend, "rocm");
    assert!(properties.matrix_library.contains(", solutions "), "{properties:?}");
    println!("{properties:?}");
    assert_eq!(open::<Bf16>(0).device_kind(), arm.backend.device_kind());
    assert_eq!(open::<Bf16>(0).identity().unwrap(), arm.backend.identity().unwrap());
}

#[test]
fn opening_a_device_again_spoils_no_recording() {
    // No other test uses this device.
    let arm = arm::<Fp32>(ITS_PEER);
    let ordinal = if loaded_hip::is_the_machines() { 0 } else { ITS_PEER };
    opening::spoils_no_recording(&arm, || drop(Rocm::open(ordinal).unwrap()));
}

#[test]
fn a_device_that_is_not_there_is_named() {
    loaded_hip::load();
    let devices = Rocm::device_count().unwrap();
    let said = Rocm::open(devices).err().unwrap().to_string();
    let expected = format!("GPU {devices} was asked for, but there are {devices}");
    assert_eq!(said, format!("no rocm device: {expected}"));
}

#[test]
fn memory_that_a_device_does_not_have_is_refused() {
    let backend = arm::<Fp32>(ITS_PEER).backend;
    let mut stream = backend.device_stream().unwrap();
    match backend.allocate::<f32>(&mut stream, 1 << 40).err() {
        Some(KernelError::OutOfMemory { bytes, device }) => {
            assert_eq!((bytes, &device), (1 << 42, &backend.driver().properties().name));
        }
        other => panic!("expected a device without room, found {other:?}"),
    }
    backend.allocate::<f32>(&mut stream, 1000).unwrap();
}

/// Algorithms that must not be chosen for a product are passed over.
mod algorithms_of_a_library {
    use super::*;

    macro_rules! rules {
        ($($rule:ident)*) => {
            $(
                #[test]
                fn $rule() {
                    algorithms::$rule(&arm::<Fp32>(IN_WAVES_OF_64));
                    algorithms::$rule(&arm::<Bf16>(IN_WAVES_OF_32));
                }
            )*
        };
    }

    algorithms::every_rule!(rules);
}

/// Properties of the emulated devices alone.
mod of_emulated_devices {
    use super::*;

    /// hipBLASLt if it makes a handle, else rocBLAS.
    #[test]
    fn the_matrix_library_is_the_one_that_works() {
        let library = |ordinal| open::<Fp32>(ordinal).driver().properties().matrix_library.clone();
        for ordinal in [IN_WAVES_OF_64, ITS_PEER] {
            let name = library(ordinal);
            assert!(name.starts_with("hipBLASLt 1.2.3, solutions "), "{name}");
        }
        let name = library(IN_WAVES_OF_32);
        assert!(name.starts_with("rocBLAS 5.0.0.emulated, solutions "), "{name}");
    }

    #[test]
    fn a_device_says_what_it_is() {
        for (ordinal, architecture, warp) in
            [(IN_WAVES_OF_64, "gfx942:sramecc+:xnack-", 64), (IN_WAVES_OF_32, "warp32", 32)]
        {
            let backend = open::<Fp32>(ordinal);
            let properties = backend.driver().properties();
            assert_eq!((properties.architecture.as_str(), properties.warp), (architecture, warp));
        }
        let identity = |ordinal| open::<Fp32>(ordinal).identity().unwrap();
        assert_ne!(identity(IN_WAVES_OF_64), identity(ITS_PEER));
    }

    /// The last device is of another kind.
    #[test]
    fn devices_of_one_kind_work_together() {
        loaded_hip::load();
        assert_eq!(Rocm::device_count().unwrap(), 3);
        assert_eq!(Rocm::together().unwrap(), 2);
    }

    /// Kernels of one device read memory of another, ordered by events alone; without the wait for one event,
    /// the runtime shows the error.
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
}
