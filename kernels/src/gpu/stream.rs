//! A queue, the scratch memory of its kernels, and the faults that they may leave.
//!
//! While the queue is recorded into a graph, operations that cannot be part of a graph are refused:
//! allocation, and copies to or from the host.

use crate::error::{KernelError, Result};
use crate::gpu::driver::{Address, Driver};

/// The use of a piece of scratch memory. Kernels that follow each other on a queue may share a slot; the stages of one kernel may
/// not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScratchSlot {
    /// Partial sums, or other intermediate results that the first stage of a kernel leaves for its second.
    First,
    /// Further results like those of the first slot.
    Second,
    /// Further results like those of the first slot.
    Third,
    /// The start bits of documents.
    Documents,
    /// The number of work items that blocks have taken: zero between kernels, so that nothing else may use it.
    Taken,
}

/// The kernels that look tokens up, each with a fault of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TokenLookup {
    EmbeddingForward,
    EmbeddingBackward,
    CrossEntropy,
}

impl TokenLookup {
    const ALL: [Self; 3] = [Self::EmbeddingForward, Self::EmbeddingBackward, Self::CrossEntropy];

    /// The kernel's name in errors.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::EmbeddingForward => "embedding_forward",
            Self::EmbeddingBackward => "embedding_backward_add",
            Self::CrossEntropy => "cross_entropy",
        }
    }
}

/// The words in which kernels report wrong input: for each of [`TokenLookup::ALL`], a `Fault` of `dialect.h`, the row in the upper half
/// and its token in the lower.
type Faults = [u64; TokenLookup::ALL.len()];

const NO_FAULTS: Faults = [u64::MAX; TokenLookup::ALL.len()];

/// An in-order queue of kernels and the scratch memory that they use.
pub struct GpuStream<D: Driver> {
    // Dropped before the queue, because memory is returned in the order of the queue.
    scratch: [Option<(D::Memory, usize)>; 5],
    faults: D::Memory,
    queue: D::Queue,
    /// The vocabulary that each kernel was last given: a graph may run it again at any time.
    vocab_sizes: [Option<usize>; TokenLookup::ALL.len()],
    /// Whether kernels that may leave a fault have been enqueued since the last look.
    may_be_faulty: bool,
    /// Whether enqueued work is recorded instead of run.
    recording: bool,
}

impl<D: Driver> GpuStream<D> {
    pub(super) fn new(driver: &D) -> Result<Self> {
        let mut queue = driver.queue()?;
        let faults = driver.allocate(&mut queue, size_of::<Faults>())?;
        driver.upload(&mut queue, &faults, 0, bytemuck::cast_slice(&NO_FAULTS))?;
        Ok(Self {
            scratch: [const { None }; 5],
            faults,
            queue,
            vocab_sizes: [None; TokenLookup::ALL.len()],
            may_be_faulty: false,
            recording: false,
        })
    }

    /// The queue, for what can be recorded.
    pub(crate) fn queue_mut(&mut self) -> &mut D::Queue {
        &mut self.queue
    }

    /// The queue, for what cannot.
    ///
    /// # Errors
    /// A recording, which `attempted` would spoil.
    pub(crate) fn queue_outside_recordings(
        &mut self,
        attempted: &'static str,
    ) -> Result<&mut D::Queue> {
        if self.recording {
            return Err(KernelError::NotRecordable { attempted });
        }
        Ok(&mut self.queue)
    }

    pub(super) fn is_recording(&self) -> bool {
        self.recording
    }

    pub(super) fn set_recording(&mut self, recording: bool) {
        self.recording = recording;
    }

    /// The address of the stream's own memory for faults: no other stream whose memory is in use has the same.
    pub(super) fn identity(&self) -> Address {
        D::address(&self.faults)
    }

    /// At least `bytes` bytes of scratch, of any contents. It grows to the largest that was
    /// asked for, and so stays where it is once every shape has been seen.
    ///
    /// # Errors
    /// No room, or growth while a graph is recorded.
    pub(crate) fn scratch(
        &mut self,
        driver: &D,
        slot: ScratchSlot,
        bytes: usize,
    ) -> Result<Address> {
        if let Some((memory, size)) = &self.scratch[slot as usize]
            && *size >= bytes
        {
            return Ok(D::address(memory));
        }
        self.queue_outside_recordings("growing scratch memory")?;
        // The old memory is freed first, so that both need not fit at once.
        self.scratch[slot as usize] = None;
        let memory = driver.allocate(&mut self.queue, bytes)?;
        let address = D::address(&memory);
        self.scratch[slot as usize] = Some((memory, bytes));
        Ok(address)
    }

    /// Scratch that begins with `bytes`.
    pub(crate) fn upload_scratch(
        &mut self,
        driver: &D,
        slot: ScratchSlot,
        bytes: &[u8],
    ) -> Result<Address> {
        self.queue_outside_recordings("writing scratch memory")?;
        let address = self.scratch(driver, slot, bytes.len())?;
        if let Some((memory, _)) = &mut self.scratch[slot as usize] {
            driver.upload(&mut self.queue, memory, 0, bytes)?;
        }
        Ok(address)
    }

    /// Where `kernel`, which looks up tokens below `vocab_size`, leaves a fault. It is answered by the next
    /// [`check`](Self::check) after each of its runs.
    pub(crate) fn fault(&mut self, kernel: TokenLookup, vocab_size: usize) -> Address {
        self.vocab_sizes[kernel as usize] = Some(vocab_size);
        self.may_be_faulty |= !self.recording;
        D::address(&self.faults).offset(kernel as usize * size_of::<u64>())
    }

    /// A graph was enqueued, which may hold any kernel of this stream.
    pub(super) fn note_replay(&mut self) {
        self.may_be_faulty |= self.vocab_sizes.iter().any(Option::is_some);
    }

    /// Answers a fault that kernels have left, if any did; then there is none.
    pub(super) fn check(&mut self, driver: &D) -> Result<()> {
        if !self.may_be_faulty {
            return Ok(());
        }
        let mut faults = NO_FAULTS;
        let to = bytemuck::cast_slice_mut(&mut faults);
        driver.download(&mut self.queue, to, &self.faults, 0)?;
        self.may_be_faulty = false;
        let found =
            TokenLookup::ALL.into_iter().find(|&kernel| faults[kernel as usize] != u64::MAX);
        let Some(kernel) = found else { return Ok(()) };
        driver.upload(&mut self.queue, &self.faults, 0, bytemuck::cast_slice(&NO_FAULTS))?;
        let row_and_token = faults[kernel as usize];
        Err(KernelError::TokenOutOfRange {
            kernel: kernel.name(),
            row: (row_and_token >> 32) as usize,
            token: row_and_token as u32,
            vocab_size: self.vocab_sizes[kernel as usize].unwrap_or_default(),
        })
    }
}
