//! The hosts file: one `host:port` a line, in the order of process indices.
//!
//! Blank lines and what follows a `#` are ignored. Errors name the file and the line.

use std::io;
use std::path::Path;
use std::sync::Arc;

use tidemill_files::Kind;

use super::error::ClusterError;
use crate::printable::printable;

/// What errors quote of a line at most.
const LONGEST_QUOTE_BYTES: usize = 200;

/// Reads the addresses of a cluster's processes from a hosts file.
///
/// # Errors
/// If the file cannot be read, a line is not `host:port`, an address stands twice, or there is
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
