//! Fast similarity sketching (Dahlgaard, Knudsen and Thorup 2017): minima of hashes of a set.
//!
//! For each of `t` places, two sets have the same minimum with a chance that is their Jaccard similarity, as with
//! `t` hash functions; but each round hashes an element once and into one place, and a set of a few hundred
//! elements fills all places in the first rounds. How often an element is listed does not matter, so no set
//! need be made.

use super::shingles::mix;

/// Minima in a band: two documents share the band where all of them are equal.
pub(super) const BAND_MINIMA: usize = 8;

/// Bands of a document.
pub(crate) const BANDS: usize = 14;

const MINIMA: usize = BANDS * BAND_MINIMA;

/// Value of a minimum that no element's hash has set yet.
const EMPTY: u64 = u64::MAX;

/// The minima of a list that is not empty, whose elements are random hashes.
pub(super) fn minima(elements: &[u64]) -> [u64; MINIMA] {
    let mut minima = [EMPTY; MINIMA];
    // In the last rounds each place is filled by itself, so there are at most twice as many as places.
    for round in 0..2 * MINIMA as u64 {
        let salt = (round + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        for &element in elements {
            let hash = if round == 0 { element } else { mix(element ^ salt) };
            let place = match usize::try_from(round) {
                Ok(round) if round >= MINIMA => round - MINIMA,
                _ => (((hash >> 32) * MINIMA as u64) >> 32) as usize,
            };
            // The round is in the upper half, so that values of earlier rounds are smaller.
            let value = (round << 32) | (hash & 0xffff_ffff);
            minima[place] = minima[place].min(value);
        }
        if !minima.contains(&EMPTY) {
            break;
        }
    }
    minima
}

/// The hash of each band.
pub(super) fn bands(minima: &[u64; MINIMA]) -> [u64; BANDS] {
    std::array::from_fn(|band| {
        let rows = &minima[band * BAND_MINIMA..(band + 1) * BAND_MINIMA];
        rows.iter().fold(mix(band as u64 + 1), |hash, row| mix(hash ^ row).wrapping_add(*row))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two lists of random elements with this similarity.
    fn pair(seed: u64, union: u64, common: u64) -> (Vec<u64>, Vec<u64>) {
        let element = |at: u64| mix(mix(seed) ^ at);
        let apart = (union - common) / 2;
        let a = (0..common + apart).map(element).collect();
        let b = (0..common).chain(common + apart..union).map(element).collect();
        (a, b)
    }

    #[test]
    fn minima_agree_as_often_as_the_sets() {
        for union in [12, 60, 400, 3000] {
            for tenth in [3, 5, 8] {
                let (mut same, mut all) = (0, 0);
                for seed in 0..200 {
                    let (a, b) = pair(seed, union, union * tenth / 10);
                    let (a, b) = (minima(&a), minima(&b));
                    same += a.iter().zip(&b).filter(|(a, b)| a == b).count();
                    all += MINIMA;
                }
                let (found, expected) =
                    (same as f64 / all as f64, (union * tenth / 10) as f64 / union as f64);
                // Beyond four standard deviations of independent minima, for the smallest of the sets.
                assert!((found - expected).abs() < 0.03, "{union} {tenth}: {found}");
            }
        }
    }

    #[test]
    fn bands_are_shared_as_often_as_theory_has_it() {
        for (tenth, least, most) in
            [(5, 0.02, 0.10), (7, 0.46, 0.68), (8, 0.88, 0.96), (9, 0.99, 1.0)]
        {
            let mut found = 0_u32;
            for seed in 0..400 {
                let (a, b) = pair(seed, 400, 40 * tenth);
                let (a, b) = (bands(&minima(&a)), bands(&minima(&b)));
                found += u32::from(a.iter().zip(&b).any(|(a, b)| a == b));
            }
            let share = f64::from(found) / 400.0;
            assert!((least..=most).contains(&share), "0.{tenth}: {share}");
        }
    }

    #[test]
    fn order_and_multiplicity_do_not_matter() {
        let (mut a, _) = pair(1, 50, 10);
        let expected = minima(&a);
        a.reverse();
        a.extend(a.clone());
        assert_eq!(minima(&a), expected);
        assert!(!minima(&a[..1]).contains(&EMPTY));
    }
}
