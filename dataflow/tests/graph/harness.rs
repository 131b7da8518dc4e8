//! Runs the training graph over threads or over processes and gathers everything that must not differ.

use std::cell::Cell;
use std::collections::{BTreeMap, VecDeque};
use std::net::TcpListener;
use std::num::NonZeroU64;
use std::ops::Range;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use tidemill::batch::{BatchPlan, BatchSettings, MicrobatchGrains, MicrobatchMemory};
use tidemill::cluster::{ClusterError, ClusterSettings, Failure, WorkerContext, execute};
use tidemill::communicators::Communicators;
use tidemill::kernels::KernelError;
use tidemill::kernels::gpu::collectives::CollectiveLibrary;
use tidemill::kernels::{Backend, FloatEnvironment};
use tidemill::model::optimizer::StateArena;
use tidemill::model::{Tokens, Trainable};
use tidemill::operators::{
    CheckpointCuts, Communication, Connection, Evaluation, EvaluationPlan, EvaluationReport, Grain,
    InitialState, SampleName, SampleNames, StateSink, StepReport, Trainers, Training, TrainingPlan,
};
use tidemill::parallel::Sharding;
use timely::container::CapacityContainerBuilder;
use timely::dataflow::InputHandle;
use timely::dataflow::operators::{Exchange, Inspect};

#[path = "ends.rs"]
mod ends;

use ends::{Memory, Synthetic, sample};

#[path = "makers.rs"]
mod makers;

use makers::Makers;

#[path = "rule.rs"]
mod rule;

pub use rule::Rule;

pub const POSITIONS: usize = 5;

/// splitmix64.
pub fn random(seed: u64) -> u64 {
    let mut x = seed.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// A model and the device that trains it.
pub struct Subject<B, M> {
    pub backend: Arc<B>,
    /// The devices of further workers; without them all workers compute on one.
    pub others: Vec<Arc<B>>,
    pub model: Arc<M>,
    /// The vocabulary of its samples.
    pub vocab_size: usize,
    /// Elements of a chunk: so few that there are many chunks.
    pub chunk_elements: usize,
}

impl<B, M> Subject<B, M> {
    /// The device of worker `worker`.
    fn device(&self, worker: usize) -> &Arc<B> {
        match worker % (1 + self.others.len()) {
            0 => &self.backend,
            other => &self.others[other - 1],
        }
    }
}

impl<B, M> Clone for Subject<B, M> {
    fn clone(&self) -> Self {
        let (backend, model) = (Arc::clone(&self.backend), Arc::clone(&self.model));
        let others = self.others.clone();
        let Self { vocab_size, chunk_elements, .. } = *self;
        Self { backend, others, model, vocab_size, chunk_elements }
    }
}

/// The settings of a run, those that its bits may depend on and those that they may not.
#[derive(Clone, Debug)]
pub struct Run {
    pub workers: usize,
    /// Which of them train; where it is some, the others make [their own grains](Grains::Own).
    pub trainers: Trainers,
    pub processes: usize,
    /// On how many hosts they are, as their addresses say: all are of this machine.
    pub hosts: usize,
    pub samples: u64,
    pub lanes: usize,
    pub sharding: Sharding,
    pub microbatch: usize,
    pub read_ahead: u64,
    pub window_bytes: usize,
    pub staging_bytes: Option<usize>,
    pub bucket_elements: usize,
    /// The library that connects the devices of several processes.
    pub library: Option<fn() -> CollectiveLibrary>,
    pub steps: u64,
    pub checkpoint_every: u64,
    /// Where to begin: updates done, and the state after them.
    pub resume: Option<(u64, State)>,
    /// Ask worker `.0` to stop once it sees the report of update `.1`.
    pub stop: Option<(usize, u64)>,
    /// Replace the first token of the sample at position `.0` by `.1`.
    pub poison: Option<(u64, u32)>,
    /// Refuse to commit the checkpoint of this step.
    pub full_disk: Option<u64>,
    /// Where the grains of training come from.
    pub grains: Grains,
    /// How long anything may stand still, and then what is stuck may be left.
    pub step_deadline: Option<Duration>,
    /// The part that gets stuck.
    pub stuck: Option<Stuck>,
    /// Where it waits; is opened when the run has failed.
    pub gate: Gate,
    /// Where workers say what communication took.
    pub communication_log: CommunicationLog,
    /// The rule of updates.
    pub rule: Rule,
}

/// The reported communication, each entry with its worker and step.
#[derive(Clone, Debug, Default)]
pub struct CommunicationLog(pub Arc<Mutex<Vec<(usize, u64, Communication)>>>);

/// A part that gets stuck in the third step or before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stuck {
    /// The writer of checkpoints.
    Sink,
    /// The source of samples: it has none any more.
    Source,
    /// A user's own operator, on worker 0.
    Operator,
}

/// The stuck part waits here.
#[derive(Clone, Debug, Default)]
pub struct Gate(Arc<(Mutex<bool>, Condvar)>);

impl Gate {
    /// Waits until the gate is opened.
    pub fn wait(&self) {
        let closed = self.0.0.lock().unwrap();
        drop(self.0.1.wait_while(closed, |is_open| !*is_open).unwrap());
    }

    fn open(&self) {
        *self.0.0.lock().unwrap() = true;
        self.0.1.notify_all();
    }
}

/// Where the grains of training come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grains {
    /// The graph cuts them from a source of samples.
    Cut,
    /// The program around the graph makes them.
    Own,
}

impl Default for Run {
    fn default() -> Self {
        Self {
            workers: 1,
            trainers: Trainers::all(),
            processes: 1,
            hosts: 1,
            samples: 27,
            lanes: 8,
            sharding: Sharding::Optimizer,
            microbatch: 2,
            read_ahead: 2,
            window_bytes: 4 << 20,
            staging_bytes: None,
            bucket_elements: 100,
            library: None,
            steps: 6,
            checkpoint_every: 4,
            resume: None,
            stop: None,
            poison: None,
            full_disk: None,
            grains: Grains::Cut,
            step_deadline: None,
            stuck: None,
            gate: Gate::default(),
            communication_log: CommunicationLog::default(),
            rule: Rule::AdamW,
        }
    }
}

/// Bits of parameters and of the states.
pub type State = Vec<Vec<u32>>;

/// The results of a run: everything in bits.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    pub checkpoints: BTreeMap<u64, State>,
    /// Step, loss, norm, tokens so far and whether it was the last.
    pub reports: Vec<(u64, u64, u64, u64, bool)>,
    pub evaluations: BTreeMap<u64, (u64, u64)>,
}

impl Run {
    pub fn batch(&self) -> BatchPlan {
        let settings = BatchSettings {
            samples_per_step: Some(self.samples as usize),
            lanes: Some(self.lanes),
            grain_samples: 2,
            microbatch_grains: MicrobatchGrains::Grains(self.microbatch),
        };
        let memory = MicrobatchMemory { sample_bytes: 1, workspace_bytes: 1 };
        settings.plan(memory).unwrap().sharded(self.sharding)
    }

    /// How many workers train.
    fn ranks(&self) -> usize {
        self.trainers.place(0, self.workers).map_or(self.workers, |place| place.ranks())
    }

    pub fn plan<B: Backend, M: Trainable<B>>(&self, subject: &Subject<B, M>) -> TrainingPlan {
        let layout = subject.model.layout();
        let plan = TrainingPlan::new(self.batch(), layout, POSITIONS, self.steps);
        let plan = plan.of_unit(layout, self.rule.planned_unit());
        let mut plan = plan.with_cuts(layout, subject.chunk_elements, self.bucket_elements);
        plan.first_step = self.resume.as_ref().map_or(0, |(step, _)| *step);
        plan.first_tokens = plan.first_step * self.samples * POSITIONS as u64;
        plan.read_ahead_steps = NonZeroU64::new(self.read_ahead).unwrap();
        plan.window_bytes = self.window_bytes;
        plan.staging_bytes = self.staging_bytes;
        plan.trainers = self.trainers.clone();
        let name = |row| SampleName { file: "made-up.parquet".to_owned(), row };
        plan.sample_names = SampleNames::new(name);
        plan.evaluation_names = SampleNames::new(name);
        plan.checkpoints = CheckpointCuts::Every(NonZeroU64::new(self.checkpoint_every).unwrap());
        plan
    }

    /// The initial state of a worker: its owned part of the optimizer's states, and NaN elsewhere.
    fn state<B: Backend, M: Trainable<B>>(
        &self,
        model: &M,
        plan: &TrainingPlan,
        (worker, workers): (usize, usize),
    ) -> InitialState {
        // The initial values are computed in the standard floating-point environment, whichever the run is given.
        let _standard = FloatEnvironment::standard();
        let floats = |bits: &Vec<u32>| bits.iter().map(|&b| f32::from_bits(b)).collect::<Vec<_>>();
        let owned = |(bits, arena): (&Vec<u32>, StateArena)| {
            let mut values = floats(bits);
            for (chunk, owner) in plan.chunks.chunks().iter().zip(plan.owners(workers)) {
                if owner != worker {
                    values[arena.range(&chunk.range)].fill(f32::NAN);
                }
            }
            Arc::new(values)
        };
        match self.resume.as_ref().and_then(|(_, state)| state.split_first()) {
            Some((parameters, states)) => {
                let states = states.iter().zip(self.rule.arenas::<B>(model.layout()));
                InitialState {
                    parameters: Arc::new(floats(parameters)),
                    states: Some(states.map(owned).collect()),
                }
            }
            None => InitialState { parameters: Arc::new(model.initialize(3)), states: None },
        }
    }

    /// Runs; every trainer's reports must be the same, and the other workers have nothing.
    pub fn run_on<B: Backend, M: Trainable<B, Sample = Tokens>>(
        &self,
        subject: &Subject<B, M>,
    ) -> Result<Outcome, ClusterError> {
        let complete = Arc::new(Mutex::new(BTreeMap::new()));
        let mut outcomes = self.execute(subject, &complete)?;
        let place = self.trainers.place(0, self.workers).expect("trainers of the dataflow");
        let mut first = std::mem::take(&mut outcomes[place.worker(0)]);
        for &worker in &place.trainers()[1..] {
            let outcome = std::mem::take(&mut outcomes[worker]);
            assert_eq!(outcome.reports, first.reports, "every trainer has the same reports");
            first.evaluations.extend(outcome.evaluations);
        }
        assert!(outcomes.iter().all(|outcome| *outcome == Outcome::default()), "{outcomes:?}");
        first.checkpoints = complete.lock().unwrap().clone();
        Ok(first)
    }

    /// Runs; also what was committed where the run fails.
    pub fn run_to_failure_on<B: Backend, M: Trainable<B, Sample = Tokens>>(
        &self,
        subject: &Subject<B, M>,
    ) -> (ClusterError, BTreeMap<u64, State>) {
        let complete = Arc::new(Mutex::new(BTreeMap::new()));
        let error = self.execute(subject, &complete).expect_err("the run fails");
        self.gate.open();
        let complete = complete.lock().unwrap().clone();
        (error, complete)
    }

    fn execute<B: Backend, M: Trainable<B, Sample = Tokens>>(
        &self,
        subject: &Subject<B, M>,
        complete: &Arc<Mutex<BTreeMap<u64, State>>>,
    ) -> Result<Vec<Outcome>, ClusterError> {
        let host = |process| process * self.hosts / self.processes;
        let listener = |process| TcpListener::bind(format!("127.0.0.{}:0", 1 + host(process)));
        let listeners: Vec<_> = (0..self.processes).map(|of| listener(of).unwrap()).collect();
        let addresses: Vec<_> =
            listeners.iter().map(|l| l.local_addr().unwrap().to_string()).collect();
        let mut threads = Vec::new();
        for (process, listener) in listeners.into_iter().enumerate() {
            let local_workers = self.workers / self.processes;
            let mut settings = ClusterSettings::workers(local_workers);
            settings.step_deadline = self.step_deadline;
            settings.ending_deadline = self.step_deadline.unwrap_or(settings.ending_deadline);
            if self.processes > 1 {
                settings.process = process;
                settings.addresses = addresses.clone();
                settings.listener = Some(listener);
            }
            let (run, subject, complete) = (self.clone(), subject.clone(), Arc::clone(complete));
            let of_process = process * local_workers..(process + 1) * local_workers;
            let mut local: Vec<&B> = of_process.map(|worker| &**subject.device(worker)).collect();
            // Some of the workers are all of one process.
            local.truncate(self.ranks());
            let ends = self.communicators(&local, &settings);
            let work = move |context: &mut WorkerContext<'_>| {
                let local = context.index() % local_workers;
                let device = subject.device(process * local_workers + local);
                let end = ends.take_among(&run.trainers, context, device)?;
                let is_connected = run.library.is_some() && run.processes > 1;
                let is_library = matches!(ends, Communicators::Library { .. });
                assert!(is_library || !is_connected, "the library connects them");
                run.work(context, &subject, end, &complete)
            };
            threads.push(std::thread::spawn(move || execute(settings, work)));
        }
        let mut outcomes = Vec::new();
        let results: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        for result in results {
            outcomes.extend(result?);
        }
        Ok(outcomes)
    }

    /// The communicators of a process whose workers compute on `backends`.
    fn communicators<B: Backend>(
        &self,
        backends: &[&B],
        cluster: &ClusterSettings,
    ) -> Communicators<B> {
        let (library, missing) = match self.library {
            Some(library) => (Some(library()), None),
            None => (None, Some(KernelError::shape("run", "library", "one", "none"))),
        };
        let library = || library.ok_or_else(|| missing.expect("there is no library"));
        // The graph says what is wrong with it.
        let Ok(schedule) = self.batch().lane_schedule(self.ranks()) else {
            return Communicators::None;
        };
        Communicators::new(backends, cluster, schedule, self.sharding, library).unwrap()
    }

    /// The gate at which `what` gets stuck.
    fn gate(&self, what: Stuck) -> Option<Gate> {
        (self.stuck == Some(what)).then(|| self.gate.clone())
    }

    /// One worker.
    fn work<B: Backend, M: Trainable<B, Sample = Tokens>>(
        &self,
        context: &mut WorkerContext<'_>,
        subject: &Subject<B, M>,
        connection: Option<Connection<B>>,
        complete: &Arc<Mutex<BTreeMap<u64, State>>>,
    ) -> Result<Outcome, Failure> {
        let (index, abort) = (context.index(), context.abort().clone());
        let place = self.trainers.place(index, context.peers())?;
        let model = Arc::clone(&subject.model);
        let plan = Arc::new(self.plan(subject));
        let stop = Arc::new(AtomicBool::new(false));
        let (layout, arenas) = (model.layout(), self.rule.arenas::<B>(model.layout()));
        let all = 0..layout.parameter_elements();
        let of_states = arenas.iter().map(|arena| arena.range(&all).len());
        let sink = Memory {
            elements: std::iter::once(all.len()).chain(of_states).collect(),
            open: None,
            complete: Arc::clone(complete),
            full_disk: self.full_disk,
            gate: self.gate(Stuck::Sink),
        };
        let training = place.rank().map(|rank| Training {
            plan: Arc::clone(&plan),
            backend: Arc::clone(subject.device(index)),
            state: self.state(&*model, &plan, (rank, place.ranks())),
            model,
            rule: self.rule.scheduled(),
            connection,
            stop: Arc::clone(&stop),
            checkpoints: (rank == 0).then(|| Box::new(sink) as Box<dyn StateSink>),
            abort: abort.clone(),
        });
        let done = Rc::new(Cell::new(plan.first_step));
        let (seen, limit, of_step) = (Rc::clone(&done), self.read_ahead, self.samples);
        let vocab_size = subject.vocab_size as u64;
        let samples = |on_request, poison| {
            let waiting = VecDeque::new();
            let end = if self.gate(Stuck::Source).is_some() { 2 * self.samples } else { u64::MAX };
            Synthetic { waiting, polls: 0, wake: None, vocab_size, poison, end, on_request }
        };
        let bounded = Box::new(move |positions: Range<u64>| {
            let step = positions.start / of_step;
            assert!(step < seen.get() + limit, "step {step} was read too early");
        });
        let source = samples(bounded, self.poison);
        let planned = EvaluationPlan {
            samples: NonZeroU64::new(11).unwrap(),
            requests: 0,
            every_steps: NonZeroU64::new(4).unwrap(),
        };
        let evaluation = Evaluation::new(planned, samples(Box::new(|_| ()), None));
        let (sender, receiver) = std::sync::mpsc::channel();
        let (evaluated, evaluations) = std::sync::mpsc::channel::<EvaluationReport>();
        let ask = self.stop.filter(|&(worker, _)| worker == index);
        let mut input = InputHandle::<u64, CapacityContainerBuilder<Vec<Grain>>>::new();
        let makers = Makers::new(&plan.batch, &place, context.peers());
        context.dataflow::<u64, _, _>(|scope| {
            let mut made = |scope| {
                let makers = makers.clone();
                input.to_stream(scope).exchange(move |grain| makers.trainer(grain.lane) as u64)
            };
            let streams = match (self.grains, training) {
                (Grains::Cut, Some(training)) => training.build(scope, source, Some(evaluation)),
                (Grains::Own, Some(training)) => training.build_over(made(scope), Some(evaluation)),
                (Grains::Cut, None) => {
                    Training::<B, M>::build_elsewhere(scope, &plan, &abort, Some(planned))
                }
                (Grains::Own, None) => Training::<B, M>::build_over_elsewhere(
                    made(scope),
                    &plan,
                    &abort,
                    Some(planned),
                ),
            };
            let gate = self.gate(Stuck::Operator).filter(|_| index == 0);
            streams.reports.inspect(move |report| {
                done.set(report.step);
                gate.iter().filter(|_| report.step == 2).for_each(Gate::wait);
                if ask.is_some_and(|(_, step)| step == report.step) {
                    stop.store(true, Ordering::Relaxed);
                }
                sender.send(*report).unwrap();
            });
            let log = self.communication_log.clone();
            streams.communication.inspect(move |report| {
                log.0.lock().unwrap().push((index, report.step, report.communication));
            });
            streams.evaluations.inspect(move |report| evaluated.send(report.clone()).unwrap());
        });
        if self.grains == Grains::Own {
            let batch = &plan.batch;
            for step in plan.first_step..plan.steps {
                input.advance_to(step);
                for lane in makers.made_by(index) {
                    for grain in 0..batch.lane_grains(lane) {
                        let positions = batch.positions(step, &batch.grain_range(lane, grain));
                        let samples = positions.map(|at| sample(at, vocab_size, self.poison));
                        let samples = samples.collect();
                        input.send(Grain { step, lane, grain, samples });
                    }
                }
            }
        }
        input.close();
        context.run_until_done()?;
        let report = |r: StepReport| {
            (r.step, r.loss.to_bits(), r.grad_norm.to_bits(), r.total_tokens, r.last)
        };
        let evaluation = |r: EvaluationReport| (r.step, (r.loss.to_bits(), r.tokens));
        Ok(Outcome {
            checkpoints: BTreeMap::new(),
            reports: receiver.iter().map(report).collect(),
            evaluations: evaluations.iter().map(evaluation).collect(),
        })
    }
}
