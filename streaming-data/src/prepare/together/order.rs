//! What process 0 tells the others for each pass: what to do, and with which inputs.

use super::{
    deal::dealt_to,
    packet::{Packet, Unpacked},
    peers::{MOMENT, Peers, send},
    setup::{Setup, path_of_bytes, path_to_bytes},
};
use crate::prepare::{
    PrepareError,
    admit::Pass,
    find::Input,
    format::{Compression, Format},
    upkeep::Wanted,
};

const SETUP: u8 = 1;
const PASS: u8 = 2;
const DISMISS: u8 = 3;

/// What a process is told.
#[derive(Debug)]
pub(super) enum Order {
    Setup(Box<Setup>),
    Pass(PassOrder),
    /// All is done.
    Dismiss,
}

/// What to do with which inputs.
#[derive(Debug)]
pub(super) struct PassOrder {
    pub what: What,
    /// The number of each input among all of the pass, in order.
    pub numbers: Vec<usize>,
    pub inputs: Vec<Input>,
}

/// What is done with documents.
#[derive(Debug)]
pub(super) enum What {
    /// They are signed and compared. `owners` are the processes of all inputs of the pass.
    Sign { owners: Vec<usize> },
    /// Those are tokenized that are kept by the pass that compared, if there was one.
    Tokenize { is_compared: bool },
    /// Records are made of them.
    Record,
    /// Those that are wanted are tokenized, each by itself.
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

    /// What a process is told of a pass over `inputs`, which were dealt out to `owners`.
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
        match pass {
            Pass::Sign(_) => {
                packet.number(owners.len() as u64);
                owners.iter().for_each(|&owner| packet.number(owner as u64));
            }
            Pass::Fetch(wanted) => {
                for &number in &own {
                    let documents = wanted.all_of(number);
                    packet.number(documents.len() as u64);
                    for &(place, source) in documents {
                        packet.number(place);
                        packet.wide(source);
                    }
                }
            }
            _ => {}
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

    /// # Errors
    /// [`PrepareError::Message`].
    pub(super) fn read(message: &[u8]) -> Result<Order, PrepareError> {
        let mut unpacked = Unpacked::new(message, 0);
        match unpacked.byte()? {
            SETUP => {
                let bytes = unpacked.bytes()?;
                let setup: Setup = serde_json::from_slice(bytes).map_err(|_| unpacked.wrong())?;
                // What a number of many digits is read as may be another, by its last bit.
                match serde_json::to_vec(&setup) {
                    Ok(again) if again == bytes => Ok(Order::Setup(Box::new(setup))),
                    _ => Err(unpacked.wrong()),
                }
            }
            PASS => read_pass(&mut unpacked).map(Order::Pass),
            DISMISS => Ok(Order::Dismiss),
            _ => Err(unpacked.wrong()),
        }
    }
}

fn read_pass(unpacked: &mut Unpacked<'_>) -> Result<PassOrder, PrepareError> {
    let (kind, own) = (unpacked.byte()?, unpacked.count()?);
    let (mut numbers, mut inputs) = (Vec::new(), Vec::new());
    for _ in 0..own {
        numbers.push(unpacked.count()?);
        let (bytes, code) = (unpacked.number()?, unpacked.byte()?);
        let format = FORMATS.get(usize::from(code)).ok_or_else(|| unpacked.wrong())?;
        let path = path_of_bytes(unpacked.bytes()?);
        inputs.push(Input { path, bytes, format: *format, changed: None });
    }
    let what = match kind {
        SIGN => {
            let inputs = unpacked.count()?;
            let mut owners = Vec::new();
            for _ in 0..inputs {
                owners.push(unpacked.count()?);
            }
            What::Sign { owners }
        }
        TOKENIZE => What::Tokenize { is_compared: false },
        TOKENIZE_KEPT => What::Tokenize { is_compared: true },
        RECORD => What::Record,
        JUDGE => What::Judge,
        FETCH => {
            let mut wanted = Wanted::default();
            for _ in 0..own {
                let mut documents = Vec::new();
                for _ in 0..unpacked.count()? {
                    documents.push((unpacked.number()?, unpacked.wide()?));
                }
                wanted.push(documents);
            }
            What::Fetch(wanted)
        }
        _ => return Err(unpacked.wrong()),
    };
    Ok(PassOrder { what, numbers, inputs })
}

/// Each at the place of its code.
const FORMATS: [Format; 7] = [
    Format::Text,
    Format::JsonLines(Compression::None),
    Format::JsonLines(Compression::Gzip),
    Format::JsonLines(Compression::Zstd),
    Format::JsonLines(Compression::Brotli),
    Format::Parquet,
    Format::Mds,
];

fn format_code(format: Format) -> u8 {
    let code = FORMATS.iter().position(|known| *known == format);
    code.expect("every format has a code") as u8
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
/// [`PrepareError::Parted`], or that of `go_on`.
pub(super) fn give_orders(
    peers: &dyn Peers,
    pass: Pass<'_>,
    inputs: &[Input],
    owners: &[usize],
    go_on: &mut dyn FnMut() -> Result<(), PrepareError>,
) -> Result<(), PrepareError> {
    for to in 1..peers.processes() {
        send(peers, to, Order::pass(pass, inputs, owners, to), go_on)?;
    }
    Ok(())
}

/// Tells all others the same.
///
/// # Errors
/// As [`give_orders`].
pub(super) fn give_order(
    peers: &dyn Peers,
    order: &[u8],
    go_on: &mut dyn FnMut() -> Result<(), PrepareError>,
) -> Result<(), PrepareError> {
    (1..peers.processes()).try_for_each(|to| send(peers, to, order.to_vec(), go_on))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_is_read_as_it_was_given() {
        let input = |(number, format): (usize, &Format)| Input {
            path: format!("in/{number}").into(),
            bytes: number as u64 * 7,
            format: *format,
            changed: None,
        };
        let inputs: Vec<Input> = FORMATS.iter().enumerate().map(input).collect();
        let owners = [0, 1, 2, 1, 0, 1, 2];
        let mut wanted = Wanted::default();
        for number in 0..7_u64 {
            wanted.push((0..number).map(|place| (place * 3, u128::from(number) << 90)).collect());
        }
        let message = Order::pass(Pass::Fetch(&wanted), &inputs, &owners, 1);
        let Order::Pass(order) = Order::read(&message).unwrap() else { panic!() };
        assert_eq!(order.numbers, [1, 3, 5]);
        let expected: Vec<Input> = [1, 3, 5].map(|number: usize| inputs[number].clone()).into();
        assert_eq!(order.inputs, expected);
        let What::Fetch(of_process) = order.what else { panic!() };
        assert_eq!(of_process.documents(), 9);
        assert_eq!(of_process.of(2, 12), Some(5 << 90));
        for length in 0..message.len() {
            Order::read(&message[..length]).unwrap_err();
        }
        Order::read(&[99]).unwrap_err();
    }
}
