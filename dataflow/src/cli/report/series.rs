//! Values over steps, thinned while they are read: memory and pictures do not grow with a run.
//!
//! Steps are put into buckets of equal width, a power of two; of each bucket the least and the largest value stay. Where there would
//! be more than [`MOST_BUCKETS`], each two become one. A picture has fewer columns of pixels than a long series has buckets, so no
//! peak is lost.

/// At least half as many stay of a long series.
const MOST_BUCKETS: usize = 1440;

/// A value and its step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Point {
    pub step: u64,
    pub value: f64,
}

/// The points of consecutive steps.
#[derive(Clone, Copy, Debug)]
struct Bucket {
    /// Its steps, divided by the width.
    index: u64,
    least: Point,
    largest: Point,
}

/// Values of ascending steps.
#[derive(Clone, Debug)]
pub(super) struct Series {
    buckets: Vec<Bucket>,
    width: u64,
    last: Option<Point>,
    count: u64,
    sum: f64,
}

impl Default for Series {
    fn default() -> Self {
        Self { buckets: Vec::new(), width: 1, last: None, count: 0, sum: 0.0 }
    }
}

impl Series {
    /// Adds the value of a step that is not before the last one. Values that are not finite are left out.
    pub fn push(&mut self, step: u64, value: f64) {
        if !value.is_finite() {
            return;
        }
        let point = Point { step, value };
        self.last = Some(point);
        self.count += 1;
        self.sum += value;
        let added = Bucket { index: step / self.width, least: point, largest: point };
        match self.buckets.last_mut() {
            Some(bucket) if bucket.index == added.index => bucket.join(added),
            _ => self.buckets.push(added),
        }
        while self.buckets.len() > MOST_BUCKETS {
            self.halve();
        }
    }

    fn halve(&mut self) {
        self.width *= 2;
        let mut halved: Vec<Bucket> = Vec::with_capacity(MOST_BUCKETS + 1);
        for mut bucket in self.buckets.drain(..) {
            bucket.index /= 2;
            match halved.last_mut() {
                Some(last) if last.index == bucket.index => last.join(bucket),
                _ => halved.push(bucket),
            }
        }
        self.buckets = halved;
    }

    /// In the order of steps: of each bucket the least and the largest value, and the last of all.
    pub fn points(&self) -> Vec<Point> {
        let mut points: Vec<Point> = Vec::with_capacity(2 * self.buckets.len() + 1);
        for &Bucket { least, largest, .. } in &self.buckets {
            let (first, second) =
                if least.step <= largest.step { (least, largest) } else { (largest, least) };
            points.push(first);
            if second.step != first.step {
                points.push(second);
            }
        }
        points.extend(self.last.filter(|last| points.last().is_some_and(|it| it.step < last.step)));
        points
    }

    /// The last value.
    pub fn last(&self) -> Option<Point> {
        self.last
    }

    /// The largest of all values.
    pub fn largest(&self) -> Option<f64> {
        self.buckets.iter().map(|bucket| bucket.largest.value).reduce(f64::max)
    }

    /// The sum of all values.
    pub fn sum(&self) -> f64 {
        self.sum
    }

    /// How many values there were.
    pub fn count(&self) -> u64 {
        self.count
    }
}

impl Bucket {
    fn join(&mut self, later: Self) {
        if later.least.value < self.least.value {
            self.least = later.least;
        }
        if later.largest.value > self.largest.value {
            self.largest = later.largest;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_series_keeps_every_point() {
        let mut series = Series::default();
        let values = [3.0, 1.0, f64::NAN, 2.0];
        for (step, value) in (1..).zip(values) {
            series.push(step, value);
        }
        let points: Vec<(u64, f64)> =
            series.points().iter().map(|point| (point.step, point.value)).collect();
        assert_eq!(points, [(1, 3.0), (2, 1.0), (4, 2.0)]);
        assert_eq!((series.count(), series.sum(), series.largest()), (3, 6.0, Some(3.0)));
    }

    #[test]
    fn of_a_million_steps_no_peak_is_lost_and_few_points_stay() {
        let mut series = Series::default();
        let peaks = [(77_777, 9.0), (500_001, -9.0), (999_999, 8.0)];
        for step in 1..=1_000_000_u64 {
            let peak = peaks.iter().find(|peak| peak.0 == step);
            series.push(step, peak.map_or((step % 7) as f64 / 7.0, |peak| peak.1));
        }
        let points = series.points();
        assert!((MOST_BUCKETS..=2 * MOST_BUCKETS + 1).contains(&points.len()), "{}", points.len());
        assert!(points.is_sorted_by(|a, b| a.step < b.step));
        for (step, value) in peaks {
            assert!(points.contains(&Point { step, value }), "the peak at {step}");
        }
        assert_eq!(points.last().unwrap().step, 1_000_000);
        // Every column of 2,000 steps keeps its range.
        for column in points.chunk_by(|a, b| a.step / 2_000 == b.step / 2_000) {
            let values = column.iter().map(|point| point.value);
            let (least, largest) =
                values.fold((1.0_f64, 0.0_f64), |(a, b), value| (a.min(value), b.max(value)));
            assert!(least <= 0.0 && largest >= 6.0 / 7.0 || column[0].step == 1_000_000);
        }
    }

    #[test]
    fn sparse_steps_are_as_good() {
        let mut series = Series::default();
        for index in 0..5_000 {
            series.push(1_000_000_000 * index, index as f64);
        }
        let points = series.points();
        assert_eq!(points[0].step, 0);
        assert_eq!(points.last().unwrap().value, 4_999.0);
        assert!(points.len() > MOST_BUCKETS / 2);
    }
}
