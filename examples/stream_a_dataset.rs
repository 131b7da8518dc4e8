//! Streams a text column of Parquet files through a timely program of yours, elastically, and resumes.
//!
//! ```text
//! cargo run --release --example stream_a_dataset                                              # texts that it makes itself
//! cargo run --release --example stream_a_dataset -- FOLDER COLUMN
//! cargo run --release --example stream_a_dataset --features tidemill/remote -- URL COLUMN     # stores behind a network
//! ```
//!
//! The program counts the words of each step, 256 rows in a shuffled order, with ordinary timely
//! operators. It does so three times: with one worker; with three; and with two that are stopped
//! half-way and resumed by four, from a cursor of a few bytes. The counts of every step are the
//! same.

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

/// The words of each step, with their counts.
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
    // Later, in another process, on another machine: the same data, or an error that names the
    // difference.
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

/// Counts the words of each step, on a number of workers.
fn count_words(
    table: &Table,
    shuffle: ShuffleSettings,
    steps: Range<u64>,
    workers: usize,
) -> Result<Counts> {
    // One decoder for all workers of a process: they share its threads and the decoded rows.
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
                // The step is counted: the source may read on.
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
    let texts = texts(rows.rows.column(0).as_ref())?;
    let words = texts.into_iter().flatten().flat_map(str::split_whitespace);
    Ok(words.map(str::to_lowercase).collect())
}

/// The texts of a column, row by row. A writer may have stored repeated texts as indices into a
/// dictionary.
fn texts(column: &dyn Array) -> Result<Vec<Option<&str>>, String> {
    Ok(match column.data_type() {
        DataType::Utf8 => column.as_string::<i32>().iter().collect(),
        DataType::LargeUtf8 => column.as_string::<i64>().iter().collect(),
        DataType::Utf8View => column.as_string_view().iter().collect(),
        DataType::Dictionary(..) if column.null_count() == column.len() => {
            vec![None; column.len()]
        }
        DataType::Dictionary(..) => {
            let dictionary = column.as_any_dictionary();
            let values = texts(dictionary.values().as_ref())?;
            let keys = dictionary.normalized_keys().into_iter().enumerate();
            keys.map(|(row, key)| values[key].filter(|_| column.is_valid(row))).collect()
        }
        other => return Err(format!("the column holds {other}, expected text")),
    })
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

#[cfg(test)]
mod tests {
    use arrow_array::DictionaryArray;
    use arrow_array::types::Int8Type;

    use super::*;

    fn write(folder: &Path, texts: impl Array + 'static) -> Result<Table> {
        let texts: ArrayRef = Arc::new(texts);
        let batch = RecordBatch::try_from_iter_with_nullable([("text", texts, true)])?;
        std::fs::create_dir(folder)?;
        let file = File::create(folder.join("0.parquet"))?;
        let mut writer = ArrowWriter::try_new(file, batch.schema(), None)?;
        writer.write(&batch)?;
        writer.close()?;
        let columns = Columns::Named(vec!["text".to_owned()]);
        Ok(Table::open(folder, &columns, &DataSettings::default())?)
    }

    /// Rows 0 to 255, a step of their own, have no text at all; of the others each third has none.
    #[test]
    fn texts_of_a_dictionary_are_counted_as_those_of_a_plain_column() -> Result<()> {
        let made = tempfile::tempdir()?;
        let text = |row: usize| match row {
            0..256 => None,
            _ => (!row.is_multiple_of(3)).then(|| ["the tide", "turns", "", "a mill"][row % 4]),
        };
        let texts = || (0..700).map(text);
        let plain = write(&made.path().join("plain"), texts().collect::<StringArray>())?;
        let numbered = texts().collect::<DictionaryArray<Int8Type>>();
        let numbered = write(&made.path().join("numbered"), numbered)?;
        let as_stored =
            ShuffleSettings { order: ShuffleOrder::None, window_samples: NonZeroU64::MIN, seed: 1 };
        let counts = count_words(&numbered, as_stored, 0..3, 2)?;
        assert_eq!(counts, count_words(&plain, as_stored, 0..3, 1)?);
        assert_eq!(counts.keys().copied().collect::<Vec<_>>(), [1, 2]);
        assert!(counts[&1]["tide"] > 0 && counts[&2]["mill"] > 0, "{counts:?}");
        Ok(())
    }
}
