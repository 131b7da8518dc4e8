//! The run folder as worker 0 finds it: held, swept, and the state that the run goes on from.

use std::path::Path;
use std::sync::Arc;

use tidemill_kernels::Backend;
use tidemill_model::hugging_face;
use tidemill_streaming_data::store::Cancel;

use super::elsewhere::Elsewhere;
use super::resolve::{HORIZON_KEY, ResolvedRun};
use super::restore::{StartPoint, StateOrigin, StoredState};
use super::resume;
use super::train::TrainEvent;
use super::worker::Shared;
use crate::checkpoint::{self, LocalCopy, StateFiles, TrainerState, Wanted};
use crate::cluster::Abort;
use crate::cluster::progress::{self, Phase};
use crate::error::Result;
use crate::run_folder::{RunFolder, Writes};

/// A run folder that is held, and where its run goes on.
pub(super) struct OpenedRun {
    pub folder: Arc<RunFolder>,
    pub origin: (StartPoint, StateOrigin),
    /// How the kind of device differs from the checkpoint's.
    pub device_changes: Vec<String>,
}

impl OpenedRun {
    /// Opens the run; the checkpoint that it goes on from is looked at, not read.
    /// Waiting for a store ends when the run is aborted. `elsewhere` is the state that other processes have of the run.
    pub fn open<B: Backend>(
        shared: &Shared<B>,
        elsewhere: Option<Elsewhere>,
        abort: &Abort,
    ) -> Result<Self> {
        let run = &shared.run;
        let (layout, states) = (run.model.layout(), run.config.optimizer.states());
        let (dir, settings) = (&run.config.run.dir, run.config.data.remote());
        let _in_store = run.keeps_state_in_store().then(|| progress::during(Phase::UsingStore));
        let latest = RunFolder::latest_step(dir, &settings)?;
        elsewhere.map_or(Ok(()), |elsewhere| elsewhere.check(run, latest))?;
        if latest.is_none() {
            // A run that cannot begin leaves no folder; one that goes on keeps the horizon that was checked then.
            run.check_beginning()?;
        }
        let cancel = Cancel::default();
        let folder = RunFolder::hold_with(dir, &settings)?.cancelled_by(cancel.clone());
        let on_abort = cancel.clone();
        abort.on_abort(move || on_abort.cancel());
        checkpoint::sweep(folder.path())?;
        let mut now = run.initial_state(shared.devices.kind());
        let mut device_changes = Vec::new();
        let mut writes = Writes::Something;
        if let Some((path, saved)) = folder.peek()? {
            // A run that may not go on leaves the folder to the one that has it.
            keep_horizon(run, &saved, &mut now);
            resume::check(&saved, &now, &path)?;
            run.check_cursor(Some(&saved.cursor))?;
            if saved.step >= run.steps {
                writes = Writes::Nothing;
            }
        }
        let on_fetch = |path: &Path| {
            (shared.observer)(&TrainEvent::Fetching { path: path.to_owned() });
        };
        let origin = match folder.begin(writes, on_fetch)? {
            None => {
                run.check_cursor(None)?;
                let parameters = match &run.weights_from {
                    Some(weights) => {
                        let copy = LocalCopy::of_with(weights, Wanted::Model, &settings, cancel)?;
                        copy.read(|folder| Ok(hugging_face::read_weights(folder, layout)?))?
                    }
                    None => run.model.initialize(run.config.run.seed),
                };
                let start = StartPoint { step: 0, tokens: 0, horizon: run.horizon() };
                (start, StateOrigin::Parameters(parameters))
            }
            Some(found) => {
                let files = found.files.read(|path| StateFiles::open(path, layout, states))?;
                let saved = files.state();
                keep_horizon(run, saved, &mut now);
                resume::check(saved, &now, &found.path)?;
                run.check_cursor(Some(&saved.cursor))?;
                device_changes = resume::device_changes(saved, &now);
                let horizon = saved.settings.get(HORIZON_KEY).and_then(|steps| steps.as_u64());
                let start = StartPoint {
                    step: saved.step,
                    tokens: saved.tokens,
                    horizon: horizon.unwrap_or(run.steps),
                };
                let token = folder.token().map(str::to_owned);
                let stored = StoredState { copy: found.files, files, token };
                (start, StateOrigin::Checkpoint(Box::new(stored)))
            }
        };
        Ok(Self { folder: Arc::new(folder), origin, device_changes })
    }
}

/// Writes down the run's config, if it has steps left: once the state that it goes on from is known to be whole.
pub(super) fn write_down<B: Backend>(
    shared: &Shared<B>,
    folder: &RunFolder,
    start: &StartPoint,
) -> Result<()> {
    let run = &shared.run;
    if start.step >= run.steps {
        return Ok(());
    }
    let _in_store = folder.is_in_store().then(|| progress::during(Phase::UsingStore));
    folder.write_config(&run.to_toml_with(start.horizon))?;
    folder.write_devices(&shared.devices.to_json())
}

/// The horizon of a run that has begun stays, unless the user names one: then it must be the same.
fn keep_horizon(run: &ResolvedRun, saved: &TrainerState, now: &mut TrainerState) {
    let horizon = saved.settings.get(HORIZON_KEY).and_then(|steps| steps.as_u64());
    if let (None, Some(horizon)) = (run.config.schedule.steps, horizon) {
        run.set_horizon(now, horizon);
    }
}
