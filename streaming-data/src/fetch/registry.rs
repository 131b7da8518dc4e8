//! The prefetchers of this process that share a cache.
//!
//! The parts of a mixture, and a run's training and evaluation, have a prefetcher each. One of them must
//! not evict a shard that another needs next, and the limit must hold the shards that all of them need at once.

use std::{
    collections::HashMap,
    path::Path,
    sync::{Arc, Mutex, PoisonError, Weak},
};

use super::prefetcher::Prefetcher;
use crate::cache::disk::{FutureUse, Key};

static PREFETCHERS: Mutex<Vec<Weak<Prefetcher>>> = Mutex::new(Vec::new());

/// Makes a prefetcher known to the later ones.
pub(super) fn register(prefetcher: &Arc<Prefetcher>) {
    let mut prefetchers = PREFETCHERS.lock().unwrap_or_else(PoisonError::into_inner);
    prefetchers.retain(|prefetcher| prefetcher.strong_count() > 0);
    prefetchers.push(Arc::downgrade(prefetcher));
}

/// The prefetchers that share the cache of a folder.
pub(super) fn sharing(folder: &Path) -> Vec<Arc<Prefetcher>> {
    let prefetchers = PREFETCHERS.lock().unwrap_or_else(PoisonError::into_inner);
    let prefetchers: Vec<Arc<Prefetcher>> = prefetchers.iter().filter_map(Weak::upgrade).collect();
    // The list is unlocked while a prefetcher locks its state.
    prefetchers.into_iter().filter(|prefetcher| prefetcher.uses(folder)).collect()
}

/// How many other shards are needed before each.
pub(super) type Ranks = Arc<HashMap<usize, u64>>;

/// The future uses of cached shards, by all prefetchers of a cache. Each counts in its own shards; the
/// smallest number decides.
pub(super) struct UpcomingUses {
    prefetchers: Vec<(Arc<Prefetcher>, Ranks)>,
}

impl UpcomingUses {
    pub(super) fn of(folder: &Path) -> UpcomingUses {
        let prefetchers = sharing(folder).into_iter().map(|prefetcher| {
            let ranks = prefetcher.ranks();
            (prefetcher, ranks)
        });
        UpcomingUses { prefetchers: prefetchers.collect() }
    }
}

impl FutureUse for UpcomingUses {
    fn next_use(&self, key: &Key) -> Option<u64> {
        let ranks = self
            .prefetchers
            .iter()
            .filter_map(|(prefetcher, ranks)| ranks.get(&prefetcher.shard_of(key)?));
        ranks.min().copied()
    }

    fn evicted(&self, key: &Key) {
        for (prefetcher, _) in &self.prefetchers {
            prefetcher.forget(key);
        }
    }
}
