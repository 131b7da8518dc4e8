//! Results do not depend on the floating-point environment of the caller's thread: whether a
//! library built with `-ffast-math` has made it flush denormal numbers, or how it rounds.

use std::num::NonZeroUsize;

use tidemill_kernels::backend::{AdamWStep, Output};
use tidemill_kernels::cpu::{InstructionSet, add_assign};
use tidemill_kernels::emulator::{Emulator, EmulatorSettings};
use tidemill_kernels::shape::GrainRows;
use tidemill_kernels::{Backend, Cpu, FloatEnvironment, Fp32, Gpu, Slice, SliceMut};

const ELEMENTS: usize = 1003;

/// Seeded numbers from denormal ones to those of a gradient.
fn numbers(seed: u32, elements: usize) -> Vec<f32> {
    // The inputs are computed alike on any thread.
    let _standard = FloatEnvironment::standard();
    let mut bits = seed;
    let mut next = || {
        bits = bits.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let exponent = -44 + (bits >> 27) as i32;
        (bits as f32 / u32::MAX as f32 - 0.5) * 10_f32.powi(exponent.min(-1))
    };
    (0..elements).map(|_| next()).collect()
}

/// The bits of all results of an update.
fn update<B: Backend<Activation = f32>>(backend: &B) -> Vec<u32> {
    let mut stream = backend.device_stream().unwrap();
    let mut upload = |values: &[f32]| {
        let mut buffer = backend.allocate::<f32>(&mut stream, values.len()).unwrap();
        backend.write(&mut stream, SliceMut::all(&mut buffer), values).unwrap();
        buffer
    };
    let gradients: Vec<_> = (1..=3).map(|seed| upload(&numbers(seed, ELEMENTS))).collect();
    let uses: Vec<f32> = (1..=3).flat_map(|seed| numbers(seed, ELEMENTS)).collect();
    let mut mean = upload(&uses);
    let magnitudes = |seed| numbers(seed, ELEMENTS).into_iter().map(f32::abs).collect::<Vec<_>>();
    let mut state = [7, 8, 9].map(|seed| upload(&magnitudes(seed)));
    let mut lane = upload(&numbers(11, ELEMENTS));
    let (rows, inner, columns) = (19, 33, 17);
    let a = upload(&numbers(12, rows * inner));
    let b = upload(&numbers(13, inner * columns));
    let mut product = upload(&numbers(14, rows * columns));
    let mut weight = upload(&numbers(15, inner * columns));
    let mut embedded = upload(&numbers(16, 3 * inner));
    let mut tokens = backend.allocate::<u32>(&mut stream, 3).unwrap();
    backend.write(&mut stream, SliceMut::all(&mut tokens), &[2, 0, 7]).unwrap();

    let stream = &mut stream;
    let (a, b) = (Slice::all(&a), Slice::all(&b));
    let (a, b) = (a.matrix(rows, inner).unwrap(), b.matrix(inner, columns).unwrap());
    let out = SliceMut::all(&mut product).matrix(rows, columns).unwrap();
    backend.matmul(stream, out, a, b, Output::Add).unwrap();
    let lane_of_weight = SliceMut::all(&mut weight).matrix(inner, columns).unwrap();
    let grad_out = Slice::all(&product).matrix(rows, columns).unwrap();
    let grains = GrainRows::new(rows, 8).unwrap();
    backend.weight_gradient_add(stream, lane_of_weight, a, grad_out, grains).unwrap();
    let out = SliceMut::all(&mut embedded).matrix(3, inner).unwrap();
    backend.embedding_forward(stream, out, a, Slice::all(&tokens), Output::Add).unwrap();
    backend.accumulate(stream, SliceMut::all(&mut lane), Slice::all(&gradients[0])).unwrap();
    let (all, others) = (SliceMut::all(&mut mean), [ELEMENTS, 2 * ELEMENTS]);
    backend.mean_gradient(stream, all, 0, &others, ELEMENTS, 3.0).unwrap();
    let gradient = Slice::new(&mean, 0, ELEMENTS).unwrap();
    let ends = [1, 500, ELEMENTS];
    let mut squares = backend.allocate::<f64>(stream, ends.len()).unwrap();
    let out = SliceMut::all(&mut squares);
    backend.sums_of_squares(stream, out, gradient, &ends).unwrap();
    let squares = backend.to_vec(stream, Slice::all(&squares)).unwrap();
    for (bias_correction1, bias_correction2) in [(0.1, 0.05), (0.19, 0.0975), (0.271, 0.142625)] {
        let [parameters, first, second] = &mut state;
        let coefficients = AdamWStep {
            learning_rate: 1e-3,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            decay_factor: 0.9999,
            bias_correction1,
            bias_correction2,
            gradient_scale: 0.7,
        };
        let (parameters, first) = (SliceMut::all(parameters), SliceMut::all(first));
        let second = SliceMut::all(second);
        backend.adamw(stream, parameters, [first, second], gradient, coefficients).unwrap();
    }
    let mut bits: Vec<u32> = squares
        .iter()
        .flat_map(|sum| [sum.to_bits() as u32, (sum.to_bits() >> 32) as u32])
        .collect();
    for buffer in [&mean, &lane, &product, &weight, &embedded].into_iter().chain(&state) {
        let values = backend.to_vec(stream, Slice::all(buffer)).unwrap();
        bits.extend(values.into_iter().map(f32::to_bits));
    }
    bits
}

/// The backend is created on such a thread too, so that the compute threads would inherit its
/// environment.
fn is_the_same_on_any_thread<B: Backend<Activation = f32>>(name: &str, open: impl Fn() -> B) {
    let expected = update(&open());
    let denormal = |bits: &&u32| f32::from_bits(**bits).is_subnormal();
    assert!(expected.iter().filter(denormal).count() > 100, "nothing could be flushed");
    let foreign = FloatEnvironment::foreign();
    let found = update(&open());
    drop(foreign);
    let differing = found.iter().zip(&expected).filter(|(found, expected)| found != expected);
    assert_eq!(differing.count(), 0, "{name}: numbers that differ of {}", expected.len());
}

#[test]
fn a_thread_that_flushes_denormal_numbers_updates_weights_to_the_same_bits() {
    for set in InstructionSet::ALL.into_iter().filter(|set| set.is_available()) {
        for threads in [1, 3] {
            let threads = NonZeroUsize::new(threads).unwrap();
            let open = || Cpu::with_instruction_set(threads, set).unwrap();
            is_the_same_on_any_thread(&format!("{}, {threads} threads", set.name()), open);
        }
    }
}

#[test]
fn an_emulated_gpu_knows_nothing_of_the_hosts_environment() {
    let open = || {
        let settings = EmulatorSettings { warp: 32, seed: 1 };
        Gpu::<Emulator, Fp32>::new(Emulator::new(settings).unwrap())
    };
    is_the_same_on_any_thread("emulator", open);
}

#[test]
fn sums_between_workers_are_the_same_on_a_thread_that_flushes_denormal_numbers() {
    let (left, right) = (numbers(1, ELEMENTS), numbers(2, ELEMENTS));
    let expected: Vec<_> = left.iter().zip(&right).map(|(x, y)| (x + y).to_bits()).collect();
    let foreign = FloatEnvironment::foreign();
    let mut out = left.clone();
    add_assign(&mut out, &right);
    drop(foreign);
    assert_eq!(out.into_iter().map(f32::to_bits).collect::<Vec<_>>(), expected);
}
