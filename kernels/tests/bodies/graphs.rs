//! Recorded kernels.

use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};

use tidemill_kernels::backend::{LogitGradient, Output};
use tidemill_kernels::shape::{CrossEntropyShape, GrainRows};
use tidemill_kernels::{Backend, KernelError, MemoryPlace, Slice, SliceMut};

use super::arm::Arm;
use super::device::Device;
use super::number::Number;

const ELEMENTS: usize = 1000;

/// Reports that the device has no graphs, past the test harness, which hides the output of passing
/// tests; a GPU must have them.
fn not_run<B: Backend>(arm: &Arm<B>, body: &str) {
    assert_eq!(arm.backend.memory(), MemoryPlace::Host, "a device without graphs");
    let line = format!("NOT RUN: graphs::{body} on {}: the device has no graphs\n", arm.name);
    std::io::stderr().write_all(line.as_bytes()).unwrap();
}

/// `lane += gradient`, enqueued once and replayed twice, gives what three calls give; recording runs nothing.
pub fn repeat_what_was_recorded<B: Backend<Activation: Number>>(arm: &Arm<B>) {
    let mut device = Device::new(arm);
    let backend = device.backend;
    let gradient = device.upload(&[0.375_f32; ELEMENTS]);
    let mut lane = device.upload(&[1.0_f32; ELEMENTS]);
    let add = |stream: &mut B::DeviceStream, lane: &mut B::Buffer<f32>| {
        backend.accumulate(stream, SliceMut::all(lane), Slice::all(&gradient))
    };
    add(&mut device.stream, &mut lane).unwrap();
    let recorded = backend.record_graph(&mut device.stream, &mut |stream| add(stream, &mut lane));
    let Some(graph) = recorded.unwrap() else {
        assert_eq!(
            device.download(&lane),
            [1.375; ELEMENTS],
            "a device without graphs enqueues nothing"
        );
        return not_run(arm, "repeat_what_was_recorded");
    };
    assert_eq!(device.download(&lane), [1.375; ELEMENTS], "recording runs nothing");
    backend.replay(&mut device.stream, &graph).unwrap();
    backend.replay(&mut device.stream, &graph).unwrap();
    assert_eq!(device.download(&lane), [2.125; ELEMENTS]);
}

/// A graph that outlives a buffer touches no other memory: memory that it names is not reused.
pub fn keep_what_was_dropped<B: Backend<Activation: Number>>(arm: &Arm<B>) {
    let mut device = Device::new(arm);
    let backend = device.backend;
    let gradient = device.upload(&[1.0_f32; ELEMENTS]);
    let mut lane = device.upload(&[0.0_f32; ELEMENTS]);
    let (to, from) = (SliceMut::all(&mut lane), Slice::all(&gradient));
    backend.accumulate(&mut device.stream, to, from).unwrap();
    let recorded = backend.record_graph(&mut device.stream, &mut |stream| {
        backend.accumulate(stream, SliceMut::all(&mut lane), Slice::all(&gradient))
    });
    let Some(graph) = recorded.unwrap() else { return not_run(arm, "keep_what_was_dropped") };
    drop((lane, gradient));
    let others: Vec<_> = (0..8).map(|_| device.upload(&[3.0_f32; ELEMENTS])).collect();
    backend.replay(&mut device.stream, &graph).unwrap();
    for other in &others {
        assert_eq!(device.download(other), [3.0; ELEMENTS]);
    }
    drop(graph);
    // The kept memory is given back with the graph.
    let again = device.upload(&[5.0_f32; ELEMENTS]);
    assert_eq!(device.download(&again), [5.0; ELEMENTS]);
}

/// Memory dropped by another thread neither spoils a recording nor is freed while the graph exists,
/// whether the recording begins, continues or ends meanwhile.
pub fn are_recorded_while_another_thread_drops<B: Backend<Activation: Number>>(arm: &Arm<B>) {
    const ROUNDS: usize = 200;
    let mut device = Device::new(arm);
    let backend = device.backend;
    let gradient = device.upload(&[0.375_f32; ELEMENTS]);
    let mut lane = device.upload(&[1.0_f32; ELEMENTS]);
    let add = |stream: &mut B::DeviceStream, lane: &mut B::Buffer<f32>| {
        backend.accumulate(stream, SliceMut::all(lane), Slice::all(&gradient))
    };
    add(&mut device.stream, &mut lane).unwrap();
    let over = AtomicBool::new(false);
    let has_graphs = std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut stream = backend.device_stream().unwrap();
            while !over.load(Ordering::Relaxed) {
                let mut allocate = || backend.allocate::<f32>(&mut stream, ELEMENTS).unwrap();
                drop(std::array::from_fn::<_, 16, _>(|_| allocate()));
            }
        });
        // Ends the other thread even if an assertion fails.
        let _ends = Ends(&over);
        (0..ROUNDS).all(|_| {
            let stream = &mut device.stream;
            let recorded = backend.record_graph(stream, &mut |stream| add(stream, &mut lane));
            let Some(graph) = recorded.unwrap() else { return false };
            backend.replay(stream, &graph).unwrap();
            true
        })
    });
    if !has_graphs {
        return not_run(arm, "are_recorded_while_another_thread_drops");
    }
    let expected = 1.0 + 0.375 * (ROUNDS + 1) as f32;
    assert_eq!(device.download(&lane), [expected; ELEMENTS]);
}

/// Sets the flag when it is dropped.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[track_caller]
fn assert_not_recordable<T>(what: &str, result: tidemill_kernels::Result<T>) {
    match result {
        Err(KernelError::NotRecordable { .. }) => {}
        Err(other) => panic!("{what}: found {other}"),
        Ok(_) => panic!("{what} was found to be recordable"),
    }
}

/// Operations that a graph cannot hold are refused while it is recorded, and do not spoil the graph.
pub fn refuse_what_cannot_be_recorded<B: Backend<Activation: Number>>(arm: &Arm<B>) {
    let mut device = Device::new(arm);
    let backend = device.backend;
    let gradient = device.upload(&[0.5_f32; ELEMENTS]);
    let mut lane = device.upload(&[1.0_f32; ELEMENTS]);
    let mut other = device.upload(&[9.0_f32; ELEMENTS]);
    let tokens = device.upload(&[1_u32, 2]);
    // Kernels are loaded by their first run.
    let (to, from) = (SliceMut::all(&mut lane), Slice::all(&gradient));
    backend.accumulate(&mut device.stream, to, from).unwrap();
    let mut squares = device.upload(&[0.0_f64]);
    let mut asked = false;
    let recorded = backend.record_graph(&mut device.stream, &mut |stream| {
        asked = true;
        backend.accumulate(stream, SliceMut::all(&mut lane), Slice::all(&gradient))?;
        let write = backend.write(stream, SliceMut::all(&mut other), &[0.0; ELEMENTS]);
        assert_not_recordable("write", write);
        assert_not_recordable(
            "read",
            backend.read(stream, &mut [0.0; ELEMENTS], Slice::all(&other)),
        );
        assert_not_recordable("allocate", backend.allocate::<f32>(stream, 1));
        assert_not_recordable("record", backend.record(stream));
        let out = SliceMut::all(&mut squares);
        let sums = backend.sums_of_squares(stream, out, Slice::all(&other), &[ELEMENTS]);
        assert_not_recordable("sums_of_squares", sums);
        let again = backend.record_graph(stream, &mut |_| Ok(()));
        assert_not_recordable("record_graph", again);
        // This needs scratch memory, of which the stream has none yet.
        let add = backend.embedding_backward_add(
            stream,
            SliceMut::all(&mut other).matrix(10, 100)?,
            Slice::new(&gradient, 0, 200)?.matrix(2, 100)?,
            Slice::all(&tokens),
            GrainRows::new(2, 2)?,
        );
        assert_not_recordable("growing scratch memory", add);
        Ok(())
    });
    let Some(graph) = recorded.unwrap() else {
        return not_run(arm, "refuse_what_cannot_be_recorded");
    };
    assert!(asked);
    backend.replay(&mut device.stream, &graph).unwrap();
    assert_eq!(device.download(&lane), [2.0; ELEMENTS]);
    assert_eq!(device.download(&other), [9.0; ELEMENTS], "what was refused did nothing");
    // The graph's scratch memory and faults belong to the stream that recorded it.
    let mut another = backend.device_stream().unwrap();
    let replayed = backend.replay(&mut another, &graph);
    assert!(matches!(replayed, Err(KernelError::Shape { .. })), "found {replayed:?}");
}

/// After a recording that fails or panics, its stream runs enqueued work again.
pub fn end_with_their_recording<B: Backend<Activation: Number>>(arm: &Arm<B>) {
    let mut device = Device::new(arm);
    let backend = device.backend;
    let gradient = device.upload(&[0.5_f32; ELEMENTS]);
    let mut lane = device.upload(&[1.0_f32; ELEMENTS]);
    let (to, from) = (SliceMut::all(&mut lane), Slice::all(&gradient));
    backend.accumulate(&mut device.stream, to, from).unwrap();
    let mut enqueue = |stream: &mut B::DeviceStream,
                       ends: &dyn Fn() -> tidemill_kernels::Result<()>| {
        backend.record_graph(stream, &mut |stream| {
            backend.accumulate(stream, SliceMut::all(&mut lane), Slice::all(&gradient))?;
            ends()
        })
    };
    let refused = || Err(KernelError::shape("a test", "answer", "none", "an error"));
    match enqueue(&mut device.stream, &refused) {
        Ok(None) => return not_run(arm, "end_with_their_recording"),
        Err(KernelError::Shape { kernel: "a test", .. }) => {}
        other => panic!("found {:?}", other.map(|graph| graph.is_some())),
    }
    let panics = || panic!("on purpose");
    let stream = &mut device.stream;
    assert!(catch_unwind(AssertUnwindSafe(|| enqueue(stream, &panics))).is_err());
    let graph = enqueue(&mut device.stream, &|| Ok(())).unwrap().unwrap();
    assert_eq!(device.download(&lane), [1.5; ELEMENTS], "recordings run nothing");
    backend.replay(&mut device.stream, &graph).unwrap();
    assert_eq!(device.download(&lane), [2.0; ELEMENTS]);
}

/// A fault of a kernel in a graph is reported each time, with the kernel's name.
pub fn answer_the_faults_of_their_kernels<B: Backend<Activation: Number>>(arm: &Arm<B>) {
    const ROWS: usize = 3;
    const VOCAB: usize = 8;
    let mut device = Device::new(arm);
    let backend = device.backend;
    let table = device.upload(&[0.0_f32; VOCAB * 4]);
    let mut out = device.upload(&[0.0_f32; ROWS * 4]);
    let mut losses = device.upload(&[0.0_f32; ROWS]);
    let mut logits = device.upload(&[B::Activation::rounded(0.0); ROWS * VOCAB]);
    let mut tokens = device.upload(&[1_u32; ROWS]);
    let mut targets = device.upload(&[1_u32; ROWS]);
    let shape = CrossEntropyShape::new(ROWS, VOCAB, VOCAB).unwrap();
    let mut enqueue =
        |stream: &mut B::DeviceStream, tokens: &B::Buffer<u32>, targets: &B::Buffer<u32>| {
            backend.embedding_forward(
                stream,
                SliceMut::all(&mut out).matrix(ROWS, 4)?,
                Slice::all(&table).matrix(VOCAB, 4)?,
                Slice::all(tokens),
                Output::Overwrite,
            )?;
            backend.cross_entropy(
                stream,
                SliceMut::all(&mut losses),
                SliceMut::all(&mut logits),
                Slice::all(targets),
                LogitGradient::None,
                shape,
            )
        };
    enqueue(&mut device.stream, &tokens, &targets).unwrap();
    let recorded =
        backend.record_graph(&mut device.stream, &mut |stream| enqueue(stream, &tokens, &targets));
    let Some(graph) = recorded.unwrap() else {
        return not_run(arm, "answer_the_faults_of_their_kernels");
    };
    let mut replay = |tokens_now: [u32; ROWS], targets_now: [u32; ROWS]| {
        let stream = &mut device.stream;
        backend.write(stream, SliceMut::all(&mut tokens), &tokens_now)?;
        backend.write(stream, SliceMut::all(&mut targets), &targets_now)?;
        backend.replay(stream, &graph)?;
        backend.read(stream, &mut [0.0; VOCAB * 4], Slice::all(&table))
    };
    let fault = |result| match result {
        Err(KernelError::TokenOutOfRange { kernel, row, token, vocab_size: VOCAB }) => {
            Some((kernel, row, token))
        }
        Ok(()) => None,
        Err(other) => panic!("found {other}"),
    };
    let good = [0, 1, 7];
    assert_eq!(fault(replay(good, good)), None);
    for _ in 0..2 {
        assert_eq!(fault(replay(good, [1, 8, 9])), Some(("cross_entropy", 1, 8)));
        assert_eq!(fault(replay(good, good)), None);
        assert_eq!(fault(replay([0, 1, 77], good)), Some(("embedding_forward", 2, 77)));
        assert_eq!(fault(replay([0, 1, 77], [8, 0, 0])), Some(("embedding_forward", 2, 77)));
    }
}
