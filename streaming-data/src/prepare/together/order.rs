//! The orders of process 0 to the others for each pass: the work, and the inputs.

use super::{
    deal::dealt_to,
    packet::{Packet, Unpacked},
    peers::{GoOn, MOMENT, Peers, receive, send},
    setup::{Setup, path_of_bytes, path_to_bytes},
};
use crate::prepare::{
    PrepareError,
    choose::admit::Pass,
    input::{
        find::Input,
        format::{Compression, Format},
    },
    upkeep::Wanted,
};

const SETUP: u8 = 1;
const PASS: u8 = 2;
const DISMISS: u8 = 3;
/// Documents that are wanted of the inputs of the pass before.
const WANTED: u8 = 4;
/// There are no more.
const WANTED_END: u8 = 5;

/// A message with documents that are wanted is sent at this number of bytes, and takes this number of documents of an input at once.
const WANTED_BYTES: usize = 64 << 10;
const WANTED_AT_ONCE: usize = 1 << 12;

/// An order to a process.
#[derive(Debug)]
pub(super) enum Order {
    Setup(Box<Setup>),
    Pass(PassOrder),
    /// All is done.
    Dismiss,
}

/// The work of a pass, and its inputs.
#[derive(Debug)]
pub(super) struct PassOrder {
    pub what: What,
    /// The number of each input among all of the pass, in order.
    pub numbers: Vec<usize>,
    pub inputs: Vec<Input>,
}

/// The work on documents.
#[derive(Debug)]
pub(super) enum What {
    /// They are signed and compared. `owners` are the processes of all inputs of the pass.
    Sign { owners: Vec<usize> },
    /// Documents are tokenized; after a pass that compared, only the kept ones.
    Tokenize { is_compared: bool },
    /// Records are made of them.
    Record,
    /// Wanted documents are tokenized, each by itself; messages after the order list them.
    Fetch(Wanted),
    /// Nothing: documents whose records process 0 has are compared.
    Judge,
}

const SIGN: u8 = 1;
const TOKENIZE: u8 = 2;
const TOKENIZE_KEPT: u8 = 3;
const RECORD: u8 = 4;
const FETCH: u8 = 5;
const JUDGE: u8 = 6;

impl Order {
    pub(super) fn setup(setup: &Setup) -> Vec<u8> {
        let mut packet = Packet::of(SETUP);
        packet.bytes(&serde_json::to_vec(setup).expect("a setup has only JSON values"));
        packet.take()
    }

    /// The order for a pass over `inputs`, which were dealt out to `owners`.
    pub(super) fn pass(
        pass: Pass<'_>,
        inputs: &[Input],
        owners: &[usize],
        process: usize,
    ) -> Vec<u8> {
        let mut packet = Packet::of(PASS);
        let own = dealt_to(owners, process);
        packet.byte(match pass {
            Pass::Sign(_) => SIGN,
            Pass::Tokenize(None) => TOKENIZE,
            Pass::Tokenize(Some(_)) => TOKENIZE_KEPT,
            Pass::Record(..) => RECORD,
            Pass::Fetch(_) => FETCH,
            Pass::Visit(_) => unreachable!("texts are shown by one process"),
        });
        packet.number(own.len() as u64);
        for &number in &own {
            let Input { path, bytes, format, .. } = &inputs[number];
            packet.number(number as u64);
            packet.number(*bytes);
            packet.byte(format_code(*format));
            packet.bytes(path_to_bytes(path));
        }
        if let Pass::Sign(_) = pass {
            packet.number(owners.len() as u64);
            owners.iter().for_each(|&owner| packet.number(owner as u64));
        }
        packet.take()
    }

    /// The same of a pass without inputs, in which documents are compared whose records process 0 has.
    pub(super) fn judge() -> Vec<u8> {
        let mut packet = Packet::of(PASS);
        packet.byte(JUDGE);
        packet.number(0);
        packet.take()
    }

    /// Reads the order to one of `processes` processes.
    ///
    /// # Errors
    /// [`PrepareError::Message`].
    pub(super) fn read(message: &[u8], processes: usize) -> Result<Order, PrepareError> {
        let mut unpacked = Unpacked::new(message, 0);
        match unpacked.byte()? {
            SETUP => {
                let bytes = unpacked.bytes()?;
                let setup = serde_json::from_slice(bytes).map_err(|_| unpacked.wrong())?;
                Ok(Order::Setup(Box::new(setup)))
            }
            PASS => read_pass(&mut unpacked, processes).map(Order::Pass),
            DISMISS => Ok(Order::Dismiss),
            _ => Err(unpacked.wrong()),
        }
    }
}

fn read_pass(unpacked: &mut Unpacked<'_>, processes: usize) -> Result<PassOrder, PrepareError> {
    let (kind, own) = (unpacked.byte()?, unpacked.count()?);
    let (mut numbers, mut inputs) = (Vec::new(), Vec::new());
    for _ in 0..own {
        numbers.push(unpacked.count()?);
        let (bytes, code) = (unpacked.number()?, unpacked.byte()?);
        let format = format_of_code(code).ok_or_else(|| unpacked.wrong())?;
        let path = path_of_bytes(unpacked.bytes()?);
        inputs.push(Input { path, bytes, format, changed: None });
    }
    let what = match kind {
        SIGN => {
            let inputs = unpacked.count()?;
            let mut owners = Vec::new();
            for _ in 0..inputs {
                let owner = unpacked.count()?;
                if owner >= processes {
                    return Err(unpacked.wrong());
                }
                owners.push(owner);
            }
            What::Sign { owners }
        }
        TOKENIZE => What::Tokenize { is_compared: false },
        TOKENIZE_KEPT => What::Tokenize { is_compared: true },
        RECORD => What::Record,
        JUDGE => What::Judge,
        FETCH => What::Fetch(Wanted::default()),
        _ => return Err(unpacked.wrong()),
    };
    Ok(PassOrder { what, numbers, inputs })
}

fn format_code(format: Format) -> u8 {
    match format {
        Format::Text => 0,
        Format::JsonLines(Compression::None) => 1,
        Format::JsonLines(Compression::Gzip) => 2,
        Format::JsonLines(Compression::Zstd) => 3,
        #[cfg(feature = "mds")]
        Format::JsonLines(Compression::Brotli) => 4,
        Format::Parquet => 5,
        Format::Mds => 6,
    }
}

fn format_of_code(code: u8) -> Option<Format> {
    Some(match code {
        0 => Format::Text,
        1 => Format::JsonLines(Compression::None),
        2 => Format::JsonLines(Compression::Gzip),
        3 => Format::JsonLines(Compression::Zstd),
        #[cfg(feature = "mds")]
        4 => Format::JsonLines(Compression::Brotli),
        5 => Format::Parquet,
        6 => Format::Mds,
        _ => return None,
    })
}

/// Tells all others that all is done. One that is gone needs not be told.
pub(super) fn dismiss(peers: &dyn Peers) {
    for to in 1..peers.processes() {
        let mut patience = 0..50;
        let mut message = Some(vec![DISMISS]);
        while let Some(left) = message.take().filter(|_| patience.next().is_some()) {
            match peers.send(to, left, MOMENT) {
                Ok(back) => message = back,
                Err(_) => return,
            }
        }
    }
}

/// Tells all others what to do in a pass.
///
/// # Errors
/// [`PrepareError::Parted`], or the error of `go_on`.
pub(super) fn give_orders(
    peers: &dyn Peers,
    pass: Pass<'_>,
    inputs: &[Input],
    owners: &[usize],
    go_on: &mut GoOn<'_>,
) -> Result<(), PrepareError> {
    for to in 1..peers.processes() {
        send(peers, to, Order::pass(pass, inputs, owners, to), go_on)?;
        if let Pass::Fetch(wanted) = pass {
            send_wanted(peers, to, &wanted.of_inputs(&dealt_to(owners, to)), go_on)?;
        }
    }
    Ok(())
}

/// Sends a process the wanted documents of its inputs: at most as many messages as there is room for wait for it.
fn send_wanted(
    peers: &dyn Peers,
    to: usize,
    wanted: &Wanted,
    go_on: &mut GoOn<'_>,
) -> Result<(), PrepareError> {
    let mut page = Packet::of(WANTED);
    for input in 0..wanted.inputs() {
        for documents in wanted.all_of(input).chunks(WANTED_AT_ONCE) {
            page.number(input as u64);
            page.number(documents.len() as u64);
            for &(place, source) in documents {
                page.number(place);
                page.wide(source);
            }
            if page.len() >= WANTED_BYTES {
                go_on()?;
                send(peers, to, page.take(), go_on)?;
                page = Packet::of(WANTED);
            }
        }
    }
    send(peers, to, page.take(), go_on)?;
    send(peers, to, vec![WANTED_END], go_on)
}

impl PassOrder {
    /// Receives the wanted documents, which follow an order in messages of their own.
    ///
    /// # Errors
    /// [`PrepareError::Message`], [`PrepareError::Parted`], or the error of `go_on`.
    pub(super) fn complete(
        &mut self,
        peers: &dyn Peers,
        go_on: &mut GoOn<'_>,
    ) -> Result<(), PrepareError> {
        let What::Fetch(wanted) = &mut self.what else { return Ok(()) };
        let mut by_input = vec![Vec::new(); self.inputs.len()];
        loop {
            let (process, message) = receive(peers, &[0], go_on)?;
            let mut unpacked = Unpacked::new(&message, process);
            match unpacked.byte()? {
                WANTED => {
                    while !unpacked.is_empty() {
                        let (input, count) = (unpacked.count()?, unpacked.count()?);
                        let documents = by_input.get_mut(input).ok_or_else(|| unpacked.wrong())?;
                        for _ in 0..count {
                            documents.push((unpacked.number()?, unpacked.wide()?));
                        }
                    }
                }
                WANTED_END => break,
                _ => return Err(unpacked.wrong()),
            }
        }
        by_input.into_iter().for_each(|documents| wanted.push(documents));
        Ok(())
    }
}

/// Tells all others the same.
///
/// # Errors
/// As [`give_orders`].
pub(super) fn give_order(
    peers: &dyn Peers,
    order: &[u8],
    go_on: &mut GoOn<'_>,
) -> Result<(), PrepareError> {
    (1..peers.processes()).try_for_each(|to| send(peers, to, order.to_vec(), go_on))
}

#[cfg(test)]
mod tests {
    use std::{collections::VecDeque, sync::Mutex, time::Duration};

    use super::*;
    use crate::prepare::{Dedup, Parted};

    /// Process 1 of two: what process 0 sends it, it receives.
    #[derive(Default)]
    struct Pipe(Mutex<VecDeque<Vec<u8>>>);

    impl Peers for Pipe {
        fn process(&self) -> usize {
            1
        }

        fn processes(&self) -> usize {
            2
        }

        fn send(
            &self,
            to: usize,
            message: Vec<u8>,
            _: Duration,
        ) -> Result<Option<Vec<u8>>, Parted> {
            assert_eq!(to, 1);
            self.0.lock().unwrap().push_back(message);
            Ok(None)
        }

        fn receive(&self, _: &[usize], _: Duration) -> Result<Option<(usize, Vec<u8>)>, Parted> {
            let message = self.0.lock().unwrap().pop_front();
            Ok(Some((0, message.ok_or(Parted)?)))
        }
    }

    fn inputs() -> Vec<Input> {
        let input = |code: u8| Input {
            path: format!("in/{code}").into(),
            bytes: u64::from(code) * 7,
            format: format_of_code(code).unwrap(),
            changed: None,
        };
        (0..7).map(input).collect()
    }

    #[test]
    fn an_order_is_read_as_it_was_given() {
        assert!(format_of_code(7).is_none());
        let (inputs, owners) = (inputs(), [0, 1, 2, 1, 0, 1, 2]);
        let message = Order::pass(Pass::Sign(Dedup::Near), &inputs, &owners, 1);
        let Order::Pass(order) = Order::read(&message, 3).unwrap() else { panic!() };
        assert_eq!(order.numbers, [1, 3, 5]);
        let expected: Vec<Input> = [1, 3, 5].map(|number: usize| inputs[number].clone()).into();
        assert_eq!(order.inputs, expected);
        let What::Sign { owners: found } = order.what else { panic!() };
        assert_eq!(found, owners);
        for length in 0..message.len() {
            Order::read(&message[..length], 3).unwrap_err();
        }
        Order::read(&[99], 3).unwrap_err();
        let error = Order::read(&message, 2).unwrap_err();
        assert!(matches!(error, PrepareError::Message { process: 0 }), "there is no process 2");
    }

    #[test]
    fn what_is_wanted_comes_in_messages_of_bounded_size() {
        const DOCUMENTS: u64 = 100_000;
        let (pipe, inputs) = (Pipe::default(), inputs());
        let mut wanted = Wanted::default();
        for number in 0..7_u64 {
            // The third input of process 1 has no documents.
            let count = if number == 5 { 0 } else { DOCUMENTS };
            let documents = 0..count;
            wanted.push(documents.map(|at| (at * 3, u128::from(number) << 90)).collect());
        }
        let owners = [0, 1, 0, 1, 0, 1, 0];
        let pass = Pass::Fetch(&wanted);
        give_orders(&pipe, pass, &inputs, &owners, &mut || Ok(())).unwrap();
        let most = pipe.0.lock().unwrap().iter().map(Vec::len).max().unwrap();
        assert!(most <= 200 << 10, "a message of {most} bytes");

        let first = pipe.receive(&[0], MOMENT).unwrap().unwrap().1;
        let Order::Pass(mut order) = Order::read(&first, 2).unwrap() else { panic!() };
        order.complete(&pipe, &mut || Ok(())).unwrap();
        assert!(pipe.0.lock().unwrap().is_empty());
        let What::Fetch(found) = order.what else { panic!() };
        assert_eq!((found.inputs(), found.documents()), (3, 2 * DOCUMENTS));
        assert_eq!(found.all_of(0), wanted.all_of(1));
        assert_eq!(found.all_of(1), wanted.all_of(3));

        // One of an input that is not there, and one that breaks off.
        for page in [&[7_u64, 0][..], &[0, 1, 5][..]] {
            let mut packet = Packet::of(WANTED);
            page.iter().for_each(|&number| packet.number(number));
            let pipe = Pipe::default();
            pipe.0.lock().unwrap().extend([packet.take(), vec![WANTED_END]]);
            let Order::Pass(mut order) = Order::read(&first, 2).unwrap() else { panic!() };
            let error = order.complete(&pipe, &mut || Ok(())).unwrap_err();
            assert!(matches!(error, PrepareError::Message { process: 0 }), "{error}");
        }
    }
}
