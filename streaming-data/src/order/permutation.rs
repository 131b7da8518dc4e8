//! Keyed permutations of `[0, n)` that are computed, not stored.
//!
//! A shuffle of n samples as a table costs n integers and has to be built before the first sample
//! is known. A block cipher on `[0, n)` is a permutation too, and gives the image of any place in
//! constant time and memory, so that a stream can begin anywhere at once.
//!
//! The cipher is the generalised Feistel network of J. Black and P. Rogaway, "Ciphers with
//! arbitrary finite domains" (CT-RSA 2002), method 3, on `[0, a b)` with `a = ceil(sqrt(n))` and
//! `b = ceil(n / a)`, so that `a b < n + a`; images that fall outside of `[0, n)` are enciphered
//! again ("cycle walking", their method 2), which is rarely needed. Its round function is the
//! finaliser of SplitMix64: enough for a shuffle, not for secrecy.
//!
//! Contract: the numbers never change. A saved cursor means the same sample for ever.

use std::num::NonZeroU64;

/// Even, so that the halves end in the places in which they began. With 12 rounds all
/// permutations of up to five elements are equally frequent within the noise of a test.
const ROUNDS: usize = 12;

/// A bijection of `[0, n)`, chosen by a key.
#[derive(Debug, Clone)]
pub struct Permutation {
    n: u64,
    /// Size of the lower half, `ceil(sqrt(n))`.
    a: u64,
    /// Size of the upper half, `ceil(n / a)`.
    b: u64,
    round_keys: [u64; ROUNDS],
}

impl Permutation {
    /// The permutation of `[0, n)` that belongs to the key.
    pub fn new(n: NonZeroU64, key: Key) -> Permutation {
        let n = n.get();
        let root = n.isqrt();
        let a = if root * root == n { root } else { root + 1 };
        let mut generator = Generator::new(key);
        let round_keys = std::array::from_fn(|_| generator.next());
        Permutation { n, a, b: n.div_ceil(a), round_keys }
    }

    /// Image of `place`.
    ///
    /// # Panics
    /// If `place` is not below n.
    pub fn apply(&self, place: u64) -> u64 {
        assert!(place < self.n, "place {place} is outside of a permutation of {}", self.n);
        let mut image = self.encipher(place);
        // Terminates: the walk is on a cycle that holds `place`, which is below n.
        while image >= self.n {
            image = self.encipher(image);
        }
        image
    }

    fn encipher(&self, m: u64) -> u64 {
        let (mut left, mut right) = (m % self.a, m / self.a);
        for (round, key) in self.round_keys.iter().enumerate() {
            let modulus = if round % 2 == 0 { self.a } else { self.b };
            let shift = below(mix(right ^ key), modulus);
            // left + shift mod modulus, both being below it.
            let rest = modulus - shift;
            let sum = if left >= rest { left - rest } else { left + shift };
            (left, right) = (right, sum);
        }
        self.a * right + left
    }
}

/// The key of a permutation: a seed, refined by the use of the permutation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Key(u64);

impl Key {
    /// The key of a seed.
    pub fn new(seed: u64) -> Key {
        Key(mix(seed))
    }

    /// A seed for everything that is below this key.
    pub(crate) fn seed(self) -> u64 {
        self.0
    }

    /// The key for the part `tag` (an epoch, a window, a purpose) of what this key is for.
    pub fn refine(self, tag: u64) -> Key {
        // Two rounds of mixing, between which the tag enters: keys of neighbouring seeds and tags
        // have nothing in common, and refine(a).refine(b) is not refine(b).refine(a).
        Key(mix(self.0.rotate_left(23) ^ mix(tag)))
    }
}

/// A table of a random permutation of `[0, n)`: for shards, which are few.
///
/// The shuffle of Fisher and Yates with the generator of the key.
pub(super) fn shuffled(n: usize, key: Key) -> Vec<usize> {
    let mut generator = Generator::new(key);
    let mut table: Vec<usize> = (0..n).collect();
    for end in (1..n).rev() {
        let other = below(generator.next(), end as u64 + 1) as usize;
        table.swap(end, other);
    }
    table
}

/// SplitMix64 (G. Steele, D. Lea, C. Flood, OOPSLA 2014).
struct Generator(u64);

impl Generator {
    fn new(key: Key) -> Generator {
        Generator(key.0)
    }

    fn next(&mut self) -> u64 {
        let state = self.0;
        self.0 = state.wrapping_add(GOLDEN_GAMMA);
        mix(state)
    }
}

const GOLDEN_GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

/// One output of SplitMix64 from its state; a bijection of `u64`.
fn mix(state: u64) -> u64 {
    let z = state.wrapping_add(GOLDEN_GAMMA);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Scales a random word to `[0, bound)`; the bias is below `bound / 2^64`.
fn below(word: u64, bound: u64) -> u64 {
    ((u128::from(word) * u128::from(bound)) >> 64) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(n: u64, key: Key) -> Vec<u64> {
        let permutation = Permutation::new(NonZeroU64::new(n).unwrap(), key);
        (0..n).map(|place| permutation.apply(place)).collect()
    }

    #[test]
    fn every_size_is_permuted_onto_itself() {
        let sizes = (1..=70).chain([97, 100, 127, 128, 129, 255, 256, 257, 1009, 4095, 4096, 4097]);
        for n in sizes.chain([65_535, 65_536, 65_537, 104_729]) {
            for seed in 0..3 {
                let mut images = table(n, Key::new(seed));
                images.sort_unstable();
                assert!(images.into_iter().eq(0..n), "not a bijection: n {n}, seed {seed}");
            }
        }
    }

    #[test]
    fn huge_sizes_stay_inside_and_do_not_collide() {
        for n in [u64::MAX, u64::MAX - 1, 1 << 63, (1 << 32) * ((1 << 32) - 1), 1_000_000_000_039] {
            let permutation = Permutation::new(NonZeroU64::new(n).unwrap(), Key::new(5));
            let places = (0..500).chain(n - 500..n);
            let mut images: Vec<u64> = places.map(|place| permutation.apply(place)).collect();
            assert!(images.iter().all(|&image| image < n), "outside of n {n}");
            images.sort_unstable();
            images.dedup();
            assert_eq!(images.len(), 1000, "a collision, n {n}");
        }
    }

    /// For small n every permutation must be equally likely over the keys (chi-square).
    #[test]
    fn small_permutations_are_all_equally_frequent() {
        for (n, permutations) in [(2_u64, 2_usize), (3, 6), (4, 24), (5, 120)] {
            let draws = 200 * permutations;
            for of_table in [false, true] {
                let mut counts = std::collections::BTreeMap::<Vec<u64>, usize>::new();
                for draw in 0..draws as u64 {
                    let key = Key::new(7).refine(draw);
                    let images = if of_table {
                        shuffled(n as usize, key).into_iter().map(|image| image as u64).collect()
                    } else {
                        table(n, key)
                    };
                    *counts.entry(images).or_default() += 1;
                }
                assert_eq!(counts.len(), permutations, "n {n}: some permutations never occur");
                let chi_square: f64 =
                    counts.values().map(|&count| (count as f64 - 200.0).powi(2) / 200.0).sum();
                let freedom = (permutations - 1) as f64;
                let limit = freedom + 4.0 * (2.0 * freedom).sqrt() + 4.0;
                assert!(chi_square < limit, "n {n}, table {of_table}: {chi_square} >= {limit}");
            }
        }
    }

    /// The image of a place, and the distance between images of neighbours, must be uniform.
    #[test]
    fn places_and_neighbours_are_spread_uniformly() {
        for n in [1000_u64, 4096, 16_384, 99_991] {
            for seed in 0..4 {
                let images = table(n, Key::new(seed));
                let buckets = 20;
                let mut of_half = vec![0_u64; buckets];
                let mut of_gap = vec![0_u64; buckets];
                for (place, &image) in images.iter().enumerate() {
                    if (place as u64) < n / 2 {
                        of_half[(image as usize * buckets) / n as usize] += 1;
                    }
                    let next = images[(place + 1) % n as usize];
                    let gap = (next + n - image) % n;
                    of_gap[(gap as usize * buckets) / n as usize] += 1;
                }
                for (name, counts, total) in [("half", of_half, n / 2), ("gap", of_gap, n)] {
                    let expected = total as f64 / buckets as f64;
                    let chi_square: f64 =
                        counts.iter().map(|&c| (c as f64 - expected).powi(2) / expected).sum();
                    // 19 degrees of freedom: above 55 once in 40,000.
                    assert!(chi_square < 55.0, "{name}: n {n}, seed {seed}: {chi_square}");
                }
            }
        }
    }

    #[test]
    fn keys_differ_and_are_not_commutative() {
        let key = Key::new(1);
        let all = [key, Key::new(2), key.refine(1), key.refine(2), key.refine(1).refine(2)];
        for (at, one) in all.iter().enumerate() {
            for other in &all[at + 1..] {
                assert_ne!(table(1000, *one), table(1000, *other));
            }
        }
        assert_ne!(key.refine(1).refine(2), key.refine(2).refine(1));
    }

    /// Pinned, from a second implementation: a change of these numbers breaks every saved run.
    #[test]
    fn golden_values() {
        assert_eq!(table(10, Key::new(17).refine(3)), [5, 8, 4, 0, 7, 2, 6, 9, 3, 1]);
        assert_eq!(shuffled(10, Key::new(17).refine(3)), [8, 9, 6, 4, 3, 5, 7, 0, 2, 1]);
        let large = Permutation::new(NonZeroU64::new(50_000_000).unwrap(), Key::new(17));
        let images = [0, 1, 2, 49_999_999].map(|place| large.apply(place));
        assert_eq!(images, [8_933_204, 29_560_968, 27_995_624, 31_395_811]);
    }
}
