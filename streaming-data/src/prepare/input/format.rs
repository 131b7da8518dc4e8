//! The format of an input, by its name; and whether a folder is an MDS data set, by its index.

use std::path::Path;

use serde::Deserialize;
use tidemill_files::{Kind, read};

use super::skip::SkipReason;

/// How an input holds documents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    /// The file is a document.
    Text,
    /// A line is a document.
    JsonLines(Compression),
    /// A row is a document.
    Parquet,
    /// A folder of shards and their index: a sample is a document, or a row of tokens.
    Mds,
}

/// How a file is compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Compression {
    /// Not at all.
    None,
    /// Gzip, of any number of members.
    Gzip,
    /// Zstandard, of any number of frames.
    Zstd,
    /// Brotli, of MosaicML's shards alone.
    #[cfg(feature = "mds")]
    Brotli,
}

/// Ends of names of compressed files, and whether they can be JSON lines here.
const COMPRESSED: [(&str, Option<Compression>); 9] = [
    ("gz", Some(Compression::Gzip)),
    ("zst", Some(Compression::Zstd)),
    ("zstd", Some(Compression::Zstd)),
    ("bz2", None),
    ("xz", None),
    ("lz4", None),
    ("br", None),
    ("zip", None),
    ("7z", None),
];

impl Format {
    /// The format of a file of this name: JSON lines and Parquet say so, everything else is text.
    ///
    /// # Errors
    /// [`SkipReason`] for a name that says that the file cannot be read.
    pub(crate) fn of_file(path: &Path) -> Result<Format, SkipReason> {
        let name = path.file_name().unwrap_or_default().to_string_lossy().to_ascii_lowercase();
        let (stem, end) = name.rsplit_once('.').unwrap_or((&name, ""));
        let is_json_lines =
            |name: &str| [".jsonl", ".ndjson", ".json"].iter().any(|end| name.ends_with(end));
        if let Some((found, compression)) = COMPRESSED.iter().find(|(known, _)| *known == end) {
            return match compression {
                Some(compression) if is_json_lines(stem) => Ok(Format::JsonLines(*compression)),
                _ => Err(SkipReason::Compression { found }),
            };
        }
        match end {
            "parquet" | "pq" => Ok(Format::Parquet),
            "mds" => Err(SkipReason::LooseMdsShard),
            _ if is_json_lines(&name) => Ok(Format::JsonLines(Compression::None)),
            _ => Ok(Format::Text),
        }
    }
}

/// The shards that the index of an MDS data set lists.
pub(crate) const MDS_FORMAT: &str = "mds";

/// Whether this is the index of an MDS data set, and not of something else.
///
/// # Errors
/// [`SkipReason`] when it cannot be read or is no JSON at all.
pub(crate) fn is_mds_index(path: &Path) -> Result<bool, SkipReason> {
    #[derive(Deserialize)]
    struct Probe {
        shards: Vec<ProbeShard>,
    }
    #[derive(Deserialize)]
    struct ProbeShard {
        format: String,
    }
    match serde_json::from_slice::<Probe>(&read(path, Kind::Index)?) {
        Ok(probe) => Ok(probe.shards.iter().any(|shard| shard.format == MDS_FORMAT)),
        Err(error) if error.is_data() => Ok(false),
        Err(source) => Err(SkipReason::Index { source }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_say_what_a_file_is() {
        let lines = Format::JsonLines;
        for (name, expected) in [
            ("a.txt", Format::Text),
            ("README", Format::Text),
            ("jsonl", Format::Text),
            ("a.rs", Format::Text),
            ("a.jsonl", lines(Compression::None)),
            ("a.NDJSON", lines(Compression::None)),
            ("a.json", lines(Compression::None)),
            ("c4-train.00000-of-01024.json.gz", lines(Compression::Gzip)),
            ("a.b.jsonl.zst", lines(Compression::Zstd)),
            ("a.ndjson.zstd", lines(Compression::Zstd)),
            ("a.parquet", Format::Parquet),
            ("a.json.parquet", Format::Parquet),
        ] {
            assert_eq!(Format::of_file(Path::new(name)).unwrap(), expected, "{name}");
        }
        for (name, part) in [
            ("a.txt.gz", ".gz"),
            ("a.jsonl.bz2", ".bz2"),
            ("a.zst", ".zst"),
            ("shard.00000.mds", "MDS"),
        ] {
            let reason = Format::of_file(Path::new(name)).unwrap_err().to_string();
            assert!(reason.contains(part), "{name}: {reason}");
        }
    }
}
