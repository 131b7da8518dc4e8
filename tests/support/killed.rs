//! A run that is killed twice and goes on with other workers.

use tidemill::checkpoint;

use super::processes::wait_until;
use super::workbench::causes;
use super::{Job, Workbench, assert_same};

/// Steps of the run, with a checkpoint after every third.
const STEPS: [&str; 3] = ["run.steps=40", "schedule.steps=40", "checkpoint.every_steps=3"];

/// Trains by `config` with the settings `set`, kills the process of two workers and then that of three, each after a checkpoint of its
/// own, and goes on with two processes. Every file and number is that of one worker that was not disturbed.
pub fn goes_on_where_it_was_killed(bench: &Workbench, name: &str, config: &str, set: &[&str]) {
    let set = [&STEPS, set].concat();
    let (undisturbed, killed) = (format!("{name}-undisturbed"), format!("{name}-killed"));
    bench
        .try_train_with(config, Job { dir: &undisturbed, workers: 1, set: &set })
        .unwrap_or_else(|error| panic!("{name}: {}", causes(&error)));
    let (file, run_dir) = (format!("{name}.toml"), format!("run.dir={killed}"));
    bench.write(&file, config);
    let arguments = |world: &[&'static str]| -> Vec<&str> {
        let set = set.iter().copied().chain([run_dir.as_str()]);
        let set = set.flat_map(|assignment| ["--set", assignment]);
        ["train", &file].into_iter().chain(world.iter().copied()).chain(set).collect()
    };
    let folder = bench.path(&killed);
    // A folder that is still being written does not count.
    let newest = || checkpoint::latest(&folder).unwrap().map(|entry| entry.step);
    for world in [["-w", "2"], ["-w", "3"]] {
        let before = newest();
        let mut run = bench.start(&arguments(&world));
        wait_until("another checkpoint", || newest() > before || run.has_ended());
        run.signal("KILL");
        let finished = run.finish();
        assert_eq!(finished.status.code(), None, "it ended before it was killed: {finished:?}");
        assert_eq!(finished.stderr.contains("resuming after step"), before.is_some());
    }
    let saved = newest();
    assert!(saved < Some(40), "{name}: nothing is left to do");
    let finished = bench.tidemill(&arguments(&["-n", "2", "-w", "1"])).expect(0);
    let resumed = format!("resuming after step {}", saved.expect("a checkpoint"));
    assert!(finished.stderr.contains(&resumed), "{resumed}: {finished:?}");
    let reference = bench.outcome(&undisturbed);
    assert_same(&bench.outcome(&killed), &reference, &format!("{name}, killed twice"));
}
