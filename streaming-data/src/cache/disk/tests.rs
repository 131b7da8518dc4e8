//! Which shards are evicted for which others.

use super::*;
use crate::{
    hash::ContentHash,
    store::{Location, Origin},
};

/// How many other shards are needed before each.
struct Known(Vec<(Key, u64)>);

impl FutureUse for &Known {
    fn next_use(&self, key: &Key) -> Option<u64> {
        self.0.iter().find(|(known, _)| known == key).map(|(_, rank)| *rank)
    }

    fn evicted(&self, _: &Key) {}
}

/// Shards of 10 bytes.
fn shard(content: [u8; 10]) -> Shard {
    let folder = Location::parse("memory://store/set").unwrap();
    Shard::new(&folder, "shard".to_owned(), 1, 10, Some(ContentHash::of(&content)))
}

fn key(content: [u8; 10]) -> Key {
    shard(content).key(Origin::of(["memory://store/set"]))
}

/// Asks to download a shard of these bytes.
fn admit(cache: &ShardCache, content: [u8; 10], priority: Priority, known: &Known) -> Admission {
    cache.admit(&key(content), priority, || known).unwrap()
}

/// Puts a shard of these bytes into the cache.
fn keep(cache: &ShardCache, content: [u8; 10], known: &Known) {
    let Admission::Granted(mut part) = admit(cache, content, Priority::Now, known) else {
        panic!("not admitted");
    };
    part.write(&content).unwrap();
    assert!(cache.complete(part, &shard(content)).unwrap().is_ok());
}

fn holds(cache: &ShardCache, content: [u8; 10]) -> bool {
    cache.find(&key(content), &shard(content)).unwrap().is_some()
}

#[test]
fn ahead_of_its_need_a_shard_evicts_none_that_is_needed_sooner() {
    let folder = tempfile::tempdir().unwrap();
    let cache = ShardCache::open(folder.path().to_owned(), Some(20)).unwrap();
    let [first, second, third, last] = [[1; 10], [2; 10], [3; 10], [9; 10]];
    let ranks = [(first, 0), (second, 1), (third, 2), (last, 9)];
    let known = Known(ranks.map(|(content, rank)| (key(content), rank)).to_vec());
    let ahead = |rank| Priority::Ahead { rank, before: rank };
    keep(&cache, first, &known);
    keep(&cache, second, &known);
    assert!(matches!(admit(&cache, third, ahead(2), &known), Admission::Full));
    // The stated need of the second has passed: its next one is after eight others.
    keep(&cache, last, &known);
    assert!(holds(&cache, first) && !holds(&cache, second) && holds(&cache, last));
    assert!(matches!(admit(&cache, second, ahead(0), &known), Admission::Full));
    assert!(matches!(admit(&cache, second, ahead(1), &known), Admission::Granted(_)));
    assert!(holds(&cache, first) && !holds(&cache, last));
}

#[test]
fn a_full_disk_waits_for_downloads_in_progress() {
    let folder = tempfile::tempdir().unwrap();
    let cache = ShardCache::open(folder.path().to_owned(), Some(100)).unwrap();
    let [now, soon, later] = [[0; 10], [1; 10], [2; 10]];
    let known = Known(vec![(key(now), 0), (key(soon), 1), (key(later), 2)]);
    let ahead = |before| Priority::Ahead { rank: before, before };
    let evict_one = |priority| cache.evict_one(priority, || &known).unwrap();
    assert!(matches!(evict_one(Priority::Now), Eviction::Impossible));
    keep(&cache, now, &known);
    keep(&cache, soon, &known);
    assert!(matches!(evict_one(ahead(1)), Eviction::Impossible));
    let part = admit(&cache, later, Priority::Now, &known);
    assert!(matches!(part, Admission::Granted(_)));
    assert!(matches!(evict_one(ahead(1)), Eviction::Pending));
    assert!(matches!(evict_one(Priority::Now), Eviction::Done));
    assert!(holds(&cache, now) && !holds(&cache, soon));
    assert!(matches!(evict_one(Priority::Now), Eviction::Pending));
    drop(part);
    assert!(matches!(evict_one(Priority::Now), Eviction::Impossible));
    assert!(holds(&cache, now));
}

#[test]
fn shards_in_use_are_never_evicted() {
    let folder = tempfile::tempdir().unwrap();
    let cache = ShardCache::open(folder.path().to_owned(), Some(20)).unwrap();
    let [first, second, third] = [[1; 10], [2; 10], [3; 10]];
    let known = Known(vec![(key(third), 0)]);
    keep(&cache, first, &known);
    keep(&cache, second, &known);
    // Neither is needed again, and one of them is being read.
    let in_use = cache.find(&key(first), &shard(first)).unwrap().unwrap();
    assert!(matches!(admit(&cache, third, Priority::Now, &known), Admission::Granted(_)));
    assert!(holds(&cache, first) && !holds(&cache, second));
    keep(&cache, third, &known);
    assert!(matches!(cache.evict_one(Priority::Now, || &known).unwrap(), Eviction::Impossible));
    assert!(matches!(admit(&cache, second, Priority::Now, &known), Admission::Full));
    drop(in_use);
    assert!(matches!(cache.evict_one(Priority::Now, || &known).unwrap(), Eviction::Done));
    assert!(!holds(&cache, first) && holds(&cache, third));
}

#[test]
fn an_overdue_shard_is_downloaded_beside_another_download_of_it() {
    let folder = tempfile::tempdir().unwrap();
    let cache = ShardCache::open(folder.path().to_owned(), None).unwrap();
    let known = Known(Vec::new());
    let Admission::Granted(mut other) = admit(&cache, [1; 10], Priority::Now, &known) else {
        panic!("not admitted");
    };
    assert!(matches!(admit(&cache, [1; 10], Priority::Now, &known), Admission::InProgress));
    let Admission::Granted(mut own) = admit(&cache, [1; 10], Priority::Overdue, &known) else {
        panic!("not admitted beside it");
    };
    own.write(&[1; 10]).unwrap();
    assert!(cache.complete(own, &shard([1; 10])).unwrap().is_ok());
    assert!(
        matches!(admit(&cache, [1; 10], Priority::Overdue, &known), Admission::InProgress),
        "it is there"
    );
    // The other download goes on after all.
    other.write(&[1; 10]).unwrap();
    assert!(cache.complete(other, &shard([1; 10])).unwrap().is_ok());
    assert!(holds(&cache, [1; 10]));
}
