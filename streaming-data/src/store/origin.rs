//! What tells the shards of one place from those of another.

#[cfg(feature = "stores")]
use sha2::{Digest, Sha256};

/// The store and folder that a data set is read from.
///
/// The hash of a shard is no defence against a forger, and an index is only as trustworthy as its place:
/// so no data set uses a cached shard that another one brought. A forger could choose a part of the place,
/// which is why the origin is a cryptographic hash.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Origin(pub(crate) u128);

impl Origin {
    /// The origin that these texts name together.
    #[cfg(feature = "stores")]
    pub(crate) fn of<'a>(texts: impl IntoIterator<Item = &'a str>) -> Origin {
        let mut hasher = Sha256::new();
        for text in texts {
            hasher.update((text.len() as u64).to_be_bytes());
            hasher.update(text);
        }
        let bytes: [u8; 32] = hasher.finalize().into();
        let (half, _) = bytes.split_first_chunk().expect("32 bytes are more than 16");
        Origin(u128::from_be_bytes(*half))
    }
}
