//! A path or URL as a user gives it.

use std::{
    fmt,
    path::{Path, PathBuf},
};

#[cfg(feature = "stores")]
use url::Url;

use crate::error::DataError;

/// Schemes whose URLs are folders of a remote store; `file` is not one of them.
#[cfg(feature = "stores")]
const REMOTE_SCHEMES: [&str; 12] =
    ["s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss", "http", "https", "memory", "file"];

#[cfg(feature = "stores")]
const SCHEMES: &str = "s3, gs, az, abfs, abfss, http, https, file or memory";

/// Expected where nothing can be done with a URL.
#[cfg(not(feature = "stores"))]
const NO_STORES: &str = "a path, or a build with the feature `remote` of tidemill-streaming-data";

/// Where a folder or file is: on this machine, or in a store.
///
/// Its text ([`Display`](fmt::Display)) names the place and holds neither password nor query.
#[derive(Clone, PartialEq, Eq)]
pub struct Location {
    place: Place,
}

#[derive(Clone, PartialEq, Eq)]
enum Place {
    Local(PathBuf),
    #[cfg(feature = "stores")]
    Remote(Url),
}

impl Location {
    /// Parses a path or a URL (`scheme://...`); `file://` is the path that it names.
    ///
    /// # Errors
    /// [`DataError::Location`] for a URL that is not one, of an unknown scheme, or with a user, a query
    /// or a fragment: credentials come from the environment or from settings. Without the feature `stores`
    /// for every URL.
    pub fn parse(text: &str) -> Result<Location, DataError> {
        match text.split_once("://").filter(|(scheme, _)| is_scheme(scheme)) {
            Some((scheme, _)) => Location::parse_url(scheme, text),
            None => Ok(Location::from(Path::new(text))),
        }
    }

    #[cfg(not(feature = "stores"))]
    fn parse_url(scheme: &str, text: &str) -> Result<Location, DataError> {
        wrong(text, format!("scheme {scheme:?}"), NO_STORES)
    }

    #[cfg(feature = "stores")]
    fn parse_url(scheme: &str, text: &str) -> Result<Location, DataError> {
        let wrong = |found, expected| wrong(text, found, expected);
        if !REMOTE_SCHEMES.contains(&scheme) {
            return wrong(format!("scheme {scheme:?}"), SCHEMES);
        }
        let url = match Url::parse(text) {
            Ok(url) => url,
            Err(error) => return wrong(error.to_string(), "a URL"),
        };
        // Of Azure's URLs it is the container.
        let is_container = url.password().is_none() && scheme.starts_with("abfs");
        if !(url.username().is_empty() && url.password().is_none() || is_container) {
            return wrong("a user or password".to_owned(), "credentials in the environment");
        }
        if url.query().is_some() || url.fragment().is_some() {
            return wrong("a query or fragment".to_owned(), "scheme://place/path alone");
        }
        if scheme == "file" {
            return match url.to_file_path() {
                Ok(path) => Ok(Location::from(path.as_path())),
                Err(()) => wrong(
                    format!("host {:?}", url.host_str().unwrap_or("")),
                    "file:/// and an absolute path",
                ),
            };
        }
        if url.host_str().is_none_or(str::is_empty) {
            return wrong("no name behind ://".to_owned(), "a bucket, container, host or name");
        }
        Ok(Location { place: Place::Remote(url) })
    }

    /// As [`Location::parse`], for a path that may be a URL.
    ///
    /// # Errors
    /// As [`Location::parse`].
    pub fn of_path(path: &Path) -> Result<Location, DataError> {
        path.to_str().map_or_else(|| Ok(Location::from(path)), Location::parse)
    }

    /// The path, where it is on this machine.
    pub fn local(&self) -> Option<&Path> {
        match &self.place {
            Place::Local(path) => Some(path),
            #[cfg(feature = "stores")]
            Place::Remote(_) => None,
        }
    }

    /// The place of a file below this one; `name` has `/` between folders.
    pub fn join(&self, name: &str) -> Location {
        let place = match &self.place {
            Place::Local(path) => Place::Local(path.join(name)),
            #[cfg(feature = "stores")]
            Place::Remote(url) => {
                let mut url = url.clone();
                if let Ok(mut segments) = url.path_segments_mut() {
                    segments.pop_if_empty().extend(name.split('/'));
                }
                Place::Remote(url)
            }
        };
        Location { place }
    }

    /// The URL, where it is in a store.
    #[cfg(feature = "stores")]
    pub(super) fn url(&self) -> Option<&Url> {
        match &self.place {
            Place::Local(_) => None,
            #[cfg(feature = "stores")]
            Place::Remote(url) => Some(url),
        }
    }
}

impl From<&Path> for Location {
    fn from(path: &Path) -> Location {
        Location { place: Place::Local(path.to_owned()) }
    }
}

impl fmt::Display for Location {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.place {
            Place::Local(path) => path.display().fmt(formatter),
            #[cfg(feature = "stores")]
            Place::Remote(url) => {
                write!(formatter, "{}://", url.scheme())?;
                // In Azure's URLs this is the container; anywhere else it is a name of a user.
                if !url.username().is_empty() && !url.scheme().starts_with("http") {
                    write!(formatter, "{}@", url.username())?;
                }
                formatter.write_str(url.host_str().unwrap_or(""))?;
                if let Some(port) = url.port() {
                    write!(formatter, ":{port}")?;
                }
                formatter.write_str(url.path().trim_end_matches('/'))
            }
        }
    }
}

impl fmt::Debug for Location {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, formatter)
    }
}

/// Names the place without parts that may hold a secret.
fn wrong(text: &str, found: String, expected: &str) -> Result<Location, DataError> {
    let text = text.split(['?', '#']).next().unwrap_or(text);
    let text = match (text.split_once("://"), text.rsplit_once('@')) {
        (Some((scheme, _)), Some((_, host))) => format!("{scheme}://{host}"),
        _ => text.to_owned(),
    };
    Err(DataError::Location { text, found, expected: expected.to_owned() })
}

/// Whether the text before `://` can be a scheme, so that the whole is meant to be a URL.
fn is_scheme(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_alphabetic())
        && text.chars().all(|c| c.is_ascii_alphanumeric() || "+-.".contains(c))
}

#[cfg(all(test, feature = "stores"))]
mod tests {
    use super::*;

    #[test]
    fn paths_and_urls_are_told_apart_and_shown_without_secrets() {
        for path in ["data/set", "/data", "", "a:/b", "no scheme://x", "C:\\data"] {
            assert_eq!(Location::parse(path).unwrap().local(), Some(Path::new(path)), "{path}");
        }
        let file = Location::parse("file:///data/a%20b").unwrap();
        assert_eq!(file.local(), Some(Path::new("/data/a b")));
        for (url, shown) in [
            ("s3://bucket/a/b/", "s3://bucket/a/b"),
            ("s3://my_bucket", "s3://my_bucket"),
            ("gs://b/c", "gs://b/c"),
            ("abfss://container@account.dfs.core.windows.net/c", ""),
            ("https://host:81/c", "https://host:81/c"),
            ("memory://name/c", "memory://name/c"),
        ] {
            let location = Location::parse(url).unwrap();
            assert_eq!(location.local(), None);
            let shown = if shown.is_empty() { url } else { shown };
            assert_eq!(location.to_string(), shown);
            assert_eq!(location.join("x/y.parquet").to_string(), format!("{shown}/x/y.parquet"));
        }
        assert_eq!(file.join("x/y").local(), Some(Path::new("/data/a b/x/y")));
    }

    #[test]
    fn wrong_urls_are_one_line_without_secrets() {
        for (url, words) in [
            ("ftp://host/a", "found scheme \"ftp\", expected s3, gs"),
            ("https://host/a?sig=secret", "https://host/a: found a query"),
            ("https://user:secret@host/a", "https://host/a: found a user or password"),
            ("s3://user@bucket/a", "s3://bucket/a: found a user or password"),
            ("abfss://container:secret@account/a", "abfss://account/a: found a user or password"),
            ("s3:///a", "found no name behind ://"),
            ("file://data/set", "found host \"data\""),
            ("http://user:secret@[host/a", "http://[host/a: found invalid IPv6"),
        ] {
            let message = Location::parse(url).unwrap_err().to_string();
            assert!(message.contains(words) && !message.contains("secret"), "{url}: {message}");
        }
    }
}
