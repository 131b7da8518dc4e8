//! How many things there are of each size, in buckets that double.

use serde::{Deserialize, Serialize};

/// A bucket for each power of two below 2^64.
const BUCKETS: usize = 64;

/// Counts by size, while they grow. The bucket `b` holds sizes from 2^b to 2^(b+1) - 1, and the first holds 0 too.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    buckets: Vec<u64>,
    total: u64,
    largest: u64,
}

/// Exact counts by size, in buckets between powers of two.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Histogram {
    /// Things that were counted.
    pub count: u64,
    /// The sum of their sizes.
    pub total: u64,
    /// The largest size.
    pub largest: u64,
    /// From the first nonempty bucket to the last, with the empty buckets between them.
    pub buckets: Vec<Bucket>,
}

/// One bucket of a [`Histogram`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bucket {
    /// The smallest size in it, a power of two; 1 where the smallest is 0.
    pub from: u64,
    /// The largest size in it.
    pub to: u64,
    /// Things of such sizes.
    pub count: u64,
}

impl Counts {
    /// Counts `count` more items of a size.
    pub(crate) fn add(&mut self, size: u64, count: u64) {
        if count == 0 {
            return;
        }
        let bucket = size.max(1).ilog2() as usize;
        if self.buckets.len() <= bucket {
            self.buckets.resize(bucket + 1, 0);
        }
        self.buckets[bucket] = self.buckets[bucket].saturating_add(count);
        self.total = self.total.saturating_add(size.saturating_mul(count));
        self.largest = self.largest.max(size);
    }

    /// Adds the counts of another histogram.
    pub(crate) fn merge(&mut self, other: &Counts) {
        if self.buckets.len() < other.buckets.len() {
            self.buckets.resize(other.buckets.len(), 0);
        }
        for (own, other) in self.buckets.iter_mut().zip(&other.buckets) {
            *own = own.saturating_add(*other);
        }
        self.total = self.total.saturating_add(other.total);
        self.largest = self.largest.max(other.largest);
    }

    /// Buckets, total and largest, to be sent.
    pub(crate) fn parts(&self) -> (&[u64], u64, u64) {
        (&self.buckets, self.total, self.largest)
    }

    /// Counts of such parts; none where there are more buckets than sizes.
    pub(crate) fn of_parts(buckets: Vec<u64>, total: u64, largest: u64) -> Option<Counts> {
        (buckets.len() <= BUCKETS).then_some(Counts { buckets, total, largest })
    }

    /// The counts in the form of a report.
    pub(crate) fn histogram(&self) -> Histogram {
        let first = self.buckets.iter().position(|&count| count > 0).unwrap_or(0);
        let last = self.buckets.iter().rposition(|&count| count > 0).map_or(0, |last| last + 1);
        let bucket = |(power, &count): (usize, &u64)| {
            let from = 1_u64 << power;
            Bucket { from, to: from + (from - 1), count }
        };
        let buckets: Vec<Bucket> =
            self.buckets.iter().enumerate().take(last).skip(first).map(bucket).collect();
        Histogram {
            count: buckets.iter().fold(0, |sum, bucket| sum.saturating_add(bucket.count)),
            total: self.total,
            largest: self.largest,
            buckets,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_size_is_in_its_bucket_and_merging_is_adding() {
        let sizes: Vec<u64> = [0, 1, 2, 3, 4, 7, 8, 1023, 1024, 1025, u64::MAX >> 1].into();
        let mut whole = Counts::default();
        sizes.iter().for_each(|&size| whole.add(size, 1));
        for cut in 0..=sizes.len() {
            let (mut merged, mut behind) = (Counts::default(), Counts::default());
            sizes[..cut].iter().for_each(|&size| merged.add(size, 1));
            sizes[cut..].iter().for_each(|&size| behind.add(size, 1));
            merged.merge(&behind);
            assert_eq!(merged, whole);
        }
        let histogram = whole.histogram();
        assert_eq!((histogram.count, histogram.largest), (11, u64::MAX >> 1));
        for bucket in &histogram.buckets {
            let within = |&&size: &&u64| (bucket.from..=bucket.to).contains(&size.max(1));
            assert_eq!(bucket.count, sizes.iter().filter(within).count() as u64, "{bucket:?}");
        }
        assert_eq!(Counts::default().histogram(), Histogram::default());
    }

    #[test]
    fn what_is_too_large_is_counted_all_the_same() {
        let mut counts = Counts::default();
        counts.add(u64::MAX, 3);
        let histogram = counts.histogram();
        assert_eq!((histogram.count, histogram.total), (3, u64::MAX));
        assert_eq!(histogram.buckets, [Bucket { from: 1 << 63, to: u64::MAX, count: 3 }]);
        assert_eq!(Counts::of_parts(vec![0; 65], 0, 0), None);
    }
}
