//! A connection between two ends that know one secret: private, numbered messages.
//!
//! It begins with the handshake `NNpsk0` of the Noise protocol framework, whose first message
//! already proves that the caller knows the [`Secret`]: a caller that does not is never answered.
//! Nothing about either end is told before both have proved it; what an end has to say of itself
//! travels in the first messages after the handshake, under keys that are new in each connection,
//! so that a recorded greeting opens nothing. After that each message is a four-byte length and
//! JSON, both encrypted and authenticated under a running number: a bit that is flipped, a message
//! that is left out, repeated or moved is an error of kind `InvalidData`.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::ciphers::{HANDSHAKE_BYTES, Handshake, MessageCipher, TAG_BYTES};
use super::secret::Secret;

/// Raised when anything changes that the two ends must agree on. Ends of different versions are
/// strangers to each other.
const PROTOCOL: u32 = 2;
/// The most that Noise seals at once.
const PART_BYTES: usize = 65_535 - TAG_BYTES;
/// A message that is longer is refused, even from an end that knows the secret.
const MESSAGE_LIMIT_BYTES: usize = 1 << 20;

/// Between whom a connection is: a greeting of one kind is none of the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Between {
    /// Two processes of a cluster.
    Peers,
    /// A process and its supervisor.
    ChildAndSupervisor,
}

impl Between {
    /// Text that must be the same at both ends before the handshake.
    fn prologue(self) -> String {
        format!("tidemill cluster {PROTOCOL} {self:?}")
    }
}

/// One end of an established connection. Any thread may send, and one at a time receives.
pub(super) struct Channel {
    stream: Arc<TcpStream>,
    cipher: MessageCipher,
    /// The number of the next message part; none when half a message has been sent.
    sent: Mutex<Option<u64>>,
    received: Mutex<u64>,
}

impl Channel {
    /// The handshake of the end that has connected.
    pub(super) fn call(
        stream: Arc<TcpStream>,
        secret: &Secret,
        between: Between,
        deadline: Instant,
    ) -> io::Result<Self> {
        let mut handshake = Handshake::of_caller(secret.text(), &between.prologue())?;
        (&*stream).write_all(&handshake.write()?)?;
        let mut bytes = [0; HANDSHAKE_BYTES];
        let answered = UntilDeadline::new(&stream, deadline).read_exact(&mut bytes);
        answered.map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset => io::Error::new(
                io::ErrorKind::PermissionDenied,
                "it hung up without a word, as it does on a process that has another cluster \
                 secret or another version of the program",
            ),
            _ => error,
        })?;
        handshake.read(&bytes)?;
        Self::established(stream, handshake)
    }

    /// The handshake of the end that has accepted. A caller that does not know the secret gets an
    /// error, and no byte.
    pub(super) fn answer(
        stream: Arc<TcpStream>,
        secret: &Secret,
        between: Between,
        deadline: Instant,
    ) -> io::Result<Self> {
        let mut handshake = Handshake::of_answerer(secret.text(), &between.prologue())?;
        let mut bytes = [0; HANDSHAKE_BYTES];
        UntilDeadline::new(&stream, deadline).read_exact(&mut bytes)?;
        handshake.read(&bytes).map_err(|_| {
            io::Error::new(io::ErrorKind::PermissionDenied, "it does not know the cluster's secret")
        })?;
        (&*stream).write_all(&handshake.write()?)?;
        Self::established(stream, handshake)
    }

    fn established(stream: Arc<TcpStream>, handshake: Handshake) -> io::Result<Self> {
        let cipher = handshake.into_cipher()?;
        Ok(Self { stream, cipher, sent: Mutex::new(Some(0)), received: Mutex::new(0) })
    }

    /// Sends a message, with the timeout of the socket.
    pub(super) fn send(&self, message: &impl Serialize) -> io::Result<()> {
        let body = serde_json::to_vec(message)?;
        let length = u32::try_from(body.len()).ok().filter(|&n| n as usize <= MESSAGE_LIMIT_BYTES);
        let length = length.ok_or_else(|| invalid(format!("a message of {} bytes", body.len())))?;
        let mut sent = self.sent.lock().unwrap_or_else(PoisonError::into_inner);
        let mut number = sent.take().ok_or(io::ErrorKind::BrokenPipe)?;
        let mut bytes = Vec::new();
        for part in std::iter::once(&length.to_be_bytes()[..]).chain(body.chunks(PART_BYTES)) {
            let start = bytes.len();
            bytes.resize(start + part.len() + TAG_BYTES, 0);
            self.cipher.seal(number, part, &mut bytes[start..])?;
            number += 1;
        }
        // One write: messages are small, and a heartbeat should be one packet.
        (&*self.stream).write_all(&bytes)?;
        *sent = Some(number);
        Ok(())
    }

    /// The next message of the other end.
    pub(super) fn receive<T: DeserializeOwned>(&self) -> io::Result<T> {
        self.receive_from(&*self.stream)
    }

    /// As [`Channel::receive`], if it comes before `deadline`.
    pub(super) fn receive_until<T: DeserializeOwned>(&self, deadline: Instant) -> io::Result<T> {
        self.receive_from(UntilDeadline::new(&self.stream, deadline))
    }

    fn receive_from<T: DeserializeOwned>(&self, mut reader: impl Read) -> io::Result<T> {
        let mut number = self.received.lock().unwrap_or_else(PoisonError::into_inner);
        let mut open = |sealed: &mut [u8], part: &mut [u8]| {
            reader.read_exact(sealed)?;
            self.cipher.open(*number, sealed, part)?;
            *number += 1;
            io::Result::Ok(())
        };
        // The length is opened by itself: one that is forged is not waited for.
        let mut length = [0; 4];
        open(&mut [0; 4 + TAG_BYTES], &mut length)?;
        let length = u32::from_be_bytes(length) as usize;
        if length > MESSAGE_LIMIT_BYTES {
            return Err(invalid(format!("a message of {length} bytes")));
        }
        let (mut body, mut sealed) = (vec![0; length], vec![0; length.min(PART_BYTES) + TAG_BYTES]);
        for part in body.chunks_mut(PART_BYTES) {
            open(&mut sealed[..part.len() + TAG_BYTES], part)?;
        }
        // The message itself is not repeated: a peer could make us print anything.
        serde_json::from_slice(&body).map_err(|_| invalid("a message of another protocol"))
    }

    /// The socket, to set its timeouts and to close it.
    pub(super) fn stream(&self) -> &Arc<TcpStream> {
        &self.stream
    }

    /// Closes one direction or both. One that was closed before is no error.
    pub(super) fn shutdown(&self, how: Shutdown) {
        let _ = self.stream.shutdown(how);
    }
}

fn invalid(what: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.into())
}

/// Reads from a socket until an instant: a caller that trickles bytes cannot hold a thread for ever.
struct UntilDeadline<'a> {
    stream: &'a TcpStream,
    deadline: Instant,
}

impl<'a> UntilDeadline<'a> {
    fn new(stream: &'a TcpStream, deadline: Instant) -> Self {
        Self { stream, deadline }
    }
}

impl Read for UntilDeadline<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.stream.set_read_timeout(Some(left.max(Duration::from_millis(1))))?;
        self.stream.read(buffer)
    }
}

#[cfg(test)]
mod tests {
    use super::super::sealed::mutate;
    use super::*;
    use std::net::TcpListener;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(5)
    }

    /// The two ends of a handshake.
    fn ends(
        caller: (&Secret, Between),
        answerer: (&Secret, Between),
    ) -> (io::Result<Channel>, io::Result<Channel>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = Arc::new(TcpStream::connect(listener.local_addr().unwrap()).unwrap());
        std::thread::scope(|scope| {
            let called = scope.spawn(|| Channel::call(stream, caller.0, caller.1, soon()));
            let accepted = Arc::new(listener.accept().unwrap().0);
            let answered = Channel::answer(accepted, answerer.0, answerer.1, soon());
            (called.join().unwrap(), answered)
        })
    }

    fn channels() -> (Channel, Channel) {
        let secret = Secret::generate().unwrap();
        let (one, other) = ends((&secret, Between::Peers), (&secret, Between::Peers));
        (one.unwrap(), other.unwrap())
    }

    #[test]
    fn messages_of_any_length_come_back_in_order() {
        let (one, other) = channels();
        let texts = [0, 1, PART_BYTES - 2, PART_BYTES - 1, 3 * PART_BYTES].map(|n| "x".repeat(n));
        std::thread::scope(|scope| {
            scope.spawn(|| texts.iter().for_each(|text| one.send(text).unwrap()));
            for text in &texts {
                assert_eq!(other.receive_until::<String>(soon()).unwrap(), *text);
                other.send(&text.len()).unwrap();
            }
        });
        for text in &texts {
            assert_eq!(one.receive_until::<usize>(soon()).unwrap(), text.len());
        }
        let long = "x".repeat(MESSAGE_LIMIT_BYTES);
        assert_eq!(one.send(&long).unwrap_err().kind(), io::ErrorKind::InvalidData);
        one.shutdown(Shutdown::Both);
        assert!(other.receive::<String>().is_err());
    }

    #[test]
    fn ends_with_other_secrets_or_of_another_kind_are_strangers() {
        let (secret, another) = (Secret::generate().unwrap(), Secret::generate().unwrap());
        let peers = Between::Peers;
        for caller in [(&another, peers), (&secret, Between::ChildAndSupervisor)] {
            let (called, answered) = ends(caller, (&secret, peers));
            for end in [called, answered] {
                assert_eq!(end.err().unwrap().kind(), io::ErrorKind::PermissionDenied);
            }
        }
    }

    #[test]
    fn a_silent_caller_is_given_up() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let _caller = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let accepted = Arc::new(listener.accept().unwrap().0);
        let deadline = Instant::now() + Duration::from_millis(30);
        let secret = Secret::generate().unwrap();
        assert!(Channel::answer(accepted, &secret, Between::Peers, deadline).is_err());
        assert!(Instant::now() >= deadline);
    }

    #[test]
    fn a_caller_that_trickles_bytes_has_no_longer_than_one_that_is_silent() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut caller = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        caller.write_all(&[0; HANDSHAKE_BYTES / 2]).unwrap();
        let accepted = Arc::new(listener.accept().unwrap().0);
        let secret = Secret::generate().unwrap();
        let error = Channel::answer(accepted, &secret, Between::Peers, Instant::now()).err();
        assert_eq!(error.unwrap().kind(), io::ErrorKind::TimedOut);
    }

    #[test]
    fn mutated_messages_are_errors_and_nothing_that_was_not_sent_comes_out() {
        const SEED: u64 = 20_261_123;
        let (one, other) = channels();
        let sent: Vec<String> = (1..6).map(|size| "message".repeat(size)).collect();
        sent.iter().for_each(|message| one.send(message).unwrap());
        one.shutdown(Shutdown::Write);
        let mut whole = Vec::new();
        (&**other.stream()).read_to_end(&mut whole).unwrap();
        let receive_all = |mut stream: &[u8]| {
            *other.received.lock().unwrap() = 0;
            let next = || other.receive_from::<String>(&mut stream).ok();
            std::iter::from_fn(next).collect::<Vec<_>>()
        };
        assert_eq!(receive_all(&whole), sent);
        for case in 0..2000 {
            let mut stream = whole.clone();
            mutate(&mut stream, SEED + case);
            let received = receive_all(&stream);
            assert!(sent.starts_with(&received), "seed {SEED}, case {case}: {received:?}");
            assert!(received.len() < sent.len() || stream.starts_with(&whole), "case {case}");
        }
    }
}
