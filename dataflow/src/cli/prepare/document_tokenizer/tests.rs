//! Tokenizers of every kind that `tokenizer.json` knows, trained here on a few sentences.

use std::fs;
use std::num::NonZeroUsize;
use std::ops::ControlFlow;

use serde_json::json;
use tempfile::TempDir;
use tidemill_streaming_data::DataSet;
use tidemill_streaming_data::order::SampleId;
use tidemill_streaming_data::prepare::{PrepareSettings, prepare};
use tokenizers::models::TrainerWrapper;
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::models::unigram::{Unigram, UnigramTrainer};
use tokenizers::models::wordlevel::{WordLevel, WordLevelTrainer};
use tokenizers::models::wordpiece::{WordPiece, WordPieceTrainer};
use tokenizers::normalizers::BertNormalizer;
use tokenizers::pre_tokenizers::bert::BertPreTokenizer;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::metaspace::{Metaspace, PrependScheme};
use tokenizers::pre_tokenizers::whitespace::Whitespace;
use tokenizers::processors::template::TemplateProcessing;
use tokenizers::{
    AddedToken, ModelWrapper, PaddingParams, PostProcessorWrapper, Tokenizer, TruncationParams,
};

use super::*;

/// Documents to train tokenizers on and to tokenize.
fn documents() -> Vec<String> {
    let sentence = |at: usize| {
        let words = ["tide", "mill", "grain", "sluice", "water", "wheel", "größer", "naïve", "🦀"];
        let word = |place: usize| words[(at * 7 + place * place) % words.len()];
        (0..12 + at % 40).map(word).collect::<Vec<_>>().join(" ") + "."
    };
    (0..60).map(sentence).collect()
}

fn special(names: &[&str]) -> Vec<AddedToken> {
    names.iter().map(|name| AddedToken::from(*name, true)).collect()
}

/// Trains a tokenizer, which saves all that must not be applied: lengths, and tokens around a text.
fn trained(mut tokenizer: Tokenizer, mut trainer: TrainerWrapper) -> Tokenizer {
    tokenizer.train(&mut trainer, documents().into_iter()).unwrap();
    let truncation = TruncationParams { max_length: 5, ..TruncationParams::default() };
    tokenizer.with_truncation(Some(truncation)).unwrap();
    tokenizer.with_padding(Some(PaddingParams::default()));
    let around = TemplateProcessing::builder()
        .try_single("tide $A tide")
        .unwrap()
        .special_tokens(vec![("tide", 1)])
        .build()
        .unwrap();
    tokenizer.with_post_processor(Some(PostProcessorWrapper::from(around)));
    tokenizer
}

fn new(model: impl Into<ModelWrapper>) -> Tokenizer {
    Tokenizer::new(model)
}

pub(super) fn byte_level(end: &str) -> Tokenizer {
    let mut tokenizer = new(BPE::default());
    tokenizer
        .with_pre_tokenizer(Some(ByteLevel::default().add_prefix_space(false)))
        .with_decoder(Some(ByteLevel::default()));
    let trainer = BpeTrainer::builder()
        .show_progress(false)
        .vocab_size(320)
        .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
        .special_tokens(special(&[end]))
        .build();
    trained(tokenizer, TrainerWrapper::from(trainer))
}

fn metaspace() -> Metaspace {
    Metaspace::new('▁', PrependScheme::Always, true)
}

pub(super) fn bpe_of_characters() -> Tokenizer {
    let mut tokenizer = new(BPE::builder().unk_token("<unk>".to_owned()).build().unwrap());
    tokenizer.with_pre_tokenizer(Some(metaspace())).with_decoder(Some(metaspace()));
    let trainer = BpeTrainer::builder()
        .show_progress(false)
        .vocab_size(120)
        .special_tokens(special(&["<unk>", "<s>", "</s>"]))
        .build();
    trained(tokenizer, TrainerWrapper::from(trainer))
}

pub(super) fn unigram() -> Tokenizer {
    let mut tokenizer = new(Unigram::default());
    tokenizer.with_pre_tokenizer(Some(metaspace())).with_decoder(Some(metaspace()));
    let trainer = UnigramTrainer::builder()
        .show_progress(false)
        .vocab_size(90)
        .unk_token(Some("<unk>".to_owned()))
        .special_tokens(special(&["<pad>", "<eos>", "<unk>"]))
        .build()
        .unwrap();
    trained(tokenizer, TrainerWrapper::from(trainer))
}

pub(super) fn word_piece() -> Tokenizer {
    let mut tokenizer = new(WordPiece::builder().unk_token("[UNK]".to_owned()).build().unwrap());
    tokenizer
        .with_normalizer(Some(BertNormalizer::default()))
        .with_pre_tokenizer(Some(BertPreTokenizer));
    let trainer = WordPieceTrainer::builder()
        .show_progress(false)
        .vocab_size(100)
        .special_tokens(special(&["[PAD]", "[UNK]", "[CLS]", "[SEP]"]))
        .build();
    trained(tokenizer, TrainerWrapper::from(trainer))
}

pub(super) fn word_level() -> Tokenizer {
    let mut tokenizer = new(WordLevel::builder().unk_token("[UNK]".to_owned()).build().unwrap());
    tokenizer.with_pre_tokenizer(Some(Whitespace {}));
    let trainer = WordLevelTrainer::builder()
        .show_progress(false)
        .special_tokens(special(&["[UNK]", "[EOS]"]))
        .build()
        .unwrap();
    trained(tokenizer, TrainerWrapper::from(trainer))
}

fn saved(tokenizer: &Tokenizer) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    tokenizer.save(folder.path().join("tokenizer.json"), true).unwrap();
    folder
}

#[test]
fn every_kind_of_tokenizer_prepares_documents_whole() {
    for (name, tokenizer, eos_token, expected_eos, is_fast) in [
        ("BPE of bytes", byte_level("<|endoftext|>"), None, "<|endoftext|>", true),
        ("BPE of characters", bpe_of_characters(), None, "</s>", false),
        ("Unigram", unigram(), None, "<eos>", false),
        ("WordPiece", word_piece(), Some("[SEP]"), "[SEP]", false),
        ("WordLevel", word_level(), None, "[EOS]", false),
    ] {
        let folder = saved(&tokenizer);
        let opened = DocumentTokenizer::open(folder.path(), eos_token, Library::Fastest).unwrap();
        assert_eq!(Some(opened.eos), tokenizer.token_to_id(expected_eos), "{name}");
        assert_eq!(opened.fast.is_some(), is_fast, "{name}");
        assert_eq!(opened.vocab_size() as usize, tokenizer.get_vocab_size(true), "{name}");
        // The reference: the tokenizer itself, without the truncation and padding that it was saved with.
        let mut whole = tokenizer.clone();
        whole.with_truncation(None).unwrap().with_padding(None);
        let mut stream = Vec::new();
        let texts = folder.path().join("texts");
        fs::create_dir(&texts).unwrap();
        for (at, text) in documents().iter().enumerate() {
            fs::write(texts.join(format!("{at:03}.txt")), text).unwrap();
            let encoded = whole.encode(text.as_str(), false).unwrap();
            assert!(encoded.get_ids().len() >= 12, "{name}: {text}");
            stream.extend_from_slice(encoded.get_ids());
            stream.push(opened.eos);
        }
        let mut outputs = Vec::new();
        for workers in [1, 3] {
            let output = folder.path().join(format!("out-{workers}"));
            let seq_len = NonZeroUsize::new(31).unwrap();
            let settings = PrepareSettings {
                workers: NonZeroUsize::new(workers).unwrap(),
                ..PrepareSettings::new(vec![texts.clone()], output.clone(), seq_len)
            };
            let report = prepare(&settings, &opened, &mut |_| ControlFlow::Continue(())).unwrap();
            assert_eq!(report.tokens as usize, stream.len(), "{name}");
            let data_set = DataSet::open(&output).unwrap();
            assert_eq!(data_set.eos_token_id(), Some(opened.eos));
            for row in 0..data_set.samples() {
                let sample = data_set.sample(SampleId { epoch: 0, shard: 0, row }).unwrap();
                let start = row as usize * 31;
                assert_eq!(sample, stream[start..start + 32], "{name}, row {row}");
            }
            outputs.push(fs::read(output.join("shard-00000.parquet")).unwrap());
        }
        assert!(outputs[0] == outputs[1], "{name}");
    }
}

/// Tokenizers that lack a merge, or many.
#[test]
fn a_library_that_gives_other_tokens_is_not_used_or_ends_the_preparation() {
    let folder = saved(&byte_level("<|endoftext|>"));
    let open = |library| DocumentTokenizer::open(folder.path(), None, library).unwrap();
    let (mut fastest, reference) = (open(Library::Fastest), open(Library::Reference));
    assert!(fastest.fast.is_some() && reference.fast.is_none());
    let without = |count: usize| {
        let mut other: Value = serde_json::from_str(&fastest.json).unwrap();
        let merges = other["model"]["merges"].as_array_mut().unwrap();
        merges.truncate(merges.len() - count);
        other.to_string()
    };
    let parsed = |json: &str| serde_json::from_str(json).unwrap();
    assert!(FastTokenizer::open(parsed(&fastest.json), &reference.tokenizer).is_some());
    assert!(FastTokenizer::open(parsed(&without(1)), &reference.tokenizer).is_none());
    // Had it been found to agree on the texts that are tried, a document would show it.
    let (path, other) = (folder.path().join("other.json"), without(40));
    let of_other = TextTokenizer::of_bytes(other.as_bytes(), &path).unwrap();
    fastest.fast = FastTokenizer::open(parsed(&other), &of_other);
    assert!(fastest.fast.is_some());
    let answers: Vec<_> = documents()
        .iter()
        .map(|text| fastest.encode(text, &mut Vec::new()).map_err(|error| error.to_string()))
        .collect();
    let refused = answers.iter().find_map(|answer| answer.as_ref().err()).expect("a difference");
    assert!(refused.contains("prepare it with --tokenizer-library reference"), "{refused}");
}

#[test]
fn what_ends_a_document_is_found_or_asked_for() {
    let folder = saved(&word_piece());
    let open = |eos_token| DocumentTokenizer::open(folder.path(), eos_token, Library::Fastest);
    let refused = |eos_token| open(eos_token).err().expect("refused").to_string();
    let line = refused(None);
    assert!(
        line.ends_with(
            "name one with --eos-token (its special tokens: [PAD], [UNK], [CLS], [SEP])"
        ) && line.contains("tokenizer.json: expected a token that ends documents, found none of"),
        "{line}"
    );
    let line = refused(Some("[END]"));
    assert!(line.contains("found none of [END]; name one"), "{line}");
    // As Hugging Face writes it, as text or as an object; the flag goes before it.
    let write = |file: &str, content: serde_json::Value| {
        fs::write(folder.path().join(file), content.to_string()).unwrap();
    };
    write("special_tokens_map.json", json!({"eos_token": "[SEP]", "pad_token": "[PAD]"}));
    let opened = open(None).unwrap();
    assert_eq!(
        (opened.eos_token_id(), opened.pad_token_id(), opened.bos_token_id()),
        (3, Some(0), None)
    );
    let config =
        json!({"eos_token": {"content": "[CLS]"}, "bos_token": "[UNK]", "pad_token": null});
    write("tokenizer_config.json", config);
    let opened = open(None).unwrap();
    assert_eq!(
        (opened.eos_token_id(), opened.pad_token_id(), opened.bos_token_id()),
        (2, Some(0), Some(1))
    );
    assert_eq!(open(Some("[SEP]")).unwrap().eos_token_id(), 3);
    fs::write(folder.path().join("tokenizer_config.json"), "{").unwrap();
    let error = open(None).err().expect("refused");
    assert!(format!("{error:#}").contains("tokenizer_config.json: EOF"), "{error:#}");
}

/// A tokenizer may have several of the tokens that usually end a document, say one for texts and one for answers: the most
/// usual of them is taken.
#[test]
fn the_likeliest_of_the_usual_ends_is_taken() {
    let usual = ["<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|eos|>", "[EOS]"];
    for at in 0..usual.len() {
        let mut tokenizer = word_piece();
        // Ids in the other order.
        let others: Vec<&str> = usual[at..].iter().rev().copied().collect();
        tokenizer.add_special_tokens(&special(&others));
        let folder = saved(&tokenizer);
        let opened = DocumentTokenizer::open(folder.path(), None, Library::Fastest).unwrap();
        assert_eq!(Some(opened.eos_token_id()), tokenizer.token_to_id(usual[at]), "{}", usual[at]);
    }
}

#[test]
fn files_that_are_no_tokenizers_or_not_always_the_same_are_refused() {
    let folder = saved(&byte_level("<|endoftext|>"));
    let path = folder.path().join("tokenizer.json");
    let mut json: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    json["model"]["dropout"] = json!(0.1);
    fs::write(&path, json.to_string()).unwrap();
    let refused = || {
        format!(
            "{:#}",
            DocumentTokenizer::open(&path, None, Library::Fastest).err().expect("refused")
        )
    };
    assert!(refused().contains("model.dropout is 0.1, expected null"), "{}", refused());
    fs::write(&path, "{\"model\": 3}").unwrap();
    assert!(refused().contains("expected a Hugging Face tokenizer.json"), "{}", refused());
    fs::remove_file(&path).unwrap();
    assert!(refused().contains("tokenizer.json failed: No such file"), "{}", refused());
}
