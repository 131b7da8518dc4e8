//! Replaces [`ciphers`](super::ciphers) in a build without the feature `processes`: nothing can be protected, so processes
//! never meet, and each attempt says why. Keys and ciphers have no values, which the compiler knows.

use std::io;

use serde::{Deserialize, Serialize};

use super::error::ClusterError;

pub(super) const TAG_BYTES: usize = 16;
pub(super) const HANDSHAKE_BYTES: usize = 32 + TAG_BYTES;

pub(super) fn random(_bytes: &mut [u8]) -> Result<(), ClusterError> {
    Err(ClusterError::ThreadsAlone)
}

pub(super) struct Handshake(Never);

impl Handshake {
    pub(super) fn of_caller(_secret: &str, _prologue: &str) -> io::Result<Self> {
        Err(io::Error::other(ClusterError::ThreadsAlone))
    }

    pub(super) fn of_answerer(_secret: &str, _prologue: &str) -> io::Result<Self> {
        Err(io::Error::other(ClusterError::ThreadsAlone))
    }

    pub(super) fn write(&mut self) -> io::Result<[u8; HANDSHAKE_BYTES]> {
        match self.0 {}
    }

    pub(super) fn read(&mut self, _bytes: &[u8; HANDSHAKE_BYTES]) -> io::Result<()> {
        match self.0 {}
    }

    pub(super) fn into_cipher(self) -> io::Result<MessageCipher> {
        match self.0 {}
    }
}

pub(super) struct MessageCipher(Never);

impl MessageCipher {
    pub(super) fn seal(&self, _number: u64, _part: &[u8], _sealed: &mut [u8]) -> io::Result<()> {
        match self.0 {}
    }

    pub(super) fn open(&self, _number: u64, _sealed: &[u8], _part: &mut [u8]) -> io::Result<()> {
        match self.0 {}
    }
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct DataKey(Never);

#[derive(Clone, Debug, Serialize, Deserialize)]
enum Never {}

impl DataKey {
    pub(super) fn generate() -> Result<Self, ClusterError> {
        Err(ClusterError::ThreadsAlone)
    }

    pub(super) fn cipher(&self) -> DataCipher {
        match self.0 {}
    }
}

pub(super) struct DataCipher(Never);

impl DataCipher {
    pub(super) fn seal(&self, _number: u64, _bytes: &mut [u8]) -> [u8; TAG_BYTES] {
        match self.0 {}
    }

    pub(super) fn open(
        &self,
        _number: u64,
        _sealed: &[u8],
        _tag: &[u8],
        _plain: &mut [u8],
    ) -> io::Result<()> {
        match self.0 {}
    }
}
