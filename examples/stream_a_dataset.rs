//! Streams a text column of Parquet files through a timely program of yours, elastically, and resumes.
//!
//! ```text
//! cargo example stream_a_dataset                      # texts that it makes itself
//! cargo example stream_a_dataset -- FOLDER COLUMN
//! cargo run --release --example stream_a_dataset -- URL COLUMN    # with all features of the program, stores among them
//! ```
//!
//! The program counts the words of each step, 256 rows in a shuffled order, with ordinary timely operators. It does so
//! three times: with one worker; with three; and with two that are stopped half-way and gone on with by four, from a
//! cursor of a few bytes. The counts of every step are the same.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::num::NonZeroU64;
use std::ops::Range;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use arrow_array::cast::AsArray;
use arrow_array::{Array, ArrayRef, RecordBatch, StringArray};
use arrow_schema::DataType;
use parquet::arrow::ArrowWriter;
use tidemill::operators::{StreamData, StreamPlan};
use tidemill::streaming_data::DataSettings;
use tidemill::streaming_data::data_set::table::{
    Columns, RowBatch, Table, TableDecoder, TableSettings,
};
use tidemill::streaming_data::order::cursor::Cursor;
use tidemill::streaming_data::order::{ShuffleOrder, ShuffleSettings};
use timely::container::CapacityContainerBuilder;
use timely::dataflow::channels::pact::Exchange;
use timely::dataflow::operators::generic::operator::Operator;
use timely::dataflow::operators::vec::{Filter, Map};
use timely::dataflow::operators::{ConnectLoop, Feedback, Inspect};

const STEP_ROWS: NonZeroU64 = NonZeroU64::new(256).unwrap();
const READ_AHEAD_STEPS: NonZeroU64 = NonZeroU64::new(4).unwrap();

/// Words of each step, and how often they stand there.
type Counts = BTreeMap<u64, BTreeMap<String, u64>>;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let made = tempfile::tempdir()?;
    let (folder, column) = match &arguments[..] {
        [] => {
            make_texts(made.path())?;
            (made.path().to_owned(), "text")
        }
        [folder, column] => (folder.into(), column.as_str()),
        _ => anyhow::bail!("expected a folder or URL and the name of a column, or nothing"),
    };
    let columns = Columns::Named(vec![column.to_owned()]);
    let table = Table::open(&folder, &columns, &DataSettings::default())?;
    let shuffle = ShuffleSettings {
        order: ShuffleOrder::Window,
        window_samples: NonZeroU64::new(1024).context("not zero")?,
        seed: 17,
    };
    // An epoch and a half: epochs follow each other without a seam.
    let steps = (table.rows() * 3 / 2).div_ceil(STEP_ROWS.get()).min(200);
    println!("{} rows in {} shards, {steps} steps", table.rows(), table.shards().len());

    let one = count_words(&table, shuffle, 0..steps, 1)?;
    let three = count_words(&table, shuffle, 0..steps, 3)?;
    ensure!(one == three, "counts must not depend on the number of workers");

    let mut resumed = count_words(&table, shuffle, 0..steps / 2, 2)?;
    let start = Cursor::start(table.identity(shuffle));
    let cursor = Cursor { position: steps / 2 * STEP_ROWS.get(), ..start };
    let saved = serde_json::to_string(&cursor)?;
    println!("stopped after step {}: {saved}", steps / 2);
    // Later, in another process, on another machine: the same data, or an error that says what is otherwise.
    let cursor: Cursor = serde_json::from_str(&saved)?;
    cursor.check_resume(&table.identity(shuffle))?;
    let first = cursor.position / STEP_ROWS;
    resumed.extend(count_words(&table, shuffle, first..steps, 4)?);
    ensure!(one == resumed, "counts must not depend on stopping and resuming");

    let mut all: BTreeMap<&str, u64> = BTreeMap::new();
    for (word, count) in one.values().flatten() {
        *all.entry(word).or_default() += count;
    }
    let mut most: Vec<_> = all.into_iter().collect();
    most.sort_by_key(|&(word, count)| (std::cmp::Reverse(count), word));
    println!("the same words in every step, with 1, 3 and 2 + 4 workers; the most frequent:");
    for (word, count) in most.iter().take(5) {
        println!("  {count:>8} {word}");
    }
    Ok(())
}

/// Counts the words of each step, on so many workers.
fn count_words(
    table: &Table,
    shuffle: ShuffleSettings,
    steps: Range<u64>,
    workers: usize,
) -> Result<Counts> {
    // One decoder for all workers of a process: they share its threads and what it has decoded.
    let decoder = TableDecoder::new(table, shuffle, TableSettings::default())?;
    let plan = StreamPlan { steps, step_positions: STEP_ROWS, read_ahead_steps: READ_AHEAD_STEPS };
    let guards = timely::execute(timely::Config::process(workers), move |worker| {
        let counts = Rc::new(RefCell::new(Counts::new()));
        let failure = Rc::new(RefCell::new(None));
        let (counted, failed) = (Rc::clone(&counts), Rc::clone(&failure));
        worker.dataflow::<u64, _, _>(|scope| {
            let (done, progress) = scope.feedback::<Vec<()>>(1);
            let open = |positions, wake: Arc<dyn Fn() + Send + Sync>| {
                decoder.reader_with_wake(positions, move || wake())
            };
            scope
                .stream_data(open, progress, &plan)
                .flat_map(move |rows| {
                    match rows.map_err(|e| e.to_string()).and_then(|it| words(&it)) {
                        Ok(words) => words,
                        Err(error) => {
                            *failed.borrow_mut() = Some(error);
                            Vec::new()
                        }
                    }
                })
                // Each word is counted by one worker.
                .unary::<CapacityContainerBuilder<Vec<(u64, String)>>, _, _, _>(
                    Exchange::new(|word: &String| hash(word)),
                    "WithStep",
                    |_capability, _info| {
                        |input, output| {
                            input.for_each(|time, words| {
                                let mut session = output.session(&time);
                                for word in words.drain(..) {
                                    session.give((*time.time(), word));
                                }
                            });
                        }
                    },
                )
                .inspect(move |(step, word): &(u64, String)| {
                    let mut counts = counted.borrow_mut();
                    *counts.entry(*step).or_default().entry(word.clone()).or_default() += 1;
                })
                // What is counted is done: the source may read on.
                .filter(|_| false)
                .map(|_| ())
                .connect_loop(done);
        });
        while worker.step_or_park(None) {}
        (counts.take(), failure.take())
    });
    let guards = guards.map_err(anyhow::Error::msg)?;
    let mut all = Counts::new();
    for joined in guards.join() {
        let (counts, failure) = joined.map_err(anyhow::Error::msg)?;
        if let Some(failure) = failure {
            anyhow::bail!(failure);
        }
        for (step, words) in counts {
            let step = all.entry(step).or_default();
            for (word, count) in words {
                *step.entry(word).or_default() += count;
            }
        }
    }
    Ok(all)
}

/// The words of the only column.
fn words(rows: &RowBatch) -> Result<Vec<String>, String> {
    let column = rows.rows.column(0);
    let texts: Vec<&str> = match column.data_type() {
        DataType::Utf8 => column.as_string::<i32>().iter().flatten().collect(),
        DataType::LargeUtf8 => column.as_string::<i64>().iter().flatten().collect(),
        DataType::Utf8View => column.as_string_view().iter().flatten().collect(),
        other => return Err(format!("the column holds {other}, expected text")),
    };
    let words = texts.into_iter().flat_map(str::split_whitespace).map(str::to_lowercase);
    Ok(words.collect())
}

fn hash(word: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    word.hash(&mut hasher);
    hasher.finish()
}

/// Four files of short texts.
fn make_texts(folder: &Path) -> Result<()> {
    const WORDS: [&str; 8] = ["the", "tide", "turns", "a", "mill", "and", "grinds", "grain"];
    let text = |row: usize| -> String {
        let word = |at: usize| WORDS[(row * 31 + at * at * 7 + row / 13) % WORDS.len()];
        (0..3 + row % 9).map(word).collect::<Vec<_>>().join(" ")
    };
    for shard in 0..4 {
        let rows = (0..1500 + shard * 100).map(|row| text(shard * 10_000 + row));
        let texts: ArrayRef = Arc::new(StringArray::from_iter_values(rows));
        let batch = RecordBatch::try_from_iter([("text", texts)])?;
        let file = File::create(folder.join(format!("{shard}.parquet")))?;
        let mut writer = ArrowWriter::try_new(file, batch.schema(), None)?;
        writer.write(&batch)?;
        writer.close()?;
    }
    Ok(())
}
