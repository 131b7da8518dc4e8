//! What is dropped for what.

use super::*;
use crate::{hash::ContentHash, store::Location};

/// What is needed after how many others.
struct Known(Vec<(Key, u64)>);

impl Future for &Known {
    fn next_use(&self, key: &Key) -> Option<u64> {
        self.0.iter().find(|(known, _)| known == key).map(|(_, rank)| *rank)
    }

    fn dropped(&self, _: &Key) {}
}

/// Shards of 10 bytes.
fn shard(content: [u8; 10]) -> Shard {
    let folder = Location::parse("memory://store/set").unwrap();
    Shard::new(&folder, "shard".to_owned(), 1, 10, Some(ContentHash::of(&content)))
}

fn key(content: [u8; 10]) -> Key {
    shard(content).key(Origin::of(["memory://store/set"]))
}

/// Room for a shard of these bytes, or what there is in place of it.
fn begin(cache: &ShardCache, content: [u8; 10], urgency: Urgency, known: &Known) -> Room {
    cache.begin(&key(content), urgency, || known).unwrap()
}

/// Puts a shard of these bytes into the cache.
fn land(cache: &ShardCache, content: [u8; 10], known: &Known) {
    let Room::Part(mut part) = begin(cache, content, Urgency::Now, known) else {
        panic!("no room");
    };
    part.write(&content).unwrap();
    assert!(cache.land(part, &shard(content)).unwrap().is_ok());
}

fn holds(cache: &ShardCache, content: [u8; 10]) -> bool {
    cache.find(&key(content), &shard(content)).unwrap().is_some()
}

#[test]
fn ahead_of_its_need_a_shard_takes_no_room_of_one_that_is_needed_sooner() {
    let folder = tempfile::tempdir().unwrap();
    let cache = ShardCache::open(folder.path().to_owned(), Some(20)).unwrap();
    let [first, second, third, last] = [[1; 10], [2; 10], [3; 10], [9; 10]];
    let ranks = [(first, 0), (second, 1), (third, 2), (last, 9)];
    let known = Known(ranks.map(|(content, rank)| (key(content), rank)).to_vec());
    let ahead = |rank| Urgency::Ahead { rank, before: rank };
    land(&cache, first, &known);
    land(&cache, second, &known);
    assert!(matches!(begin(&cache, third, ahead(2), &known), Room::None));
    // The need of the claim has passed: what is left is the next, after eight others.
    land(&cache, last, &known);
    assert!(holds(&cache, first) && !holds(&cache, second) && holds(&cache, last));
    assert!(matches!(begin(&cache, second, ahead(0), &known), Room::None));
    assert!(matches!(begin(&cache, second, ahead(1), &known), Room::Part(_)));
    assert!(holds(&cache, first) && !holds(&cache, last));
}

#[test]
fn a_full_disk_waits_for_what_is_on_its_way() {
    let folder = tempfile::tempdir().unwrap();
    let cache = ShardCache::open(folder.path().to_owned(), Some(100)).unwrap();
    let [now, soon, later] = [[0; 10], [1; 10], [2; 10]];
    let known = Known(vec![(key(now), 0), (key(soon), 1), (key(later), 2)]);
    let ahead = |before| Urgency::Ahead { rank: before, before };
    let drop_one = |urgency| cache.drop_one(urgency, || &known).unwrap();
    assert!(matches!(drop_one(Urgency::Now), Freed::None));
    land(&cache, now, &known);
    land(&cache, soon, &known);
    assert!(matches!(drop_one(ahead(1)), Freed::None));
    let part = begin(&cache, later, Urgency::Now, &known);
    assert!(matches!(part, Room::Part(_)));
    assert!(matches!(drop_one(ahead(1)), Freed::Later));
    assert!(matches!(drop_one(Urgency::Now), Freed::One));
    assert!(holds(&cache, now) && !holds(&cache, soon));
    assert!(matches!(drop_one(Urgency::Now), Freed::Later));
    drop(part);
    assert!(matches!(drop_one(Urgency::Now), Freed::None));
    assert!(holds(&cache, now));
}

#[test]
fn what_is_in_use_is_never_dropped() {
    let folder = tempfile::tempdir().unwrap();
    let cache = ShardCache::open(folder.path().to_owned(), Some(20)).unwrap();
    let [first, second, third] = [[1; 10], [2; 10], [3; 10]];
    let known = Known(vec![(key(third), 0)]);
    land(&cache, first, &known);
    land(&cache, second, &known);
    // Neither is needed again, and one of them is being read.
    let in_use = cache.find(&key(first), &shard(first)).unwrap().unwrap();
    assert!(matches!(begin(&cache, third, Urgency::Now, &known), Room::Part(_)));
    assert!(holds(&cache, first) && !holds(&cache, second));
    land(&cache, third, &known);
    assert!(matches!(cache.drop_one(Urgency::Now, || &known).unwrap(), Freed::None));
    assert!(matches!(begin(&cache, second, Urgency::Now, &known), Room::None));
    drop(in_use);
    assert!(matches!(cache.drop_one(Urgency::Now, || &known).unwrap(), Freed::One));
    assert!(!holds(&cache, first) && holds(&cache, third));
}

#[test]
fn what_another_is_at_is_begun_beside_it_at_last() {
    let folder = tempfile::tempdir().unwrap();
    let cache = ShardCache::open(folder.path().to_owned(), None).unwrap();
    let known = Known(Vec::new());
    let Room::Part(mut other) = begin(&cache, [1; 10], Urgency::Now, &known) else {
        panic!("no room");
    };
    assert!(matches!(begin(&cache, [1; 10], Urgency::Now, &known), Room::OnItsWay));
    let Room::Part(mut own) = begin(&cache, [1; 10], Urgency::AtLast, &known) else {
        panic!("no room beside it");
    };
    own.write(&[1; 10]).unwrap();
    assert!(cache.land(own, &shard([1; 10])).unwrap().is_ok());
    assert!(
        matches!(begin(&cache, [1; 10], Urgency::AtLast, &known), Room::OnItsWay),
        "it is there"
    );
    // The other goes on after all.
    other.write(&[1; 10]).unwrap();
    assert!(cache.land(other, &shard([1; 10])).unwrap().is_ok());
    assert!(holds(&cache, [1; 10]));
}
