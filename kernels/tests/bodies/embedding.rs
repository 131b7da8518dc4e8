//! Embedding.

use tidemill_kernels::backend::Output;
use tidemill_kernels::reference::embedding::{backward, forward};
use tidemill_kernels::shape::GrainRows;
use tidemill_kernels::{Backend, KernelError, Slice};

use super::agreement::{Transcript, assert_close, assert_same_bits, tolerance};
use super::arm::{Arm, Sizes, Sums};
use super::device::{Device, Layout, MARGINS, Placed};
use super::inputs::{Inputs, wide};

/// The rows of a call, and their tokens.
struct Case {
    vocab_size: usize,
    width: usize,
    grains: GrainRows,
    table: Vec<f32>,
    lane: Vec<f32>,
    dout: Vec<f32>,
    tokens: Vec<u32>,
}

impl Case {
    /// About one row in three holds token 0: some tokens are frequent.
    fn new(inputs: &mut Inputs, vocab_size: usize, width: usize, grains: GrainRows) -> Self {
        let rows = grains.rows();
        let mut tokens = inputs.tokens(rows, vocab_size);
        for token in &mut tokens {
            if inputs.pick(3) == 0 {
                *token = 0;
            }
        }
        Self {
            vocab_size,
            width,
            grains,
            table: inputs.uniform(vocab_size * width, -1.0, 1.0),
            lane: inputs.uniform(vocab_size * width, -1.0, 1.0),
            dout: inputs.uniform(rows * width, -1.0, 1.0),
            tokens,
        }
    }

    fn table_layout(&self) -> Layout {
        Layout::inside_wider(self.vocab_size, self.width)
    }

    /// The looked-up rows, added to `before` if it is given.
    fn forward<B: Backend>(&self, device: &mut Device<'_, B>, before: Option<&[f32]>) -> Vec<f32> {
        let tokens = device.upload(&self.tokens);
        let table = Placed::new(device, self.table_layout(), &self.table);
        let layout = Layout::inside_wider(self.tokens.len(), self.width);
        let (mut out, output) = match before {
            None => (Placed::poisoned(device, layout), Output::Overwrite),
            Some(before) => (Placed::new(device, layout, before), Output::Add),
        };
        let (backend, stream) = (device.backend, &mut device.stream);
        let (out_mut, tokens) = (out.matrix_mut(), Slice::all(&tokens));
        backend.embedding_forward(stream, out_mut, table.matrix(), tokens, output).unwrap();
        out.read(device)
    }

    /// `lane` after the rows `first .. first + grains.rows()` were added in one call.
    fn added<B: Backend>(
        &self,
        device: &mut Device<'_, B>,
        lane: &[f32],
        first: usize,
        grains: GrainRows,
    ) -> Vec<f32> {
        let tokens = device.upload(&self.tokens);
        let mut lane = Placed::new(device, self.table_layout(), lane);
        let layout = Layout::inside_wider(self.tokens.len(), self.width);
        let dout = Placed::new(device, layout, &self.dout);
        let (backend, stream) = (device.backend, &mut device.stream);
        let tokens = Slice::new(&tokens, first, grains.rows()).unwrap();
        let dout = dout.matrix().rows(first, grains.rows()).unwrap();
        backend.embedding_backward_add(stream, lane.matrix_mut(), dout, tokens, grains).unwrap();
        lane.read(device)
    }

    /// For each grain the sum of its rows from +0.0, one by one, then added to the lane.
    fn added_one_by_one(&self) -> Vec<f32> {
        let mut lane = self.lane.clone();
        for grain in 0..self.grains.grains() {
            let mut sum = vec![0.0_f32; lane.len()];
            for row in self.grains.range(grain) {
                for i in 0..self.width {
                    let token = self.tokens[row] as usize;
                    sum[token * self.width + i] += self.dout[row * self.width + i];
                }
            }
            lane.iter_mut().zip(sum).for_each(|(lane, sum)| *lane += sum);
        }
        lane
    }
}

fn check_case<B: Backend>(
    device: &mut Device<'_, B>,
    transcript: &mut Transcript,
    label: &str,
    case: &Case,
) {
    let expected = forward(&wide(&case.table), &case.tokens, case.width);
    let expected: Vec<f32> = expected.iter().map(|&x| x as f32).collect();
    assert_same_bits(label, &case.forward(device, None), &expected);
    let sums: Vec<f32> = expected.iter().zip(&case.dout).map(|(x, before)| before + x).collect();
    assert_same_bits(label, &case.forward(device, Some(&case.dout)), &sums);

    let found = case.added(device, &case.lane, 0, case.grains);
    let dtable = backward(&wide(&case.dout), &case.tokens, case.vocab_size, case.width);
    let expected: Vec<f64> =
        dtable.iter().zip(&case.lane).map(|(d, &lane)| d + f64::from(lane)).collect();
    assert_close(label, &found, &expected, tolerance::<f32>(case.tokens.len()));
    transcript.record(label, &found);
    if device.sums == Sums::OneByOne {
        assert_same_bits(&format!("{label} in order"), &found, &case.added_one_by_one());
    }

    let mut lane = case.lane.clone();
    for grain in 0..case.grains.grains() {
        let rows = case.grains.range(grain);
        let alone = GrainRows::new(rows.len(), case.grains.rows_per_grain()).unwrap();
        lane = case.added(device, &lane, rows.start, alone);
    }
    assert_same_bits(&format!("{label} grain by grain"), &lane, &found);
}

/// Tokens of the vocabulary, width, rows, and rows of a grain.
fn sizes(sizes: Sizes) -> Vec<[usize; 4]> {
    let mut list = Vec::new();
    for vocab_size in sizes.choose(vec![1, 5, 17, 259], vec![1, 5, 259]) {
        for width in sizes.choose(vec![1, 3, 16, 17, 40], vec![3, 16, 40]) {
            list.extend(
                [[1, 1], [7, 2], [9, 9], [128, 48]]
                    .map(|[rows, rows_per_grain]| [vocab_size, width, rows, rows_per_grain]),
            );
        }
    }
    // Tokens with hundreds of rows, wide rows, and more rows and tokens than a block reads at once.
    list.extend([[5, 16, 2100, 1030], [259, 1032, 1100, 1100], [33_000, 1, 9000, 5000]]);
    list
}

/// Rows are copied to the bit; gradients are sums over grains, each of which depends only on its own rows.
pub fn agrees<B: Backend>(arm: &Arm<B>) -> Transcript {
    let mut device = Device::new(arm);
    let mut transcript = Transcript::default();
    for (seed, size) in sizes(device.sizes).into_iter().enumerate() {
        let [vocab_size, width, rows, rows_per_grain] = size;
        device.margin = MARGINS[seed % 2];
        let grains = GrainRows::new(rows, rows_per_grain).unwrap();
        let case = Case::new(&mut Inputs::new(seed as u64), vocab_size, width, grains);
        let label = format!("embedding vocab {vocab_size} width {width} {grains:?} seed {seed}");
        check_case(&mut device, &mut transcript, &label, &case);
    }
    transcript
}

/// A token outside the vocabulary is reported with its row, forward and backward.
pub fn refuses_tokens_out_of_range<B: Backend>(arm: &Arm<B>) {
    let backend = &arm.backend;
    let (rows, vocab_size, width) = (4, 5, 3);
    for token in [5, 6, u32::MAX] {
        let tokens = [4, 0, token, 1];
        let expect = |error: KernelError| match error {
            KernelError::TokenOutOfRange { row: 2, token: found, vocab_size: 5, .. } => {
                assert_eq!(found, token);
            }
            other => panic!("expected token {token} out of range, found {other:?}"),
        };
        let mut device = Device::new(arm);
        let placed_tokens = device.upload(&tokens);
        let table = Placed::new(&mut device, Layout::packed(vocab_size, width), &[0.5; 15]);
        let mut out = Placed::poisoned(&mut device, Layout::packed(rows, width));
        let result = backend.embedding_forward(
            &mut device.stream,
            out.matrix_mut(),
            table.matrix(),
            Slice::all(&placed_tokens),
            Output::Overwrite,
        );
        expect(device.error_of(result));

        let mut device = Device::new(arm);
        let placed_tokens = device.upload(&tokens);
        let mut lane = Placed::new(&mut device, Layout::packed(vocab_size, width), &[0.5; 15]);
        let dout = Placed::new(&mut device, Layout::packed(rows, width), &[0.5; 12]);
        let result = backend.embedding_backward_add(
            &mut device.stream,
            lane.matrix_mut(),
            dout.matrix(),
            Slice::all(&placed_tokens),
            GrainRows::new(rows, 2).unwrap(),
        );
        expect(device.error_of(result));
    }
}
