//! This model and this data can tell one order of summation from another in the bits, so that the
//! equalities of [`elastic`](super::elastic) mean something.
//!
//! How elastic.rs was seen failing: the graph's sums were changed to one running sum, to which each
//! node was added on arrival. Then `any_number_of_threads`, `any_number_of_processes` and every
//! other test that compares many workers with one was red, from the norm of the first step on, and
//! so were resumes at other world sizes.

use std::num::NonZeroUsize;

use tidemill::job::{ResolvedRun, RunConfig};
use tidemill::kernels::{Cpu, Runtime, SliceMut};
use tidemill::model::{
    Device, GradientSink, Layout, Microbatch, MicrobatchShape, ModelError, Parameters, Trainable,
};

use crate::support::Workbench;
use crate::support::workbench::CONFIG;

/// The gradients of one lane.
struct Lane<'a> {
    layout: &'a Layout,
    gradients: <Cpu as Runtime>::Buffer<f32>,
}

impl GradientSink<Cpu> for Lane<'_> {
    fn accumulator(&mut self, use_index: usize) -> SliceMut<'_, Cpu, f32> {
        let range = self.layout.gradient_range(use_index);
        SliceMut::new(&mut self.gradients, range.start, range.len()).unwrap()
    }

    fn block_done(&mut self, _: &mut Device<'_, Cpu>, _: usize) -> Result<(), ModelError> {
        Ok(())
    }
}

/// The gradients of each lane of the first step of the run that elastic.rs runs.
fn lanes(bench: &Workbench) -> Vec<Vec<f32>> {
    let data = format!("data.dataset={:?}", bench.path("data"));
    let config = RunConfig::parse(CONFIG, "run.toml", &[data]).unwrap();
    let run = ResolvedRun::new(config, 1).unwrap();
    let model = run.model.build::<Cpu>().unwrap();
    let layout: &Layout = model.layout();
    let backend = Cpu::new(NonZeroUsize::MIN).unwrap();
    let mut stream = backend.device_stream().unwrap();
    let mut device = Device { backend: &backend, stream: &mut stream };
    let initial = model.initialize(run.config.run.seed);
    let parameters = Parameters::from_host(&mut device, layout, &initial).unwrap();
    let (positions, samples_per_grain) = (run.data.seq_len(), run.batch.grain_samples());
    let mut lane = |index: usize| {
        let samples = run.batch.lane_samples(index);
        let samples: Vec<_> = samples
            .map(|sample| {
                let mixed = run.data.sample_at(sample as u64);
                run.data.data_set(mixed.part).sample(mixed.sample).unwrap()
            })
            .collect();
        let shape = MicrobatchShape { samples: samples.len(), positions, samples_per_grain };
        let mut workspace = model.plan(&mut device, shape).unwrap();
        let gradients = backend.allocate(device.stream, layout.gradient_elements()).unwrap();
        let mut sink = Lane { layout, gradients };
        let samples = &samples[..];
        let microbatch = Microbatch { samples, positions, samples_per_grain, document_end: None };
        let mut source = parameters.source(layout);
        model
            .forward_backward(&mut device, &mut workspace, &mut source, microbatch, &mut sink)
            .unwrap();
        sink.gradients.as_slice().to_vec()
    };
    (0..run.batch.lanes()).map(&mut lane).collect()
}

fn add(left: &[f32], right: &[f32]) -> Vec<f32> {
    left.iter().zip(right).map(|(left, right)| left + right).collect()
}

fn tree(lanes: &[Vec<f32>]) -> Vec<f32> {
    match lanes {
        [lane] => lane.clone(),
        _ => {
            let (left, right) = lanes.split_at(lanes.len() / 2);
            add(&tree(left), &tree(right))
        }
    }
}

/// One running sum, in the order in which lanes arrive.
fn running(lanes: &[Vec<f32>], arrival: &[usize]) -> Vec<f32> {
    let first = lanes[arrival[0]].clone();
    arrival[1..].iter().fold(first, |sum, &lane| add(&sum, &lanes[lane]))
}

fn differing(left: &[f32], right: &[f32]) -> usize {
    left.iter().zip(right).filter(|(left, right)| left.to_bits() != right.to_bits()).count()
}

#[test]
fn every_other_order_of_the_same_lanes_gives_other_bits() {
    let lanes = lanes(&Workbench::new());
    let canonical = tree(&lanes);
    let elements = canonical.iter().filter(|gradient| **gradient != 0.0).count();
    let arrivals: [[usize; 8]; 4] = [
        [0, 1, 2, 3, 4, 5, 6, 7],
        [4, 5, 6, 7, 0, 1, 2, 3],
        [2, 3, 0, 1, 7, 6, 5, 4],
        [7, 3, 5, 1, 6, 2, 4, 0],
    ];
    let sums = arrivals.map(|arrival| running(&lanes, &arrival));
    for (index, sum) in sums.iter().enumerate() {
        let others = differing(sum, &canonical);
        assert!(others > elements / 10, "{others} of {elements}: {:?}", arrivals[index]);
        // Two orders of arrival give different bits.
        for later in &sums[index + 1..] {
            assert!(differing(sum, later) > elements / 10);
        }
    }
    // The tree gives the same bits whichever of two children arrives first.
    let mirrored: Vec<_> = lanes.iter().rev().cloned().collect();
    assert_eq!(differing(&tree(&mirrored), &canonical), 0);
}
