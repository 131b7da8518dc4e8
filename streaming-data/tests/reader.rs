//! A reader yields the samples of its plan for any threads, memory and other readers.

#[allow(dead_code, reason = "each test program uses its part of it")]
mod support;

use std::{
    iter::once,
    num::{NonZeroU64, NonZeroUsize},
    ops::Range,
    sync::{
        Arc,
        mpsc::{self, Receiver},
    },
    task::Poll,
    time::Duration,
};

use arrow::datatypes::DataType;
use support::{
    EXAMPLE_VOCABULARY, Form, ListKind, example_row, indexed_example, write_example, write_index,
    write_shard,
};
use tidemill_streaming_data::{
    DataError, DataSet, Mixture,
    order::{CanonicalOrder, ShuffleOrder, ShuffleSettings},
    reader::{Decoder, DecoderSettings, Reader, Sample},
};

const SAMPLES: [u64; 5] = [13, 1, 24, 7, 10];
const ROW_TOKENS: usize = 11;

/// Long enough for any machine, so that a hang fails instead.
const DEADLINE: Duration = Duration::from_secs(60);

fn shuffle(order: ShuffleOrder) -> ShuffleSettings {
    ShuffleSettings { order, window_samples: NonZeroU64::new(9).unwrap(), seed: 17 }
}

fn decoder(data_set: &DataSet, order: ShuffleOrder, threads: usize, memory: usize) -> Decoder {
    let settings =
        DecoderSettings { threads: NonZeroUsize::new(threads).unwrap(), memory_bytes: memory };
    let mixture = Mixture::of(data_set.clone(), shuffle(order)).unwrap();
    Decoder::new(mixture, settings).unwrap()
}

/// The samples that a plan must yield, from the rows that were written.
fn expected(order: &CanonicalOrder, plan: impl Iterator<Item = Range<u64>>) -> Vec<Sample> {
    plan.flatten()
        .map(|position| {
            let id = order.sample_at(position);
            Sample { position, tokens: example_row(id.shard, id.row, ROW_TOKENS) }
        })
        .collect()
}

fn read(reader: Reader) -> Vec<Sample> {
    reader.map(|sample| sample.unwrap()).collect()
}

#[test]
fn plans_are_read_in_order_for_any_threads_memory_and_order() {
    let folder = indexed_example(&SAMPLES, ROW_TOKENS);
    let data_set = DataSet::open(folder.path()).unwrap();
    let n = data_set.samples();
    assert_eq!((n, data_set.seq_len(), data_set.vocab_size()), (55, 10, Some(60_013)));
    // Two epochs and a bit; a resume in the middle; ranges that jump, are empty or end at once.
    let plans: [Vec<Range<u64>>; 4] = [
        Vec::from_iter(once(0..2 * n + 3)),
        Vec::from_iter(once(37..61)),
        vec![5..6, 70..90, 7..7, 3..11, 1_000_000_007..1_000_000_020],
        vec![],
    ];
    for order in [ShuffleOrder::None, ShuffleOrder::Shard, ShuffleOrder::Window, ShuffleOrder::Full]
    {
        let canonical = data_set.order(shuffle(order)).unwrap();
        for (threads, memory) in [(1, 0), (1, 1 << 20), (2, 700), (3, 4000), (8, 1 << 20)] {
            let decoder = decoder(&data_set, order, threads, memory);
            for plan in &plans {
                let found = read(decoder.reader(plan.clone()));
                let expected = expected(&canonical, plan.iter().cloned());
                assert_eq!(found, expected, "{order}, {threads} threads, {memory} bytes, {plan:?}");
            }
        }
    }
}

/// Resuming is reading from a position: every one of two epochs, by the decoder that has read others before.
#[test]
fn a_stream_goes_on_from_every_position() {
    let folder = indexed_example(&SAMPLES, ROW_TOKENS);
    let data_set = DataSet::open(folder.path()).unwrap();
    let n = data_set.samples();
    for order in [ShuffleOrder::None, ShuffleOrder::Shard, ShuffleOrder::Window, ShuffleOrder::Full]
    {
        let canonical = data_set.order(shuffle(order)).unwrap();
        let whole = expected(&canonical, once(0..2 * n + 5));
        let decoder = decoder(&data_set, order, 2, 3000);
        // Backwards, so that nothing is known of what comes before.
        for start in (0..=2 * n).rev() {
            let found = read(decoder.reader(once(start..start + 5)));
            assert_eq!(found, whole[start as usize..][..5], "{order} from {start}");
        }
    }
}

/// The global batch of every step, put together from workers that read their lanes, is the same.
#[test]
fn lanes_of_any_number_of_workers_make_up_the_same_steps() {
    let folder = indexed_example(&SAMPLES, ROW_TOKENS);
    let data_set = DataSet::open(folder.path()).unwrap();
    let canonical = data_set.order(shuffle(ShuffleOrder::Window)).unwrap();
    let (batch, lanes, steps) = (21_u64, 8_u64, 9_u64);
    let expected = expected(&canonical, once(0..steps * batch));
    for workers in [1, 2, 3, 5, 8] {
        let decoder = decoder(&data_set, ShuffleOrder::Window, 2, 5000);
        let mut readers: Vec<Reader> = (0..workers)
            .map(|worker| {
                let lane = |cut: u64| cut * lanes / workers * batch / lanes;
                let share = lane(worker)..lane(worker + 1);
                let of_step = move |s: u64| s * batch + share.start..s * batch + share.end;
                decoder.reader((0..).map(of_step))
            })
            .collect();
        let mut found = Vec::new();
        for _ in 0..steps {
            for (worker, reader) in readers.iter_mut().enumerate() {
                let lane = |cut: u64| cut * lanes / workers * batch / lanes;
                let share = lane(worker as u64 + 1) - lane(worker as u64);
                found.extend(reader.take(share as usize).map(|sample| sample.unwrap()));
            }
        }
        assert_eq!(found, expected, "{workers} workers");
    }
}

#[test]
fn every_kind_of_column_reads_the_same() {
    use arrow::datatypes::DataType::{Int8, Int16, Int32, Int64, UInt8, UInt16, UInt32, UInt64};
    use parquet::file::properties::WriterVersion::{PARQUET_1_0, PARQUET_2_0};
    let samples = [12, 3];
    let mut forms = Vec::new();
    for kind in [ListKind::Fixed, ListKind::List, ListKind::LargeList] {
        for element in [Int32, Int64, UInt16, UInt32, UInt64] {
            forms.push(Form { kind, element, ..Form::plain() });
        }
        for (nullable, dictionary) in [(true, false), (false, true), (true, true)] {
            for writer in [PARQUET_1_0, PARQUET_2_0] {
                forms.push(Form { kind, nullable, dictionary, writer, ..Form::plain() });
                let element = Int64;
                forms.push(Form { kind, nullable, dictionary, writer, element, ..Form::plain() });
            }
        }
        forms.push(Form { kind, writer: PARQUET_2_0, page_rows: 1, ..Form::plain() });
        forms.push(Form { kind, group_rows: 1000, page_rows: 1000, ..Form::plain() });
    }
    for form in forms {
        let folder = tempfile::tempdir().unwrap();
        write_example(folder.path(), &samples, ROW_TOKENS, &form);
        let data_set = DataSet::open(folder.path()).unwrap();
        assert_eq!((data_set.seq_len(), data_set.vocab_size()), (10, None), "{form:?}");
        let canonical = data_set.order(shuffle(ShuffleOrder::Full)).unwrap();
        let found = read(decoder(&data_set, ShuffleOrder::Full, 1, 1 << 20).reader(once(0..20)));
        assert_eq!(found, expected(&canonical, once(0..20)), "{form:?}");
    }
    for element in [Int8, UInt8, Int16] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("only.parquet");
        let form = Form { element, ..Form::plain() };
        support::write_shard(&path, &[vec![0, 127, 3], vec![5, 6, 7]], &form);
        let data_set = DataSet::open(folder.path()).unwrap();
        let rows = read(decoder(&data_set, ShuffleOrder::None, 1, 100).reader(once(0..2)));
        assert_eq!([&rows[0].tokens, &rows[1].tokens], [&[0, 127, 3], &[5, 6, 7]], "{form:?}");
    }
}

#[test]
fn a_sample_looked_at_is_the_sample_read() {
    let folder = indexed_example(&SAMPLES, ROW_TOKENS);
    let data_set = DataSet::open(folder.path()).unwrap();
    let order = data_set.order(shuffle(ShuffleOrder::Full)).unwrap();
    for position in [0, 54, 55, 999] {
        let id = order.sample_at(position);
        assert_eq!(data_set.sample(id).unwrap(), example_row(id.shard, id.row, ROW_TOKENS));
    }
}

/// Reads with `try_next` alone, going on only when woken, to the end or an error.
fn read_when_woken(
    decoder: &Decoder,
    plan: Vec<Range<u64>>,
) -> (Vec<Sample>, Result<(), DataError>) {
    let (woken, wakes): (_, Receiver<()>) = mpsc::channel();
    let mut reader = decoder.reader_with_wake(plan, move || {
        let _ = woken.send(());
    });
    let mut samples = Vec::new();
    loop {
        match reader.try_next() {
            Poll::Ready(Some(Ok(sample))) => samples.push(sample),
            Poll::Ready(Some(Err(error))) => {
                assert!(matches!(reader.try_next(), Poll::Ready(None)), "nothing follows an error");
                return (samples, Err(error));
            }
            Poll::Ready(None) => return (samples, Ok(())),
            Poll::Pending => wakes.recv_timeout(DEADLINE).expect("woken when there is more"),
        }
    }
}

#[test]
fn a_reader_that_is_not_ready_is_woken() {
    let folder = indexed_example(&SAMPLES, ROW_TOKENS);
    let data_set = DataSet::open(folder.path()).unwrap();
    let canonical = data_set.order(shuffle(ShuffleOrder::Window)).unwrap();
    for (threads, memory) in [(1, 0), (2, 3000), (4, 1 << 20)] {
        let decoder = decoder(&data_set, ShuffleOrder::Window, threads, memory);
        for plan in [Vec::from_iter(once(0..300)), vec![], vec![9..9, 4..5]] {
            let (found, end) = read_when_woken(&decoder, plan.clone());
            assert_eq!(found, expected(&canonical, plan.into_iter()));
            end.unwrap();
        }
    }
}

/// An error comes behind all samples before it, wherever in a batch it is.
#[test]
fn samples_before_an_error_are_yielded() {
    let folder = indexed_example(&SAMPLES, ROW_TOKENS);
    let group_rows = Form::plain().group_rows as u64;
    // The second row group of the third shard has a token that is none.
    let (shard, group) = (2, 1);
    let mut rows: Vec<Vec<i64>> = (0..SAMPLES[shard])
        .map(|row| example_row(shard, row, ROW_TOKENS).into_iter().map(i64::from).collect())
        .collect();
    rows[group_rows as usize + 3][7] = i64::from(EXAMPLE_VOCABULARY);
    write_shard(&folder.path().join("shard-00002.parquet"), &rows, &Form::plain());
    write_index(folder.path(), ROW_TOKENS - 1, EXAMPLE_VOCABULARY, &SAMPLES, &Form::plain());
    let data_set = DataSet::open(folder.path()).unwrap();
    for order in [ShuffleOrder::None, ShuffleOrder::Shard, ShuffleOrder::Window, ShuffleOrder::Full]
    {
        let canonical = data_set.order(shuffle(order)).unwrap();
        let is_damaged = |&position: &u64| {
            let id = canonical.sample_at(position);
            id.shard == shard && id.row / group_rows == group
        };
        let first = (0..data_set.samples()).find(is_damaged).unwrap();
        for (threads, memory) in [(1, 0), (1, 1 << 20), (2, 3000), (4, 1 << 20)] {
            let decoder = decoder(&data_set, order, threads, memory);
            let (found, end) =
                read_when_woken(&decoder, Vec::from_iter(once(0..data_set.samples())));
            assert_eq!(found, expected(&canonical, once(0..first)), "{order}");
            assert!(matches!(end, Err(DataError::Token { .. })), "{end:?}");
            let mut reader = decoder.reader(once(0..data_set.samples()));
            let found = reader.by_ref().take_while(Result::is_ok).count();
            assert_eq!(found as u64, first, "{order}");
            assert!(reader.next().is_none(), "nothing follows an error");
        }
    }
}

/// Two bytes or four, from page to page: what is read is what was written.
#[test]
fn tokens_of_any_size_are_read() {
    let folder = tempfile::tempdir().unwrap();
    // Rows of small tokens between rows of large ones; pages have two rows, row groups five.
    let token = |row: u64, at: usize| match (row * 11 + at as u64) % 5 {
        3 if row % 4 == 2 => u32::MAX - row as u32,
        4 if row % 7 == 3 => 65_536,
        rest => 65_535 - rest as u32,
    };
    let row = |row: u64| (0..ROW_TOKENS).map(|at| i64::from(token(row, at))).collect();
    let rows: Vec<Vec<i64>> = (0..60).map(row).collect();
    for dictionary in [false, true] {
        let form = Form { element: DataType::UInt32, dictionary, ..Form::plain() };
        write_shard(&folder.path().join("0.parquet"), &rows, &form);
        let data_set = DataSet::open(folder.path()).unwrap();
        let canonical = data_set.order(shuffle(ShuffleOrder::Window)).unwrap();
        for sample in read(decoder(&data_set, ShuffleOrder::Window, 2, 3000).reader(once(0..120))) {
            let id = canonical.sample_at(sample.position);
            let expected: Vec<u32> = (0..ROW_TOKENS).map(|at| token(id.row, at)).collect();
            assert_eq!(sample.tokens, expected);
        }
    }
}

/// Tells when it is dropped.
struct Dropped(mpsc::Sender<()>);

impl Drop for Dropped {
    fn drop(&mut self) {
        // The test may be over.
        let _ = self.0.send(());
    }
}

#[test]
fn a_dropped_reader_lets_go_of_its_plan_and_callback() {
    let folder = indexed_example(&SAMPLES, ROW_TOKENS);
    let data_set = DataSet::open(folder.path()).unwrap();
    for taken in [0, 1, 30] {
        let (sender, dropped) = mpsc::channel();
        let decoder = decoder(&data_set, ShuffleOrder::Full, 3, 2000);
        let guard = Arc::new(Dropped(sender));
        let of_plan = Arc::clone(&guard);
        let plan = (0..).map(move |step: u64| {
            let _held = &of_plan;
            step * 3..step * 3 + 3
        });
        let mut reader = decoder.reader_with_wake(plan, move || {
            let _held = &guard;
        });
        assert_eq!(reader.by_ref().take(taken).filter(|sample| sample.is_ok()).count(), taken);
        // The reader alone keeps the threads: it still reads after the decoder is gone.
        drop(decoder);
        assert!(reader.next().unwrap().is_ok());
        drop(reader);
        dropped.recv_timeout(DEADLINE).expect("plan and callback are dropped");
    }
}

#[test]
fn one_reader_that_is_not_read_does_not_stop_another() {
    let folder = indexed_example(&SAMPLES, ROW_TOKENS);
    let data_set = DataSet::open(folder.path()).unwrap();
    let decoder = decoder(&data_set, ShuffleOrder::Window, 1, 1000);
    let idle = decoder.reader(once(0..1_000_000));
    assert_eq!(read(decoder.reader(once(0..500))).len(), 500);
    assert_eq!(idle.take(3).filter(|sample| sample.is_ok()).count(), 3);
}

#[test]
fn a_panic_on_a_thread_is_an_error_of_the_reader_and_of_no_other() {
    let folder = indexed_example(&SAMPLES, ROW_TOKENS);
    let data_set = DataSet::open(folder.path()).unwrap();
    let decoder = decoder(&data_set, ShuffleOrder::Window, 2, 1 << 20);

    let broken_plan = (0..).map(|step: u64| {
        assert!(step < 3, "no step {step}");
        step * 2..step * 2 + 2
    });
    // Batches are larger than the plan up to its panic: that batch is lost with it.
    let found: Vec<_> = decoder.reader(broken_plan).collect();
    let Some(Err(DataError::DecodingPanic { message })) = found.last() else { panic!("{found:?}") };
    assert_eq!(message, "no step 3");

    // Endless, since what was decoded before the wake panicked may be read first, however much it is.
    let plan = (0..).map(|step: u64| step * 1000..step * 1000 + 1000);
    let broken_wake = decoder.reader_with_wake(plan, || panic!("cannot wake"));
    let failure = broken_wake.filter_map(Result::err).next().unwrap().to_string();
    assert_eq!(failure, "a decoding thread panicked: cannot wake");

    assert_eq!(read(decoder.reader(once(0..100))).len(), 100);
}
