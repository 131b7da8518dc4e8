//! The element types of device memory and of activations.

/// An element type that device memory can hold.
pub trait Element: bytemuck::Pod + Send + Sync + 'static {
    /// The name in reports and errors.
    const NAME: &'static str;
}
impl Element for f32 {
    const NAME: &'static str = "f32";
}
impl Element for f64 {
    const NAME: &'static str = "f64";
}
impl Element for u16 {
    const NAME: &'static str = "u16";
}
impl Element for u32 {
    const NAME: &'static str = "u32";
}
impl Element for half::bf16 {
    const NAME: &'static str = "bf16";
}

/// An element type of activations: what a precision rounds to.
pub trait ActivationElement: Element {
    /// Elements of a [remainder](crate::master) beside each element of a master: 1 where rounding takes the lower half of
    /// an fp32 away, 0 where it takes nothing.
    const REMAINDERS: usize;

    /// `value` to the nearest.
    fn rounded(value: f32) -> Self;
    /// The value, exactly.
    fn widened(self) -> f32;
}
impl ActivationElement for f32 {
    const REMAINDERS: usize = 0;

    fn rounded(value: f32) -> Self {
        value
    }
    fn widened(self) -> f32 {
        self
    }
}
impl ActivationElement for half::bf16 {
    const REMAINDERS: usize = 1;

    fn rounded(value: f32) -> Self {
        Self::from_f32(value)
    }
    fn widened(self) -> f32 {
        self.to_f32()
    }
}
