//! Which documents, and which of their lines, enter the stream: lists of documents to leave out, filters, and duplicates, asked in this
//! order ([`admit`]).

pub(crate) mod admit;
pub(crate) mod duplicates;
pub(crate) mod exclude;
pub(crate) mod filter;
pub(crate) mod selection;
