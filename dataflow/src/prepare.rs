//! Preparing a data set in several processes: the messages of [`prepare_together`] as a timely dataflow.
//!
//! The work of the processes is in [`streaming_data::prepare`](tidemill_streaming_data::prepare); this module has their meeting, the
//! transport of their messages, and their end. They meet as the processes of a training run do, by the same addresses, secret and
//! rules, and end as these do: the first error of any process ends all of them within seconds. One timely worker in each process
//! exchanges messages by destination, while other threads read, tokenize and write.
//!
//! | module | holds |
//! |---|---|
//! | `parcel` | a part of a message, as timely carries it |
//! | `post` | messages, with credit, through a dataflow |
//!
//! [`prepare_together`]: tidemill_streaming_data::prepare::prepare_together

mod parcel;
mod post;
#[cfg(test)]
mod tests;

use std::sync::{Arc, Mutex, PoisonError};

use tidemill_streaming_data::prepare::{Peers, PrepareError};

use self::post::Post;
use crate::cluster::{Abort, Aborted, ClusterError, ClusterSettings, Failure, WorkerContext};
use crate::job::StopRequest;

/// Does work together with the other processes of a cluster: `work` is called once in each process, on a thread of its own, with
/// the transport of its messages. It has to end once the transport says that the work was ended.
///
/// Each process has one thread for the exchange, whatever `cluster` says: `work` starts threads of its own. `stop` ends processes that
/// wait for each other; what else it does is up to `work`.
///
/// # Errors
/// The first error of any process, and the errors of [`Cluster`](crate::cluster::Cluster).
pub fn together<R: Send + 'static>(
    cluster: ClusterSettings,
    stop: &StopRequest,
    work: impl FnOnce(&dyn Peers) -> Result<R, PrepareError> + Send + 'static,
) -> Result<R, ClusterError> {
    let cluster = ClusterSettings { workers: 1, ..cluster };
    let cluster = stop.connect(cluster, Abort::new())?;
    let work = Mutex::new(Some(work));
    let done = cluster.execute(move |context| {
        let work = work.lock().unwrap_or_else(PoisonError::into_inner).take();
        let work = work.ok_or(Aborted)?;
        with_post(context, work)
    })?;
    // A cluster that ends without an error has a result of each worker.
    done.into_iter().next().ok_or(ClusterError::Workers { message: "none ran".to_owned() })
}

fn with_post<R: Send>(
    context: &mut WorkerContext<'_>,
    work: impl FnOnce(&dyn Peers) -> Result<R, PrepareError> + Send,
) -> Result<R, Failure> {
    let post = Arc::new(Post::new(context.process(), context.processes(), context.abort()));
    let abort = context.abort().clone();
    context.dataflow::<u64, _, _>(|scope| post.install(scope, &abort));
    let done = context.step_beside("prepare", || work(&*post).map_err(Failure::from));
    post.close();
    done
}
