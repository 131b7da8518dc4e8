//! Parameters on a device: the copies that blocks read, and the masters that are updated.
//!
//! Where activations are fp32, the parameters are their own masters: four bytes each. In bf16,
//! products read a rounded copy, and a master is that copy with the bits that rounding removed
//! stored beside it ([`MasterMut`]): four bytes too. A worker that does not own a parameter has the
//! copy alone. Tensors that blocks read in fp32 (vectors, and tables for lookup) exist a second
//! time as fp32 values, side by side. [`Held`] says which parameters are present, and where.

use std::ops::Range;

use tidemill_kernels::backend::ActivationElement;
use tidemill_kernels::{Backend, Master, MasterMut, Run, Slice, SliceMut, remainder_elements};

use crate::error::{ModelError, Result};
use crate::held::Held;
use crate::layout::Layout;
use crate::lease::{Lease, Packing};
use crate::trainable::Device;

/// The number of elements that are joined or split at once, on their way from or to the host.
const PIECE_ELEMENTS: usize = 4 << 20;

/// The place of the masters of consecutive parameters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MasterPlace {
    /// Their elements of the parameter arena.
    pub range: Range<usize>,
    /// Their first place among all masters that are present.
    pub start: usize,
}

/// A buffer in which masters are joined to fp32 on their way to the host; kept, so that it is
/// allocated once.
pub struct JoinRoom<B: Backend>(Option<B::Buffer<f32>>);

impl<B: Backend> Default for JoinRoom<B> {
    fn default() -> Self {
        Self(None)
    }
}

impl<B: Backend> JoinRoom<B> {
    fn of(&mut self, device: &mut Device<'_, B>) -> Result<&mut B::Buffer<f32>> {
        match self.0.take() {
            Some(room) => Ok(self.0.insert(room)),
            None => Ok(self.0.insert(device.backend.allocate(device.stream, PIECE_ELEMENTS)?)),
        }
    }
}

/// Parameters: all of a model's, or some of them.
pub struct Parameters<B: Backend> {
    held: Held,
    /// The parameters, where activations are fp32; else empty.
    master: B::Buffer<f32>,
    /// The copy that products read, where activations are not fp32.
    compute: B::RoundedCopy,
    /// The bits that rounding removed, for the masters that are present.
    remainder: B::Buffer<u16>,
    /// The values that blocks read in fp32, where activations are not fp32.
    vectors: B::Buffer<f32>,
    /// The packing of each segment in that memory, and where it begins; only where all parameters
    /// are present.
    segments: Vec<(Packing, usize)>,
}

impl<B: Backend> Parameters<B> {
    /// All parameters of `layout`, for reading, from a host arena of `layout.parameter_elements()`
    /// elements.
    ///
    /// # Errors
    /// An arena of another length, or a device without room.
    pub fn from_host(device: &mut Device<'_, B>, layout: &Layout, arena: &[f32]) -> Result<Self> {
        Self::with_masters(device, layout, Held::whole::<B>(layout), arena, &[])
    }

    /// The parameters `held` of an arena of `layout`, and the masters of the parts `owned` among
    /// them. Each part says where its masters begin; together the parts fill the places of all masters.
    ///
    /// # Errors
    /// An arena of another length, a part that is not held, or a device without room.
    pub fn with_masters(
        device: &mut Device<'_, B>,
        layout: &Layout,
        held: Held,
        arena: &[f32],
        owned: &[MasterPlace],
    ) -> Result<Self> {
        let (expected, found) = (layout.parameter_elements(), arena.len());
        let is_inside = held.ranges().last().is_none_or(|last| last.end <= expected);
        if found != expected || !is_inside {
            return Err(ModelError::ArenaSize { expected, found });
        }
        let masters = owned.iter().map(|place| place.range.len()).sum();
        let mut parameters = Self::zeros(device, layout, held, masters)?;
        let mut room = JoinRoom::default();
        for MasterPlace { range, start } in owned {
            let at = parameters.place(range)?.start;
            parameters.load_masters(device, (at, &arena[range.clone()]), *start, &mut room)?;
        }
        let mut in_order: Vec<_> = owned.iter().map(|place| &place.range).collect();
        in_order.sort_by_key(|range| range.start);
        let ends = in_order.iter().map(|range| range.end);
        let starts = in_order.iter().map(|range| range.start).chain([arena.len()]);
        let mut lost = None;
        for of_others in std::iter::once(0).chain(ends).zip(starts).map(|(end, next)| end..next) {
            for range in parameters.held.within(&of_others).collect::<Vec<_>>() {
                let at = parameters.place(&range)?.start;
                parameters.load(device, (at, &arena[range]), &mut lost, &mut room)?;
            }
        }
        for (range, start) in parameters.held.vectors(&(0..arena.len())) {
            let out = SliceMut::new(&mut parameters.vectors, start, range.len())?;
            device.backend.write(device.stream, out, &arena[range])?;
        }
        Ok(parameters)
    }

    fn zeros(
        device: &mut Device<'_, B>,
        layout: &Layout,
        held: Held,
        masters: usize,
    ) -> Result<Self> {
        let Device { backend, stream } = device;
        let (elements, mut segments) = (held.elements(), Vec::new());
        let has_all = elements == layout.parameter_elements();
        if has_all && B::Activation::REMAINDERS > 0 {
            for (index, segment) in layout.segments().iter().enumerate() {
                let start = held.vector_range(&segment.range).start;
                segments.push((Packing::of_segment(layout, index), start));
            }
        }
        let own = elements * (1 - B::Activation::REMAINDERS);
        Ok(Self {
            master: backend.allocate(stream, own)?,
            compute: backend.rounded_copy(stream, elements)?,
            remainder: backend.allocate(stream, remainder_elements::<B>(masters))?,
            vectors: backend.allocate(stream, held.vector_elements())?,
            segments,
            held,
        })
    }

    /// Which parameters are present, and where.
    pub fn held(&self) -> &Held {
        &self.held
    }

    fn place(&self, range: &Range<usize>) -> Result<Range<usize>> {
        self.held.place(range).ok_or_else(|| ModelError::ParameterAccess {
            attempt: format!("elements {range:?} of the parameters"),
            expected: "elements that are held side by side".to_owned(),
            found: format!("{:?}", self.held.within(range).collect::<Vec<_>>()),
        })
    }

    /// Writes `values`, rounded, from element `start` on, and drops the bits that rounding removes.
    fn load(
        &mut self,
        device: &mut Device<'_, B>,
        (start, values): (usize, &[f32]),
        lost: &mut Option<B::Buffer<u16>>,
        room: &mut JoinRoom<B>,
    ) -> Result<()> {
        let lost = match lost {
            Some(lost) => lost,
            None => {
                let elements = remainder_elements::<B>(PIECE_ELEMENTS);
                lost.insert(device.backend.allocate(device.stream, elements)?)
            }
        };
        self.load_pieces(device, (start, values), room, |parameters, at, elements, device, from| {
            let rounded = B::compute_buffer_mut(&mut parameters.master, &mut parameters.compute);
            let rounded = SliceMut::new(rounded, start + at, elements)?;
            let lost = SliceMut::new(lost, 0, remainder_elements::<B>(elements))?;
            let out = MasterMut::new(rounded, lost)?;
            Ok(device.backend.split_master(device.stream, out, from)?)
        })
    }

    /// Splits `values` into the masters from element `start` on, whose remainders begin at
    /// `masters`.
    fn load_masters(
        &mut self,
        device: &mut Device<'_, B>,
        (start, values): (usize, &[f32]),
        masters: usize,
        room: &mut JoinRoom<B>,
    ) -> Result<()> {
        self.load_pieces(device, (start, values), room, |parameters, at, elements, device, from| {
            let range = start + at..start + at + elements;
            let out = parameters.master_mut(range, masters + at)?;
            Ok(device.backend.split_master(device.stream, out, from)?)
        })
    }

    fn load_pieces(
        &mut self,
        device: &mut Device<'_, B>,
        (start, values): (usize, &[f32]),
        room: &mut JoinRoom<B>,
        mut split: impl FnMut(
            &mut Self,
            usize,
            usize,
            &mut Device<'_, B>,
            Slice<'_, B, f32>,
        ) -> Result<()>,
    ) -> Result<()> {
        if B::Activation::REMAINDERS == 0 {
            let out = SliceMut::new(&mut self.master, start, values.len())?;
            return Ok(device.backend.write(device.stream, out, values)?);
        }
        for (index, piece) in values.chunks(PIECE_ELEMENTS).enumerate() {
            let room = room.of(device)?;
            let out = SliceMut::new(room, 0, piece.len())?;
            device.backend.write(device.stream, out, piece)?;
            let from = Slice::new(room, 0, piece.len())?;
            split(self, index * PIECE_ELEMENTS, piece.len(), device, from)?;
        }
        Ok(())
    }

    /// The masters of elements `range`, whose remainders begin at `start`.
    fn master_mut(&mut self, range: Range<usize>, start: usize) -> Result<MasterMut<'_, B>> {
        let rounded = B::compute_buffer_mut(&mut self.master, &mut self.compute);
        let [start, elements] = [start, range.len()].map(remainder_elements::<B>);
        let rounded = SliceMut::new(rounded, range.start, range.len())?;
        Ok(MasterMut::new(rounded, SliceMut::new(&mut self.remainder, start, elements)?)?)
    }

    /// The masters at `place`.
    ///
    /// # Errors
    /// A place outside the masters.
    pub fn masters(&self, place: &MasterPlace) -> Result<Master<'_, B>> {
        let [start, elements] = [place.start, place.range.len()].map(remainder_elements::<B>);
        let remainder = Slice::new(&self.remainder, start, elements)?;
        Ok(Master::new(self.rounded(self.place(&place.range)?)?, remainder)?)
    }

    /// Lets `change` change the masters at `place`, and updates the values that blocks read.
    ///
    /// # Errors
    /// A place outside the masters, an error of `change`, or a device that fails.
    pub fn update(
        &mut self,
        device: &mut Device<'_, B>,
        place: &MasterPlace,
        change: impl FnOnce(&mut Device<'_, B>, MasterMut<'_, B>) -> Result<()>,
    ) -> Result<()> {
        let MasterPlace { range, start } = place;
        let held = self.place(range)?;
        change(device, self.master_mut(held.clone(), *start)?)?;
        let runs = self.held.vectors(range).map(|(inside, to)| {
            let from = inside.start - range.start..inside.end - range.start;
            Run { from, to }
        });
        let runs: Vec<Run> = runs.collect();
        if runs.is_empty() {
            return Ok(());
        }
        let [start, elements] = [*start, range.len()].map(remainder_elements::<B>);
        let rounded = B::compute_buffer(&self.master, &self.compute);
        let rounded = Slice::new(rounded, held.start, held.len())?;
        let masters = Master::new(rounded, Slice::new(&self.remainder, start, elements)?)?;
        let out = SliceMut::all(&mut self.vectors);
        Ok(device.backend.join_master(device.stream, out, masters, &runs)?)
    }

    /// Elements `range` of the held parameters, where activations are fp32, so that they exist
    /// once.
    ///
    /// # Errors A range outside the parameters; in other precisions, every range but an empty one.
    pub fn fp32(&self, range: Range<usize>) -> Result<Slice<'_, B, f32>> {
        Ok(Slice::new(&self.master, range.start, range.len())?)
    }

    /// The same as a view that can be written: for parameters that others own.
    ///
    /// # Errors
    /// As [`fp32`](Self::fp32).
    pub fn fp32_mut(&mut self, range: Range<usize>) -> Result<SliceMut<'_, B, f32>> {
        Ok(SliceMut::new(&mut self.master, range.start, range.len())?)
    }

    /// The copy of elements `range` of the held parameters that products read.
    ///
    /// # Errors
    /// A range outside the parameters.
    pub fn rounded(&self, range: Range<usize>) -> Result<Slice<'_, B, B::Activation>> {
        let rounded = B::compute_buffer(&self.master, &self.compute);
        Ok(Slice::new(rounded, range.start, range.len())?)
    }

    /// The same as a view that can be written: for parameters that others own.
    ///
    /// # Errors A range outside the parameters.
    pub fn rounded_mut(&mut self, range: Range<usize>) -> Result<SliceMut<'_, B, B::Activation>> {
        let rounded = B::compute_buffer_mut(&mut self.master, &mut self.compute);
        Ok(SliceMut::new(rounded, range.start, range.len())?)
    }

    /// Elements `range` of the memory that blocks read in fp32, as [`Held::fp32_place`] numbers it.
    /// Where activations are fp32, this is the one memory of all held parameters.
    ///
    /// # Errors A range outside this memory.
    pub fn in_fp32(&self, range: Range<usize>) -> Result<Slice<'_, B, f32>> {
        match B::Activation::REMAINDERS {
            0 => self.fp32(range),
            _ => self.vectors(range),
        }
    }

    /// Elements `range` of the values that exist a second time, in fp32.
    ///
    /// # Errors A range outside these values.
    pub fn vectors(&self, range: Range<usize>) -> Result<Slice<'_, B, f32>> {
        Ok(Slice::new(&self.vectors, range.start, range.len())?)
    }

    /// The same as a view that can be written: for parameters that others own.
    ///
    /// # Errors A range outside these values.
    pub fn vectors_mut(&mut self, range: Range<usize>) -> Result<SliceMut<'_, B, f32>> {
        Ok(SliceMut::new(&mut self.vectors, range.start, range.len())?)
    }

    /// Copies the masters at `place` to `host`.
    ///
    /// # Errors
    /// A place outside the masters, a `host` of another length, or a device that fails.
    pub fn read(
        &self,
        device: &mut Device<'_, B>,
        place: &MasterPlace,
        host: &mut [f32],
        room: &mut JoinRoom<B>,
    ) -> Result<()> {
        self.joined(device, place, room, |device, at, joined| {
            let out = &mut host[at..at + joined.elements()];
            Ok(device.backend.read(device.stream, out, joined)?)
        })
    }

    /// Copies the masters at `place` to pinned memory from element `start` on, and returns at once.
    ///
    /// # Errors
    /// A place outside the masters or the pinned memory, or a device that fails.
    pub fn read_async(
        &self,
        device: &mut Device<'_, B>,
        place: &MasterPlace,
        (to, start): (&mut B::Pinned<f32>, usize),
        room: &mut JoinRoom<B>,
    ) -> Result<()> {
        self.joined(device, place, room, |device, at, joined| {
            Ok(device.backend.read_async(device.stream, to, start + at, joined)?)
        })
    }

    /// Calls `take` with the masters at `place` in fp32, piece by piece, and with the place where
    /// each piece begins.
    fn joined(
        &self,
        device: &mut Device<'_, B>,
        place: &MasterPlace,
        room: &mut JoinRoom<B>,
        mut take: impl FnMut(&mut Device<'_, B>, usize, Slice<'_, B, f32>) -> Result<()>,
    ) -> Result<()> {
        let elements = place.range.len();
        if B::Activation::REMAINDERS == 0 {
            return take(device, 0, self.fp32(self.place(&place.range)?)?);
        }
        for at in (0..elements).step_by(PIECE_ELEMENTS) {
            let piece = PIECE_ELEMENTS.min(elements - at);
            let master = self.masters(place)?.sub(at, piece)?;
            let room = room.of(device)?;
            let Device { backend, stream } = device;
            let out = SliceMut::new(room, 0, piece)?;
            backend.join_master(stream, out, master, &Run::all(piece))?;
            take(device, at, Slice::new(room, 0, piece)?)?;
        }
        Ok(())
    }

    /// The parameters of segment `segment` of `layout`, in any order: for generation and scoring, which keep all of them.
    /// Training leases from a [`ParameterSource`](crate::ParameterSource).
    ///
    /// # Errors
    /// A layout that is not that of these parameters.
    pub fn lease(&self, layout: &Layout, segment: usize) -> Result<Lease<'_, B>> {
        let range = self.place(&layout.segments()[segment].range)?;
        let rounded = self.rounded(range.clone())?;
        match self.segments.get(segment) {
            Some((packing, start)) => {
                let vectors = Slice::new(&self.vectors, *start, packing.fp32_elements())?;
                Lease::packed(packing, vectors, rounded)
            }
            None => Ok(Lease::whole(self.fp32(range)?, rounded)),
        }
    }
}
