//! Six steps of AdamW are those of PyTorch, on the checkpoints that transformers wrote.

use tidemill_kernels::{Backend, Slice, SliceMut};
use tidemill_model::hugging_face::load;
use tidemill_model::optimizer::{OptimizerSettings, UpdateScalars, UpdateTerms, UpdateViews};
use tidemill_model::schedule::ScheduleSettings;
use tidemill_model::{
    Device, Held, Layout, MasterPlace, Microbatch, MicrobatchShape, Parameters, Result, Trainable,
};

use super::arm::Arm;
use super::fixtures::folder;
use super::lane::Lane;
use super::transformers::{CASES, expected, numbers, tokens};

/// Promised in fp32 is 2e-3. What is seen is 2e-6, and a test as loose as the promise would pass over, say, a decay
/// of the vectors, which moves the second loss by 5e-4 in one case and less in the others.
const TOLERANCES: [f64; 2] = [5e-5, 4e-2];

/// The optimizer's side of a step on one worker.
struct Optimizer<B: Backend> {
    settings: OptimizerSettings,
    parameters: Parameters<B>,
    states: Vec<B::Buffer<f32>>,
    mean: B::Buffer<f32>,
}

impl<B: Backend> Optimizer<B> {
    fn new(
        device: &mut Device<'_, B>,
        settings: OptimizerSettings,
        layout: &Layout,
        arena: &[f32],
    ) -> Self {
        let all = MasterPlace { range: 0..arena.len(), start: 0 };
        let held = Held::whole::<B>(layout);
        let parameters =
            Parameters::with_masters(device, layout, held, arena, &[all]).expect("fits");
        let Device { backend, stream } = device;
        let mut buffer = || backend.allocate(stream, arena.len()).expect("fits");
        let states = settings.states().iter().map(|_| buffer()).collect();
        let mean = buffer();
        Self { settings, parameters, states, mean }
    }

    /// One update; returns the norm of the mean gradient before clipping.
    fn step(
        &mut self,
        device: &mut Device<'_, B>,
        layout: &Layout,
        lane: &Lane<B>,
        tokens: u64,
        (step, learning_rate): (u64, f64),
    ) -> Result<f64> {
        let Device { backend, stream } = device;
        for (index, segment) in layout.segments().iter().enumerate() {
            let uses =
                (0..layout.uses().len()).filter(|&slot| layout.uses()[slot].segment == index);
            let slots: Vec<_> = uses.map(|slot| lane.slot(slot)).collect();
            let (range, elements) = (&segment.range, segment.range.len());
            let mut sums = backend.allocate::<f32>(stream, slots.len() * elements)?;
            for (index, &slot) in slots.iter().enumerate() {
                let place = SliceMut::new(&mut sums, index * elements, elements)?;
                backend.copy(stream, place, slot)?;
            }
            let others: Vec<usize> = (1..slots.len()).map(|index| index * elements).collect();
            let all = SliceMut::all(&mut sums);
            backend.mean_gradient(stream, all, 0, &others, elements, tokens as f32)?;
            let out = SliceMut::new(&mut self.mean, range.start, elements)?;
            backend.copy(stream, out, Slice::new(&sums, 0, elements)?)?;
        }
        let ends = [B::elements(&self.mean)];
        let mut squares = backend.allocate::<f64>(stream, 1)?;
        let out = SliceMut::all(&mut squares);
        backend.sums_of_squares(stream, out, Slice::all(&self.mean), &ends)?;
        let norm = backend.to_vec(stream, Slice::all(&squares))?[0].sqrt();
        let gradient_scale = self.settings.clip_coefficient(norm) as f32;
        let rule = self.settings.rule::<B>();
        for tensor in layout.tensors() {
            let (start, elements) = (tensor.offset, tensor.stored_elements);
            let terms = UpdateTerms::of(tensor.decay);
            let scalars = UpdateScalars::new(step, learning_rate, gradient_scale, terms);
            let Self { parameters, states, mean, .. } = self;
            let place = MasterPlace { range: start..start + elements, start };
            parameters.update(device, &place, |device, parameters| {
                let states = states.iter_mut();
                let states = states.map(|state| SliceMut::new(state, start, elements));
                let views = UpdateViews {
                    tensor: None,
                    parameters,
                    states: states.collect::<std::result::Result<_, _>>()?,
                    gradient: Slice::new(mean, start, elements)?,
                };
                rule.update(device, views, scalars)
            })?;
        }
        Ok(norm)
    }
}

pub fn six_steps<B: Backend>(arm: &Arm<B>) {
    for case in CASES {
        six_steps_of(arm, case);
    }
}

fn six_steps_of<B: Backend>(arm: &Arm<B>, case: &str) {
    let [fp32, bf16] = TOLERANCES;
    let tolerance = arm.by_precision(fp32, bf16);
    let folder = folder(case);
    let (model, arena) = load(&folder).expect(case);
    let layout = model.layout();
    let training = &expected(&folder)["training"];
    let number = |key: &str| training["settings"][key].as_f64().expect(key);
    let betas = numbers(&training["settings"]["betas"]);
    let settings = OptimizerSettings {
        learning_rate: number("learning_rate"),
        betas: Some([betas[0], betas[1]]),
        eps: Some(number("eps")),
        weight_decay: number("weight_decay"),
        clip_norm: number("clip_norm"),
        ..OptimizerSettings::default()
    };
    let schedule = ScheduleSettings {
        warmup_steps: Some(number("warmup_steps") as u64),
        final_fraction: number("final_fraction"),
        ..ScheduleSettings::default()
    };
    let mut stream = arm.backend.device_stream().expect("a device stream");
    let device = &mut Device { backend: &arm.backend, stream: &mut stream };
    let mut optimizer = Optimizer::new(device, settings, layout, &arena);
    let shape = MicrobatchShape { samples: 5, positions: 13, samples_per_grain: 2 };
    let mut workspace = model.plan(device, shape).expect("plans");
    let batches = training["batches"].as_array().expect("batches");
    let lines = training["steps"].as_array().expect("steps");
    assert_eq!((batches.len(), lines.len()), (6, 6));
    let mut worst: f64 = 0.0;
    for (index, (batch, line)) in batches.iter().zip(lines).enumerate() {
        let rows = batch.as_array().expect("rows");
        let samples: Vec<_> = rows.iter().map(tokens).collect();
        let microbatch = Microbatch {
            samples: &samples,
            positions: 13,
            samples_per_grain: 2,
            document_end: None,
        };
        let mut lane = Lane::new(device, layout);
        let mut source = optimizer.parameters.source(layout);
        let losses = model
            .forward_backward(device, &mut workspace, &mut source, microbatch, &mut lane)
            .expect("a step");
        let loss_sum: f64 = losses.iter().map(|grain| grain.loss_sum).sum();
        let count: u64 = losses.iter().map(|grain| grain.tokens).sum();
        let step = index as u64 + 1;
        let base = optimizer.settings.learning_rate;
        let learning_rate = schedule.learning_rate(base, step, number("horizon") as u64);
        let norm = optimizer.step(device, layout, &lane, count, (step, learning_rate));
        for (what, found, tolerance) in [
            ("loss", loss_sum / count as f64, tolerance),
            ("grad_norm", norm.expect("an update"), tolerance),
            ("learning_rate", learning_rate, 1e-12),
        ] {
            let expected = line[what].as_f64().expect(what);
            // Norms above 1 are compared relatively.
            let error = (found - expected).abs() / expected.max(1.0);
            worst = worst.max(error);
            assert!(
                error < tolerance,
                "{}: {case}, step {step}: {what} {found}, transformers {expected}",
                arm.name
            );
        }
    }
    println!("{}: {case}: losses and norms within {worst:.1e}", arm.name);
}
