//! Which errors may pass by themselves, and the construction of errors of the operating system.

use std::{io, path::PathBuf};

use super::PrepareError;
use crate::error::DataError;

impl PrepareError {
    /// Whether the same preparation may succeed another time though nothing is changed. As for
    /// [`DataError::may_succeed_later`], what the operating system answered may have passed.
    pub fn may_succeed_later(&self) -> bool {
        match self {
            Self::Data(error) => error.may_succeed_later(),
            Self::DocumentChanged { .. }
            | Self::InputChanged { .. }
            | Self::ShardEncoding { .. }
            | Self::Panic { .. }
            | Self::UpdateRunning { .. }
            | Self::UpdateOvertaken { .. }
            | Self::PruneRunning(_)
            | Self::Readmitted { .. }
            | Self::Message { .. }
            | Self::Parted(_)
            | Self::Interrupted => true,
            Self::Setting { .. }
            | Self::Glob { .. }
            | Self::UnknownFilter { .. }
            | Self::FilterFile { .. }
            | Self::ChosenTokens { .. }
            | Self::ExclusionKey { .. }
            | Self::NoDocuments { .. }
            | Self::Document { .. }
            | Self::BrokenDocument { .. }
            | Self::InputColumn { .. }
            | Self::MixedInputs { .. }
            | Self::SampleLength { .. }
            | Self::ShardDigest { .. }
            | Self::LeftOut { .. }
            | Self::DamagedMdsShard { .. }
            | Self::Sample { .. }
            | Self::SampleToken { .. }
            | Self::Tokenize { .. }
            | Self::TokenizedToken { .. }
            | Self::TooFewTokens { .. }
            | Self::OutputExists { .. }
            | Self::OtherSelection { .. }
            | Self::OutputTaken { .. }
            | Self::NotUpdatable { .. }
            | Self::StateVersion { .. }
            | Self::StateDamaged { .. }
            | Self::OtherTokenizer { .. }
            | Self::OtherText { .. }
            | Self::PathNotUtf8 { .. }
            | Self::InputUnseen { .. }
            | Self::OtherProcess { .. }
            | Self::InputNotUpdatable { .. } => false,
        }
    }

    /// Wraps an error of the operating system; made for `map_err`.
    pub(crate) fn io(
        action: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(io::Error) -> PrepareError {
        let wrap = DataError::io(action, path);
        move |source| wrap(source).into()
    }
}
