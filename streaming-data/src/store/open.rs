//! Stores by scheme, with the settings of the environment.

use std::{
    collections::BTreeMap,
    sync::{Arc, LazyLock, Mutex, PoisonError},
};

use object_store::{ObjectStore, memory::InMemory, path::Path};
use url::Url;

use super::{StoreFailure, StoreSettings};

/// Only variables with these prefixes are read: `object_store` also knows names without them, such as
/// `TOKEN` or `TIMEOUT`, which anything else may have set.
const PREFIXES: [&str; 3] = ["AWS_", "AZURE_", "GOOGLE_"];

/// And these, by which a machine of a cloud gives programs on it an identity.
const OTHERS: [&str; 2] = ["IDENTITY_ENDPOINT", "SERVICE_ACCOUNT"];

/// The stores of `memory://name` URLs, by name, for the life of the process.
static MEMORIES: LazyLock<Mutex<BTreeMap<String, Arc<InMemory>>>> = LazyLock::new(Mutex::default);

/// The store of a URL, and the path in it; it retries requests up to the given number of times. Nothing is sent
/// yet.
pub(super) fn open(
    url: &Url,
    settings: &StoreSettings,
    retries: usize,
) -> Result<(Arc<dyn ObjectStore>, Path), StoreFailure> {
    if url.scheme() == "memory" {
        let path = Path::from_url_path(url.path()).map_err(object_store::Error::from)?;
        let name = url.host_str().unwrap_or("").to_owned();
        let mut memories = MEMORIES.lock().unwrap_or_else(PoisonError::into_inner);
        return Ok((Arc::clone(memories.entry(name).or_default()) as _, path));
    }
    #[cfg(feature = "network")]
    return super::clouds::open(url, settings, retries);
    #[cfg(not(feature = "network"))]
    {
        let _ = (settings, retries);
        Err(without("remote", url))
    }
}

/// The error of a URL whose kind of store this build leaves out.
#[cfg(not(all(feature = "azure", feature = "gcs", feature = "s3", feature = "web")))]
pub(super) fn without(feature: &str, url: &Url) -> StoreFailure {
    let said = format!(
        "stores of {}:// need the feature `{feature}` of tidemill-streaming-data, expected a build with it",
        url.scheme()
    );
    StoreFailure::Unsupported { said }
}

/// The settings that name the store in addition to the URL: two stores can have buckets of one name.
pub(super) fn endpoints(settings: &StoreSettings) -> Vec<String> {
    const PARTS: [&str; 3] = ["ENDPOINT", "BASE_URL", "ACCOUNT_NAME"];
    let mut by_name = BTreeMap::new();
    for (name, value) in options(settings) {
        let name = name.to_ascii_uppercase();
        if !OTHERS.contains(&&*name) && PARTS.iter().any(|part| name.contains(part)) {
            by_name.insert(name, value);
        }
    }
    by_name.into_values().collect()
}

/// Settings of the environment, then the given settings, which take precedence.
pub(super) fn options(settings: &StoreSettings) -> Vec<(String, String)> {
    let environment = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .filter(|(name, _)| {
            PREFIXES.iter().any(|prefix| name.starts_with(prefix)) || OTHERS.contains(&&**name)
        });
    environment.chain(settings.options.iter().cloned()).collect()
}
