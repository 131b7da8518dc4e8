//! Stores in a network, with the settings of the environment.

use std::sync::Arc;

#[cfg(feature = "s3")]
use object_store::aws::AmazonS3Builder;
#[cfg(feature = "azure")]
use object_store::azure::MicrosoftAzureBuilder;
#[cfg(feature = "gcs")]
use object_store::gcp::GoogleCloudStorageBuilder;
#[cfg(feature = "web")]
use object_store::http::HttpBuilder;
use object_store::{ClientConfigKey, ObjectStore, ObjectStoreScheme, RetryConfig, path::Path};
use url::Url;

#[cfg(not(all(feature = "azure", feature = "gcs", feature = "s3", feature = "web")))]
use super::open::without;
use super::{StoreFailure, StoreSettings, http::Connector, open::options};

/// The store of a URL, and the path in it; it retries requests up to the given number of times. Nothing is sent
/// yet.
pub(super) fn open(
    url: &Url,
    settings: &StoreSettings,
    retries: usize,
) -> Result<(Arc<dyn ObjectStore>, Path), StoreFailure> {
    let (scheme, path) = ObjectStoreScheme::parse(url).map_err(object_store::Error::from)?;
    let retry = RetryConfig {
        // Attempts to read are ours: they know of bodies that stop.
        max_retries: retries,
        retry_timeout: settings.progress_deadline,
        ..RetryConfig::default()
    };
    // A request may take as long as it makes progress, which is watched from outside.
    let deadline = format!("{} ms", settings.operation_deadline.as_millis());
    let connect = format!("{} ms", settings.progress_deadline.as_millis());
    macro_rules! build {
        ($builder:expr) => {{
            let mut builder = $builder.with_retry(retry).with_http_connector(Connector);
            for (key, value) in
                [(ClientConfigKey::ConnectTimeout, &connect), (ClientConfigKey::Timeout, &deadline)]
            {
                if let Ok(key) = key.as_ref().parse() {
                    builder = builder.with_config(key, value);
                }
            }
            for (name, value) in options(settings) {
                // Names of other stores, and unknown ones, are passed over.
                if let Ok(key) = name.to_ascii_lowercase().parse() {
                    check_place(&name, &value)?;
                    builder = builder.with_config(key, value);
                }
            }
            Arc::new(builder.build()?) as Arc<dyn ObjectStore>
        }};
    }
    let store = match scheme {
        #[cfg(feature = "s3")]
        ObjectStoreScheme::AmazonS3 => build!(AmazonS3Builder::new().with_url(url.as_str())),
        #[cfg(feature = "gcs")]
        ObjectStoreScheme::GoogleCloudStorage => {
            build!(GoogleCloudStorageBuilder::new().with_url(url.as_str()))
        }
        #[cfg(feature = "azure")]
        ObjectStoreScheme::MicrosoftAzure => {
            build!(MicrosoftAzureBuilder::new().with_url(url.as_str()))
        }
        #[cfg(feature = "web")]
        ObjectStoreScheme::Http => {
            let builder = HttpBuilder::new().with_url(&url[..url::Position::BeforePath]);
            // Where it is not to be encrypted the URL itself says so.
            let is_plain = (url.scheme() == "http").to_string();
            build!(builder.with_config(ClientConfigKey::AllowHttp, is_plain))
        }
        #[cfg(not(feature = "s3"))]
        ObjectStoreScheme::AmazonS3 => return Err(without("s3", url)),
        #[cfg(not(feature = "gcs"))]
        ObjectStoreScheme::GoogleCloudStorage => return Err(without("gcs", url)),
        #[cfg(not(feature = "azure"))]
        ObjectStoreScheme::MicrosoftAzure => return Err(without("azure", url)),
        #[cfg(not(feature = "web"))]
        ObjectStoreScheme::Http => return Err(without("web", url)),
        other => return Err(StoreFailure::Unsupported { said: format!("no store {other:?}") }),
    };
    Ok((store, path))
}

/// Refuses a URL that holds a user or password, which would be told to logs and proxies; that of a
/// proxy may.
fn check_place(name: &str, value: &str) -> Result<(), StoreFailure> {
    let has_credentials = |url: Url| !url.username().is_empty() || url.password().is_some();
    if name.to_ascii_uppercase().contains("PROXY") || !Url::parse(value).is_ok_and(has_credentials)
    {
        return Ok(());
    }
    Err(StoreFailure::Unsupported {
        said: format!(
            "{name} holds a user or password, expected a URL without: credentials have variables of \
             their own, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        ),
    })
}
