//! A queue, the scratch memory of its kernels, and the fault that they may leave.

use bytemuck::Zeroable;

use crate::error::{KernelError, Result};
use crate::gpu::driver::{Address, Driver};

/// What scratch memory is for: kernels that follow each other on a queue may share a slot, the stages of one
/// kernel may not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScratchSlot {
    /// Partial sums, or what else the first stage of a kernel leaves for its second.
    First,
    /// More of the same.
    Second,
    /// More of the same.
    Third,
}

/// What a kernel reports of wrong input, as in `dialect.h`.
#[repr(C)]
#[derive(Clone, Copy, bytemuck::Pod, Zeroable)]
struct Fault {
    row_and_token: u64,
}

const NO_FAULT: Fault = Fault { row_and_token: u64::MAX };

/// An in-order queue of kernels and the scratch memory that they use.
pub struct GpuStream<D: Driver> {
    queue: D::Queue,
    scratch: [Option<(D::Memory, usize)>; 3],
    fault: D::Memory,
    /// The kernel, and the vocabulary, that a fault would be of.
    watched: Option<(&'static str, usize)>,
    /// Whether what is enqueued is recorded instead of run.
    recording: bool,
}

impl<D: Driver> GpuStream<D> {
    pub(super) fn new(driver: &D) -> Result<Self> {
        let mut queue = driver.queue()?;
        let mut fault = driver.allocate(&mut queue, size_of::<Fault>())?;
        driver.upload(&mut queue, &mut fault, 0, bytemuck::bytes_of(&NO_FAULT))?;
        Ok(Self { queue, scratch: [None, None, None], fault, watched: None, recording: false })
    }

    pub(crate) fn queue_mut(&mut self) -> &mut D::Queue {
        &mut self.queue
    }

    pub(super) fn is_recording(&self) -> bool {
        self.recording
    }

    pub(super) fn set_recording(&mut self, recording: bool) {
        self.recording = recording;
    }

    /// At least `bytes` bytes of scratch, whose contents nobody has promised. It grows to the largest that was
    /// asked for, and so stays where it is once every shape has been seen.
    pub(crate) fn scratch(
        &mut self,
        driver: &D,
        slot: ScratchSlot,
        bytes: usize,
    ) -> Result<Address> {
        let held = &mut self.scratch[slot as usize];
        if let Some((memory, size)) = held
            && *size >= bytes
        {
            return Ok(D::address(memory));
        }
        *held = None;
        let memory = driver.allocate(&mut self.queue, bytes)?;
        let address = D::address(&memory);
        *held = Some((memory, bytes));
        Ok(address)
    }

    /// Scratch that begins with `bytes`.
    pub(crate) fn upload_scratch(
        &mut self,
        driver: &D,
        slot: ScratchSlot,
        bytes: &[u8],
    ) -> Result<Address> {
        let address = self.scratch(driver, slot, bytes.len())?;
        if let Some((memory, _)) = &mut self.scratch[slot as usize] {
            driver.upload(&mut self.queue, memory, 0, bytes)?;
        }
        Ok(address)
    }

    /// Copies the first bytes of a slot to the host; waits for everything before it, and answers what kernels
    /// have reported.
    pub(crate) fn download_scratch(
        &mut self,
        driver: &D,
        slot: ScratchSlot,
        to: &mut [u8],
    ) -> Result<()> {
        if let Some((memory, _)) = &self.scratch[slot as usize] {
            driver.download(&mut self.queue, to, memory, 0)?;
        }
        self.check(driver)
    }

    /// The fault word, for a kernel that looks up tokens below `vocab_size`. What it finds is answered by the next
    /// [`check`](Self::check).
    pub(crate) fn fault(&mut self, kernel: &'static str, vocab_size: usize) -> Address {
        self.watched = Some((kernel, vocab_size));
        D::address(&self.fault)
    }

    /// Answers the fault that kernels have left, if any did.
    pub(super) fn check(&mut self, driver: &D) -> Result<()> {
        let Some((kernel, vocab_size)) = self.watched.take() else { return Ok(()) };
        let mut fault = Fault::zeroed();
        driver.download(&mut self.queue, bytemuck::bytes_of_mut(&mut fault), &self.fault, 0)?;
        if fault.row_and_token == NO_FAULT.row_and_token {
            return Ok(());
        }
        driver.upload(&mut self.queue, &mut self.fault, 0, bytemuck::bytes_of(&NO_FAULT))?;
        let row = (fault.row_and_token >> 32) as usize;
        let token = fault.row_and_token as u32;
        Err(KernelError::TokenOutOfRange { kernel, row, token, vocab_size })
    }
}
