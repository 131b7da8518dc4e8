//! Which processes have the run folder of process 0 before them, and may write into it.
//!
//! That a folder is the same, and not one that looks like it, is known by the token of the run that holds it.

use std::path::{Path, PathBuf};

use tidemill_streaming_data::store::Location;

use super::mail::mail;
use crate::cluster::progress::{self, Phase};
use crate::cluster::{Failure, WorkerContext};
use crate::operators::addressed::Addressed;
use crate::run_folder::RunFolder;

/// A run folder and the processes that have it.
#[derive(Clone, Debug)]
pub struct SharedFolder {
    /// The processes, in order; the first is process 0.
    pub processes: Vec<usize>,
    /// The folder, on the first worker of each of the others.
    pub seen: Option<SeenFolder>,
}

/// The run folder of process 0 as another process sees it.
#[derive(Clone, Debug)]
pub struct SeenFolder {
    /// The path by which it sees the folder.
    pub path: PathBuf,
    /// The mark by which a process knows that its folder is the one that process 0 holds.
    pub token: String,
}

impl SeenFolder {
    /// Whether process 0 still holds the folder at this path.
    pub fn is_held(&self) -> bool {
        RunFolder::is_held_under(&self.path, &self.token)
    }
}

/// Asks every process whether it sees, as its own `run_dir`, the folder that process 0 holds under the `token` that worker 0
/// gives; none where no other process can. Every worker takes part, and is answered the same.
///
/// # Errors
/// A run that was aborted.
pub fn agree(
    context: &mut WorkerContext<'_>,
    token: Option<&str>,
    run_dir: &Path,
) -> std::result::Result<SharedFolder, Failure> {
    let (process, processes) = (context.process(), context.processes());
    let mut shared = SharedFolder { processes: vec![0], seen: None };
    if processes == 1 {
        return Ok(shared);
    }
    progress::enter(Phase::WaitingForWorkers, 0);
    let threads = context.peers() / processes;
    let (mut tokens, told, asked) = context.dataflow(|scope| mail::<String>(scope, "Token"));
    let (mut answers, heard, _) = context.dataflow(|scope| mail::<usize>(scope, "Seen"));
    for process in 1..processes {
        if let Some(token) = token {
            tokens.send(Addressed::new(process * threads, token.to_owned()));
        }
    }
    tokens.close();
    context.step_while(|| !asked.done())?;
    let token = told.borrow_mut().pop();
    let path = Location::of_path(run_dir).ok().and_then(|it| it.local().map(Path::to_owned));
    let folder = path.zip(token).map(|(path, token)| SeenFolder { path, token });
    shared.seen = folder.filter(|it| it.is_held() && RunFolder::takes_files(&it.path));
    if shared.seen.is_some() {
        (0..context.peers()).for_each(|worker| answers.send(Addressed::new(worker, process)));
    }
    answers.close();
    context.run_until_done()?;
    shared.processes.append(&mut heard.borrow_mut());
    shared.processes.sort_unstable();
    progress::enter(Phase::Starting, 0);
    Ok(shared)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::fixtures::in_processes;

    /// The agreement of workers of processes with these run folders, if the first is held under `token`.
    fn agreed(run_dirs: &[PathBuf], token: Option<&str>) -> Vec<Vec<SharedFolder>> {
        let token = token.map(str::to_owned);
        let agreed = in_processes(run_dirs, 2, move |context, run_dir| {
            let token = token.as_deref().filter(|_| context.index() == 0);
            agree(context, token, run_dir)
        });
        agreed.into_iter().map(|process| process.unwrap()).collect()
    }

    #[test]
    fn all_workers_know_which_processes_have_the_folder() {
        let dir = tempfile::tempdir().unwrap();
        let [run, link, other, copy] =
            ["run", "link", "other", "copy"].map(|it| dir.path().join(it));
        let hold = RunFolder::hold(&run).unwrap();
        let _of_other = RunFolder::hold(&other).unwrap();
        std::os::unix::fs::symlink(&run, &link).unwrap();
        let store = PathBuf::from("memory://store/run");
        let missing = dir.path().join("missing");
        let run_dirs = [run.clone(), other, link.clone(), missing, store, copy, run];
        for (token, expected) in [(hold.token(), vec![0, 2, 6]), (None, vec![0])] {
            for (process, workers) in agreed(&run_dirs, token).into_iter().enumerate() {
                for (thread, shared) in workers.into_iter().enumerate() {
                    assert_eq!(shared.processes, expected);
                    let has = process > 0 && thread == 0 && expected.contains(&process);
                    assert_eq!(shared.seen.is_some(), has, "{process} {thread}");
                    if process == 2 && has {
                        assert_eq!(shared.seen.unwrap().path, link);
                    }
                }
            }
        }
    }
}
