//! Where shards end: documents decide, so that a change moves the ends near it and no others.
//!
//! After each document the shard ends with a probability that grows with the shard: the hazard of a life
//! of Weibull's distribution with shape 4, whose mean is 0.98 of the target. The random number is
//! the hash of the document's text, so the same documents end the same shards. Sizes vary by 30 %, and
//! at twice the target a shard ends in any case.
//!
//! All is whole numbers, as the bytes of a data set must not depend on a machine's `exp`.

use xxhash_rust::xxh3::xxh3_64;

/// Name and version of the rule.
pub(crate) const CUT: &str = "weibull-1";

/// 1.08 to the power of 4, of 2^32.
const SCALE: u128 = 5_843_255_590;

/// Fractional binary digits of sizes, which are shares of the target.
const SIZE_BITS: u32 = 16;

/// Fractional binary digits of the number that decides by chance.
const CHANCE_BITS: u32 = 32;

/// ln 2, of 2^64.
const LN_2: u128 = 12_786_308_645_202_655_659;

/// Where shards end.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ContentCut {
    /// Tokens of a shard, more or less.
    target: u64,
    /// Tokens that a shard has at least.
    least: u64,
}

impl ContentCut {
    /// For shards of about `target` tokens, and at least `least`.
    pub(crate) fn new(target: u64, least: u64) -> ContentCut {
        ContentCut { target: target.max(1), least }
    }

    /// Whether a shard ends after a document: `before` and `behind` are its tokens without and with the document, and
    /// `source` is the hash of the document's text.
    pub(crate) fn ends(&self, before: u64, behind: u64, source: u128) -> bool {
        if behind < self.least {
            return false;
        }
        if behind >= self.target.saturating_mul(2) {
            return true;
        }
        // Below 2^17, as `behind` is below twice the target.
        let size = |tokens: u64| (u128::from(tokens) << SIZE_BITS) / u128::from(self.target);
        let risk = size(behind).pow(4) - size(before).pow(4);
        // Both sides have 64 fractional binary digits.
        let life = exponential(xxh3_64(&source.to_le_bytes()));
        risk >= SCALE * u128::from(life)
    }
}

/// -ln of a share of 2^64 that is evenly distributed; of 2^[`CHANCE_BITS`].
fn exponential(random: u64) -> u64 {
    // The share is (random + 1) / 2^64, or mantissa / 2^63 / 2^zeros.
    let share = random.max(1);
    let zeros = share.leading_zeros();
    let mut mantissa = share << zeros;
    // log2 of mantissa / 2^63, bit by bit: each squaring doubles it.
    let mut log2 = 0_u64;
    for bit in (0..CHANCE_BITS).rev() {
        let squared = u128::from(mantissa) * u128::from(mantissa);
        if squared >> 127 == 1 {
            log2 |= 1 << bit;
            mantissa = (squared >> 64) as u64;
        } else {
            mantissa = (squared >> 63) as u64;
        }
    }
    let minus_log2 = ((u64::from(zeros) + 1) << CHANCE_BITS) - log2;
    ((u128::from(minus_log2) * LN_2) >> 64) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logarithms_are_those_of_floating_point() {
        for at in 0..2000_u64 {
            let random = xxh3_64(&at.to_le_bytes()) >> (at % 40);
            let expected = -(random as f64 / 2_f64.powi(64)).ln();
            let found = exponential(random) as f64 / 2_f64.powi(CHANCE_BITS as i32);
            assert!((found - expected).abs() < 1e-8, "{random}: {found} {expected}");
        }
        // At the ends.
        assert_eq!(exponential(0), exponential(1));
        assert!(exponential(u64::MAX) <= 2);
    }

    /// Sizes of shards of documents with these tokens and hashes.
    fn sizes(cut: ContentCut, documents: &[(u64, u128)]) -> Vec<u64> {
        let (mut sizes, mut size) = (Vec::new(), 0);
        for &(tokens, source) in documents {
            let before = size;
            size += tokens;
            if cut.ends(before, size, source) {
                sizes.push(size);
                size = 0;
            }
        }
        sizes
    }

    fn documents(count: u64) -> Vec<(u64, u128)> {
        let document = |at: u64| {
            let source = xxhash_rust::xxh3::xxh3_128(&at.to_le_bytes());
            (100 + (source as u64 >> 7) % 1000, source)
        };
        (0..count).map(document).collect()
    }

    #[test]
    fn sizes_are_around_the_target() {
        let cut = ContentCut::new(60_000, 2049);
        let sizes = sizes(cut, &documents(200_000));
        let mean = sizes.iter().sum::<u64>() as f64 / sizes.len() as f64;
        let square = |size: &u64| (*size as f64 / mean - 1.0).powi(2);
        let spread = (sizes.iter().map(square).sum::<f64>() / sizes.len() as f64).sqrt();
        assert!((0.96..1.0).contains(&(mean / 60_000.0)), "{mean}");
        assert!((0.25..0.31).contains(&spread), "{spread}");
        assert!(sizes.iter().all(|&size| (2049..2 * 60_000 + 1100).contains(&size)));
    }

    #[test]
    fn a_change_moves_the_ends_near_it_alone() {
        let cut = ContentCut::new(60_000, 100);
        let documents = documents(20_000);
        let all = sizes(cut, &documents);
        let mut moved = 0;
        for at in (0..20_000).step_by(400) {
            let mut fewer = documents.clone();
            fewer.remove(at);
            let left = sizes(cut, &fewer);
            let front = all.iter().zip(&left).take_while(|(a, b)| a == b).count();
            let back = all.iter().rev().zip(left.iter().rev()).take_while(|(a, b)| a == b).count();
            moved += left.len().saturating_sub(front + back);
        }
        assert!(moved < 2 * 50, "{moved} shards for 50 changes");
    }

    #[test]
    fn the_rule_is_pinned() {
        let cut = ContentCut::new(10_000, 2049);
        // Data sets that were prepared before are updated: other ends need another name ([`CUT`]).
        let sizes = sizes(cut, &documents(200));
        assert_eq!(sizes[..6], [9965, 12208, 11211, 9667, 10413, 9179]);
        // Whatever the hash says: not before the least, and always at twice the target.
        assert!(!cut.ends(1000, 2048, 5) && cut.ends(19_999, 20_000, u128::MAX));
        assert!(ContentCut::new(1, 0).ends(0, u64::MAX, 1));
    }
}
