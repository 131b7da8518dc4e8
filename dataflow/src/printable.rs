//! Text of others (a peer, a file), made fit to be kept and printed.

/// At most `limit_bytes` of it, in one line, and without characters that a terminal would obey: control
/// characters, and those that turn the direction of writing.
pub(crate) fn printable(text: &str, limit_bytes: usize) -> String {
    let end = text.floor_char_boundary(limit_bytes);
    let mut clean: String = text[..end]
        .chars()
        .map(|character| match character {
            '\n' | '\r' | '\t' => ' ',
            '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => {
                '\u{fffd}'
            }
            control if control.is_control() => '\u{fffd}',
            other => other,
        })
        .collect();
    if end < text.len() {
        clean.push_str(" ...");
    }
    clean
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes_lose_their_force_and_long_texts_their_end() {
        let escapes = "\x1b]0;title\x07\x1b[2Jdisk\nfull\u{9b}31m \u{202e}txt";
        let clean = printable(escapes, 100);
        assert!(!clean.chars().any(|c| c.is_control() || c == '\u{202e}'), "{clean:?}");
        assert!(clean.contains("disk full"), "{clean}");
        assert_eq!(printable("\u{e4}\u{e4}\u{e4}", 3), "\u{e4} ...");
        assert_eq!(printable("as it is", 8), "as it is");
    }
}
