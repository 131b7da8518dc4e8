//! Timely's data connection, wrapped so that timely's own threads never panic.
//!
//! When a plain socket breaks, timely's communication threads panic and poison their queues; the
//! workers panic in turn, possibly while unwinding, which ends the process. So this wrapper keeps
//! a broken connection to itself: it reports a suspicion to the [`Abort`] handle, swallows what is
//! still written, and holds the reading thread until the local workers have ended. Then it lets
//! the byte stream end as timely expects: the message that was cut off is filled up with zeros,
//! which nobody reads any more, and a header of zeros means the end.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use timely::communication::allocator::zero_copy::stream::Stream;

use super::abort::Abort;
use super::error::{ClusterError, Peer};

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

pub(super) struct DataSocket {
    stream: TcpStream,
    peer: Peer,
    abort: Abort,
    workers_ended: Arc<Latch>,
    broken: bool,
    framing: Framing,
}

impl DataSocket {
    pub(super) fn new(
        stream: TcpStream,
        peer: Peer,
        abort: Abort,
        workers_ended: Arc<Latch>,
    ) -> Self {
        Self { stream, peer, abort, workers_ended, broken: false, framing: Framing::default() }
    }

    fn report(&mut self, source: io::Error) {
        self.broken = true;
        let (peer, source) = (self.peer.clone(), Arc::new(source));
        self.abort.suspect(ClusterError::DataConnection { peer, source });
    }
}

impl Read for DataSocket {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.framing.ended() {
            return Ok(0);
        }
        while !self.broken {
            match self.stream.read(buffer) {
                Ok(0) => self.report(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => {
                    self.framing.advance(&buffer[..count]);
                    return Ok(count);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => self.report(error),
            }
        }
        self.workers_ended.wait();
        let count = self.framing.bytes_to_boundary().min(buffer.len());
        buffer[..count].fill(0);
        self.framing.advance(&buffer[..count]);
        Ok(count)
    }
}

impl Write for DataSocket {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.broken {
            return Ok(bytes.len());
        }
        match self.stream.write(bytes) {
            Ok(count) if count > 0 || bytes.is_empty() => Ok(count),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Err(error),
            Ok(_) => {
                self.report(io::ErrorKind::WriteZero.into());
                Ok(bytes.len())
            }
            Err(error) => {
                self.report(error);
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
        let (peer, abort) = (self.peer.clone(), self.abort.clone());
        let workers_ended = Arc::clone(&self.workers_ended);
        Ok(Self::new(self.stream.try_clone()?, peer, abort, workers_ended))
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

const HEADER_BYTES: usize = 48;
const LENGTH_AT: usize = 32;

/// Follows timely's messages through a byte stream: six big-endian u64, of which the fifth is the
/// length of the payload that follows; a length of zero ends the stream
/// (`timely_communication::networking::MessageHeader`).
#[derive(Default)]
struct Framing {
    header: Vec<u8>,
    payload_left_bytes: usize,
    ended: bool,
}

impl Framing {
    fn advance(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() && !self.ended {
            if self.payload_left_bytes > 0 {
                let count = self.payload_left_bytes.min(bytes.len());
                self.payload_left_bytes -= count;
                bytes = &bytes[count..];
                continue;
            }
            let count = (HEADER_BYTES - self.header.len()).min(bytes.len());
            self.header.extend_from_slice(&bytes[..count]);
            bytes = &bytes[count..];
            if self.header.len() == HEADER_BYTES {
                let mut length = [0; 8];
                length.copy_from_slice(&self.header[LENGTH_AT..LENGTH_AT + 8]);
                self.payload_left_bytes = usize::try_from(u64::from_be_bytes(length)).unwrap_or(0);
                self.ended = self.payload_left_bytes == 0;
                self.header.clear();
            }
        }
    }

    fn ended(&self) -> bool {
        self.ended
    }

    /// How many zeros end the payload or the header that the stream stopped in. A header whose
    /// length was cut off gets a length of zero from them (its known bytes are the high ones of a
    /// small number, unless the cut fell inside: then the payload follows).
    fn bytes_to_boundary(&self) -> usize {
        if self.payload_left_bytes > 0 {
            self.payload_left_bytes
        } else {
            HEADER_BYTES - self.header.len()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(length: u64) -> Vec<u8> {
        let fields = [3, 1, 0, 1, length, 7];
        let mut bytes: Vec<u8> =
            fields.iter().flat_map(|field: &u64| field.to_be_bytes()).collect();
        bytes.resize(bytes.len() + length as usize, 0xab);
        bytes
    }

    #[test]
    fn wherever_the_stream_is_cut_zeros_end_it() {
        let whole: Vec<u8> = [message(700), message(1), message(65_000)].concat();
        for cut in (0..900).chain(whole.len() - 3..=whole.len()) {
            let mut framing = Framing::default();
            for piece in whole[..cut].chunks(13) {
                framing.advance(piece);
            }
            let mut zeros = 0;
            while !framing.ended() {
                let count = framing.bytes_to_boundary().min(4096);
                assert!(count > 0);
                framing.advance(&vec![0; count]);
                zeros += count;
                assert!(zeros < 200_000, "no end after a cut at {cut}");
            }
        }
    }

    #[test]
    fn a_clean_end_is_seen_as_one() {
        let mut framing = Framing::default();
        framing.advance(&[message(5), message(0)].concat());
        assert!(framing.ended());
    }
}
