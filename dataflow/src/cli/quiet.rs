//! Code of others that may panic on its input: its panic becomes an error, and is not printed too.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};

thread_local! {
    /// Whether a panic of this thread is caught and reported as an error.
    static IS_CAUGHT: Cell<bool> = const { Cell::new(false) };
}

/// From now on panics that [`caught`] catches print nothing. Only the program does this: a library leaves the hook of
/// its process alone.
pub(crate) fn silence_caught_panics() {
    let default = take_hook();
    set_hook(Box::new(move |panic| {
        if IS_CAUGHT.get() {
            tracing::debug!("{panic}");
        } else {
            default(panic);
        }
    }));
}

/// Calls `work`; a panic gives its message. State that `work` was changing is not to be used again.
pub(crate) fn caught<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    let before = IS_CAUGHT.replace(true);
    let result = catch_unwind(AssertUnwindSafe(work));
    IS_CAUGHT.set(before);
    result.map_err(|panic| {
        let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
        let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
        text.unwrap_or_else(|| "without a message".to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_what_it_said() {
        assert_eq!(caught(|| 7), Ok(7));
        assert_eq!(caught(|| -> u32 { panic!("at {}", 3) }), Err("at 3".to_owned()));
        assert_eq!(caught(|| caught(|| panic!("inner")).is_err() && IS_CAUGHT.get()), Ok(true));
        assert!(!IS_CAUGHT.get());
    }
}
