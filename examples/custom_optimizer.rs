//! An optimizer of your own: an update rule over states that you name.
//!
//! ```text
//! cargo run --release --example custom_optimizer
//! ```
//!
//! Gradient descent with Nesterov's momentum keeps one state for each parameter. The rule has a
//! name for the state and computes an update from views; the library distributes parameters over
//! workers, moves them and writes the state to checkpoints. The rule computes element by element,
//! so that the losses have the same bits with one worker and with three.

use std::collections::VecDeque;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Result, ensure};
use tidemill::batch::{BatchPlan, BatchSettings, MicrobatchMemory};
use tidemill::cluster::{ClusterSettings, Failure, WorkerContext, execute};
use tidemill::communicators::Communicators;
use tidemill::kernels::Cpu;
use tidemill::model::optimizer::{
    HostViews, OptimizerSettings, StateSpec, UpdateRule, UpdateScalars, UpdateViews,
};
use tidemill::model::schedule::ScheduleSettings;
use tidemill::model::{Device, LanguageModel, MambaConfig, Tokens, Trainable};
use tidemill::operators::{
    InitialState, SampleSource, ScheduledRule, Training, TrainingPlan, Wake,
};
use timely::dataflow::operators::Inspect;

/// Predicted tokens of a sample.
const POSITIONS: usize = 31;
const VOCABULARY: usize = 16;
const STEPS: u64 = 30;

/// `m = momentum m + g;  p -= learning_rate (g + momentum m + weight_decay p)`
struct Nesterov {
    momentum: f32,
    weight_decay: f64,
}

impl UpdateRule<Cpu> for Nesterov {
    fn states(&self) -> &[StateSpec] {
        const { &[StateSpec::of_elements("momentum")] }
    }

    fn update(
        &self,
        _device: &mut Device<'_, Cpu>,
        views: UpdateViews<'_, Cpu>,
        scalars: UpdateScalars,
    ) -> tidemill::model::Result<()> {
        let HostViews { parameters, mut states, gradient, .. } = views.on_host();
        let learning_rate = scalars.learning_rate as f32;
        let weight_decay = scalars.weight_decay.or_of_rule(self.weight_decay) as f32;
        let states = states.iter_mut().flat_map(|state| state.iter_mut());
        for ((p, m), g) in parameters.iter_mut().zip(states).zip(gradient) {
            // The gradient is clipped as the run's settings say.
            let g = g * scalars.gradient_scale;
            *m = self.momentum * *m + g;
            *p -= learning_rate * (g + self.momentum * *m + weight_decay * *p);
        }
        Ok(())
    }
}

/// Trains with one worker and with three.
pub fn main() -> Result<()> {
    let (one, three) = (train(1)?, train(3)?);
    ensure!(one == three, "the losses must not depend on the number of workers");
    let (first, last) = (one[0], one[one.len() - 1]);
    println!("loss {first:.3} -> {last:.3}: the same bits with 1 and with 3 workers");
    ensure!(last < 0.7 * first, "the model learns to count");
    Ok(())
}

fn train(workers: usize) -> Result<Vec<f64>> {
    let cluster = ClusterSettings::workers(workers);
    let cpu = Arc::new(Cpu::new(NonZeroUsize::MIN)?);
    let batch = BatchSettings { samples_per_step: Some(8), lanes: Some(8), ..Default::default() };
    let batch = batch.plan(MicrobatchMemory { sample_bytes: 0, workspace_bytes: 0 })?;
    let communicators = Communicators::of_cluster(&vec![&*cpu; workers], &cluster, &batch)?;
    let program =
        move |context: &mut WorkerContext<'_>| worker(context, &cpu, &batch, &communicators);
    let per_worker = execute(cluster, program)?;
    Ok(per_worker.into_iter().next().unwrap_or_default())
}

fn worker(
    context: &mut WorkerContext<'_>,
    cpu: &Arc<Cpu>,
    batch: &BatchPlan,
    communicators: &Communicators<Cpu>,
) -> Result<Vec<f64>, Failure> {
    let model = Arc::new(LanguageModel::new(&MambaConfig::new(VOCABULARY, 32, 2))?);
    let layout = Trainable::<Cpu>::layout(model.as_ref());
    let parameters = Arc::new(Trainable::<Cpu>::initialize(model.as_ref(), 17));
    // Your own rule uses two of the settings: the base learning rate and the norm for clipping.
    let settings = OptimizerSettings { learning_rate: 0.3, ..Default::default() };
    let rule = Arc::new(Nesterov { momentum: 0.9, weight_decay: 1e-4 });
    let training = Training {
        plan: Arc::new(TrainingPlan::new(batch.clone(), layout, POSITIONS, STEPS)),
        backend: Arc::clone(cpu),
        state: InitialState { parameters, states: None },
        model,
        rule: ScheduledRule::with_rule(rule, &settings, ScheduleSettings::default(), STEPS),
        connection: communicators.take(context, cpu)?,
        stop: Arc::new(AtomicBool::new(false)),
        checkpoints: None,
        abort: context.abort().clone(),
    };
    let losses = Arc::new(Mutex::new(Vec::new()));
    let kept = Arc::clone(&losses);
    context.dataflow::<u64, _, _>(|scope| {
        training.build(scope, Counting::default(), None).reports.inspect(move |report| {
            kept.lock().unwrap_or_else(PoisonError::into_inner).push(report.loss);
        });
    });
    context.run_until_done()?;
    let mut losses = losses.lock().unwrap_or_else(PoisonError::into_inner);
    Ok(std::mem::take(&mut *losses))
}

/// Samples that count up from their own position.
#[derive(Default)]
struct Counting {
    requested: VecDeque<u64>,
}

impl SampleSource for Counting {
    type Sample = Tokens;

    fn request(&mut self, positions: Range<u64>) {
        self.requested.extend(positions);
    }

    fn poll(&mut self) -> Result<Option<(u64, Tokens)>, Failure> {
        Ok(self.requested.pop_front().map(|position| {
            let token = |index| ((position as usize + index) % VOCABULARY) as u32;
            (position, (0..=POSITIONS).map(token).collect())
        }))
    }

    fn set_wake(&mut self, _wake: Wake) {}
}
