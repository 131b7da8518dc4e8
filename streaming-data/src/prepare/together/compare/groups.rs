//! Groups of duplicates: each process knows the groups of documents in its own buckets, and process 0 links them.

use super::{Comparing, GROUPS, GROUPS_END, MESSAGE_BYTES, ORDINAL_BITS};
use crate::prepare::{
    PrepareError,
    data_report::groups::Groups,
    together::{
        packet::{Packet, Unpacked},
        peers::{GoOn, Peers, receive, send},
    },
};

/// Sends process 0 the links of groups, where they are reported.
///
/// # Errors
/// [`PrepareError::Parted`], and the error of `go_on`.
pub(in crate::prepare::together) fn send_groups(
    peers: &dyn Peers,
    groups: Option<Groups>,
    go_on: &mut GoOn<'_>,
) -> Result<(), PrepareError> {
    let Some(groups) = groups else { return Ok(()) };
    let mut page = Packet::default();
    for (document, first) in groups.into_links() {
        if page.len() == 0 {
            page.byte(GROUPS);
        }
        page.number(document);
        page.number(first);
        if page.len() >= MESSAGE_BYTES {
            send(peers, 0, page.take(), go_on)?;
        }
    }
    if page.len() > 0 {
        send(peers, 0, page.take(), go_on)?;
    }
    send(peers, 0, vec![GROUPS_END], go_on)
}

/// Takes the links of a process.
///
/// # Errors
/// [`PrepareError::Message`] for unknown documents, [`PrepareError::Parted`], and the error of `go_on`.
pub(super) fn receive_groups(
    comparing: Comparing<'_>,
    process: usize,
    groups: &mut Groups,
    go_on: &mut GoOn<'_>,
) -> Result<(), PrepareError> {
    loop {
        let (_, message) = receive(comparing.peers, &[process], go_on)?;
        go_on()?;
        let mut unpacked = Unpacked::new(&message, process);
        match unpacked.byte()? {
            GROUPS => {}
            GROUPS_END if unpacked.is_empty() => return Ok(()),
            _ => return Err(unpacked.wrong()),
        }
        while !unpacked.is_empty() {
            let (document, first) = (unpacked.number()?, unpacked.number()?);
            let is_there = (document >> ORDINAL_BITS) < comparing.owners.len() as u64;
            if first >= document || !is_there {
                return Err(unpacked.wrong());
            }
            groups.link(document, first);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::VecDeque, sync::Mutex, time::Duration};

    use super::*;
    use crate::prepare::{Dedup, DedupSettings, Parted, Reporting, together::forward::Share};

    /// Peers that put sent messages into one queue, and receive from it.
    #[derive(Default)]
    struct Mail(Mutex<VecDeque<Vec<u8>>>);

    impl Peers for Mail {
        fn process(&self) -> usize {
            0
        }

        fn processes(&self) -> usize {
            2
        }

        fn send(&self, _: usize, message: Vec<u8>, _: Duration) -> Result<Option<Vec<u8>>, Parted> {
            self.0.lock().unwrap().push_back(message);
            Ok(None)
        }

        fn receive(&self, _: &[usize], _: Duration) -> Result<Option<(usize, Vec<u8>)>, Parted> {
            self.0.lock().unwrap().pop_front().map(|message| Some((1, message))).ok_or(Parted)
        }
    }

    fn received(mail: &Mail) -> Result<Groups, PrepareError> {
        let comparing = Comparing {
            peers: mail,
            settings: DedupSettings { dedup: Dedup::Exact, memory_bytes: 0 },
            reporting: Reporting::Files,
            owners: &[0, 1, 0],
            share: Share { numbers: &[0, 2] },
        };
        let mut groups = Groups::default();
        receive_groups(comparing, 1, &mut groups, &mut || Ok(()))?;
        Ok(groups)
    }

    #[test]
    fn links_are_received_as_they_were_sent() {
        let link = |at: u64| ((2 << ORDINAL_BITS) + at, at / 3);
        let of = |count| {
            let mut groups = Groups::default();
            (0..count).map(link).for_each(|(document, first)| groups.link(document, first));
            groups
        };
        for count in [0, 1, 20_000] {
            let mail = Mail::default();
            send_groups(&mail, Some(of(count)), &mut || Ok(())).unwrap();
            assert_eq!(mail.0.lock().unwrap().len() as u64, 1 + (16 * count).div_ceil(1 << 16));
            assert_eq!(received(&mail).unwrap().report(1 << 20), of(count).report(1 << 20));
        }
        let mail = Mail::default();
        send_groups(&mail, None, &mut || Ok(())).unwrap();
        assert!(mail.0.into_inner().unwrap().is_empty(), "nothing where nothing is reported");
    }

    #[test]
    fn links_of_documents_that_are_not_there_are_refused() {
        for (document, first) in [(3 << ORDINAL_BITS, 0), (u64::MAX, 1), (7, 7), (7, 8)] {
            let mut packet = Packet::of(GROUPS);
            packet.number(document);
            packet.number(first);
            let mail = Mail(Mutex::new([packet.take(), vec![GROUPS_END]].into()));
            let error = received(&mail).unwrap_err();
            assert!(matches!(error, PrepareError::Message { process: 1 }), "{document}: {error}");
        }
        for message in [vec![GROUPS, 1], vec![GROUPS_END, 0], vec![], vec![99]] {
            let error = received(&Mail(Mutex::new([message].into()))).unwrap_err();
            assert!(matches!(error, PrepareError::Message { process: 1 }), "{error}");
        }
    }
}
