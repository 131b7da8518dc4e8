//! The hashes of the row groups of a shard, as its footer states them.
//!
//! The hash of a whole file cannot verify a part. So `prepare` writes the hash of the pages of each
//! row group, in their stored form, into the key-value metadata of the footer, and the hash of the
//! footer into the index: a reader of a single row group can trace it to the index.
//!
//! The value is `xxh3-128:` and the hexadecimal digits of the hashes, 32 each, with commas between
//! them: one for each row group, of the bytes of its one column from the first page to the last.
//!
//! Contract: the value is believed only in files that `prepare` wrote. Other programs may copy the metadata
//! of a file while they write some of its rows again, in other row groups.

use parquet::{errors::ParquetError, file::metadata::ParquetMetaData};

use crate::hash::{ContentHash, HASH_ALGORITHM};

/// Key of the value in the metadata.
pub(crate) const GROUP_HASHES_KEY: &str = "tidemill.row_group_hashes";

/// The writer of such files, as the footer names it.
pub(crate) const CREATED_BY: &str = "tidemill";

/// See the [module](self).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct GroupHashes(Vec<ContentHash>);

impl GroupHashes {
    /// Appends the hash of the next row group.
    pub(crate) fn push(&mut self, hash: ContentHash) {
        self.0.push(hash);
    }

    /// Hash of a row group.
    pub(crate) fn get(&self, group: usize) -> Option<ContentHash> {
        self.0.get(group).copied()
    }

    /// The value.
    pub(crate) fn to_text(&self) -> String {
        let digits: Vec<String> = self.0.iter().map(|hash| hash.digits()).collect();
        format!("{HASH_ALGORITHM}:{}", digits.join(","))
    }

    /// The hashes that a footer states, where it does.
    ///
    /// # Errors
    /// [`ParquetError`] for a value that is none, or not of these row groups.
    pub(crate) fn find(metadata: &ParquetMetaData) -> Result<Option<GroupHashes>, ParquetError> {
        let file = metadata.file_metadata();
        if file.created_by() != Some(CREATED_BY) {
            return Ok(None);
        }
        let stated = file.key_value_metadata().into_iter().flatten();
        let Some(stated) = stated.into_iter().find(|stated| stated.key == GROUP_HASHES_KEY) else {
            return Ok(None);
        };
        let text = stated.value.as_deref().unwrap_or_default();
        let wrong = |found: String| {
            let groups = metadata.num_row_groups();
            ParquetError::General(format!(
                "{GROUP_HASHES_KEY} is {found}, expected the hashes of {groups} row groups of one column"
            ))
        };
        let hashes = GroupHashes::parse(text).ok_or_else(|| wrong(format!("{text:?}")))?;
        let is_of_one_column = metadata.row_groups().iter().all(|group| group.num_columns() == 1);
        if hashes.0.len() != metadata.num_row_groups() || !is_of_one_column {
            return Err(wrong(format!("{} hashes", hashes.0.len())));
        }
        Ok(Some(hashes))
    }

    fn parse(text: &str) -> Option<GroupHashes> {
        let digits = text.strip_prefix(HASH_ALGORITHM)?.strip_prefix(':')?;
        let parse = |digits| format!("{HASH_ALGORITHM}:{digits}").parse().ok();
        digits.split(',').map(parse).collect::<Option<_>>().map(GroupHashes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_value_is_read_back_and_anything_else_is_none() {
        let mut hashes = GroupHashes::default();
        hashes.push(ContentHash::of(b""));
        let one = "xxh3-128:99aa06d3014798d86001c324468d497f";
        assert_eq!(hashes.to_text(), one);
        hashes.push(ContentHash::of(b"a"));
        assert_eq!(hashes.to_text().len(), one.len() + 33);
        assert_eq!(GroupHashes::parse(&hashes.to_text()), Some(hashes));
        for wrong in ["", "xxh3-128:", &format!("{one},"), &format!("{one},{one}"), &one[1..]] {
            assert_eq!(GroupHashes::parse(wrong), None, "{wrong:?}");
        }
    }
}
