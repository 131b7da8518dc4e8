//! Matrix products of one device by a vendor's library, with a fixed algorithm.
//!
//! A library would choose an algorithm for each number of rows, and other algorithms round
//! differently. So it is asked once for [`CANONICAL_ROWS`](key::CANONICAL_ROWS) rows, and the
//! algorithm chosen from its answer ([`choose_algorithm`]) is used for any number of rows.
//!
//! Two libraries of one version may still choose differently, so the kind of device contains a
//! digest of the choices for some products ([`digest`]).

mod digest;
pub mod key;

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use self::key::Key;
use super::{Queue, Vendor, VendorDriver};
use crate::error::{KernelError, Result};
use crate::gpu::algorithm::sizes;
use crate::gpu::driver::MatrixProduct;
use crate::gpu::{Candidate, choose_algorithm};

/// Plans that are kept. There is one for each number of rows that was ever seen, and prompts have any length; making one again
/// takes microseconds.
const KEPT_PLANS: usize = 1024;

/// The reason why a library has not done what it was asked for, in the library's words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The library refuses, and would refuse again.
    Refuses(String),
    /// The library or the device has failed.
    Fails(String),
    /// Either. While an algorithm is chosen it is a refusal: a device that has failed says so itself.
    Unclear(String),
    /// The call is not possible while a graph is recorded.
    NotRecordable(&'static str),
}

impl Answer {
    /// The library's words.
    pub fn words(&self) -> &str {
        match self {
            Self::Refuses(words) | Self::Fails(words) | Self::Unclear(words) => words,
            Self::NotRecordable(attempted) => attempted,
        }
    }
}

pub type Answered<T> = std::result::Result<T, Answer>;

/// The way in which a library forms a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Batches {
    /// The whole batch by one call.
    Whole,
    /// Entry by entry, products by themselves.
    OneByOne,
}

/// A matrix library on one device, as far as libraries differ.
pub trait ProductLibrary: Send + Sync {
    /// The library's name.
    const NAME: &'static str;
    /// The way in which it forms a batch; with [`OneByOne`](Batches::OneByOne) it is given single products only.
    const BATCHES: Batches;
    /// The workspace that each product is given beside its operands, in bytes.
    const WORKSPACE_BYTES: usize;
    /// The library's name of an algorithm.
    type Algorithm: Copy + Send;
    /// The library's description of a product with a certain number of rows, ready to be enqueued.
    type Plan: Send + Sync;

    /// The library's order of algorithms for a product: those that can form it for any number of rows where they are free, as far as
    /// the library can tell.
    ///
    /// # Errors
    /// A refusal or an error of the library.
    fn candidates(
        &self,
        product: &MatrixProduct,
    ) -> Answered<impl Iterator<Item = Candidate<Self::Algorithm>>>;

    /// The numbers that define an algorithm, the same in every process; `None` for those that an older library does not know.
    fn parts(algorithm: &Self::Algorithm) -> Vec<Option<u32>>;

    /// The plan of `product` by `algorithm`.
    ///
    /// # Errors
    /// A refusal or an error of the library: such as that the algorithm cannot form that many rows.
    fn plan(&self, product: &MatrixProduct, algorithm: &Self::Algorithm) -> Answered<Self::Plan>;

    /// Enqueues a product by its plan.
    ///
    /// # Errors
    /// A refusal or an error of the library.
    ///
    /// # Safety
    /// As for [`Products::matmul`]; the plan is the product's.
    unsafe fn enqueue(
        &self,
        queue: &Queue,
        plan: &Self::Plan,
        product: &MatrixProduct,
    ) -> Answered<()>;
}

/// The algorithms and plans of products that were formed before.
struct Known<L: ProductLibrary> {
    algorithms: HashMap<Key, L::Algorithm>,
    plans: HashMap<Key, Arc<L::Plan>>,
    /// Products with a bias, and batches, that no algorithm forms as promised.
    refused: HashSet<Key>,
}

/// The products of one device.
pub struct Products<L: ProductLibrary> {
    library: L,
    device: String,
    known: Mutex<Known<L>>,
}

/// A digest of a library's choices: other choices give another digest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Digest {
    /// The digest of its first eligible proposals.
    pub value: u64,
    /// The number of products that were asked for and have an algorithm.
    pub products: usize,
}

impl<L: ProductLibrary> Products<L> {
    pub fn new(library: L, device: &str) -> Self {
        let known =
            Known { algorithms: HashMap::new(), plans: HashMap::new(), refused: HashSet::new() };
        Self { library, device: device.to_owned(), known: Mutex::new(known) }
    }

    /// The digest of what the library would choose for some products, if the first of its proposals that is eligible is taken.
    ///
    /// # Errors
    /// An error of the library.
    pub fn digest(&self) -> Result<Digest> {
        let start = Instant::now();
        let parts = |product: &MatrixProduct| {
            let batch = if L::BATCHES == Batches::Whole { product.batch } else { None };
            let product = &MatrixProduct { batch, ..*product };
            let candidates = self.library.candidates(product);
            let mut candidates = candidates.map_err(|answer| self.failed(product, answer))?;
            let first = candidates.find(|candidate| candidate.is_eligible(L::WORKSPACE_BYTES));
            Ok(first.map(|candidate| L::parts(&candidate.algorithm)))
        };
        let digest = digest::of(parts)?;
        let milliseconds = start.elapsed().as_millis();
        let Digest { value, products } = digest;
        tracing::debug!(value, products, milliseconds, "the matrix library's choices are known");
        Ok(digest)
    }

    /// An error for a library's answer: [`KernelError::Unsupported`] where it would answer the same again, so that starting again
    /// gains nothing.
    fn failed(&self, product: &MatrixProduct, answer: Answer) -> KernelError {
        let (device, sizes) = (self.device.clone(), sizes(product));
        match answer {
            Answer::Refuses(words) => KernelError::Unsupported {
                what: format!("form a matrix product of {sizes}"),
                device,
                answer: format!("{}: {words}", L::NAME),
            },
            Answer::Fails(words) | Answer::Unclear(words) => KernelError::Device {
                attempted: "a matrix product",
                device,
                answer: format!("{}: {words} for {sizes}", L::NAME),
            },
            Answer::NotRecordable(attempted) => KernelError::NotRecordable { attempted },
        }
    }

    /// The plan of a product; of the same algorithm for any m where rows are free.
    fn plan<V: Vendor>(
        &self,
        driver: &VendorDriver<V>,
        queue: &mut Queue,
        product: &MatrixProduct,
    ) -> Result<Arc<L::Plan>> {
        queue.make_workspace(driver.name(), V::WORKSPACE_BYTES)?;
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let key = Key::of(product, product.m);
        if let Some(plan) = known.plans.get(&key) {
            return Ok(Arc::clone(plan));
        }
        let pin = Key::pinned(product);
        let algorithm = match known.algorithms.get(&pin) {
            Some(algorithm) => *algorithm,
            None => {
                let algorithm = self.choose(driver, queue, product)?;
                known.algorithms.insert(pin, algorithm);
                algorithm
            }
        };
        let plan = self.library.plan(product, &algorithm);
        let plan = Arc::new(plan.map_err(|answer| self.failed(product, answer))?);
        if known.plans.len() >= KEPT_PLANS {
            known.plans.clear();
        }
        known.plans.insert(key, Arc::clone(&plan));
        Ok(plan)
    }

    fn choose<V: Vendor>(
        &self,
        driver: &VendorDriver<V>,
        queue: &mut Queue,
        product: &MatrixProduct,
    ) -> Result<L::Algorithm> {
        if queue.is_recording() {
            let attempted = "choosing the algorithm of a matrix product";
            return Err(KernelError::NotRecordable { attempted });
        }
        let candidates = self.library.candidates(product);
        let candidates = candidates.map_err(|answer| self.failed(product, answer))?;
        let multiply = |queue: &mut Queue, algorithm: &L::Algorithm, tried: MatrixProduct| {
            let formed = self.library.plan(&tried, algorithm).and_then(|plan| {
                // SAFETY: the operands lie in memory that is there while an algorithm is tried, each in its own.
                unsafe { self.library.enqueue(queue, &plan, &tried) }
            });
            formed.map_err(|answer| match answer {
                Answer::Unclear(words) => self.failed(&tried, Answer::Refuses(words)),
                answer => self.failed(&tried, answer),
            })
        };
        choose_algorithm(driver, queue, product, L::WORKSPACE_BYTES, candidates, multiply)
    }

    /// Whether there is an algorithm that forms `product`, which has a bias, as promised. For any number of rows the answer is the same.
    ///
    /// # Errors
    /// An error of the library, or an algorithm that is pinned and cannot form that many rows.
    #[cfg(feature = "cuda")]
    pub fn adds_bias<V: Vendor>(
        &self,
        driver: &VendorDriver<V>,
        queue: &mut Queue,
        product: &MatrixProduct,
    ) -> Result<bool> {
        Ok(self.plan_if_any(driver, queue, product)?.is_some())
    }

    /// The plan of a product with a bias, or of a batch; `None` where no algorithm forms it as promised, which is then so for any
    /// number of rows and entries.
    fn plan_if_any<V: Vendor>(
        &self,
        driver: &VendorDriver<V>,
        queue: &mut Queue,
        product: &MatrixProduct,
    ) -> Result<Option<Arc<L::Plan>>> {
        let pin = Key::pinned(product);
        let known = || self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if known().refused.contains(&pin) {
            return Ok(None);
        }
        match self.plan(driver, queue, product) {
            Ok(plan) => Ok(Some(plan)),
            Err(KernelError::Unsupported { .. }) if !known().algorithms.contains_key(&pin) => {
                known().refused.insert(pin);
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Enqueues a product, or those of a batch: one by one where the library is given no batch, or has no algorithm that forms it as
    /// promised.
    ///
    /// # Errors
    /// A product that no algorithm of the library forms as promised, or what made the library fail.
    ///
    /// # Safety
    /// As for [`Driver::matmul`](crate::gpu::Driver::matmul).
    pub unsafe fn matmul<V: Vendor>(
        &self,
        driver: &VendorDriver<V>,
        queue: &mut Queue,
        product: MatrixProduct,
    ) -> Result<()> {
        let plan = match (product.batch, L::BATCHES) {
            (None, _) => Some(self.plan(driver, queue, &product)?),
            (Some(_), Batches::Whole) => self.plan_if_any(driver, queue, &product)?,
            (Some(_), Batches::OneByOne) => None,
        };
        let Some(plan) = plan else {
            // SAFETY: the caller's promise is of every entry.
            return product
                .each()
                .try_for_each(|entry| unsafe { self.matmul(driver, queue, entry) });
        };
        // SAFETY: the caller's promise.
        let enqueued = unsafe { self.library.enqueue(queue, &plan, &product) };
        enqueued.map_err(|answer| self.failed(&product, answer))
    }
}
