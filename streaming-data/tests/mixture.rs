//! Several data sets in exact shares: proportions, epochs, random access, resuming.

#[allow(dead_code, reason = "each test program uses its part of it")]
mod support;

use std::{
    collections::BTreeMap,
    iter::once,
    num::{NonZeroU64, NonZeroUsize},
};

use support::{EXAMPLE_VOCABULARY, Form, example_row, write_example, write_index};
use tempfile::TempDir;
use tidemill_streaming_data::{
    DataSet, Mixture,
    data_set::index::{INDEX_FILE, Index},
    order::cursor::Cursor,
    order::mixture::{Amount, Part},
    order::statistics::OrderStatistics,
    order::{ShuffleOrder, ShuffleSettings},
    reader::{Decoder, DecoderSettings},
};

const ROW_TOKENS: usize = 11;

fn shuffle(order: ShuffleOrder) -> ShuffleSettings {
    ShuffleSettings { order, window_samples: NonZeroU64::new(8).unwrap(), seed: 17 }
}

/// A data set of these shards, whose rows differ from those of the other `base`s.
struct Example {
    folder: TempDir,
    samples: Vec<u64>,
}

impl Example {
    fn new(samples: &[u64]) -> Example {
        let folder = tempfile::tempdir().unwrap();
        let form = Form::plain();
        write_example(folder.path(), samples, ROW_TOKENS, &form);
        write_index(folder.path(), ROW_TOKENS - 1, EXAMPLE_VOCABULARY, samples, &form);
        Example { folder, samples: samples.to_vec() }
    }

    fn part(&self, name: &str, amount: Amount) -> Part {
        let data_set = DataSet::open(self.folder.path()).unwrap();
        assert_eq!(data_set.samples(), self.samples.iter().sum::<u64>());
        Part { name: name.to_owned(), data_set, amount }
    }
}

fn three() -> [Example; 3] {
    [Example::new(&[9, 4, 7]), Example::new(&[5, 6]), Example::new(&[3])]
}

fn mixture(examples: &[Example; 3], amounts: [Amount; 3], order: ShuffleOrder) -> Mixture {
    let names = ["web", "code", "books"];
    let parts = names.iter().zip(examples).zip(amounts);
    let parts = parts.map(|((name, example), amount)| example.part(name, amount)).collect();
    Mixture::new(parts, shuffle(order)).unwrap()
}

/// Turns of each part among the positions.
fn turns(mixture: &Mixture, positions: std::ops::Range<u64>) -> [u64; 3] {
    let mut turns = [0; 3];
    positions.for_each(|position| turns[mixture.sample_at(position).part] += 1);
    turns
}

#[test]
fn proportions_are_exact_in_every_window_wherever_it_begins() {
    use Amount::Proportion;
    // As a user writes them: their sum is 1, 100 or anything.
    for amounts in [
        [Proportion(0.7), Proportion(0.2), Proportion(0.1)],
        [Proportion(70.0), Proportion(20.0), Proportion(10.0)],
        [Proportion(0.07), Proportion(0.02), Proportion(0.01)],
    ] {
        let mixture = mixture(&three(), amounts, ShuffleOrder::Window);
        assert_eq!(mixture.samples(), 34, "an epoch is as long as all data sets");
        for start in (0..500).chain(u64::MAX - 600..u64::MAX - 100) {
            assert_eq!(turns(&mixture, start..start + 10), [7, 2, 1], "from {start}");
            assert_eq!(turns(&mixture, start..start + 90), [63, 18, 9], "from {start}");
        }
    }
    // Shares that are no whole numbers of a window: within a sample or two.
    let amounts = [Proportion(1.0), Proportion(1.5), Proportion(0.123_456)];
    let mixture = mixture(&three(), amounts, ShuffleOrder::None);
    for start in 0..2000 {
        for (found, share) in
            turns(&mixture, start..start + 64).into_iter().zip([1.0, 1.5, 0.123_456])
        {
            let expected = 64.0 * share / 2.623_456;
            assert!((found as f64 - expected).abs() < 2.0, "{found} of {expected} from {start}");
        }
    }
}

#[test]
fn an_epoch_has_what_was_asked_for_and_repeats_nothing_before_its_time() {
    let amounts = [Amount::Repeat(1.0), Amount::Repeat(2.0), Amount::Samples(5)];
    for order in [ShuffleOrder::None, ShuffleOrder::Shard, ShuffleOrder::Window, ShuffleOrder::Full]
    {
        let mixture = mixture(&three(), amounts, order);
        assert_eq!(mixture.samples(), 20 + 22 + 5);
        for epoch in 0..6 {
            let positions = epoch * 47..(epoch + 1) * 47;
            assert_eq!(turns(&mixture, positions), [20, 22, 5]);
        }
        // Each part goes through its own data set again and again, without a seam.
        let sizes = [20, 11, 3];
        let mut seen = [0_u64; 3];
        let mut in_epoch: [BTreeMap<(usize, u64), u64>; 3] = Default::default();
        for position in 0..47 * 6 {
            let mixed = mixture.sample_at(position);
            assert_eq!(mixed.position, seen[mixed.part], "positions of a part follow each other");
            assert_eq!(mixed.sample.epoch, mixed.position / sizes[mixed.part]);
            seen[mixed.part] += 1;
            let times = in_epoch[mixed.part].entry((mixed.sample.shard, mixed.sample.row));
            let times = times.or_default();
            *times += 1;
            assert_eq!(*times, mixed.sample.epoch + 1, "no sample comes before its time");
        }
        for (seen, size) in in_epoch.iter().zip(sizes) {
            assert_eq!(seen.len() as u64, size, "no sample is left out");
        }
    }
}

/// Parts of samples are none: 2.6 of them are three, 5.5 six and 3.3 three.
#[test]
fn amounts_are_rounded_to_the_nearest_sample() {
    let amounts = [Amount::Repeat(0.13), Amount::Repeat(0.5), Amount::Repeat(1.1)];
    let mixture = mixture(&three(), amounts, ShuffleOrder::Full);
    assert_eq!((mixture.shares().counts(), mixture.samples()), (&[3, 6, 3][..], 12));
    assert_eq!(turns(&mixture, 12..24), [3, 6, 3]);
}

/// The vocabulary holds the tokens of every part; a special token is that of all or of none.
#[test]
fn a_mixture_says_of_its_tokens_what_is_true_of_all_parts() {
    let part = |name: &str, vocab_size, bos_token_id| {
        let example = Example::new(&[5]);
        let mut index = Index::read(example.folder.path()).unwrap();
        index = Index { vocab_size, bos_token_id, pad_token_id: Some(7), ..index };
        std::fs::write(example.folder.path().join(INDEX_FILE), index.to_bytes()).unwrap();
        example.part(name, Amount::Repeat(1.0))
    };
    let mixture = |parts| Mixture::new(parts, shuffle(ShuffleOrder::Window)).unwrap();
    let parts = || vec![part("a", 60_013, Some(1)), part("b", 60_050, Some(1))];
    let alike = mixture(parts());
    assert_eq!((alike.vocab_size(), alike.bos_token_id()), (Some(60_050), Some(1)));
    assert_eq!((alike.eos_token_id(), alike.pad_token_id()), (Some(0), Some(7)));
    for other in [Some(2), None] {
        let unlike = mixture([parts(), vec![part("c", 60_020, other)]].concat());
        assert_eq!((unlike.vocab_size(), unlike.bos_token_id()), (Some(60_050), None));
        assert_eq!(unlike.pad_token_id(), Some(7));
    }
}

#[test]
fn samples_are_read_the_same_from_any_position_by_any_number_of_readers() {
    let amounts = [Amount::Proportion(0.5), Amount::Proportion(0.3), Amount::Proportion(0.2)];
    let examples = three();
    for order in [ShuffleOrder::None, ShuffleOrder::Window, ShuffleOrder::Full] {
        let mixture = mixture(&examples, amounts, order);
        let expected: Vec<Vec<u32>> = (0..200)
            .map(|position| {
                let id = mixture.sample_at(position).sample;
                example_row(id.shard, id.row, ROW_TOKENS)
            })
            .collect();
        for threads in [1, 3] {
            let settings = DecoderSettings {
                threads: NonZeroUsize::new(threads).unwrap(),
                memory_bytes: 4000,
            };
            let decoder = Decoder::new(mixture.clone(), settings).unwrap();
            for start in [0, 1, 33, 34, 35, 77, 199] {
                let found: Vec<_> = decoder
                    .reader(once(start..200))
                    .map(|sample| sample.unwrap())
                    .inspect(|sample| assert!(sample.position >= start))
                    .map(|sample| sample.tokens)
                    .collect();
                assert_eq!(found, expected[start as usize..]);
            }
            // In order, for every number of workers that share the steps.
            for workers in [1, 2, 5] {
                let readers: Vec<_> = (0..workers)
                    .map(|worker| {
                        let plan = (0..20_u64).map(move |step| {
                            let place = |part: u64| step * 10 + part * 10 / workers;
                            place(worker)..place(worker + 1)
                        });
                        decoder.reader(plan)
                    })
                    .collect();
                let mut found = vec![Vec::new(); 200];
                for reader in readers {
                    for sample in reader {
                        let sample = sample.unwrap();
                        found[sample.position as usize] = sample.tokens;
                    }
                }
                assert_eq!(found, expected, "{workers} workers");
            }
        }
    }
}

#[test]
fn one_part_is_its_data_set_and_parts_have_orders_of_their_own() {
    let [web, code, _] = three();
    let alone = web.part("web", Amount::Proportion(3.0));
    let order = alone.data_set.order(shuffle(ShuffleOrder::Full)).unwrap();
    let fingerprint = alone.data_set.fingerprint();
    let mixture = Mixture::new(vec![alone], shuffle(ShuffleOrder::Full)).unwrap();
    assert!(
        (0..90).all(|position| mixture.sample_at(position).sample == order.sample_at(position))
    );
    assert_eq!((mixture.fingerprint(), mixture.samples()), (fingerprint, 20));
    assert!(mixture.identity().parts.is_empty());

    // The same data set twice: not the same permutation.
    let parts = vec![web.part("a", Amount::Repeat(1.0)), web.part("b", Amount::Repeat(1.0))];
    let twice = Mixture::new(parts, shuffle(ShuffleOrder::Full)).unwrap();
    let of = |part| -> Vec<_> {
        let mixed = (0..40).map(|position| twice.sample_at(position));
        mixed.filter(|mixed| mixed.part == part).map(|mixed| mixed.sample).collect()
    };
    assert_eq!((of(0).len(), of(1).len()), (20, 20));
    assert_ne!(of(0), of(1));

    // The fingerprint is of data and shares, in order.
    let mix = |first: &Example, second: &Example, times| {
        let parts =
            vec![first.part("a", Amount::Repeat(1.0)), second.part("b", Amount::Repeat(times))];
        Mixture::new(parts, shuffle(ShuffleOrder::Full)).unwrap()
    };
    let one = mix(&web, &code, 1.0);
    assert_eq!(one.fingerprint(), mix(&web, &code, 1.0).fingerprint());
    assert_ne!(one.fingerprint(), mix(&code, &web, 1.0).fingerprint());
    assert_ne!(one.fingerprint(), mix(&web, &code, 2.0).fingerprint());
    // A changed part is named on resuming.
    let saved = Cursor { position: 77, ..Cursor::start(one.identity()) };
    saved.check_resume(&one.identity()).unwrap();
    let error = saved.check_resume(&mix(&web, &code, 2.0).identity()).unwrap_err().to_string();
    assert!(error.contains("streams.b.amount was repeat = 1"), "{error}");
    assert!(error.contains("is repeat = 2 now"), "{error}");
}

#[test]
fn wrong_mixtures_are_refused_by_the_name_of_the_part() {
    let [web, code, books] = three();
    let longer = tempfile::tempdir().unwrap();
    write_example(longer.path(), &[4], ROW_TOKENS + 1, &Form::plain());
    let longer = DataSet::open(longer.path()).unwrap();
    let without_eos = tempfile::tempdir().unwrap();
    write_example(without_eos.path(), &[4], ROW_TOKENS, &Form::plain());
    let without_eos = DataSet::open(without_eos.path()).unwrap();
    let other = |data_set: &DataSet| Part {
        name: "other".to_owned(),
        data_set: data_set.clone(),
        amount: Amount::Repeat(1.0),
    };
    use Amount::{Proportion, Repeat, Samples};
    let cases = [
        (vec![], "a mixture without parts"),
        (vec![web.part("a", Repeat(1.0)), code.part("a", Repeat(1.0))], "a has a second part"),
        (
            vec![web.part("a", Repeat(1.0)), other(&longer)],
            "other has seq_len 11, expected seq_len 10",
        ),
        (
            vec![web.part("a", Repeat(1.0)), other(&without_eos)],
            "other has eos_token_id none, expected eos_token_id 0, as a has",
        ),
        (
            vec![web.part("a", Proportion(1.0)), code.part("b", Repeat(1.0))],
            "a has a proportion beside other amounts",
        ),
        (vec![web.part("a", Samples(0)), code.part("b", Repeat(1.0))], "a has samples = 0"),
        (vec![web.part("a", Repeat(1.0)), books.part("b", Repeat(0.1))], "b has repeat = 0.1"),
        (vec![web.part("a", Repeat(f64::NAN))], "a has repeat = NaN"),
        (vec![web.part("a", Proportion(0.0))], "a has proportion = 0"),
        (vec![web.part("a", Proportion(-1.0))], "a has proportion = -1"),
        (vec![web.part("a", Proportion(f64::INFINITY))], "a has proportion = inf"),
        (
            vec![web.part("a", Proportion(1.0 / 3.0)), code.part("b", Proportion(2.0 / 3.0))],
            "a has proportion = 0.3333333333333333, expected at most 15 digits",
        ),
        (
            vec![web.part("a", Proportion(1e11)), code.part("b", Proportion(1e-12))],
            "at most 19 digits",
        ),
        (
            vec![web.part("a", Samples(u64::MAX)), code.part("b", Samples(1))],
            "more than 2^64 - 1 samples",
        ),
    ];
    for (parts, expected) in cases {
        let error = Mixture::new(parts, shuffle(ShuffleOrder::Full)).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}, expected {expected}");
    }
}

#[test]
fn the_statistics_tell_orders_apart() {
    let samples = [40; 64];
    let example = Example::new(&samples);
    let statistics = |order, window: u64, batch: u64, limit| {
        let window_samples = NonZeroU64::new(window).unwrap();
        let data_set = example.part("only", Amount::Repeat(1.0)).data_set;
        let shuffle = ShuffleSettings { order, window_samples, seed: 17 };
        let mixture = Mixture::of(data_set, shuffle).unwrap();
        OrderStatistics::new(&mixture, NonZeroU64::new(batch).unwrap(), limit)
    };
    let one = statistics(ShuffleOrder::Full, 1, 32, None);
    let shard_bytes = one.bytes / 64;
    let near = |found: f64, expected: f64| (found / expected - 1.0).abs() < 0.25;
    assert!(near(one.effective_batch, 32.0), "{one:?}");
    let of_an_epoch = statistics(ShuffleOrder::Full, 1, u64::MAX, None);
    let OrderStatistics { batch, effective_batch, .. } = of_an_epoch;
    assert_eq!((batch, effective_batch), (64 * 40, 2560.0));
    assert!(one.shards_per_batch > 24.0 && one.shards_per_batch < 28.0, "{one:?}");
    assert_eq!((one.cache_bytes, one.reads_per_shard), (one.bytes, Some(1.0)));
    assert_eq!(
        statistics(ShuffleOrder::Full, 1, 32, Some(one.bytes - 1)).reads_per_shard,
        Some(40.0)
    );
    assert_eq!(statistics(ShuffleOrder::Window, 20, 32, Some(1)).reads_per_shard, None);
    // Batches within a shard or two are worth hardly more than a sample.
    for order in [ShuffleOrder::None, ShuffleOrder::Shard] {
        let one = statistics(order, 1, 32, None);
        assert!(one.effective_batch < 1.6, "{order} {one:?}");
        assert!(one.shards_per_batch < 2.0 && one.first_batch_bytes <= 2 * shard_bytes, "{one:?}");
    }
    // A window mixes as many shards as it holds.
    let mut last = 1.0;
    for window in [80, 320, 1280] {
        let one = statistics(ShuffleOrder::Window, window, 32, None);
        assert!(one.effective_batch > 1.4 * last, "{window}: {one:?}");
        assert!(one.first_batch_bytes <= (window / 40 + 1) * shard_bytes * 2, "{one:?}");
        last = one.effective_batch;
    }
    assert!(last < 28.0, "half of all shards are less than all: {last}");
}
