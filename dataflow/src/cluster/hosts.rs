//! The hosts file: one `host:port` a line, in the order of process indices.
//!
//! Blank lines and text behind a `#` are ignored. Errors name the file and the line.
//!
//! Addresses also say which processes share a host.

use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use tidemill_files::Kind;

use super::error::ClusterError;
use crate::printable::printable;

/// The most bytes of a line that errors quote.
const LONGEST_QUOTE_BYTES: usize = 200;

/// Reads the addresses of a cluster's processes from a hosts file.
///
/// # Errors
/// If the file cannot be read, a line is not `host:port`, an address is there twice, or there is
/// none.
pub fn read_hosts(path: &Path) -> Result<Vec<String>, ClusterError> {
    let text = tidemill_files::read(path, Kind::Hosts).and_then(|bytes| {
        let no_text = |error| io::Error::new(io::ErrorKind::InvalidData, error);
        String::from_utf8(bytes).map_err(no_text)
    });
    let text = text.map_err(|source| ClusterError::HostsUnreadable {
        path: path.to_path_buf(),
        source: Arc::new(source),
    })?;
    parse_hosts(&text, path)
}

fn parse_hosts(text: &str, path: &Path) -> Result<Vec<String>, ClusterError> {
    let mut addresses: Vec<(usize, String)> = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let content = line.split('#').next().unwrap_or_default().trim();
        if content.is_empty() {
            continue;
        }
        let wrong = |expected: String| ClusterError::HostsLine {
            path: path.to_path_buf(),
            line: index + 1,
            expected,
            found: printable(content, LONGEST_QUOTE_BYTES),
        };
        if !is_host_and_port(content) {
            return Err(wrong("host:port with a port from 1 to 65535".to_string()));
        }
        if let Some((first, _)) = addresses.iter().find(|(_, address)| address == content) {
            return Err(wrong(format!("an address other than that of line {first}")));
        }
        addresses.push((index + 1, content.to_string()));
    }
    if addresses.is_empty() {
        return Err(ClusterError::HostsEmpty { path: path.to_path_buf() });
    }
    Ok(addresses.into_iter().map(|(_, address)| address).collect())
}

/// The host that an address names, by one name where it is this machine.
pub(crate) fn host(address: &str) -> Option<&str> {
    let (host, _port) = address.rsplit_once(':')?;
    let is_this_machine = ["localhost", "127.0.0.1", "::1", "[::1]"].contains(&host);
    Some(if is_this_machine { "localhost" } else { host })
}

/// The processes whose addresses are `addresses` by host, in order; one process where there are none. Processes of one host that do
/// not follow each other count as of several.
pub(crate) fn by_host(addresses: &[String]) -> Vec<Range<usize>> {
    let mut hosts: Vec<Range<usize>> = Vec::new();
    for process in 0..addresses.len().max(1) {
        let of = |process: usize| addresses.get(process).and_then(|address| host(address));
        match hosts.last_mut() {
            Some(last) if of(last.start) == of(process) => last.end = process + 1,
            _ => hosts.push(process..process + 1),
        }
    }
    hosts
}

/// How many processes are on each host, in order, as processes that meet compare it.
pub(super) fn by_host_in_words(addresses: &[String]) -> String {
    let lengths: Vec<usize> = by_host(addresses).into_iter().map(|host| host.len()).collect();
    let in_words = |alike: &[usize]| format!("{} each on {}", alike[0], alike.len());
    lengths.chunk_by(|a, b| a == b).map(in_words).collect::<Vec<_>>().join(", ")
}

fn is_host_and_port(text: &str) -> bool {
    let Some((host, port)) = text.rsplit_once(':') else { return false };
    let bracketed = host.starts_with('[') && host.ends_with(']');
    let plausible = !host.is_empty() && !host.contains(char::is_whitespace);
    plausible && (bracketed || !host.contains(':')) && port.parse::<u16>().is_ok_and(|p| p > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Vec<String>, String> {
        parse_hosts(text, Path::new("hosts.txt")).map_err(|error| error.to_string())
    }

    #[test]
    fn addresses_comments_and_blank_lines() {
        let text = "# the cluster\n\n a.example:2101 # first\n10.0.0.2:2101\r\n[::1]:7\n";
        assert_eq!(parse(text).unwrap(), ["a.example:2101", "10.0.0.2:2101", "[::1]:7"]);
    }

    #[test]
    fn processes_that_follow_each_other_share_a_host() {
        let addresses = |of: &[&str]| of.iter().map(|of| (*of).to_owned()).collect::<Vec<_>>();
        let found = |of: &[&str]| by_host(&addresses(of));
        assert_eq!(found(&["a:1", "a:2", "b:1", "b:2", "b:3"]), [0..2, 2..5]);
        assert_eq!(found(&["a:1", "b:1", "a:2"]), [0..1, 1..2, 2..3]);
        assert_eq!(found(&["localhost:1", "127.0.0.1:2", "[::1]:3", "127.0.0.2:3"]), [0..3, 3..4]);
        assert_eq!(found(&[]).len(), 1);
        let words = by_host_in_words(&addresses(&["a:1", "a:2", "b:1", "b:2", "c:1"]));
        assert_eq!(words, "2 each on 2, 1 each on 1");
    }

    #[test]
    fn errors_name_file_and_line() {
        let expected = "hosts.txt, line 2: expected host:port with a port from 1 to 65535";
        for wrong in ["b", "b:", ":1", "b:0", "b:65536", "b c:1", "::1", "b:x"] {
            let message = parse(&format!("a:1\n{wrong}")).unwrap_err();
            assert_eq!(message, format!("{expected}, found {wrong:?}"));
        }
        let twice = parse("a:1\nb:1\n\na:1").unwrap_err();
        assert!(twice.contains("line 4") && twice.contains("line 1"), "{twice}");
        assert!(parse("# nobody\n").unwrap_err().contains("hosts.txt names no host"));
        let missing = read_hosts(Path::new("no/such/file")).unwrap_err().to_string();
        assert!(missing.contains("no/such/file"), "{missing}");
    }
}
