//! Places of data sets, and how their objects are read.
//!
//! A [`Location`] is a path or URL as a user gives it. A place that is no local folder is a
//! [`RemoteFolder`]: a store of the `object_store` crate and a prefix in it. It is read with few
//! requests at a time, each of which is tried again while that can help, and given up after a time
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
//! All but `memory` and `file` need the feature `remote`.
//!
//! Contract: messages never hold a password, a key or the query of a URL. Threads of callers wait
//! for a runtime of this crate's own, so that everything here may be called inside of another one.
//! The bytes and the etag of an object are checked. Of several writers of the same folder one at a time has
//! it ([`Claim`]), without exception where the store can write an object only if it is unchanged: S3, Google's,
//! Azure's and memory.

mod backoff;
mod claim;
#[cfg(feature = "remote")]
mod clouds;
mod conditional;
mod failure;
#[cfg(feature = "remote")]
mod http;
mod location;
mod open;
mod operation;
mod remote;
mod runtime;
mod settings;
mod write;

pub(crate) use claim::TOKEN_DIGITS;
pub use claim::{Claim, Claimed, new_token};
pub use conditional::Found;
pub use failure::StoreFailure;
pub use location::Location;
pub(crate) use remote::Started;
pub use remote::{Entry, RemoteFolder, Version};
pub use settings::StoreSettings;

pub use runtime::Cancel;
