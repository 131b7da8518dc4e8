//! Timely's data connection, wrapped so that timely's own threads never panic, and so that a peer
//! can send them nothing that they do not expect.
//!
//! Bytes for the network are sealed ([`Sealer`], [`Opener`]); received bytes are checked
//! ([`Messages`]) before timely sees it. When a plain socket breaks, timely's communication threads
//! panic and poison their queues; the workers panic in turn, possibly while unwinding, which ends
//! the process. So this wrapper keeps a broken connection to itself: it reports it to the [`Abort`]
//! handle, swallows bytes that are still written, and holds the reading thread until the local workers
//! have ended. Then it lets the byte stream end as timely expects: the message that was cut off is
//! filled up with zeros, which no worker reads any more, and a header of zeros means the end.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use timely::communication::allocator::zero_copy::stream::Stream;

use super::abort::Abort;
use super::error::{ClusterError, Peer};
use super::received::Received;
use super::rendezvous::DataLink;
use super::sealed::{Opener, Sealer};
use super::timely_messages::{Impossible, Messages};

/// Opens once: when the workers of this process have ended.
#[derive(Default)]
pub(super) struct Latch {
    open: Mutex<bool>,
    opened: Condvar,
}

impl Latch {
    pub(super) fn open(&self) {
        *self.open.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.opened.notify_all();
    }

    fn wait(&self) {
        let open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.opened.wait_while(open, |open| !*open));
    }
}

/// A handle on a data connection. Timely clones it for its sending and its receiving thread; all
/// clones share both directions, so that no running number is used twice.
#[derive(Clone)]
pub(super) struct DataSocket {
    stream: Arc<TcpStream>,
    ends: Ends,
    outgoing: Arc<Mutex<Outgoing>>,
    incoming: Arc<Mutex<Incoming>>,
}

/// The peer, and the parts of the run to which both directions report.
#[derive(Clone)]
struct Ends {
    peer: Peer,
    abort: Abort,
    workers_ended: Arc<Latch>,
}

struct Outgoing {
    sealer: Sealer,
    broken: bool,
}

struct Incoming {
    opener: Opener,
    messages: Messages,
    received: Arc<Received>,
    /// Opened, and not handed on yet: checked up to `checked`, handed on up to `at`. What follows
    /// `checked` is the beginning of a header.
    opened: Vec<u8>,
    at: usize,
    checked: usize,
    broken: bool,
}

impl DataSocket {
    pub(super) fn new(
        link: DataLink,
        peer: Peer,
        abort: Abort,
        workers_ended: Arc<Latch>,
        messages: Messages,
        received: Arc<Received>,
    ) -> Self {
        let outgoing = Outgoing { sealer: Sealer::new(&link.keys.sending), broken: false };
        let incoming = Incoming {
            opener: Opener::new(&link.keys.receiving),
            messages,
            received,
            opened: Vec::new(),
            at: 0,
            checked: 0,
            broken: false,
        };
        Self {
            stream: link.stream,
            ends: Ends { peer, abort, workers_ended },
            outgoing: Arc::new(Mutex::new(outgoing)),
            incoming: Arc::new(Mutex::new(incoming)),
        }
    }
}

impl Ends {
    fn report(&self, source: io::Error) {
        let peer = self.peer.clone();
        if source.kind() == io::ErrorKind::InvalidData {
            // No consequence of anything else: the connection itself is not to be trusted.
            self.abort.abort(ClusterError::Protocol { peer, found: source.to_string() });
        } else {
            let source = Arc::new(source);
            self.abort.suspect(ClusterError::DataConnection { peer, source });
        }
    }
}

impl Read for DataSocket {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut incoming = lock(&self.incoming);
        incoming.received.count_here();
        if !incoming.broken {
            match incoming.read(&mut &*self.stream, buffer) {
                Ok(count) => return Ok(count),
                Err(error) => {
                    incoming.broken = true;
                    self.ends.report(error);
                }
            }
        }
        self.ends.workers_ended.wait();
        Ok(incoming.messages.fill_up(buffer))
    }
}

impl Incoming {
    fn read(&mut self, stream: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            if self.at < self.checked {
                let count = buffer.len().min(self.checked - self.at);
                buffer[..count].copy_from_slice(&self.opened[self.at..self.at + count]);
                self.at += count;
                return Ok(count);
            }
            self.opened.drain(..self.checked);
            (self.at, self.checked) = (0, 0);
            if self.messages.ended() {
                return Ok(0);
            }
            if self.received.exceeded() {
                let limit = self.received.limit_bytes();
                return Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    format!("more than {limit} bytes that wait to be consumed"),
                ));
            }
            let length = self.opener.next_frame(stream)?;
            let held = self.opened.len();
            if let Some(room) = buffer.get_mut(..held + length) {
                // Straight into timely's buffer, which holds only the returned bytes.
                room[..held].copy_from_slice(&self.opened);
                self.opener.open(&mut room[held..])?;
                let checked = self.check(room)?;
                self.opened.clear();
                self.opened.extend_from_slice(&room[checked..]);
                if checked > 0 {
                    return Ok(checked);
                }
            } else {
                self.opened.resize(held + length, 0);
                self.opener.open(&mut self.opened[held..])?;
                let opened = std::mem::take(&mut self.opened);
                self.checked = self.check(&opened)?;
                self.opened = opened;
            }
        }
    }

    fn check(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let checked = self.messages.check(bytes);
        checked.map_err(|Impossible(what)| io::Error::new(io::ErrorKind::InvalidData, what))
    }
}

impl Write for DataSocket {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut outgoing = lock(&self.outgoing);
        if outgoing.broken || bytes.is_empty() {
            return Ok(bytes.len());
        }
        let (frame, count) = outgoing.sealer.seal(bytes);
        match (&*self.stream).write_all(frame) {
            Ok(()) => Ok(count),
            Err(error) => {
                outgoing.broken = true;
                self.ends.report(error);
                Ok(bytes.len())
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Stream for DataSocket {
    fn try_clone(&self) -> io::Result<Self> {
        Ok(self.clone())
    }

    fn set_nonblocking(&self, nonblocking: bool) -> io::Result<()> {
        self.stream.set_nonblocking(nonblocking)
    }

    fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        // Timely closes after its last message. If the socket is gone by then, the peer's control
        // connection says whether that matters.
        let _ = self.stream.shutdown(how);
        Ok(())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::super::ciphers::DataKey;
    use super::super::sealed::DataKeys;
    use super::*;
    use std::net::TcpListener;

    /// A socket of process 0 with one worker, and the sender of process 1.
    fn socket(abort: &Abort, limit_bytes: usize) -> (DataSocket, TcpStream, Sealer, Arc<Latch>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let theirs = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let stream = Arc::new(listener.accept().unwrap().0);
        let [sending, receiving] = [(); 2].map(|()| DataKey::generate().unwrap());
        let sealer = Sealer::new(&receiving);
        let link = DataLink { stream, keys: DataKeys { sending, receiving } };
        let peer = Peer { process: 1, address: "peer:1".to_string() };
        let ended = Arc::<Latch>::default();
        let (messages, received) = (Messages::new(0, 1, 1), Received::new(limit_bytes));
        let latch = Arc::clone(&ended);
        let ours = DataSocket::new(link, peer, abort.clone(), latch, messages, received);
        (ours, theirs, sealer, ended)
    }

    fn message(header: [u64; 6], payload: &[u8]) -> Vec<u8> {
        let header = header.iter().flat_map(|field| field.to_be_bytes());
        header.chain(payload.iter().copied()).collect()
    }

    const END: [u64; 6] = [0; 6];

    /// All that timely would read, in pieces of all kinds.
    fn read_to_end(mut socket: DataSocket) -> Vec<u8> {
        let mut received = Vec::new();
        for room in [1, 20, 47, 48, 49, 1 << 16].into_iter().cycle() {
            let mut buffer = vec![0xee; room];
            let count = socket.read(&mut buffer).unwrap();
            if count == 0 {
                break;
            }
            received.extend_from_slice(&buffer[..count]);
        }
        received
    }

    #[test]
    fn messages_arrive_whole_through_frames_that_cut_them_anywhere() {
        let abort = Abort::new();
        let (ours, mut theirs, mut sealer, _ended) = socket(&abort, usize::MAX);
        let sent: Vec<u8> = (1..40)
            .flat_map(|size| message([3, 1, 0, 1, size, size], &vec![7; size as usize]))
            .chain(message(END, &[]))
            .collect();
        for piece in sent.chunks(29) {
            theirs.write_all(sealer.seal(piece).0).unwrap();
        }
        assert!(read_to_end(ours) == sent);
        assert!(!abort.is_aborted());
    }

    #[test]
    fn what_timely_must_not_see_ends_the_run_and_the_stream_in_order() {
        let right = message([3, 1, 0, 1, 5, 1], b"right");
        let after_right = |rest: Vec<u8>| [b"rest".to_vec(), right.clone(), rest].concat();
        let cases = [
            (Some(after_right(message([3, 1, 0, 1, u64::MAX - 47, 2], b""))), "at most"),
            (Some(after_right(message([3, 1, 7, 9, 8, 2], b""))), "for workers 7..9"),
            (Some(after_right([message(END, b""), right.clone()].concat())), "after its last"),
            (None, "changed on its way or is forged"),
        ];
        for (forged, expected) in cases {
            let abort = Abort::new();
            let (ours, mut theirs, mut sealer, ended) = socket(&abort, usize::MAX);
            // Four of its bytes are missing.
            let first = message([3, 1, 0, 1, 9, 0], b"first");
            theirs.write_all(sealer.seal(&first).0).unwrap();
            let frame = forged.map_or(vec![1; 4096], |forged| sealer.seal(&forged).0.to_vec());
            theirs.write_all(&frame).unwrap();
            abort.on_abort(move || ended.open());
            // No byte of the refused frame is passed on: the message before it is padded, and the stream ends.
            let filled_up = message([3, 1, 0, 1, 9, 0], b"first\0\0\0\0");
            assert!(read_to_end(ours) == [filled_up, message(END, b"")].concat(), "{expected}");
            let text = abort.first_error().unwrap().to_string();
            assert!(text.contains("process 1 (peer:1) sent") && text.contains(expected), "{text}");
        }
    }

    #[test]
    fn memory_of_a_peer_is_counted_where_it_is_received() {
        use super::super::received::counted_memory;
        let abort = Abort::new();
        let (ours, mut theirs, mut sealer, ended) = socket(&abort, 1000);
        let words = [message([3, 1, 0, 1, 5, 1], b"first"), message(END, &[])];
        for word in &words {
            theirs.write_all(sealer.seal(word).0).unwrap();
        }
        let mut socket = ours.clone();
        assert_eq!(socket.read(&mut [0; 100]).unwrap(), words[0].len());
        let memory = counted_memory();
        drop((memory.logic)(900));
        let held = (memory.logic)(900);
        assert!(!abort.is_aborted());
        let more = (memory.logic)(101);
        abort.on_abort(move || ended.open());
        assert!(read_to_end(ours) == words[1]);
        let text = abort.first_error().unwrap().to_string();
        assert!(text.ends_with("sent more than 1000 bytes that wait to be consumed"), "{text}");
        drop((held, more));
    }
}
