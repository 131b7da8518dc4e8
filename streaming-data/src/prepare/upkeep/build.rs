//! From listed inputs to shards and state: the one way, for a new data set and for an update.

use std::{
    collections::HashSet,
    ops::ControlFlow,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
        mpsc::{Receiver, RecvTimeoutError, channel, sync_channel},
    },
    thread,
    time::{Duration, SystemTime},
};

use super::{
    Changes,
    assembler::{Assembler, Step},
    cut::ContentCut,
    former::{FormerInputs, FormerRecords, Known, Places, known_texts},
    former_shards::{FormerShards, Reuse},
    part::PART_SUFFIX,
    record::WasRead,
    recorder::{Counts, Listed, Past, Recorder, Source},
    seen::{Look, SEEN_FILE, Seen},
    state::{Methods, PartEntry, State, Version, state_file},
    stored_settings::StoredSettings,
    wanted::{Fetching, Plan, Wanted},
};
use crate::{
    data_set::index::{STATE_FOLDER, ShardEntry, StateEntry},
    hash::ContentHash,
    prepare::{
        Dedup, DedupReport, DedupSettings, Phase, PrepareError, Progress, Reporting,
        choose::{
            admit::{LeftOut, Pass, Rules},
            duplicates::Collector,
        },
        data_report::{difference::difference, show::show},
        input::{
            find::{Input, path_bytes},
            format::Format,
        },
        output::{
            Output,
            shard::{Naming, ShardWriter},
        },
        pipeline::{
            Outcome,
            ahead::{Ahead, Next},
            batch::Batch,
            job::{Work, start_workers},
            job_queue::JobQueue,
        },
        together::{ask, gather, judge_records},
    },
};

/// Whether an input that looks as before is read all the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Verify {
    /// Inputs that look unchanged are not read.
    #[default]
    No,
    /// Everything is read and compared.
    All,
}

/// The inputs of a build in addition to the documents.
pub(crate) struct Upkeep<'a> {
    pub settings: StoredSettings,
    pub tokenizer: ContentHash,
    pub dedup: DedupSettings,
    /// The previous version, if there is one, and what inputs looked like then.
    pub former: Option<(&'a Version, Seen)>,
    pub verify: Verify,
    /// Not later than the inputs were found.
    pub now: SystemTime,
}

/// Batches of tokens that wait for the shards before them.
const BATCHES_AHEAD: usize = 4;

/// How long tokens are waited for before the caller is asked whether to go on.
const MOMENT: Duration = Duration::from_millis(100);

type Report<'a> = dyn FnMut(Progress) -> ControlFlow<()> + 'a;

/// Builds all files but the index.
///
/// # Errors
/// As [`prepare`](crate::prepare::prepare()), and the errors of reading the previous version.
pub(crate) fn build(
    work: Work<'_>,
    upkeep: Upkeep<'_>,
    output: &mut dyn Output,
    progress: &mut Report<'_>,
) -> Result<(Outcome, DedupReport), PrepareError> {
    if let Some(input) = work.inputs.iter().find(|input| input.format == Format::Mds) {
        return Err(PrepareError::InputNotUpdatable { path: input.path.clone() });
    }
    let former = upkeep.former.as_ref().map(|(version, _)| *version);
    let listing = Progress { phase: Phase::Comparing, ..Progress::default() };
    let go_on = &mut || ask(progress, listing);
    let inputs = former.map(|former| FormerInputs::of(former, go_on)).transpose()?;
    let inputs = inputs.unwrap_or_default();
    let are_known = former.is_some_and(|former| former.state.methods.agree_on_documents());
    let listed = list(&work, &upkeep, &inputs, are_known);
    let kept: HashSet<&[u8]> = of(&listed, Source::Former).map(|it| path_bytes(&it.path)).collect();
    let (known, places) = match former.filter(|_| are_known && kept.len() < inputs.inputs.len()) {
        Some(former) => known_texts(former, |path| !kept.contains(path), go_on)?,
        None => (Known::new(), Places::new()),
    };
    let mut changes = Changes {
        inputs_read: listed.len() as u64 - kept.len() as u64,
        inputs_kept: kept.len() as u64,
        inputs_gone: {
            let paths: HashSet<&[u8]> =
                listed.iter().map(|listed| path_bytes(&listed.input.path)).collect();
            inputs.inputs.keys().filter(|path| !paths.contains(&path[..])).count() as u64
        },
        ..Changes::default()
    };

    let records = former.map(FormerRecords::new);
    // Several processes compare the records once all are there.
    let peers = work.peers.filter(|_| upkeep.dedup.dedup != Dedup::None);
    let is_compared = upkeep.dedup.dedup != Dedup::None && peers.is_none();
    let reporting = work.rules.reporting;
    let compared = is_compared.then(|| Collector::new(upkeep.dedup, reporting));
    let past = Past { known: &known, records, places };
    let mut recorder = Recorder::new(&listed, work.rules.exclusions, past, compared)?;
    let read: Vec<Input> = of(&listed, Source::Input).cloned().collect();
    let pass = Pass::Record(upkeep.dedup.dedup, &known);
    let recording = Work { inputs: &read, rules: Rules { pass, ..work.rules }, ..work };
    let recorded = match read.is_empty() {
        true => Outcome::default(),
        false => gather(&recording, &mut recorder, progress)?,
    };
    let (mut spool, compared, seen, counts) = recorder.finish()?;
    drop(known);
    let bytes_total = read.iter().map(|input| input.bytes).sum();
    let sorting = Progress { phase: Phase::Sorting, bytes_total, ..Progress::default() };
    let mut verdicts = match (compared, peers) {
        (Some(compared), _) => Some(compared.finish(&mut || ask(progress, sorting))?),
        (None, Some(peers)) => {
            let how = (upkeep.dedup, reporting);
            Some(judge_records(peers, how, &mut spool, progress)?)
        }
        (None, None) => None,
    };
    let groups = verdicts.as_mut().and_then(|verdicts| verdicts.groups.take());

    let go_on = &mut || ask(progress, sorting);
    let plan = Plan::new(&mut spool, verdicts.as_ref(), &listed, go_on)?;
    changes.texts_read = counts.read;
    changes.texts_tokenized = plan.wanted.documents();
    changes.rejected = plan.rejected;
    changes.unnoticed.clone_from(&counts.unnoticed);
    let pass = Pass::Fetch(&plan.wanted);
    let fetching = Work { inputs: &plan.inputs, rules: Rules { pass, ..work.rules }, ..work };
    let shards = former.map(|former| {
        let reuse = match former.state.methods.encoder == Methods::own().encoder {
            true => Reuse::Whole,
            false => Reuse::Tokens,
        };
        FormerShards::new(former, &inputs.part_tokens, reuse)
    });
    let least = work.cut.seq_len as u64 + 1;
    let target = work.cut.shard_samples as u64 * work.cut.seq_len as u64;
    let cuts = (work.cut, ContentCut::new(target, least));
    let assembler = Assembler::new(spool.read()?, verdicts.as_ref(), shards, cuts, reporting);
    let mut built = assemble(fetching, &plan.wanted, assembler, former, output, progress)?;
    (changes.shards_kept, changes.shards_read) = (built.kept_shards, built.read_shards);
    let state = State::new(upkeep.settings, upkeep.tokenizer, built.parts);
    let bytes = state.to_bytes();
    let state = State::entry(&bytes);
    if reporting == Reporting::Files {
        let at_end = Progress { phase: Phase::Reporting, ..Progress::default() };
        let go_on = &mut || ask(progress, at_end);
        let report = former.map(Version::report).transpose()?.flatten();
        let change_before = report.as_ref().and_then(|report| report.update.clone());
        let outcome = &mut built.outcome;
        show(&work, &mut outcome.left_out.tally, report, go_on)?;
        let compared = outcome.left_out.tally.compared();
        outcome.groups = groups.map(|groups| groups.report(compared));
        outcome.difference = match former {
            None => None,
            // It is the same version: it has the changes by the update that made it.
            Some(former) if former.is_of(&state, &outcome.shards) => change_before,
            Some(former) => {
                let verdicts = verdicts.as_ref();
                Some(difference(former, &mut spool, verdicts, &outcome.shards, go_on)?)
            }
        };
    }
    output.put(&state.file, bytes)?;
    output.put(&format!("{STATE_FOLDER}/{SEEN_FILE}"), seen.to_bytes())?;
    let dedup = verdicts.map_or_else(DedupReport::default, |verdicts| verdicts.report());
    Ok((built.outcome.in_all(recorded, counts, state, changes), dedup))
}

/// The inputs whose records come from there.
fn of<'a>(listed: &'a [Listed<'a>], source: Source) -> impl Iterator<Item = &'a Input> {
    listed.iter().filter(move |listed| listed.source == source).map(|listed| listed.input)
}

/// Which inputs are read.
fn list<'a>(
    work: &Work<'a>,
    upkeep: &Upkeep<'_>,
    former: &FormerInputs,
    are_known: bool,
) -> Vec<Listed<'a>> {
    let list = |input: &'a Input| {
        let path = path_bytes(&input.path);
        let look = Look::of(input.bytes, input.changed, upkeep.now);
        let former = former.inputs.get(path).filter(|_| are_known);
        let seen = upkeep.former.as_ref().map(|(_, seen)| seen);
        let told = former.map(|former| former.end.digest).filter(|&digest| {
            look.zip(seen).is_some_and(|(look, seen)| seen.tells(path, look, digest))
        });
        let is_as_before = told.is_some()
            && upkeep.verify == Verify::No
            && former.is_some_and(|former| {
                let is_excluded = |&(place, source): &(u64, u128)| {
                    let place = (input.format != Format::Text).then_some(place);
                    let hash = || ContentHash::of_bits(source);
                    work.rules.exclusions.exclude_hashed(&input.path, place, hash)
                };
                // Nothing is known of a document that was on the list but its hash.
                former.end.read == WasRead::Whole && former.excluded.iter().all(is_excluded)
            });
        let source = if is_as_before { Source::Former } else { Source::Input };
        Listed { input, look, told, source }
    };
    work.inputs.iter().map(list).collect()
}

/// The outcome of a build.
#[derive(Default)]
struct Built {
    outcome: Outcome,
    parts: Vec<PartEntry>,
    kept_shards: u64,
    read_shards: u64,
}

/// Reads the texts that are wanted on threads, encodes rows on others, and puts everything in order on this
/// one.
fn assemble(
    work: Work<'_>,
    wanted: &Wanted,
    assembler: Assembler<'_>,
    former: Option<&Version>,
    output: &mut dyn Output,
    progress: &mut Report<'_>,
) -> Result<Built, PrepareError> {
    let bytes_total = work.inputs.iter().map(|input| input.bytes).sum();
    let phase = Phase::Tokenizing;
    let position = Mutex::new(Progress { phase, bytes_total, ..Progress::default() });
    let (is_stopped, jobs) = (AtomicBool::new(false), JobQueue::default());
    thread::scope(|scope| {
        let (sender, batches) = sync_channel(BATCHES_AHEAD);
        let mut fetching = Fetching::new(wanted, work.inputs, sender);
        let (position, is_stopped, jobs, work) = (&position, &is_stopped, &jobs, &work);
        let fetch = scope.spawn(move || {
            let mut report = |now| {
                *position.lock().unwrap_or_else(PoisonError::into_inner) = now;
                match is_stopped.load(Ordering::Relaxed) {
                    true => ControlFlow::Break(()),
                    false => ControlFlow::Continue(()),
                }
            };
            match work.inputs.is_empty() {
                true => Ok(Outcome::default()),
                false => gather(work, &mut fetching, &mut report),
            }
        });
        let (results, encoded) = channel();
        // Every thread then ends after its current job, also on an error.
        let _closed_at_end = jobs.close_at_end();
        let started = start_workers(scope, work, jobs, &results);
        started.inspect_err(|_| is_stopped.store(true, Ordering::Relaxed))?;
        let assembly = Assembly {
            work,
            former,
            writer: ShardWriter::new(work.format, output, Naming::Content),
            items: Ahead::new(jobs, encoded),
            batches,
            batch: Batch::default(),
            taken: (0, 0),
            position,
            documents: 0,
            samples: 0,
            progress,
            parts: Vec::new(),
        };
        let built = assembly.run(assembler);
        // Where all is built, that thread is at its end.
        is_stopped.store(built.is_err(), Ordering::Relaxed);
        // A panic of that thread is a bug of this program: panics of tokenizers are caught.
        let fetched = fetch.join().expect("what reads texts does not panic");
        match (built, fetched) {
            // It waited in vain for texts.
            (Err(PrepareError::Interrupted), Err(error)) | (Ok(_), Err(error)) => Err(error),
            (Err(error), _) => Err(error),
            (Ok(built), Ok(fetched)) => {
                let mut outcome = fetched;
                outcome.documents = built.outcome.documents;
                outcome.tokens = built.outcome.tokens;
                outcome.dropped_tokens = built.outcome.dropped_tokens;
                outcome.shards = built.outcome.shards;
                outcome.left_out.tally = built.outcome.left_out.tally;
                Ok(Built { outcome, ..built })
            }
        }
    })
}

/// The calling thread's part.
struct Assembly<'a> {
    work: &'a Work<'a>,
    former: Option<&'a Version>,
    writer: ShardWriter<'a>,
    /// Between row groups there are shards of the previous version.
    items: Ahead<'a, &'a ShardEntry>,
    batches: Receiver<Batch>,
    batch: Batch,
    /// Documents and tokens of the batch that were taken.
    taken: (usize, usize),
    position: &'a Mutex<Progress>,
    documents: u64,
    samples: u64,
    progress: &'a mut Report<'a>,
    parts: Vec<PartEntry>,
}

impl<'a> Assembly<'a> {
    fn run(mut self, mut assembler: Assembler<'a>) -> Result<Built, PrepareError> {
        self.report()?;
        loop {
            let step = assembler.next(&mut |tokens| self.fetch(tokens))?;
            self.documents = assembler.totals.documents;
            match step {
                Step::Rows(rows) => {
                    self.items.encode(rows);
                    self.write_until(2 * self.work.workers as u64)?;
                }
                Step::Keep(shard) => {
                    self.items.keep(shard);
                    self.write_until(u64::MAX)?;
                }
                Step::Part(bytes) => self.put_part(bytes)?,
                Step::End => break,
            }
        }
        self.write_until(0)?;
        self.writer.close()?;
        while !self.writer.are_stored()? {
            self.report()?;
        }
        self.report()?;
        let totals = assembler.totals;
        let left_out =
            LeftOut { tally: assembler.tally.take().unwrap_or_default(), ..LeftOut::default() };
        let outcome = Outcome {
            left_out,
            documents: totals.documents,
            tokens: totals.tokens,
            dropped_tokens: totals.dropped_tokens,
            shards: self.writer.written(),
            ..Outcome::default()
        };
        Ok(Built {
            outcome,
            parts: self.parts,
            kept_shards: totals.kept_shards,
            read_shards: assembler.opened_shards(),
        })
    }

    /// Appends the tokens of the next document that was read for them.
    fn fetch(&mut self, tokens: &mut Vec<u32>) -> Result<(), PrepareError> {
        while self.taken.0 == self.batch.lengths.len() {
            self.batch = loop {
                match self.batches.recv_timeout(MOMENT) {
                    Ok(batch) => break batch,
                    Err(RecvTimeoutError::Timeout) => self.report()?,
                    // The thread that reads texts has ended, and reports why.
                    Err(RecvTimeoutError::Disconnected) => return Err(PrepareError::Interrupted),
                }
            };
            self.taken = (0, 0);
            self.report()?;
        }
        let (document, from) = self.taken;
        let until = from + self.batch.lengths[document];
        tokens.extend_from_slice(&self.batch.tokens[from..until]);
        self.taken = (document + 1, until);
        Ok(())
    }

    /// Writes the next items, until at most `most` row groups are being encoded, or wait for one.
    fn write_until(&mut self, most: u64) -> Result<(), PrepareError> {
        while let Some(next) = self.items.next(most)? {
            match next {
                Next::Rows(rows) => {
                    while !self.writer.has_room_for(&rows)? {
                        self.report()?;
                    }
                    self.samples += rows.samples as u64;
                    self.writer.append(rows)?;
                }
                Next::Kept(shard) => self.keep(shard)?,
            }
            self.report()?;
        }
        Ok(())
    }

    /// Continues after a shard of the previous version.
    fn keep(&mut self, shard: &ShardEntry) -> Result<(), PrepareError> {
        let former = self.former.expect("a shard that is kept is of a version before");
        let file = self.writer.next_name(shard.hash)?;
        if !former.index.shards.iter().any(|shard| shard.file == file) {
            // The same content occurs more often than before.
            let content = former.read_shard(shard)?;
            self.writer.output().put(&file, content)?;
        }
        self.samples += shard.samples;
        self.writer.keep(ShardEntry { file, ..shard.clone() })
    }

    fn put_part(&mut self, bytes: Vec<u8>) -> Result<(), PrepareError> {
        let hash = ContentHash::of(&bytes);
        let (file, length) = (state_file(hash, PART_SUFFIX), bytes.len() as u64);
        self.parts.push(PartEntry { file: file.clone(), bytes: length, hash });
        self.writer.output().put(&file, bytes)
    }

    fn report(&mut self) -> Result<(), PrepareError> {
        let position = *self.position.lock().unwrap_or_else(PoisonError::into_inner);
        ask(
            self.progress,
            Progress { documents: self.documents, samples: self.samples, ..position },
        )
    }
}

impl Outcome {
    /// The outcome of both passes, where texts were read first for records and then for tokens.
    fn in_all(
        self,
        recorded: Outcome,
        counts: Counts,
        state: StateEntry,
        changes: Changes,
    ) -> Outcome {
        let mut outcome = self;
        outcome.empty = counts.empty;
        outcome.nulls = counts.nulls;
        outcome.skipped = recorded.skipped;
        outcome.broken = recorded.broken;
        outcome.broken.count = counts.broken;
        outcome.left_out.excluded = counts.excluded;
        outcome.left_out.filtered.rejected = counts.rejected;
        outcome.state = Some(state);
        outcome.changes = changes;
        outcome
    }
}
