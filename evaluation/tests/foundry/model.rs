//! A small random model, and a tokenizer that merges a space with the letter behind it.

use tidemill_evaluation::tokens::{Encode, EncodeError, SpecialTokens};

use crate::rules::Tokenizer;

const BEGIN: u32 = 0;
pub const END: u32 = 1;
/// Two special tokens come first, then bytes, then pairs of a space and a byte.
const BYTES: u32 = 2;
const SPACED: u32 = BYTES + 256;
pub const VOCABULARY: usize = SPACED as usize + 128;

/// Whether a space and a letter are one token, as in GPT-2; otherwise each byte is a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Letters {
    Spaced,
    Bytes,
}

/// Puts a token before and one behind every text, if special tokens are asked for.
pub struct Small(pub Letters);

impl Tokenizer for Small {
    fn tokens(&self, text: &str, with_special: bool) -> Vec<u32> {
        let mut tokens = if with_special { vec![BEGIN] } else { Vec::new() };
        let mut rest = text.as_bytes();
        while let [first, behind @ ..] = rest {
            rest = behind;
            match behind {
                [letter, behind @ ..]
                    if self.0 == Letters::Spaced
                        && *first == b' '
                        && letter.is_ascii_alphanumeric() =>
                {
                    tokens.push(SPACED + u32::from(*letter));
                    rest = behind;
                }
                _ => tokens.push(BYTES + u32::from(*first)),
            }
        }
        tokens.extend(with_special.then_some(END));
        tokens
    }

    fn end(&self) -> u32 {
        END
    }
}

impl Encode for Small {
    fn encode(&self, text: &str, special: SpecialTokens) -> Result<Vec<u32>, EncodeError> {
        Ok(self.tokens(text, special == SpecialTokens::Added))
    }
}

/// Random numbers (splitmix64: Steele, Lea and Flood, 2014).
pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((x ^ (x >> 31)) % bound as u64) as usize
    }

    /// From -1 to 1.
    fn number(&mut self) -> f64 {
        self.below(1 << 20) as f64 / f64::from(1 << 19) - 1.0
    }
}

const WIDTH: usize = 8;

/// A recurrent net: h = tanh(W h + embedding of the token), logits = U h + favour.
pub struct Model {
    recurrent: Vec<[f64; WIDTH]>,
    embedding: Vec<[f64; WIDTH]>,
    output: Vec<[f64; WIDTH]>,
    favour: Vec<f64>,
}

impl Model {
    /// A model that prefers to write `favoured` tokens, so that greedy matches are not rare.
    pub fn new(seed: u64, favoured: &[u32]) -> Self {
        let mut random = Random(seed);
        let mut rows = |count: usize, scale: f64| -> Vec<[f64; WIDTH]> {
            let mut row = || std::array::from_fn(|_| scale * random.number());
            (0..count).map(|_| row()).collect()
        };
        let [recurrent, embedding, output] =
            [(WIDTH, 0.7), (VOCABULARY, 1.0), (VOCABULARY, 1.0)].map(|(n, scale)| rows(n, scale));
        let mut favour = vec![0.0; VOCABULARY];
        favoured.iter().for_each(|token| favour[*token as usize] = 12.0);
        Self { recurrent, embedding, output, favour }
    }

    /// The logits behind each token from place `first` on; empty for tokens before it.
    pub fn logits(&self, tokens: &[u32], first: usize) -> Vec<Vec<f64>> {
        let dot = |a: &[f64; WIDTH], b: &[f64; WIDTH]| a.iter().zip(b).map(|(a, b)| a * b).sum();
        let mut state = [0.0; WIDTH];
        let behind = tokens.iter().enumerate().map(|(place, &token)| {
            let embedding = &self.embedding[token as usize];
            state = std::array::from_fn(|row| {
                let from: f64 = dot(&self.recurrent[row], &state);
                (from + embedding[row]).tanh()
            });
            if place < first {
                return Vec::new();
            }
            let logit = |(row, favour): (_, &f64)| -> f64 { 3.0 * dot(row, &state) + favour };
            self.output.iter().zip(&self.favour).map(logit).collect()
        });
        behind.collect()
    }
}
