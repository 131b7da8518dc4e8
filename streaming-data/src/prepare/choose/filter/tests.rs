//! Verdicts compared with the verdicts of the sources' own code, which `tests/fixtures/filter/generate.py` ran.

use std::collections::BTreeSet;

use serde::Deserialize;

use super::*;

/// A document, and the results of the sets' sources for it.
#[derive(Deserialize)]
struct Expected {
    text: String,
    /// For each set, `kept`, or the first rule that is broken.
    verdicts: BTreeMap<String, String>,
    /// The remaining text, by the name of the set, for each set that changed the text.
    texts: BTreeMap<String, String>,
    /// All broken rules of the sets that only reject documents, each rule checked alone.
    broken: BTreeSet<String>,
}

fn documents() -> Vec<Expected> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/filter/documents.jsonl.zst");
    let lines = zstd::decode_all(std::fs::File::open(path).unwrap()).unwrap();
    let lines = lines.split(|&byte| byte == b'\n').filter(|line| !line.is_empty());
    lines.map(|line| serde_json::from_slice(line).unwrap()).collect()
}

/// The verdict of the sets, and the text that is left.
fn verdict(settings: &FilterSettings, text: &str) -> (String, Option<String>) {
    let mut report = FilterReport::default();
    let kept = judge(settings.sets(), text, &mut report).map(Cow::into_owned);
    let rejected: Vec<String> = report.rejected.keys().map(Rule::to_string).collect();
    assert_eq!(rejected.is_empty(), kept.is_some());
    (rejected.into_iter().next().unwrap_or("kept".to_owned()), kept)
}

#[test]
fn first_rules_and_texts_are_those_of_the_sources() {
    let documents = documents();
    for name in FilterSettings::names() {
        let settings = FilterSettings::from_list(name).unwrap();
        let (mut compared, mut kept) = (0, 0);
        for Expected { text, verdicts, texts, .. } in &documents {
            let Some(expected) = verdicts.get(name) else { continue };
            let (found, left) = verdict(&settings, text);
            assert_eq!(&found, expected, "{name} of {text}");
            if let Some(left) = left {
                assert_eq!(&left, texts.get(name).unwrap_or(text), "{name} of {text}");
                kept += 1;
            }
            compared += 1;
        }
        assert!(compared >= 300 && kept >= 150 && kept < compared, "{name}: {kept} of {compared}");
    }
}

/// Keys that are no rules, but belong to one.
const PARAMETERS: [&str; 3] = ["common_words", "boilerplate", "short_line_characters"];

#[test]
fn each_rule_alone_breaks_where_its_source_does() {
    let documents = documents();
    for name in ["gopher", "repetition", "fineweb", "nemo-english"] {
        let table: toml::Table = FilterSettings::named(name).unwrap().parse().unwrap();
        let keys = table[name].as_table().unwrap();
        for key in keys.keys().filter(|key| !PARAMETERS.contains(&key.as_str())) {
            let mut alone = keys.clone();
            alone.retain(|other, _| other == key || PARAMETERS.contains(&other));
            let text = toml::to_string(&toml::Table::from_iter([(name.to_owned(), alone.into())]));
            let mut settings = FilterSettings::default();
            settings.append_toml(&text.unwrap(), "alone.toml".as_ref()).unwrap();
            let rule = format!("{name}.{key}");
            let mut broken = 0;
            for Expected { text, broken: expected, verdicts, .. } in &documents {
                if !verdicts.contains_key("gopher") {
                    continue;
                }
                let (found, _) = verdict(&settings, text);
                let expected = if expected.contains(&rule) { rule.as_str() } else { "kept" };
                assert_eq!(found, expected, "{text}");
                broken += usize::from(found == rule);
            }
            assert!(broken > 0, "no document breaks {rule}");
        }
    }
}

#[test]
fn sets_behind_one_another_see_what_is_left() {
    let settings = FilterSettings::from_list("c4,gopher").unwrap();
    let line = "The tide of the sea turns twice a day, and that is what the mill is for.\n";
    // Without the short lines the words are too few for Gopher.
    let text = line.repeat(3) + &"go onwards\n".repeat(30);
    let gopher = FilterSettings::from_list("gopher").unwrap();
    assert_eq!(verdict(&gopher, &text).0, "kept");
    assert_eq!(verdict(&settings, &text).0, "c4.min_sentences");
    let text = line.repeat(5) + &"go onwards\n".repeat(30);
    let mut report = FilterReport::default();
    let left = judge(settings.sets(), &text, &mut report).unwrap();
    assert_eq!(left, line.repeat(5).trim_end());
    let dropped: Vec<_> =
        report.dropped_lines.iter().map(|(rule, count)| (rule.to_string(), *count)).collect();
    assert_eq!(dropped, [("c4.drop_unterminated_lines".to_owned(), 30)]);
    // Lines of a document that is rejected are not counted.
    let settings = FilterSettings::from_list("c4,fineweb").unwrap();
    let mut report = FilterReport::default();
    assert_eq!(judge(settings.sets(), &text, &mut report), None);
    assert_eq!(report.rejected_documents(), 1);
    assert!(report.dropped_lines.is_empty());
}
