//! Where the samples of a shard begin and end, read a block at a time.
//!
//! The offsets of all samples are before the first sample, and a compressed table of zeros costs
//! nothing: a shard of a few kilobytes may state 2^30. So they are read from a stream of their own,
//! beside that of the samples, and never held all at once.

use std::io::{self, Cursor, Read};

/// Offsets that are read at once.
const BLOCK_OFFSETS: u64 = 1 << 14;

/// The offsets of a shard in order.
pub(super) struct Offsets {
    bytes: Box<dyn Read + Send>,
    /// Offsets that were not read yet.
    left: u64,
    begun: bool,
    /// The rest of the current block.
    block: Cursor<Vec<u8>>,
}

impl Offsets {
    /// The offsets of a shard of `samples` samples, from its unread content.
    pub(super) fn new(bytes: Box<dyn Read + Send>, samples: u64) -> Offsets {
        Offsets { bytes, left: samples.saturating_add(1), begun: false, block: Cursor::default() }
    }

    /// The next offset; none after the last.
    ///
    /// # Errors
    /// The errors of the stream.
    pub(super) fn next(&mut self) -> io::Result<Option<u32>> {
        if self.block.position() == self.block.get_ref().len() as u64 {
            if self.left == 0 {
                return Ok(None);
            }
            let offsets = self.left.min(BLOCK_OFFSETS);
            self.left -= offsets;
            self.block.set_position(0);
            if !self.begun {
                // The number of samples.
                self.bytes.read_exact(&mut [0; 4])?;
                self.begun = true;
            }
            let block = self.block.get_mut();
            block.resize(4 * offsets as usize, 0);
            self.bytes.read_exact(block)?;
        }
        let mut offset = [0; 4];
        self.block.read_exact(&mut offset)?;
        Ok(Some(u32::from_le_bytes(offset)))
    }
}
