//! Facts about an object that are known without reading it.

use std::time::SystemTime;

/// The version of an object, which differs for a later object of the same name.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Version {
    /// Size of the object, where it is known.
    pub bytes: Option<u64>,
    /// The store's name of this version, where it has one.
    pub e_tag: Option<String>,
}

/// An object in a listing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Name below the folder.
    pub name: String,
    /// Size.
    pub bytes: u64,
    /// When it was last written, by the store's clock; many tell whole seconds.
    pub modified: SystemTime,
    /// The store's name of this version, where it has one.
    pub e_tag: Option<String>,
}
