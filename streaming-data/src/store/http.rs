//! Requests over HTTP: where an answer may lead them, and how much of an answer is taken in.
//!
//! `object_store`'s own client follows a redirect anywhere and takes most headers along, session
//! tokens among them, and it reads whatever is not an object into memory, however long. Here
//! - a redirect never leads from https to http, and never to a URL with a user or password;
//! - to another origin (scheme, host or port) only reading is led, with no headers except those that say
//!   which bytes are wanted;
//! - of an error's text the beginning is read, and a listing has a bound.

use std::{
    hash::{BuildHasher, RandomState},
    net::SocketAddr,
    str::FromStr,
    time::Duration,
};

use async_trait::async_trait;
use bytes::{Bytes, BytesMut};
use futures_util::StreamExt;
use object_store::{
    ClientConfigKey, ClientOptions,
    client::{
        HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpRequestBody,
        HttpResponse, HttpService,
    },
};
use reqwest::{
    Method, NoProxy, Proxy, StatusCode,
    dns::{Addrs, Name, Resolve, Resolving},
    header::{
        ACCEPT, HeaderName, IF_MATCH, IF_MODIFIED_SINCE, IF_NONE_MATCH, IF_UNMODIFIED_SINCE,
        LOCATION, RANGE,
    },
    redirect,
    tls::Certificate,
};
use url::Url;

/// How often a request is led elsewhere.
const MOST_REDIRECTS: usize = 10;

/// The most bytes of an error's text that are read.
const ERROR_BYTES: usize = 64 << 10;

/// The longest listing: of a web server it holds all files of a folder, some 500 bytes each.
const LISTING_BYTES: usize = 256 << 20;

/// All that another origin learns of a request; none of these is a secret.
const HEADERS_FOR_OTHERS: [HeaderName; 6] =
    [ACCEPT, RANGE, IF_MATCH, IF_NONE_MATCH, IF_MODIFIED_SINCE, IF_UNMODIFIED_SINCE];

/// Why an answer is not taken; asking again would give the same.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub(super) enum RefusedAnswer {
    #[error("redirected from https to {to}, expected https")]
    Unencrypted { to: String },
    #[error("redirected to {to} with a user or password, expected a URL without")]
    Credentials { to: String },
    #[error("{method} was redirected to {to}, another server: expected the URL where it belongs")]
    Elsewhere { method: Method, to: String },
    #[error("redirected to {to:?}, expected a URL of http or https")]
    NoPlace { to: String },
    #[error("redirected more than {MOST_REDIRECTS} times, the last time to {to}")]
    TooOften { to: String },
    #[error("the answer to {method} has more than {most_bytes} bytes")]
    TooLarge { method: Method, most_bytes: usize },
}

impl From<RefusedAnswer> for HttpError {
    fn from(refused: RefusedAnswer) -> HttpError {
        HttpError::new(HttpErrorKind::Decode, refused)
    }
}

/// Makes the clients of stores.
#[derive(Debug)]
pub(super) struct Connector;

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        Ok(HttpClient::new(Client(client(options)?)))
    }
}

/// A client that follows no redirect itself.
#[derive(Debug)]
struct Client(reqwest::Client);

#[async_trait]
impl HttpService for Client {
    async fn call(&self, mut request: HttpRequest) -> Result<HttpResponse, HttpError> {
        for _ in 0..=MOST_REDIRECTS {
            let answer = self.0.call(request.clone()).await?;
            match redirected(&request, &answer)? {
                Some(next) => request = next,
                None => return bounded(&request, answer, LISTING_BYTES).await,
            }
        }
        let to = request.uri().host().unwrap_or_default().to_owned();
        Err(RefusedAnswer::TooOften { to }.into())
    }
}

/// The request to which an answer leads; none where it is not led elsewhere.
fn redirected(
    request: &HttpRequest,
    answer: &HttpResponse,
) -> Result<Option<HttpRequest>, RefusedAnswer> {
    let follows = [
        StatusCode::MOVED_PERMANENTLY,
        StatusCode::FOUND,
        StatusCode::SEE_OTHER,
        StatusCode::TEMPORARY_REDIRECT,
        StatusCode::PERMANENT_REDIRECT,
    ];
    let Some(location) = answer.headers().get(LOCATION) else { return Ok(None) };
    if !follows.contains(&answer.status()) {
        return Ok(None);
    }
    let no_place =
        || RefusedAnswer::NoPlace { to: String::from_utf8_lossy(location.as_bytes()).into() };
    let from = Url::parse(&request.uri().to_string()).map_err(|_| no_place())?;
    let location = location.to_str().map_err(|_| no_place())?;
    let mut to = from.join(location).map_err(|_| no_place())?;
    to.set_fragment(None);
    if !["http", "https"].contains(&to.scheme()) {
        return Err(no_place());
    }
    let has_credentials = !to.username().is_empty() || to.password().is_some();
    let place = format!("{}://{}", to.scheme(), to.host_str().unwrap_or(""));
    if has_credentials {
        return Err(RefusedAnswer::Credentials { to: place });
    }
    if from.scheme() == "https" && to.scheme() != "https" {
        return Err(RefusedAnswer::Unencrypted { to: place });
    }
    let reads = [Method::GET, Method::HEAD].contains(request.method());
    let is_same = from.origin() == to.origin();
    let repeats = is_same && answer.status() != StatusCode::SEE_OTHER;
    if !reads && !repeats {
        return Err(RefusedAnswer::Elsewhere { method: request.method().clone(), to: place });
    }
    let uri = to.as_str().parse().map_err(|_| no_place())?;
    let mut next = match is_same {
        true => request.clone(),
        false => {
            let mut next = HttpRequest::new(HttpRequestBody::empty());
            *next.method_mut() = request.method().clone();
            for (name, value) in request.headers() {
                if HEADERS_FOR_OTHERS.contains(name) {
                    next.headers_mut().append(name, value.clone());
                }
            }
            next
        }
    };
    *next.uri_mut() = uri;
    Ok(Some(next))
}

/// The answer, where `object_store` would take all of it into memory with a bound: `listing_bytes`
/// for a listing.
async fn bounded(
    request: &HttpRequest,
    answer: HttpResponse,
    listing_bytes: usize,
) -> Result<HttpResponse, HttpError> {
    let is_error = !answer.status().is_success();
    let is_object = request.method() == Method::GET && !is_listing(request.uri().query());
    if request.method() == Method::HEAD || (is_object && !is_error) {
        return Ok(answer);
    }
    let most_bytes = if is_error { ERROR_BYTES } else { listing_bytes };
    let (parts, body) = answer.into_parts();
    let mut body = body.bytes_stream();
    let mut taken = BytesMut::new();
    while let Some(bytes) = body.next().await {
        match bytes {
            Ok(bytes) => taken.extend_from_slice(&bytes),
            // The status says enough.
            Err(_) if is_error => break,
            Err(error) => return Err(error),
        }
        if taken.len() > most_bytes {
            if !is_error {
                let method = request.method().clone();
                return Err(RefusedAnswer::TooLarge { method, most_bytes }.into());
            }
            taken.truncate(most_bytes);
            break;
        }
    }
    Ok(HttpResponse::from_parts(parts, Bytes::from(taken).into()))
}

/// Whether such a query asks S3, Google Cloud Storage or Azure for a listing.
fn is_listing(query: Option<&str>) -> bool {
    let parts = query.unwrap_or("").split('&');
    parts.into_iter().any(|part| part.starts_with("list-type=") || part == "comp=list")
}

/// A client with these options, as `object_store` would make it except for redirects.
fn client(options: &ClientOptions) -> object_store::Result<reqwest::Client> {
    use ClientConfigKey as Key;
    let failed = |source: reqwest::Error| object_store::Error::Generic {
        store: "HTTP client",
        source: Box::new(source),
    };
    let options = Options(options);
    let mut builder = reqwest::Client::builder()
        .redirect(redirect::Policy::none())
        .no_gzip()
        .no_brotli()
        .no_zstd()
        .no_deflate()
        .user_agent(options.text(Key::UserAgent).unwrap_or_else(|| {
            concat!(env!("CARGO_PKG_NAME"), "/", env!("CARGO_PKG_VERSION")).to_owned()
        }))
        .https_only(!options.is_on(Key::AllowHttp)?);
    if options.is_on(Key::RandomizeAddresses)? {
        builder = builder.dns_resolver(AnyAddress);
    }
    if let Some(url) = options.text(Key::ProxyUrl) {
        let mut proxy = Proxy::all(url).map_err(failed)?;
        if let Some(excludes) = options.text(Key::ProxyExcludes) {
            proxy = proxy.no_proxy(NoProxy::from_string(&excludes));
        }
        if let Some(pem) = options.text(Key::ProxyCaCertificate) {
            let certificate = Certificate::from_pem(pem.as_bytes()).map_err(failed)?;
            builder = builder.tls_certs_merge([certificate]);
        }
        builder = builder.proxy(proxy);
    }
    if options.is_on(Key::NoSystemCertificates)? {
        builder = builder.tls_certs_only([]);
    }
    if options.is_on(Key::AllowInvalidCertificates)? {
        builder = builder.tls_danger_accept_invalid_certs(true);
    }
    if let Some(time) = options.time(Key::Timeout)? {
        builder = builder.timeout(time);
    }
    if let Some(time) = options.time(Key::ConnectTimeout)? {
        builder = builder.connect_timeout(time);
    }
    if let Some(time) = options.time(Key::ReadTimeout)? {
        builder = builder.read_timeout(time);
    }
    if let Some(time) = options.time(Key::PoolIdleTimeout)? {
        builder = builder.pool_idle_timeout(time);
    }
    if let Some(most) = options.number(Key::PoolMaxIdlePerHost)? {
        builder = builder.pool_max_idle_per_host(most);
    }
    if let Some(time) = options.time(Key::Http2KeepAliveInterval)? {
        builder = builder.http2_keep_alive_interval(time);
    }
    if let Some(time) = options.time(Key::Http2KeepAliveTimeout)? {
        builder = builder.http2_keep_alive_timeout(time);
    }
    if options.is_on(Key::Http2KeepAliveWhileIdle)? {
        builder = builder.http2_keep_alive_while_idle(true);
    }
    if let Some(bytes) = options.number::<u32>(Key::Http2MaxFrameSize)? {
        builder = builder.http2_max_frame_size(bytes);
    }
    if options.is_on(Key::Http1Only)? {
        builder = builder.http1_only();
    }
    if options.is_on(Key::Http2Only)? {
        builder = builder.http2_prior_knowledge();
    }
    builder.build().map_err(failed)
}

/// Begins with any of a host's addresses, so that requests spread over the machines of a store.
struct AnyAddress;

impl Resolve for AnyAddress {
    fn resolve(&self, name: Name) -> Resolving {
        Box::pin(async move {
            let addresses = tokio::net::lookup_host((name.as_str(), 0)).await?;
            let mut addresses: Vec<SocketAddr> = addresses.collect();
            // The keys of the standard library's hashers are random.
            let any = RandomState::new().hash_one(0) as usize % addresses.len().max(1);
            addresses.rotate_left(any);
            Ok(Box::new(addresses.into_iter()) as Addrs)
        })
    }
}

/// Options of a client by their names in the environment.
struct Options<'a>(&'a ClientOptions);

impl Options<'_> {
    fn text(&self, key: ClientConfigKey) -> Option<String> {
        self.0.get_config_value(&key)
    }

    fn is_on(&self, key: ClientConfigKey) -> object_store::Result<bool> {
        let Some(text) = self.text(key) else { return Ok(false) };
        match text.to_ascii_lowercase().as_str() {
            "1" | "true" | "on" | "yes" | "y" => Ok(true),
            "0" | "false" | "off" | "no" | "n" => Ok(false),
            _ => Err(wrong(key, &text, "true or false")),
        }
    }

    fn time(&self, key: ClientConfigKey) -> object_store::Result<Option<Duration>> {
        let parse = |text: String| {
            humantime::parse_duration(&text).map_err(|_| wrong(key, &text, "a time such as 30s"))
        };
        self.text(key).map(parse).transpose()
    }

    fn number<T: FromStr>(&self, key: ClientConfigKey) -> object_store::Result<Option<T>> {
        let parse =
            |text: String| text.parse().map_err(|_| wrong(key, &text, "a number in its range"));
        self.text(key).map(parse).transpose()
    }
}

fn wrong(key: ClientConfigKey, found: &str, expected: &str) -> object_store::Error {
    let said = format!("{}: found {found:?}, expected {expected}", key.as_ref());
    object_store::Error::Generic { store: "HTTP client", source: said.into() }
}

#[cfg(test)]
mod tests {
    use object_store::client::HttpResponseBody;

    use super::*;

    fn request(method: Method, url: &str) -> HttpRequest {
        let mut request = HttpRequest::new(HttpRequestBody::from(b"body".to_vec()));
        *request.method_mut() = method;
        *request.uri_mut() = url.parse().unwrap();
        for (name, value) in [
            ("authorization", "AWS4-HMAC-SHA256 secret"),
            ("x-amz-security-token", "secret"),
            ("x-ms-encryption-key", "secret"),
            ("cookie", "secret"),
            ("range", "bytes=1-2"),
            ("if-match", "1"),
        ] {
            request.headers_mut().insert(name, value.parse().unwrap());
        }
        request
    }

    /// Where such a redirect leads, with the names of the headers.
    fn led(
        (method, from): (Method, &str),
        (status, to): (StatusCode, &str),
    ) -> Result<(String, Vec<String>), String> {
        let mut answer = HttpResponse::new(HttpResponseBody::from(Vec::new()));
        *answer.status_mut() = status;
        answer.headers_mut().insert(LOCATION, to.parse().unwrap());
        let next =
            redirected(&request(method, from), &answer).map_err(|error| error.to_string())?;
        let next = next.expect("led elsewhere");
        let names = next.headers().keys().map(ToString::to_string).collect();
        Ok((next.uri().to_string(), names))
    }

    #[test]
    fn credentials_stay_with_the_server_that_they_are_for() {
        let get = |from| (Method::GET, from);
        let found = |to| (StatusCode::FOUND, to);
        let here = led(get("https://h/a"), found("/b?c#d")).unwrap();
        assert_eq!(here.0, "https://h/b?c");
        assert_eq!(here.1.len(), 6, "all headers: {here:?}");
        for elsewhere in ["https://other/b", "https://h:444/b", "//h.other/b"] {
            let (_, headers) = led(get("https://h/a"), found(elsewhere)).unwrap();
            assert_eq!(headers, ["range", "if-match"], "{elsewhere}");
        }
        // Of http only the scheme may change, and that is another origin too.
        let (to, headers) = led(get("http://h/a"), found("https://h/a")).unwrap();
        assert_eq!((to.as_str(), headers.len()), ("https://h/a", 2));
        let error = led(get("https://h/a"), found("https://u:secret@h/b?secret")).unwrap_err();
        assert!(error.contains("https://h with a user") && !error.contains("secret"), "{error}");
    }

    #[test]
    fn https_never_follows_to_http_nor_to_what_is_no_web_server() {
        let get = (Method::GET, "https://h/a");
        let error = led(get.clone(), (StatusCode::FOUND, "http://h/a?secret")).unwrap_err();
        assert_eq!(error, "redirected from https to http://h, expected https");
        let error = led(get, (StatusCode::FOUND, "file:///etc/passwd")).unwrap_err();
        assert!(error.contains("expected a URL of http or https"), "{error}");
    }

    #[test]
    fn what_writes_is_not_led_to_another_server() {
        let put = (Method::PUT, "https://h/a");
        for (status, to) in [
            (StatusCode::TEMPORARY_REDIRECT, "https://other/a"),
            (StatusCode::MOVED_PERMANENTLY, "https://h:444/a"),
            (StatusCode::SEE_OTHER, "/b"),
        ] {
            let error = led(put.clone(), (status, to)).unwrap_err();
            assert!(error.starts_with("PUT was redirected to https://"), "{error}");
        }
        let (to, headers) = led(put, (StatusCode::PERMANENT_REDIRECT, "/a/")).unwrap();
        assert_eq!((to.as_str(), headers.len()), ("https://h/a/", 6));
    }

    #[test]
    fn a_listing_is_read_up_to_its_bound_and_an_object_whole() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let read = |url, bytes: usize| {
            let answer = HttpResponse::new(HttpResponseBody::from(vec![b'x'; bytes]));
            let request = request(Method::GET, url);
            let taken = bounded(&request, answer, 1000);
            let body = runtime.block_on(async { taken.await?.into_body().bytes().await });
            body.map(|body| body.len()).map_err(|error| format!("{error:?}"))
        };
        let listing = "https://h/b?list-type=2";
        assert_eq!(read(listing, 1000), Ok(1000));
        let error = read(listing, 1001).unwrap_err();
        assert!(error.contains("TooLarge") && error.contains("1000"), "{error}");
        assert_eq!(read("https://h/b/x", 1001), Ok(1001));
    }

    #[test]
    fn listings_are_told_by_their_query() {
        assert!(is_listing(Some("prefix=a&list-type=2")));
        assert!(is_listing(Some("restype=container&comp=list")));
        assert!(!is_listing(Some("partNumber=1")) && !is_listing(None));
    }
}
