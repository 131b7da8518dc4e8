//! From where the addresses of a cluster can be reached: this machine alone, or the network.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs};
use std::sync::Arc;

use super::error::ClusterError;

/// Whether an address leads nowhere but to this machine. A name that is not known yet may lead anywhere.
pub(super) fn is_loopback(address: &str) -> bool {
    address.to_socket_addrs().is_ok_and(|found| all_loopback(&found.collect::<Vec<_>>()))
}

fn all_loopback(found: &[SocketAddr]) -> bool {
    !found.is_empty() && found.iter().all(|candidate| loopback(candidate.ip()))
}

fn loopback(ip: IpAddr) -> bool {
    ip.to_canonical().is_loopback()
}

/// Listens at the address of process `process`, so that all others can reach it.
pub(super) fn listen(addresses: &[String], process: usize) -> Result<TcpListener, ClusterError> {
    let own = &addresses[process];
    let failed = |source| ClusterError::Bind { address: own.clone(), source: Arc::new(source) };
    let found: Vec<SocketAddr> = own.to_socket_addrs().map_err(failed)?.collect();
    let remote = || addresses.iter().find(|&other| other != own && !is_loopback(other));
    let places = listening_places(own, &found, remote)?;
    TcpListener::bind(&places[..]).map_err(failed)
}

/// The address to listen at, of those that the own address was `found` to mean. Debian and its kin have the
/// machine's own name mean 127.0.1.1, which no other machine can reach.
fn listening_places<'a>(
    own: &str,
    found: &[SocketAddr],
    remote: impl FnOnce() -> Option<&'a String>,
) -> Result<Vec<SocketAddr>, ClusterError> {
    let open: Vec<_> = found.iter().copied().filter(|place| !loopback(place.ip())).collect();
    let Some(first) = found.first() else { return Ok(Vec::new()) };
    if !all_loopback(found) {
        return Ok(open);
    }
    let Some(other) = remote() else { return Ok(found.to_vec()) };
    let host = own.rsplit_once(':').map_or(own, |(host, _port)| host);
    let host = host.trim_start_matches('[').trim_end_matches(']');
    if host.parse::<IpAddr>().is_ok() || host == "localhost" || host.ends_with(".localhost") {
        let (address, other) = (own.to_string(), other.clone());
        return Err(ClusterError::LoopbackAmongMachines { address, other });
    }
    let everywhere = [IpAddr::V6(Ipv6Addr::UNSPECIFIED), IpAddr::V4(Ipv4Addr::UNSPECIFIED)];
    Ok(everywhere.map(|ip| SocketAddr::new(ip, first.port())).to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(own: &str, found: &[&str], remote: Option<&str>) -> Result<Vec<String>, String> {
        let found: Vec<SocketAddr> = found.iter().map(|place| place.parse().unwrap()).collect();
        let remote = remote.map(str::to_string);
        listening_places(own, &found, || remote.as_ref())
            .map(|places| places.iter().map(SocketAddr::to_string).collect())
            .map_err(|error| error.to_string())
    }

    #[test]
    fn a_name_that_means_loopback_here_is_listened_for_everywhere() {
        let everywhere = ["[::]:7", "0.0.0.0:7"].map(str::to_string).to_vec();
        assert_eq!(places("node-a:7", &["127.0.1.1:7"], Some("node-b:7")).unwrap(), everywhere);
        let both = ["127.0.1.1:7", "10.0.0.1:7"];
        assert_eq!(places("node-a:7", &both, Some("node-b:7")).unwrap(), ["10.0.0.1:7"]);
        // All processes are on this machine: no other needs to reach it.
        assert_eq!(places("node-a:7", &["127.0.1.1:7"], None).unwrap(), ["127.0.1.1:7"]);
    }

    #[test]
    fn an_address_that_is_loopback_everywhere_is_refused_among_machines() {
        for own in ["127.0.0.1:7", "localhost:7", "[::1]:7"] {
            let text = places(own, &["127.0.0.1:7"], Some("node-b:7")).unwrap_err();
            assert!(text.contains(own) && text.contains("node-b:7"), "{text}");
        }
    }

    #[test]
    fn loopback_is_known_in_all_its_spellings() {
        for address in
            ["127.0.0.1:1", "127.8.9.1:1", "[::1]:1", "localhost:1", "[::ffff:127.0.0.1]:1"]
        {
            assert!(is_loopback(address), "{address}");
        }
        for address in ["10.0.0.1:1", "0.0.0.0:1"] {
            assert!(!is_loopback(address), "{address}");
        }
    }
}
