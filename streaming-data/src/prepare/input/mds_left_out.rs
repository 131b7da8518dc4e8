//! Replaces `mds` in a build without that feature: MDS data sets are recognised, and refused.

use std::{convert::Infallible, path::Path, sync::Arc};

use super::{Limits, Next, ReadFailure, ReadParts};
use crate::prepare::PrepareError;

/// There is none.
#[derive(Debug)]
pub(crate) struct MdsSet(Infallible);

impl MdsSet {
    pub(crate) fn open(folder: &Path, _text_key: Option<&str>) -> Result<MdsSet, PrepareError> {
        Err(PrepareError::LeftOut { path: folder.to_owned(), feature: "mds" })
    }

    pub(crate) fn bytes(&self) -> u64 {
        match self.0 {}
    }

    pub(crate) fn is_tokens(&self) -> bool {
        match self.0 {}
    }
}

pub(crate) fn first_sample_tokens(set: &MdsSet) -> Result<Option<usize>, PrepareError> {
    match set.0 {}
}

pub(crate) struct MdsReader(Infallible);

impl MdsReader {
    pub(crate) fn new(set: Arc<MdsSet>, _row_tokens: usize) -> MdsReader {
        match set.0 {}
    }
}

impl ReadParts for MdsReader {
    fn next_part(&mut self, _limits: Limits) -> Result<Next, ReadFailure> {
        match self.0 {}
    }
}
