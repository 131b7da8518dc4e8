//! The crews of this process that share a cache.
//!
//! The parts of a mixture, and a run's training and evaluation, have a crew each. What one of them
//! makes room for must not be what another needs next, and the limit must hold what all of them
//! need at once.

use std::{
    collections::HashMap,
    path::Path,
    sync::{Arc, Mutex, PoisonError, Weak},
};

use super::crew::Crew;
use crate::cache::disk::{Future, Key};

static CREWS: Mutex<Vec<Weak<Crew>>> = Mutex::new(Vec::new());

/// Lets a crew be known to those who come after it.
pub(super) fn join(crew: &Arc<Crew>) {
    let mut crews = CREWS.lock().unwrap_or_else(PoisonError::into_inner);
    crews.retain(|crew| crew.strong_count() > 0);
    crews.push(Arc::downgrade(crew));
}

/// Those who share the cache of a folder.
pub(super) fn of(folder: &Path) -> Vec<Arc<Crew>> {
    let crews = CREWS.lock().unwrap_or_else(PoisonError::into_inner);
    let crews: Vec<Arc<Crew>> = crews.iter().filter_map(Weak::upgrade).collect();
    // No other lock is held while a crew is asked.
    crews.into_iter().filter(|crew| crew.uses(folder)).collect()
}

/// Which shard is needed after how many others.
pub(super) type Ranks = Arc<HashMap<usize, u64>>;

/// What the crews of a cache know of the shards that they will need. Each counts in shards of its
/// own: the soonest need is what counts.
pub(super) struct Upcoming {
    crews: Vec<(Arc<Crew>, Ranks)>,
}

impl Upcoming {
    pub(super) fn of(folder: &Path) -> Upcoming {
        let crews = of(folder).into_iter().map(|crew| {
            let ranks = crew.ranks();
            (crew, ranks)
        });
        Upcoming { crews: crews.collect() }
    }
}

impl Future for Upcoming {
    fn next_use(&self, key: &Key) -> Option<u64> {
        let ranks = self.crews.iter().filter_map(|(crew, ranks)| ranks.get(&crew.shard_of(key)?));
        ranks.min().copied()
    }

    fn dropped(&self, key: &Key) {
        for (crew, _) in &self.crews {
            crew.forget(key);
        }
    }
}
