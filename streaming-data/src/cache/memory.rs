//! A cache that is bounded in bytes and loads each value once for all threads.
//!
//! Shuffled samples come from a few row groups at a time, which several threads want at once.
//! Decoding a row group once and keeping it until the window has passed makes a window
//! shuffle cheap; the bound makes a full shuffle of a huge data set possible.
//!
//! Contract: a value is loaded by the thread that misses it, outside of the lock, while others
//! that want the same value wait for it; when the load fails or panics the next waiter tries
//! itself. The least recently used values are dropped when the sum of sizes exceeds the bound, and
//! a value larger than the bound is handed out but not kept. Values in use stay alive beyond that
//! through their `Arc`.

use std::{
    collections::{BTreeMap, HashMap},
    hash::Hash,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

/// The cost of a value.
pub(crate) trait Weigh {
    /// Memory that the value holds.
    fn weight_bytes(&self) -> usize;
}

/// See the [module](self).
pub(crate) struct BoundedCache<K, V> {
    bound_bytes: usize,
    content: Mutex<Content<K, V>>,
    loaded: Condvar,
    /// How often a load has ended.
    loads: AtomicU64,
}

struct Content<K, V> {
    /// `None` while a thread loads the value.
    entries: HashMap<K, Option<Entry<V>>>,
    /// Keys by when they were used last; holds exactly the loaded entries.
    by_use: BTreeMap<u64, K>,
    uses: u64,
    held_bytes: usize,
}

struct Entry<V> {
    value: Arc<V>,
    weight_bytes: usize,
    last_use: u64,
}

impl<K: Copy + Eq + Hash, V: Weigh> BoundedCache<K, V> {
    pub(crate) fn new(bound_bytes: usize) -> BoundedCache<K, V> {
        let content =
            Content { entries: HashMap::new(), by_use: BTreeMap::new(), uses: 0, held_bytes: 0 };
        BoundedCache {
            bound_bytes,
            content: Mutex::new(content),
            loaded: Condvar::new(),
            loads: AtomicU64::new(0),
        }
    }

    /// The value of the key, loaded when it is not held.
    pub(crate) fn get_or_load<E>(
        &self,
        key: K,
        load: impl FnOnce() -> Result<V, E>,
    ) -> Result<Arc<V>, E> {
        let mut content = self.lock();
        loop {
            match content.entries.get(&key) {
                Some(Some(_)) => return Ok(content.touch(key)),
                Some(None) => {
                    content = self.loaded.wait(content).unwrap_or_else(PoisonError::into_inner);
                }
                None => break,
            }
        }
        self.load(key, content, load)
    }

    /// Loads a value that is neither held nor being loaded.
    fn load<E>(
        &self,
        key: K,
        mut content: MutexGuard<'_, Content<K, V>>,
        load: impl FnOnce() -> Result<V, E>,
    ) -> Result<Arc<V>, E> {
        content.entries.insert(key, None);
        drop(content);

        // From here until the value is in place the key is ours to release, on every way out.
        let mut claim = Claim { cache: self, key, is_held: true };
        let value = Arc::new(load()?);
        let weight_bytes = value.weight_bytes();
        if weight_bytes <= self.bound_bytes {
            self.lock().insert(key, Arc::clone(&value), weight_bytes, self.bound_bytes);
            // It may be dropped at once, and be claimed by another thread.
            claim.is_held = false;
        }
        drop(claim);
        Ok(value)
    }

    /// The value of the key, loaded when it is not held and `may_load`; none while another thread loads
    /// it, and when it is not held and may not be loaded.
    pub(crate) fn try_get_or_load<E>(
        &self,
        key: K,
        may_load: bool,
        load: impl FnOnce() -> Result<V, E>,
    ) -> Result<Option<Arc<V>>, E> {
        let mut content = self.lock();
        match content.entries.get(&key) {
            Some(Some(_)) => return Ok(Some(content.touch(key))),
            Some(None) => return Ok(None),
            None if !may_load => return Ok(None),
            None => {}
        }
        self.load(key, content, load).map(Some)
    }

    /// How often a thread has loaded a value, or failed to.
    pub(crate) fn loads(&self) -> u64 {
        self.loads.load(Ordering::Acquire)
    }

    /// Whether the value is held or being loaded.
    pub(crate) fn holds(&self, key: &K) -> bool {
        self.lock().entries.contains_key(key)
    }

    /// The value of the key, where it is held.
    pub(crate) fn get(&self, key: K) -> Option<Arc<V>> {
        let mut content = self.lock();
        matches!(content.entries.get(&key), Some(Some(_))).then(|| content.touch(key))
    }

    /// Keeps a value that was made otherwise than by [`get_or_load`](Self::get_or_load), unless it
    /// is held or being loaded.
    pub(crate) fn put(&self, key: K, value: V) -> Arc<V> {
        let value = Arc::new(value);
        let weight_bytes = value.weight_bytes();
        let mut content = self.lock();
        if weight_bytes <= self.bound_bytes && !content.entries.contains_key(&key) {
            content.insert(key, Arc::clone(&value), weight_bytes, self.bound_bytes);
        }
        value
    }

    fn lock(&self) -> MutexGuard<'_, Content<K, V>> {
        // Nothing panics while the content is half changed: the lock is used poisoned or not.
        self.content.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<K: Copy + Eq + Hash, V> Content<K, V> {
    /// The value of a key that is held, now the most recently used.
    fn touch(&mut self, key: K) -> Arc<V> {
        self.uses += 1;
        let entry = self.entries.get_mut(&key).and_then(Option::as_mut).expect("key is held");
        self.by_use.remove(&entry.last_use);
        self.by_use.insert(self.uses, key);
        entry.last_use = self.uses;
        Arc::clone(&entry.value)
    }

    fn insert(&mut self, key: K, value: Arc<V>, weight_bytes: usize, bound_bytes: usize) {
        while self.held_bytes + weight_bytes > bound_bytes {
            let Some((_, oldest)) = self.by_use.pop_first() else { break };
            if let Some(Some(dropped)) = self.entries.remove(&oldest) {
                self.held_bytes -= dropped.weight_bytes;
            }
        }
        self.uses += 1;
        self.held_bytes += weight_bytes;
        self.by_use.insert(self.uses, key);
        self.entries.insert(key, Some(Entry { value, weight_bytes, last_use: self.uses }));
    }
}

/// A key that is being loaded. Dropping this wakes the threads that wait, and releases the key if no value
/// came.
struct Claim<'a, K: Copy + Eq + Hash, V: Weigh> {
    cache: &'a BoundedCache<K, V>,
    key: K,
    /// Whether the key still has no value.
    is_held: bool,
}

impl<K: Copy + Eq + Hash, V: Weigh> Drop for Claim<'_, K, V> {
    fn drop(&mut self) {
        if self.is_held {
            self.cache.lock().entries.remove(&self.key);
        }
        self.cache.loads.fetch_add(1, Ordering::Release);
        self.cache.loaded.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::{
        convert::Infallible,
        panic::{AssertUnwindSafe, catch_unwind},
        sync::{
            Barrier,
            atomic::{AtomicUsize, Ordering},
        },
        thread,
    };

    use super::*;

    impl Weigh for usize {
        fn weight_bytes(&self) -> usize {
            *self
        }
    }

    /// Asks for a value of a weight; whether it had to be loaded.
    fn loads(cache: &BoundedCache<u8, usize>, key: u8, weight: usize) -> bool {
        let mut loaded = false;
        let value = cache.get_or_load(key, || {
            loaded = true;
            Ok::<_, Infallible>(weight)
        });
        assert_eq!(*value.unwrap(), weight);
        loaded
    }

    /// Bytes and values held.
    fn held(cache: &BoundedCache<u8, usize>) -> (usize, usize) {
        let content = cache.lock();
        assert_eq!(content.by_use.len(), content.entries.len());
        (content.held_bytes, content.by_use.len())
    }

    #[test]
    fn least_recently_used_goes_first_and_the_bound_holds() {
        let cache = BoundedCache::new(10);
        assert!(loads(&cache, 1, 4));
        assert!(loads(&cache, 2, 4));
        assert!(!loads(&cache, 1, 4));
        assert!(loads(&cache, 3, 4)); // drops 2
        assert!(!loads(&cache, 1, 4));
        assert!(loads(&cache, 2, 4)); // drops 3
        assert_eq!(held(&cache), (8, 2));
        assert!(loads(&cache, 9, 11)); // larger than the bound: not kept, drops nothing
        assert!(loads(&cache, 9, 11));
        assert!(!loads(&cache, 1, 4));
        assert!(loads(&cache, 4, 10)); // drops all
        assert_eq!(held(&cache), (10, 1));
    }

    #[test]
    fn threads_that_miss_together_load_once() {
        let cache = BoundedCache::<u8, usize>::new(10);
        let (count, together) = (AtomicUsize::new(0), Barrier::new(4));
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    together.wait();
                    let value = cache.get_or_load(7, || {
                        count.fetch_add(1, Ordering::Relaxed);
                        Ok::<_, Infallible>(3)
                    });
                    assert_eq!(*value.unwrap(), 3);
                });
            }
        });
        assert_eq!(count.into_inner(), 1);
    }

    #[test]
    fn a_load_that_fails_or_panics_leaves_the_key_to_the_next() {
        let cache = BoundedCache::<u8, usize>::new(10);
        assert_eq!(cache.get_or_load(1, || Err("broken")), Err("broken"));
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            cache.get_or_load(1, || -> Result<usize, Infallible> { panic!("on purpose") })
        }));
        assert!(panicked.is_err());
        assert!(loads(&cache, 1, 5));
    }
}
