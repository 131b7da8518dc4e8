//! Text of others (names, configs, messages), made safe for a page.

use std::fmt::{self, Display, Formatter, Write};

/// Shows a text such that it is neither markup nor the end of an attribute; control characters except line breaks and tabs
/// become U+FFFD, since a page may not have them.
pub(super) struct Escaped<T>(pub T);

impl<T: Display> Display for Escaped<T> {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> fmt::Result {
        write!(Escaping(formatter), "{}", self.0)
    }
}

/// Escapes the text that is written through it.
struct Escaping<'a, 'b>(&'a mut Formatter<'b>);

impl Write for Escaping<'_, '_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for character in text.chars() {
            match character {
                '&' => self.0.write_str("&amp;")?,
                '<' => self.0.write_str("&lt;")?,
                '>' => self.0.write_str("&gt;")?,
                '"' => self.0.write_str("&quot;")?,
                '\'' => self.0.write_str("&#39;")?,
                '\n' | '\t' => self.0.write_char(character)?,
                '\u{fffe}' | '\u{ffff}' => self.0.write_char('\u{fffd}')?,
                control if control.is_control() => self.0.write_char('\u{fffd}')?,
                other => self.0.write_char(other)?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_of_a_text_is_markup() {
        let hostile = "</pre><script>\"a\" & 'b'\u{0}\u{1b}[2J\n\u{ffff}ö";
        let escaped = "&lt;/pre&gt;&lt;script&gt;&quot;a&quot; &amp; &#39;b&#39;\u{fffd}\u{fffd}[2J\n\u{fffd}ö";
        assert_eq!(Escaped(hostile).to_string(), escaped);
        assert_eq!(Escaped(format_args!("{}-{}", 1, '<')).to_string(), "1-&lt;");
    }
}
