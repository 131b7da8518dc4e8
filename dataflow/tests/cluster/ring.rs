//! What the tests run: a token that goes round all workers for ever, and ways to run it.

use std::net::TcpListener;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tidemill::cluster::{Abort, Cluster, ClusterError, ClusterSettings, Failure, WorkerContext};
use timely::dataflow::operators::vec::Map;
use timely::dataflow::operators::{Concat, ConnectLoop, Exchange, Feedback, ToStream};

/// Failures must reach everyone within this time.
pub const SOON: Duration = Duration::from_secs(5);

/// Builds the endless ring; `on_token` runs inside an operator, on the worker that holds the token.
pub fn ring(context: &mut WorkerContext<'_>, mut on_token: impl FnMut(u64) + 'static) {
    let first = if context.index() == 0 { vec![0u64] } else { vec![] };
    context.dataflow::<u64, _, _>(|scope| {
        let (handle, cycle) = scope.feedback::<Vec<u64>>(1);
        first
            .to_stream(scope)
            .container::<Vec<_>>()
            .concat(cycle)
            .exchange(|token: &u64| *token)
            .map(move |token| {
                on_token(token);
                // Keeps the ring from using all of the machine.
                std::thread::park_timeout(Duration::from_micros(200));
                token + 1
            })
            .connect_loop(handle);
    });
}

/// Runs the ring on all workers; on worker `victim`, token 50 or later meets `fate`.
pub fn ring_with_fate(
    victim: usize,
    fate: fn(),
) -> impl Fn(&mut WorkerContext<'_>) -> Result<(), Failure> + Clone {
    move |context| {
        let doomed = context.index() == victim;
        ring(context, move |token| {
            if doomed && token > 50 {
                fate();
            }
        });
        context.run_until_done()?;
        Ok(())
    }
}

/// Settings for each process of a cluster on this machine, with their listeners open.
pub fn settings(processes: usize, threads: usize) -> Vec<ClusterSettings> {
    let listeners: Vec<TcpListener> =
        (0..processes).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
    let addresses: Vec<String> =
        listeners.iter().map(|listener| listener.local_addr().unwrap().to_string()).collect();
    listeners
        .into_iter()
        .enumerate()
        .map(|(process, listener)| {
            let mut settings = ClusterSettings::process(threads, process, addresses.clone());
            settings.listener = Some(listener);
            settings.connect_deadline = Duration::from_secs(20);
            settings
        })
        .collect()
}

/// Runs `work` in a cluster whose processes are threads of this one.
pub fn cluster<R, F>(settings: Vec<ClusterSettings>, work: F) -> Vec<Result<Vec<R>, ClusterError>>
where
    R: Send + 'static,
    F: Fn(&mut WorkerContext<'_>) -> Result<R, Failure> + Send + Sync + Clone + 'static,
{
    let processes: Vec<JoinHandle<_>> = settings
        .into_iter()
        .map(|settings| {
            let work = work.clone();
            std::thread::spawn(move || tidemill::cluster::execute(settings, work))
        })
        .collect();
    processes.into_iter().map(|process| process.join().unwrap()).collect()
}

/// Runs `work` and checks that it took at most [`SOON`].
pub fn soon<R>(work: impl FnOnce() -> R) -> R {
    let start = Instant::now();
    let result = work();
    let took = start.elapsed();
    assert!(took < SOON, "took {took:?}");
    result
}

/// Runs `work` with an [`Abort`] that the test holds too.
pub fn with_abort<R, F>(threads: usize, abort: &Abort, work: F) -> Result<Vec<R>, ClusterError>
where
    R: Send + 'static,
    F: Fn(&mut WorkerContext<'_>) -> Result<R, Failure> + Send + Sync + 'static,
{
    Cluster::connect_with(ClusterSettings::workers(threads), abort.clone())?.execute(work)
}
