//! [Masters](crate::master) of bf16: an fp32 value as the nearest bf16 and the bits that rounding
//! removed, and back.

/// The upper half of `value` rounded to the nearest, ties away from zero, and its lower half. A NaN's upper half is made quiet,
/// and its lower half is lost.
pub fn split(value: f32) -> (u16, u16) {
    let bits = value.to_bits();
    let [upper, lower] = [(bits >> 16) as u16, bits as u16];
    if value.is_nan() {
        return (upper | 0x40, 0);
    }
    let rounded = if lower < 0x8000 { upper } else { upper + 1 };
    (rounded, lower)
}

/// The fp32 that was [`split`].
pub fn join(rounded: u16, remainder: u16) -> f32 {
    let upper = if remainder < 0x8000 { rounded } else { rounded.wrapping_sub(1) };
    f32::from_bits(u32::from(upper) << 16 | u32::from(remainder))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every upper half with the lower halves around which rounding changes.
    fn values() -> impl Iterator<Item = f32> {
        let lowers = [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff];
        (0..=u16::MAX).flat_map(move |upper| {
            lowers.map(|lower: u32| f32::from_bits(u32::from(upper) << 16 | lower))
        })
    }

    #[test]
    fn what_is_split_is_joined_to_the_bit_and_a_nan_stays_one() {
        for value in values() {
            let (rounded, remainder) = split(value);
            let joined = join(rounded, remainder);
            let copy = f32::from_bits(u32::from(rounded) << 16);
            if value.is_nan() {
                assert!(joined.is_nan() && copy.is_nan(), "{:#010x}", value.to_bits());
                assert_eq!(copy.is_sign_negative(), value.is_sign_negative());
            } else {
                assert_eq!(joined.to_bits(), value.to_bits(), "{rounded:#06x} {remainder:#06x}");
            }
        }
    }

    /// The formulas that the documentation of [`master`](crate::master) gives.
    #[test]
    fn the_halves_are_those_of_the_formulas() {
        for value in values().filter(|value| !value.is_nan()) {
            let bits = value.to_bits();
            let (rounded, remainder) = split(value);
            assert_eq!(u32::from(rounded), (bits + 0x8000) >> 16, "{bits:#010x}");
            assert_eq!(u32::from(remainder), bits & 0xffff, "{bits:#010x}");
            let both = u32::from(rounded) << 16 | u32::from(remainder);
            let carried = if remainder >= 0x8000 { 0x1_0000 } else { 0 };
            assert_eq!(both.wrapping_sub(carried), bits);
        }
    }

    /// In `f64`, where the difference to either neighbour is exact. After the last bf16 comes what its spacing says.
    #[test]
    fn the_copy_is_the_nearest_and_of_two_the_larger() {
        let magnitude = |upper: u16| match upper & 0x7fff {
            0x7f80 => 2.0_f64.powi(128),
            upper => f64::from(f32::from_bits(u32::from(upper) << 16)),
        };
        for value in values().filter(|value| value.is_finite()) {
            let upper = (value.to_bits() >> 16) as u16;
            let [below, above] =
                [upper, upper + 1].map(|near| (magnitude(near) - f64::from(value).abs()).abs());
            let nearest = if below < above { upper } else { upper + 1 };
            assert_eq!(split(value).0, nearest, "{value:e} {:#010x}", value.to_bits());
        }
    }
}
