//! Prompts continued, one or many at once.

use std::num::NonZeroUsize;
use std::thread;

use tidemill_kernels::backend::NO_TOKEN;
use tidemill_kernels::{Backend, FloatEnvironment};

use crate::error::{ModelError, Result};
use crate::generation::{GenerationSettings, Incremental, Sampler, Sequences};
use crate::language_model::LanguageModel;
use crate::trainable::Device;

/// Logits that are worth a thread of their own to choose from: a thread's start takes as long as some thousands.
const LOGITS_PER_THREAD: usize = 1 << 17;

/// What is continued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prompt<'a> {
    /// At least one token.
    pub tokens: &'a [u32],
    /// Which of the seed's streams of draws is the prompt's, whatever it is batched with: how often the same tokens were
    /// asked before, so that equal prompts draw apart, and any other draws what it would alone, which is 0.
    pub index: u64,
}

/// Continues `prompt`; returns the new tokens alone, which end where the model's learned positions do. `sequences` forgets
/// what it held; `on_token` sees each new token as it is chosen.
///
/// # Errors
/// An empty prompt or one that there is no room or are no positions for, a token outside the vocabulary, a setting that chooses nothing, logits
/// that are not finite, or a device that fails.
pub fn generate<B: Backend, Body: Incremental<B>>(
    device: &mut Device<'_, B>,
    sequences: &mut Sequences<'_, B, Body>,
    prompt: &[u32],
    settings: &GenerationSettings,
    mut on_token: impl FnMut(u32),
) -> Result<Vec<u32>> {
    let prompt = Prompt { tokens: prompt, index: 0 };
    let written =
        generate_batch(device, sequences, &[prompt], settings, |_, token| on_token(token))?;
    Ok(written.into_iter().flatten().collect())
}

/// Continues several prompts at once; returns the new tokens of each, which are to the bit those that it would get alone.
/// `on_token` sees each new token with the place of its prompt in `prompts`.
///
/// Sequences that have ended are computed on with the others, and what they say is ignored, until half of them have: then the
/// rest move together, or earlier where one has no room left. Moving costs a copy of everything remembered and a new recording, which is so paid but a few times.
///
/// # Errors
/// As [`generate`]; more prompts than there is room for.
pub fn generate_batch<B: Backend, Body: Incremental<B>>(
    device: &mut Device<'_, B>,
    sequences: &mut Sequences<'_, B, Body>,
    prompts: &[Prompt<'_>],
    settings: &GenerationSettings,
    mut on_token: impl FnMut(usize, u32),
) -> Result<Vec<Vec<u32>>> {
    let vocab_size = sequences.model().vocab_size();
    let mut writers = prompts
        .iter()
        .enumerate()
        .map(|(place, prompt)| Writer::new(place, prompt, settings, sequences.model()))
        .collect::<Result<Vec<_>>>()?;
    writers.sort_by_key(|writer| std::cmp::Reverse(prompts[writer.place].tokens.len()));
    let mut written = vec![Vec::new(); prompts.len()];
    if prompts.is_empty() {
        return Ok(written);
    }
    sequences.begin(device, writers.len())?;
    let tokens: Vec<_> = writers.iter().map(|writer| prompts[writer.place].tokens).collect();
    sequences.check(&tokens)?;
    // The last new token is nobody's past.
    let lengths = writers.iter().zip(&tokens);
    let lengths = lengths.map(|(writer, tokens)| tokens.len() + writer.most.saturating_sub(1));
    let longest = lengths.max().unwrap_or(0);
    if longest > sequences.room().positions {
        let expected = format!("at most {}", sequences.room().positions);
        return Err(ModelError::config("tokens of prompt and answer", expected, longest));
    }
    if settings.max_new_tokens == 0 {
        return Ok(written);
    }
    sequences.advance(device, &tokens)?;
    loop {
        if !settings.sampling.takes_likeliest()
            || !take_likeliest(&mut writers, &sequences.likeliest(device)?)
        {
            choose(&mut writers, sequences.logits(device)?, vocab_size)?;
        }
        for writer in writers.iter_mut().filter(|writer| !writer.done) {
            let tokens = &mut written[writer.place];
            tokens.push(writer.token);
            on_token(writer.place, writer.token);
            writer.done = tokens.len() == writer.most || settings.stop_token == Some(writer.token);
        }
        let unfinished = writers.iter().filter(|writer| !writer.done).count();
        if unfinished == 0 {
            return Ok(written);
        }
        // One that has ended at the model's last position cannot be computed on.
        let is_full = |(place, writer): (usize, &Writer)| writer.done && sequences.is_full(place);
        if unfinished * 2 <= writers.len() || writers.iter().enumerate().any(is_full) {
            let places = writers.iter().enumerate().filter(|(_, writer)| !writer.done);
            let kept: Vec<usize> = places.map(|(place, _)| place).collect();
            sequences.keep(device, &kept)?;
            writers.retain(|writer| !writer.done);
        }
        let tokens: Vec<[u32; 1]> = writers.iter().map(|writer| [writer.token]).collect();
        let tokens: Vec<&[u32]> = tokens.iter().map(|token| &token[..]).collect();
        sequences.advance(device, &tokens)?;
    }
}

/// One sequence that is being written.
struct Writer {
    /// Its place in the prompts.
    place: usize,
    sampler: Sampler,
    /// New tokens at most.
    most: usize,
    /// The newest token.
    token: u32,
    done: bool,
}

impl Writer {
    fn new<Body>(
        place: usize,
        prompt: &Prompt<'_>,
        settings: &GenerationSettings,
        model: &LanguageModel<Body>,
    ) -> Result<Self> {
        model.check_prompt(prompt.tokens)?;
        let mut sampler =
            Sampler::new(settings.sampling.clone(), prompt.index, model.vocab_size())?;
        sampler.saw(prompt.tokens);
        let most = model.most_new_tokens(prompt.tokens.len(), settings.max_new_tokens);
        Ok(Self { place, sampler, most, token: 0, done: false })
    }

    fn choose(&mut self, logits: &[f32]) -> Result<()> {
        if !self.done {
            self.token = self.sampler.next(logits)?;
        }
        Ok(())
    }
}

/// Gives every writer the likeliest token, which a device has chosen; answers false where logits must say what is wrong.
fn take_likeliest(writers: &mut [Writer], likeliest: &[u32]) -> bool {
    let mut unfinished = writers.iter_mut().zip(likeliest).filter(|(writer, _)| !writer.done);
    unfinished.all(|(writer, &token)| {
        writer.token = token;
        token != NO_TOKEN
    })
}

/// The next token of every writer from `logits[b, v]`; each chooses for itself, so threads change nothing.
fn choose(writers: &mut [Writer], logits: &[f32], vocab_size: usize) -> Result<()> {
    let cores = thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let threads = (logits.len() / LOGITS_PER_THREAD).clamp(1, cores);
    let choose_all = |writers: &mut [Writer], logits: &[f32]| {
        // The caller's thread may be an embedder's, and the others inherit from it.
        let _standard = FloatEnvironment::standard();
        let mut pairs = writers.iter_mut().zip(logits.chunks_exact(vocab_size));
        pairs.try_for_each(|(writer, logits)| writer.choose(logits))
    };
    if threads == 1 {
        return choose_all(writers, logits);
    }
    let share = writers.len().div_ceil(threads);
    let shares = writers.chunks_mut(share).zip(logits.chunks(share * vocab_size));
    thread::scope(|scope| {
        let choosing: Vec<_> = shares
            .map(|(writers, logits)| scope.spawn(move || choose_all(writers, logits)))
            .collect();
        choosing.into_iter().try_for_each(|chosen| match chosen.join() {
            Ok(chosen) => chosen,
            Err(panic) => std::panic::resume_unwind(panic),
        })
    })
}
