//! The state that workers of one process and of several start from.

use std::collections::BTreeSet;
use std::path::PathBuf;

use tidemill_collective::PlannedChunk;
use tidemill_model::Decay;
use tidemill_model::optimizer::{StateExtent, StateTensors};

use super::*;
use crate::checkpoint::{CheckpointFiles, CheckpointWriter, FilePlan, Wanted, state_for_tests};
use crate::cluster::ClusterError;
use crate::job::fixtures::in_processes;

/// One state more than AdamW has, and one of rows.
const STATES: [StateSpec; 4] = [
    StateSpec::of_elements("exp_avg"),
    StateSpec::of_elements("exp_avg_sq"),
    StateSpec::of_elements("third"),
    StateSpec { name: "row", extent: StateExtent::Row, tensors: StateTensors::MATRICES },
];

/// A rule of these states.
fn rule(unit: UpdateUnit) -> RuleStates<'static> {
    RuleStates { states: &STATES, unit }
}

const UNITS: [UpdateUnit; 2] = [UpdateUnit::Element, UpdateUnit::Tensor];

fn arenas() -> StateArenas {
    StateArenas::new(&layout(), &STATES)
}

/// Five segments of several chunks each, of which no number of workers owns the same.
fn layout() -> Layout {
    let mut layout = Layout::new();
    for index in 0..5 {
        let segment = layout.segment(format!("layers.{index}"));
        layout.tensor(format!("layers.{index}.matrix"), &[700, 300], Decay::Decayed, 8);
        layout.tensor(format!("layers.{index}.vector"), &[37], Decay::Exempt, 1);
        layout.block(format!("layers.{index}"), &[segment]);
    }
    layout
}

/// A value for each element of each part; padding is zero.
fn values(part: StatePart) -> Vec<f32> {
    let arenas = arenas();
    let layout = arenas.layout(part);
    let mut arena = vec![0.0; layout.parameter_elements()];
    for tensor in layout.tensors() {
        for index in tensor.range() {
            arena[index] = (index % 1000) as f32 + 0.25 * part.index() as f32;
        }
    }
    arena
}

const START: StartPoint = StartPoint { step: 3, tokens: 30, horizon: 9 };

/// A run folder with the checkpoint of step 3, whose parameters are `shift` larger.
fn write_checkpoint(run: &Path, shift: f32) {
    let layout = layout();
    std::fs::create_dir_all(run).unwrap();
    let files = CheckpointFiles {
        plan: Arc::new(FilePlan::new(&layout, &STATES, 500_000)),
        config: serde_json::json!({"model_type": "test"}),
        tokenizer: None,
        keep: 2,
    };
    let state = state_for_tests(START.step);
    let mut writer = CheckpointWriter::begin(files, run, state).unwrap();
    for part in StatePart::all(STATES.len()) {
        let mut values = values(part);
        values.iter_mut().for_each(|value| *value += shift);
        writer.write(part, 0, &values).unwrap();
    }
    writer.commit().unwrap();
}

/// The starting states of processes that have these run folders, with so many workers each. `origin` is called on worker 0.
fn restored(
    run_dirs: &[PathBuf],
    (threads, unit): (usize, UpdateUnit),
    origin: impl Fn() -> StateOrigin + Send + Sync + 'static,
) -> Vec<std::result::Result<Vec<Restored>, ClusterError>> {
    in_processes(run_dirs, threads, move |context, run_dir| {
        let origin = (context.index() == 0).then(|| (START, origin()));
        distribute(context, origin, (&layout(), rule(unit)), run_dir)
    })
}

/// The checkpoint of a run folder that is held.
fn stored(run: &RunFolder) -> StateOrigin {
    let path = checkpoint_path(run.path(), START.step);
    StateOrigin::Checkpoint(Box::new(StoredState {
        copy: LocalCopy::of(&path, Wanted::Checkpoint).unwrap(),
        files: StateFiles::open(&path, &layout(), &STATES).unwrap(),
        token: run.token().map(str::to_owned),
    }))
}

/// Every worker has all parameters, and the states of its part; those of a process share them. Answers the bytes that
/// each process was sent.
fn assert_restored(
    processes: Vec<std::result::Result<Vec<Restored>, ClusterError>>,
    unit: UpdateUnit,
    stored: Stored,
) -> Vec<u64> {
    let (layout, arenas) = (layout(), arenas());
    let parameters = values(StatePart::Parameter);
    let expected: Vec<_> = arenas.parts().skip(1).map(|part| (part, values(part))).collect();
    let processes: Vec<_> = processes.into_iter().map(|process| process.unwrap()).collect();
    let workers: usize = processes.iter().map(Vec::len).sum();
    let (chunks, buckets) = cut(&layout, unit, CHUNK_ELEMENTS, BUCKET_ELEMENTS);
    let owners = buckets.chunk_owners(&chunks, workers);
    let mut received = Vec::new();
    for (process, restored) in processes.iter().enumerate() {
        for (thread, worker) in restored.iter().enumerate() {
            assert_eq!(worker.start, START);
            assert!(*worker.state.parameters == parameters);
            assert!(Arc::ptr_eq(&worker.state.parameters, &restored[0].state.parameters));
            let Some(found) = &worker.state.states else {
                assert!(stored == Stored::Parameters);
                continue;
            };
            let index = process * restored.len() + thread;
            assert_eq!(found.len(), expected.len());
            for (state, (part, expected)) in found.iter().zip(&expected) {
                assert_eq!(state.len(), expected.len());
                for (planned, _) in
                    chunks.chunks().iter().zip(&owners).filter(|(_, owner)| **owner == index)
                {
                    let owned = arenas.range(*part, &planned.range);
                    assert!(state[owned.clone()] == expected[owned]);
                }
            }
        }
        let bytes: BTreeSet<_> = restored.iter().map(|worker| worker.received_bytes).collect();
        assert_eq!(bytes.len(), 1);
        received.extend(bytes);
    }
    received
}

/// Bytes that `process` needs where it sees nothing itself.
fn needed_bytes(
    process: usize,
    (processes, threads): (usize, usize),
    unit: UpdateUnit,
    stored: Stored,
) -> u64 {
    let (layout, arenas) = (layout(), arenas());
    let (chunks, buckets) = cut(&layout, unit, CHUNK_ELEMENTS, BUCKET_ELEMENTS);
    let owners = buckets.chunk_owners(&chunks, processes * threads);
    let of_process =
        chunks.chunks().iter().zip(owners).filter(|(_, owner)| owner / threads == process);
    let of_part = |part, planned: &PlannedChunk| arenas.range(part, &planned.range).len();
    let of_chunk =
        |(planned, _)| arenas.parts().skip(1).map(|it| of_part(it, planned)).sum::<usize>();
    let owned: usize = of_process.map(of_chunk).sum();
    let states = if stored == Stored::States { owned } else { 0 };
    4 * (layout.parameter_elements() + states) as u64
}

#[test]
fn the_state_crosses_to_each_process_once_and_lies_there_once() {
    let dir = tempfile::tempdir().unwrap();
    write_checkpoint(dir.path(), 0.0);
    let run = Arc::new(RunFolder::hold(dir.path()).unwrap());
    let worlds = [(1, 1), (1, 3), (2, 1), (2, 2), (3, 2)];
    for ((processes, threads), unit) in
        worlds.into_iter().flat_map(|it| UNITS.map(|unit| (it, unit)))
    {
        // The others have a folder of their own.
        let own = dir.path().join("elsewhere");
        let run_dirs = vec![own; processes];
        let held = Arc::clone(&run);
        let found = restored(&run_dirs, (threads, unit), move || stored(&held));
        let received = assert_restored(found, unit, Stored::States);
        let parameters = values(StatePart::Parameter);
        let initial = move || StateOrigin::Parameters(parameters.clone());
        let begun = restored(&run_dirs, (threads, unit), initial);
        let begun = assert_restored(begun, unit, Stored::Parameters);
        for process in 0..processes {
            let needed = |stored| match process {
                0 => 0,
                _ => needed_bytes(process, (processes, threads), unit, stored),
            };
            assert_eq!(received[process], needed(Stored::States), "{processes} x {threads}");
            assert_eq!(begun[process], needed(Stored::Parameters), "{processes} x {threads}");
        }
    }
}

#[test]
fn a_process_that_sees_the_checkpoint_is_sent_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (run_dir, link) = (dir.path().join("run"), dir.path().join("link"));
    write_checkpoint(&run_dir, 0.0);
    std::os::unix::fs::symlink(&run_dir, &link).unwrap();
    let run = Arc::new(RunFolder::hold(&run_dir).unwrap());
    for threads in [1, 2, 3] {
        let run_dirs = [run_dir.clone(), link.clone(), dir.path().join("missing")];
        let held = Arc::clone(&run);
        for unit in UNITS {
            let held = Arc::clone(&held);
            let found = restored(&run_dirs, (threads, unit), move || stored(&held));
            let received = assert_restored(found, unit, Stored::States);
            assert_eq!(received, [0, 0, needed_bytes(2, (3, threads), unit, Stored::States)]);
        }
    }
}

/// The other folders have a checkpoint of the same step, one of them with process 0's `trainer.json`, but process 0 holds neither.
#[test]
fn another_folder_with_a_checkpoint_of_the_same_step_is_not_read() {
    let dir = tempfile::tempdir().unwrap();
    let [run_dir, other, copy] = ["run", "other", "copy"].map(|name| dir.path().join(name));
    write_checkpoint(&run_dir, 0.0);
    write_checkpoint(&other, 1.0);
    write_checkpoint(&copy, 1.0);
    let name = |run: &Path| checkpoint_path(run, START.step).join(crate::checkpoint::TRAINER_FILE);
    std::fs::copy(name(&run_dir), name(&copy)).unwrap();
    let run = Arc::new(RunFolder::hold(&run_dir).unwrap());
    let also_held = RunFolder::hold(&other).unwrap();
    let run_dirs = [run_dir, other, copy];
    let unit = UpdateUnit::Element;
    let found = restored(&run_dirs, (1, unit), move || stored(&run));
    let received = assert_restored(found, unit, Stored::States);
    assert!(received[1] > 0 && received[2] > 0);
    drop(also_held);
}

/// The checkpoint that a folder of the same token has may be another than the one that was announced.
#[test]
fn a_checkpoint_that_another_has_replaced_is_not_read() {
    let dir = tempfile::tempdir().unwrap();
    write_checkpoint(dir.path(), 0.0);
    let run = RunFolder::hold(dir.path()).unwrap();
    let StateOrigin::Checkpoint(stored) = stored(&run) else { unreachable!() };
    let identity =
        |fingerprint| FilesIdentity { token: stored.token.clone().unwrap(), fingerprint };
    let seen = |identity: FilesIdentity| {
        find_files(dir.path(), &START, &identity, (&layout(), &STATES)).is_some()
    };
    assert!(seen(identity(stored.files.fingerprint())));
    assert!(!seen(identity("xxh3-128:another".to_owned())));
}

/// Process 1 waits for what worker 0 would send next.
#[test]
fn a_run_that_is_aborted_in_the_middle_of_restoring_ends() {
    let dir = tempfile::tempdir().unwrap();
    write_checkpoint(dir.path(), 0.0);
    let run = RunFolder::hold(dir.path()).unwrap();
    let model = checkpoint_path(dir.path(), START.step).join("model-00001-of-00005.safetensors");
    let run_dirs = [dir.path().to_owned(), dir.path().join("missing")];
    let found = restored(&run_dirs, (2, UpdateUnit::Element), move || {
        let origin = stored(&run);
        let mut bytes = std::fs::read(&model).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        std::fs::write(&model, bytes).unwrap();
        origin
    });
    for process in found {
        let error = process.unwrap_err().with_causes();
        assert!(error.contains("00001-of-00005.safetensors: damaged: checksum"), "{error}");
    }
}
