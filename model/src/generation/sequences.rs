//! Sequences in generation: the state that each block keeps of them, and the memory to advance all
//! of it.
//!
//! Given tokens enter in pieces ([`Piece`]). Every row of a product is independent of the others,
//! and the state of a sequence depends on that sequence alone, so neither the cut into pieces nor
//! the rest of the batch changes a bit: a prompt fed at once and one fed token by token, alone or
//! among others, end in the same state. A chosen token enters by itself, through products that are
//! fast for few rows ([`Products`]) and have other bits. So a state depends only on the tokens, and
//! on which of them were given and which were chosen.
//!
//! The sequences of a batch are sorted by the length of their prompts, the longest first: the sequences that still have given
//! tokens are then always the first ones, and the arguments of kernels are contiguous.

mod logits;
mod step;

use tidemill_kernels::backend::{KernelGroup, Output};
use tidemill_kernels::{Backend, Slice, SliceMut};

use crate::block::BlockMemory;
use crate::block::incremental::{
    Capacity, PIECE_POSITIONS, Piece, PiecePass, adopt_row, keep_rows,
};
use crate::error::{ModelError, Result};
use crate::generation::SamplingSettings;
use crate::language_model::{LanguageModel, SharedMemory};
use crate::linear::Products;
use crate::norm::Normed;
use crate::parameters::Parameters;
use crate::trainable::Device;

use self::logits::Choices;
use self::step::Step;

/// The state of several sequences in a model.
pub struct Sequences<'m, B: Backend> {
    model: &'m LanguageModel<B>,
    parameters: &'m Parameters<B>,
    capacity: Capacity,
    /// The number of tokens of each sequence.
    lengths: Vec<u32>,
    /// One state for each block.
    states: Vec<BlockMemory>,
    workspace: SharedMemory,
    rows: Rows<B>,
    /// `newest[b, d]`: the head's input for the newest token of each sequence.
    newest: B::Buffer<f32>,
    /// `logits[b, v]`, with the table's padding.
    logits: B::Buffer<f32>,
    host_logits: Vec<f32>,
    choices: Choices<B>,
    /// The kernels that choose tokens.
    choosing: Option<KernelGroup>,
    step: Step<B::Graph>,
}

/// Memory of one piece that belongs to no block.
struct Rows<B: Backend> {
    /// `tokens[b t]`. The device leaves the tokens that it chooses here, for the next step.
    tokens: B::Buffer<u32>,
    /// `past[b]`
    past: B::Buffer<u32>,
    /// `lengths[b]`, of the newest piece.
    lengths: B::Buffer<u32>,
    /// `places[b t]`, the rows of a table of learned positions; empty where the model has none.
    places: B::Buffer<u32>,
    /// `residual[b t, d]`
    residual: B::Buffer<f32>,
    /// Of the head's norm.
    normed: Normed<B>,
}

impl<'m, B: Backend> Sequences<'m, B> {
    /// Room for `sequences` sequences of up to `positions` tokens, or as many as the model has
    /// learned positions. Call [`begin`](Self::begin) first.
    ///
    /// The kernel that finds the most likely tokens is compiled beside the model's kernels; see
    /// [`for_sampling`](Self::for_sampling).
    ///
    /// # Errors
    /// No sequences or positions, or a device without room.
    pub fn new(
        device: &mut Device<'_, B>,
        model: &'m LanguageModel<B>,
        parameters: &'m Parameters<B>,
        sequences: usize,
        positions: usize,
    ) -> Result<Self> {
        let choosing = Some(KernelGroup::Likeliest);
        Self::with_kernels(device, model, parameters, [sequences, positions], choosing)
    }

    /// As [`new`](Self::new), with tokens that are chosen as `sampling` says: the kernels for it
    /// are compiled beside the model's, instead of at their first use. [`new`](Self::new) does so
    /// for the most likely tokens.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn for_sampling(
        device: &mut Device<'_, B>,
        model: &'m LanguageModel<B>,
        parameters: &'m Parameters<B>,
        sequences: usize,
        positions: usize,
        sampling: &SamplingSettings,
    ) -> Result<Self> {
        let choosing = sampling.choice().kernels();
        Self::with_kernels(device, model, parameters, [sequences, positions], choosing)
    }

    fn with_kernels(
        device: &mut Device<'_, B>,
        model: &'m LanguageModel<B>,
        parameters: &'m Parameters<B>,
        [sequences, positions]: [usize; 2],
        choosing: Option<KernelGroup>,
    ) -> Result<Self> {
        if sequences == 0 || positions == 0 {
            let found = format!("{sequences} and {positions}");
            return Err(ModelError::config("sequences and positions", "at least 1", found));
        }
        let of_blocks = model.blocks().iter().flat_map(|block| block.generation_kernels());
        let of_all =
            [KernelGroup::Embedding, model.head().norm.kernels(), KernelGroup::OrderedProduct];
        let kernels: Vec<_> = of_all.into_iter().chain(choosing).chain(of_blocks).collect();
        device.backend.prepare(&kernels)?;
        // Lengths are counted in u32.
        let most = model.positions().map_or(u32::MAX as usize, |learned| learned.count);
        let positions = positions.min(most);
        let capacity = Capacity::new(sequences, positions);
        let rows = capacity.rows;
        let (width, table_rows) = (model.width(), table_rows(model));
        let places = model.positions().map_or(0, |_| rows);
        let states = model.blocks().iter().map(|block| block.plan_state(device, capacity));
        Ok(Self {
            model,
            parameters,
            capacity,
            lengths: Vec::new(),
            states: states.collect::<Result<_>>()?,
            workspace: model
                .block_list()
                .plan_shared(|block| block.plan_workspace(device, capacity))?,
            rows: Rows {
                tokens: device.backend.allocate(device.stream, rows)?,
                past: device.backend.allocate(device.stream, sequences)?,
                lengths: device.backend.allocate(device.stream, sequences)?,
                places: device.backend.allocate(device.stream, places)?,
                residual: device.backend.allocate(device.stream, rows * width)?,
                normed: model.head().norm.plan_normed(device, rows)?,
            },
            newest: device.backend.allocate(device.stream, sequences * width)?,
            logits: device.backend.allocate(device.stream, sequences * table_rows)?,
            host_logits: Vec::new(),
            choices: Choices::new(device, sequences)?,
            choosing,
            step: Step::New,
        })
    }

    /// The model.
    pub fn model(&self) -> &'m LanguageModel<B> {
        self.model
    }

    /// The parameters.
    pub fn parameters(&self) -> &'m Parameters<B> {
        self.parameters
    }

    /// The sizes that memory was planned for.
    pub fn capacity(&self) -> Capacity {
        self.capacity
    }

    /// Drops all sequences and begins `sequences` empty ones.
    ///
    /// # Errors
    /// No sequences, more than there is room for, or a device that fails.
    pub fn begin(&mut self, device: &mut Device<'_, B>, sequences: usize) -> Result<()> {
        if !(1..=self.capacity.sequences).contains(&sequences) {
            let expected = format!("1 to {}", self.capacity.sequences);
            return Err(ModelError::config("sequences", expected, sequences));
        }
        for (block, state) in self.model.blocks().iter().zip(&mut self.states) {
            block.forget(device, state)?;
        }
        if self.lengths.len() != sequences {
            self.step = Step::New;
        }
        self.lengths.clear();
        self.lengths.resize(sequences, 0);
        Ok(())
    }

    /// Keeps some sequences and drops the others: `kept[i]`, ascending, becomes sequence i.
    ///
    /// # Errors
    /// No sequences, sequences that do not exist, or a device that fails.
    pub fn keep(&mut self, device: &mut Device<'_, B>, kept: &[usize]) -> Result<()> {
        let ascending = kept.is_sorted_by(|a, b| a < b);
        let Some(true) = kept.last().map(|&last| ascending && last < self.lengths.len()) else {
            let expected = format!("some of {}, ascending", self.lengths.len());
            return Err(ModelError::config("sequences to keep", expected, format!("{kept:?}")));
        };
        for (block, state) in self.model.blocks().iter().zip(&mut self.states) {
            block.keep(device, state, kept)?;
        }
        keep_rows(device, &mut self.newest, self.model.width(), kept)?;
        self.lengths = kept.iter().map(|&from| self.lengths[from]).collect();
        self.step = Step::New;
        Ok(())
    }

    /// Room for one more sequence of the same model, with as many positions.
    pub(crate) fn one_more(&self, device: &mut Device<'_, B>) -> Result<Self> {
        let capacity = [1, self.capacity.positions];
        Self::with_kernels(device, self.model, self.parameters, capacity, self.choosing)
    }

    /// Copies the first sequence of `from`, which is of the same model, to sequence `place`.
    pub(crate) fn adopt(
        &mut self,
        device: &mut Device<'_, B>,
        place: usize,
        from: &Self,
    ) -> Result<()> {
        let positions = from.lengths[0];
        let blocks = self.model.blocks().iter().zip(&mut self.states).zip(&from.states);
        for ((block, state), from) in blocks {
            block.adopt(device, state, place, from, positions as usize)?;
        }
        let width = self.model.width();
        adopt_row(device, (&mut self.newest, width), place, (&from.newest, width))?;
        self.lengths[place] = positions;
        Ok(())
    }

    /// Adds the given tokens `tokens[i]` to sequence i. The longest come first; sequences past the
    /// end of `tokens` stay as they are.
    ///
    /// # Errors
    /// Lengths that grow, more sequences or positions than there is room for, a token outside the vocabulary, or a device that
    /// fails.
    pub fn advance(&mut self, device: &mut Device<'_, B>, tokens: &[&[u32]]) -> Result<()> {
        self.check(tokens)?;
        for piece in self.pieces(tokens) {
            let shape = self.advance_piece(device, &piece)?;
            self.gather_newest(device, &shape, &piece)?;
        }
        Ok(())
    }

    /// The errors of [`advance`](Self::advance).
    pub(crate) fn check(&self, tokens: &[&[u32]]) -> Result<()> {
        let vocab_size = self.model.vocab_size();
        if tokens.len() > self.lengths.len() || !tokens.is_sorted_by(|a, b| a.len() >= b.len()) {
            return Err(ModelError::Microbatch {
                what: "sequences that go on",
                expected: format!("at most {}, the longest first", self.lengths.len()),
                found: tokens.len(),
            });
        }
        for (tokens, &length) in tokens.iter().zip(&self.lengths) {
            let positions = length as usize + tokens.len();
            if positions > self.capacity.positions {
                let expected = format!("at most {}", self.capacity.positions);
                return Err(ModelError::config("tokens of a sequence", expected, positions));
            }
            if let Some(index) = tokens.iter().position(|token| *token as usize >= vocab_size) {
                let what = format!("position {}", length as usize + index);
                return Err(ModelError::Token { what, token: tokens[index], vocab_size });
            }
        }
        Ok(())
    }

    /// Cuts `tokens` into pieces that fit. Each item has, for every sequence with tokens in the
    /// piece, those tokens.
    pub(crate) fn pieces<'t>(&self, tokens: &[&'t [u32]]) -> Vec<Vec<&'t [u32]>> {
        let longest = tokens.first().map_or(0, |tokens| tokens.len());
        let positions = (self.capacity.rows / tokens.len().max(1)).min(PIECE_POSITIONS);
        let piece = |first: usize| {
            let rest = tokens.iter().map_while(|tokens| tokens.get(first..));
            let rest = rest.take_while(|rest| !rest.is_empty());
            rest.map(|rest| &rest[..rest.len().min(positions)]).collect()
        };
        (0..longest).step_by(positions).map(piece).collect()
    }

    /// Adds the tokens of one piece. The head's input for the newest tokens is not gathered.
    pub(crate) fn advance_piece(
        &mut self,
        device: &mut Device<'_, B>,
        tokens: &[&[u32]],
    ) -> Result<Piece> {
        let piece = self.enter(device, tokens)?;
        // A recorded graph holds addresses of scratch memory, and this piece may make that memory
        // grow and move.
        self.step = Step::New;
        self.run(device, &piece, Products::Library)?;
        for (length, tokens) in self.lengths.iter_mut().zip(tokens) {
            *length += tokens.len() as u32;
        }
        Ok(piece)
    }

    /// Writes the tokens of one piece, and their positions, to the device.
    fn enter(&mut self, device: &mut Device<'_, B>, tokens: &[&[u32]]) -> Result<Piece> {
        let piece = Piece::new(tokens.iter().map(|tokens| tokens.len()));
        let mut packed = vec![0; piece.rows()];
        for (row, tokens) in packed.chunks_exact_mut(piece.positions()).zip(tokens) {
            row[..tokens.len()].copy_from_slice(tokens);
        }
        let Device { backend, stream } = device;
        let on_device = SliceMut::new(&mut self.rows.tokens, 0, packed.len())?;
        backend.write(stream, on_device, &packed)?;
        if !piece.is_even() {
            let lengths: Vec<u32> = tokens.iter().map(|tokens| tokens.len() as u32).collect();
            let on_device = SliceMut::new(&mut self.rows.lengths, 0, lengths.len())?;
            backend.write(stream, on_device, &lengths)?;
        }
        self.enter_positions(device, &piece)?;
        Ok(piece)
    }

    /// Writes the positions of one piece to the device.
    fn enter_positions(&mut self, device: &mut Device<'_, B>, piece: &Piece) -> Result<()> {
        let past = SliceMut::new(&mut self.rows.past, 0, piece.sequences())?;
        device.backend.write(device.stream, past, &self.lengths[..piece.sequences()])?;
        self.write_places(device, piece)
    }

    /// Writes the indices into a table of learned positions; rows that pad a piece take the last
    /// position at most.
    fn write_places(&mut self, device: &mut Device<'_, B>, piece: &Piece) -> Result<()> {
        let Some(learned) = self.model.positions() else { return Ok(()) };
        let last = learned.count as u32 - 1;
        let lengths = &self.lengths[..piece.sequences()];
        let places = |&past: &u32| (0..piece.positions() as u32).map(move |i| (past + i).min(last));
        let host: Vec<u32> = lengths.iter().flat_map(places).collect();
        let on_device = SliceMut::new(&mut self.rows.places, 0, host.len())?;
        Ok(device.backend.write(device.stream, on_device, &host)?)
    }

    /// From the tokens on the device to the head's input.
    fn run(&mut self, device: &mut Device<'_, B>, piece: &Piece, products: Products) -> Result<()> {
        let Rows { tokens, past, lengths, places, residual, .. } = &mut self.rows;
        let model = self.model;
        let parameters = model.embedding_parameters(self.parameters)?;
        let tokens = Slice::new(tokens, 0, piece.rows())?;
        model.embedding().forward(device, residual, parameters, tokens, Output::Overwrite)?;
        let learned = model.positions().zip(model.position_parameters(self.parameters)?);
        if let Some((learned, parameters)) = learned {
            let places = Slice::new(places, 0, piece.rows())?;
            learned.embedding.forward(device, residual, parameters, places, Output::Add)?;
        }
        let past = Slice::new(past, 0, piece.sequences())?;
        for (index, (block, state)) in model.blocks().iter().zip(&mut self.states).enumerate() {
            let parameters = model.block_parameters(self.parameters, index)?;
            let lengths = match piece.is_even() {
                true => None,
                false => Some(Slice::new(lengths, 0, piece.sequences())?),
            };
            let pass = PiecePass { parameters, products, piece, past, lengths };
            let workspace = model.block_list().shared(&mut self.workspace, index);
            block.advance(device, residual, pass, state, workspace)?;
        }
        Ok(())
    }

    fn gather_newest(
        &mut self,
        device: &mut Device<'_, B>,
        piece: &Piece,
        tokens: &[&[u32]],
    ) -> Result<()> {
        let width = self.model.width();
        for (sequence, tokens) in tokens.iter().enumerate() {
            let row = sequence * piece.positions() + tokens.len() - 1;
            let newest = SliceMut::new(&mut self.newest, sequence * width, width)?;
            let from = Slice::new(&self.rows.residual, row * width, width)?;
            device.backend.copy(device.stream, newest, from)?;
        }
        Ok(())
    }
}

/// Rows of the head's table, padding included.
pub(crate) fn table_rows<B: Backend>(model: &LanguageModel<B>) -> usize {
    model.head().table.len() / model.head().width
}
