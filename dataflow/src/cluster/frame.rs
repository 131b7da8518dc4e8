//! Messages on control connections and lifelines: a four-byte big-endian length, then JSON.
//!
//! These connections carry a few bytes a second, so that readable beats fast. A frame is at most
//! [`FRAME_LIMIT_BYTES`] long: bytes from a stranger never make us allocate more.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::DeserializeOwned;

/// What every connection of ours begins with, in both directions.
pub(super) const MAGIC: [u8; 8] = *b"tidemill";

const FRAME_LIMIT_BYTES: usize = 1 << 20;

pub(super) fn write_frame<W: Write>(mut writer: W, message: &impl Serialize) -> io::Result<()> {
    let body = serde_json::to_vec(message)?;
    let length = u32::try_from(body.len()).ok().filter(|n| *n as usize <= FRAME_LIMIT_BYTES);
    let length = length.ok_or_else(|| invalid(format!("a frame of {} bytes", body.len())))?;
    // One write: frames are small, and a heartbeat should be one packet.
    let mut bytes = length.to_be_bytes().to_vec();
    bytes.extend_from_slice(&body);
    writer.write_all(&bytes)
}

pub(super) fn read_frame<T: DeserializeOwned>(mut reader: impl Read) -> io::Result<T> {
    let mut length = [0; 4];
    reader.read_exact(&mut length)?;
    let length = u32::from_be_bytes(length) as usize;
    if length > FRAME_LIMIT_BYTES {
        return Err(invalid(format!("a frame of {length} bytes")));
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body)?;
    Ok(serde_json::from_slice(&body)?)
}

pub(super) fn write_magic<W: Write>(mut writer: W) -> io::Result<()> {
    writer.write_all(&MAGIC)
}

pub(super) fn read_magic(mut reader: impl Read) -> io::Result<()> {
    let mut magic = [0; MAGIC.len()];
    reader.read_exact(&mut magic)?;
    if magic == MAGIC { Ok(()) } else { Err(invalid(format!("the greeting {magic:02x?}"))) }
}

fn invalid(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

/// Reads from a socket until an instant: a peer that trickles bytes cannot hold a thread for ever.
pub(super) struct UntilDeadline<'a> {
    stream: &'a TcpStream,
    deadline: Instant,
}

impl<'a> UntilDeadline<'a> {
    pub(super) fn new(stream: &'a TcpStream, deadline: Instant) -> Self {
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
    use super::*;

    #[test]
    fn frames_come_back_and_garbage_is_an_error() {
        let mut bytes = Vec::new();
        write_frame(&mut bytes, &("beat", 3)).unwrap();
        let message: (String, u32) = read_frame(&bytes[..]).unwrap();
        assert_eq!(message, ("beat".to_string(), 3));
        assert!(read_frame::<(String, u32)>(&bytes[..bytes.len() - 1]).is_err());
        assert!(read_frame::<u32>(&bytes[..]).is_err());
        let huge = read_frame::<u32>(&[0xff; 64][..]).unwrap_err();
        assert_eq!(huge.kind(), io::ErrorKind::InvalidData);
        assert!(read_magic(&b"GET / HTTP/1.1"[..]).is_err());
        assert!(read_magic(&b"tidemill{}"[..]).is_ok());
    }

    #[test]
    fn a_silent_socket_times_out() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let deadline = Instant::now() + Duration::from_millis(30);
        assert!(read_magic(UntilDeadline::new(&stream, deadline)).is_err());
        assert!(Instant::now() >= deadline);
    }
}
