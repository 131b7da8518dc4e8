//! Places of data sets, and how their objects are read.
//!
//! A [`Location`] is a path or URL as a user gives it. A place that is no local folder is a
//! [`RemoteFolder`]: a store of the `object_store` crate and a prefix in it. It is read with few
//! requests at a time; each is tried again while that can help, and given up after a time
//! without progress: a reader above it sees bytes, or one error.
//!
//! | URL | store | settings from the environment |
//! |---|---|---|
//! | `s3://bucket/prefix` | Amazon S3 and stores with its interface | `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_REGION`, `AWS_ENDPOINT`, `AWS_ALLOW_HTTP` ... |
//! | `gs://bucket/prefix` | Google Cloud Storage | `GOOGLE_SERVICE_ACCOUNT` ... |
//! | `az://container/prefix`, `abfs://`, `abfss://`, `adl://`, `azure://` | Azure Blob Storage | `AZURE_STORAGE_ACCOUNT_NAME`, `AZURE_STORAGE_ACCOUNT_KEY` ... |
//! | `http://host/prefix`, `https://` | a web server (which needs WebDAV for a listing) | |
//! | `memory://name/prefix` | the memory of this process | |
//! | `file:///folder` | the folder | |
//!
//! These stores need the features `s3`, `gcs`, `azure` and `web`, or `remote` for all four; `memory`, as any store of a caller's own,
//! needs `stores`. Without that there are paths, and a [`RemoteFolder`] that cannot be opened.
//!
//! Contract: messages never hold a password, a key or the query of a URL. Threads of callers wait
//! for a runtime of this crate's own, so that everything here may be called inside of another one.
//! The bytes and the etag of an object are checked. Of several writers of the same folder one at a time has
//! it ([`Claim`]), without exception where the store can write an object only if it is unchanged: S3, Google's,
//! Azure's and memory.

#[cfg(not(feature = "stores"))]
mod absent;
#[cfg(feature = "stores")]
mod answer;
#[cfg(feature = "stores")]
mod backoff;
#[cfg(feature = "stores")]
mod claim;
#[cfg(feature = "network")]
mod clouds;
#[cfg(feature = "stores")]
mod conditional;
mod failure;
#[cfg(feature = "network")]
mod http;
mod location;
mod object;
#[cfg(feature = "stores")]
mod open;
#[cfg(feature = "stores")]
mod operation;
mod origin;
#[cfg(feature = "stores")]
mod remote;
#[cfg(feature = "stores")]
mod runtime;
mod settings;
#[cfg(feature = "stores")]
mod write;
mod writer;

#[cfg(not(feature = "stores"))]
pub(crate) use absent::Started;
#[cfg(not(feature = "stores"))]
pub use absent::{Cancel, Claim, Found, RemoteFolder};
#[cfg(feature = "stores")]
pub use claim::Claim;
#[cfg(feature = "stores")]
pub use conditional::Found;
pub use failure::StoreFailure;
pub use location::Location;
pub use object::{Entry, Version};
pub(crate) use origin::Origin;
#[cfg(feature = "stores")]
pub use remote::RemoteFolder;
#[cfg(feature = "stores")]
pub(crate) use remote::Started;
#[cfg(feature = "stores")]
pub use runtime::Cancel;
pub use settings::StoreSettings;
pub(crate) use writer::TOKEN_DIGITS;
pub use writer::{Claimed, new_token};
