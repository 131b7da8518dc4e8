//! The primitives that protect the secret of a cluster, its messages and its data: HKDF, AES-256-GCM and random numbers of AWS-LC, and
//! the Noise protocol framework of `snow`.
//!
//! Without the feature `processes`, the file `no_ciphers.rs` replaces this one.

use std::{fmt, io};

use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use aws_lc_rs::hkdf::{HKDF_SHA256, Salt};
use serde::{Deserialize, Serialize};
use snow::{HandshakeState, StatelessTransportState};

use super::error::ClusterError;

/// Bytes of the tag that authenticates a message.
pub(super) const TAG_BYTES: usize = 16;
/// Each message of the handshake: a public key and a tag.
pub(super) const HANDSHAKE_BYTES: usize = 32 + TAG_BYTES;

const PATTERN: &str = "Noise_NNpsk0_25519_ChaChaPoly_BLAKE2s";

/// Bytes of the system's generator.
pub(super) fn random(bytes: &mut [u8]) -> Result<(), ClusterError> {
    aws_lc_rs::rand::fill(bytes).map_err(|_| ClusterError::NoRandomNumbers)
}

/// The pre-shared key that a text gives.
fn handshake_key(secret: &str) -> [u8; 32] {
    let mut key = [0; 32];
    Salt::new(HKDF_SHA256, b"tidemill cluster secret")
        .extract(secret.as_bytes())
        .expand(&[b"handshake"], HKDF_SHA256)
        .and_then(|derived| derived.fill(&mut key))
        .expect("a key of 32 bytes is one that the algorithm derives");
    key
}

/// One end of a handshake.
pub(super) struct Handshake(HandshakeState);

impl Handshake {
    /// The end that has connected.
    pub(super) fn of_caller(secret: &str, prologue: &str) -> io::Result<Self> {
        Self::new(secret, prologue, |builder| builder.build_initiator())
    }

    /// The end that has accepted.
    pub(super) fn of_answerer(secret: &str, prologue: &str) -> io::Result<Self> {
        Self::new(secret, prologue, |builder| builder.build_responder())
    }

    fn new(
        secret: &str,
        prologue: &str,
        build: impl FnOnce(snow::Builder<'_>) -> Result<HandshakeState, snow::Error>,
    ) -> io::Result<Self> {
        let pattern = PATTERN.parse().map_err(forged)?;
        let key = handshake_key(secret);
        snow::Builder::new(pattern)
            .psk(0, &key)
            .and_then(|builder| builder.prologue(prologue.as_bytes()))
            .and_then(build)
            .map(Self)
            .map_err(forged)
    }

    /// This end's message.
    pub(super) fn write(&mut self) -> io::Result<[u8; HANDSHAKE_BYTES]> {
        let mut bytes = [0; HANDSHAKE_BYTES];
        self.0.write_message(&[], &mut bytes).map_err(forged)?;
        Ok(bytes)
    }

    /// Takes the other end's message, which proves that it knows the secret.
    pub(super) fn read(&mut self, bytes: &[u8; HANDSHAKE_BYTES]) -> io::Result<()> {
        self.0.read_message(bytes, &mut []).map(drop).map_err(forged)
    }

    /// The keys that both ends have agreed on.
    pub(super) fn into_cipher(self) -> io::Result<MessageCipher> {
        self.0.into_stateless_transport_mode().map(MessageCipher).map_err(forged)
    }
}

/// Seals and opens the messages of an established connection.
pub(super) struct MessageCipher(StatelessTransportState);

impl MessageCipher {
    /// `sealed`, of [`TAG_BYTES`] more bytes, becomes the part of this number.
    pub(super) fn seal(&self, number: u64, part: &[u8], sealed: &mut [u8]) -> io::Result<()> {
        self.0.write_message(number, part, sealed).map(drop).map_err(forged)
    }

    /// `part`, of [`TAG_BYTES`] fewer bytes, becomes the plain text that was sealed under this number.
    pub(super) fn open(&self, number: u64, sealed: &[u8], part: &mut [u8]) -> io::Result<()> {
        self.0.read_message(number, sealed, part).map(drop).map_err(forged)
    }
}

/// A message that Noise refuses was not written by an end that knows the keys.
fn forged(_error: snow::Error) -> io::Error {
    let what = "a message that was changed on its way or is forged";
    io::Error::new(io::ErrorKind::InvalidData, what)
}

/// The key under which one end of a data connection seals its bytes.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct DataKey([u8; 32]);

impl DataKey {
    pub(super) fn generate() -> Result<Self, ClusterError> {
        let mut bytes = [0; 32];
        random(&mut bytes)?;
        Ok(Self(bytes))
    }

    /// The cipher that seals and opens under this key.
    pub(super) fn cipher(&self) -> DataCipher {
        let key = UnboundKey::new(&AES_256_GCM, &self.0).expect("AES-256 has keys of 32 bytes");
        DataCipher(LessSafeKey::new(key))
    }
}

impl fmt::Debug for DataKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("DataKey(..)")
    }
}

/// Seals or opens one direction of a data connection. No two seals of one key may have the same number.
pub(super) struct DataCipher(LessSafeKey);

impl DataCipher {
    /// Encrypts `bytes` and returns their tag.
    pub(super) fn seal(&self, number: u64, bytes: &mut [u8]) -> [u8; TAG_BYTES] {
        let tag = self.0.seal_in_place_separate_tag(nonce(number), Aad::empty(), bytes);
        let tag = tag.expect("a frame is far below what AES-GCM seals at once");
        tag.as_ref().try_into().expect("tags of AES-GCM have 16 bytes")
    }

    /// Decrypts `sealed` into `plain` if the tag is right.
    pub(super) fn open(
        &self,
        number: u64,
        sealed: &[u8],
        tag: &[u8],
        plain: &mut [u8],
    ) -> io::Result<()> {
        self.0.open_separate_gather(nonce(number), Aad::empty(), sealed, tag, plain).map_err(|_| {
            let what = "data that was changed on its way or is forged";
            io::Error::new(io::ErrorKind::InvalidData, what)
        })
    }
}

fn nonce(number: u64) -> Nonce {
    let mut nonce = [0; 12];
    nonce[4..].copy_from_slice(&number.to_be_bytes());
    Nonce::assume_unique_for_key(nonce)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_give_keys_of_their_own() {
        assert_eq!(handshake_key("0123456789abcdef"), handshake_key("0123456789abcdef"));
        assert_ne!(handshake_key("0123456789abcdef"), handshake_key(""));
    }
}
