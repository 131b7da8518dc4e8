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
use crate::operators::TaskScores;

/// What the encoder writes.
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
    loss: Number,
    gradient_norm: Number,
    learning_rate: Number,
    tokens: Number,
    tokens_per_second: Number,
    elapsed_seconds: Number,
    communication_milliseconds: Number,
    exposed_milliseconds: Number,
    host_memory_bytes: Number,
    device_memory_bytes: Number,
    evaluation_step: Number,
    evaluation_loss: Number,
    checkpoint_step: Number,
    workers: Number,
    /// By task and metric.
    task_scores: Family<Vec<(String, String)>, Number>,
    /// By suite and average.
    suite_averages: Family<Vec<(String, String)>, Number>,
}

impl Numbers {
    /// Of a run of `steps`; what has not come yet is NaN.
    fn new(steps: u64) -> Self {
        let numbers = Self::default();
        for (_, _, number) in numbers.named() {
            number.set(f64::NAN);
        }
        numbers.steps.set(steps as f64);
        numbers
    }

    /// The name and the help text of each.
    fn named(&self) -> [(&'static str, &'static str, &Number); 16] {
        [
            ("steps", "Updates of the whole run", &self.steps),
            ("step", "Updates done", &self.step),
            ("loss", "Mean loss of the latest update, in nats", &self.loss),
            ("gradient_norm", "Norm of the mean gradient, before clipping", &self.gradient_norm),
            ("learning_rate", "Learning rate of the latest update", &self.learning_rate),
            ("tokens", "Counted tokens so far", &self.tokens),
            ("tokens_per_second", "Of the latest update", &self.tokens_per_second),
            ("elapsed_seconds", "Training so far, earlier starts included", &self.elapsed_seconds),
            (
                "communication_milliseconds",
                "Communication of the latest update",
                &self.communication_milliseconds,
            ),
            (
                "communication_exposed_milliseconds",
                "What of it was not hidden behind computing",
                &self.exposed_milliseconds,
            ),
            ("host_memory_bytes", "Resident memory of process 0", &self.host_memory_bytes),
            (
                "device_memory_bytes",
                "Taken of the device of worker 0 since its workers began",
                &self.device_memory_bytes,
            ),
            ("evaluation_step", "Updates before the latest evaluation", &self.evaluation_step),
            ("evaluation_loss", "Mean loss of the latest evaluation", &self.evaluation_loss),
            ("checkpoint_step", "Updates in the latest checkpoint", &self.checkpoint_step),
            ("workers", "Workers of all processes", &self.workers),
        ]
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
        let Numbers {
            step,
            loss,
            gradient_norm,
            learning_rate,
            tokens,
            tokens_per_second,
            elapsed_seconds,
            communication_milliseconds,
            exposed_milliseconds,
            host_memory_bytes,
            device_memory_bytes,
            evaluation_step,
            evaluation_loss,
            checkpoint_step,
            workers,
            task_scores,
            suite_averages,
            ..
        } = &self.numbers;
        match event {
            TrainEvent::Started { step: done, workers: count, .. } => {
                step.set(*done as f64);
                workers.set(*count as f64);
            }
            TrainEvent::Step(metrics) => {
                step.set(metrics.step as f64);
                loss.set(metrics.loss);
                gradient_norm.set(metrics.grad_norm);
                learning_rate.set(metrics.learning_rate);
                tokens.set(metrics.tokens as f64);
                tokens_per_second.set(metrics.tokens_per_second);
                elapsed_seconds.set(metrics.elapsed_seconds);
                if let Some(communication) = &metrics.communication {
                    communication_milliseconds.set(communication.milliseconds);
                    exposed_milliseconds.set(communication.exposed_milliseconds);
                }
                if let Some(memory) = &metrics.memory {
                    for (bytes, number) in [
                        (memory.host_bytes, host_memory_bytes),
                        (memory.device_bytes, device_memory_bytes),
                    ] {
                        number.set(bytes.map_or(f64::NAN, |bytes| bytes as f64));
                    }
                }
            }
            TrainEvent::Evaluated { step, loss } => {
                evaluation_step.set(*step as f64);
                evaluation_loss.set(*loss);
            }
            TrainEvent::Answered { tasks, suites, .. } => {
                set_each(task_scores, ["task", "metric"], tasks);
                set_each(suite_averages, ["suite", "average"], suites);
            }
            TrainEvent::Checkpointed { step, .. } => {
                checkpoint_step.set(*step as f64);
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
