//! A [`Translation`] as the text of a `RUN.toml`.

use std::fmt::Write;

use super::translation::{Reasons, TABLES, Translation};

/// Where lines of comments end.
const LINE_CHARACTERS: usize = 100;
/// A remark of more characters is above its key, not beside it.
const LONGEST_BESIDE: usize = 60;

/// The text; `title` is its first line.
pub(super) fn render(translation: &Translation, title: &str) -> String {
    let mut text = String::new();
    comment(&mut text, "", title);
    if !translation.to_fill_in.is_empty() {
        text.push_str("#\n");
        comment(&mut text, "", &format!("Fill in: {}.", translation.to_fill_in.join(", ")));
    }
    if !translation.left.0.is_empty() {
        text.push_str("#\n# What this file does not take over:\n");
        reasons(&mut text, &translation.left);
    }
    for name in TABLES {
        let Some(table) = translation.tables.get(name) else { continue };
        let _ = write!(text, "\n[{name}]\n");
        reasons(&mut text, &table.remarks);
        for key in &table.keys {
            let (name, value) = (&key.name, &key.value);
            if key.remark.chars().count() > LONGEST_BESIDE {
                comment(&mut text, "", &key.remark);
            }
            let _ = match key.remark.chars().count() {
                1..=LONGEST_BESIDE => writeln!(text, "{name} = {value}  # {}", key.remark),
                _ => writeln!(text, "{name} = {value}"),
            };
        }
    }
    text
}

fn reasons(text: &mut String, reasons: &Reasons) {
    for (reason, leaves) in &reasons.0 {
        let end = if leaves.is_empty() { "." } else { ":" };
        comment(text, "- ", &format!("{reason}{end}"));
        for leaf in leaves {
            let _ = writeln!(text, "#     {leaf}");
        }
    }
}

/// `what` in lines of comments; the first line begins with `mark`.
fn comment(text: &mut String, mark: &str, what: &str) {
    let mut line = format!("# {mark}");
    let mut is_new = true;
    for word in what.split_whitespace() {
        if !is_new && line.chars().count() + 1 + word.chars().count() > LINE_CHARACTERS {
            let _ = writeln!(text, "{line}");
            line = format!("# {:1$}", "", mark.len());
            is_new = true;
        }
        if !is_new {
            line.push(' ');
        }
        line.push_str(word);
        is_new = false;
    }
    let _ = writeln!(text, "{line}");
}
