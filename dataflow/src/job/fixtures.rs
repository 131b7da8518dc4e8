//! Clusters whose processes are threads of this one, each with a run folder of its own.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::cluster::{ClusterError, ClusterSettings, Failure, WorkerContext, execute};

/// Results of `work` on `threads` workers of each process, one process for each of `run_dirs`.
pub fn in_processes<R: Send + 'static>(
    run_dirs: &[PathBuf],
    threads: usize,
    work: impl Fn(&mut WorkerContext<'_>, &Path) -> Result<R, Failure> + Send + Sync + 'static,
) -> Vec<Result<Vec<R>, ClusterError>> {
    let listeners: Vec<_> =
        run_dirs.iter().map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
    let addresses: Vec<_> =
        listeners.iter().map(|it| it.local_addr().unwrap().to_string()).collect();
    let work = Arc::new(work);
    let start = |(process, (listener, run_dir)): (usize, (TcpListener, &PathBuf))| {
        let mut settings = ClusterSettings::process(threads, process, addresses.clone());
        settings.listener = Some(listener);
        let (work, run_dir) = (Arc::clone(&work), run_dir.clone());
        std::thread::spawn(move || execute(settings, move |context| work(context, &run_dir)))
    };
    let processes: Vec<_> = listeners.into_iter().zip(run_dirs).enumerate().map(start).collect();
    processes.into_iter().map(|process| process.join().unwrap()).collect()
}
