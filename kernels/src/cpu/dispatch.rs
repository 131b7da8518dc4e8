//! Chooses, at run time, the instruction set that a kernel's loop is compiled for.

use super::simd::Simd;
use super::simd::portable::Portable;
#[cfg(target_arch = "x86_64")]
use super::simd::{avx2::Avx2, avx512::Avx512};
use crate::error::{KernelError, Result};
use crate::float_environment::FloatEnvironment;

/// The ways to run the vectorised loops; all give the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum InstructionSet {
    /// AVX-512 F, BW, DQ and VL, with AVX2 and FMA.
    Avx512,
    /// AVX2 and FMA.
    Avx2,
    /// Plain code, as the compiler translates it; slow on x86-64, where a fused multiply-add becomes a call.
    Portable,
}

impl InstructionSet {
    /// Every instruction set, the fastest first.
    pub const ALL: [Self; 3] = [Self::Avx512, Self::Avx2, Self::Portable];

    /// The name in errors.
    pub fn name(self) -> &'static str {
        match self {
            Self::Avx512 => "AVX-512",
            Self::Avx2 => "AVX2 with FMA",
            Self::Portable => "portable",
        }
    }

    /// Whether this processor has it.
    pub fn is_available(self) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                Self::Avx2.is_available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
            #[cfg(not(target_arch = "x86_64"))]
            Self::Avx512 | Self::Avx2 => false,
            Self::Portable => true,
        }
    }

    /// The fastest that this processor has.
    pub fn best() -> Self {
        let fastest = Self::ALL.into_iter().find(|set| set.is_available());
        fastest.unwrap_or(Self::Portable)
    }
}

/// A kernel's loop, generic over the instruction set; `run` must be `#[inline(always)]`.
pub(crate) trait Kernel {
    type Output;
    fn run<S: Simd>(self, simd: S) -> Self::Output;
}

/// An instruction set that this processor has: constructing one is the check.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dispatch(InstructionSet);

impl Dispatch {
    pub(crate) fn best() -> Self {
        Self(InstructionSet::best())
    }

    /// # Errors
    /// An instruction set that this processor lacks.
    pub(crate) fn new(set: InstructionSet) -> Result<Self> {
        if set.is_available() {
            Ok(Self(set))
        } else {
            Err(KernelError::InstructionSet { name: set.name() })
        }
    }

    /// The instruction set, which this processor has.
    pub(crate) fn instruction_set(self) -> InstructionSet {
        self.0
    }

    /// Runs `kernel` compiled for this instruction set, in the standard floating-point environment; the caller's comes back
    /// afterwards.
    #[inline]
    pub(crate) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        let standard = FloatEnvironment::standard();
        let kernel = standard.given(kernel);
        match self.0 {
            // SAFETY: `Dispatch` was constructed by finding the instruction set available.
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx512 => unsafe { run_avx512(kernel) },
            // SAFETY: `Dispatch` was constructed by finding the instruction set available.
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx2 => unsafe { run_avx2(kernel) },
            _ => kernel.run(Portable),
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn run_avx512<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: this function's own features are the ones asked for.
    kernel.run(unsafe { Avx512::assume_available() })
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn run_avx2<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: this function's own features are the ones asked for.
    kernel.run(unsafe { Avx2::assume_available() })
}
