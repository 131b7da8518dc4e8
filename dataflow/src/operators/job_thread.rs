//! A thread that works for one operator: jobs go in, replies come out, and neither waits for the other.
//!
//! Device calls and file writes block, and an operator must not; so they happen on a job thread. Its replies
//! activate the operator. When the operator is dropped the channel of jobs closes, and the thread
//! ends at its next receive or send; when the thread fails, the run is aborted with its error.

use std::sync::mpsc::{self, Receiver, Sender, TryRecvError};

use tidemill_collective::communicator::CommunicatorError;
use tidemill_kernels::FloatEnvironment;
use timely::scheduling::SyncActivator;

use crate::cluster::progress::{self, Phase};
use crate::cluster::{Abort, Actor, ClusterError, Failure};

/// The operator's end.
pub(super) struct JobThread<Job, Reply> {
    name: String,
    abort: Abort,
    jobs: Sender<Job>,
    replies: Receiver<Reply>,
    gone: bool,
}

/// A job thread that works for several operators of a worker; each operator has an end of its own. It ends when all these ends
/// and this have been dropped.
pub(super) struct SharedJobThread<Job> {
    name: String,
    abort: Abort,
    jobs: Sender<Job>,
}

impl<Job: Send + 'static> SharedJobThread<Job> {
    /// Starts a guarded thread that runs `body`, whose jobs are of `phase`.
    pub(super) fn start<F>(
        abort: &Abort,
        name: String,
        phase: Phase,
        body: F,
    ) -> Result<Self, ClusterError>
    where
        F: FnOnce(&Jobs<Job>) -> Result<(), Failure> + Send + 'static,
    {
        let (jobs, receiver) = mpsc::channel();
        let thread = move || {
            // It would inherit the environment of an embedder's thread.
            FloatEnvironment::standard().keep();
            progress::enter(phase, 0);
            body(&Jobs { receiver, phase })
        };
        abort.guard_thread(&name, thread)?;
        Ok(Self { name, abort: abort.clone(), jobs })
    }

    /// The end of an operator, which `wake` activates. Its first job is `answer`, which says where answers go.
    pub(super) fn end<Reply>(
        &self,
        wake: SyncActivator,
        answer: impl FnOnce(Replies<Reply>) -> Job,
    ) -> JobThread<Job, Reply>
    where
        Reply: Send + 'static,
    {
        let (sender, replies) = mpsc::channel();
        let (name, abort, jobs) = (self.name.clone(), self.abort.clone(), self.jobs.clone());
        let mut end = JobThread { name, abort: abort.clone(), jobs, replies, gone: false };
        end.send(answer(Replies { sender, wake, abort }));
        end
    }
}

/// The thread's end of the jobs.
pub(super) struct Jobs<Job> {
    receiver: Receiver<Job>,
    /// The phase of the thread while it has a job.
    phase: Phase,
}

/// The thread's end of the replies.
pub(super) struct Replies<Reply> {
    sender: Sender<Reply>,
    wake: SyncActivator,
    abort: Abort,
}

/// The operator was dropped: the run is over.
#[derive(Debug)]
pub(super) struct OperatorGone;

/// Why a job thread ends before its jobs do.
pub(super) enum Stopped {
    /// The operator is gone, or a thread that shares its work: no more is wanted.
    Unwanted,
    Failed(Failure),
}

impl Stopped {
    /// The result of the thread: an operator that is gone is no failure of its own.
    pub(super) fn into_result(self) -> Result<(), Failure> {
        match self {
            Self::Unwanted => Ok(()),
            Self::Failed(failure) => Err(failure),
        }
    }
}

impl Stopped {
    /// Where the other workers are gone, the run is over.
    pub(super) fn of(error: CommunicatorError) -> Self {
        match error {
            CommunicatorError::Closed => Self::Unwanted,
            CommunicatorError::Device(error) => Self::Failed(error.into()),
            error => Self::Failed(error.into()),
        }
    }
}

impl From<OperatorGone> for Stopped {
    fn from(_: OperatorGone) -> Self {
        Self::Unwanted
    }
}

impl<E: Into<Failure>> From<E> for Stopped {
    fn from(error: E) -> Self {
        Self::Failed(error.into())
    }
}

impl<Job> Jobs<Job> {
    /// Waits for the next job; `None` when the operator was dropped.
    pub(super) fn next(&self) -> Option<Job> {
        progress::enter(Phase::Idle, 0);
        let job = self.receiver.recv().ok()?;
        progress::enter(self.phase, 0);
        progress::moved();
        Some(job)
    }

    /// A job that waits already, if any does.
    pub(super) fn waiting(&self) -> Option<Job> {
        self.receiver.try_recv().ok()
    }
}

impl<Reply> Replies<Reply> {
    /// Hands a reply to the operator and wakes it.
    pub(super) fn send(&self, reply: Reply) -> Result<(), OperatorGone> {
        progress::moved();
        self.sender.send(reply).map_err(|_| OperatorGone)?;
        self.wake.activate().map_err(|_| OperatorGone)
    }

    /// For long jobs, between their parts: nothing follows once the run is aborted.
    pub(super) fn check(&self) -> Result<(), OperatorGone> {
        progress::moved();
        self.abort.check().map_err(|_| OperatorGone)
    }
}

impl<Job: Send + 'static, Reply: Send + 'static> JobThread<Job, Reply> {
    /// Starts a guarded thread that runs `body`, whose jobs are of `phase`; `wake` activates the operator.
    pub(super) fn start<F>(
        abort: &Abort,
        name: String,
        phase: Phase,
        wake: SyncActivator,
        body: F,
    ) -> Result<Self, ClusterError>
    where
        F: FnOnce(&Jobs<Job>, &Replies<Reply>) -> Result<(), Failure> + Send + 'static,
    {
        let (sender, replies) = mpsc::channel();
        let to_operator = Replies { sender, wake, abort: abort.clone() };
        let body = move |jobs: &_| body(jobs, &to_operator);
        let SharedJobThread { name, abort, jobs } =
            SharedJobThread::start(abort, name, phase, body)?;
        Ok(Self { name, abort, jobs, replies, gone: false })
    }

    /// Enqueues a job.
    pub(super) fn send(&mut self, job: Job) {
        progress::moved();
        if self.jobs.send(job).is_err() {
            self.suspect();
        }
    }

    /// The next reply, if there is one.
    pub(super) fn poll(&mut self) -> Option<Reply> {
        match self.replies.try_recv() {
            Ok(reply) => {
                progress::moved();
                Some(reply)
            }
            Err(TryRecvError::Empty) => None,
            Err(TryRecvError::Disconnected) => {
                self.suspect();
                None
            }
        }
    }

    /// A thread that is gone while its operator lives has failed; its own error is on its way.
    fn suspect(&mut self) {
        if !self.gone {
            self.gone = true;
            let actor = Actor::Thread(self.name.clone());
            let message = "it ended before its operator".to_owned();
            self.abort.suspect(ClusterError::Panicked { actor, message });
        }
    }
}
