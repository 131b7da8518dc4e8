//! Kernels over parameters, their gradients and moments.

use super::checker::Checker;
use crate::backend::{AdamWStep, Backend, LionStep, TermValues, TreeTerm};
use crate::error::Result;
use crate::master::{Master, MasterMut, Run, remainder_elements};
use crate::reference::gradient_sums;
use crate::reference::optimizer::{AdamWState, LionState, adamw as defined, lion as defined_lion};
use crate::view::{Slice, SliceMut};

/// Elements: fewer than a block takes, and more.
const SIZES: [usize; 2] = [77, 5003];

const STEP: AdamWStep = AdamWStep {
    learning_rate: 1e-2,
    beta1: 0.9,
    beta2: 0.95,
    eps: 1e-8,
    decay_factor: 0.999,
    bias_correction1: 0.271,
    bias_correction2: 0.142_625,
    gradient_scale: 0.5,
};

pub(super) fn sums<B: Backend>(checker: &mut Checker<'_, B>) -> Result<()> {
    for elements in SIZES {
        let mut lane = checker.numbers::<f32>(elements, [-1.0, 1.0])?;
        let gradients = checker.numbers::<f32>(3 * elements, [-1.0, 1.0])?;
        let accumulated = gradient_sums::accumulate(&lane.wide, &gradients.wide);
        let (backend, stream) = (checker.backend, &mut checker.stream);
        backend.accumulate(stream, lane.slice_mut(), gradients.slice())?;
        checker.compare("accumulate", &lane, &accumulated)?;

        let mut sum = checker.room::<f32>(elements)?;
        let parts: Vec<&[f64]> = gradients.wide.chunks(elements).collect();
        let term = |index: usize, joins| -> Result<TreeTerm<'_, B>> {
            let values = gradients.slice().sub(index * elements, elements)?;
            Ok(TreeTerm { values: TermValues::Buffer(values), joins })
        };
        let terms = [term(0, 0)?, term(1, 1)?, term(2, 1)?];
        checker.backend.tree_sum(&mut checker.stream, sum.slice_mut(), &terms)?;
        checker.compare("tree_sum", &sum, &gradient_sums::tree_sum(&parts))?;

        let mut uses = checker.numbers::<f32>(2 * elements, [-1.0, 1.0])?;
        let (first, other) = uses.wide.split_at(elements);
        let mean = gradient_sums::mean_gradient(&[first, other], 7.0);
        let expected = [&mean[..], other].concat();
        let (backend, stream) = (checker.backend, &mut checker.stream);
        backend.mean_gradient(stream, uses.slice_mut(), 0, &[elements], elements, 7.0)?;
        checker.compare("mean_gradient", &uses, &expected)?;

        let mut squares = checker.write(&[f64::NAN; 2])?;
        let ends = [elements / 3, 3 * elements];
        let (backend, stream) = (checker.backend, &mut checker.stream);
        backend.sums_of_squares(stream, SliceMut::all(&mut squares), gradients.slice(), &ends)?;
        let found: Vec<f64> = checker.read(&squares)?;
        let parts = [&gradients.wide[..ends[0]], &gradients.wide[ends[0]..]];
        let expected = parts.map(gradient_sums::sum_of_squares);
        checker.compare_values("sums_of_squares", &found, &expected);
    }
    Ok(())
}

pub(super) fn adamw<B: Backend>(checker: &mut Checker<'_, B>) -> Result<()> {
    for elements in SIZES {
        let mut parameters = checker.numbers::<f32>(elements, [-1.0, 1.0])?;
        let mut average = checker.numbers::<f32>(elements, [-0.1, 0.1])?;
        let mut average_square = checker.numbers::<f32>(elements, [0.01, 0.1])?;
        let gradient = checker.numbers::<f32>(elements, [-1.0, 1.0])?;
        let mut state = AdamWState {
            parameters: parameters.wide.clone(),
            exp_avg: average.wide.clone(),
            exp_avg_sq: average_square.wide.clone(),
        };
        defined(&mut state, &gradient.wide, STEP);
        let (backend, stream) = (checker.backend, &mut checker.stream);
        let moments = [average.slice_mut(), average_square.slice_mut()];
        let (of, by) = (parameters.slice_mut(), gradient.slice());
        backend.adamw(stream, of, moments, by, STEP)?;
        checker.compare("adamw, parameters", &parameters, &state.parameters)?;
        checker.compare("adamw, exp_avg", &average, &state.exp_avg)?;
        checker.compare("adamw, exp_avg_sq", &average_square, &state.exp_avg_sq)?;
    }
    Ok(())
}

/// Checks Lion on masters, which are joined to fp32 for the comparison.
pub(super) fn lion<B: Backend>(checker: &mut Checker<'_, B>) -> Result<()> {
    let step = LionStep {
        learning_rate: 1e-2,
        beta1: 0.9,
        beta2: 0.99,
        decay_factor: 0.999,
        gradient_scale: 0.5,
    };
    for elements in SIZES {
        let from = checker.numbers::<f32>(elements, [-1.0, 1.0])?;
        let mut average = checker.numbers::<f32>(elements, [-0.1, 0.1])?;
        let gradient = checker.numbers::<f32>(elements, [-1.0, 1.0])?;
        let mut rounded = checker.room::<B::Activation>(elements)?;
        let mut remainder = checker.write(&vec![0xdead_u16; remainder_elements::<B>(elements)])?;
        let mut joined = checker.room::<f32>(elements)?;
        let mut state = LionState { parameters: from.wide.clone(), exp_avg: average.wide.clone() };
        defined_lion(&mut state, &gradient.wide, step);
        let (backend, stream) = (checker.backend, &mut checker.stream);
        let mut master = MasterMut::new(rounded.slice_mut(), SliceMut::all(&mut remainder))?;
        backend.split_master(stream, master.reborrow(), from.slice())?;
        backend.lion(stream, master, average.slice_mut(), gradient.slice(), step)?;
        let master = Master::new(rounded.slice(), Slice::all(&remainder))?;
        backend.join_master(stream, joined.slice_mut(), master, &Run::all(elements))?;
        checker.compare("lion, parameters", &joined, &state.parameters)?;
        checker.compare("lion, exp_avg", &average, &state.exp_avg)?;
    }
    Ok(())
}

/// Masters that are split, updated and joined, which loses nothing.
pub(super) fn masters<B: Backend>(checker: &mut Checker<'_, B>) -> Result<()> {
    for elements in SIZES {
        let from = checker.numbers::<f32>(elements, [-1.0, 1.0])?;
        let mut average = checker.numbers::<f32>(elements, [-0.1, 0.1])?;
        let mut average_square = checker.numbers::<f32>(elements, [0.01, 0.1])?;
        let gradient = checker.numbers::<f32>(elements, [-1.0, 1.0])?;
        let mut rounded = checker.room::<B::Activation>(elements)?;
        let mut remainder = checker.write(&vec![0xdead_u16; remainder_elements::<B>(elements)])?;
        let mut joined = checker.room::<f32>(elements)?;
        let mut state = AdamWState {
            parameters: from.wide.clone(),
            exp_avg: average.wide.clone(),
            exp_avg_sq: average_square.wide.clone(),
        };
        let (backend, stream) = (checker.backend, &mut checker.stream);
        let master = MasterMut::new(rounded.slice_mut(), SliceMut::all(&mut remainder))?;
        backend.split_master(stream, master, from.slice())?;
        let master = Master::new(rounded.slice(), Slice::all(&remainder))?;
        backend.join_master(stream, joined.slice_mut(), master, &Run::all(elements))?;
        checker.compare("split_master and join_master", &joined, &from.wide)?;

        defined(&mut state, &gradient.wide, STEP);
        let (backend, stream) = (checker.backend, &mut checker.stream);
        let master = MasterMut::new(rounded.slice_mut(), SliceMut::all(&mut remainder))?;
        let moments = [average.slice_mut(), average_square.slice_mut()];
        backend.adamw_master(stream, master, moments, gradient.slice(), STEP)?;
        let master = Master::new(rounded.slice(), Slice::all(&remainder))?;
        backend.join_master(stream, joined.slice_mut(), master, &Run::all(elements))?;
        checker.compare("adamw_master", &joined, &state.parameters)?;
    }
    Ok(())
}
