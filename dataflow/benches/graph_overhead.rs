//! What the training graph itself costs a step: a model whose arithmetic takes a few microseconds, 3,000 steps.
//!
//! ```text
//! cargo bench -p tidemill --bench graph_overhead
//! ```

#[path = "../tests/graph/bigram.rs"]
mod bigram;

use std::collections::VecDeque;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use tidemill::batch::{BatchSettings, MicrobatchMemory};
use tidemill::cluster::{ClusterSettings, Failure, execute};
use tidemill::kernels::Cpu;
use tidemill::kernels::backend::AdamWStep;
use tidemill::model::Trainable;
use tidemill::operators::{InitialState, SampleSource, Training, TrainingPlan, UpdateRule, Wake};
use tidemill::streaming_data::Sample;

use bigram::Bigram;

const STEPS: u64 = 3_000;

fn random(seed: u64) -> u64 {
    seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29).wrapping_mul(0xbf58_476d_1ce4_e5b9)
}

struct Ready(VecDeque<u64>);

impl SampleSource for Ready {
    fn request(&mut self, positions: Range<u64>) {
        self.0.extend(positions);
    }

    fn poll(&mut self) -> Result<Option<Sample>, Failure> {
        let sample = |position| Sample { position, tokens: vec![position as u32 % 64, 5, 9] };
        Ok(self.0.pop_front().map(sample))
    }

    fn set_wake(&mut self, _wake: Wake) {}
}

fn rule() -> UpdateRule {
    UpdateRule {
        clip_norm: Some(1.0),
        learning_rate: Arc::new(|_| 1e-4),
        adamw: Arc::new(|_, gradient_scale, _| AdamWStep {
            learning_rate: 1e-4,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            decay_factor: 1.0,
            bias_correction1: 1.0,
            bias_correction2: 1.0,
            gradient_scale,
        }),
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    for workers in [1, 2, 4] {
        let start = Instant::now();
        execute(ClusterSettings::threads(workers), |context| {
            let model = Arc::new(Bigram::new());
            let memory = MicrobatchMemory { sample_bytes: 1, workspace_bytes: 1 };
            let settings =
                BatchSettings { samples_per_step: 4, lanes: Some(4), ..BatchSettings::default() };
            let plan = TrainingPlan::new(settings.plan(memory)?, model.layout(), 2, STEPS);
            let parameters = Arc::new(model.initialize(1));
            let training = Training {
                plan: Arc::new(plan),
                backend: Arc::new(Cpu::new(NonZeroUsize::MIN)?),
                model,
                state: InitialState { parameters, moments: None },
                rule: rule(),
                stop: Arc::new(AtomicBool::new(false)),
                checkpoints: None,
                abort: context.abort().clone(),
            };
            context.dataflow::<u64, _, _>(|scope| {
                training.build(scope, Ready(VecDeque::new()), None);
            });
            Ok(context.run_until_done()?)
        })?;
        let step = start.elapsed().as_secs_f64() * 1e6 / STEPS as f64;
        println!("{workers} workers: {step:.0} microseconds a step");
    }
    Ok(())
}
