//! Requests over workers: the longest first, in batches that any worker takes, with answers in the order of the batches.
//!
//! A request's answer is the same to the bit alone, in any batch and on any worker (of one kind of device), so neither how
//! requests are cut into batches nor which worker takes one is numerics.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;

use tidemill_evaluation::EvaluationError;
use tidemill_evaluation::answers::{AnswerFile, Line};
use tidemill_evaluation::metrics::Answer;
use tidemill_evaluation::plan::PlannedTask;
use tidemill_evaluation::tokens::Request;
use tidemill_kernels::Backend;
use tidemill_model::score::{Asked, Continuation, ContinuationScore};

use super::Answers;
use crate::cli::output::note_line;
use crate::cli::progress::CountProgress;
use crate::device::Devices;
use crate::inference::{LoadedModel, ModelFiles};

/// The answers that there are, and the requests that have none yet.
pub(super) struct Scoring<'a> {
    tasks: &'a [PlannedTask],
    answers: Vec<Vec<Option<Answer>>>,
    file: Option<AnswerFile>,
    /// Requests without an answer, by task and place, the longest first.
    left: Vec<(usize, usize)>,
}

/// Models on devices.
pub(super) struct Workers<'a, B: Backend> {
    /// Where the model is.
    pub files: &'a Arc<ModelFiles>,
    /// Requests at a time.
    pub batch: Option<NonZeroUsize>,
    /// The first worker's model.
    pub first: LoadedModel<B>,
    /// The devices of all.
    pub devices: &'a Devices<B>,
}

impl<'a> Scoring<'a> {
    /// Scoring that begins with the answers in `file`.
    ///
    /// # Errors
    /// An answer to no request.
    pub(super) fn new(
        tasks: &'a [PlannedTask],
        file: Option<(AnswerFile, Vec<Line>)>,
    ) -> anyhow::Result<Self> {
        let mut answers: Vec<Vec<Option<Answer>>> =
            tasks.iter().map(|task| vec![None; task.requests().len()]).collect();
        let (file, lines) = file.unzip();
        for line in lines.into_iter().flatten() {
            let task = tasks.iter().position(|task| task.task().name == line.task);
            let place = task
                .and_then(|task| Some((task, tasks[task].request_of(line.question, line.option)?)));
            let Some((task, request)) = place else {
                let Line { task, question, option, .. } = line;
                let place = format!("{task}: question {question}");
                let what =
                    format!("--output has an answer to option {option}, which was not asked");
                return Err(EvaluationError::Row { place, what }.into());
            };
            answers[task][request] = Some(line.answer());
        }
        let places = answers.iter().enumerate().flat_map(|(task, answers)| {
            let open = answers.iter().enumerate().filter(|(_, answer)| answer.is_none());
            open.map(move |(request, _)| (task, request))
        });
        let mut left: Vec<(usize, usize)> = places.collect();
        left.sort_by_key(|&(task, request)| {
            std::cmp::Reverse(tasks[task].requests()[request].tokens.len())
        });
        Ok(Self { tasks, answers, file, left })
    }

    /// How many requests have no answer yet, and their tokens.
    pub(super) fn left(&self) -> [usize; 2] {
        let tokens = self.left.iter().map(|&place| self.request(place).tokens.len());
        [self.left.len(), tokens.sum()]
    }

    fn request(&self, (task, request): (usize, usize)) -> &'a Request {
        &self.tasks[task].requests()[request]
    }

    /// The request at this place, as the model is asked it.
    fn continuation(&self, place: (usize, usize)) -> Continuation<'a> {
        let Request { tokens, first, .. } = self.request(place);
        let asked = match self.tasks[place.0].asks_greedy() {
            true => Asked::Likeliest,
            false => Asked::LogProbability,
        };
        Continuation { tokens, first: *first, asked }
    }

    /// Keeps the answers of some places.
    fn keep(&mut self, places: &[(usize, usize)], answers: &[Answer]) -> anyhow::Result<()> {
        let mut lines = Vec::with_capacity(places.len());
        for (&(task, request), &answer) in places.iter().zip(answers) {
            let planned = &self.tasks[task];
            let (question, option) = planned.asked(request);
            let Answer { log_likelihood, greedy } = answer;
            if !log_likelihood.is_finite() {
                let place = planned.documents()[question].place.clone();
                let (task, found) = (planned.task().name.clone(), log_likelihood);
                return Err(EvaluationError::Answer { task, place, found }.into());
            }
            let task_name = planned.task().name.clone();
            lines.push(Line { task: task_name, question, option, log_likelihood, greedy });
            self.answers[task][request] = Some(answer);
        }
        match &self.file {
            Some(file) => Ok(file.add(&lines)?),
            None => Ok(()),
        }
    }

    fn finish(self) -> anyhow::Result<Answers> {
        if let Some(file) = self.file {
            file.finish()?;
        }
        let of_task = |answers: Vec<Option<Answer>>| answers.into_iter().flatten().collect();
        Ok(self.answers.into_iter().map(of_task).collect())
    }
}

/// A worker's message: a batch's number, and its answers.
type Sent = anyhow::Result<(usize, Vec<Answer>)>;

impl<B: Backend> Workers<'_, B> {
    /// Answers all that is left.
    ///
    /// # Errors
    /// A device or disk that fails; the answers before the failure are in the file.
    pub(super) fn score(self, mut scoring: Scoring<'_>) -> anyhow::Result<Answers> {
        let left = std::mem::take(&mut scoring.left);
        let Some(&longest) = left.first() else { return scoring.finish() };
        let all: usize = scoring.answers.iter().map(Vec::len).sum();
        if left.len() < all {
            note_line!("note: {} of {all} requests are answered already", all - left.len());
        }
        let positions = scoring.request(longest).tokens.len();
        let (at_once, most_rows) = match self.batch {
            Some(batch) => (batch.get(), usize::MAX),
            None => (self.first.texts_at_once(positions)?, BATCH_TOKENS),
        };
        let at_once = at_once.min(left.len());
        let lengths = left.iter().map(|&place| scoring.request(place).tokens.len());
        let batches = cut(&left, &lengths.collect::<Vec<_>>(), at_once, most_rows);
        let texts: Vec<Vec<Continuation<'_>>> = batches
            .iter()
            .map(|places| places.iter().map(|&place| scoring.continuation(place)).collect())
            .collect();
        let Self { files, first, devices, .. } = self;
        let next = AtomicUsize::new(0);
        let (sender, receiver) = mpsc::channel::<Sent>();
        std::thread::scope(|scope| {
            let mut first = Some(first);
            for device in &devices.workers()[..devices.workers().len().min(batches.len())] {
                let (model, sender, next, texts) = (first.take(), sender.clone(), &next, &texts);
                let backend = Arc::clone(&device.backend);
                scope.spawn(move || {
                    let answered = || -> anyhow::Result<()> {
                        let mut model = match model {
                            Some(model) => model,
                            None => LoadedModel::of_files(files, backend)?,
                        };
                        let mut scorer = model.scorer(at_once, positions)?;
                        // The device has the next batch while the answers of this one are waited for.
                        let mut ahead = None;
                        loop {
                            let batch = next.fetch_add(1, Ordering::Relaxed);
                            let enqueued = match texts.get(batch) {
                                Some(texts) => Some((batch, scorer.enqueue(texts)?)),
                                None => None,
                            };
                            let is_last = enqueued.is_none();
                            if let Some((batch, pending)) = std::mem::replace(&mut ahead, enqueued)
                            {
                                let scores = scorer.finish(pending)?;
                                let answers = answers(scores, &texts[batch]);
                                // Nothing is to be done once the receiver has failed.
                                if sender.send(Ok((batch, answers))).is_err() {
                                    return Ok(());
                                }
                            }
                            if is_last {
                                return Ok(());
                            }
                        }
                    };
                    if let Err(error) = answered() {
                        next.store(texts.len(), Ordering::Relaxed);
                        let _ = sender.send(Err(error));
                    }
                });
            }
            drop(sender);
            let kept = keep_all(&mut scoring, &batches, &receiver);
            if kept.is_err() {
                next.store(batches.len(), Ordering::Relaxed);
            }
            drop(receiver);
            kept
        })?;
        scoring.finish()
    }
}

/// Keeps batches in order as they come.
fn keep_all(
    scoring: &mut Scoring<'_>,
    batches: &[&[(usize, usize)]],
    receiver: &mpsc::Receiver<Sent>,
) -> anyhow::Result<()> {
    let requests: usize = batches.iter().map(|batch| batch.len()).sum();
    let mut progress = CountProgress::new(requests as u64, "requests", "tokens");
    let (mut early, mut kept) = (BTreeMap::new(), 0);
    for sent in receiver {
        let (batch, answers) = sent?;
        let tokens = |&place: &(usize, usize)| scoring.request(place).tokens.len() as u64;
        progress.advance(batches[batch].len() as u64);
        progress.add(batches[batch].iter().map(tokens).sum());
        early.insert(batch, answers);
        while let Some(answers) = early.remove(&kept) {
            scoring.keep(batches[kept], &answers)?;
            kept += 1;
        }
    }
    progress.finish_with_rate();
    Ok(())
}

/// The answers to the requests of a batch.
fn answers(scores: Vec<ContinuationScore>, texts: &[Continuation<'_>]) -> Vec<Answer> {
    let answer = |(score, text): (ContinuationScore, &Continuation<'_>)| Answer {
        log_likelihood: score.log_probabilities.iter().copied().map(f64::from).sum(),
        greedy: (text.asked == Asked::Likeliest).then(|| score.likeliest.iter().all(|&is| is)),
    };
    scores.into_iter().zip(texts).map(answer).collect()
}

/// Tokens of a batch in which all items are as long as the longest one: enough to fill a device.
const BATCH_TOKENS: usize = 1 << 12;

/// Batches of at most `most` items and `most_rows` tokens, padding included, except that an item longer than that is a batch by itself;
/// `lengths` descend.
fn cut<'t, T>(items: &'t [T], lengths: &[usize], most: usize, most_rows: usize) -> Vec<&'t [T]> {
    let (mut batches, mut first) = (Vec::new(), 0);
    while first < items.len() {
        let count = (most_rows / lengths[first].max(1)).clamp(1, most).min(items.len() - first);
        batches.push(&items[first..first + count]);
        first += count;
    }
    batches
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_hold_as_many_short_texts_as_fill_the_device() {
        let items: Vec<usize> = (0..7).collect();
        let lengths = [100, 50, 50, 10, 10, 10, 1];
        let sizes = |most, most_rows| -> Vec<usize> {
            let batches = cut(&items, &lengths, most, most_rows);
            assert_eq!(batches.concat(), items);
            batches.iter().map(|batch| batch.len()).collect()
        };
        assert_eq!(sizes(5, 99), [1, 1, 1, 4]);
        assert_eq!(sizes(5, 100), [1, 2, 4]);
        assert_eq!(sizes(3, 100), [1, 2, 3, 1]);
        assert_eq!(sizes(3, usize::MAX), [3, 3, 1]);
    }
}
