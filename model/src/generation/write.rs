//! Continues prompts, one or many at once.

use std::num::NonZeroUsize;
use std::thread;

use tidemill_kernels::backend::{MemoryPlace, NO_TOKEN};
use tidemill_kernels::{Backend, FloatEnvironment};

use crate::error::{ModelError, Result};
use crate::generation::sampling::Choice;
use crate::generation::{GenerationSettings, Sampler, Sequences};
use crate::language_model::LanguageModel;
use crate::trainable::Device;

/// The number of logits above which choosing tokens on another thread pays: a thread starts in the
/// time of some thousands.
const LOGITS_PER_THREAD: usize = 1 << 17;

/// A prompt to continue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prompt<'a> {
    /// At least one token.
    pub tokens: &'a [u32],
    /// Selects the stream of the seed that the prompt's draws come from, independent of the batch.
    /// Equal prompts need different indices to get different draws: use 0 for the first, 1 for the
    /// second and so on.
    pub index: u64,
}

/// Continues `prompt`. Returns the new tokens alone, which end where the model's learned positions
/// do. `sequences` drops its earlier contents; `on_token` is called with each new token as it is
/// chosen.
///
/// # Errors
/// An empty prompt, or one that exceeds the room or the model's positions; a token outside the
/// vocabulary; a setting that no token can be chosen by; logits that are not finite; or a device
/// that fails.
pub fn generate<B: Backend>(
    device: &mut Device<'_, B>,
    sequences: &mut Sequences<'_, B>,
    prompt: &[u32],
    settings: &GenerationSettings,
    mut on_token: impl FnMut(u32),
) -> Result<Vec<u32>> {
    let prompt = Prompt { tokens: prompt, index: 0 };
    let on_written = |_, written: Written<'_>| {
        if let Written::Token(token) = written {
            on_token(token);
        }
    };
    let written = generate_batch(device, sequences, &[prompt], settings, on_written)?;
    Ok(written.into_iter().flatten().collect())
}

/// Progress of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Written<'a> {
    /// A new token.
    Token(u32),
    /// The answer has ended: all of its new tokens.
    Answer(&'a [u32]),
}

/// Continues several prompts, as many at once as there is room for. Returns the new tokens of each,
/// which are to the bit those that the prompt would get alone. `on_written` receives each
/// [`Written`] with the place of its prompt in `prompts`.
///
/// The first prompts that fit are sorted by length, the longest first. When an answer ends while
/// other prompts wait, the next prompt takes its place: it is read in a sequence of its own, and
/// its state is copied to the free place.
///
/// A step computes all sequences, also those that have just ended; prompts enter behind it. A device
/// with memory of its own begins it before the host has read the most likely tokens.
///
/// When no prompt waits, ended sequences are still computed with the others and their tokens
/// ignored, until half of the sequences have ended. Then the others move to the front. A move
/// copies all states and needs a new recording, so this limits the number of moves.
///
/// # Errors
/// As [`generate`].
pub fn generate_batch<B: Backend>(
    device: &mut Device<'_, B>,
    sequences: &mut Sequences<'_, B>,
    prompts: &[Prompt<'_>],
    settings: &GenerationSettings,
    on_written: impl FnMut(usize, Written<'_>),
) -> Result<Vec<Vec<u32>>> {
    let model = sequences.model();
    // All prompts are checked before any is continued.
    for prompt in prompts {
        model.check_prompt(prompt.tokens)?;
        // The last new token is never read as input, so that it needs no position.
        let most = model.most_new_tokens(prompt.tokens.len(), settings.max_new_tokens);
        let positions = prompt.tokens.len() + most.saturating_sub(1);
        if positions > sequences.capacity().positions {
            let expected = format!("at most {}", sequences.capacity().positions);
            return Err(ModelError::config("tokens of prompt and answer", expected, positions));
        }
    }
    settings.sampling.check()?;
    let mut writing =
        Writing { prompts, settings, on_written, answers: vec![Vec::new(); prompts.len()] };
    if prompts.is_empty() || settings.max_new_tokens == 0 {
        return Ok(writing.answers);
    }
    let (together, mut waiting) =
        prompts.split_at(prompts.len().min(sequences.capacity().sequences));
    let slots = (0..together.len()).map(|index| writing.slot(index, model));
    let mut slots = slots.collect::<Result<Vec<_>>>()?;
    slots.sort_by_key(|slot| std::cmp::Reverse(prompts[slot.prompt].tokens.len()));
    sequences.begin(device, slots.len())?;
    let tokens: Vec<_> = slots.iter().map(|slot| prompts[slot.prompt].tokens).collect();
    sequences.advance(device, &tokens)?;
    let mut entering = None;
    loop {
        let has_stepped = writing.choose(device, sequences, &mut slots)?;
        let unfinished = slots.iter().filter(|slot| !slot.done).count();
        if unfinished == 0 && waiting.is_empty() {
            return Ok(writing.answers);
        }
        if waiting.is_empty() && unfinished * 2 <= slots.len() {
            let places = slots.iter().enumerate().filter(|(_, slot)| !slot.done);
            let kept: Vec<usize> = places.map(|(place, _)| place).collect();
            sequences.keep(device, &kept)?;
            slots.retain(|slot| !slot.done);
        }
        if unfinished > 0 && !has_stepped {
            let tokens: Vec<u32> = slots.iter().map(|slot| slot.token).collect();
            sequences.step_back_where_full();
            sequences.write(device, &tokens)?;
        }
        for (place, slot) in slots.iter_mut().enumerate().filter(|(_, slot)| slot.done) {
            let Some((_, others)) = waiting.split_first() else { break };
            *slot = writing.slot(prompts.len() - waiting.len(), model)?;
            waiting = others;
            let entering = match &mut entering {
                Some(entering) => entering,
                None => entering.insert(sequences.one_more(device)?),
            };
            entering.begin(device, 1)?;
            entering.advance(device, &[prompts[slot.prompt].tokens])?;
            sequences.adopt(device, place, entering)?;
        }
    }
}

/// The prompts, and the tokens written so far.
struct Writing<'a, F> {
    prompts: &'a [Prompt<'a>],
    settings: &'a GenerationSettings,
    on_written: F,
    answers: Vec<Vec<u32>>,
}

impl<F: FnMut(usize, Written<'_>)> Writing<'_, F> {
    /// A slot for the prompt of this index.
    fn slot<B: Backend>(&self, index: usize, model: &LanguageModel<B>) -> Result<Slot> {
        Slot::new(index, &self.prompts[index], self.settings, model)
    }

    /// Appends the next token of each slot that has not ended to its answer. Returns whether the
    /// sequences already have these tokens.
    fn choose<B: Backend>(
        &mut self,
        device: &mut Device<'_, B>,
        sequences: &mut Sequences<'_, B>,
        slots: &mut [Slot],
    ) -> Result<bool> {
        for slot in slots.iter_mut().filter(|slot| !slot.done) {
            slot.uniform = slot.sampler.uniform();
        }
        let choice = self.settings.sampling.choice();
        let has_stepped = choice == Choice::Likeliest
            && device.backend.memory() == MemoryPlace::Device
            && self.goes_on(slots);
        let tokens = match choice {
            Choice::Likeliest if has_stepped => sequences.write_likeliest(device)?,
            Choice::Likeliest => sequences.likeliest(device)?,
            Choice::Draw(settings) => {
                let uniforms: Vec<f64> = slots.iter().map(|slot| slot.uniform).collect();
                sequences.draw(device, &uniforms, &settings)?
            }
            Choice::OfHost => vec![NO_TOKEN; slots.len()],
        };
        // A step that has begun has left a fault where even an ended sequence has no token.
        if !take(slots, &tokens) || has_stepped && tokens.contains(&NO_TOKEN) {
            let vocab_size = sequences.model().vocab_size();
            let logits = match choice {
                Choice::OfHost => sequences.logits(device)?,
                Choice::Likeliest | Choice::Draw(_) => sequences.formed_logits(device)?,
            };
            // With the most likely tokens this is an error: the device chooses where all logits are
            // finite.
            choose(slots, logits, vocab_size)?;
        }
        for slot in slots.iter_mut().filter(|slot| !slot.done) {
            let answer = &mut self.answers[slot.prompt];
            answer.push(slot.token);
            (self.on_written)(slot.prompt, Written::Token(slot.token));
            slot.done = answer.len() == slot.most || self.settings.stop_token == Some(slot.token);
            if slot.done {
                (self.on_written)(slot.prompt, Written::Answer(answer));
            }
        }
        Ok(has_stepped)
    }

    /// Whether some answer has room for more than the next token.
    fn goes_on(&self, slots: &[Slot]) -> bool {
        let goes_on = |slot: &Slot| !slot.done && self.answers[slot.prompt].len() + 1 < slot.most;
        slots.iter().any(goes_on)
    }
}

/// A place of the batch, and the sequence that is being written in it.
struct Slot {
    /// The index of its prompt.
    prompt: usize,
    sampler: Sampler,
    /// The most new tokens.
    most: usize,
    /// Chooses the next token.
    uniform: f64,
    /// The newest token; [`NO_TOKEN`] where the device has chosen none and the host has yet to
    /// choose.
    token: u32,
    done: bool,
}

impl Slot {
    fn new<B: Backend>(
        index: usize,
        prompt: &Prompt<'_>,
        settings: &GenerationSettings,
        model: &LanguageModel<B>,
    ) -> Result<Self> {
        model.check_prompt(prompt.tokens)?;
        let mut sampler =
            Sampler::new(settings.sampling.clone(), prompt.index, model.vocab_size())?;
        sampler.saw(prompt.tokens);
        let most = model.most_new_tokens(prompt.tokens.len(), settings.max_new_tokens);
        Ok(Self { prompt: index, sampler, most, uniform: 0.0, token: 0, done: false })
    }

    fn choose(&mut self, logits: &[f32]) -> Result<()> {
        if !self.done && self.token == NO_TOKEN {
            self.token = self.sampler.next_by(self.uniform, logits)?;
        }
        Ok(())
    }
}

/// Gives every slot that has not ended the token that the device has chosen. Returns false where
/// the host must choose a token, or report an error in the logits.
fn take(slots: &mut [Slot], tokens: &[u32]) -> bool {
    let mut has_all = true;
    for (slot, &token) in slots.iter_mut().zip(tokens).filter(|(slot, _)| !slot.done) {
        slot.token = token;
        has_all &= token != NO_TOKEN;
    }
    has_all
}

/// Chooses, from `logits[b, v]`, the next token of every slot that has none yet. Each slot has
/// its own draws, so the number of threads changes nothing.
fn choose(slots: &mut [Slot], logits: &[f32], vocab_size: usize) -> Result<()> {
    let cores = thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let threads = (logits.len() / LOGITS_PER_THREAD).clamp(1, cores);
    let choose_all = |slots: &mut [Slot], logits: &[f32]| {
        // The caller's thread may belong to an embedder, and threads started from it inherit its
        // floating-point environment.
        let _standard = FloatEnvironment::standard();
        let mut pairs = slots.iter_mut().zip(logits.chunks_exact(vocab_size));
        pairs.try_for_each(|(slot, logits)| slot.choose(logits))
    };
    if threads == 1 {
        return choose_all(slots, logits);
    }
    let share = slots.len().div_ceil(threads);
    let shares = slots.chunks_mut(share).zip(logits.chunks(share * vocab_size));
    thread::scope(|scope| {
        let choosing: Vec<_> =
            shares.map(|(slots, logits)| scope.spawn(move || choose_all(slots, logits))).collect();
        choosing.into_iter().try_for_each(|chosen| match chosen.join() {
            Ok(chosen) => chosen,
            Err(panic) => std::panic::resume_unwind(panic),
        })
    })
}
