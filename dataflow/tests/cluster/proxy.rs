//! What stands between two processes of a test: it records, and flips bits.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

/// One bit of one direction of one of the connections, in the order in which they are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flip {
    pub connection: usize,
    /// Towards the process that has connected.
    pub towards_caller: bool,
    pub byte: usize,
    pub bit: u8,
}

/// The bytes that have passed.
#[derive(Default)]
pub struct Passed {
    /// Bytes of each connection: from its caller, and towards it.
    pub connections: Vec<[Vec<u8>; 2]>,
    pub flipped: bool,
}

pub struct Proxy {
    pub address: String,
    pub passed: Arc<Mutex<Passed>>,
}

impl Proxy {
    /// Hands every connection on to `target`, but for the bit of `flip`.
    pub fn before(target: &str, flip: Option<Flip>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let passed = Arc::<Mutex<Passed>>::default();
        let (target, seen) = (target.to_string(), Arc::clone(&passed));
        std::thread::spawn(move || {
            for caller in listener.incoming() {
                let Ok(caller) = caller else { return };
                let connection = {
                    let mut passed = seen.lock().unwrap();
                    passed.connections.push(Default::default());
                    passed.connections.len() - 1
                };
                let Ok(callee) = TcpStream::connect(&target) else { continue };
                for towards_caller in [false, true] {
                    let (caller, callee) =
                        (caller.try_clone().unwrap(), callee.try_clone().unwrap());
                    let ends = if towards_caller { (callee, caller) } else { (caller, callee) };
                    let flip = flip.filter(|flip| {
                        flip.connection == connection && flip.towards_caller == towards_caller
                    });
                    let seen = Arc::clone(&seen);
                    std::thread::spawn(move || {
                        pump(ends, &seen, (connection, usize::from(towards_caller)), flip)
                    });
                }
            }
        });
        Self { address, passed }
    }
}

fn pump(
    (mut from, mut to): (TcpStream, TcpStream),
    seen: &Mutex<Passed>,
    (connection, direction): (usize, usize),
    flip: Option<Flip>,
) {
    let mut bytes = vec![0; 1 << 16];
    while let Ok(count @ 1..) = from.read(&mut bytes) {
        let bytes = &mut bytes[..count];
        {
            let mut passed = seen.lock().unwrap();
            let start = passed.connections[connection][direction].len();
            let at = flip.and_then(|flip| Some((flip.byte.checked_sub(start)?, flip.bit)));
            if let Some((at, bit)) = at.filter(|(at, _)| *at < count) {
                bytes[at] ^= 1 << bit;
                passed.flipped = true;
            }
            passed.connections[connection][direction].extend_from_slice(bytes);
        }
        if to.write_all(bytes).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Write);
    let _ = from.shutdown(Shutdown::Read);
}
