//! The meaning of an error of `object_store`.

use std::error::Error;

use super::StoreFailure;
#[cfg(feature = "network")]
use super::http::RefusedAnswer;

/// Longer answers of servers are cut.
const TEXT_CHARACTERS: usize = 400;

/// Where machines of clouds ask for credentials when nothing else gives any.
const MACHINE_SERVICE: &str = "169.254.169.254";

impl StoreFailure {
    /// Why an object was not written that has to be unchanged for it.
    pub(super) fn of_conditional(error: object_store::Error) -> StoreFailure {
        let is_unknown = matches!(&error, object_store::Error::NotImplemented { .. });
        match StoreFailure::from(error) {
            // Servers answer 501 to headers that they do not support.
            StoreFailure::Unsupported { said } if is_unknown || status(&said) == Some(501) => {
                StoreFailure::Unconditional { said }
            }
            failure => failure,
        }
    }
}

impl From<object_store::Error> for StoreFailure {
    fn from(error: object_store::Error) -> StoreFailure {
        use object_store::Error as E;
        let mut said = one_line(&error);
        if said.contains(MACHINE_SERVICE) {
            said = format!("the environment has no credentials, nor has the machine: {said}");
        }
        #[cfg(feature = "network")]
        if cause::<RefusedAnswer>(&error).is_some() {
            return StoreFailure::Unsupported { said };
        }
        match error {
            E::NotFound { .. } => StoreFailure::NotFound { said },
            E::PermissionDenied { .. } | E::Unauthenticated { .. } => {
                StoreFailure::Refused { said }
            }
            E::Precondition { .. } => StoreFailure::Changed {
                found: "another version".to_owned(),
                expected: "the one seen before".to_owned(),
            },
            E::NotSupported { .. }
            | E::NotImplemented { .. }
            | E::InvalidPath { .. }
            | E::UnknownConfigurationKey { .. } => StoreFailure::Unsupported { said },
            // `object_store` reports any conflict (409) so; a write that needs a new object checks again.
            E::AlreadyExists { .. } => StoreFailure::Other { said },
            // Listings report everything as any other error, with the server's answer inside.
            _ if said.contains("NoSuchBucket") => StoreFailure::NotFound { said },
            _ => match status(&said) {
                Some(404) => StoreFailure::NotFound { said },
                Some(401 | 403) => StoreFailure::Refused { said },
                // Of the client's errors only these can pass with time.
                Some(408 | 409 | 425 | 429) => StoreFailure::Other { said },
                Some(400..=499 | 501 | 505) => StoreFailure::Unsupported { said },
                _ => StoreFailure::Other { said },
            },
        }
    }
}

/// The first of an error and its causes that is of a type.
#[cfg(feature = "network")]
fn cause<'a, T: Error + 'static>(error: &'a (dyn Error + 'static)) -> Option<&'a T> {
    let mut link = Some(error);
    while let Some(error) = link {
        if let Some(found) = error.downcast_ref() {
            return Some(found);
        }
        link = error.source();
    }
    None
}

/// The status in the message of `object_store` about an unexpected answer.
fn status(said: &str) -> Option<u16> {
    let (_, status) = said.split_once("status code: ")?;
    status.get(..3)?.parse().ok()
}

/// An error and its causes in one line, without the queries of URLs.
fn one_line(error: &object_store::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let said = error.to_string();
        // Most of these messages already contain the messages of their causes.
        if !text.contains(&said) {
            text += ": ";
            text += &said;
        }
        cause = error.source();
    }
    tidy(&text)
}

/// Text of others, fit for one line of ours.
pub(super) fn tidy(text: &str) -> String {
    let words: Vec<String> = text
        .split_whitespace()
        .map(|word| match word.split_once("://") {
            Some((scheme, rest)) => {
                let rest = rest.split('?').next().unwrap_or(rest);
                let place = rest.split('/').next().unwrap_or(rest);
                // In front of the place may be a user and a password.
                let secret = place.rfind('@').map_or(0, |at| at + 1);
                format!("{scheme}://{}", &rest[secret..])
            }
            None => word.to_owned(),
        })
        .collect();
    let text: String = words.join(" ").chars().filter(|c| !c.is_control()).collect();
    match text.char_indices().nth(TEXT_CHARACTERS) {
        Some((end, _)) => format!("{} ...", &text[..end]),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_others_say_becomes_one_line_without_queries() {
        let text = "GET https://h/b?sig=secret failed:\n<Error>\n  <Code>A</Code>";
        assert_eq!(tidy(text), "GET https://h/b failed: <Error> <Code>A</Code>");
        assert_eq!(tidy("PUT http://user:se@cret@h:1/b@c"), "PUT http://h:1/b@c");
        let long = "x".repeat(1000);
        assert_eq!(tidy(&long).len(), TEXT_CHARACTERS + 4);
    }

    #[test]
    fn missing_credentials_are_called_so() {
        let source = "PUT http://169.254.169.254/latest/api/token: timed out".into();
        let failure = StoreFailure::from(object_store::Error::Generic { store: "S3", source });
        assert!(failure.to_string().starts_with("the environment has no credentials"), "{failure}");
    }

    #[test]
    fn what_cannot_get_better_is_not_tried_again() {
        let source = || -> Box<dyn Error + Send + Sync> { "<Code>NoSuchBucket</Code>".into() };
        let path = || "a".to_owned();
        let missing = object_store::Error::NotFound { path: path(), source: source() };
        let refused = object_store::Error::PermissionDenied { path: path(), source: source() };
        let listed = object_store::Error::Generic { store: "S3", source: source() };
        for error in [missing, refused, listed] {
            assert!(StoreFailure::from(error).is_final());
        }
        let source = "connection reset".into();
        assert!(
            !StoreFailure::from(object_store::Error::Generic { store: "S3", source }).is_final()
        );
    }
}
