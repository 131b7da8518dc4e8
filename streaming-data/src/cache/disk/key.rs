//! Names of the files of a cache.

use std::{fmt, str::FromStr};

use crate::{
    hash::{ContentHash, ContentHasher},
    store::Origin,
};

const PREFIX: &str = "tidemill-";

/// The identity of a cached shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Key {
    origin: Origin,
    /// The hash of the content; of the place, where the content's is not known.
    digest: ContentHash,
    is_of_content: bool,
    bytes: u64,
}

impl Key {
    /// A shard whose hash is known.
    pub(crate) fn of_content(origin: Origin, hash: ContentHash, bytes: u64) -> Key {
        Key { origin, digest: hash, is_of_content: true, bytes }
    }

    /// A shard that is known only by its place, the hash of its footer and its etag.
    pub(crate) fn of_place(
        origin: Origin,
        url: &str,
        footer: Option<ContentHash>,
        e_tag: Option<&str>,
        bytes: u64,
    ) -> Key {
        let mut hasher = ContentHasher::new();
        let footer = footer.map_or([0; 16], ContentHash::to_be_bytes);
        for part in [url.as_bytes(), &footer, e_tag.unwrap_or("").as_bytes()] {
            hasher.update(&(part.len() as u64).to_be_bytes());
            hasher.update(part);
        }
        Key { origin, digest: hasher.finish(), is_of_content: false, bytes }
    }

    /// Size of the file.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Hash that the file must have, where that is known.
    pub(crate) fn hash(&self) -> Option<ContentHash> {
        self.is_of_content.then_some(self.digest)
    }
}

impl fmt::Display for Key {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = if self.is_of_content { 'h' } else { 'p' };
        let digest = u128::from_be_bytes(self.digest.to_be_bytes());
        write!(formatter, "{kind}{:032x}-{digest:032x}-{}", self.origin.0, self.bytes)
    }
}

impl FromStr for Key {
    type Err = ();

    fn from_str(text: &str) -> Result<Key, ()> {
        let (is_of_content, text_of_parts) = match text.split_at_checked(1).ok_or(())? {
            ("h", rest) => (true, rest),
            ("p", rest) => (false, rest),
            _ => return Err(()),
        };
        let mut parts = text_of_parts.split('-');
        let mut part = || parts.next().ok_or(());
        let origin = Origin(u128::from_str_radix(part()?, 16).map_err(|_| ())?);
        let digest = format!("{}:{}", crate::hash::HASH_ALGORITHM, part()?);
        let digest = digest.parse().map_err(|_| ())?;
        let bytes = part()?.parse().map_err(|_| ())?;
        let key = Key { origin, digest, is_of_content, bytes };
        // A name in another spelling (capitals, leading zeros) is not of this scheme.
        if key.to_string() == text { Ok(key) } else { Err(()) }
    }
}

/// Name of a file that a cache made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Name {
    /// A whole shard.
    Shard(Key),
    /// A shard that is being downloaded.
    Part { key: Key, process: u32, number: u64 },
}

impl fmt::Display for Name {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Name::Shard(key) => write!(formatter, "{PREFIX}{key}.shard"),
            Name::Part { key, process, number } => {
                write!(formatter, "{PREFIX}{key}.{process}-{number}.part")
            }
        }
    }
}

impl FromStr for Name {
    type Err = ();

    fn from_str(text: &str) -> Result<Name, ()> {
        let rest = text.strip_prefix(PREFIX).ok_or(())?;
        let name = if let Some(key) = rest.strip_suffix(".shard") {
            Name::Shard(key.parse()?)
        } else {
            let (key, part) =
                rest.strip_suffix(".part").and_then(|r| r.split_once('.')).ok_or(())?;
            let (process, number) = part.split_once('-').ok_or(())?;
            let number = number.parse().map_err(|_| ())?;
            Name::Part { key: key.parse()?, process: process.parse().map_err(|_| ())?, number }
        };
        if name.to_string() == text { Ok(name) } else { Err(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_back_and_nothing_else_is_ours() {
        let (hash, origin) = (ContentHash::of(b"x"), Origin::of(["s3://b"]));
        for key in [
            Key::of_content(origin, hash, 7),
            Key::of_place(origin, "s3://b/x", Some(hash), None, 7),
            Key::of_place(origin, "s3://b/x", None, Some("1"), 7),
        ] {
            for name in [Name::Shard(key), Name::Part { key, process: 3, number: 9 }] {
                let text = name.to_string();
                assert_eq!(text.parse(), Ok(name));
                for changed in [
                    text.to_uppercase(),
                    format!("{text}x"),
                    format!("x{text}"),
                    text.replace("-7.", "-07."),
                    text.replace("-7.", "-+7."),
                    text.replace("-7.", "."),
                ] {
                    assert_eq!(changed.parse::<Name>(), Err(()), "{changed}");
                }
            }
        }
        // Named by content alone, as before there were origins.
        let old = format!("tidemill-h{}-7.shard", hash.digits());
        for foreign in [&old, "shard-00000.parquet", "tidemill-", "tidemill-é-7.shard", ".part", ""]
        {
            assert_eq!(foreign.parse::<Name>(), Err(()), "{foreign}");
        }
    }
}
