//! What the tests of several processes share.

use std::{
    fs,
    num::NonZeroUsize,
    path::{Path, PathBuf},
    sync::Mutex,
    time::Duration,
};

use tempfile::TempDir;
use tidemill_streaming_data::prepare::{
    ByteTokenizer, Parted, Peers, Pieces, PrepareSettings, Tokenize, TokenizeError,
};

use crate::outcome::names;

/// Bytes that two processes usually have in flight, and next to none.
pub const ROOM: usize = 4 << 20;
pub const NO_ROOM: usize = 1;

/// A folder to work in, in memory where there is one.
pub struct Bench {
    pub folder: TempDir,
}

impl Bench {
    pub fn new() -> Bench {
        let memory = Path::new("/dev/shm");
        let folder = match memory.is_dir() {
            true => tempfile::tempdir_in(memory).unwrap(),
            false => tempfile::tempdir().unwrap(),
        };
        fs::create_dir(folder.path().join("in")).unwrap();
        Bench { folder }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn write(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, content).unwrap();
        path
    }

    pub fn settings(&self) -> PrepareSettings {
        let settings = PrepareSettings::new(vec![self.path("in")], self.path("out"), number(16));
        PrepareSettings { shard_samples: Some(number(60)), ..settings }
    }

    /// The names in the folder except for lists.
    pub fn left(&self) -> Vec<String> {
        names(self.folder.path()).into_iter().filter(|name| !name.ends_with(".txt")).collect()
    }
}

pub fn number(number: usize) -> NonZeroUsize {
    NonZeroUsize::new(number).unwrap()
}

/// The tokenizer `bytes`, but for what happens before it encodes a text.
pub struct Encodes<F> {
    pub encoding: F,
    pub pieces: Pieces,
}

impl<F: Fn(&str) -> Result<(), TokenizeError> + Send + Sync> Tokenize for Encodes<F> {
    fn encode(&self, text: &str, tokens: &mut Vec<u32>) -> Result<(), TokenizeError> {
        (self.encoding)(text)?;
        ByteTokenizer.encode(text, tokens)
    }

    fn vocab_size(&self) -> u32 {
        ByteTokenizer.vocab_size()
    }

    fn bos_token_id(&self) -> Option<u32> {
        ByteTokenizer.bos_token_id()
    }

    fn eos_token_id(&self) -> u32 {
        ByteTokenizer.eos_token_id()
    }

    fn pad_token_id(&self) -> Option<u32> {
        ByteTokenizer.pad_token_id()
    }

    fn tokenizer_json(&self) -> Option<String> {
        ByteTokenizer.tokenizer_json()
    }

    fn pieces(&self) -> Pieces {
        self.pieces
    }
}

/// Peers, one of which calls a function before its messages: with the sending process, and the number of messages it has sent.
pub struct Before<'a> {
    peers: &'a dyn Peers,
    received: Mutex<Vec<usize>>,
    before: &'a (dyn Fn(usize, usize) + Sync),
}

impl<'a> Before<'a> {
    pub fn new(peers: &'a dyn Peers, before: &'a (dyn Fn(usize, usize) + Sync)) -> Before<'a> {
        Before { peers, received: Mutex::new(vec![0; peers.processes()]), before }
    }
}

impl Peers for Before<'_> {
    fn process(&self) -> usize {
        self.peers.process()
    }

    fn processes(&self) -> usize {
        self.peers.processes()
    }

    fn send(
        &self,
        to: usize,
        message: Vec<u8>,
        patience: Duration,
    ) -> Result<Option<Vec<u8>>, Parted> {
        self.peers.send(to, message, patience)
    }

    fn receive(
        &self,
        from: &[usize],
        patience: Duration,
    ) -> Result<Option<(usize, Vec<u8>)>, Parted> {
        let received = self.peers.receive(from, patience)?;
        if let Some((from, _)) = received {
            let mut numbers = self.received.lock().unwrap();
            (self.before)(from, numbers[from]);
            numbers[from] += 1;
        }
        Ok(received)
    }
}
