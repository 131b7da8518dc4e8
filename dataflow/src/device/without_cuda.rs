//! NVIDIA GPUs, in a build that leaves them out.

use super::choice::{Gpus, NoGpu};
use super::{Precision, WithBackend};
use crate::error::{JobError, Result};

const LEFT_OUT: &str = "this program was built without the feature cuda";

pub(super) fn usable_gpus() -> std::result::Result<Gpus, NoGpu> {
    Err(NoGpu { why: LEFT_OUT.to_owned(), gpus: 0, failure: None })
}

pub(super) fn open<W: WithBackend>(_: &[usize], _: Precision, _: W) -> Result<W::Output> {
    let (key, why) = ("device.backend", LEFT_OUT.to_owned());
    Err(JobError::Device { key, backend: "cuda", why })
}
