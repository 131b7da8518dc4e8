//! Pages out of their compression, into memory that is used again.
//!
//! A page is about a megabyte: memory for each, fresh from the operating system, costs a tenth of
//! the cost of decompressing.

use parquet::basic::Compression;

/// How the pages of a column are compressed, where it is one that is read here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Codec {
    Uncompressed,
    Snappy,
    Zstd,
}

impl Codec {
    /// `None` for a compression that is left to the general reader.
    pub(super) fn of(compression: Compression) -> Option<Codec> {
        match compression {
            Compression::UNCOMPRESSED => Some(Codec::Uncompressed),
            Compression::SNAPPY => Some(Codec::Snappy),
            Compression::ZSTD(_) => Some(Codec::Zstd),
            _ => None,
        }
    }
}

/// Memory of one thread, in which pages are read and decompressed.
#[derive(Default)]
pub(crate) struct Scratch {
    /// The page as it is in the file.
    pub(super) stored: Vec<u8>,
    pub(super) plain: Vec<u8>,
    decompressor: Option<zstd::bulk::Decompressor<'static>>,
}

impl std::fmt::Debug for Scratch {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Scratch")
            .field("bytes", &(self.stored.capacity() + self.plain.capacity()))
            .finish_non_exhaustive()
    }
}

impl Scratch {
    /// Memory for the bytes of the file.
    pub(in crate::shard) fn stored(&mut self) -> &mut Vec<u8> {
        &mut self.stored
    }

    /// Decompresses `stored[from..]` into `plain`; `None` if it does not become `length` bytes.
    pub(super) fn decompress(&mut self, codec: Codec, from: usize, length: usize) -> Option<()> {
        let source = self.stored.get(from..)?;
        let plain = &mut self.plain;
        plain.clear();
        match codec {
            Codec::Uncompressed => plain.extend_from_slice(source),
            Codec::Snappy => {
                if snap::raw::decompress_len(source).ok()? != length {
                    return None;
                }
                plain.resize(length, 0);
                snap::raw::Decoder::new().decompress(source, plain).ok()?;
            }
            Codec::Zstd => {
                plain.reserve(length);
                let decompressor = match &mut self.decompressor {
                    Some(decompressor) => decompressor,
                    none => none.insert(zstd::bulk::Decompressor::new().ok()?),
                };
                decompressor.decompress_to_buffer(source, plain).ok()?;
            }
        }
        (plain.len() == length).then_some(())
    }
}
