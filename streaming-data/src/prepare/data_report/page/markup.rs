//! Text as HTML: any content of a document is shown and never interpreted.

use std::fmt::Write;

use crate::prepare::data_report::excerpt::{Shown, shown};

/// A text in HTML, in one line: characters that would not be seen are shown by symbol or number.
pub(super) fn escaped(text: &str) -> String {
    let mut html = String::with_capacity(text.len());
    text.chars().for_each(|character| push(&mut html, character));
    html
}

/// A text in HTML whose lines end where they do.
pub(super) fn escaped_lines(text: &str) -> String {
    let mut html = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '\n' => html.push_str("<mark class=\"end\">↵</mark>\n"),
            character => push(&mut html, character),
        }
    }
    html
}

fn push(html: &mut String, character: char) {
    match shown(character) {
        Shown::Plain('<') => html.push_str("&lt;"),
        Shown::Plain('>') => html.push_str("&gt;"),
        Shown::Plain('&') => html.push_str("&amp;"),
        Shown::Plain('"') => html.push_str("&quot;"),
        Shown::Plain('\'') => html.push_str("&#39;"),
        Shown::Plain(character) => html.push(character),
        Shown::Symbol(symbol) => _ = write!(html, "<mark>{symbol}</mark>"),
        Shown::Number(number) => _ = write!(html, "<mark>[U+{number:04X}]</mark>"),
    }
}

/// A number with a comma before each three digits.
pub(super) fn number(number: u64) -> String {
    let digits = number.to_string();
    let mut grouped = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped
}

/// A number of things, in words where one is called `thing`.
pub(super) fn count(count: u64, thing: &str) -> String {
    format!("{} {thing}{}", number(count), if count == 1 { "" } else { "s" })
}

/// A number in at most four characters and a letter: 999, 1.2k, 34M.
pub(super) fn short(number: u64) -> String {
    scaled(number, 1000, ["", "k", "M", "G", "T", "P", "E"])
}

/// Bytes, in powers of 1000.
pub(super) fn bytes(number: u64) -> String {
    scaled(number, 1000, [" B", " kB", " MB", " GB", " TB", " PB", " EB"])
}

/// A power of two in few characters: 512, 1Ki, 64Mi.
pub(super) fn power_of_two(number: u64) -> String {
    scaled(number, 1024, ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"])
}

fn scaled(number: u64, unit: u64, suffixes: [&str; 7]) -> String {
    let (mut scale, mut power) = (1_u64, 0);
    while power < 6 && number / scale >= unit {
        (scale, power) = (scale * unit, power + 1);
    }
    let suffix = suffixes[power];
    let (whole, tenth) = (number / scale, number % scale / (scale / 10).max(1));
    match power > 0 && whole < 10 && tenth > 0 {
        true => format!("{whole}.{}{suffix}", tenth.min(9)),
        false => format!("{whole}{suffix}"),
    }
}

/// A share in percent, with two digits that tell something.
pub(super) fn percent(part: u64, whole: u64) -> String {
    let ten_thousandths = (u128::from(part) * 10_000).checked_div(u128::from(whole)).unwrap_or(0);
    match ten_thousandths {
        0 if part > 0 => "< 0.01 %".to_owned(),
        0..1000 => format!("{}.{:02} %", ten_thousandths / 100, ten_thousandths % 100),
        _ => format!("{}.{} %", ten_thousandths / 100, ten_thousandths / 10 % 10),
    }
}

/// The width of a bar, in percent of the longest.
pub(super) fn width(part: u64, longest: u64) -> String {
    let tenths = (u128::from(part) * 1000).checked_div(u128::from(longest)).unwrap_or(0);
    format!("{}.{}%", tenths / 10, tenths % 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_of_a_text_is_markup() {
        let hostile = "</script><img src=x onerror='alert(\"1\")'>&lt;\0\u{202e}\u{2028}";
        let html = escaped(hostile);
        assert_eq!(
            html,
            "&lt;/script&gt;&lt;img src=x onerror=&#39;alert(&quot;1&quot;)&#39;&gt;&amp;lt;\
             <mark>␀</mark><mark>[U+202E]</mark><mark>[U+2028]</mark>"
        );
        assert_eq!(escaped_lines("a\r\nb"), "a<mark>␍</mark><mark class=\"end\">↵</mark>\nb");
    }

    #[test]
    fn numbers_are_short_and_never_more_than_they_are() {
        assert_eq!([0, 7, 999, 1000, 1234567].map(number).join(" "), "0 7 999 1,000 1,234,567");
        let numbers = [0, 999, 1000, 1099, 1999, 9999, 10_000, 999_999, u64::MAX];
        assert_eq!(numbers.map(short).join(" "), "0 999 1k 1k 1.9k 9.9k 10k 999k 18E");
        assert_eq!(
            [1, 512, 1024, 1 << 20, 1 << 63].map(power_of_two).join(" "),
            "1 512 1Ki 1Mi 8Ei"
        );
        assert_eq!(bytes(1_234_567), "1.2 MB");
        assert_eq!(percent(1, 3), "33.3 %");
        assert_eq!(percent(1, 40), "2.50 %");
        assert_eq!(
            (percent(1, u64::MAX), percent(0, 9), percent(1, 0)),
            ("< 0.01 %".to_owned(), "0.00 %".to_owned(), "< 0.01 %".to_owned())
        );
        assert_eq!(
            (width(1, 3), width(3, 3), width(0, 0)),
            ("33.3%".to_owned(), "100.0%".to_owned(), "0.0%".to_owned())
        );
    }
}
