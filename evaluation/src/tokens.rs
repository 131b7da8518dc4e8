//! Texts to the tokens of requests.
//!
//! [`Tokenization::Joint`] is lm-eval's `_encode_pair`: white space at the end of the context moves to the continuation;
//! `whole = encode(context + continuation)`; the first tokens of it, as many as `encode(context)`
//! has, are the context's, the rest the continuation's. The prefix token takes the place of an
//! empty context, unless the continuation begins with it.
//!
//! [`Tokenization::Separate`] is LLM Foundry's: the preamble with special tokens, without an end of
//! sequence behind it; the context; and the continuation, with a space before it if the tokenizer
//! has a token for `" a"`.
//!
//! A text that is longer than the model can take loses tokens on the left.

use crate::error::{EvaluationError, Result};
use crate::filter::is_space;
use crate::prompt::Prompt;
use crate::task::{Delimiters, Tokenization};

/// The error of a tokenizer.
pub type EncodeError = Box<dyn std::error::Error + Send + Sync>;

/// Whether a tokenizer adds its special tokens around a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpecialTokens {
    /// As the tokenizer's own settings say, such as a token for the beginning.
    Added,
    /// None.
    LeftOut,
}

/// Turns texts into tokens, on several threads at once.
pub trait Encode: Sync {
    /// The tokens of `text`.
    ///
    /// # Errors
    /// The tokenizer's error.
    fn encode(
        &self,
        text: &str,
        special: SpecialTokens,
    ) -> std::result::Result<Vec<u32>, EncodeError>;
}

/// The properties of a model that requests depend on.
#[derive(Clone, Copy)]
pub struct Vocabulary<'a> {
    /// Its tokenizer.
    pub tokenizer: &'a dyn Encode,
    /// The token that replaces an empty context, and its text: the beginning of a sequence, else
    /// its end.
    pub prefix: Option<(u32, &'a str)>,
    /// The token that ends a sequence.
    pub end: Option<u32>,
    /// The most tokens that the model can read; `None` if there is no limit.
    pub positions: Option<usize>,
}

/// A request: tokens, the last of which the model scores.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// Context and continuation.
    pub tokens: Vec<u32>,
    /// The index of the continuation's first token; at least 1.
    pub first: usize,
    /// The number of tokens of the context that were left out.
    pub left_out: usize,
}

impl Request {
    /// The number of tokens of the continuation.
    pub fn continuation_tokens(&self) -> usize {
        self.tokens.len() - self.first
    }
}

impl Vocabulary<'_> {
    /// The request for `continuation` behind `prompt`; errors name `place`.
    ///
    /// # Errors
    /// A tokenizer that fails; a continuation without tokens, or longer than the model can take; an
    /// empty context without a prefix token.
    pub fn request(
        &self,
        tokenization: Tokenization,
        delimiters: &Delimiters,
        prompt: &Prompt,
        continuation: &str,
        place: &str,
    ) -> Result<Request> {
        let encoded = match tokenization {
            Tokenization::Joint => {
                let context = format!("{}{}", prompt.preamble, prompt.context);
                self.joint(&context, &format!("{}{continuation}", delimiters.answer))
            }
            Tokenization::Separate => self.separate(prompt, continuation),
        };
        let [mut context, continuation] = encoded
            .map_err(|source| EvaluationError::Tokenizer { place: place.to_owned(), source })?;
        if continuation.is_empty() {
            let what = "expected a continuation of one token or more, found none of its own";
            return Err(EvaluationError::request(place, what));
        }
        if context.is_empty() {
            let Some((prefix, _)) = self.prefix else {
                let what = "the context is empty, and the model names no token for the beginning or end of a sequence: \
                            give it bos_token_id or eos_token_id in config.json";
                return Err(EvaluationError::request(place, what));
            };
            context.push(prefix);
        }
        self.within_positions(tokenization, context, continuation, place)
    }

    fn joint(
        &self,
        context: &str,
        continuation: &str,
    ) -> std::result::Result<[Vec<u32>; 2], EncodeError> {
        if context.is_empty() {
            let mut tokens = self.tokenizer.encode(continuation, SpecialTokens::LeftOut)?;
            let prefix = self.prefix.map(|(prefix, _)| prefix);
            let begins = prefix.is_some() && tokens.first().copied() == prefix;
            let rest = tokens.split_off(usize::from(begins));
            return Ok([tokens, rest]);
        }
        let kept = context.trim_end_matches(is_space);
        let special = |text: &str| match self.prefix {
            Some((_, prefix)) if text.starts_with(prefix) => SpecialTokens::LeftOut,
            _ => SpecialTokens::Added,
        };
        let whole = format!("{context}{continuation}");
        let mut whole = self.tokenizer.encode(&whole, special(&whole))?;
        let context = self.tokenizer.encode(kept, special(kept))?;
        let rest = whole.split_off(context.len().min(whole.len()));
        Ok([context, rest])
    }

    fn separate(
        &self,
        prompt: &Prompt,
        continuation: &str,
    ) -> std::result::Result<[Vec<u32>; 2], EncodeError> {
        let encode = |text: &str| self.tokenizer.encode(text, SpecialTokens::LeftOut);
        let mut context = self.tokenizer.encode(&prompt.preamble, SpecialTokens::Added)?;
        if context.len() > 1 && self.end.is_some() && context.last().copied() == self.end {
            context.pop();
        }
        context.extend(encode(&prompt.context)?);
        let needs_space = !continuation.starts_with(' ') && encode(" a")?.len() == 1;
        let space = if needs_space { " " } else { "" };
        Ok([context, encode(&format!("{space}{continuation}"))?])
    }

    /// Drops tokens on the left if there are too many. The model never reads the last token;
    /// lm-eval counts it all the same, LLM Foundry does not.
    fn within_positions(
        &self,
        tokenization: Tokenization,
        mut context: Vec<u32>,
        continuation: Vec<u32>,
        place: &str,
    ) -> Result<Request> {
        let most = self.positions.map_or(usize::MAX, |positions| match tokenization {
            Tokenization::Joint => positions.saturating_add(1),
            Tokenization::Separate => positions,
        });
        if continuation.len() >= most {
            let (most, found) = (most.saturating_sub(1), continuation.len());
            let what = format!(
                "expected a continuation of at most {most} tokens behind its context, found {found}"
            );
            return Err(EvaluationError::request(place, what));
        }
        let left_out = (context.len() + continuation.len()).saturating_sub(most);
        context.drain(..left_out);
        let first = context.len();
        context.extend(continuation);
        Ok(Request { tokens: context, first, left_out })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A token for each byte, and a token (1000) for every "ab", which may cross a border; `<`
    /// begins a text.
    struct Bytes;

    const BEGIN: u32 = b'<' as u32;

    impl Encode for Bytes {
        fn encode(
            &self,
            text: &str,
            special: SpecialTokens,
        ) -> std::result::Result<Vec<u32>, EncodeError> {
            if text.contains('!') {
                return Err("no exclamations".into());
            }
            let begin = (special == SpecialTokens::Added).then_some(BEGIN);
            let mut tokens: Vec<u32> = begin.into_iter().collect();
            let mut rest = text;
            while let Some(first) = rest.bytes().next() {
                let merged = rest.starts_with("ab") || rest.starts_with(" a");
                tokens.push(if merged { 1000 } else { u32::from(first) });
                rest = &rest[if merged { 2 } else { 1 }..];
            }
            Ok(tokens)
        }
    }

    fn vocabulary(positions: Option<usize>) -> Vocabulary<'static> {
        Vocabulary {
            tokenizer: &Bytes,
            prefix: Some((BEGIN, "<")),
            end: Some(u32::from(b'>')),
            positions,
        }
    }

    fn request(
        vocabulary: Vocabulary<'_>,
        tokenization: Tokenization,
        [preamble, context, continuation]: [&str; 3],
    ) -> Result<Request> {
        let delimiters = Delimiters { answer: " ".to_owned(), examples: "\n".to_owned() };
        let prompt = Prompt { preamble: preamble.to_owned(), context: context.to_owned() };
        vocabulary.request(tokenization, &delimiters, &prompt, continuation, "t: row 1")
    }

    fn split(request: &Request) -> (&[u32], &[u32]) {
        request.tokens.split_at(request.first)
    }

    const fn byte(letter: u8) -> u32 {
        letter as u32
    }

    #[test]
    fn both_at_once_may_share_a_token_at_the_border() {
        let joint =
            |texts| request(vocabulary(None), Tokenization::Joint, texts).expect("a request");
        // The spaces at the end of the context belong to the continuation: "x" | "  ", then " ab".
        let asked = joint(["p", "x  ", "bb"]);
        assert_eq!(
            split(&asked),
            (
                &[BEGIN, byte(b'p'), byte(b'x')][..],
                &[byte(b' '), byte(b' '), byte(b' '), byte(b'b'), byte(b'b')][..]
            )
        );
        // " a" is one token across the delimiter.
        assert_eq!(split(&joint(["", "x", "ac"])).1, [1000, byte(b'c')]);
        // A text that begins with the prefix token gets no second one.
        assert_eq!(split(&joint(["", "<x", "y"])).0, [BEGIN, byte(b'x')]);
    }

    #[test]
    fn an_empty_context_is_the_prefix() {
        let joint =
            |texts| request(vocabulary(None), Tokenization::Joint, texts).expect("a request");
        assert_eq!(split(&joint(["", "", "y"])), (&[BEGIN][..], &[byte(b' '), byte(b'y')][..]));
        let delimiters = Delimiters { answer: String::new(), examples: String::new() };
        let prompt = Prompt { preamble: String::new(), context: String::new() };
        let own =
            vocabulary(None).request(Tokenization::Joint, &delimiters, &prompt, "<y", "t").unwrap();
        assert_eq!(split(&own), (&[BEGIN][..], &[byte(b'y')][..]));
        let nameless = Vocabulary { prefix: None, ..vocabulary(None) };
        let wrong = request(nameless, Tokenization::Joint, ["", "", "y"]).unwrap_err().to_string();
        assert!(wrong.starts_with("t: row 1: the context is empty"), "{wrong}");
    }

    #[test]
    fn each_by_itself_shares_no_token() {
        let separate =
            |texts| request(vocabulary(None), Tokenization::Separate, texts).expect("a request");
        let asked = separate(["q>", "xa", "b"]);
        // The end of a sequence behind the preamble is removed; " a" is a token, so the answer gets
        // a space.
        assert_eq!(
            split(&asked),
            (&[BEGIN, byte(b'q'), byte(b'x'), byte(b'a')][..], &[byte(b' '), byte(b'b')][..])
        );
        assert_eq!(split(&separate(["", "x", " b"])).1, [byte(b' '), byte(b'b')]);
    }

    #[test]
    fn what_is_too_long_loses_its_left() {
        let joint =
            |positions, texts| request(vocabulary(Some(positions)), Tokenization::Joint, texts);
        let asked = joint(3, ["", "vwxyz", "b"]).expect("a request");
        assert_eq!(
            (split(&asked), asked.left_out),
            ((&[byte(b'y'), byte(b'z')][..], &[byte(b' '), byte(b'b')][..]), 4)
        );
        assert_eq!(asked.continuation_tokens(), 2);
        let wrong = joint(3, ["", "x", "bbb"]).unwrap_err().to_string();
        assert_eq!(
            wrong,
            "t: row 1: expected a continuation of at most 3 tokens behind its context, found 4"
        );
        let separate =
            |positions, texts| request(vocabulary(Some(positions)), Tokenization::Separate, texts);
        let asked = separate(3, ["", "vwxyz", "b"]).expect("a request");
        assert_eq!(split(&asked), (&[byte(b'z')][..], &[byte(b' '), byte(b'b')][..]));
        assert!(separate(2, ["", "x", "b"]).is_err());
    }

    #[test]
    fn a_tokenizer_that_fails_is_told() {
        let error = request(vocabulary(None), Tokenization::Joint, ["", "x!", "b"]).unwrap_err();
        assert!(
            matches!(&error, EvaluationError::Tokenizer { place, source } if place == "t: row 1" && source.to_string() == "no exclamations")
        );
    }
}
