//! Stored floating-point bytes to fp32.

use safetensors::Dtype;

/// Bytes of one element of a type that can be read, or nothing for a type that cannot.
pub(super) fn element_bytes(dtype: Dtype) -> Option<usize> {
    match dtype {
        Dtype::F32 => Some(4),
        Dtype::F16 | Dtype::BF16 => Some(2),
        _ => None,
    }
}

/// Decodes the elements of little-endian `bytes`; `out` has room for all of them.
pub(super) fn decode(dtype: Dtype, bytes: &[u8], out: &mut [f32]) {
    let halves = bytes.as_chunks::<2>().0;
    match dtype {
        Dtype::F32 => {
            for (value, stored) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *value = f32::from_le_bytes(*stored);
            }
        }
        Dtype::BF16 => {
            for (value, stored) in out.iter_mut().zip(halves) {
                *value = f32::from_bits(u32::from(u16::from_le_bytes(*stored)) << 16);
            }
        }
        Dtype::F16 => {
            for (value, stored) in out.iter_mut().zip(halves) {
                *value = half(u16::from_le_bytes(*stored));
            }
        }
        other => unreachable!("{other} is refused when a file is opened"),
    }
}

/// IEEE 754 binary16 to fp32, exactly.
fn half(bits: u16) -> f32 {
    let sign = u32::from(bits >> 15) << 31;
    let exponent = u32::from(bits >> 10) & 0x1f;
    let fraction = u32::from(bits) & 0x3ff;
    match exponent {
        // Subnormal: fraction * 2^-24, which is exact in fp32.
        0 => f32::from_bits(sign | (fraction as f32 / 16_777_216.0).to_bits()),
        0x1f => f32::from_bits(sign | 0x7f80_0000 | fraction << 13),
        // Exponents are biased by 15 there and by 127 here.
        _ => f32::from_bits(sign | (exponent + 112) << 23 | fraction << 13),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_are_exact() {
        for (bits, value) in [
            (0x0000, 0.0),
            (0x3c00, 1.0),
            (0xc000, -2.0),
            (0x7bff, 65504.0),
            (0x0400, 6.103_515_6e-5),
            (0x0001, 5.960_464_5e-8),
            (0x83ff, -6.097_555e-5),
            (0x3555, 0.333_251_95),
            (0x7c00, f32::INFINITY),
            (0xfc00, f32::NEG_INFINITY),
        ] {
            assert_eq!(half(bits), value, "{bits:#06x}");
        }
        assert!(half(0x7e00).is_nan());
        assert_eq!(half(0x8000).to_bits(), (-0.0_f32).to_bits());
    }

    #[test]
    fn bytes_are_little_endian() {
        let mut out = [f32::NAN; 2];
        decode(Dtype::BF16, &[0x80, 0x3f, 0x00, 0xc0], &mut out);
        assert_eq!(out, [1.0, -2.0]);
        decode(Dtype::F16, &[0x00, 0x3c, 0x00, 0xc0], &mut out);
        assert_eq!(out, [1.0, -2.0]);
        decode(Dtype::F32, &[0, 0, 0x80, 0x3f, 0, 0, 0, 0xc0], &mut out);
        assert_eq!(out, [1.0, -2.0]);
    }
}
