//! What is shown of hostile documents, and that the page needs nothing else.

use super::*;

#[test]
fn whatever_a_document_holds_it_is_only_shown() {
    let bench = Bench::new();
    let hostile = [
        "</pre></script><script>alert(1)</script>",
        "<img src=x onerror=alert(1)>",
        "a\0b\u{1b}]0;title\u{7}c\r\n\u{8}",
        "\u{202e}txt.exe\u{2066}\u{200b}\u{2028}\u{feff}",
        "&lt;b&gt; &amp; \" ' ` <!-- --> ]]> <style>*{display:none}</style>",
        "שלום \u{5d0} مرحبا",
        "\u{e0041}\u{fffe}\u{ffff}\u{10ffff}\u{fdd0}\u{e000}",
    ];
    let lines = hostile.iter().map(|text| format!("{}\n", serde_json::json!({ "text": text })));
    // Halves of a pair are no character, and such a line is no document.
    let broken = "{\"text\": \"\\ud800\"}\n{\"text\": \"\\u12\"}\n{\"text\": \"\\q\"}\n";
    bench.write("in/lines.jsonl", lines.collect::<String>() + broken);
    for (at, text) in hostile.iter().enumerate() {
        // So that each is among the first of some verdict.
        bench.write(&format!("in/<img onerror=x>&\u{202e}{at}.txt"), text.repeat(at + 1));
    }
    bench.write("in/z.txt", "something of sixteen bytes and more ".repeat(20));
    for layout in [Layout::Stream, Layout::Updatable] {
        for (at, hostile) in hostile.iter().enumerate() {
            let hostile_name = format!("in/<img onerror=x>&\u{202e}{at}.txt");
            let inputs = vec![bench.path(&hostile_name), bench.path("in/z.txt")];
            let settings = PrepareSettings { layout, inputs, ..bench.settings() };
            let (report, page, _) = bench.prepare(&settings);
            let example = &report.verdicts[0].examples[0];
            let text = hostile.repeat(at + 1);
            let begins: String = text.chars().take(EXCERPT_CHARACTERS).collect();
            assert_eq!(example.excerpt.text, begins);
            assert_eq!(example.excerpt.document_bytes, text.len() as u64);
            check_page(&page);
        }
        let (report, page, printed) =
            bench.prepare(&PrepareSettings { layout, ..bench.settings() });
        assert_eq!((report.documents.broken, printed.broken), (3, 3));
        check_page(&page);
        let OfVerdict { examples, .. } = &report.verdicts[0];
        assert!(examples[0].path.contains("<img onerror=x>"));
    }
}

/// All tags of a page are those of this program, and no character of it moves or hides others.
#[track_caller]
pub(crate) fn check_page(page: &str) {
    let known = [
        "!doctype",
        "html",
        "head",
        "meta",
        "title",
        "style",
        "body",
        "main",
        "header",
        "h1",
        "h2",
        "h3",
        "p",
        "code",
        "dl",
        "div",
        "dt",
        "dd",
        "small",
        "section",
        "span",
        "table",
        "thead",
        "tr",
        "th",
        "td",
        "tbody",
        "i",
        "details",
        "summary",
        "strong",
        "article",
        "bdi",
        "pre",
        "mark",
        "figure",
        "figcaption",
        "svg",
        "line",
        "rect",
        "text",
        "footer",
    ];
    let mut depth = Vec::new();
    for piece in page.split('<').skip(1) {
        let (tag, _) = piece.split_once('>').expect("a tag that ends");
        let (is_end, tag) = (tag.starts_with('/'), tag.trim_start_matches('/'));
        let name = tag.split([' ', '\n', '/']).next().unwrap();
        assert!(known.contains(&name), "a tag <{tag}>");
        assert!(!tag.contains("onerror"), "{tag}");
        if is_end {
            assert_eq!(depth.pop(), Some(name), "tags that end in order");
        } else if !tag.ends_with('/') && !["meta", "!doctype"].contains(&name) {
            depth.push(name);
        }
    }
    assert!(depth.is_empty(), "{depth:?}");
    let hidden = |character: &char| {
        (character.is_control() && *character != '\n')
            || ('\u{200b}'..='\u{200f}').contains(character)
            || ('\u{2028}'..='\u{202e}').contains(character)
            || ('\u{2060}'..='\u{206f}').contains(character)
            || *character >= '\u{e0000}'
    };
    assert_eq!(page.chars().find(hidden), None);
    assert!(
        page.contains("default-src 'none'") && !page.contains("http:") && !page.contains("https:")
    );
}
