//! A web server of one folder, on a free port of this machine: one request a connection.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

/// Serves the files of a folder until this process ends.
pub struct WebServer {
    address: SocketAddr,
    requests: Arc<Mutex<Vec<String>>>,
}

impl WebServer {
    pub fn start(folder: &Path) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let requests = Arc::new(Mutex::new(Vec::new()));
        let (folder, seen) = (folder.to_owned(), Arc::clone(&requests));
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (folder, seen) = (folder.clone(), Arc::clone(&seen));
                // A client may disconnect at any moment.
                std::thread::spawn(move || answer(stream?, &folder, &seen));
            }
        });
        Self { address, requests }
    }

    /// The URL of what lies in the folder under this name.
    pub fn url(&self, name: &str) -> String {
        format!("http://{}/{name}", self.address)
    }

    /// The number of requests so far whose first line contains these words.
    pub fn count(&self, words: &str) -> usize {
        self.requests.lock().unwrap().iter().filter(|line| line.contains(words)).count()
    }
}

fn answer(stream: TcpStream, folder: &Path, seen: &Mutex<Vec<String>>) -> std::io::Result<()> {
    let mut lines = BufReader::new(&stream).lines();
    let request = lines.next().transpose()?.unwrap_or_default();
    let mut range = None;
    for line in lines {
        let line = line?.to_ascii_lowercase();
        if line.is_empty() {
            break;
        }
        range = line.strip_prefix("range: bytes=").map(str::to_owned).or(range);
    }
    let name = request.split(' ').nth(1).unwrap_or_default().trim_start_matches('/').to_owned();
    seen.lock().unwrap().push(request);
    let path: PathBuf = folder.join(name);
    let Ok(bytes) = std::fs::read(&path) else {
        return write!(
            &stream,
            "HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
        );
    };
    let all = bytes.len();
    let bounds = range.and_then(|range| {
        let (first, last) = range.split_once('-')?;
        Some((first.parse::<usize>().ok()?, last.parse::<usize>().ok()?.min(all - 1)))
    });
    let (status, place, body) = match bounds {
        Some((first, last)) => (
            "206 Partial Content",
            format!("content-range: bytes {first}-{last}/{all}\r\n"),
            &bytes[first..=last],
        ),
        None => ("200 OK", String::new(), &bytes[..]),
    };
    write!(
        &stream,
        "HTTP/1.1 {status}\r\n{place}content-length: {}\r\netag: \"{all}\"\r\n\
         last-modified: Thu, 01 Jan 2026 00:00:00 GMT\r\nconnection: close\r\n\r\n",
        body.len()
    )?;
    (&stream).write_all(body)?;
    // The other side must close first: closing with unread input would cut the answer short.
    stream.shutdown(std::net::Shutdown::Write)?;
    (&stream).read_to_end(&mut Vec::new()).map(drop)
}
