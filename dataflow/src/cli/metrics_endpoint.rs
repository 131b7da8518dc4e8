//! A run's numbers over HTTP, as Prometheus scrapes them: `tidemill train --metrics-port`.
//!
//! A thread of its own answers with the latest numbers, from atomics that the run writes: a slow or a hostile reader costs the run
//! nothing. Every program that reaches the port may read them, so it is the loopback's unless another address is named.

use std::convert::Infallible;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use anyhow::Context;
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{ALLOW, CONTENT_TYPE};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;

use super::output::note_line;
use crate::job::{ResolvedRun, TrainEvent};
use crate::metrics::STEP_NUMBERS;
use crate::operators::{Scores, TaskScores};

/// The content type of the encoder's output.
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// How long a reader may take to ask.
const PATIENCE: Duration = Duration::from_secs(10);
/// Readers at a time.
const MOST_READERS: usize = 16;

type Number = Gauge<f64, AtomicU64>;

/// The numbers of a run. They are as `metrics.jsonl` has them.
#[derive(Clone, Default)]
struct Numbers {
    steps: Number,
    step: Number,
    /// In the order of [`STEP_NUMBERS`].
    of_step: [Number; STEP_NUMBERS.len()],
    evaluation_step: Number,
    evaluation_loss: Number,
    checkpoint_step: Number,
    workers: Number,
    /// Scores, labelled by task and metric.
    task_scores: Family<Vec<(String, String)>, Number>,
    /// Averages, labelled by suite and name of the average.
    suite_averages: Family<Vec<(String, String)>, Number>,
}

impl Numbers {
    /// The numbers of a run of `steps`; numbers that have not come yet are NaN.
    fn new(steps: u64) -> Self {
        let numbers = Self::default();
        for (_, _, number) in numbers.named() {
            number.set(f64::NAN);
        }
        numbers.steps.set(steps as f64);
        numbers
    }

    /// The name and the help text of each.
    fn named(&self) -> impl Iterator<Item = (String, &'static str, &Number)> {
        let of_run = [
            ("steps", "Updates of the whole run", &self.steps),
            ("step", "Updates done", &self.step),
            ("evaluation_step", "Updates before the latest evaluation", &self.evaluation_step),
            ("evaluation_loss", "Mean loss of the latest evaluation", &self.evaluation_loss),
            ("checkpoint_step", "Updates in the latest checkpoint", &self.checkpoint_step),
            ("workers", "Workers of all processes", &self.workers),
        ];
        let of_run = of_run.into_iter().map(|(name, help, number)| (name.to_owned(), help, number));
        let of_step = STEP_NUMBERS.iter().zip(&self.of_step);
        // A dot is no character of a name.
        let named = |key: &str| key.replace('.', "_");
        of_run.chain(of_step.map(move |(of, number)| (named(of.key), of.description, number)))
    }

    fn registry(&self) -> Registry {
        let mut registry = Registry::with_prefix("tidemill");
        let help = "Metrics of the tasks of the latest evaluation";
        registry.register("task_score", help, self.task_scores.clone());
        let help = "Averages of the suites of the latest evaluation";
        registry.register("suite_average", help, self.suite_averages.clone());
        for (name, help, number) in self.named() {
            registry.register(name, help, number.clone());
        }
        registry
    }
}

/// An endpoint that is open for as long as the program runs.
pub(crate) struct MetricsEndpoint {
    numbers: Numbers,
}

impl MetricsEndpoint {
    /// Opens `address`.
    ///
    /// # Errors
    /// An address that cannot be listened at.
    pub(crate) fn open(host: IpAddr, port: u16, run: &ResolvedRun) -> anyhow::Result<Self> {
        let address = SocketAddr::new(host, port);
        let place = || format!("--metrics-port: listening at {address}");
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .with_context(place)?;
        let listener = runtime.block_on(TcpListener::bind(address)).with_context(place)?;
        // Port 0 becomes one that is free.
        note_line!(
            "note: metrics at http://{}/metrics",
            listener.local_addr().with_context(place)?
        );
        let numbers = Numbers::new(run.steps);
        let registry = Arc::new(numbers.registry());
        std::thread::Builder::new()
            .name("metrics endpoint".to_owned())
            .spawn(move || runtime.block_on(serve(listener, registry)))
            .with_context(place)?;
        Ok(Self { numbers })
    }

    /// Takes what `event` says.
    pub(crate) fn show(&self, event: &TrainEvent) {
        let numbers = &self.numbers;
        match event {
            TrainEvent::Started { step, workers, .. } => {
                numbers.step.set(*step as f64);
                numbers.workers.set(*workers as f64);
            }
            TrainEvent::Step(metrics) => {
                numbers.step.set(metrics.step as f64);
                for (of, number) in STEP_NUMBERS.iter().zip(&numbers.of_step) {
                    // A number that a line lacks stays as it was: memory is measured now and then.
                    if let Some(value) = (of.value)(metrics) {
                        number.set(value);
                    }
                }
            }
            TrainEvent::Evaluated { step, loss } => {
                numbers.evaluation_step.set(*step as f64);
                numbers.evaluation_loss.set(*loss);
            }
            TrainEvent::Answered { scores: Scores { tasks, suites }, .. } => {
                set_each(&numbers.task_scores, ["task", "metric"], tasks);
                set_each(&numbers.suite_averages, ["suite", "average"], suites);
            }
            TrainEvent::Checkpointed { step, .. } => {
                numbers.checkpoint_step.set(*step as f64);
            }
            TrainEvent::Fetching { .. } | TrainEvent::Moved { .. } => {}
        }
    }
}

/// Sets the numbers of `scores`, which are labelled by their two names.
fn set_each(
    family: &Family<Vec<(String, String)>, Number>,
    [outer, inner]: [&str; 2],
    scores: &TaskScores,
) {
    for (name, values) in scores {
        for (value_name, value) in values {
            let of = [(outer, name), (inner, value_name)];
            let labels = of.map(|(key, value)| (key.to_owned(), value.clone()));
            family.get_or_create(&labels.to_vec()).set(*value);
        }
    }
}

/// Answers readers, so many at a time, until the program ends.
async fn serve(listener: TcpListener, registry: Arc<Registry>) {
    let readers = Arc::new(Semaphore::new(MOST_READERS));
    loop {
        let Ok(place) = Arc::clone(&readers).acquire_owned().await else { return };
        let Ok((socket, _)) = listener.accept().await else {
            // Out of file handles, say: others go away after a while.
            tokio::time::sleep(Duration::from_millis(100)).await;
            continue;
        };
        let registry = Arc::clone(&registry);
        let connection = async move {
            let answers = service_fn(|request| std::future::ready(answer(&request, &registry)));
            let served = http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(PATIENCE)
                .keep_alive(false)
                .serve_connection(TokioIo::new(socket), answers);
            // A reader that has gone is no matter of the run.
            let _ = tokio::time::timeout(2 * PATIENCE, served).await;
            drop(place);
        };
        // One thread has them all: the runtime is the thread's own.
        tokio::task::spawn(connection);
    }
}

fn answer(
    request: &Request<Incoming>,
    registry: &Registry,
) -> Result<Response<Full<Bytes>>, Infallible> {
    let with = |status, kind: &'static str, text: String| {
        let mut response = Response::new(Full::new(Bytes::from(text)));
        *response.status_mut() = status;
        response.headers_mut().insert(CONTENT_TYPE, kind.parse().expect("a constant"));
        response
    };
    const PLAIN: &str = "text/plain; charset=utf-8";
    Ok(match (request.method(), request.uri().path()) {
        (&Method::GET | &Method::HEAD, "/metrics") => {
            let mut text = String::new();
            match encode(&mut text, registry) {
                Ok(()) => with(StatusCode::OK, OPEN_METRICS, text),
                Err(error) => with(StatusCode::INTERNAL_SERVER_ERROR, PLAIN, error.to_string()),
            }
        }
        (&Method::GET | &Method::HEAD, _) => {
            with(StatusCode::NOT_FOUND, PLAIN, "the numbers are at /metrics\n".to_owned())
        }
        _ => {
            let text = "only GET\n".to_owned();
            let mut response = with(StatusCode::METHOD_NOT_ALLOWED, PLAIN, text);
            response.headers_mut().insert(ALLOW, "GET, HEAD".parse().expect("a constant"));
            response
        }
    })
}
