//! The floating-point environment of a thread: how the processor rounds, and how it treats denormal
//! numbers.
//!
//! Processors keep both in a register of each thread, and a new thread inherits it. A library built
//! with `-ffast-math` sets that register, when it is loaded or called, so that denormal numbers are
//! read and written as zeros. In an embedder's process this may happen before this crate is called,
//! and the second moments of small gradients are denormal. So all code that computes numbers for
//! weights runs in the [standard](FloatEnvironment::standard) environment.

use std::marker::PhantomData;

/// A floating-point environment that this thread is in until the value is dropped; then the one before comes back.
///
/// Values on one thread are dropped in the opposite order of their making, as locals are.
#[derive(Debug)]
#[must_use = "the environment ends with this value"]
pub struct FloatEnvironment {
    /// The thread's environment before this one; `None` where it was the same.
    before: Option<register::Control>,
    /// The register is a thread's own: a value that went to another thread would restore it there.
    of_this_thread: PhantomData<*const ()>,
}

impl FloatEnvironment {
    /// Denormal numbers are kept, results are rounded to the nearest, ties to even, and no exception interrupts: the environment
    /// that every process begins with, and that all bits are defined in. Costs a few cycles where the thread is in it already.
    pub fn standard() -> Self {
        Self::enter(register::STANDARD)
    }

    /// Denormal numbers are read and written as zeros, and results are rounded towards zero. Nothing should be computed in it:
    /// it is for tests, which show that results do not depend on the environment that a caller's thread is in.
    pub fn foreign() -> Self {
        Self::enter(register::FOREIGN)
    }

    /// `value`, with which nothing was computed before this call, nor will be after it what was computed with it up to here. The
    /// compiler knows of no environment: it moves operations on values in registers across the change of one, which only memory
    /// accesses stay behind. So what is computed with such values is given before the computation, and its results after it.
    #[inline]
    pub fn given<T>(&self, value: T) -> T {
        std::hint::black_box(value)
    }

    /// Leaves the thread in this environment for good: for threads of one's own.
    pub fn keep(self) {
        std::mem::forget(self);
    }

    #[inline]
    fn enter(wanted: register::Control) -> Self {
        let found = register::read();
        let before = (!register::is_alike(found, wanted)).then_some(found);
        if before.is_some() {
            register::write(register::with(found, wanted));
        }
        Self { before, of_this_thread: PhantomData }
    }
}

impl Drop for FloatEnvironment {
    #[inline]
    fn drop(&mut self) {
        if let Some(before) = self.before {
            register::write(before);
        }
    }
}

/// MXCSR, which all vector and scalar instructions of x86-64 obey.
#[cfg(target_arch = "x86_64")]
mod register {
    use std::arch::asm;

    pub(super) type Control = u32;

    /// Every exception masked, rounding to the nearest.
    pub(super) const STANDARD: Control = 0x1f80;
    /// Flush to zero (15), round towards zero (14 and 13), denormals are zeros (6).
    pub(super) const FOREIGN: Control = STANDARD | 1 << 15 | 0b11 << 13 | 1 << 6;

    /// The bits of the register that control arithmetic: neither the exception flags below them nor the reserved bits.
    const CONTROLS: Control = 0xffc0;

    #[inline]
    pub(super) fn read() -> Control {
        let mut value = 0_u32;
        // SAFETY: the instruction writes the four bytes of `value`.
        unsafe { asm!("stmxcsr [{}]", in(reg) &raw mut value, options(nostack, preserves_flags)) };
        value
    }

    /// A barrier for memory accesses: the compiler moves none across it, so values read from memory afterwards are computed with in
    /// the new environment.
    #[inline]
    pub(super) fn write(value: Control) {
        // SAFETY: the instruction reads the four bytes of `value`, in which no reserved bit is set:
        // the value came from the register, or differs from such a value in control bits only.
        unsafe {
            asm!("ldmxcsr [{}]", in(reg) &raw const value, options(nostack, preserves_flags))
        };
    }

    #[inline]
    pub(super) fn is_alike(found: Control, wanted: Control) -> bool {
        (found ^ wanted) & CONTROLS == 0
    }

    /// `found` with the controls of `wanted`.
    #[inline]
    pub(super) fn with(found: Control, wanted: Control) -> Control {
        found & !CONTROLS | wanted
    }
}

/// FPCR of 64-bit ARM.
#[cfg(target_arch = "aarch64")]
mod register {
    use std::arch::asm;

    pub(super) type Control = u64;

    /// No flushing, rounding to the nearest, no traps, NaNs handed on.
    pub(super) const STANDARD: Control = 0;
    /// Flush to zero (24), round towards zero (23 and 22).
    pub(super) const FOREIGN: Control = 1 << 24 | 0b11 << 22;

    #[inline]
    pub(super) fn read() -> Control {
        let value: u64;
        // SAFETY: any program may read the register.
        unsafe { asm!("mrs {}, fpcr", out(reg) value, options(nostack, preserves_flags)) };
        value
    }

    /// A barrier for memory accesses: the compiler moves none across it, so values read from memory afterwards are computed with in
    /// the new environment.
    #[inline]
    pub(super) fn write(value: Control) {
        // SAFETY: any program may write the register, and the bits set exist in it.
        unsafe { asm!("msr fpcr, {}", in(reg) value, options(nostack, preserves_flags)) };
    }

    #[inline]
    pub(super) fn is_alike(found: Control, wanted: Control) -> bool {
        found == wanted
    }

    #[inline]
    pub(super) fn with(_found: Control, wanted: Control) -> Control {
        wanted
    }
}

/// Processors whose register is not known here: what a thread has is taken for the standard.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
mod register {
    pub(super) type Control = ();

    pub(super) const STANDARD: Control = ();
    pub(super) const FOREIGN: Control = ();

    pub(super) fn read() -> Control {}

    pub(super) fn write((): Control) {}

    pub(super) fn is_alike((): Control, (): Control) -> bool {
        true
    }

    pub(super) fn with((): Control, (): Control) -> Control {}
}

#[cfg(all(test, any(target_arch = "x86_64", target_arch = "aarch64")))]
mod tests {
    use std::hint::black_box;

    use super::*;

    /// Half of a denormal number, and a sum whose last bit is rounded.
    fn results() -> [u32; 2] {
        let half = black_box(1e-40_f32) * black_box(0.5);
        let sum = black_box(1.0_f32) + black_box(f32::EPSILON * 0.75);
        [half.to_bits(), sum.to_bits()]
    }

    #[test]
    fn an_environment_ends_with_its_value() {
        let kept = results();
        assert_eq!(kept, [5e-41_f32.to_bits(), (1.0 + f32::EPSILON).to_bits()]);
        let foreign = FloatEnvironment::foreign();
        assert_eq!(results(), [0, 1.0_f32.to_bits()], "flushed, and rounded towards zero");
        {
            let _standard = FloatEnvironment::standard();
            assert_eq!(results(), kept);
            let _again = FloatEnvironment::standard();
            assert_eq!(results(), kept);
        }
        assert_eq!(results(), [0, 1.0_f32.to_bits()], "what the caller's thread had is back");
        drop(foreign);
        assert_eq!(results(), kept);
    }

    #[test]
    fn a_thread_of_ones_own_keeps_what_it_is_given() {
        let _foreign = FloatEnvironment::foreign();
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                FloatEnvironment::standard().keep();
                results()
            });
            let clean = { FloatEnvironment::standard() };
            let expected = results();
            drop(clean);
            assert_eq!(thread.join().unwrap(), expected);
        });
    }
}
