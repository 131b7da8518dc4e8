//! The convolution and the scan, whole and in pieces.

use super::checker::{Checker, Numbers};
use crate::backend::{
    Backend, ConvGradients, ConvInputs, PieceState, ScanGradients, ScanInputs, ScanSaved,
};
use crate::error::Result;
use crate::reference::{causal_conv1d as conv, selective_scan as scan};
use crate::shape::{ConvShape, ScanShape, SequenceShape};

/// Samples, positions and channels: less than a tile or a chunk has, and more than one.
const SIZES: [[usize; 3]; 2] = [[2, 7, 12], [1, 131, 40]];
const TAPS: usize = 4;
/// Positions of pieces: a token, and part of a prompt.
const PIECE_POSITIONS: [usize; 2] = [1, 3];

pub(super) fn causal_conv1d<B: Backend>(checker: &mut Checker<'_, B>) -> Result<()> {
    for [samples, positions, channels] in SIZES {
        let shape = ConvShape::new(SequenceShape::new(samples, positions)?, 1, channels, TAPS)?;
        let elements = samples * positions * channels;
        let x = checker.activations(elements)?;
        let dout = checker.activations(elements)?;
        let weight = checker.numbers::<f32>(channels * TAPS, [-1.0, 1.0])?;
        let bias = checker.numbers::<f32>(channels, [-1.0, 1.0])?;
        let mut out = checker.room::<B::Activation>(elements)?;
        let mut dx = checker.room::<B::Activation>(elements)?;
        let mut dweight = checker.room::<f32>(samples * channels * TAPS)?;
        let mut dbias = checker.room::<f32>(samples * channels)?;
        let inputs = || -> Result<ConvInputs<'_, B>> {
            let (weight, bias) = (weight.slice(), Some(bias.slice()));
            Ok(ConvInputs { x: x.matrix(channels)?, weight, bias, starts: None })
        };
        let (backend, stream) = (checker.backend, &mut checker.stream);
        let results = out.matrix_mut(channels)?;
        backend.causal_conv1d_silu_forward(stream, results, inputs()?, shape)?;
        backend.causal_conv1d_silu_backward(
            stream,
            ConvGradients {
                dx: dx.matrix_mut(channels)?,
                dweight: dweight.slice_mut(),
                dbias: Some(dbias.slice_mut()),
            },
            dout.matrix(channels)?,
            inputs()?,
            shape,
        )?;
        let wide = conv::ConvInputs {
            x: &x.wide,
            weight: &weight.wide,
            bias: Some(&bias.wide),
            starts: None,
        };
        let backward = conv::backward(&dout.wide, &wide, shape);
        checker.compare("causal_conv1d_silu_forward", &out, &conv::forward(&wide, shape))?;
        checker.compare("causal_conv1d_silu_backward, dx", &dx, &backward.dx)?;
        checker.compare("causal_conv1d_silu_backward, dweight", &dweight, &backward.dweight)?;
        checker.compare("causal_conv1d_silu_backward, dbias", &dbias, &backward.dbias)?;

        for positions in PIECE_POSITIONS {
            conv_piece(checker, [samples, positions, channels], &weight, &bias)?;
        }
    }
    Ok(())
}

/// A piece of each sample, from a state that is given.
fn conv_piece<B: Backend>(
    checker: &mut Checker<'_, B>,
    [samples, positions, channels]: [usize; 3],
    weight: &Numbers<B, f32>,
    bias: &Numbers<B, f32>,
) -> Result<()> {
    let shape_of = |positions| -> Result<ConvShape> {
        ConvShape::new(SequenceShape::new(samples, positions)?, 1, channels, TAPS)
    };
    let elements = samples * positions * channels;
    let mut state = checker.activations(samples * channels * (TAPS - 1))?;
    let x = checker.activations(elements)?;
    let mut out = checker.room::<B::Activation>(elements)?;
    let (mut moved, mut expected) = (state.wide.clone(), vec![0.0; elements]);
    for position in 0..positions {
        let row = |sample| (sample * positions + position) * channels;
        let newest: Vec<f64> =
            (0..samples).flat_map(|sample| &x.wide[row(sample)..][..channels]).copied().collect();
        let stepped = conv::step(&mut moved, &newest, &weight.wide, Some(&bias.wide), shape_of(1)?);
        for (sample, of_sample) in stepped.chunks_exact(channels).enumerate() {
            expected[row(sample)..][..channels].copy_from_slice(of_sample);
        }
    }
    let (backend, stream) = (checker.backend, &mut checker.stream);
    let inputs = ConvInputs {
        x: x.matrix(channels)?,
        weight: weight.slice(),
        bias: Some(bias.slice()),
        starts: None,
    };
    let piece = PieceState { state: state.slice_mut(), lengths: None };
    let results = out.matrix_mut(channels)?;
    backend.causal_conv1d_silu_piece(stream, results, piece, inputs, shape_of(positions)?)?;
    checker.compare("causal_conv1d_silu_piece", &out, &expected)?;
    checker.compare("causal_conv1d_silu_piece, state", &state, &moved)
}

/// 16 states, as models have, and another number.
pub(super) fn selective_scan<B: Backend>(checker: &mut Checker<'_, B>) -> Result<()> {
    for ([samples, positions, channels], states) in SIZES.into_iter().zip([5, 16]) {
        whole_scan(checker, [samples, positions], channels, states)?;
        scan_step(checker, samples, channels, states)?;
    }
    Ok(())
}

/// The inputs of a selective scan: on the device, and in `f64` as its definition reads them.
struct Read<B: Backend> {
    delta_raw: Numbers<B, B::Activation>,
    delta_bias: Numbers<B, f32>,
    x: Numbers<B, B::Activation>,
    bc: Numbers<B, B::Activation>,
    z: Numbers<B, B::Activation>,
    a_log: Numbers<B, f32>,
    d: Numbers<B, f32>,
    channels: usize,
    states: usize,
}

impl<B: Backend> Read<B> {
    fn new(checker: &mut Checker<'_, B>, shape: ScanShape) -> Result<Self> {
        let (rows, channels, states) = (shape.sequences().rows(), shape.channels(), shape.states());
        Ok(Self {
            delta_raw: checker.activations(rows * channels)?,
            delta_bias: checker.numbers(channels, [-2.0, 0.0])?,
            x: checker.activations(rows * channels)?,
            bc: checker.activations(rows * 2 * states)?,
            z: checker.activations(rows * channels)?,
            a_log: checker.numbers(channels * states, [0.0, 1.0])?,
            d: checker.numbers(channels, [0.5, 1.5])?,
            channels,
            states,
        })
    }

    fn inputs(&self) -> Result<ScanInputs<'_, B>> {
        Ok(ScanInputs {
            delta_raw: self.delta_raw.matrix(self.channels)?,
            delta_bias: self.delta_bias.slice(),
            x: self.x.matrix(self.channels)?,
            bc: self.bc.matrix(2 * self.states)?,
            z: self.z.matrix(self.channels)?,
            a_log: self.a_log.slice(),
            d: self.d.slice(),
            starts: None,
        })
    }

    fn wide(&self) -> scan::ScanInputs<'_> {
        scan::ScanInputs {
            delta_raw: &self.delta_raw.wide,
            delta_bias: &self.delta_bias.wide,
            x: &self.x.wide,
            bc: &self.bc.wide,
            z: &self.z.wide,
            a_log: &self.a_log.wide,
            d: &self.d.wide,
            starts: None,
        }
    }
}

fn whole_scan<B: Backend>(
    checker: &mut Checker<'_, B>,
    [samples, positions]: [usize; 2],
    channels: usize,
    states: usize,
) -> Result<()> {
    let shape = ScanShape::new(SequenceShape::new(samples, positions)?, 1, channels, states)?;
    let rows = samples * positions;
    let read = Read::new(checker, shape)?;
    let dout = checker.activations(rows * channels)?;
    let mut out = checker.room::<B::Activation>(rows * channels)?;
    let mut saved = checker.room::<f32>(checker.backend.selective_scan_saved_elements(shape))?;
    let [ddelta_raw, dx, dz] = [(); 3].map(|()| checker.room::<B::Activation>(rows * channels));
    let (mut ddelta_raw, mut dx, mut dz) = (ddelta_raw?, dx?, dz?);
    let mut dbc = checker.room::<B::Activation>(rows * 2 * states)?;
    let mut da_log = checker.room::<f32>(samples * channels * states)?;
    let mut dd = checker.room::<f32>(samples * channels)?;
    let mut ddelta_bias = checker.room::<f32>(samples * channels)?;
    let (backend, stream) = (checker.backend, &mut checker.stream);
    let results = out.matrix_mut(channels)?;
    backend.selective_scan_forward(stream, results, saved.slice_mut(), read.inputs()?, shape)?;
    let gradients = ScanGradients {
        ddelta_raw: ddelta_raw.matrix_mut(channels)?,
        dx: dx.matrix_mut(channels)?,
        dbc: dbc.matrix_mut(2 * states)?,
        dz: dz.matrix_mut(channels)?,
        da_log: da_log.slice_mut(),
        dd: dd.slice_mut(),
        ddelta_bias: ddelta_bias.slice_mut(),
        regated: None,
    };
    let (dout_of, inputs) = (dout.matrix(channels)?, read.inputs()?);
    let saved = ScanSaved { dout: dout_of, inputs, saved: saved.slice() };
    backend.selective_scan_backward(stream, gradients, saved, shape)?;
    let wide = read.wide();
    let expected = scan::backward(&dout.wide, &wide, shape);
    checker.compare("selective_scan_forward", &out, &scan::forward(&wide, shape))?;
    let of_rows = [
        ("ddelta_raw", &ddelta_raw, &expected.ddelta_raw),
        ("dx", &dx, &expected.dx),
        ("dbc", &dbc, &expected.dbc),
        ("dz", &dz, &expected.dz),
    ];
    for (what, found, expected) in of_rows {
        checker.compare(&format!("selective_scan_backward, {what}"), found, expected)?;
    }
    let of_grains = [
        ("da_log", &da_log, &expected.da_log),
        ("dd", &dd, &expected.dd),
        ("ddelta_bias", &ddelta_bias, &expected.ddelta_bias),
    ];
    for (what, found, expected) in of_grains {
        checker.compare(&format!("selective_scan_backward, {what}"), found, expected)?;
    }
    Ok(())
}

fn scan_step<B: Backend>(
    checker: &mut Checker<'_, B>,
    samples: usize,
    channels: usize,
    states: usize,
) -> Result<()> {
    let shape = ScanShape::new(SequenceShape::new(samples, 1)?, 1, channels, states)?;
    let read = Read::new(checker, shape)?;
    let mut state = checker.numbers::<f32>(samples * channels * states, [-1.0, 1.0])?;
    let mut out = checker.room::<B::Activation>(samples * channels)?;
    let mut moved = state.wide.clone();
    let expected = scan::step(&mut moved, &read.wide(), shape);
    let (backend, stream) = (checker.backend, &mut checker.stream);
    let results = out.matrix_mut(channels)?;
    let piece = PieceState { state: state.slice_mut(), lengths: None };
    backend.selective_scan_piece(stream, results, piece, read.inputs()?, shape)?;
    checker.compare("selective_scan_piece", &out, &expected)?;
    checker.compare("selective_scan_piece, state", &state, &moved)
}
