//! The parameters of the newest checkpoint, kept in memory.

use std::sync::{Arc, Mutex, PoisonError};

use tidemill_collective::StatePart;
use tidemill_model::Layout;

use super::sink::StateSink;
use crate::cluster::Failure;
use crate::operators::optimize::StepReport;

/// A [`StateSink`] that keeps the parameters of the newest complete checkpoint in memory, and writes
/// nothing: for a program that wants the trained weights and no files. States of the optimizer are
/// dropped. Clones share what is kept. Checkpoints come where the plan says
/// ([`TrainingPlan::checkpoints`](crate::operators::TrainingPlan::checkpoints)): none, unless it is told.
///
/// ```
/// # use tidemill::collective::StatePart;
/// # use tidemill::operators::{NewestParameters, StateSink, StepReport};
/// # let mut layout = tidemill::model::Layout::new();
/// # layout.segment("only");
/// # layout.tensor("weight", &[3], tidemill::model::Decay::Decayed, 1);
/// # let (loss, grad_norm, learning_rate, tokens, total_tokens) = (0.5, 1.0, 0.1, 8, 24);
/// let newest = NewestParameters::new(&layout);
/// // `Training::checkpoints` on the worker that trains first.
/// let mut sink: Box<dyn StateSink> = Box::new(newest.clone());
/// # let report =
/// #     StepReport { step: 3, loss, grad_norm, learning_rate, tokens, total_tokens, last: true };
/// # sink.begin(&report)?;
/// # sink.write(StatePart::Parameter, 1, &[2.0, 3.0])?;
/// # sink.write(StatePart::State(0), 0, &[7.0; 3])?;
/// # sink.write(StatePart::Parameter, 0, &[1.0])?;
/// # assert_eq!(newest.take(), None, "it is not complete");
/// # sink.commit()?;
/// // After training: updates done, and the arena.
/// let (step, arena) = newest.take().expect("a checkpoint");
/// # assert_eq!((step, &arena[..3]), (3, &[1.0, 2.0, 3.0][..]));
/// # assert_eq!(newest.take(), None, "it was taken");
/// # Ok::<(), tidemill::cluster::Failure>(())
/// ```
#[derive(Clone, Debug)]
pub struct NewestParameters {
    elements: usize,
    kept: Arc<Mutex<Kept>>,
}

#[derive(Debug, Default)]
struct Kept {
    /// The checkpoint that is being written.
    open: (u64, Vec<f32>),
    newest: Option<(u64, Vec<f32>)>,
}

impl NewestParameters {
    /// For parameters of this layout.
    pub fn new(layout: &Layout) -> Self {
        Self { elements: layout.parameter_elements(), kept: Arc::default() }
    }

    /// The updates done in the newest complete checkpoint, and its parameters as an arena, which
    /// leave this memory; none where there is no checkpoint since the last call.
    pub fn take(&self) -> Option<(u64, Vec<f32>)> {
        self.with(|kept| kept.newest.take())
    }

    fn with<R>(&self, work: impl FnOnce(&mut Kept) -> R) -> R {
        work(&mut self.kept.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl StateSink for NewestParameters {
    fn begin(&mut self, report: &StepReport) -> Result<(), Failure> {
        self.with(|kept| kept.open = (report.step, vec![0.0; self.elements]));
        Ok(())
    }

    fn write(&mut self, part: StatePart, start: usize, values: &[f32]) -> Result<(), Failure> {
        if part == StatePart::Parameter {
            self.with(|kept| kept.open.1[start..start + values.len()].copy_from_slice(values));
        }
        Ok(())
    }

    fn commit(&mut self) -> Result<(), Failure> {
        self.with(|kept| kept.newest = Some(std::mem::take(&mut kept.open)));
        Ok(())
    }
}
