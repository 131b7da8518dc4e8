//! A model whose samples are not tokens trains as elastically as any: rows of floats, from any
//! Parquet files.

use std::num::{NonZeroU64, NonZeroUsize};
use std::path::Path;
use std::sync::{Arc, mpsc};

use tidemill::batch::{BatchSettings, MicrobatchGrains};
use tidemill::cluster::{ExitClass, Failure};
use tidemill::operators::{SampleSource, TableSamples};
use tidemill::parallel::Sharding;
use tidemill::streaming_data::DataSettings;
use tidemill::streaming_data::data_set::table::{
    Columns, RowBatch, Table, TableDecoder, TableSettings,
};
use tidemill::streaming_data::order::{ShuffleOrder, ShuffleSettings};

#[path = "../examples/regression.rs"]
#[allow(dead_code, reason = "the example runs by itself, too")]
mod regression;

use regression::{Measurement, batch_settings, measurements, train, write};

/// Seen failing: with gradients that the model forms over a microbatch at once.
#[test]
fn any_number_of_workers_and_any_microbatch_train_floats_to_the_same_bits() {
    let folder = tempfile::tempdir().unwrap();
    for (part, files) in [("train", 0..2), ("test", 2..3)] {
        write(&folder.path().join(part), files).unwrap();
    }
    let run = |workers, microbatch_grains, sharding| {
        let settings = BatchSettings {
            microbatch_grains: MicrobatchGrains::Grains(microbatch_grains),
            ..batch_settings()
        };
        train(folder.path(), workers, &settings, sharding).unwrap()
    };
    let one = run(1, 4, Sharding::Optimizer);
    assert!(one.evaluation.len() > 1 && one.training.first() != one.training.last());
    for (workers, microbatch_grains, sharding) in [
        (1, 1, Sharding::Optimizer),
        (2, 2, Sharding::Optimizer),
        (8, 1, Sharding::Optimizer),
        (3, 2, Sharding::Gradients),
        (3, 2, Sharding::Parameters),
    ] {
        let found = run(workers, microbatch_grains, sharding);
        assert!(found == one, "{workers} workers, {microbatch_grains} grains, {sharding:?}");
    }
}

/// A decoder of the rows of `folder` in stored order, at most seven in a batch.
fn decoder(folder: &Path) -> TableDecoder {
    let table = Table::open(folder, &Columns::All, &DataSettings::default()).unwrap();
    let shuffle =
        ShuffleSettings { order: ShuffleOrder::None, window_samples: NonZeroU64::MIN, seed: 0 };
    let batch_rows = NonZeroUsize::new(7).unwrap();
    let settings = TableSettings { batch_rows, ..TableSettings::default() };
    TableDecoder::new(&table, shuffle, settings).unwrap()
}

/// The results for `positions`, or the error that ends them.
fn read(
    source: &mut impl SampleSource<Sample = Measurement>,
    requests: &[std::ops::Range<u64>],
) -> Result<Vec<(u64, Measurement)>, Failure> {
    let (sender, woken) = mpsc::channel();
    source.set_wake(Arc::new(move || sender.send(()).unwrap_or_default()));
    requests.iter().for_each(|positions| source.request(positions.clone()));
    let expected = requests.iter().map(|positions| positions.end - positions.start).sum::<u64>();
    let mut samples = Vec::new();
    while (samples.len() as u64) < expected {
        match source.poll()? {
            Some(sample) => samples.push(sample),
            None => woken.recv().unwrap(),
        }
    }
    assert!(source.poll()?.is_none(), "nothing else was asked for");
    Ok(samples)
}

#[test]
fn every_row_becomes_a_sample_at_its_position() {
    let folder = tempfile::tempdir().unwrap();
    let rows = folder.path().join("rows");
    write(&rows, 0..1).unwrap();
    let mut source = TableSamples::new(decoder(&rows), measurements);
    let samples = read(&mut source, &[3..20, 40..41, 1499..1502]).unwrap();
    let positions: Vec<_> = samples.iter().map(|(position, _)| *position).collect();
    let expected: Vec<_> = (3..20).chain(40..41).chain(1499..1502).collect();
    assert_eq!(positions, expected);
    // A second epoch follows the first: position 1500 holds the row of position 0.
    let again = read(&mut source, &[0..1, 1..2]).unwrap();
    assert_eq!(samples[19].1.features, again[0].1.features);
    for (_, Measurement { features: [wind, moon, slope], target }) in &samples {
        assert_eq!(*target, (2.0 * moon).sin() + wind * slope);
    }
}

#[test]
fn rows_that_are_not_a_sample_each_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let rows = folder.path().join("rows");
    write(&rows, 0..1).unwrap();
    let all_but_one = |batch: &RowBatch| {
        let mut samples = measurements(batch)?;
        samples.pop();
        Ok(samples)
    };
    let mut source = TableSamples::new(decoder(&rows), all_but_one);
    let failure = read(&mut source, &[7..12, 12..13]).unwrap_err();
    let expected = "the rows at positions 7..12 became 4 samples, expected 5";
    assert_eq!(failure.cause().to_string(), expected);
    assert_eq!(failure.exit_class(), ExitClass::FixInput);

    let refused = |_: &RowBatch| Err(Failure::fix_input("column moon: expected floats"));
    let mut source = TableSamples::<Measurement>::new(decoder(&rows), refused);
    let failure = read(&mut source, &[7..12, 12..13]).unwrap_err();
    assert_eq!(failure.cause().to_string(), "column moon: expected floats");
}
